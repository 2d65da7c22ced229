"""Links in the lines of a watched DDP job, which each rank writes by itself."""

from __future__ import annotations

import math

from straggle.observe.watched_links import links_of_lines
from straggle.policies.rank_links import RankLink


def test_links_come_from_the_lines_of_all_ranks() -> None:
    lines = [
        {"step": 3, "ways": [[1, 0.001, 20e6, 4.0], [2, 0.001, 20e6, 4.0]]},
        {"step": 3, "ways": [[2, 0.001, 20e6, 0.5], [0, 0.002, 20e6, 0.5]]},
        {"step": 3, "ways": [[0, 0.001, 1e6, 9.0], [1, 0.001, 1e6, 9.0]]},
    ]
    assert links_of_lines(lines) == (
        RankLink(0.001, 20e6, 20e6),
        RankLink(0.001, 20e6, 20e6),
        RankLink(0.001, 1e6, 20e6),
    )


def test_lines_of_an_older_run_say_nothing_of_links() -> None:
    assert all(math.isnan(link.slower_bytes_per_s) for link in links_of_lines([{"step": 0}, {"step": 0}]))
