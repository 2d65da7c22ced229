"""Whether a merge that takes long is an event of the network, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from straggle.merge.links.network_event import LEAST_S, UNEXPLAINED_S, LongMerge, long_after_s
from straggle.policies.rank_links import RankLink
from straggle.policies.slow_links import SlowLink

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
def test_long_is_five_times_as_long_as_usual_and_two_seconds_at_least(usual: list[float], limit: float) -> None:
    assert long_after_s(usual) == limit


def test_a_long_merge_that_all_have_submitted_is_said_with_the_link_that_is_slow() -> None:
    words = said(after(10), 3.0, {0: 10, 2: 11})
    assert words is not None
    assert "step 10: the merge has been on the network for 3.0 s, where 200 ms are usual" in words
    assert "rank 2's link: 1.0 MB/s up, the others 20 MB/s" in words


@pytest.mark.parametrize(
    ("num_merges", "seconds", "submitted"),
    [
        (10, 1.9, {1: 10}),  # not long
        (3, 60.0, {1: 10}),  # what is usual is not known
        (10, 3.0, {1: 10, 2: 9}),  # rank 2 is waited for
    ],
)
def test_nothing_is_said_where_it_is_no_event(num_merges: int, seconds: float, submitted: dict[int, int]) -> None:
    assert said(after(num_merges), seconds, submitted) is None


def test_a_rank_that_does_not_answer_is_named() -> None:
    words = said(after(10), 3.0, {1: 10, 2: None})
    assert words is not None
    assert "ranks [2] do not answer" in words


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
