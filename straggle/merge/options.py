"""The options of the merge: how contributions are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from straggle.policies.deadline import check_count, is_number

Buffers = Literal["mean", "rank0", "local"]
Nonfinite = Literal["drop", "keep"]


@dataclass(frozen=True)
class Merge:
    """What is merged beside the gradients, what is left out, and in which dtype it is sent.

    ``buffers``: a module's persistent buffers, such as BatchNorm's statistics, get the "mean" of the ranks that
    finished the forward pass, or the values of "rank0" (if it did; like DDP, but after the step instead of before), the
    same on every rank; "local" leaves each rank its own. Buffers without a mean, such as booleans, codes that fall (on
    a CUDA device all integers of 8 bits), complex numbers and float8, are taken from the lowest of these ranks. Frozen
    parameters that change in the forward pass get the mean if they are floating-point; else they, too, are taken from
    that rank.

    ``nonfinite``: "drop" leaves gradients with NaN or infinite elements out of the merge, and skips the step if no rank
    has others; on a CUDA device it leaves out all gradients in one bucket with such a gradient, and a step without
    others has gradients of zeros, with which a fused optimizer changes nothing. "keep" merges them as they are, as DDP
    does, which a ``GradScaler`` relies on; it needs gradients in each step, so what no rank has computed is zeros until
    an optimizer steps, which finds none.

    ``check_every``: once in this many steps the ranks compare parameters and buffers (`StepReport.different_ranks`);
    0: never. In such a step the host waits for a CUDA device.

    ``wire_dtype``: ``torch.bfloat16``, or its name, halves the bytes of float32 gradients: each rank rounds its own,
    and they are summed in that dtype, as by DDP's ``bf16_compress_hook``. Weights stay exact, and replicas equal.

    ``log_every_s``: if ranks give less than all of their gradients, the lowest rank logs whose and how many (logger
    ``straggle``) after the first 20 such steps or so many seconds, then at most once in so many seconds, and when the
    model is closed; infinite: never. The first line is a warning, and the last is if a rank gave less than half.
    """

    buffers: Buffers = "mean"
    nonfinite: Nonfinite = "drop"
    check_every: int = 100
    wire_dtype: torch.dtype | str | None = None
    log_every_s: float = 60.0

    def __post_init__(self) -> None:
        for name, kind in (("buffers", Buffers), ("nonfinite", Nonfinite)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}")
        check_count("check_every", self.check_every)  # 0: never
        if not is_number(self.log_every_s) or not self.log_every_s > 0:
            raise ValueError(
                f"log_every_s={self.log_every_s}: must be a positive number of seconds, such as 60 (infinite: what is "
                "dropped is not logged)"
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
        """The dtype in which float32 gradients are sent; ``None`` if they are not converted."""
        return None if self.wire_dtype is None else torch.bfloat16

    def checks(self, step: int) -> bool:
        """Whether the ranks compare parameters and buffers in ``step``; in the first they are equal by construction."""
        return self.check_every > 0 and step > 0 and step % self.check_every == 0
