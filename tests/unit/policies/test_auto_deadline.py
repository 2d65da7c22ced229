"""AutoDeadline in the simulator, where it sees of a late rank what is left of it, as in training."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from histories import history

from straggle import AutoDeadline, Deadline, History, LateHandling, Progress
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.ranks import simulate_times
from straggle.lab.simulate.units import Work
from straggle.policies.auto_deadline import steps_since_dealt
from straggle.policies.changed_times import ChangedTimes
from straggle.policies.what_if.step_model import StopRules, computed_share, simulate_step
from straggle.policies.what_if.untruncated import any_unheard, untruncated_times

NAN = math.nan
BEGUN, WINDOW = 50, 25  # steps until all is known that will be, and those of one choice


def units_of(granularity, num_microbatches=None):
    num_microbatches = num_microbatches or (4 if granularity == "microbatch" else 1)
    return Work(0.1, num_stages=8, num_microbatches=num_microbatches).units(granularity)


def one_slow(granularity, ranks, factor, apart, together, steps=300, num_microbatches=None):
    """Seconds of each unit, (steps, ranks, units): all vary by themselves and together, and one is clearly slow."""
    generator = torch.Generator().manual_seed(0)
    own = apart * torch.randn(steps, ranks, generator=generator)
    factors = (own + together * torch.randn(steps, 1, generator=generator)).exp()
    factors[:, 1] *= factor
    return factors.unsqueeze(2) * units_of(granularity, num_microbatches).base_s


def in_training(own_s, granularity, policy=None, num_microbatches=None):
    """What came of it, and the gradient per second over that of the best fixed threshold."""
    units, late_handling = units_of(granularity, num_microbatches), LateHandling(granularity=granularity)
    done = simulate_times(own_s, units, policy or AutoDeadline(), late_handling, Constant())
    rules = StopRules.of(AutoDeadline(), late_handling, own_s.shape[1])
    fixed = [
        rate(*fixed_steps(own_s[BEGUN:].cumsum(2), tau_s, units, rules)) for tau_s in torch.linspace(0.05, 0.8, 80)
    ]
    waiting = 1 / float(done.all_s[BEGUN:].mean())
    return done, rate(done.step_s[BEGUN:], done.dropped[BEGUN:]) / max(*fixed, waiting)


def fixed_steps(unit_s, tau_s, units, rules):
    would = simulate_step(unit_s, float(tau_s), rules)
    return would.seconds, 1 - (computed_share(unit_s, would, rules, units.silent) @ units.share).mean(1)


def rate(seconds, dropped):
    return float((1 - dropped).sum() / seconds.sum())


@pytest.mark.parametrize(
    ("granularity", "ranks", "factor", "apart", "together"),
    [
        ("stage", 3, 8, 0.03, 0.0),  # of which nothing is ever finished in time
        ("stage", 3, 2, 0.03, 0.1),  # on a machine that all share
        ("stage", 6, 4, 0.27, 0.24),
        ("stage", 3, 4, 0.27, 0.24),  # which finishes something only in its quickest steps
        ("microbatch", 3, 4, 0.03, 0.0),  # whose second micro-batch runs when its peers end
    ],
)
def test_slow_rank_is_dropped_for_good_by_what_is_left_of_it(granularity, ranks, factor, apart, together):
    done, of_best = in_training(one_slow(granularity, ranks, factor, apart, together), granularity)
    assert of_best > 0.95
    window_s = done.step_s[BEGUN:].view(-1, WINDOW).mean(1)
    assert window_s.max() < 1.5 * window_s.min()  # it does not wait for it now and then


@pytest.mark.parametrize(("ranks", "factor", "num_microbatches"), [(3, 4, 1), (6, 2, 1), (6, 2, 4)])
def test_noise_of_the_quick_ranks_costs_parts_of_stages_and_not_whole_ones(ranks, factor, num_microbatches):
    """Where one is clearly slow, the best threshold cuts off what the others vary by, too."""
    own_s = one_slow("stage", ranks, factor, 0.03, 0.0, num_microbatches=num_microbatches)
    _, of_best = in_training(own_s, "stage", num_microbatches=num_microbatches)
    assert of_best > 0.99


def test_little_is_dropped_where_ranks_vary_each_by_itself_by_a_tenth():
    """Parts of stages would be worth it, at 6 % of all gradients; whole ones hardly ever are."""
    done, _ = in_training(one_slow("stage", 6, 1, 0.1, 0.0, steps=550), "stage")
    assert float(done.dropped[BEGUN:].mean()) < 0.01


@pytest.mark.parametrize("ranks", [3, 6])
@pytest.mark.parametrize("granularity", ["stage", "microbatch", "step"])
def test_little_is_dropped_on_a_shared_machine_where_no_rank_is_slow(granularity, ranks):
    done, _ = in_training(one_slow(granularity, ranks, 1, 0.27, 0.24, steps=1050), granularity)
    assert float(done.dropped[BEGUN:].mean()) < 0.01


def test_rank_of_which_nothing_is_known_is_heard_out_in_one_step():
    """Where all that a late rank has is dropped, nothing is ever known of one that always is."""
    done, of_best = in_training(one_slow("step", 4, 4, 0.03, 0.0), "step")
    assert of_best > 0.9
    waited = (done.step_s[BEGUN:] > 0.3).int()
    assert 1 <= int(waited.sum()) <= len(waited) / WINDOW
    assert not (waited[1:] & waited[:-1]).any()


def test_hearing_a_rank_out_is_a_function_of_the_history_alone():
    class Twice(Deadline):
        wants_progress = True

        def __init__(self):
            self.goes_on = AutoDeadline()
            self.window = self.goes_on.window
            self.heard = 0

        def prepare(self, late_handling, parts=()):
            self.begins = partial(self.prepared, late_handling, parts)
            self.goes_on.prepare(late_handling, parts)

        def prepared(self, late_handling, parts):
            policy = AutoDeadline()
            policy.prepare(late_handling, parts)
            return policy

        def decide(self, history):
            decided = self.goes_on.decide(history)
            assert self.begins().decide(history) == decided
            self.heard += self.goes_on.chosen is not None and self.goes_on.chosen.is_probe
            return decided

    policy = Twice()
    in_training(one_slow("step", 4, 4, 0.03, 0.0, steps=150), "step", policy)
    assert policy.heard >= 1


def stopped_in_forward(stopped_s):
    """One of three ranks has finished nothing in any of 20 steps; it was stopped after ``stopped_s`` in the last."""
    seen = torch.tensor([1.0, 1.5, 2.0, 2.5]).expand(20, 3, 4).clone()
    seen[:, 2] = NAN
    stops_s = torch.tensor([2.5, 2.5, 1.2]).repeat(20, 1)
    stops_s[-1, 2] = stopped_s
    return history(seen).progress, stops_s


def test_rank_that_finished_nothing_is_slower_than_its_stops_show():
    whole = untruncated_times(*stopped_in_forward(4.0))
    assert whole[0, 2].tolist() == pytest.approx([5.0, 7.5, 10.0, 12.5])  # a quarter more than 4 s for the first unit
    assert whole[0, 0].tolist() == [1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(("num_heard", "first_s"), [(5, 2.5), (15, 2.0)])
def test_rank_that_finishes_something_in_its_quickest_steps_alone_is_slower_than_these_say(num_heard, first_s):
    progress, stops_s = stopped_in_forward(2.0)
    stops_s[:, 2] = 2.0
    progress.unit_s[:num_heard, 2, 0] = 1.1
    whole = untruncated_times(progress, stops_s)
    slowness = 2.5 if num_heard < 10 else 1.1
    assert whole[-1, 2].tolist() == pytest.approx([first_s + slowness * own for own in (0.0, 0.5, 1.0, 1.5)])


WHOLE_S = [0.8, 1.0, 1.25, 0.8, 1.0, 1.25, NAN]  # of a rank in seven steps; in the last it was stopped after 1.5 s


@pytest.mark.parametrize(
    ("of_rank", "of_its_peer", "last_s"),
    [
        (WHOLE_S, 1.0, 1.5 * (1 + math.log(1.25) * (4 / 6) ** 0.5)),  # by as much as its times vary
        ([1.0] * 6 + [NAN], 1.0, 1.5),  # which it does not
        ([0.2, 1.0, 5.0] * 2 + [NAN], 1.0, 1.5 * 1.25),  # not further than by a quarter
        (WHOLE_S, NAN, 1.5),  # the threshold is for its peer, which never finishes
    ],
)
def test_rank_that_was_stopped_did_not_end_just_then(of_rank, of_its_peer, last_s):
    seen = torch.ones(7, 4, 1)
    seen[:, 3, 0], seen[:, 2, 0] = torch.tensor(of_rank), of_its_peer
    stops_s = seen[..., 0].nan_to_num(1.5)
    assert untruncated_times(history(seen).progress, stops_s)[-1, 3, 0].item() == pytest.approx(last_s)


@pytest.mark.parametrize(("stopped_s", "unheard"), [(1.2, True), (3.9, True), (4.1, False)])
def test_rank_is_heard_out_when_it_had_four_times_as_long(stopped_s, unheard):
    assert any_unheard(*stopped_in_forward(stopped_s), times=4.0) == unheard


def test_rank_that_finished_something_or_never_entered_is_not_unheard():
    progress, stops_s = stopped_in_forward(1.2)
    progress.unit_s[3, 2, 0] = 1.1
    assert not any_unheard(progress, stops_s, times=4.0)
    progress.unit_s[3, 2, 0] = NAN
    assert not any_unheard(progress, stops_s.index_fill(1, torch.tensor(2), NAN), times=4.0)


@pytest.mark.parametrize(("weight", "drops"), [(0.1, True), (1.0, False)])
def test_what_is_dropped_of_a_rank_counts_by_its_weight(weight, drops):
    """Where work is dealt out, a rank that has a third of the work and takes 1.6 times as long is waited for."""
    factor = torch.tensor([1.0, 1.0, 1.6]).view(1, 3, 1)
    seen = replace(history((factor * torch.linspace(0.4, 1.0, 8)).expand(77, 3, 8)), dealt=True)
    seen.progress.weight[:, 2] = weight
    decided = AutoDeadline().decide(seen)
    assert (decided.seconds < 1.3) == drops
    if drops:
        assert decided.predicted_drop < weight / (2 + weight)


@pytest.mark.parametrize(("steps_ago", "drops"), [(50, False), (45, True)])
def test_choice_is_made_from_the_last_window_of_steps(steps_ago, drops):
    times = torch.linspace(0.4, 1.0, 8).repeat(75, 4, 1)
    times[: 75 - steps_ago : 2, 3] *= 9.0  # until so many steps ago, now and then
    decided = AutoDeadline(window=50).decide(history(times, 77))
    assert (decided.predicted_drop > 0.01) == drops


A, B, C = (8, 8, 8, 8), (9, 9, 9, 5), (10, 9, 9, 4)


@pytest.mark.parametrize(
    ("weights", "since"),
    [
        ([A] * 9, None),
        ([A] * 9 + [B] * 2, None),  # not yet settled
        ([A] * 9 + [B] * 3, 3),
        ([A] * 9 + [B] * 5, 5),
        ([A] * 9 + [B] * 5 + [(3, 3, 3, 1)], 6),  # the last step of an epoch
        ([A] * 9 + [B] * 5 + [(3, 3, 3, 1)] + [B] * 4, 10),
        ([A] * 4 + [(2, 2, 2, 2)] + [A] * 4, None),
        ([A] * 4 + [B] * 4 + [C] * 7, 7),
        ([A] * 4 + [B] * 2 + [C] * 7, 7),
        ([A, B, C, B, A, C, A], None),  # drawn from a pool
        ([A], None),
        ([A] * 5 + [(8, 8, 8, 0)] * 3, 3),  # a rank has left
    ],
)
def test_steps_since_dealt(weights, since):
    assert steps_since_dealt(torch.tensor(weights, dtype=torch.float64)) == since


def history_of(rows, dealt=True):
    """Of (rank's seconds for four stages, weights) in each step."""
    own_s, weight = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    unit_s = own_s.unsqueeze(-1) * torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    share, at_once = torch.full_like(unit_s, 0.25), torch.zeros_like(own_s)
    progress = Progress(unit_s, share, torch.ones_like(unit_s), share[0, 0], weight, at_once, at_once[:, 0])
    return History(len(rows), own_s, torch.ones_like(own_s, dtype=torch.bool), progress, dealt=dealt)


def test_times_of_other_shares_are_forgotten():
    before = [([1.0, 1.0, 1.0, 2.0], A)] * 20
    after = [([1.12, 1.13, 1.12, 1.25], B)] * 3
    policy = AutoDeadline()
    assert policy.decide(history_of(before)).seconds < 1.1  # rank 3 is clearly slow
    assert policy.decide(history_of(before + after)).seconds == pytest.approx(1.4 * 1.12)
    assert AutoDeadline().decide(history_of(before + after)).seconds == pytest.approx(1.4 * 1.12)  # of a resumed run


def test_new_shares_are_chosen_for_in_each_of_the_first_ten_steps_and_then_once_in_every():
    rows = [([1.0, 1.0, 1.0, 2.0], A)] * 30
    policy, seen = AutoDeadline(every=25), []
    for step in range(30):
        rows = [*rows, ([1.0 + 0.01 * step] * 4, B)]
        seen.append(policy.decide(history_of(rows)).seconds)
    assert seen[1] < 1.1  # not settled
    assert seen[2] == pytest.approx(1.4, abs=0.01)
    assert len(set(seen[2:12])) > 1
    assert len(set(seen[12:27])) == 1
    assert seen[27] > seen[26]


SLOW_FROM = 60


def some_slow(ranks, factors, steps, slow, apart=0.02):
    """One stage's seconds of four, (steps, ranks, units): ``factors`` of the last ranks in the steps of ``slow``."""
    generator = torch.Generator().manual_seed(1)
    own = (apart * torch.randn(steps, ranks, generator=generator)).exp()
    for rank, factor in enumerate(factors, ranks - len(factors)):
        own[slow, rank] *= factor
    return own.unsqueeze(2) * units_of("stage").base_s


@pytest.mark.parametrize("begins", [10, SLOW_FROM, 85])  # with little before it, between two choices, just after one
@pytest.mark.parametrize(("ranks", "factors"), [(2, [3]), (4, [2]), (4, [2, 4]), (16, [2])])
def test_rank_that_turns_slow_is_not_waited_for_after_five_steps(ranks, factors, begins):
    own_s = some_slow(ranks, factors, begins + 40, slice(begins, None))
    done = simulate_times(own_s, units_of("stage"), AutoDeadline(), LateHandling(), Constant())
    assert done.step_s[begins + 5 :].max() < 1.2 * done.step_s[:begins].median()
    assert done.step_s[begins] > 1.3 * done.step_s[:begins].median()


def test_rank_that_is_quick_again_has_its_time_after_twelve_steps():
    """Until it has ended four of them it is stopped at times, when it ends a little after the others."""
    own_s = some_slow(4, [2], 120, slice(SLOW_FROM, SLOW_FROM + 12))
    done = simulate_times(own_s, units_of("stage"), AutoDeadline(), LateHandling(), Constant())
    assert done.dropped[SLOW_FROM + 5 : SLOW_FROM + 12].min() > 0.1
    assert done.dropped[SLOW_FROM + 12 :].max() < 0.05
    assert float(done.dropped[SLOW_FROM + 24 :].max()) == 0.0


def with_those_out(seen, member):
    """Rows as those of real steps: who was stood in for gave nothing, a moment after the step began."""
    out = seen.compute_s.isnan()
    entered_s = torch.where(out, 0.01, seen.progress.entered_s)
    if member is not None:
        entered_s = torch.where(member, entered_s, NAN)
    computed = torch.where(out.unsqueeze(2), 0.0, seen.progress.computed)
    return replace(seen, progress=replace(seen.progress, entered_s=entered_s, computed=computed))


def changes_in(factors, finished=None, member=None):
    """The steps after which a change is known, and those with which it began, in steps of (steps, ranks) seconds."""
    found, policy = {}, ChangedTimes()
    for end in range(1, len(factors) + 1):
        seen = history(factors[max(0, end - 99) : end].unsqueeze(2), end)
        if finished is not None:
            seen = replace(seen, finished=finished[max(0, end - 99) : end])
            seen = with_those_out(seen, None if member is None else member[max(0, end - 99) : end])
        since = policy.steps_since(seen, LateHandling().quorum_among, 2)
        fresh = ChangedTimes().steps_since(seen, LateHandling().quorum_among, 2)
        assert since == fresh  # so every rank has the same answer, also one that begins here
        if since is not None:
            found.setdefault(end - since, end)
    return found


def noise(ranks, steps=300, apart=0.05, together=0.0):
    generator = torch.Generator().manual_seed(2)
    own = apart * torch.randn(steps, ranks, generator=generator)
    return (own + together * torch.randn(steps, 1, generator=generator)).exp()


def stalled(factors, each, long, factor):
    for first in range(15, len(factors), each):
        factors[first : first + long, 0] *= factor
    return factors


@pytest.mark.parametrize("ranks", [2, 4, 32])
@pytest.mark.parametrize(
    "factors",
    [
        lambda ranks: noise(ranks),
        lambda ranks: noise(ranks, apart=0.4),  # a heavy tail
        lambda ranks: noise(ranks, apart=0.15, together=0.24),
        lambda ranks: stalled(noise(ranks), 20, 1, 10.0),  # garbage
        lambda ranks: stalled(noise(ranks), 50, 3, 4.0),  # a checkpoint of three steps
        lambda ranks: torch.cat([noise(ranks, 100), 4 * noise(ranks, 100)]),  # all of them at once
    ],
)
def test_noise_and_stalls_are_no_change(factors, ranks):
    assert changes_in(factors(ranks)) == {}


@pytest.mark.parametrize("factor", [1.5, 4])
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_change_is_known_after_four_steps_and_dated_to_its_first(ranks, factor):
    factors = noise(ranks)
    factors[100:112, 1] *= factor
    factors[200:, 1] *= factor
    assert changes_in(factors) == {100: 104, 112: 116, 200: 204}


def test_stopped_rank_is_slow_but_quick_again_only_if_it_ends():
    """It was stopped at 1.4; what it then would have taken is unknown, until it ends a step by itself."""
    factors, finished = noise(4), torch.ones(300, 4, dtype=torch.bool)
    factors[100:150, 1], finished[100:150, 1] = 1.4, False
    factors[120:150, 1] = 1.0  # by a shorter deadline
    assert changes_in(factors, finished) == {100: 104}
    finished[150:, 1] = True
    assert changes_in(factors[:, [0, 1, 1, 2]], finished[:, [0, 1, 1, 2]]) == {100: 104}


def out_of(factors, steps, rank=0):
    """It did not enter these steps: it is in an earlier one, or has yet to come; it was stood in for at once."""
    finished = torch.ones(factors.shape, dtype=torch.bool)
    for step in steps:
        factors[step, rank], finished[step, rank] = NAN, False
    return factors, finished


@pytest.mark.parametrize(("ranks", "long"), [(2, 4), (2, 8), (3, 5), (4, 1), (4, 4), (4, 8), (32, 5)])
def test_one_stall_is_no_change_however_many_steps_are_merged_meanwhile(ranks, long):
    factors = noise(ranks, 180)
    for first in (40, 110):
        factors[first, 0] = 5.0
    assert changes_in(*out_of(factors, [first + n for first in (40, 110) for n in range(1, long + 1)])) == {}


@pytest.mark.parametrize(("ranks", "long"), [(2, 4), (2, 20), (3, 5), (4, 1), (4, 5), (4, 20), (32, 8)])
def test_rank_that_is_healed_is_no_change(ranks, long):
    factors, finished = out_of(noise(ranks, 180), [*range(50, 50 + long), *range(120, 120 + long)])
    member = torch.ones(factors.shape, dtype=torch.bool)
    for first in (50, 120):
        member[first - 6 : first, 0] = False  # it was away
    factors[~member] = NAN
    assert changes_in(factors, finished, member) == {}


def test_rank_that_misses_every_second_step_is_slow():
    factors = noise(4, 200)
    factors[100::2, 1] *= 3.0
    assert changes_in(*out_of(factors, range(101, 200, 2), 1)) == {100: 104}


@pytest.mark.parametrize("out", [1, 2, 3, 5, 8, 13, 24])
def test_rank_whose_history_is_replaced_by_that_of_a_peer_decides_as_the_peers_do(out):
    """It goes on counting its own steps until it is healed, by which some of its numbers are those of other steps."""
    times = torch.cat([noise(4, 80), noise(4, 80, apart=0.3) * torch.tensor([1.0, 1.0, 1.0, 2.0])]).unsqueeze(2)
    own, peers = AutoDeadline(), AutoDeadline()
    for end in range(1, 76):
        own.decide(history(times[:end], end))
    for missed in range(1, out + 1):  # by its count they follow its last one
        seen = torch.cat([times[:75], times[75 + out : 75 + out + missed]])
        own.decide(history(seen[-99:], 75 + missed))
    for end in range(1, 140):
        expected = peers.decide(history(times[max(0, end - 99) : end], end))
        if end > 75 + out:
            assert own.decide(history(times[max(0, end - 99) : end], end)) == expected


def test_slow_first_steps_are_not_chosen_from():
    times = torch.linspace(0.4, 1.0, 8).repeat(12, 4, 1)
    times[:2, 3] *= 20
    assert AutoDeadline().decide(history(times)) == AutoDeadline().decide(history(times[2:], 12))
