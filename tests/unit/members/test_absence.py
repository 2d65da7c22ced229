"""What a member's absence brings, against closed forms; who is put out for slow work, and when such a rank returns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from straggle.members.slow.absence import Seen, absence_gain, better_without, slow_in_link
from straggle.members.slow.slow_members import AFTER_S, AFTER_STEPS, RETURN_PROBES, SUSPECTED, Probe, SlowMembers
from straggle.policies.network.rank_links import RankLink

USUAL_S, SLOW_S, MERGE_S = 0.1, 0.5, 0.02
DEADLINE_S, GRACE_S, REACH = 0.15, 0.05, 0.04
FAST, NARROW = RankLink(0.0, 20e6, 20e6), RankLink(0.0, 1e6, 1e6)
NUM_BYTES = 4e6


def seen(
    work_s: Sequence[float], weights: Sequence[float] = (), *, min_ranks: int = 2, links: Sequence[RankLink] = ()
) -> Seen:
    links = links or [RankLink()] * len(work_s)
    ones = [1.0] * len(work_s)
    return Seen(links, work_s, weights or ones, ones, NUM_BYTES, 1, MERGE_S, min_ranks=min_ranks)


def job(num_ranks: int, num_slow: int, work_s: float, weight: float, *, min_ranks: int = 2) -> Seen:
    """The first ranks are slow: each is done with a step, or cut short, after ``work_s``, and gives ``weight``."""
    rest = num_ranks - num_slow
    work, weights = [work_s] * num_slow + [USUAL_S] * rest, [weight] * num_slow + [1.0] * rest
    return seen(work, weights, min_ranks=min_ranks)


def better(now: Seen, min_gain: float) -> frozenset[int]:
    return better_without(range(len(now.links)), frozenset(), now, min_gain)


PLACES = {  # where a rank is slow, and what ends its part of a step: when that is, and what it has given by then
    "anywhere, waited for": (SLOW_S, 1.0),
    "layers, a deadline": (DEADLINE_S, REACH),
    "data, a deadline": (DEADLINE_S + GRACE_S, 0.0),
    "layers, of k of n": (USUAL_S, REACH),
    "data, spoken for at once": (USUAL_S, 0.0),
}


@pytest.mark.parametrize(("num_ranks", "num_slow"), [(4, 1), (8, 1), (8, 2), (64, 5)])
@pytest.mark.parametrize("place", PLACES)
def test_gain_is_the_others_rate_over_that_of_all_wherever_a_rank_is_slow(
    place: str, num_ranks: int, num_slow: int
) -> None:
    work_s, weight = PLACES[place]
    now = job(num_ranks, num_slow, work_s, weight)
    rest = num_ranks - num_slow
    expected = rest / (USUAL_S + MERGE_S) * (work_s + MERGE_S) / (rest + num_slow * weight)
    gone = frozenset(range(num_slow))
    assert absence_gain(gone, frozenset(), now) == pytest.approx(expected)
    assert better(now, 1.1) == (gone if expected >= 1.1 else frozenset())
    assert better(now, max(1.0, expected) * 1.001) == frozenset()
    assert better(now, math.inf) == slow_in_link(frozenset(), now, 1.1) == frozenset()


@pytest.mark.parametrize(("min_ranks", "gone"), [(6, {0, 1}), (7, set())])
def test_of_two_slow_ranks_none_is_put_out_if_only_one_may_be(min_ranks: int, gone: set[int]) -> None:
    now = job(8, 2, SLOW_S, 1.0, min_ranks=min_ranks)  # the second one would still be waited for
    assert better(now, 1.1) == gone


@pytest.mark.parametrize(
    ("work_s", "gone"),
    [
        ([SLOW_S] * 4, set()),
        ([USUAL_S] * 4, set()),
        ([1.46 * 0.12 - MERGE_S, USUAL_S, USUAL_S, USUAL_S], set()),  # 1.1 * 4 / 3 of the others' step
        ([1.47 * 0.12 - MERGE_S, USUAL_S, USUAL_S, USUAL_S], {0}),
        ([USUAL_S, SLOW_S], set()),
        ([USUAL_S, SLOW_S, USUAL_S], {1}),
        ([USUAL_S, 0.13, SLOW_S, USUAL_S], {2}),
        ([USUAL_S, 0.2, SLOW_S, USUAL_S], {1, 2}),
        ([0.0] * 4, set()),
    ],
)
def test_a_member_is_put_out_only_if_the_rest_merge_more_without_it(work_s: list[float], gone: set[int]) -> None:
    assert better(seen(work_s), 1.1) == gone


def test_slow_work_and_a_slow_link_count_in_one_rule() -> None:
    links = [FAST, FAST, FAST, NARROW]
    now = seen([SLOW_S, USUAL_S, USUAL_S, USUAL_S], links=links, min_ranks=3)
    assert better_without({0}, frozenset(), now, 1.1) == frozenset()  # the link of rank 3 takes longer than that
    assert slow_in_link(frozenset(), now, 1.1) == {3}
    assert slow_in_link(frozenset(), seen([USUAL_S] * 4, min_ranks=3), 1.1) == frozenset()
    now = seen([USUAL_S, USUAL_S, USUAL_S, SLOW_S], links=links, min_ranks=3)
    assert better(now, 1.1) == slow_in_link(frozenset(), now, 1.1) == {3}


# -- patience


def made(
    now: SlowMembers,
    work: Callable[[int], Sequence[float]],
    num_steps: int,
    *,
    min_ranks: int = 2,
    weights: Sequence[float] = (),
    probes: Mapping[int, Probe] = {},
) -> SlowMembers:
    """After so many steps in which the ranks' work takes as long as ``work(step)`` says, and each waits for all.

    ``weights``: of what they give.
    """
    for _ in range(num_steps):
        work_s = work(now.step)
        members = {rank: own_s for rank, own_s in enumerate(work_s) if rank not in now.out}
        of_step = seen(work_s, weights, min_ranks=min_ranks)
        less = bool(weights) and min(weights) < 0.5
        seconds = max(members.values()) + MERGE_S
        now = now.after_step(
            now.step, seconds, partial(_same, of_step), 1.1, work_s=members, brings_less=less, probes=probes
        )
    return now


def _same(own: Seen) -> Seen:
    return own


def one_slow(slow_s: float = SLOW_S, usual_s: float = USUAL_S) -> Callable[[int], list[float]]:
    return lambda _step: [usual_s, slow_s, usual_s, usual_s]


@pytest.mark.parametrize("times", [0.1, 0.5, 1, 10])
def test_a_rank_that_is_slow_for_good_is_put_out_after_fifty_steps_and_ten_seconds(times: float) -> None:
    step_s = times * SLOW_S + MERGE_S
    judged = max(AFTER_STEPS, math.ceil(AFTER_S / step_s) + 1)  # the first one's end is when it was seen
    last = SUSPECTED - 1 + judged
    now = made(SlowMembers(), one_slow(times * SLOW_S, times * USUAL_S), last - 1)
    assert now.out == frozenset()
    now = made(now, one_slow(times * SLOW_S, times * USUAL_S), 1)
    assert now.out == now.for_work == {1}


def test_two_that_are_slow_for_good_are_put_out_together() -> None:
    work = [USUAL_S] * 6 + [SLOW_S] * 2
    assert made(SlowMembers(), lambda _: work, 100, min_ranks=5).out == {6, 7}
    assert made(SlowMembers(), lambda _: work, 100, min_ranks=7).out == frozenset()


@pytest.mark.parametrize(("held_up_s", "out"), [(0.3, {1}), (0.05, set()), (0.0, set())])
def test_a_rank_that_gives_next_to_nothing_is_put_out_if_the_others_wait_for_it_now_and_then(
    held_up_s: float, out: set[int]
) -> None:
    def work(step: int) -> list[float]:  # stuck for five steps, in one of which it is waited for
        return [USUAL_S, USUAL_S + (0 if step % 5 else held_up_s), USUAL_S, USUAL_S]

    gain = 3 / 3.04 * (MERGE_S + USUAL_S + held_up_s / 5) / (MERGE_S + USUAL_S)
    assert (gain >= 1.1) == bool(out)
    assert made(SlowMembers(), work, 300, weights=[1.0, REACH, 1.0, 1.0]).out == out


@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.7])
@pytest.mark.parametrize("times", [1.5, 20])
def test_a_rank_that_is_slow_in_some_steps_is_never_put_out(share: float, times: float, num_ranks: int) -> None:
    chance = random.Random(f"{share} {times} {num_ranks}")

    def work(_step: int) -> list[float]:
        usual = [USUAL_S * chance.uniform(0.9, 1.1) for _ in range(num_ranks - 1)]
        return [*usual, USUAL_S * (times if chance.random() < share else 1.0)]

    assert made(SlowMembers(), work, 1500).out == frozenset()


@pytest.mark.parametrize(
    "slow",
    [
        lambda step: 1 if step % 4 else None,  # three of four steps, as a loader that fetches ahead
        lambda step: 1 if step % 100 < 49 else None,  # for half of the time, in one go
        lambda step: step % 4,  # each rank in its turn
        lambda step: step // 30 % 4,
        lambda step: 1 if step < 49 else None,  # as at the beginning
    ],
)
def test_a_rank_that_is_slow_by_turns_is_never_put_out(slow: Callable[[int], int | None]) -> None:
    def work(step: int) -> list[float]:
        return [SLOW_S if rank == slow(step) else USUAL_S for rank in range(4)]

    assert made(SlowMembers(), work, 1500).out == frozenset()


@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize(
    "stall_s",
    [
        lambda step: 60 if step % 500 == 499 else 0,  # it evaluates
        lambda step: 2 if step % 40 == 39 else 0,  # it saves
        lambda step: 30 if step in (0, 20, 21, 30) else 0,  # it compiles for new shapes
    ],
)
@pytest.mark.parametrize("times", [1.0, 1.12, 1.15])
def test_a_rank_that_logs_in_each_step_and_is_held_up_in_a_few_is_never_put_out(
    times: float, stall_s: Callable[[int], float], num_ranks: int
) -> None:
    def work(step: int) -> list[float]:
        return [times * USUAL_S + stall_s(step), *[USUAL_S] * (num_ranks - 1)]

    assert made(SlowMembers(), work, 1500).out == frozenset()


@pytest.mark.parametrize(("times", "out"), [(1.46, set()), (1.47, {1})])
def test_what_a_rank_costs_in_all_steps_alike_is_what_it_costs_in_one(times: float, out: set[int]) -> None:
    slow_s = times * (USUAL_S + MERGE_S) - MERGE_S  # 1.1 * 4 / 3 of the others' step
    assert made(SlowMembers(), one_slow(slow_s), 200).out == out


def test_noise_of_all_ranks_keeps_no_slow_one_in() -> None:
    chance = random.Random(5)

    def work(_step: int) -> list[float]:
        return [USUAL_S * chance.choice((1, 1, 1, 1.5)) * (5 if rank == 3 else 1) for rank in range(16)]

    assert made(SlowMembers(), work, 100).out == {3}


# -- coming back


def probed(now: SlowMembers, seconds: float, times: int = 1) -> SlowMembers:
    for _ in range(times):
        now = made(now, one_slow(), 10, probes={1: Probe(now.step, seconds)})
    return now


@pytest.mark.parametrize(("times", "returns"), [(0.5, True), (1.0, True), (1.3, True), (1.37, False), (5.0, False)])
def test_a_rank_returns_after_two_probes_with_which_it_would_bring_more(times: float, returns: bool) -> None:
    out = made(SlowMembers(), one_slow(), 80)
    assert out.out == {1}
    seconds = times * (USUAL_S + MERGE_S) - MERGE_S  # the three others take 4 / 3 of their step with it at most
    assert probed(out, seconds, RETURN_PROBES - 1).out == {1}
    assert probed(out, seconds, RETURN_PROBES).out == (frozenset() if returns else {1})
    assert probed(out, seconds, RETURN_PROBES).for_work == probed(out, seconds, RETURN_PROBES).out


def test_a_probe_counts_once_and_a_bad_one_begins_anew() -> None:
    out = made(SlowMembers(), one_slow(), 80)
    assert made(out, one_slow(), 100, probes={1: Probe(7, USUAL_S)}).out == {1}
    assert probed(probed(probed(out, USUAL_S), SLOW_S), USUAL_S).out == {1}


def test_a_stall_of_a_member_makes_no_slow_rank_look_good() -> None:
    out = made(SlowMembers(), one_slow(), 80)
    now = made(out, lambda _: [20 * USUAL_S, SLOW_S, USUAL_S, USUAL_S], 1, probes={1: Probe(1, SLOW_S)})
    now = made(now, lambda _: [20 * USUAL_S, SLOW_S, USUAL_S, USUAL_S], 1, probes={1: Probe(2, SLOW_S)})
    assert now.out == {1}


def test_the_pace_that_a_rank_must_keep_is_not_its_own_while_the_next_view_has_yet_to_come() -> None:
    now = made(SlowMembers(), one_slow(), SUSPECTED - 1 + AFTER_STEPS)
    assert now.out == {1}
    work_s, last = dict(enumerate(one_slow()(0))), seen(one_slow()(0))
    for number in range(4):
        probes = {1: Probe(number, SLOW_S)}
        now = now.after_step(now.step, SLOW_S, partial(_same, last), 1.1, work_s=work_s, probes=probes)
    assert now.out == {1}


def test_a_new_process_of_a_rank_that_is_out_is_let_in_as_nothing_is_known_of_it() -> None:
    out = made(SlowMembers(), one_slow(), 80)
    assert made(out, one_slow(), 1, probes={1: Probe(-77, 0.0)}).out == frozenset()


def test_a_rank_whose_probes_are_better_than_its_work_comes_back_less_and_less_often() -> None:
    now, moves, num_probes, out_steps = SlowMembers(), 0, 0, 0
    for step in range(0, 15_000, 10):
        before, num_probes = now.out, num_probes + 1
        now = made(now, one_slow(), 10, probes={1: Probe(num_probes, USUAL_S)} if step % 80 == 0 else {})
        moves, out_steps = moves + (now.out != before), out_steps + 10 * bool(now.out)
    assert moves < 25
    assert out_steps > 0.8 * 15_000


def test_a_rank_that_was_put_out_returns_at_once_where_too_few_members_are_left() -> None:
    out = made(SlowMembers(), one_slow(), 80, min_ranks=3)
    gone = seen([USUAL_S] * 4, min_ranks=3)
    gone = replace(gone, absent=frozenset({2}))
    assert out.out == {1}
    assert out.after_look(gone, 1.1).out == out.after_look(gone, 1.1).for_work == frozenset()
