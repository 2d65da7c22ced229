"""The ranks' telemetry in the last merged steps: the same on every rank, so that policies decide the same."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_MEANS = ("mean_cost", "mean_microbatches")


@dataclass(frozen=True)
class Progress:
    """Each rank's progress through each step, for policies that need more than times (`Deadline.wants_progress`).

    A step's work is counted in units, which are finished one after another: its micro-batches but the last, and the
    stages of the last one; with ``granularity="microbatch"`` all its micro-batches, with ``"step"`` there is one unit.
    ``unit_s``, of shape (steps, ranks, units), has the seconds from entering the step to each unit's end, NaN if it
    never came; ``unit_share``, of the same shape, the share of the rank's gradient in the unit (0: the rank had fewer
    units).

    ``computed`` of shape (steps, ranks, stages) is the share of each stage that the rank submitted; ``stage_share`` of
    shape (stages,) the share of the model that a stage is; ``weight`` of shape (steps, ranks) the weight of the rank's
    step (0: it had no data). ``entered_s`` of shape (steps, ranks): seconds from the end of the step before to entering
    this one; for a rank that never entered, to when it was stood in for; NaN if it is no member. ``overhead_s`` of
    shape (steps,): from the end of the slowest rank's own work to the end of the step, as in the step before.
    """

    unit_s: Tensor
    unit_share: Tensor
    computed: Tensor
    stage_share: Tensor
    weight: Tensor
    entered_s: Tensor
    overhead_s: Tensor


@dataclass(frozen=True)
class History:
    """Telemetry of the last ``window`` merged steps, oldest first, equal on every rank.

    ``compute_s`` and ``finished`` have the shape (steps, ranks). If ``finished`` is false the rank was stopped, and its
    ``compute_s`` is only a lower bound; NaN means that it never entered the step. ``num_steps`` counts all merged
    steps, also those that have left the window. ``progress`` covers the last of these steps, those made with the stages
    as they are now; ``None`` for policies that do not ask for it. ``mean_cost``: ``compute_s`` and `Progress.unit_s`
    are scaled to steps of this cost (`Step.cost`); NaN: no costs were given. ``mean_microbatches``: the same in
    micro-batches, for steps without a cost; NaN: times are as measured. ``dealt``: each rank gets as much work as it
    has time for, by `Rebalance` or from a pool; and ``evenly``, if no rank is slow whatever it is given.
    """

    num_steps: int
    compute_s: Tensor
    finished: Tensor
    progress: Progress | None = None
    mean_cost: float = math.nan
    dealt: bool = False
    mean_microbatches: float = math.nan
    evenly: bool = True

    def last(self, steps: int, before: int = 0) -> History:
        """Its last ``steps`` steps, not counting the ``before`` steps at its end."""
        first, end = (max(0, len(self.compute_s) - before - more) for more in (steps, 0))
        progress = self.progress
        if progress is not None:
            parts = {name: value for name, value in vars(progress).items() if name != "stage_share"}
            stop = len(progress.unit_s) - before
            kept = {name: value[max(0, stop - steps) : max(0, stop)] for name, value in parts.items()}
            progress = Progress(stage_share=progress.stage_share, **kept)
        rows = self.compute_s[first:end], self.finished[first:end]
        return replace(self, num_steps=self.num_steps - before, compute_s=rows[0], finished=rows[1], progress=progress)

    def of_ranks(self, number: int) -> History:
        """This history for the first ``number`` ranks; a rank that it lacks has entered no step and given nothing."""
        progress = self.progress
        if progress is not None:
            rows = {name: value for name, value in vars(progress).items() if name not in ("stage_share", "overhead_s")}
            nothing = {"unit_s": math.nan, "unit_share": None, "entered_s": math.nan}
            resized = {name: _of_ranks(value, number, nothing.get(name, 0.0)) for name, value in rows.items()}
            progress = replace(progress, **resized)
        compute_s, finished = _of_ranks(self.compute_s, number, math.nan), _of_ranks(self.finished, number, False)
        return replace(self, compute_s=compute_s, finished=finished, progress=progress)

    def tensors(self) -> dict[str, Tensor]:
        """The history as tensors of its own, to be saved."""
        parts = {"num_steps": torch.tensor(self.num_steps), "compute_s": self.compute_s, "finished": self.finished}
        parts |= {f"progress.{name}": value for name, value in vars(self.progress).items()} if self.progress else {}
        means = {name: getattr(self, name) for name in _MEANS}
        parts |= {name: torch.tensor(mean, dtype=torch.float64) for name, mean in means.items() if not math.isnan(mean)}
        return {name: tensor.clone() for name, tensor in parts.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> History:
        """The history of a result of `tensors`; raises ``ValueError`` for one of an older version."""
        parts = {name.removeprefix("progress."): t for name, t in tensors.items() if name.startswith("progress.")}
        if parts and (missing := {field.name for field in fields(Progress)} - parts.keys()):
            raise ValueError(
                f"the saved history has no {', '.join(sorted(missing))}: it is of an older version; begin without it, "
                "and the deadline is learned again"
            )
        progress = Progress(**parts) if parts else None
        history = History(int(tensors["num_steps"]), tensors["compute_s"], tensors["finished"], progress)
        mean_cost, mean_microbatches = (float(tensors.get(name, math.nan)) for name in _MEANS)
        return replace(history, mean_cost=mean_cost, mean_microbatches=mean_microbatches)


def _of_ranks(values: Tensor, number: int, missing: float | None) -> Tensor:
    """Of shape (steps, ranks, ...), for ``number`` ranks; ``missing=None``: missing ranks are like the first."""
    kept = values[:, :number]
    if (more := number - kept.shape[1]) <= 0:
        return kept
    row = kept[:, :1] if missing is None else torch.full_like(kept[:, :1], missing)
    return torch.cat([kept, row.expand(-1, more, *row.shape[2:])], 1)


@dataclass(frozen=True)
class StepProgress:
    """One step of `Progress`: of shape (ranks, units), (ranks, units), (ranks, stages), (ranks,), (ranks,) and ()."""

    unit_s: Tensor
    unit_share: Tensor
    computed: Tensor
    weight: Tensor
    entered_s: Tensor
    overhead_s: Tensor


@dataclass(frozen=True)
class ProgressRow:
    """A step's `StepProgress` as plain memory, in float32.

    For each rank, one after the other, its ``unit_s``, ``unit_share`` and ``computed``, and then its ``weight``,
    ``entered_s`` and the step's ``overhead_s``.
    """

    numbers: array[float]
    num_units: int
    num_stages: int


class HistoryWindow:
    """The steps that a policy sees: each row is written twice, so that the window always lies in one piece."""

    def __init__(self, window: int, world_size: int) -> None:
        self._window = window
        # plain memory below the tensors: a write costs a tenth of a write to a tensor
        self._seconds = array("d", [math.nan]) * (2 * window * world_size)
        self._flags = bytearray(2 * window * world_size)
        self._compute_s = torch.frombuffer(self._seconds, dtype=torch.float64).view(2 * window, world_size)
        self._finished = torch.frombuffer(self._flags, dtype=torch.bool).view(2 * window, world_size)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # views of a full window, by its end
        self.mean_cost, self.mean_microbatches, self.dealt = math.nan, math.nan, False
        self._evenly = [(0, True)]  # from these numbers of steps on
        self._num_steps = 0
        self._progress: ProgressWindow | None = None

    def scale(self, *, cost: float = math.nan, microbatches: float = math.nan) -> None:
        """Times are of steps of this cost, or of so many micro-batches, from here on; NaN: as before."""
        self.mean_cost = self.mean_cost if math.isnan(cost) else cost
        self.mean_microbatches = self.mean_microbatches if math.isnan(microbatches) else microbatches

    def deal(self, *, evenly: bool, from_step: int) -> None:
        """Work is dealt; from so many merged steps on no rank is slow whatever it is given, or some rank is."""
        self.dealt = True
        self._evenly = [(step, own) for step, own in self._evenly if step < from_step] or [(0, True)]
        self._evenly = [*self._evenly[-2:], (from_step, evenly)]

    def append(
        self,
        compute_s: Sequence[float],
        finished: Sequence[bool],
        progress: StepProgress | ProgressRow | None = None,
    ) -> History:
        """Add a merged step, with a number for each rank; returns the history as it is now."""
        ranks, slot = len(compute_s), self._num_steps % self._window
        seconds, flags = array("d", compute_s), bytes(finished)
        for row in (slot, slot + self._window):
            self._seconds[row * ranks : (row + 1) * ranks] = seconds
            self._flags[row * ranks : (row + 1) * ranks] = flags
        self._num_steps += 1
        if self._progress is not None and progress is not None:
            self._progress.append(progress)
        return self.read()

    def watch(self, stage_share: Tensor) -> None:
        """From here on keep the progress through these stages; forget that through other stages."""
        if self._progress is None or not torch.equal(self._progress.stage_share, stage_share):
            self._progress = ProgressWindow(self._window, stage_share)

    def read(self) -> History:
        """The history as it is now; its tensors are views."""
        end = (self._num_steps - 1) % self._window + self._window + 1
        progress = None if self._progress is None else self._progress.read()
        if (seen := self._views.get(end)) is None:
            rows = slice(end - min(self._num_steps, self._window), end)
            seen = self._compute_s[rows], self._finished[rows]
            if self._num_steps >= self._window:
                self._views[end] = seen
        evenly = next((own for step, own in reversed(self._evenly) if step <= self._num_steps), True)
        return History(self._num_steps, *seen, progress, self.mean_cost, self.dealt, self.mean_microbatches, evenly)

    def restore(self, history: History) -> None:
        """Go on from a history that was saved."""
        self._num_steps = history.num_steps - len(history.compute_s)
        self.mean_cost, self.mean_microbatches = history.mean_cost, history.mean_microbatches
        for compute_s, finished in zip(history.compute_s.tolist(), history.finished.tolist(), strict=True):
            self.append(compute_s, finished)
        if history.progress is not None:
            self._progress = ProgressWindow(self._window, history.progress.stage_share)
            self._progress.restore(history.progress)


class ProgressWindow:
    """The progress of the last steps through the same stages."""

    def __init__(self, window: int, stage_share: Tensor) -> None:
        self._window = window
        self.stage_share = stage_share
        self._rows: Tensor | None = None  # (steps, ranks, all numbers of a rank): one write is cheaper than six
        self._numbers = array("f")  # the same memory, if the numbers are in float32
        self._widths: list[int] = []
        self._views: dict[int, Progress] = {}  # views of a full window, by its end
        self._num_steps = 0

    def append(self, step: StepProgress | ProgressRow) -> None:
        """Add a step."""
        slot = self._num_steps % self._window
        if isinstance(step, ProgressRow):
            self._write_numbers(step, slot)
        else:
            self._write(step, slot)
        self._num_steps += 1

    def _write(self, step: StepProgress, slot: int) -> None:
        overhead_s = step.overhead_s.to(step.weight).expand_as(step.weight)
        alone = torch.stack([step.weight, step.entered_s, overhead_s], 1)
        row = torch.cat([step.unit_s, step.unit_share, step.computed, alone], 1)
        if self._rows is None:
            self._widths = [part.shape[1] for part in (step.unit_s, step.unit_share, step.computed, alone)]
            self._rows = self._allocate(len(row), row.dtype)
        self._rows[slot] = self._rows[slot + self._window] = row

    def _write_numbers(self, step: ProgressRow, slot: int) -> None:
        """Write to plain memory, because every step waits for this and tensor operations take ten times as long."""
        length = len(step.numbers)
        if self._rows is None:
            self._widths = [step.num_units, step.num_units, step.num_stages, 3]
            self._rows = self._allocate(length // sum(self._widths), torch.float32)
        for row in (slot, slot + self._window):
            if self._numbers:
                self._numbers[row * length : (row + 1) * length] = step.numbers
            else:  # the restored history has another dtype
                self._rows[row] = torch.frombuffer(step.numbers, dtype=torch.float32).view(self._rows[row].shape)

    def _allocate(self, num_ranks: int, dtype: torch.dtype) -> Tensor:
        shape = 2 * self._window, num_ranks, sum(self._widths)
        if dtype is not torch.float32:
            return torch.zeros(shape, dtype=dtype)
        self._numbers = array("f", bytes(4 * math.prod(shape)))
        return torch.frombuffer(self._numbers, dtype=dtype).view(shape)

    def read(self) -> Progress | None:
        """The progress as it is now; its tensors are views."""
        if self._rows is None:
            return None
        end = (self._num_steps - 1) % self._window + self._window + 1
        if (seen := self._views.get(end)) is None:
            rows = self._rows[end - min(self._num_steps, self._window) : end]
            unit_s, unit_share, computed, alone = torch.split(rows, self._widths, -1)
            weight, entered_s, overhead_s = alone.unbind(-1)
            seen = Progress(unit_s, unit_share, computed, self.stage_share, weight, entered_s, overhead_s[:, 0])
            if self._num_steps >= self._window:
                self._views[end] = seen
        return seen

    def restore(self, progress: Progress) -> None:
        """Go on from a saved progress."""
        parts = {name: value for name, value in vars(progress).items() if name != "stage_share"}
        for step in range(len(progress.unit_s)):
            self.append(StepProgress(**{name: value[step] for name, value in parts.items()}))
