"""Leaves among members that come and go: each generation begins with all in the ring, and all have the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from job_loop import Loop, absent, check_equal, gives_again, joined, left, plain, train
from members import run_job

from straggle import LinkPolicy
from straggle.policies.leaves import Places, SeenLinks
from straggle.policies.rank_links import RankLink

FAST, HALF = RankLink(0.0002, 20e6, 20e6), RankLink(0.0002, 10e6, 10e6)
SLOW = 3


@dataclass(frozen=True)
class Half(LinkPolicy):
    """Asked with a link of half the rate of the others', whatever was measured."""

    def next_places(self, now: Places, seen: SeenLinks) -> Places:
        links = [HALF if rank == SLOW else FAST for rank in range(len(seen.links))]
        return super().next_places(now, replace(seen, links=links, num_bytes=5.1e6, compute_s=0.1))


def leaf_spells(outcome):
    return {since for report in outcome.reports if (since := report.ranks[SLOW].leaf_since) is not None}


@pytest.mark.slow
def test_where_a_parent_and_then_a_leaf_dies_the_others_go_on_and_both_come_back():
    with run_job(4, train, Loop(plain, links=Half())) as job:
        for generation, rank in enumerate((1, SLOW)):  # a parent, and the leaf
            job.wait(lambda g=generation: job.log().count("is a leaf") >= 4 * (g + 1), "a leaf")
            job.walk(10)
            job.kill(rank)
            job.walk(20, [other for other in range(4) if other != rank])
            job.start(rank)
            job.walk(20)
        outcomes = job.finish()
        log = job.log()
    check_equal(outcomes)
    zero = outcomes[0]
    assert gives_again(zero, 1, 2), log
    assert (set(left(zero)), joined(zero)) == ({1, SLOW}, {1, SLOW}), log
    assert len(leaf_spells(zero)) >= 2, log  # in each generation it is in the ring at first
    for rank in (1, SLOW):
        away = absent(zero, rank)
        assert away == list(range(away[0], away[-1] + 1))
