"""How contributions become one: choices of the merge, and the module's own buffers on their way through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Buffers = Literal["mean", "rank0", "local"]
Nonfinite = Literal["drop", "keep"]


@dataclass(frozen=True)
class Merge:
    """What is merged beside the gradients, and what is left out.

    ``buffers``: a module's persistent buffers, such as BatchNorm's statistics, get the "mean" of the ranks that
    finished the forward pass, or the values of "rank0" (where it did; as DDP, but after the step instead of before),
    the same on every rank; "local" leaves each rank its own.

    ``nonfinite``: "drop" leaves gradients with NaN or infinite elements out of the merge, and skips the step where no
    rank has others; "keep" merges them as they are, as DDP does, which a ``GradScaler`` relies on.

    ``check_every``: once in so many steps the ranks compare their parameters (`StepReport.different_ranks`); 0: never.
    """

    buffers: Buffers = "mean"
    nonfinite: Nonfinite = "drop"
    check_every: int = 100

    def __post_init__(self) -> None:
        for name, kind in (("buffers", Buffers), ("nonfinite", Nonfinite)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")
        if self.check_every < 0:
            raise ValueError(f"check_every={self.check_every}: a number of steps, or 0 to compare never")

    def checks(self, step: int) -> bool:
        """Whether the ranks compare their parameters in ``step``; in the first they are equal by construction."""
        return self.check_every > 0 and step > 0 and step % self.check_every == 0


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
