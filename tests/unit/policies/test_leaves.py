"""Who is in the ring, who is a leaf and who is put out: tables of links, and links that change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from straggle.policies.leaves import LinkPolicy, Places, SeenLinks, step_seconds
from straggle.policies.rank_links import RankLink

FAST, NEARLY, HALF, NARROW = (RankLink(0.0002, rate, rate) for rate in (20e6, 15e6, 10e6, 1e6))
LATE_5, LATE_20, LATE_50 = (RankLink(seconds, 20e6, 20e6) for seconds in (0.005, 0.020, 0.050))
UNKNOWN = RankLink()
NUM_BYTES = 5.1e6


def seen(links: Sequence[RankLink], *, num_messages: int = 1) -> SeenLinks:
    return SeenLinks(links, NUM_BYTES, num_messages, compute_s=0.1)


def after(policy: LinkPolicy, links: Sequence[RankLink], steps: int, places: Places, **more: int) -> Places:
    for _ in range(steps):
        places = policy.next_places(places, seen(links, **more))
    return places


@pytest.mark.parametrize(
    ("links", "leaves"),
    [
        ([FAST, FAST, FAST, FAST], set()),
        ([HALF, HALF, HALF, HALF], set()),
        ([NARROW, NARROW, NARROW, NARROW], set()),
        ([FAST, FAST, FAST, NARROW], {3}),
        ([NARROW, FAST, FAST, FAST], {0}),
        ([FAST, HALF, FAST, FAST], {1}),
        ([FAST, FAST, NEARLY, FAST], set()),
        ([FAST, HALF, FAST, HALF], {1, 3}),
        ([FAST, NARROW, FAST, NARROW], set()),
        ([FAST, FAST, NARROW, FAST, FAST, FAST, FAST, NARROW], {2, 7}),
        ([FAST, NARROW, NARROW, NARROW], set()),
        ([FAST, HALF, NARROW, FAST, FAST, FAST], {2}),
        ([FAST, NARROW], set()),
        ([FAST, FAST, NARROW], set()),
        ([FAST, FAST, HALF], {2}),
        ([LATE_5, FAST, FAST, FAST], set()),
        ([FAST, FAST, LATE_20, FAST], set()),
        ([LATE_50] * 4, set()),
        ([FAST, UNKNOWN, FAST, FAST], set()),
        ([FAST, UNKNOWN, FAST, NARROW], {3}),
        ([UNKNOWN] * 4, set()),
    ],
)
def test_a_rank_is_a_leaf_where_the_others_gain_more_than_it_can_lose(
    links: Sequence[RankLink], leaves: set[int]
) -> None:
    places = after(LinkPolicy(), links, 100, Places())
    assert places.leaves == leaves
    assert places.out == frozenset()


def test_latency_makes_a_leaf_only_where_messages_are_many() -> None:
    links = [FAST, FAST, FAST, LATE_20]
    assert after(LinkPolicy(), links, 20, Places(), num_messages=1).leaves == frozenset()
    assert after(LinkPolicy(), links, 20, Places(), num_messages=8).leaves == frozenset()  # all at a time
    assert after(LinkPolicy(), links, 20, Places(), num_messages=32).leaves == {3}


def test_a_steps_time_is_that_of_the_ring_or_of_its_slowest_leaf() -> None:
    links = [FAST, FAST, FAST, HALF]
    assert step_seconds((), seen(links)) == pytest.approx(0.1 + 6 * NUM_BYTES / 4 / 10e6)  # two segments on their way
    assert step_seconds({3}, seen(links)) == pytest.approx(0.1 + 0.0002 + 0.0002 + NUM_BYTES / 10e6)
    ring_s = 4 * NUM_BYTES / 3 / 20e6 + NUM_BYTES / 3 / 20e6
    assert step_seconds({3}, seen(links), leaves_too=False) == pytest.approx(0.1 + ring_s - NUM_BYTES / 3 / 20e6)
    assert step_seconds({3}, seen([FAST] * 4)) == pytest.approx(0.1 + ring_s)


def test_one_step_of_a_slow_link_changes_nothing_and_five_make_a_leaf() -> None:
    policy, slow = LinkPolicy(after_steps=5), [FAST, FAST, FAST, NARROW]
    places = after(policy, slow, 4, Places())
    assert places.leaves == frozenset()
    assert after(policy, slow, 1, places).leaves == {3}
    places = after(policy, [FAST] * 4, 1, places)
    assert after(policy, slow, 4, places).leaves == frozenset()


def test_a_leaf_whose_link_recovers_is_in_the_ring_again_within_thirty_steps() -> None:
    policy = LinkPolicy()
    places = after(policy, [FAST, FAST, FAST, NARROW], 50, Places())
    assert places.leaves == {3}
    assert after(policy, [FAST] * 4, 9, places).leaves == {3}
    assert after(policy, [FAST] * 4, 10, places).leaves == frozenset()


def test_of_two_leaves_only_the_one_that_recovers_comes_back() -> None:
    places = after(LinkPolicy(), [FAST, HALF, FAST, HALF], 20, Places())
    assert places.leaves == {1, 3}
    assert after(LinkPolicy(), [FAST, FAST, FAST, HALF], 30, places).leaves == {3}


def test_a_link_that_is_a_little_better_does_not_bring_a_leaf_back() -> None:
    places = after(LinkPolicy(), [FAST, FAST, FAST, NARROW], 20, Places())
    assert after(LinkPolicy(), [FAST, FAST, FAST, HALF], 200, places).leaves == {3}


@pytest.mark.parametrize("half", [10, 12, 25])
def test_a_link_that_flaps_moves_its_rank_a_few_times_and_no_more(half: int) -> None:
    policy, places, moves = LinkPolicy(), Places(), 0
    for step in range(2000):
        link = NARROW if step // half % 2 else FAST
        before, places = places, policy.next_places(places, seen([FAST, FAST, FAST, link]))
        moves += before.leaves != places.leaves
    assert 1 <= moves <= 8
    assert places.leaves == {3}


def members(
    links: Sequence[RankLink], steps: int, places: Places, *, min_ranks: int = 2, absent: frozenset[int] = frozenset()
) -> Places:
    now = SeenLinks(links, NUM_BYTES, 1, compute_s=0.1, absent=absent, members=True, min_ranks=min_ranks)
    for _ in range(steps):
        places = LinkPolicy().next_places(places, now)
    return places


SLOW_UP, SLOW_DOWN = RankLink(0.0002, 1e6, 20e6), RankLink(0.0002, 20e6, 1e6)


@pytest.mark.parametrize(
    ("links", "min_ranks", "absent", "out"),
    [
        ([FAST, FAST, FAST, HALF], 2, set(), set()),  # it can receive a step in time
        ([FAST, FAST, FAST, NARROW], 3, set(), {3}),
        ([FAST, FAST, FAST, SLOW_UP], 3, set(), {3}),
        ([FAST, FAST, FAST, SLOW_DOWN], 3, set(), {3}),
        ([NARROW, FAST, FAST, FAST], 3, set(), {0}),
        ([FAST, NARROW, FAST, NARROW], 2, set(), {1, 3}),
        ([FAST, NARROW, FAST, NARROW], 3, set(), set()),  # one of them out does not help the others
        ([FAST, FAST, FAST, NARROW], 4, set(), set()),
        ([FAST, FAST, FAST, NARROW], 3, {1}, set()),
        ([FAST, FAST, NARROW], 2, set(), {2}),
        ([FAST, NARROW], 1, set(), set()),
        ([NARROW] * 4, 2, set(), set()),
        ([FAST, FAST, FAST, UNKNOWN], 3, set(), set()),
    ],
)
def test_with_members_a_rank_that_cannot_keep_up_is_put_out_as_far_as_enough_are_left(
    links: Sequence[RankLink], min_ranks: int, absent: set[int], out: set[int]
) -> None:
    places = members(links, 20, Places(), min_ranks=min_ranks, absent=frozenset(absent))
    assert (places.leaves, places.out) == (frozenset(), out)


def test_a_rank_that_was_put_out_comes_back_when_its_link_has_been_good_for_ten_steps() -> None:
    places = members([FAST, FAST, FAST, NARROW], 20, Places())
    assert members([FAST, FAST, FAST, NARROW], 500, places).out == {3}
    assert members([FAST] * 4, 9, places).out == {3}
    assert members([FAST] * 4, 10, places).out == frozenset()


def test_a_rank_outside_of_which_nothing_is_known_stays_there() -> None:
    unknown = [FAST, FAST, FAST, UNKNOWN]
    places = members([FAST, FAST, FAST, NARROW], 20, Places())
    assert members(unknown, 500, places).out == {3}
    places = members([FAST] * 4, 9, members(unknown, 100, places))
    assert places.out == {3}  # steps in which it was not known do not count
    assert members([FAST] * 4, 1, places).out == frozenset()
    leaf = after(LinkPolicy(), [FAST, FAST, FAST, HALF], 20, Places())
    assert after(LinkPolicy(), unknown, 500, leaf).leaves == {3}


def test_a_rank_that_was_put_out_comes_back_at_once_where_too_few_members_are_left() -> None:
    links = [FAST, FAST, FAST, NARROW]
    places = members(links, 20, Places(), min_ranks=3)
    assert places.out == {3}
    assert members(links, 1, places, min_ranks=3, absent=frozenset({1})).out == frozenset()


@pytest.mark.parametrize("half", [10, 12, 25])
def test_a_link_that_flaps_puts_its_rank_out_a_few_times_and_no_more(half: int) -> None:
    places, moves = Places(), 0
    for step in range(2000):
        link = NARROW if step // half % 2 else FAST
        before, places = places, members([FAST, FAST, FAST, link], 1, places)
        moves += before.out != places.out
    assert 1 <= moves <= 8
    assert places.out == {3}


def test_a_policy_says_what_is_wrong_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"min_gain=0\.5: must be a finite number, at least 1"):
        LinkPolicy(min_gain=0.5)
    with pytest.raises(ValueError, match="after_steps=0"):
        LinkPolicy(after_steps=0)
