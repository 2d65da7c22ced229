"""Policies that look at how ranks came through a step: on histories made by hand, against closed forms, in training."""

import math
import random
from array import array
from dataclasses import replace

import pytest
import torch
from histories import history
from telemetry_rows import row_of

from straggle import (
    AutoDeadline,
    Deadline,
    DropBudget,
    FirstK,
    FixedDeadline,
    History,
    LateHandling,
    NextDeadline,
    Progress,
    QuantileDeadline,
    Shadow,
)
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import MICROBATCH_SLOTS
from straggle.policies.history import HistoryWindow, ProgressRow, StepProgress
from straggle.policies.price import kept, vary_together
from straggle.policies.what_if.recorded_steps import StepTimes, outcomes
from straggle.policies.what_if.step_model import StopRules, computed_share, simulate_step
from straggle.policies.what_if.untruncated import (
    UntruncatedTime,
    untruncated_entries,
    untruncated_step,
    untruncated_times,
)
from straggle.policies.wrappers import dropped_per_stage

NAN, INF = math.nan, math.inf


# -- the first k


def test_ranks_ask_for_the_first_k_only_when_these_may_have_finished():
    times = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.5, 1.0, 5.0, 4.0]], dtype=torch.float64)
    finished = torch.tensor([[True] * 4, [True, False, True, True]])  # who was stopped after 1 s is not among them
    assert FirstK(2).decide(History(2, times, finished)) == pytest.approx(0.8 * 2.0)
    assert FirstK(2).decide(History(2, times, ~finished)) == 0.0
    assert FirstK(2, warmup_steps=3).decide(History(2, times, finished)) == INF


# -- the budget


def steps_of_fate(policy, num_steps, ranks, stages, draw):
    """What is dropped when a rank is stopped before some stage in every step that has a deadline."""
    window = HistoryWindow(policy.window, ranks)
    window.watch(torch.full((stages,), 1 / stages))
    dropped, deadline_s = [], INF
    for _ in range(num_steps):
        computed = torch.ones(ranks, stages)
        if deadline_s < INF:
            for rank in range(1, ranks):  # the first to finish is never late
                computed[rank, draw(stages) :] = 0.0
        dropped.append(1 - computed.mean(0))
        units = torch.ones(ranks, stages)
        step = StepProgress(units, units / stages, computed, torch.ones(ranks), torch.zeros(ranks), torch.tensor(0.0))
        done = window.append([1.0] * ranks, (computed == 1).all(1).tolist(), step)
        deadline_s = policy.decide(done).seconds
    return torch.stack(dropped)


@pytest.mark.parametrize(("share", "over"), [(0.05, 20), (0.1, 30), (0.5, 2), (1.0, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_budget_is_kept_over_every_window_and_stage(share, over, seed):
    generator = random.Random(seed)
    policy = DropBudget(FixedDeadline(0.5), share, window=over)
    dropped = steps_of_fate(policy, 150, 4, 3, lambda stages: generator.randrange(stages + 1))
    in_windows = dropped.unfold(0, over, 1).mean(-1)
    assert float(in_windows.max()) <= share + 1e-6
    assert dropped.sum() > 0


def test_budget_of_everything_changes_nothing():
    worst = steps_of_fate(DropBudget(FixedDeadline(0.5), 1.0, window=10), 50, 4, 2, lambda _: 0)
    assert torch.allclose(worst[1:], torch.tensor(0.75))


def test_weight_of_a_rank_counts_in_what_it_drops_and_a_rank_without_data_drops_nothing():
    computed = torch.tensor([[[1.0], [0.0], [0.0]]])
    progress = Progress(
        torch.ones(1, 3, 1),
        torch.ones(1, 3, 1),
        computed,
        torch.ones(1),
        torch.tensor([[1.0, 3.0, 0.0]]),
        torch.zeros(1, 3),
        torch.zeros(1),
    )
    assert dropped_per_stage(progress).item() == pytest.approx(0.75)


# -- no rank


@pytest.mark.parametrize("around", [Shadow, lambda inner: DropBudget(inner, 1.0)])
def test_policy_around_another_shows_it_what_it_would_see_alone(around):
    class Seen(Deadline):
        window = 2

        def decide(self, history):
            self.compute_s = history.compute_s.tolist()
            return 7.0

    inner = Seen()
    policy = around(inner)
    assert policy.decide(history([[[1.0]], [[2.0]], [[3.0]]])) == NextDeadline(7.0)
    assert inner.compute_s == [[2.0], [3.0]]


# -- the threshold


def test_delay_of_a_rank_that_never_entered_belongs_to_that_step():
    steps = torch.tensor([[[1.0]] * 3, [[1.0], [NAN], [NAN]], [[1.0], [1.0], [NAN]], [[1.0]] * 3])
    entered_s = torch.tensor([[0.1] * 3, [0.1, 1.0, 1.0], [0.1, 0.3, 1.0], [0.1, 0.1, 0.5]])
    seen = history(steps, entered_s=entered_s)
    whole = untruncated_entries(seen.progress, seen.compute_s)
    assert torch.allclose(whole, torch.tensor([[0.1] * 3, [0.1, 1.3, 2.5], [0.1, 0, 0], [0.1, 0.1, 0]]))


RULES = {
    "stage": StopRules(quorum=2, grace_s=0.7),
    "microbatch": StopRules(quorum=2, grace_s=0.7, finish_running=True),
    "step": StopRules(quorum=2, grace_s=0.7, drop_all=True),
}


@pytest.mark.parametrize("granularity", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_outcomes_of_many_deadlines_are_those_of_each_by_the_model_of_a_step(granularity, seed):
    generator, rules = torch.Generator().manual_seed(seed), RULES[granularity]
    unit_s = torch.rand(6, 4, 7, generator=generator, dtype=torch.float64).exp().cumsum(-1)
    held_up = torch.rand(6, 4, generator=generator, dtype=torch.float64) < 0.3
    entered_s = (20 * torch.rand(6, 4, generator=generator, dtype=torch.float64)).where(held_up, 0.1)
    overhead_s = torch.rand(6, generator=generator, dtype=torch.float64)
    end_s = entered_s + unit_s[..., -1]
    steps = StepTimes(unit_s, torch.full_like(unit_s, 1 / 7), entered_s, overhead_s, end_s.kthvalue(2, 1).values)
    tau_s = torch.linspace(2.0, 14.0, 20, dtype=torch.float64)
    lags_s = torch.rand(20, generator=generator, dtype=torch.float64)
    done = outcomes(steps, tau_s, lags_s, rules)
    waiting_s = float((end_s.amax(1) + overhead_s).mean())
    for number, (one_s, lag_s) in enumerate(zip(tau_s.tolist(), lags_s.tolist(), strict=True)):
        alone = replace(rules, after_quorum_s=lag_s)
        would = simulate_step(unit_s, one_s, alone, entered_s)
        brought = float(computed_share(unit_s, would, alone).mean())
        assert done.brought[number].item() == pytest.approx(brought)
        step_s = float((would.seconds + overhead_s).mean())
        assert done.gain[number].item() == pytest.approx(brought * waiting_s / step_s - 1)
    assert bool((done.brought < 0.99).any())


def test_times_of_what_was_not_finished_are_those_of_the_peers_times_the_ranks_slowness():
    quick = torch.tensor([1.0, 1.5, 2.0, 2.5])
    whole = torch.stack([quick, quick, 2 * quick]).expand(20, 3, 4).clone()
    seen = whole.clone()
    seen[5:, 2, 2:] = NAN  # stopped after two units of four, in all of the last steps
    stopped_s = torch.tensor([2.5, 2.5, 3.1]).expand(20, 3)
    made = history(seen)
    assert torch.allclose(untruncated_times(made.progress, stopped_s).float(), whole)


def test_time_of_a_stall_is_not_taken_for_slowness():
    quick = torch.tensor([1.0, 1.5, 2.0, 2.5])
    seen = quick.expand(20, 3, 4).clone()
    seen[7, 2] = torch.tensor([9.0, NAN, NAN, NAN])
    stopped_s = torch.full((20, 3), 2.5)
    stopped_s[7, 2] = 9.2
    whole = untruncated_times(history(seen).progress, stopped_s)
    assert whole[7, 2].tolist() == pytest.approx([9.0, 9.5, 10.0, 10.5])


def test_time_of_a_whole_micro_batch_says_nothing_of_its_stages():
    stages = torch.tensor([1.0, 1.5, 2.5]).expand(20, 3, 3).clone()
    seen = torch.cat([stages[..., -1:], torch.full((20, 3, 1), NAN), stages], -1)  # two slots for micro-batches
    seen[7, 2] = NAN  # stopped in its forward pass
    stopped_s = torch.full((20, 3), 2.5)
    stopped_s[7, 2] = 0.7
    share = [0.0, 0.0, 0.25, 0.25, 0.5]
    whole = untruncated_times(history(seen, unit_share=share).progress, stopped_s)
    assert torch.allclose(whole[..., 2:].float(), stages)


def test_rank_that_never_entered_has_no_time():
    seen = torch.tensor([[[1.0, 2.0], [NAN, NAN]]])
    assert untruncated_times(history(seen).progress, torch.tensor([[2.0, NAN]]))[0, 1].isnan().all()


def test_step_that_no_rank_finished_takes_at_least_what_it_took():
    # as where the members change, and all that was on its way is lost: there is no peer to compare with
    never = [NAN] * 16
    times = untruncated_step([0.5, 0.25], [False, False], [1, 1], [never, never], [[NAN], [0.25]])
    assert times == [UntruncatedTime(0.5, at_least=True), UntruncatedTime(0.25, at_least=True)]


def entered_at_once(unit_s):
    """Steps of equal units that all ranks enter when they begin."""
    at_once = torch.zeros_like(unit_s[..., 0])
    return StepTimes(unit_s, torch.full_like(unit_s, 1 / unit_s.shape[-1]), at_once, at_once[:, 0], at_once[:, 0])


def dropped(steps, tau_s, rules, parts=()):
    done = outcomes(steps, torch.tensor([tau_s]), torch.zeros(1), rules, parts, whole_parts=bool(parts))
    return 1 - done.brought.item()


def test_drop_counts_running_stages_in_part_and_running_microbatches_whole_or_not():
    steps = entered_at_once(torch.tensor([[[2.0, 3.0], [4.0, 8.0]]]))
    drops = [dropped(steps, 5.0, StopRules(quorum=1), parts) for parts in ((1, 1), (1, 2), (1, 8))]
    assert drops == [pytest.approx(0.5 * left / 2) for left in (0.0, 0.5, 0.75)]  # of the slow rank's second stage
    running = [StopRules(quorum=1, finish_running=True, grace_s=grace_s) for grace_s in (3.0, 2.9)]
    assert [dropped(steps, 5.0, rules) for rules in running] == [pytest.approx(0.0), pytest.approx(0.25)]
    assert dropped(steps, 3.0, StopRules(quorum=1), (1, 1)) == pytest.approx(0.5)  # in its forward pass


def one_slow(factor, steps=30, stages=6):
    quick = torch.linspace(1.0, 2.0, stages)
    return torch.stack([quick, quick, quick, factor * quick]).expand(steps, 4, stages)


def test_auto_deadline_stops_a_slow_rank_and_says_what_that_drops():
    policy = AutoDeadline()
    policy.prepare(LateHandling(), [1] * 6)
    decided = policy.decide(history(one_slow(3.0)))
    seconds = decided.seconds
    assert 2.0 <= seconds < 3.2
    assert policy.chosen.gain > 0.3
    # the slow rank has the first stage after 3 s, and each other 0.6 s later; a stage that it has begun still counts
    stages = 0 if seconds < 3.0 else 2
    assert decided.predicted_drop == pytest.approx((6 - stages) / 6 / 4, abs=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1.005])
def test_auto_deadline_is_a_bound_only_where_there_is_nothing_to_gain(factor):
    policy = AutoDeadline(max_over_median=1.5)
    decided = policy.decide(history(one_slow(factor)))
    assert decided.seconds == pytest.approx(1.5 * 2.0)
    assert decided.predicted_drop == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("entered_s", [0.0, 0.5])
def test_auto_deadline_does_not_wait_in_the_middle_of_a_unit(entered_s):
    """A slow rank stops where its peers are done, whatever the unit that it is in."""
    quick, slow = torch.tensor([1.0, 2.0, 3.0, 3.2, 3.4]), torch.tensor([2.2, 4.4, 6.6, 7.0, 7.5])
    policy, unit_s = AutoDeadline(), torch.stack([quick, quick, quick, slow]).expand(30, 4, 5)
    assert 3.3 < policy.decide(history(unit_s, entered_s=torch.full((30, 4), entered_s))).seconds < 3.45


def test_auto_deadline_counts_the_micro_batch_that_a_late_rank_first_finishes():
    """Any threshold above 3.5 s has the slow rank compute until 5 s; by the rule it would end with its second one."""
    quick, slow = torch.tensor([1.0, 2.0, 3.0, 3.2, 3.4]), torch.tensor([2.0, 3.5, 5.0, 5.5, 6.0])
    policy = AutoDeadline()
    policy.prepare(LateHandling(granularity="microbatch", grace_s=10.0))
    assert 3.4 <= policy.decide(history(torch.stack([quick, quick, quick, slow]).expand(30, 4, 5))).seconds < 3.5


def test_auto_deadline_does_not_count_a_rank_without_data():
    unit_s = one_slow(1.0).clone()
    unit_s[:, 3] = NAN
    seen = history(unit_s)
    seen.progress.weight[:, 3] = 0.0
    decided = AutoDeadline().decide(seen)
    assert decided.seconds == pytest.approx(1.4 * 2.0)
    assert decided.predicted_drop == pytest.approx(0.0, abs=1e-6)


def test_auto_deadline_learns_nothing_from_a_step_for_which_nobody_has_data():
    """Every epoch of ranks that have not all as many batches ends with one."""
    unit_s = one_slow(3.0).clone()
    unit_s[29] = NAN
    seen, whole = history(unit_s), history(one_slow(3.0, 29))
    seen.progress.weight[29] = 0.0
    assert AutoDeadline().decide(seen) == AutoDeadline().decide(whole)


def test_ranks_without_data_make_a_quorum_as_they_do_in_training():
    """With two of four without data, the quorum of two waits from the begin: a slow rank can be stopped."""
    unit_s = one_slow(3.0).clone()
    unit_s[:, :2] = NAN
    seen = history(unit_s)
    seen.progress.weight[:, :2] = 0.0
    assert AutoDeadline().decide(seen).seconds < 4.0


def test_auto_deadline_gives_a_rank_that_enters_within_the_grace_its_time():
    """All are done at 2; one enters at 2.5 in every third step, and is done 2 later, or stood in for."""
    times, entered_s, drops = one_slow(1.0), torch.zeros(30, 4), []
    entered_s[::3, 1] = 2.5
    for grace_s in (0.1, 1.0):
        policy = AutoDeadline(every=1, max_over_median=1.1)
        policy.prepare(LateHandling(grace_s=grace_s), [1] * 6)
        drops.append(policy.decide(history(times, 32, entered_s=entered_s)).predicted_drop)
    assert drops == [pytest.approx(1 / 12), pytest.approx(0.0, abs=1e-6)]


@pytest.mark.parametrize("stood_in", [False, True])
def test_auto_deadline_does_not_wait_for_ranks_that_enter_late(stood_in):
    """In every third step one rank loads for two steps' time, which may be known only from its being stood in for."""
    times, entered_s = one_slow(1.0).double().clone(), torch.zeros(30, 4)
    entered_s[::3, 1] = 4.0
    if stood_in:
        times[::3, 1] = NAN
        entered_s[::3, 1], entered_s[1::3, 1] = 2.5, 1.5
    policy = AutoDeadline(every=1, max_over_median=3.0)
    decided = policy.decide(history(times, 32, entered_s=entered_s))
    assert 2.0 <= decided.seconds < 2.3
    assert decided.predicted_drop == pytest.approx(1 / 12, abs=1e-6)


@pytest.mark.parametrize("every", [7, 25])
def test_auto_deadline_is_a_function_of_the_history_alone(every):
    """One that has decided at every step, and one that begins at any of them, as a resumed run does, say the same."""
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(90, 4, 3, generator=generator).exp().cumsum(-1)
    times[:, 3] *= 2
    going_on = AutoDeadline(window=20, every=every)
    for end in range(1, 91):
        seen = history(times[max(0, end - going_on.window) : end], end)
        assert AutoDeadline(window=20, every=every).decide(seen) == going_on.decide(seen)


@pytest.mark.parametrize("every", [7, 10, 25])
def test_auto_deadline_chooses_in_each_of_its_first_steps(every):
    """What the first steps say of a job is little, and wrong where the first step of all is slow."""
    times = one_slow(1.0, 60).clone()
    times[8::2, 3] *= 3  # not for good
    policy = AutoDeadline(warmup_steps=3, every=every, window=20)
    decided, chosen = [], []
    for end in range(1, 60):
        decided.append(policy.decide(history(times[max(0, end - policy.window) : end], end)).seconds)
        chosen.append(policy.chosen)
    assert [seconds == math.inf for seconds in decided[:4]] == [True, True, False, False]
    assert decided[8] == decided[7]  # one slow step of six is within the noise
    assert decided[10] != decided[7]  # the second is not
    choices = [end for end in range(2, 60) if chosen[end - 1] is not chosen[end - 2]]
    assert choices == sorted({*range(3, 13), *range(3, 60, every)})


def test_auto_deadline_follows_a_rank_that_recovers():
    policy = AutoDeadline(window=20, every=5)
    times = torch.cat([one_slow(3.0, 40), one_slow(1.0, 40)])
    decided = [policy.decide(history(times[max(0, end - policy.window) : end], end)).seconds for end in range(10, 81)]
    assert decided[0] < 4.0
    assert decided[-1] == pytest.approx(1.4 * 2.0)


def busy(steps, seed):
    """All four ranks take six times as long in every second 20 steps, each with noise of 5 %."""
    generator = torch.Generator().manual_seed(seed)
    swing = 1 + 5 * (torch.arange(steps) // 20 % 2)
    factor = swing.view(-1, 1, 1) * (1 + 0.05 * torch.randn(steps, 4, 1, generator=generator))
    return factor * torch.linspace(1.0, 2.0, 6)


def test_auto_deadline_does_not_swing_with_the_machine():
    """Late is relative: while all ranks are slow none is late, and a stall in the next step is not waited for."""
    times, policy = busy(300, seed=0), AutoDeadline()
    decided = [policy.decide(history(times[max(0, end - policy.window) : end], end)).seconds for end in range(30, 301)]
    assert max(decided) < 1.1 * min(decided)
    assert max(decided) < 1.5 * 2.0  # and not six times as long


def test_auto_deadline_waits_for_all_where_no_rank_came_to_any_step():
    seen = history(torch.full((30, 4, 6), NAN))
    decided = AutoDeadline().decide(seen)
    assert decided.seconds == INF
    assert decided.predicted_drop == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_auto_deadline_drops_little_where_ranks_differ_by_noise_only(seed):
    generator = torch.Generator().manual_seed(seed)
    times = (1 + 0.04 * torch.randn(50, 6, 1, generator=generator)) * torch.linspace(1.0, 2.0, 6)
    assert AutoDeadline().decide(history(times)).predicted_drop < 0.01


def test_ranks_that_seem_to_share_a_machine_by_chance_are_seen_over_more_steps():
    """In one window of fifty, independent ranks vary together as much as those of a busy machine do."""
    generator = torch.Generator().manual_seed(177)
    times = (0.3 * torch.randn(75, 5, 6, generator=generator)).exp().cumsum(-1)
    assert vary_together(times[25:, :, -1])
    chooses_now = 77
    assert AutoDeadline().decide(history(times[25:], chooses_now)).predicted_drop < 0.01
    assert AutoDeadline().decide(history(times, chooses_now)).predicted_drop > 0.05


def stopped(lag_s):
    """75 steps of ranks that vary by themselves, in which one that is late at 5.5 s stops ``lag_s`` after that."""
    generator = torch.Generator().manual_seed(3)
    times = (0.3 * torch.randn(75, 5, 6, generator=generator)).exp().cumsum(-1).double()
    stop_s = times[..., -1].kthvalue(2, dim=1).values.clamp(min=5.5).unsqueeze(1)
    seen = history(times, 77, computed=(times <= stop_s.unsqueeze(2)).double())  # after which it chooses
    return replace(seen, compute_s=times[..., -1].minimum(stop_s + lag_s))


@pytest.mark.parametrize(
    ("lag_s", "gain", "dealt", "drops"),
    [
        (0.3, 0.023, False, True),  # a fifth of the 12 % that were dropped: a gain all the same
        (0.3, 0.023, True, False),  # where ranks have what they have time for, it is noise
        (0.6, -0.02, False, False),
    ],
)
def test_what_was_dropped_of_ranks_that_vary_by_themselves_need_only_have_been_a_gain(lag_s, gain, dealt, drops):
    seen = stopped(lag_s)
    last = seen.last(50)
    unit_s = untruncated_times(last.progress, last.compute_s)
    assert kept(last.progress, last.compute_s, unit_s.amax((1, 2))).gain == pytest.approx(gain, abs=0.005)
    assert (AutoDeadline().decide(replace(seen, dealt=dealt)).predicted_drop > 0.05) == drops


# -- the model of a step


THREE, TWO = [[1.0, 2.0], [1.0, 3.0], [2.0, 10.0]], [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]
GRACE = {"quorum": 1, "grace_s": 0.5}


@pytest.mark.parametrize(
    ("unit_s", "deadline_s", "rules", "at", "expected"),
    [
        (THREE, 2.5, {"quorum": 1}, {}, {
            "late": [False, True, True], "end_s": [2.0, 2.5, 2.5], "seconds": 2.5,
            "reached": [[True, True], [True, False], [True, False]],
        }),
        (THREE, 2.5, {"quorum": 2}, {}, {"late": [False, False, True]}),
        (THREE, 0.0, {"quorum": 2, "after_quorum_s": 0.5}, {}, {"seconds": 3.5}),
        (THREE, INF, {"quorum": 1}, {}, {"seconds": 10.0}),
        # all that a late rank has is dropped
        (TWO, 5.0, {"quorum": 1, "drop_all": True}, {}, {"end_s": [3.0, 5.0], "share": [[1.0] * 3, [0.0] * 3]}),
        # a late rank finishes what it has begun, within the grace; its last unit is in time
        (TWO, 3.0, {"quorum": 1, "finish_running": True, "grace_s": 1.0}, {},
         {"end_s": [3.0, 4.0], "reached": [[True] * 3, [True, True, False]]}),
        (TWO, 3.0, {"quorum": 1, "finish_running": True, "grace_s": 0.5}, {},
         {"end_s": [3.0, 3.5], "reached": [[True] * 3, [True, False, False]]}),
        ([[1.0, 2.0], [2.0, 4.0]], 3.5, {"quorum": 1, "finish_running": True, "grace_s": 1.0}, {},
         {"end_s": [2.0, 4.0], "late": [False, False]}),
        # the deadline counts from each rank's entering
        ([[1.0], [1.0]], 0.5, {"quorum": 1, "grace_s": 0.4}, {"entered_s": [0.0, 1.25]},
         {"end_s": [1.0, 1.75], "late": [False, True]}),
        # a rank that has not entered is stood in for: at the quorum, and the grace
        *(([[1.0, 2.0], [0.1, 2.0]], 0.5, {**GRACE, "finish_running": finish_running}, {"entered_s": [0.0, 2.75]}, {
            "late": [False, True], "end_s": [2.0, 2.5], "stood_in": [False, True], "own_s": [2.0, 0.0],
            "reached": [[True, True], [False, False]], "share": [[1.0, 1.0], [0.0, 0.0]],
        }) for finish_running in (False, True)),
        # one that is behind as soon as a quorum waits, if it is not back before that
        ([[2.0], [1.0]], 4.0, GRACE, {"entered_s": [0.0, 3.0], "behind": [False, True]},
         {"end_s": [2.0, 2.0], "stood_in": [False, True]}),
        ([[2.0], [1.0]], 4.0, GRACE, {"entered_s": [0.0, 1.5], "behind": [False, True]},
         {"end_s": [2.0, 2.5], "stood_in": [False, False]}),
        # and its deadline counts from the step's begin: one stall is not paid twice
        ([[2.0, 4.0]] * 3, 5.0, {"quorum": 1, "grace_s": 9.0},
         {"entered_s": [0.0, 3.0, 3.0], "behind": [False, True, False]},
         {"end_s": [4.0, 5.0, 7.0], "own_s": [4.0, 2.0, 4.0], "late": [False, True, False],
          "reached": [[True, True], [True, False], [True, True]]}),
    ],
)  # fmt: skip
def test_outcome_of_a_step_in_closed_form(unit_s, deadline_s, rules, at, expected):
    unit_s, rules = torch.tensor(unit_s), StopRules(**rules)
    cut = simulate_step(unit_s, deadline_s, rules, **{name: torch.tensor(own) for name, own in at.items()})
    share = computed_share(unit_s, cut, rules).tolist()
    found = {name: share if name == "share" else getattr(cut, name).tolist() for name in expected}
    assert found == expected


def test_outcome_has_the_grace_of_each_deadline_if_none_is_given():
    """One rank is done at 0.02; the other has not entered when it is stood in for, or is in one piece of work."""
    rules = StopRules.of(FixedDeadline(1.0), LateHandling(quorum=1), 2)
    deadline_s, stood_in_at = torch.tensor([0.02, 0.08, 0.3, 0.9]), [0.025, 0.088, 0.33, 0.95]
    loads = simulate_step(torch.tensor([[0.02], [0.02]]), deadline_s, rules, torch.tensor([0.0, 5.0]).expand(4, 2))
    assert loads.seconds.tolist() == pytest.approx(stood_in_at)
    in_one_piece = replace(rules, checks=1)
    computes = simulate_step(torch.tensor([[0.01, 0.02], [0.01, 5.0]]).expand(4, 2, 2), deadline_s, in_one_piece)
    assert computes.seconds.tolist() == pytest.approx(stood_in_at)


def test_outcome_of_many_steps_is_that_of_each():
    unit_s = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    deadline_s = torch.linspace(0.5, 2.5, 5)
    many = simulate_step(unit_s, deadline_s, StopRules(quorum=2))
    for step in range(5):
        one = simulate_step(unit_s[step], float(deadline_s[step]), StopRules(quorum=2))
        assert torch.equal(many.reached[step], one.reached)
        assert many.seconds[step] == one.seconds


@pytest.mark.parametrize(
    ("deadline_s", "grace_s", "end_s", "reached"),
    [
        (1.5, 1.0, 1.5, 0),  # in the forward pass: at any moment
        (2.0, 1.0, 2.0, 1),
        (2.1, 1.0, 2.5, 1),  # at the end of its layer
        (2.5, 1.0, 2.5, 1),
        (3.6, 1.0, 4.0, 2),  # of its stage
        (2.1, 0.1, 2.2, 1),  # when it is stood in for
        (7.6, 1.0, 8.0, 3),  # it comes to the end after all
    ],
)
def test_late_rank_stops_at_its_next_layer(deadline_s, grace_s, end_s, reached):
    unit_s = torch.tensor([[0.5, 1.0, 1.5], [2.0, 4.0, 8.0]])
    cut = simulate_step(unit_s, deadline_s, StopRules(quorum=1, grace_s=grace_s, checks=4))
    assert cut.end_s.tolist() == pytest.approx([1.5, end_s])
    assert cut.reached.sum(1).tolist() == [3, reached]
    assert cut.late.tolist() == [False, reached < 3]


# -- what policies see


def row(**fields):
    return row_of(computed=(1.0, 0.5), estimated=(0.0, 0.0), weights=(1.0, 0.5), **fields)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("granularity", ["stage", "microbatch"])
def test_units_are_whole_and_in_the_order_of_time(num_microbatches, granularity):
    ends = tuple(float(number + 1) for number in range(num_microbatches))
    rows = [
        row(
            compute_s=ends[-1], busy_s=ends[-1] + 0.5, merge_s=0.25 * (rank + 1), num_microbatches=num_microbatches,
            microbatch_s=ends, stage_s=(ends[-1] - 0.5, ends[-1]),
        )
        for rank in range(2)
    ]  # fmt: skip
    table = Table(torch.stack([each.encode() for each in rows]), 2)
    step = table.progress(torch.tensor([0.25, 0.75]), granularity)
    assert step.unit_share.sum(1).tolist() == pytest.approx([1.0, 1.0])
    used = step.unit_share[0] > 0
    assert int(used.sum()) == min(num_microbatches, MICROBATCH_SLOTS) + (granularity == "stage")
    times = step.unit_s[0][used]
    assert torch.equal(times, times.sort().values)
    assert float(times[-1]) == ends[-1]
    assert float(step.overhead_s) == 0.25
    assert step.entered_s.tolist() == [0.5, 0.5]
    assert step.computed.tolist() == [[1.0, 0.5]] * 2


@pytest.mark.parametrize("of_numbers", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 3, 40])
@pytest.mark.parametrize("granularity", ["stage", "microbatch", "step"])
def test_progress_as_plain_memory_is_the_same_to_the_bit(granularity, num_microbatches, of_numbers):
    rows = [
        row(
            compute_s=NAN if rank == 2 else 0.1 + rank, busy_s=0.3 + rank, merge_s=0.1 * (rank + 1), idle=rank == 1,
            weight=1 / (rank + 3), num_microbatches=num_microbatches + rank, stage_s=(0.7 * rank, NAN),
            microbatch_s=tuple(number / 7 for number in range(num_microbatches)),
        ).numbers()
        for rank in range(3)
    ]  # fmt: skip
    numbers = array("f", [number for own in rows for number in own])
    as_tensor = torch.frombuffer(numbers, dtype=torch.float32).view(3, -1)
    share, windows = torch.tensor([0.25, 0.75]), [HistoryWindow(2, 3), HistoryWindow(2, 3)]
    for window in windows:
        window.watch(share)
    for _ in range(3):
        table = Table(numbers if of_numbers else as_tensor, 2)
        made = table.progress(share, granularity), table.progress_row(tuple(share.tolist()), granularity)
        seen = [window.append([1.0] * 3, [True] * 3, own) for window, own in zip(windows, made, strict=True)]
        tensors, plain = (own.tensors() for own in seen)
        assert tensors.keys() == plain.keys()
        assert all(torch.equal(tensors[name].nan_to_num(-1), plain[name].nan_to_num(-1)) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_memory_goes_on_from_tensors_of_any_dtype(dtype):
    window, units = HistoryWindow(3, 2), torch.full((2, 2), 7.0, dtype=dtype)
    window.watch(torch.tensor([0.5, 0.5]))
    alone = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype), torch.tensor(0.5, dtype=dtype)
    window.append([1.0] * 2, [True] * 2, StepProgress(units, units / 14, units / 7, *alone))
    of_rank = [8.0, 9.0, 0.5, 0.5, 1.0, 1.0, 2.0, 0.25, 0.75]
    seen = window.append([1.0] * 2, [True] * 2, ProgressRow(array("f", of_rank * 2), 2, 2)).progress
    assert seen.unit_s.tolist() == [[[7.0, 7.0]] * 2, [[8.0, 9.0]] * 2]
    assert seen.weight.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert seen.overhead_s.tolist() == [0.5, 0.75]


def test_progress_of_a_window_is_that_of_its_last_steps_and_survives_being_saved():
    window = HistoryWindow(3, 2)
    window.watch(torch.tensor([0.5, 0.5]))
    assert window.read().progress is None
    for number in range(5):
        units = torch.full((2, 2), float(number))
        step = StepProgress(units, units * 0 + 0.5, units, torch.ones(2), torch.zeros(2), torch.tensor(float(number)))
        seen = window.append([float(number)] * 2, [True, True], step)
    assert seen.progress.unit_s[:, 0, 0].tolist() == seen.progress.overhead_s.tolist() == [2.0, 3.0, 4.0]
    again = HistoryWindow(3, 2)
    again.restore(History.from_tensors(seen.tensors()))
    again.watch(torch.tensor([0.5, 0.5]))  # the same stages: nothing is forgotten
    assert torch.equal(again.read().progress.unit_s, seen.progress.unit_s)
    again.watch(torch.tensor([0.1, 0.9]))
    assert again.read().progress is None


def test_history_of_an_older_version_is_refused_with_the_remedy():
    tensors = history(one_slow(1.0)).tensors()
    del tensors["progress.entered_s"]
    with pytest.raises(ValueError, match="has no entered_s: it is of an older version; begin without it"):
        History.from_tensors(tensors)


def test_quantile_policy_is_shown_times_only():
    assert not QuantileDeadline(0.5).wants_progress
