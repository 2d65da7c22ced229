"""Whose link was slow in a run, and which merges took long."""

from __future__ import annotations

import numpy as np
import pytest

from straggle.observe.numbers.link_spells import LongMerges, link_spells, long_merges
from straggle.policies.network.rank_links import RankLink

USUAL, NARROW = RankLink(0.0005, 20e6, 20e6), RankLink(0.0005, 1e6, 20e6)


@pytest.mark.parametrize(
    ("slow_in", "spells"),
    [
        ([], []),
        (range(10, 100), [(2, 10, None)]),
        (range(10, 50), [(2, 10, 49)]),
        ([*range(10, 40), *range(60, 100)], [(2, 10, 39), (2, 60, None)]),
        (range(10, 13), []),  # a moment
    ],
)
def test_a_spell_is_from_its_first_step_to_its_last(
    slow_in: range | list[int], spells: list[tuple[int, int, int | None]]
) -> None:
    steps = ((step, [USUAL, USUAL, NARROW if step in slow_in else USUAL], 0.5) for step in range(100))
    found = link_spells(steps, num_bytes=5e6)
    assert [(spell.slow.rank, spell.slow.since_step, spell.until_step) for spell in found] == spells


def test_a_spell_says_whose_when_and_how_slow() -> None:
    (spell,) = link_spells(((step, [USUAL, USUAL, NARROW], 0.5) for step in range(7, 40)), num_bytes=5e6)
    assert spell.words() == "Rank 2's link was slow from step 7 on: 1.0 MB/s up, the others 20 MB/s"


def test_merges_that_take_five_times_as_long_as_usual_are_counted() -> None:
    network_s = np.array([0.2] * 20 + [8.0, 1.7, 0.9, np.nan])
    step = np.arange(100.0, 124.0)
    assert long_merges(step, network_s) == LongMerges(2, 0.2, 8.0, 120)
    assert long_merges(step, np.full(24, 8.0)) is None  # as usual
    assert long_merges(step, np.full(24, np.nan)) is None
