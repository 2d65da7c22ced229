"""A small training loop for jobs whose members come and go, and what a rank had at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from members import Board
from ranks import digest, staged
from torch import Tensor, nn

from straggle import (
    BalancedByTime,
    Elastic,
    Estimator,
    FixedDeadline,
    LateHandling,
    MembersReport,
    StepReport,
)
from straggle.backward import stages

STEP_S = 0.015


class Position:
    """Where the data is: a state that is neither the model's nor the optimizer's."""

    def __init__(self, ballast: int = 0) -> None:
        self.drawn = 0
        self.ballast = torch.zeros(ballast)

    def draw(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.drawn + rank)
        self.drawn += 1
        return torch.randn(8, 4, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


@dataclass
class Outcome:
    """What a rank had at the end, and what it was told meanwhile."""

    begun: int
    step: int
    state: dict[str, Any]
    drawn: int
    reports: list[StepReport] = field(repr=False)
    changes: list[MembersReport] = field(repr=False)
    last_change: MembersReport | None = None


@dataclass(frozen=True)
class Loop:
    """How a rank trains; ``hit(rank, step, board)`` is called in each of its steps, and ends the loop if it says so."""

    network: Callable[[], nn.Module]
    hit: Callable[[int, int, Board], bool | None] | None = None
    elastic: Elastic = Elastic(suspect_s=1.0)
    deadline_s: float | None = None
    ballast: int = 0
    max_lag: int = 8
    give_up_s: float = 300.0
    stages: BalancedByTime | None = None
    estimator: Estimator | None = None


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))


def wider() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 17), nn.ReLU(), nn.Linear(17, 16), nn.Linear(16, 2))


class Remembers(nn.Module):
    """Holds what is no gradient, and other on each rank before the merge: a flag, a small sum, a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("total", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("highest", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.trained(x)
        seen = y.detach()
        self.flag = seen.mean() > 0
        self.total += 0.01 * seen[0]
        self.mean.mul_(0.9).add_(seen.mean(0))
        self.highest = seen.amax(0) if self.highest is None else self.highest.maximum(seen.amax(0))
        for a, b in zip(self.trained.parameters(), self.frozen.parameters(), strict=True):
            b.data.mul_(0.9).add_(a.data, alpha=0.1).add_(seen.mean(), alpha=0.01)
        return y - self.frozen(x)


def with_state() -> nn.Module:
    """A model that holds all kinds of what is no gradient."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), Remembers())


def train(rank: int, board: Board, loop: Loop) -> Outcome:
    """Train until the board says that it is over."""
    stages.BUCKET_BYTES = 1
    data = Position(loop.ballast)
    changes: list[MembersReport] = []
    reports: list[StepReport] = []
    deadline = None if loop.deadline_s is None else FixedDeadline(loop.deadline_s)
    late_handling = LateHandling(max_lag=loop.max_lag, give_up_s=loop.give_up_s)
    options = {"stages": loop.stages, "deadline": deadline, "estimator": loop.estimator, "members": loop.elastic}
    network = loop.network()
    network.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))  # which a rank that is late skips
    with staged(network, late_handling=late_handling, **options) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.99)
        begun = step = model.register_state(optimizer=optimizer, scheduler=scheduler, data=data)
        model.register_members_hook(changes.append)
        while step < board.end:
            with model.step():
                batch = data.draw(rank)  # before all that may stop the step, so that it is drawn in each
                if loop.hit is not None and loop.hit(rank, step, board):
                    break
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            assert model.last_report is not None
            reports.append(model.last_report)
            board.note(rank, step)
        state = {
            "parameters": digest(model.module.parameters()),
            "buffers": digest(model.module.buffers()),
            "optimizer": digest(value for own in optimizer.state.values() for value in own.values()),
            "lr": scheduler.get_last_lr(),
            "estimator": digest(model.estimator.memory.values()),
        }
        return Outcome(begun, step, state, data.drawn, reports, changes, model.last_members_report)


def check_equal(outcomes: Sequence[Outcome]) -> None:
    """All have the same bits at the same step, and the data at the same place."""
    states = [(own.step, own.drawn, own.state) for own in outcomes]
    assert all(state == states[0] for state in states), states
    assert outcomes[0].drawn == outcomes[0].step


def left(outcome: Outcome) -> dict[int, str]:
    """Who left and why, in all changes that a rank has seen before the end."""
    return {rank: why for change in outcome.changes for rank, why in change.left.items() if why != "ended"}


def joined(outcome: Outcome) -> set[int]:
    """Who was let in, in all of them."""
    return {rank for change in outcome.changes for rank in change.joined}


def absent(outcome: Outcome, rank: int) -> list[int]:
    """The steps that a rank reported to have been made without another."""
    return [report.step for report in outcome.reports if report.ranks[rank].absent]


def gives_again(outcome: Outcome, *ranks: int) -> bool:
    """Whether these ranks have given all their gradients in most of the last steps."""
    last = outcome.reports[-10:]
    return all(sum(report.ranks[rank].reach == 1 for report in last) > 5 for rank in ranks)
