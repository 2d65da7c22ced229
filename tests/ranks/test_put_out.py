"""A member whose link is slow is put out and let in again: its process lives on, and all end with the same bits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from members import Board, run_job
from ranks import digest, staged
from training import features, mlp

from straggle import Elastic, world
from straggle.members.slow.put_out import PutOut
from straggle.members.slow.slow_members import AFTER_LOOKS
from straggle.merge.rows.table import Table
from straggle.policies.network.rank_links import RankLink

NUM_RANKS = 4
NUM_BYTES = 4 * sum(parameter.numel() for parameter in mlp().parameters())
SLOW_FROM, SLOW_TO = 20, 60
NUM_STEPS = 120


def link(share: float) -> RankLink:
    """One on which a step's gradients take a quarter of a second at the full rate, of which it has a share."""
    return RankLink(0.0002, 4 * share * NUM_BYTES, 4 * share * NUM_BYTES)


class Measured:
    """A merged step's table, in which these links were measured."""

    def __init__(self, table: Table, links: list[RankLink]) -> None:
        self.absent_ranks, self.links, self.column = table.absent_ranks, lambda: links, table.column
        self.last_submitted_s, self.weight, self.given = 1.0, table.weight, table.given
        self.is_usual, self.told = table.is_usual, table.told


@dataclass(frozen=True)
class Impaired:
    """The link of ``rank`` has this ``share`` of the others' rate in some steps, whatever was measured.

    ``found``: a step's telemetry says so of a member, too, and not only of one that was put out.
    """

    rank: int
    share: float = 0.05
    found: bool = True

    def links(self, step: int = SLOW_FROM) -> list[RankLink]:
        slow = SLOW_FROM <= step < SLOW_TO
        return [link(self.share if slow and rank == self.rank else 1.0) for rank in range(NUM_RANKS)]

    def measured(self, put_out: PutOut) -> None:
        """Show ``put_out`` these links in place of what it would read from the telemetry."""
        merged: Any = put_out.merged

        def shown(step: int, table: Table, num_messages: int, shares: Sequence[float]) -> None:
            is_seen = self.found or self.rank in put_out.out
            merged(step, Measured(table, self.links(step if is_seen else 0)), num_messages, shares)

        setattr(put_out, "merged", shown)  # noqa: B010 - a method


def judge(member, links) -> None:
    """In the middle of the merge."""
    time.sleep(0.2)
    member.judge_long_merge(links)


def train(rank, board: Board, impaired: Impaired, found_by=None):
    """Its parameters, the members' changes, and each step's report.

    ``found_by``: in the middle of a merge this one finds whose link is slow, and that one is there when it is over.
    """
    changes, reports = [], []
    with staged(mlp(), members=Elastic(suspect_s=1.0)) as model:
        impaired.measured(model._members.member.slow)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.register_state(optimizer=optimizer)
        model.register_members_hook(changes.append)
        for step in range(NUM_STEPS):
            if step == SLOW_FROM and rank == found_by:
                world.Thread(target=judge, args=(model._members.member, impaired.links())).start()
            with model.step():
                while found_by is not None and rank == impaired.rank and step == SLOW_FROM >= board.made(found_by):
                    time.sleep(0.01)
                time.sleep(0.01)
                model(features(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reports.append(model.last_report)
            board.note(rank, step + 1)
    return digest(model.parameters()), changes, reports


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_rank_with_a_slow_link_is_put_out_and_let_in_again_when_it_is_back(share):
    slow = 0  # which has led the others until then
    with run_job(NUM_RANKS, train, Impaired(slow, share)) as job:
        results = [job.result(rank) for rank in range(NUM_RANKS)]
        log = job.log()
    assert len({own[0] for own in results}) == 1, log
    assert f"rank {slow} is no member from generation 1 on: its link is slow" in log
    _, changes, reports = results[1]
    out, back = changes[:2]
    assert (out.left_kinds, out.kinds, set(back.joined)) == ({slow: "link"}, ("link",), {slow}), log
    away = [report.step for report in reports if report.ranks[slow].absent]
    assert away == list(range(away[0], away[-1] + 1))
    assert away[0] >= SLOW_FROM + AFTER_LOOKS
    assert away[-1] >= SLOW_TO + 9  # ten steps, after which it asks, is let in and has its state
    assert sum(report.ranks[slow].reach == 1 for report in reports[-10:]) > 5, log


@pytest.mark.parametrize("slow", [2, 0])
def test_rank_is_put_out_in_the_middle_of_a_merge_that_is_long_because_of_its_link(slow):
    never_between_steps = Impaired(slow, found=False)
    found_by = 1 - min(slow, 1)  # the lowest of those that are left
    with run_job(NUM_RANKS, train, never_between_steps, found_by) as job:
        results = [job.result(rank) for rank in range(NUM_RANKS)]
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
