"""The training loop of a drawn schedule, and what it sees of each step, beside what the reports say of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from scales import LAYERS, NUM_LAYERS, TOLERANCE, Expected, Scales, at_random, factor_of, gradients_of

from straggle import MembersChanged, StagedDataParallel
from straggle.lab.world.run import Rank, parameters_of

LAYER_S = 0.005  # forward, and as long backward


class OwnError(Exception):
    """The loop's own code raises."""


@dataclass
class Plan:
    """What `scales.Expected` asks of a job."""

    estimator: Any
    num_parts: int
    num_microbatches: int
    nan: float
    tolerance: float = field(default=TOLERANCE)


@dataclass
class Seen:
    """What a rank has seen of its own work in a step, in the world's time."""

    entered_at: float
    weight: float = 1.0
    begun: list[int] = field(default_factory=list)  # parts of a pool, or micro-batches
    done: list[int] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0
    away_s: float = 0.0  # before the step
    work_over_at: float | None = None  # it came to the end of the block, and was not stopped
    left_at: float = 0.0
    left_early: bool = False  # the block, by the loop's own will
    error: bool = False  # of its own code in a pass, which the loop caught


class Counted:
    """State of the loop's own: how many steps were made."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """For a rank that comes back."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """That of a peer."""
        self.steps = state["steps"]


def plan_of(schedule: Any, estimator: Any) -> Plan:
    """Of a `Schedule`."""
    plan = Plan(estimator, schedule.num_parts, schedule.num_microbatches, schedule.nan)
    if schedule.wire_dtype:
        plan.tolerance = 0.02
    return plan


def num_batches(rank: int, epoch: int) -> int:
    """How many batches a rank has for this loop over `StagedDataParallel.join`."""
    return 2 + int(6 * at_random("batches", rank, epoch))


class Loop:
    """One process of a rank. ``problems``: what was merged otherwise than the reports say."""

    def __init__(self, rank: Rank, schedule: Any) -> None:
        self.rank, self.schedule, self.problems = rank, schedule, list[str]()
        self.module = Scales(counts=schedule.buffers != "none")
        self._slow_layers(schedule.slow[rank.number] if schedule.slow else 1.0)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.5)
        options = schedule.options(self._optimizer)
        self._plan = plan_of(schedule, options["estimator"])
        self.model = StagedDataParallel(self.module, stages=LAYERS, **options)
        self._counted, self._epoch, self._in_epoch = Counted(), -1, 0
        self._step = self.model.register_state(optimizer=self._optimizer, counted=self._counted)
        self.model.register_members_hook(
            lambda report: rank.note(generation=report.generation, members=report.ranks, kinds=dict(report.left_kinds))
        )
        self._expected, self._next_step = Expected(self._plan), 0
        self._away_s = 0.0

    def _slow_layers(self, slow: float) -> None:
        for layer in self.module.layers:
            layer.register_forward_pre_hook(lambda *_: self.rank.work(slow * LAYER_S))
            layer.weight.register_hook(lambda _: self.rank.work(slow * LAYER_S))

    def run(self) -> list[str]:
        """Train."""
        try:
            for _ in self._batches():
                if self._step >= self.schedule.steps:
                    break
                self._between_steps()
                if self._one_step():
                    break
        finally:
            self.model.close()
        return self.problems

    def _batches(self) -> Iterator[Any]:
        """Without end. A loop over `join` that is over has had all batches of this rank."""
        for self._epoch in itertools.count():
            number, self._in_epoch = num_batches(self.rank.number, self._epoch), 0
            batches = self.model.join(range(number)) if self.schedule.joins else (None,)
            for batch in batches:
                self._in_epoch += 1
                yield batch
            if self.schedule.joins and 0 < self._in_epoch < number:
                self.rank.note(batches_left=number - self._in_epoch, epoch=self._epoch)

    def _between_steps(self) -> None:
        for other, at, seconds in self.schedule.away:
            if (other, at) == (self.rank.number, self._step):
                self.rank.work(seconds)
                self._away_s += seconds

    def _one_step(self) -> bool:
        """One step; whether it was this process's last one."""
        rank, schedule, model, departure = self.rank, self.schedule, self.model, None
        seen, self._away_s = Seen(rank.now, away_s=self._away_s), 0.0
        with model.step(schedule.num_microbatches) as opened:
            before = gradients_of(self.module)  # a rank that comes back has those of its peers by now
            if schedule.raises == (rank.number, self._step):
                raise OwnError
            departure = opened.departure
            if departure is not None and rank.is_told:
                departure.ask()
            if schedule.weighs and not schedule.num_parts:
                opened.weight = seen.weight = 1 + int(3 * at_random("weight", rank.number, self._step))
            opened.log(own=float(rank.number + 1))
            self._passes(opened, seen)
            seen.work_over_at = rank.now
        seen.left_at = rank.now
        self._after(seen, before)
        if (every := schedule.collectives_every) and (self._step - 1) % every == 0:
            self._collectives(self._step - 1)
        return departure is not None and departure.ends_after(self._step - 1)

    def _passes(self, opened: Any, seen: Seen) -> None:
        rank, schedule, plan = self.rank, self.schedule, self._plan
        parts = opened.pull(range(schedule.num_parts)) if schedule.num_parts else range(plan.num_microbatches)
        for part in parts:
            if (rank.number, self._step) in schedule.leaves:
                seen.left_early = True
                return
            seen.begun.append(part)
            factors = [factor_of(plan, rank.number, self._step, part, layer) for layer in range(NUM_LAYERS)]
            began_at = rank.now
            loss = self.model(factors) / plan.num_microbatches
            seen.forward_s += (between := rank.now) - began_at
            loss.backward()
            seen.backward_s += rank.now - between
            seen.done.append(part)

    def _collectives(self, step: int) -> None:
        """A sum and a gathering of the loop's own, which are repeated if the members have changed."""
        rank = self.rank
        total, repeats = torch.tensor([float(rank.number + 1), 0.0]), 0
        dist.all_reduce(total)
        summed_by = dist.get_world_size()
        while True:
            came = [torch.zeros(2) for _ in range(dist.get_world_size())]
            try:
                dist.all_gather(came, torch.tensor([float(rank.number), float(step)]))
                break
            except MembersChanged:
                repeats += 1
        each = [(int(own[0]), int(own[1])) for own in came]
        rank.note(own_after=step, total=float(total[0]), summed_by=summed_by, each=each, repeats=repeats)

    def _after(self, seen: Seen, before: dict[str, float | None]) -> None:
        rank, report = self.rank, self.model.last_report
        assert report is not None
        absent, now = report.ranks[rank.number].absent, gradients_of(self.module)
        unchanged = {name for name, own in now.items() if own is not None and own == before[name]}
        gradients = {name: None if name in unchanged else _added(own, before[name]) for name, own in now.items()}
        if not absent:
            is_known = any(own.reach for own in report.ranks) or self.schedule.zero_every == 1
            if report.step == self._next_step and is_known:  # what is kept is seen by the first pass of any rank
                self.problems += self._expected.problems(report, gradients, unchanged)
            elif report.step != self._next_step:  # it was away, and has not seen all that was merged
                self._expected = Expected(self._plan, was_away=True)
            self._expected.note(report, gradients)
            self._next_step = report.step + 1
        self._optimizer.step()
        self._step = report.step + 1
        if self._step % self.schedule.zero_every == 0:
            self._optimizer.zero_grad()
        self._counted.steps += 1
        if not absent:
            self._note(seen, report)

    def _note(self, seen: Seen, report: Any) -> None:
        told = [repr(report.ranks), repr((report.scalars, report.skipped, report.stages, report.pool_parts))]
        told.append(f"a deadline of {report.deadline_s} s")
        if report.shadow is not None:  # without this rank's own time
            told.append(repr(replace(report.shadow, seconds=0.0)))
        self.rank.note(
            step=report.step,
            parameters=parameters_of(self.module, buffers=True),
            told=told,
            absent=[own.rank for own in report.ranks if own.absent],
            seen=seen,
            report=report,
            counted=self._counted.steps,
        )


def _added(now: float | None, before: float | None) -> float | None:
    """What a step has added to the gradient that was there."""
    return now if now is None or before is None else now - before
