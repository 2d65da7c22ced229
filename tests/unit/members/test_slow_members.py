"""Which members are put out because of their links, and when they return: tables of links, and links that change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from straggle.members.slow.absence import Seen, gradients_a_second
from straggle.members.slow.slow_members import AFTER_LOOKS, SlowMembers
from straggle.policies.network.rank_links import RankLink

FAST, NEARLY, HALF, NARROW = (RankLink(0.0002, rate, rate) for rate in (20e6, 15e6, 10e6, 1e6))
LATE_5, LATE_20, LATE_50 = (RankLink(seconds, 20e6, 20e6) for seconds in (0.005, 0.020, 0.050))
SLOW_UP, SLOW_DOWN = RankLink(0.0002, 1e6, 20e6), RankLink(0.0002, 20e6, 1e6)
UNKNOWN = RankLink()
NUM_BYTES = 5.1e6


def seen(links: Sequence[RankLink], min_ranks: int = 2, *, compute_s: float = 0.1, num_messages: int = 1) -> Seen:
    number = len(links)
    return Seen(
        links, [compute_s] * number, [1.0] * number, [1.0] * number, NUM_BYTES, num_messages, min_ranks=min_ranks
    )


def after(now: SlowMembers, of: Seen, steps: int = 20, min_gain: float = 1.1, *, step_s: float = 1.0) -> SlowMembers:
    for _ in range(steps):
        now = now.after_step(now.step, step_s, lambda: of, min_gain)
    return now


@pytest.mark.parametrize(
    ("links", "min_ranks", "absent", "out"),
    [
        ([FAST] * 4, 2, set(), set()),
        ([HALF] * 4, 2, set(), set()),
        ([NARROW] * 4, 2, set(), set()),
        ([FAST, FAST, FAST, NARROW], 3, set(), {3}),
        ([NARROW, FAST, FAST, FAST], 3, set(), {0}),
        ([FAST, FAST, FAST, SLOW_UP], 3, set(), {3}),
        ([FAST, FAST, FAST, SLOW_DOWN], 3, set(), {3}),
        ([FAST, HALF, FAST, FAST], 3, set(), {1}),
        ([FAST, FAST, NEARLY, FAST], 3, set(), set()),  # three quarters of the others' rate
        ([FAST, FAST, HALF], 2, set(), {2}),
        ([FAST, FAST, NARROW], 2, set(), {2}),
        ([FAST, NARROW, FAST, NARROW], 2, set(), {1, 3}),
        ([FAST, NARROW, FAST, NARROW], 3, set(), set()),  # one of them out does not help the others
        ([FAST, FAST, NARROW, FAST, FAST, FAST, FAST, NARROW], 5, set(), {2, 7}),
        ([FAST, NARROW, NARROW, NARROW], 2, set(), set()),
        ([FAST, FAST, FAST, NARROW], 4, set(), set()),
        ([FAST, FAST, FAST, NARROW], 3, {1}, set()),
        ([FAST, NARROW], 1, set(), set()),
        ([LATE_5, FAST, FAST, FAST], 3, set(), set()),
        ([LATE_50] * 4, 2, set(), set()),
        ([FAST, UNKNOWN, FAST, FAST], 3, set(), set()),
        ([FAST, UNKNOWN, FAST, NARROW], 3, set(), {3}),
        ([UNKNOWN] * 4, 3, set(), set()),
    ],
)
def test_a_member_with_a_slow_link_is_put_out_if_the_others_merge_more_without_it(
    links: Sequence[RankLink], min_ranks: int, absent: set[int], out: set[int]
) -> None:
    now = replace(seen(links, min_ranks), absent=frozenset(absent))
    assert after(SlowMembers(), now).out == out
    assert after(SlowMembers(), now, min_gain=math.inf).out == frozenset()


def test_gradients_a_second_are_those_of_the_members_over_their_step() -> None:
    links = [FAST, FAST, FAST, HALF]
    with_it = 4 / (0.1 + 6 * NUM_BYTES / 4 / 10e6)  # a ring of four, and two segments on their way
    assert gradients_a_second((), seen(links)) == pytest.approx(with_it)
    assert gradients_a_second({3}, seen(links)) == pytest.approx(3 / (0.1 + 4 * NUM_BYTES / 3 / 20e6))


@pytest.mark.parametrize(("compute_s", "out"), [(0.1, {3}), (1.0, set())])
def test_half_the_rate_matters_only_where_a_step_is_mostly_network(compute_s: float, out: set[int]) -> None:
    assert after(SlowMembers(), seen([FAST, FAST, FAST, HALF], 3, compute_s=compute_s)).out == out


@pytest.mark.parametrize(("num_messages", "out"), [(1, set()), (8, set()), (32, {3})])
def test_latency_matters_only_where_messages_are_many(num_messages: int, out: set[int]) -> None:
    assert after(SlowMembers(), seen([FAST, FAST, FAST, LATE_20], 3, num_messages=num_messages)).out == out


def test_two_steps_of_a_slow_link_change_nothing_and_three_put_its_rank_out() -> None:
    slow = seen([FAST, FAST, FAST, NARROW])
    now = after(SlowMembers(), slow, 2)
    assert now.out == frozenset()
    assert after(now, slow, 1).out == {3}
    now = after(now, seen([FAST] * 4), 1)
    assert after(now, slow, 2).out == frozenset()


@pytest.mark.parametrize(("step_s", "steps_a_look"), [(8.0, 1), (0.5, 1), (0.125, 3), (2**-10, 308)])
def test_links_are_looked_at_each_third_of_a_second_or_after_each_step(step_s: float, steps_a_look: int) -> None:
    now, looks = SlowMembers(), list[int]()

    def look() -> Seen:
        looks.append(now.step)
        return seen([FAST, FAST, FAST, NARROW])

    while not now.out:
        now = now.after_step(now.step, step_s, look, 1.1)
    assert len(looks) == AFTER_LOOKS
    assert [later - earlier for earlier, later in pairwise(looks)] == [steps_a_look] * (AFTER_LOOKS - 1)


@pytest.mark.parametrize("num_ranks", [4, 64])
@pytest.mark.parametrize("narrow", [HALF, NARROW])
def test_a_rank_that_was_put_out_returns_when_its_link_has_been_good_for_ten_steps(
    narrow: RankLink, num_ranks: int
) -> None:
    others = [FAST] * (num_ranks - 1)
    out = after(SlowMembers(), seen([*others, narrow]))
    assert after(out, seen([*others, narrow]), 500).out == {num_ranks - 1}
    assert after(out, seen([*others, FAST]), 9).out == {num_ranks - 1}
    assert after(out, seen([*others, FAST]), 10).out == frozenset()
    assert after(out, seen([*others, RankLink(0.0002, 18e6, 18e6)]), 10).out == frozenset()  # nearly as good


def test_a_rank_whose_link_is_slow_returns_when_that_brings_more_gradients() -> None:
    out = after(SlowMembers(), seen([FAST, FAST, FAST, NARROW]))
    assert after(out, seen([FAST, FAST, FAST, HALF]), 200).out == {3}
    assert after(out, seen([FAST, FAST, FAST, HALF], compute_s=1.0), 10).out == frozenset()


def test_of_two_that_were_put_out_only_the_one_whose_link_is_good_again_returns() -> None:
    out = after(SlowMembers(), seen([FAST, NARROW, FAST, NARROW]))
    assert out.out == {1, 3}
    assert after(out, seen([FAST, FAST, FAST, NARROW]), 30).out == {3}


def test_a_rank_of_whose_link_nothing_is_known_stays_out() -> None:
    out = after(SlowMembers(), seen([FAST, FAST, FAST, NARROW]))
    assert after(out, seen([FAST, FAST, FAST, UNKNOWN]), 500).out == {3}
    again = after(after(out, seen([FAST, FAST, FAST, UNKNOWN]), 100), seen([FAST] * 4), 9)
    assert again.out == {3}  # steps in which it was not known do not count
    assert after(again, seen([FAST] * 4), 1).out == frozenset()


def test_a_rank_returns_at_once_where_too_few_members_are_left() -> None:
    links = [FAST, FAST, FAST, NARROW]
    out = after(SlowMembers(), seen(links, 3))
    assert out.out == {3}
    assert after(out, replace(seen(links, 3), absent=frozenset({1})), 1).out == frozenset()


@pytest.mark.parametrize("half", [10, 12, 25])
@pytest.mark.parametrize("narrow", [HALF, NARROW])
def test_a_link_that_flaps_moves_its_rank_a_few_times_and_no_more(half: int, narrow: RankLink) -> None:
    now, moves = SlowMembers(), 0
    for step in range(2000):
        before, now = now, after(now, seen([FAST, FAST, FAST, narrow if step // half % 2 else FAST]), 1)
        moves += before.out != now.out
    assert 1 <= moves <= 8
    assert now.out == {3}
