"""Deadlines where ranks are absent, or stood in for, in the steps that the policy sees."""

import math

import pytest
import torch
from telemetry_rows import row_of

from straggle import AutoDeadline, LateHandling, QuantileDeadline
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import absent_row
from straggle.policies.deadline import next_deadline
from straggle.policies.history import HistoryWindow
from straggle.policies.price import kept
from straggle.policies.what_if.recorded_steps import quorum_times
from straggle.policies.what_if.step_model import StopRules
from straggle.report import CAUSES

STAGES, STEPS = 4, 12
SHARE = torch.full((STAGES,), 1 / STAGES)


def there(seconds, cause=-1):
    ends = tuple(seconds * share for share in (0.4, 0.6, 0.8, 1.0))
    return of(compute_s=seconds, computed=(1.0,) * STAGES, stage_s=ends, microbatch_s=(seconds,), cause=cause)


def of(**fields):
    return row_of(**{"busy_s": 0.1, "estimated": (0.0,) * STAGES, **fields}).encode()


ABSENT = absent_row(STAGES)
NOTHING = {"compute_s": math.nan, "computed": (0.0,) * STAGES, "stage_s": (math.nan,) * STAGES}
STOOD_IN = of(late=True, stood_in=True, cause=CAUSES.index("data"), **NOTHING)
IDLE = of(idle=True, **NOTHING)
LOST = there(0.1, CAUSES.index("members"))


def seen(*rows):
    """The history of steps with these rows."""
    window = HistoryWindow(STEPS, len(rows))
    window.watch(SHARE)
    for _ in range(STEPS):
        table = Table(torch.stack(rows), STAGES)
        history = window.append(table.compute_s(), table.finished_ranks(), table.progress(SHARE, "stage"))
    return history


def decided(policy, *rows, granularity="stage"):
    """Its deadline after steps with these rows."""
    policy.prepare(LateHandling(granularity=granularity), [1] * STAGES)
    window = HistoryWindow(policy.window, len(rows))
    window.watch(SHARE)
    for _ in range(STEPS):
        table = Table(torch.stack(rows), STAGES)
        history = window.append(table.compute_s(), table.finished_ranks(), table.progress(SHARE, granularity))
        after = next_deadline(policy, history)
    return after.seconds


@pytest.mark.parametrize("granularity", ["stage", "microbatch", "step"])
@pytest.mark.parametrize("rows", [[STOOD_IN, ABSENT], [ABSENT, ABSENT], [STOOD_IN], [IDLE, STOOD_IN, ABSENT]])
def test_no_deadline_where_no_rank_entered_a_step(rows, granularity):
    assert decided(AutoDeadline(), *rows, granularity=granularity) == math.inf


@pytest.mark.parametrize("others", [[ABSENT], [ABSENT, ABSENT], [ABSENT, IDLE]])
def test_deadline_of_the_only_member_is_by_its_own_times(others):
    assert decided(AutoDeadline(max_over_median=3.0), there(0.1), *others) == pytest.approx(0.3)
    assert decided(QuantileDeadline(0.5), there(0.1), *others) == decided(QuantileDeadline(0.5), there(0.1))


@pytest.mark.parametrize(
    ("end_s", "members", "expected"),
    [
        ([4.0, 1.0, 3.0, 2.0], [True] * 4, 2.0),  # two of four
        ([4.0, 1.0, 3.0, 2.0], [True, False, True, True], 2.0),  # one of three
        ([4.0, 0.0, 3.0, 0.0], [True, False, True, False], 3.0),  # one of two, and not those that are out
        ([4.0, 0.0, 0.0, 0.0], [True, False, False, False], 4.0),
        ([0.0, 0.0, 0.0, 0.0], [False] * 4, 0.0),
    ],
)
def test_quorum_is_of_the_members_of_each_step(end_s, members, expected):
    times = quorum_times(torch.tensor([end_s]), torch.tensor([members]), LateHandling().quorum_among)
    assert times.tolist() == [expected]


@pytest.mark.parametrize(
    ("quorum", "members", "expected"), [(None, 4, 2), (None, 3, 1), (None, 1, 1), (3, 4, 3), (3, 2, 2)]
)
def test_quorum_is_never_more_than_the_members(quorum, members, expected):
    late_handling = LateHandling(quorum=quorum)
    assert late_handling.quorum_among(members) == expected
    assert late_handling.quorum_among(members, wanted=1) == 1
    rules = StopRules.of(AutoDeadline(), late_handling, 5, members)
    assert rules.quorum == expected + 5 - members  # the absent are as finished when the step begins


def test_what_dropping_kept_is_of_the_members():
    late = of(compute_s=0.2, computed=(1.0, 1.0, 0.0, 0.0), stage_s=(0.1, 0.15, math.nan, math.nan), late=True)
    found = [seen(there(0.1), late, *absent) for absent in ([], [ABSENT, ABSENT])]
    waiting_s = torch.full((STEPS,), 0.4)
    alone, among = (kept(history.progress, history.compute_s, waiting_s) for history in found)
    assert alone.num_steps == STEPS
    assert among == alone


@pytest.mark.parametrize("absent", [1, 2, 4])
def test_absent_ranks_change_nothing_in_what_is_chosen_for_the_others(absent):
    others = [there(0.1), there(0.12), there(0.5)]
    alone, among = AutoDeadline(every=1), AutoDeadline(every=1)
    assert decided(among, *others, *[ABSENT] * absent) == decided(alone, *others) < 0.5
    assert among.chosen is not None
    assert alone.chosen is not None
    assert among.chosen.dropped == pytest.approx(alone.chosen.dropped)


@pytest.mark.parametrize("rows", [[LOST, LOST, ABSENT], [LOST, STOOD_IN, ABSENT], [LOST]])
def test_deadline_where_all_was_lost_in_a_change_of_members_is_a_number(rows):
    assert 0 < decided(AutoDeadline(), *rows) < math.inf
