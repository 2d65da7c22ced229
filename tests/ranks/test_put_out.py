"""A member whose link is slow is put out and let in again: its process lives on, and all end with the same bits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from members import Board, run_job
from ranks import digest, staged
from training import features, mlp

from straggle import Elastic, LinkPolicy
from straggle.policies.leaves import Places, SeenLinks
from straggle.policies.rank_links import RankLink

FAST, NARROW = RankLink(0.0002, 20e6, 20e6), RankLink(0.0002, 1e3, 1e3)
SLOW_FROM, SLOW_TO = 20, 60
NUM_STEPS = 120


@dataclass(frozen=True)
class Impaired(LinkPolicy):
    """Asked with the link of ``rank`` slow in some steps, whatever was measured."""

    rank: int = 0

    def next_places(self, now: Places, seen: SeenLinks) -> Places:
        link = NARROW if SLOW_FROM <= now.step < SLOW_TO else FAST
        links = [link if rank == self.rank else FAST for rank in range(len(seen.links))]
        return super().next_places(now, replace(seen, links=links))


def train(rank, board: Board, policy, found_by=None):
    """Its parameters, the members' changes, and each step's report.

    ``found_by``: in the middle of a merge this one finds whose link is slow, and that one is there when it is over.
    """
    changes, reports = [], []
    with staged(mlp(), members=Elastic(suspect_s=1.0), links=policy) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.register_state(optimizer=optimizer)
        model.register_members_hook(changes.append)
        for step in range(NUM_STEPS):
            if step == SLOW_FROM and rank == found_by:
                links = [NARROW if other == policy.rank else FAST for other in range(3)]
                threading.Timer(0.2, model._coordinator.member.judge_long_merge, [links]).start()
            with model.step():
                while found_by is not None and rank == policy.rank and step == SLOW_FROM >= board.made(found_by):
                    time.sleep(0.01)
                time.sleep(0.01)
                model(features(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reports.append(model.last_report)
            board.note(rank, step + 1)
    return digest(model.parameters()), changes, reports


@pytest.mark.slow
def test_rank_with_a_slow_link_is_put_out_and_let_in_again_when_it_is_back():
    slow = 0  # which has led the others until then
    with run_job(3, train, Impaired(rank=slow)) as job:
        results = [job.result(rank) for rank in range(3)]
        log = job.log()
    assert len({own[0] for own in results}) == 1, log
    assert f"rank {slow} is no member from generation 1 on: its link is slow" in log
    _, changes, reports = results[1]
    out, back = changes[:2]
    assert (out.left_kinds, out.kinds, set(back.joined)) == ({slow: "link"}, ("link",), {slow}), log
    away = [report.step for report in reports if report.ranks[slow].absent]
    assert away == list(range(away[0], away[-1] + 1))
    assert away[0] >= SLOW_FROM + LinkPolicy().after_steps
    assert away[-1] >= SLOW_TO + 9  # ten steps, after which it asks, is let in and has its state
    assert sum(report.ranks[slow].reach == 1 for report in reports[-10:]) > 5, log


@pytest.mark.slow
@pytest.mark.parametrize("slow", [2, 0])
def test_rank_is_put_out_in_the_middle_of_a_merge_that_is_long_because_of_its_link(slow):
    never_between_steps = Impaired(rank=slow, after_steps=10**6)
    found_by = 1 - min(slow, 1)  # the lowest of those that are left
    with run_job(3, train, never_between_steps, found_by) as job:
        results = [job.result(rank) for rank in range(3)]
        log = job.log()
    assert len({own[0] for own in results}) == 1, log
    _, changes, reports = results[1]
    out, back = changes[:2]
    assert (out.left_kinds, set(back.joined)) == ({slow: "link"}, {slow}), log
    assert "its link is slow" in out.left[slow]
    away = [report.step for report in reports if report.ranks[slow].absent]
    assert away == list(range(SLOW_FROM, away[-1] + 1))  # it is not waited for in that step
    assert away[-1] >= SLOW_TO + 9
    assert sum(report.ranks[slow].reach == 1 for report in reports[-10:]) > 5, log
