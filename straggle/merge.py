"""How contributions become one: choices of the merge, and the module's own buffers on their way through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Buffers = Literal["mean", "rank0", "local"]
Nonfinite = Literal["drop", "keep"]
Weighting = Literal["count", "inverse_chance"]


@dataclass(frozen=True)
class Merge:
    """What is merged beside the gradients, what is left out, and what a gradient counts.

    ``buffers``: a module's persistent buffers, such as BatchNorm's statistics, get the "mean" of the ranks that
    finished the forward pass, or the values of "rank0" (where it did; as DDP, but after the step instead of before),
    the same on every rank; "local" leaves each rank its own.

    ``nonfinite``: "drop" leaves gradients with NaN or infinite elements out of the merge, and skips the step where no
    rank has others; "keep" merges them as they are, as DDP does, which a ``GradScaler`` relies on.

    ``check_every``: once in so many steps the ranks compare their parameters (`StepReport.different_ranks`); 0: never.

    ``weighting``: by "count", every gradient that was computed counts the same. By "inverse_chance", a rank weighs what
    it computed of a stage by the inverse of its own chance of coming so far: the share of the stage that it handed in
    over its last ``chance_window`` steps; ``chance_cap`` at the most. So a rank that is often late counts, over many
    steps, as much in the input layers as in the output layers.
    """

    buffers: Buffers = "mean"
    nonfinite: Nonfinite = "drop"
    check_every: int = 100
    weighting: Weighting = "count"
    chance_window: int = 50
    chance_cap: float = 10.0

    def __post_init__(self) -> None:
        for name, kind in (("buffers", Buffers), ("nonfinite", Nonfinite), ("weighting", Weighting)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")
        if self.check_every < 0:
            raise ValueError(f"check_every={self.check_every}: a number of steps, or 0 to compare never")
        if not isinstance(self.chance_window, int) or self.chance_window < 1:
            raise ValueError(f"chance_window={self.chance_window}: must be a number of steps, such as 50")
        if not self.chance_cap >= 1:
            raise ValueError(
                f"chance_cap={self.chance_cap}: what is weighed by the inverse of its chance weighs at least 1"
            )

    def checks(self, step: int) -> bool:
        """Whether the ranks compare their parameters in ``step``; in the first they are equal by construction."""
        return self.check_every > 0 and step > 0 and step % self.check_every == 0


def inverse_chance(reached_share: Tensor, cap: float) -> Tensor:
    """The weight of what a rank computed, where it comes so far in this share of its steps: ``1 / share``, to ``cap``.

    Over many steps each rank then counts the same for every stage, however seldom it reaches it (Horvitz and Thompson
    1952); divided by the sum of weights, up to the bias of a ratio. The cap bounds the weight of a rare contribution.
    """
    return (1 / reached_share).clamp(max=cap)


class ReachedShares:
    """The share of each stage that a rank handed in, over its last ``window`` steps."""

    def __init__(self, window: int) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=window)

    def append(self, reached: Sequence[float]) -> None:
        """Add a step, a share for each stage; those before it are forgotten where there were other stages."""
        if self._steps and len(self._steps[0]) != len(reached):
            self._steps.clear()
        self._steps.append(tuple(reached))

    def factors(self, num_stages: int, cap: float) -> list[float] | None:
        """What the next step's gradients are weighed by, for each stage; ``None`` where that is 1 for all of them."""
        if not self._steps or len(self._steps[0]) != num_stages or all(min(step) == 1 for step in self._steps):
            return None
        factors: list[float] = inverse_chance(torch.tensor(tuple(self._steps)).mean(0), cap).tolist()
        return factors

    def tensor(self) -> Tensor:
        """All steps, oldest first, of shape (steps, stages)."""
        return torch.tensor(tuple(self._steps))

    def restore(self, steps: Tensor) -> None:
        """Go on from steps that `tensor` gave."""
        self._steps.extend(tuple(step) for step in steps.tolist())


class ModuleBuffers:
    """A module's persistent buffers, kept the same on all ranks.

    What travels is by how much they changed in a step: ``merged = before + sum(w * change) / sum(w)``, so that constant
    buffers stay exactly as they are, and a rank that did not finish its forward pass loses its own change.
    Booleans and complex numbers stay local.
    """

    def __init__(self, module: nn.Module, choice: Buffers, rank: int) -> None:
        persistent = module.state_dict().keys()
        found = {
            name: buffer
            for name, buffer in module.named_buffers()
            if name in persistent and buffer.dtype is not torch.bool and not buffer.is_complex()
        }
        self._buffers = [] if choice == "local" else list(found.values())
        self._contributes = choice == "mean" or rank == 0
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self.numel = sum(buffer.numel() for buffer in self._buffers)

    def changes(self) -> Tensor | None:
        """This rank's changes since the last merge, float32 of shape (``numel``,); ``None`` where it gives none."""
        if not self._contributes or not self._buffers:
            return None
        changes = [buffer.detach() - before for buffer, before in zip(self._buffers, self._before, strict=True)]
        flat = torch.cat([change.flatten().to(changes[0].device, torch.float32) for change in changes])
        return flat if torch.isfinite(flat).all() else None

    def apply(self, changes: Tensor, weight: float) -> None:
        """Set the buffers from the sum of all ranks' changes; without any weight, to what they were."""
        offset = 0
        for buffer, before in zip(self._buffers, self._before, strict=True):
            if weight > 0:
                change = changes[offset : offset + buffer.numel()].view(buffer.shape).to(buffer.device) / weight
                before += change if buffer.is_floating_point() else change.round().to(buffer.dtype)
            offset += buffer.numel()
            with torch.no_grad():
                buffer.copy_(before)
