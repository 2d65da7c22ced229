"""Whether a merge that takes long is an event of the network, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from straggle.links.network_event import LEAST_S, UNEXPLAINED_S, LongMerge, long_after_s
from straggle.policies.network.rank_links import RankLink
from straggle.policies.network.slow_links import SlowLink

SLOW = SlowLink(2, 40, ("up",), RankLink(0.001, 1e6, 20e6), RankLink(0.001, 20e6, 20e6))


def after(num_merges: int, network_s: float = 0.2) -> LongMerge:
    merges = LongMerge()
    for step in range(num_merges):
        merges.merged(step, network_s)
        merges.merged(step, 100.0)  # the same step is not counted twice
    return merges


def said(merges: LongMerge, seconds: float, submitted: Mapping[int, int | None], step: int = 10) -> str | None:
    return merges.words(step, seconds, lambda: submitted, [SLOW])


@pytest.mark.parametrize(("usual", "limit"), [([0.2] * 5, LEAST_S), ([1.0] * 9, 5.0), ([0.2] * 4, float("inf"))])
def test_long_is_five_times_as_long_as_usual_and_more_than_a_second_at_least(usual: list[float], limit: float) -> None:
    assert long_after_s(usual) == limit


def test_a_long_merge_that_all_have_submitted_is_said_with_the_link_that_is_slow() -> None:
    words = said(after(10), 3.0, {0: 10, 2: 11})
    assert words is not None
    assert "step 10: the merge has been on the network for 3.0 s, where 200 ms are usual" in words
    assert "rank 2's link: 1.0 MB/s up, the others 20 MB/s" in words


@pytest.mark.parametrize(
    ("num_merges", "seconds", "submitted"),
    [
        (10, 1.4, {1: 10}),  # not long
        (3, 60.0, {1: 10}),  # what is usual is not known
        (10, 3.0, {1: 10, 2: 9}),  # rank 2 is waited for
        (10, 60.0, {}),  # pings do not come through
    ],
)
def test_nothing_is_said_where_it_is_no_event(num_merges: int, seconds: float, submitted: dict[int, int]) -> None:
    assert said(after(num_merges), seconds, submitted) is None


@pytest.mark.parametrize("others", [10, 9])  # of which one may not have come out of the step before, because of rank 2
def test_a_rank_that_does_not_answer_is_named(others: int) -> None:
    merges = after(10)
    assert merges.words(10, 1.4, lambda: {1: others, 2: None}, []) is None
    words = merges.words(10, LEAST_S, lambda: {1: others, 2: None}, [])
    assert words is not None
    assert words.endswith("ranks [2] do not answer pings")


@pytest.mark.parametrize(
    ("usual", "lately", "step_s", "longer"),
    [
        ([0.3] * 20, [0.7] * 3, 0.8, True),
        ([0.3] * 20, [0.7] * 2, 0.8, False),  # too few
        ([0.3] * 20, [0.4] * 3, 0.5, False),  # not half as long again
        ([0.001] * 20, [0.01] * 3, 0.2, False),  # a step is no longer for it
        ([], [0.7] * 3, 0.8, False),  # what is usual is not known
        ([0.3] * 3, [0.7] * 40, 0.8, False),  # it is usual by now
    ],
)
def test_merges_are_longer_where_a_few_were_so_and_steps_with_them(
    usual: list[float], lately: list[float], step_s: float, longer: bool
) -> None:
    merges = LongMerge()
    assert not merges.are_longer(step_s)
    for step, network_s in enumerate((*usual, *lately)):
        merges.merged(step, network_s)
    assert merges.are_longer(step_s) is longer


def test_where_nothing_explains_it_a_busy_machine_is_ruled_out_by_time() -> None:
    merges = after(10)
    assert merges.words(10, UNEXPLAINED_S - 0.1, lambda: {1: 10}, []) is None
    words = merges.words(10, UNEXPLAINED_S, lambda: {1: 10}, [])
    assert words is not None
    assert "no link is known to be slow" in words


def test_an_event_is_said_once_and_the_next_one_again() -> None:
    merges = after(10)
    assert said(merges, 3.0, {1: 10}) is not None
    assert said(merges, 9.0, {1: 10}) is None
    assert said(merges, 3.0, {1: 11}, step=11) is None
    assert said(merges, 3.0, {1: 12}, step=12) is None
    assert said(merges, 3.0, {1: 20}, step=20) is not None


@pytest.mark.parametrize(
    ("num_merges", "seconds", "lasts"),
    [(10, 1.4, False), (10, 1.6, True), (3, 1.4, False), (3, 1.6, True)],  # what is usual is not known after three
)
def test_a_merge_lasts_until_one_is_over_that_was_not_long(num_merges: int, seconds: float, lasts: bool) -> None:
    merges = after(num_merges)
    assert merges.lasts(seconds) == lasts
    merges.merged(num_merges, seconds)
    assert merges.lasts(0.0) == lasts
    merges.merged(num_merges + 1, 0.2)
    assert not merges.lasts(0.0)


def test_merges_that_always_take_long_are_not_long() -> None:
    assert not after(10, 8.0).lasts(30.0)
