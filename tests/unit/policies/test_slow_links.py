"""Whose link is slow, since when, and in which direction."""

from __future__ import annotations

import pytest

from straggle.policies.network.rank_links import RankLink
from straggle.policies.network.slow_links import SlowLinks

USUAL = RankLink(0.0005, 20e6, 20e6)
BYTES = 5.1e6


def after(links: list[RankLink], *, steps: int = 40, step_s: float = 0.5, found: SlowLinks | None = None) -> SlowLinks:
    found = found or SlowLinks()
    for step in range(steps):
        found.add(step, links, num_bytes=BYTES, step_s=step_s)
    return found


@pytest.mark.parametrize(
    ("link", "slow", "words"),
    [
        (RankLink(0.0005, 1e6, 20e6), ("up",), "rank 2's link: 1.0 MB/s up, the others 20 MB/s"),
        (RankLink(0.0005, 20e6, 2.5e6), ("down",), "rank 2's link: 2.5 MB/s down, the others 20 MB/s"),
        (RankLink(0.0005, 10e6, 10e6), ("up", "down"), "10 MB/s up, the others 20 MB/s; 10 MB/s down"),
        (RankLink(0.05, 20e6, 20e6), ("latency",), "50.0 ms each way, the others 0.5 ms"),
    ],
)
def test_a_slow_link_is_named_with_its_direction(link: RankLink, slow: tuple[str, ...], words: str) -> None:
    (found,) = after([USUAL, USUAL, link, USUAL]).now
    assert (found.rank, found.slow, found.since_step) == (2, slow, 0)
    assert words in found.words()


@pytest.mark.parametrize(
    "link",
    [
        USUAL,
        RankLink(),
        RankLink(0.0005, 40e6, 40e6),  # quicker
        RankLink(0.0005, 15e6, 15e6),  # a little slower
        RankLink(0.0020, 20e6, 20e6),  # as a busy machine answers
    ],
)
def test_no_link_is_slow_that_is_as_the_others_or_not_known(link: RankLink) -> None:
    assert after([USUAL, USUAL, link, USUAL]).now == ()


def test_a_link_that_costs_little_of_a_step_is_not_named() -> None:
    assert after([USUAL, USUAL, RankLink(0.0005, 10e6, 10e6), USUAL], step_s=30.0).now == ()


def test_it_is_named_since_it_began_and_no_more_when_it_is_over() -> None:
    narrow = RankLink(0.0005, 1e6, 1e6)
    found = SlowLinks()
    for step in range(60):
        links = [USUAL, narrow if 20 <= step < 40 else USUAL, USUAL]
        found.add(step, links, num_bytes=BYTES, step_s=0.5)
        named = [(slow.rank, slow.since_step) for slow in found.now]
        assert named == ([(1, 20)] if 29 <= step < 40 else [])  # 5 s of steps later


def test_a_moment_is_nothing_however_long_its_step_takes() -> None:
    found = SlowLinks()
    found.add(0, [USUAL, RankLink(0.5, 1e5, 1e5), USUAL], num_bytes=BYTES, step_s=60.0)
    assert found.now == ()
    found.add(1, [USUAL] * 3, num_bytes=BYTES, step_s=60.0)
    assert found.now == ()


def test_the_costliest_is_named_first() -> None:
    found = after([USUAL, RankLink(0.0005, 5e6, 20e6), USUAL, RankLink(0.0005, 1e6, 20e6), USUAL])
    assert [slow.rank for slow in found.now] == [3, 1]
