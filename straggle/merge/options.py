"""How contributions become one: choices of the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from straggle.policies.deadline import check_count, is_number

Buffers = Literal["mean", "rank0", "local"]
Nonfinite = Literal["drop", "keep"]
Weighting = Literal["count", "inverse_probability"]


@dataclass(frozen=True)
class Merge:
    """What is merged beside the gradients, what is left out, and what a gradient counts.

    ``buffers``: a module's persistent buffers, such as BatchNorm's statistics, get the "mean" of the ranks that
    finished the forward pass, or the values of "rank0" (if it did; as DDP, but after the step instead of before), the
    same on every rank; "local" leaves each rank its own. What has no mean, such as booleans, codes that fall, complex
    numbers and float8, is taken from the lowest of these ranks. So are frozen parameters that change in the forward
    pass, if they are no numbers of floating point; otherwise they get the mean.

    ``nonfinite``: "drop" leaves gradients with NaN or infinite elements out of the merge, and skips the step where no
    rank has others; on a CUDA device it leaves out all that travel in one bucket with such a gradient. "keep" merges
    them as they are, as DDP does, which a ``GradScaler`` relies on.

    ``check_every``: once in this many steps the ranks compare parameters and buffers (`StepReport.different_ranks`); 0:
    never.

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
        """Whether the ranks compare what they hold in ``step``; in the first it is equal by construction."""
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
