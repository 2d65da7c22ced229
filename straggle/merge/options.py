"""How contributions become one: choices of the merge, and the module's own buffers on their way through it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from straggle.policies.deadline import check_count, is_number

_log = logging.getLogger(__name__)

Buffers = Literal["mean", "rank0", "local"]
Nonfinite = Literal["drop", "keep"]
Weighting = Literal["count", "inverse_probability"]


@dataclass(frozen=True)
class Merge:
    """What is merged beside the gradients, what is left out, and what a gradient counts.

    ``buffers``: a module's persistent buffers, such as BatchNorm's statistics, get the "mean" of the ranks that
    finished the forward pass, or the values of "rank0" (where it did; as DDP, but after the step instead of before),
    the same on every rank; "local" leaves each rank its own.

    ``nonfinite``: "drop" leaves gradients with NaN or infinite elements out of the merge, and skips the step where no
    rank has others; on a CUDA device it leaves out all that travel in one bucket with such a gradient. "keep" merges
    them as they are, as DDP does, which a ``GradScaler`` relies on.

    ``check_every``: once in this many steps the ranks compare parameters (`StepReport.different_ranks`); 0: never.

    ``weighting``: by "count", every gradient that was computed counts the same. By "inverse_probability", a rank weighs
    what it computed of a stage by the inverse of its own probability of coming so far: the share of the stage that it
    submitted over its last ``probability_window`` steps, since it was away last; at most ``max_weight``. So a rank that
    is often late counts, over many steps, as much in the input layers as in the output layers.

    ``wire_dtype``: ``torch.bfloat16``, or its name, halves the bytes of float32 gradients: each rank rounds its own,
    and they are summed so, as by DDP's ``bf16_compress_hook``. Weights stay exact, and replicas the same.
    """

    buffers: Buffers = "mean"
    nonfinite: Nonfinite = "drop"
    check_every: int = 100
    weighting: Weighting = "count"
    probability_window: int = 50
    max_weight: float = 10.0
    wire_dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("buffers", Buffers), ("nonfinite", Nonfinite), ("weighting", Weighting)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")
        check_count("check_every", self.check_every)  # 0: never
        check_count("probability_window", self.probability_window, least=1)
        if not is_number(self.max_weight) or not self.max_weight >= 1:
            raise ValueError(
                f"max_weight={self.max_weight}: what is weighed by the inverse of its probability weighs at least 1"
            )
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", str(self.wire_dtype).removeprefix("torch."))  # as it is compared
            if self.wire_dtype != "bfloat16":
                raise ValueError(
                    f"wire_dtype={self.wire_dtype}: choose bfloat16 or None; other dtypes have too small a range for "
                    "gradients, or save nothing"
                )

    @property
    def dtype_on_wire(self) -> torch.dtype | None:
        """What gradients of float32 travel as, where that is not as they are."""
        return None if self.wire_dtype is None else torch.bfloat16

    def checks(self, step: int) -> bool:
        """Whether the ranks compare their parameters in ``step``; in the first they are equal by construction."""
        return self.check_every > 0 and step > 0 and step % self.check_every == 0


def inverse_probability(reached_share: Tensor, max_weight: float) -> Tensor:
    """The weight of what a rank computed, where it comes so far in this share of its steps: ``1 / share``.

    Over many steps each rank then counts the same for every stage, however seldom it reaches it (Horvitz and Thompson
    1952); divided by the sum of weights, up to the bias of a ratio. ``max_weight`` bounds that of a rare contribution.
    """
    return (1 / reached_share).clamp(max=max_weight)


class ReachedShares:
    """The share of each stage that a rank submitted, over its last ``window`` steps."""

    def __init__(self, window: int) -> None:
        self._window = window
        # replaced and never changed, because it is read without the lock that whoever submits holds
        self._steps: tuple[tuple[float, ...], ...] = ()

    def append(self, reached: Sequence[float]) -> None:
        """Add a step, a share for each stage; those before it are forgotten where there were other stages."""
        before = self._steps if self._steps and len(self._steps[0]) == len(reached) else ()
        self._steps = (*before, tuple(reached))[-self._window :]

    def factors(self, num_stages: int, max_weight: float) -> list[float] | None:
        """What the next step's gradients are weighed by, for each stage; ``None`` where that is 1 for all of them."""
        if not self._steps or len(self._steps[0]) != num_stages or all(min(step) == 1 for step in self._steps):
            return None
        factors: list[float] = inverse_probability(torch.tensor(self._steps).mean(0), max_weight).tolist()
        return factors

    def tensor(self) -> Tensor:
        """All steps, oldest first, of shape (steps, stages)."""
        return torch.tensor(self._steps)

    def restore(self, steps: Tensor) -> None:
        """Go on from steps that `tensor` gave."""
        self._steps = tuple(tuple(step) for step in steps.tolist())[-self._window :]


class ModuleBuffers:
    """A module's persistent buffers, kept the same on all ranks.

    What travels is by how much each changed in a step: ``merged = before + sum(w * change) / sum(w)``, so that constant
    buffers stay exactly as they are, and a rank that did not finish its forward pass loses its own change. Elements
    that were not finite before (a causal mask, a running maximum that begins at -inf) travel as values, once they are
    finite on all ranks. A buffer that got elements which are not finite is left out, by itself.
    Booleans and complex numbers stay local.
    """

    def __init__(self, module: nn.Module, choice: Buffers, rank: int) -> None:
        persistent = module.state_dict().keys()
        found = {
            name: buffer.detach()
            for name, buffer in module.named_buffers()
            if name in persistent and buffer.dtype is not torch.bool and not buffer.is_complex()
        }
        if choice == "local":
            found = {}
        self._rank = rank
        self._names = list(found)
        # a module may give a buffer another tensor: it is looked up by its owner's name for it
        self._owners = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in found]
        self._contributes = choice == "mean" or rank == 0
        self._before = [buffer.clone() for buffer in found.values()]
        self.begin_anew()
        self._left_out: set[str] = set()  # those that a warning named
        self.numel = sum(buffer.numel() for buffer in self._before) + len(self._before)

    def begin_anew(self) -> None:
        """What the buffers hold now is what they change from: another rank's state was loaded."""
        self._before = [self._current(number).detach().clone() for number in range(len(self._before))]
        self._finite = [_finite_elements(before) for before in self._before]

    def changes(self) -> Tensor | None:
        """This rank's changes since the last merge, and a weight for each buffer; ``None`` where it gives none.

        float32, of shape (``numel``,). Raises ``RuntimeError`` for a buffer that has another shape or dtype by now.
        """
        if not self._contributes or not self._before:
            return None
        changes = [self._change(number).flatten() for number in range(len(self._before))]
        device = changes[0].device
        flat = torch.cat([change.to(device, torch.float32) for change in changes])
        weights = torch.ones(len(changes), device=device)
        if not torch.isfinite(flat).all():
            parts = torch.split(flat, [change.numel() for change in changes])
            for number, (part, finite) in enumerate(zip(parts, self._finite, strict=True)):
                known = torch.isfinite(part)
                if not (known if finite is None else known | ~finite.flatten().to(device)).all():
                    part.zero_()
                    weights[number] = 0.0
                    self._warn(self._names[number])
        return torch.cat([flat, weights])

    def apply(self, merged: Tensor) -> None:
        """Set the buffers from the sum of all ranks' changes and weights; without any weight, to what they were."""
        sizes = [before.numel() for before in self._before]
        parts, weights = torch.split(merged[: sum(sizes)], sizes), merged[sum(sizes) :].tolist()
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            before = self._before[number]
            if weight > 0:
                self._move(number, part.view(before.shape).to(before.device) / weight)
            with torch.no_grad():
                self._current(number).copy_(before)

    def _current(self, number: int) -> Tensor:
        owner, name = self._owners[number]
        buffer, before = getattr(owner, name), self._before[number]
        if not isinstance(buffer, Tensor) or buffer.shape != before.shape or buffer.dtype is not before.dtype:
            now = f"{tuple(buffer.shape)} of {buffer.dtype}" if isinstance(buffer, Tensor) else repr(buffer)
            raise RuntimeError(
                f"rank {self._rank}: buffer {self._names[number]} was {tuple(before.shape)} of {before.dtype} when the "
                f"model was wrapped and is {now}: register it with persistent=False, or give Merge(buffers='local')"
            )
        return buffer

    def _change(self, number: int) -> Tensor:
        """By how much a buffer changed; where it was not finite before, its value; NaN where it is not finite still."""
        value, before, finite = self._current(number).detach(), self._before[number], self._finite[number]
        if finite is None:
            return value - before
        now = torch.where(torch.isfinite(value), value, torch.nan)
        return torch.where(finite, value - before, now)

    def _move(self, number: int, change: Tensor) -> None:
        before, finite = self._before[number], self._finite[number]
        if finite is not None:
            moved = torch.where(finite, before, 0.0) + change
            before.copy_(torch.where(torch.isfinite(change), moved, before))
            self._finite[number] = _finite_elements(before)
        else:
            before += change if before.is_floating_point() else change.round().to(before.dtype)

    def _warn(self, name: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            _log.warning(
                "rank %d: buffer %s has NaN or infinite elements now: it is left out of the merge", self._rank, name
            )


def _finite_elements(buffer: Tensor) -> Tensor | None:
    """Which elements are finite; ``None``: all."""
    finite = torch.isfinite(buffer)
    return None if finite.all() else finite
