"""A model's backward time by stage, and how far a rank gets in a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from torch import Tensor, nn

from straggle.backward.clocks import Timeline
from straggle.backward.hooks import put_gradients
from straggle.backward.staged import StagedBackward
from straggle.backward.stages import BalancedByTime, mean_over
from straggle.extras import needs_extra
from straggle.report import BackwardReport


@dataclass(frozen=True)
class Reach:
    """How far a rank gets: finished stages, and the share of all gradient elements that they hold (0 to 1)."""

    num_stages: int
    share: float


@dataclass(frozen=True)
class StageProfile:
    """Medians over several steps: seconds of the forward pass, and of each stage of the backward pass."""

    forward_s: float
    backward: BackwardReport

    def reach(self, budget_s: float) -> Reach:
        """How far forward and backward get in ``budget_s`` seconds."""
        stages = self.backward.stages
        finished, elapsed_s = 0, self.forward_s
        while finished < len(stages) and elapsed_s + stages[finished].seconds <= budget_s:
            elapsed_s += stages[finished].seconds
            finished += 1
        is_finished = [float(number < finished) for number in range(len(stages))]
        return Reach(finished, mean_over(is_finished, [stage.numel for stage in stages]))

    def __str__(self) -> str:
        passes = f"forward {1000 * self.forward_s:.2f} ms, backward {1000 * self.backward.seconds:.2f} ms"
        return f"{self.backward}\n{passes}"

    def save_chart(self, path: str | Path) -> None:
        """Save a bar chart of the stages in the order of backward; the file's name has the format. Needs matplotlib."""
        with needs_extra("plot"):
            from matplotlib.figure import Figure
        stages = self.backward.stages
        figure = Figure(figsize=(8, 1.2 + 0.32 * len(stages)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh([stage.name for stage in stages], [1000 * stage.seconds for stage in stages], color="#4477aa")
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("backward, milliseconds")
        figure.suptitle("Backward time of each stage, the first to finish at the top", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=144)


def measure_stages(
    module: nn.Module,
    compute_loss: Callable[[], Tensor],
    *,
    stages: int | Sequence[str] | BalancedByTime | None = None,
    num_steps: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> StageProfile:
    """Run ``num_steps`` forward and backward passes, after some to warm up, and return the median of each time.

    ``compute_loss`` is the forward pass of ``module``, up to a scalar loss. Parameters are not changed, and gradients
    are put back as they were. Raises ``ValueError`` for fewer than one step.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: at least one pass is needed")
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    staged = StagedBackward(module, stages=stages, clock=clock)
    forward, reports = Timeline(staged.parameters[0].device, clock), list[BackwardReport]()
    try:
        for number in range(3 + num_steps):
            module.zero_grad(set_to_none=True)
            forward.begin()
            loss = compute_loss()
            forward.mark(number)
            step = staged.backward(loss)
            if number >= 3:  # the first steps warm up, and the stages are still to be planned
                reports.append(step.report)
    finally:
        staged.close()
        put_gradients(before)
    columns = zip(*(report.stages for report in reports), strict=True)
    times = tuple(replace(column[0], seconds=median(stage.seconds for stage in column)) for column in columns)
    forward_s = median(forward.seconds(3 + num_steps)[3:])
    return StageProfile(forward_s, replace(reports[-1], stages=times))
