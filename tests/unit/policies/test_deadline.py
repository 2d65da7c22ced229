"""When a rank is late: policies on histories made by hand, and a user's own in training."""

import math

import pytest
import torch

from straggle import FixedDeadline, History, LateHandling, QuantileDeadline
from straggle.policies.deadline import WaitForAll, as_deadline, grace_after
from straggle.policies.history import HistoryWindow

NAN = math.nan


def history(compute_s, num_steps=None, finished=None):
    times = torch.tensor(compute_s, dtype=torch.float64)
    done = torch.ones_like(times, dtype=torch.bool) if finished is None else torch.tensor(finished)
    return History(len(times) if num_steps is None else num_steps, times, done)


@pytest.mark.parametrize(("num_steps", "expected"), [(0, math.inf), (2, math.inf), (3, 0.5), (99, 0.5)])
def test_fixed_deadline_is_its_budget_after_the_warmup(num_steps, expected):
    assert FixedDeadline(0.5, warmup_steps=3).decide(history([[1.0, 2.0]], num_steps)) == expected


@pytest.mark.parametrize(
    ("q", "slack", "compute_s", "expected"),
    [
        (0.5, 1.0, [[1.0, 2.0], [3.0, 4.0]], 2.5),
        (0.5, 1.2, [[1.0, 2.0], [3.0, 4.0]], 1.2 * 2.5),
        (1.0, 2.0, [[1.0, 2.0, 8.0]], 16.0),
        (0.0, 1.0, [[1.0, 2.0, 8.0]], 1.0),
        (0.75, 1.0, [[1.0, 1.0, 1.0, 9.0]], 3.0),  # interpolated: the slow one of four sets in at 0.75
        (0.5, 1.0, [[1.0, NAN, 3.0, NAN]], 2.0),  # a rank that never entered says nothing
        (0.5, 1.0, [[NAN, NAN]], math.inf),
    ],
)
def test_quantile_deadline_is_slack_times_the_quantile_of_all_times(q, slack, compute_s, expected):
    policy = QuantileDeadline(q, slack, warmup_steps=1)
    assert policy.decide(history(compute_s)) == pytest.approx(expected)


@pytest.mark.parametrize("missing", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 4), (50, 8)])
def test_quantile_is_torchs_whatever_is_missing(shape, missing):
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(shape, generator=generator, dtype=torch.float64)
    times[torch.rand(shape, generator=generator) < missing] = NAN
    times[-1, -1] = 0.25  # one at least is known
    for q in (0.0, 0.1, 0.5, 0.75, 0.9, 0.99, 1.0):
        policy = QuantileDeadline(q, 1.0, warmup_steps=1)
        assert policy.decide(history(times.tolist())) == pytest.approx(torch.nanquantile(times, q).item(), rel=1e-12)


def test_quantile_deadline_waits_for_everyone_in_the_warmup():
    policy = QuantileDeadline(0.5, 1.0, window=2, warmup_steps=4)
    assert [policy.decide(history([[1.0, 1.0]] * 2, steps)) for steps in (1, 3, 4)] == [math.inf, math.inf, 1.0]


def test_quantile_deadline_that_is_too_tight_for_all_widens():
    policy = QuantileDeadline(0.5, 1.5, window=1, warmup_steps=1)
    deadline_s = 1.0
    for _ in range(3):  # all ranks are stopped at the deadline
        deadline_s = policy.decide(history([[deadline_s] * 2], finished=[[False, False]]))
    assert deadline_s == pytest.approx(1.5**3)


def test_without_a_deadline_nobody_is_late():
    assert WaitForAll().decide(history([[1.0]], 10**6)) == math.inf


def test_quorum_is_half_of_the_ranks_but_at_least_one():
    assert [LateHandling().quorum_of(size) for size in (1, 2, 3, 4, 5, 8)] == [1, 1, 1, 2, 2, 4]
    assert LateHandling(quorum=3).quorum_of(4) == 3


GRACE = [(0.0, 0.005), (0.02, 0.005), (0.08, 0.008), (0.3, 0.03), (0.6, 0.05), (math.inf, 0.05)]


@pytest.mark.parametrize(("deadline_s", "grace_s"), GRACE)
@pytest.mark.parametrize("granularity", ["stage", "step"])
def test_grace_is_a_tenth_of_the_deadline_from_5_to_50_ms(granularity, deadline_s, grace_s):
    late_handling = LateHandling(granularity=granularity)
    assert late_handling.grace_of(deadline_s) == pytest.approx(grace_s)
    of_many = grace_after(torch.tensor([[deadline_s]] * 2, dtype=torch.float64), late_handling.fixed_grace_s)
    assert of_many.tolist() == [[pytest.approx(grace_s)]] * 2


@pytest.mark.parametrize("deadline_s", [0.0, 0.08, 0.3, math.inf])
@pytest.mark.parametrize(
    ("late_handling", "grace_s"),
    [
        (LateHandling(grace_s=0.0), 0.0),
        (LateHandling(grace_s=2.0), 2.0),
        (LateHandling(grace_s=0.02, granularity="microbatch"), 0.02),
        (LateHandling(granularity="microbatch"), 0.05),  # a deadline does not say how long a micro-batch takes
    ],
)
def test_grace_that_is_given_and_that_of_micro_batches_follow_no_deadline(late_handling, grace_s, deadline_s):
    assert late_handling.grace_of(deadline_s) == grace_s
    assert grace_after(torch.tensor([[deadline_s]]), late_handling.fixed_grace_s).tolist() == [[pytest.approx(grace_s)]]


def test_deadline_is_a_policy_or_seconds_or_nothing():
    policy = QuantileDeadline(0.5)
    assert as_deadline(policy) is policy
    assert isinstance(as_deadline(None), WaitForAll)
    assert as_deadline(2).budget_s == 2.0


def fill(window, count, start=0):
    for step in range(start, start + count):
        window.append([step, 10.0 * step], [True, step % 2 == 0])
    return window.read()


@pytest.mark.parametrize("window", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 10])
def test_window_holds_the_last_steps_oldest_first(window, count):
    seen = fill(HistoryWindow(window, 2), count)
    steps = list(range(max(0, count - window), count))
    assert seen.num_steps == count
    assert seen.compute_s.tolist() == [[step, 10.0 * step] for step in steps]
    assert seen.finished.tolist() == [[True, step % 2 == 0] for step in steps]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_restored_window_goes_on_as_one_that_never_stopped(count):
    original, restored = HistoryWindow(3, 2), HistoryWindow(3, 2)
    saved = fill(original, count)
    restored.restore(History(saved.num_steps, saved.compute_s.clone(), saved.finished.clone()))
    for window in (original, restored):
        fill(window, 4, start=count)
    assert restored.read().num_steps == original.read().num_steps == count + 4
    assert torch.equal(restored.read().compute_s, original.read().compute_s)
    assert torch.equal(restored.read().finished, original.read().finished)
