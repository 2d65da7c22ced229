"""Real ranks for the experiments: processes in a gloo group, whose layers sleep as long as a simulation's units take.

Sleeps stand for compute, so that ranks that share few cores do not contend. A layer sleeps until a moment that counts
from entering the step, so that neither late awakenings nor the work between the sleeps add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.simulate.units import Work
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import Deadline, LateHandling

SLICES = 4  # layers, into which a stage's time is divided


@dataclass(frozen=True)
class Method:
    """How a run treats late ranks; ``deadline`` makes one in each process."""

    deadline: Callable[[], Deadline]
    late_handling: LateHandling = field(default_factory=LateHandling)


@dataclass(frozen=True)
class Setup:
    """What is run: ``unit_s`` (steps, ranks, units) seconds of each unit of ``work`` (`Work.units`).

    Where units are micro-batches, all their time passes in the forward pass, between whose layers a rank can stop.
    The methods take turns of ``block`` steps.
    """

    unit_s: Tensor
    work: Work
    methods: Mapping[str, Method]
    whole_microbatches: bool = False
    block: int = 25


@dataclass(frozen=True)
class Measured:
    """One method's steps on one rank, all of shape (steps,).

    ``overhead_s``: beside the slowest rank's own work. ``predicted``: what the policy expected to be dropped.
    """

    step_s: Tensor
    dropped: Tensor
    overhead_s: Tensor
    predicted: Tensor

    def after(self, steps: int) -> Measured:
        """Its steps without the first ``steps``."""
        return Measured(*(column[steps:] for column in vars(self).values()))


def run_real(setup: Setup, timeout_s: float = 1800.0) -> dict[str, Measured]:
    """Every method's steps as rank 0 saw them. Raises ``RuntimeError`` where the ranks do not end in time."""
    rows = run_on_ranks(_rank, setup.unit_s.shape[1], setup, timeout_s=timeout_s)[0]
    return {name: Measured(*torch.tensor(own, dtype=torch.float64).unbind(1)) for name, own in rows.items()}


def _rank(rank: int, setup: Setup) -> dict[str, list[tuple[float, ...]]]:
    """One process."""
    runs = {name: _Run(setup, method, rank) for name, method in setup.methods.items()}
    steps = len(setup.unit_s)
    for turn, first in enumerate(range(0, steps, setup.block)):
        for name in sorted(runs, reverse=bool(turn % 2)):
            dist.barrier()
            runs[name].turn(range(first, min(first + setup.block, steps)))
    dist.barrier()
    for run in runs.values():
        run.model.close()
    return {name: run.rows for name, run in runs.items()}


class _Run:
    """One method on one rank."""

    def __init__(self, setup: Setup, method: Method, rank: int) -> None:
        self._setup = setup
        self._rank = rank
        self._sleeps = _Sleeps()
        stages = setup.work.num_stages
        layers = stages * (1 if setup.whole_microbatches else SLICES)
        net = nn.Sequential(*(_Layer(self._sleeps) for _ in range(layers)))
        self.model = StagedDataParallel(
            net, stages=stages, deadline=method.deadline(), late_handling=method.late_handling
        )
        self._num_layers = layers
        self.rows: list[tuple[float, ...]] = []

    def turn(self, steps: Sequence[int]) -> None:
        """Some steps."""
        before = time.perf_counter()
        for number in steps:
            predicted = self.model.predicted_drop
            self._step(self._setup.unit_s[number, self._rank].tolist())
            now = time.perf_counter()
            report = self.model.last_report
            assert report is not None
            slowest_s = max(rank.compute_s for rank in report.ranks)
            self.rows.append((now - before, report.dropped_share, now - before - slowest_s, predicted))
            before = now

    def _step(self, unit_s: list[float]) -> None:
        passes = self._schedule(unit_s)
        with self.model.step(num_microbatches=len(passes)):
            self._sleeps.begin()
            for targets in passes:
                self._sleeps.plan(targets)
                self.model(torch.ones(4, requires_grad=True)).sum().backward()

    def _schedule(self, unit_s: list[float]) -> list[list[float]]:
        """For each pass the moments at which its layers end, forward and then backward, in seconds into the step."""
        layers, ends = self._num_layers, list(accumulate(unit_s, initial=0.0))
        if self._setup.whole_microbatches:
            return [_between(ends[i], ends[i + 1], layers) + [ends[i + 1]] * layers for i in range(len(unit_s))]
        work = self._setup.work
        forward = work.forward_share / (work.forward_share + (1 - work.forward_share) / work.num_stages)
        middle = forward * ends[1]  # the first unit is the forward pass and the last stage's backward pass
        bounds = [middle, *ends[1:]]
        stages = [_between(begin, end, SLICES) for begin, end in pairwise(bounds)]
        return [_between(0.0, middle, layers) + [moment for stage in stages for moment in stage]]


def _between(begin: float, end: float, parts: int) -> list[float]:
    """The ends of equal parts."""
    return [begin + (end - begin) * (n + 1) / parts for n in range(parts)]


class _Sleeps:
    """The moments until which the next layers sleep."""

    def begin(self) -> None:
        """A step begins."""
        self._begin = time.perf_counter()

    def plan(self, targets: Sequence[float]) -> None:
        """The moments of a pass, in the order in which its layers run forward and backward."""
        self._targets = iter(targets)

    def sleep(self) -> None:
        """Sleep until the next moment, if that is not over."""
        left = self._begin + next(self._targets) - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Layer(nn.Module):
    """A parameter, and a sleep in each direction."""

    def __init__(self, sleeps: _Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        self._sleeps.sleep()
        result: Tensor = _Slept.apply(x * self.weight, self._sleeps)  # type: ignore[no-untyped-call]
        return result


class _Slept(torch.autograd.Function):
    """The identity, which sleeps on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeps: _Sleeps) -> Tensor:
        ctx.sleeps = sleeps
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.sleeps.sleep()
        return gradients[0], None
