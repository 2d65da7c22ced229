"""Which ranks are there, for trainers whose ranks leave and come back: one of them is the main process of each step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from straggle import Elastic, FixedDeadline, LateHandling, StagedDataParallel
from straggle.integrations.member_data import There
from straggle.lab.world.faults import Freeze, Kill
from straggle.lab.world.run import run_world

STEPS = 60


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("at_s", [0.25, 0.3, 0.34])
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_main_process_of_each_step_has_made_it_itself_though_a_rank_comes_back_late(
    how: str, at_s: float, victim: int
) -> None:
    def loop(rank: Any) -> None:
        layer, there = torch.nn.Linear(2, 2), There()
        layer.weight.register_hook(lambda gradient: rank.work(0.02) or gradient)
        model = StagedDataParallel(
            layer,
            deadline=FixedDeadline(0.1),
            late_handling=LateHandling(max_lag=64),
            members=Elastic(1, suspect_s=0.5),
        )
        step = model.register_state(there=there)
        while step < STEPS:
            with model.step():
                model(torch.ones(1, 2)).sum().backward()
            report = model.last_report
            assert report is not None
            rank.note(step=report.step, there=there.merged(report), absent=report.ranks[rank.number].absent)
            if rank.number == victim and report.step % 10 == 9:
                rank.work(0.8)  # its loop comes to its next step when the others have made several
            step = report.step + 1
        model.close()

    fault: Any = Freeze(victim, at_s, 1.2) if how == "frozen" else Kill(victim, at_s, 0.3)
    done = run_world(loop, ranks=3, seed=1, faults=[fault])
    for step in range(STEPS):
        notes = {rank: note for rank, own in done.notes.items() for note in own if note.get("step") == step}
        # what most say: one that is put out in a step may take that for merged
        (ranks, _), *_ = Counter(tuple(note["there"]) for note in notes.values()).most_common()
        assert ranks[0] in notes, step
        assert notes[ranks[0]]["there"] == list(ranks), step
        assert not notes[ranks[0]]["absent"], step


def test_one_member_is_the_lowest_in_each_step_and_the_next_one_when_it_is_gone() -> None:
    def loop(rank: Any) -> None:
        layer = torch.nn.Linear(2, 2)
        layer.weight.register_hook(lambda gradient: rank.work(0.02) or gradient)
        model = StagedDataParallel(layer, members=Elastic(1, suspect_s=0.5))
        rank.note(step=-1, lowest=model.is_lowest)
        for _ in range(20):
            with model.step():
                model(torch.ones(1, 2)).sum().backward()
            assert model.last_report is not None
            rank.note(step=model.last_report.step, lowest=model.is_lowest)
        model.close()

    done = run_world(loop, ranks=3, seed=1, faults=[Kill(0, 0.3)])
    lowest = [
        [rank for rank, own in done.notes.items() for note in own if note["step"] == step and note["lowest"]]
        for step in range(-1, 20)
    ]
    num_first = lowest.index([1])
    assert 5 < num_first < 20
    assert lowest == [[0]] * num_first + [[1]] * (21 - num_first)
