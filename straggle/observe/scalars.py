"""What steps were in numbers, beside the loss: for TensorBoard, W&B, MLflow or any logger that takes a dict and a step.

log_scalars(model, SummaryWriter("runs/tensorboard"))
log_scalars(model, lambda scalars, step: wandb.log({**scalars, "step": step}))  # it leaves out an earlier step's
log_scalars(model, mlflow.log_metrics)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import StepReport

Write = Callable[[Mapping[str, float], int], object]


class Writer(Protocol):
    """A ``torch.utils.tensorboard.SummaryWriter``, or what is used as one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number of one step."""


class StepScalars:
    """Means over the steps since they were taken last; made of the reports, and so equal on all ranks.

    ``straggle/late_ranks``: how many were late in a step. ``straggle/dropped``: share of all gradient elements, 0 to 1.
    ``straggle/step_s``: seconds of a step. ``straggle/waited_s``: seconds that a rank waited for the slowest, in the
    mean over ranks. ``straggle/saved_s``: by how much a step would have been longer under DDP, as
    far as it can be known (`DdpPrediction`). ``straggle/fewest_drawn`` and ``straggle/most_drawn``:
    micro-batches that the rank computed that drew fewest, and most, in steps with a pool (``step.pull``). What
    ``step.log`` was given has its own name; one that is not finite is in its mean.
    """

    def __init__(self) -> None:
        self._ddp = DdpPrediction()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, report: StepReport, awaited: Collection[str] = ()) -> None:
        """One merged step more; ``awaited``: scalars that only a device knows so far."""
        present = [rank for rank in report.ranks if not rank.absent]
        if not present:  # this rank was no member, and knows nothing of the step
            return
        numbers = {
            "straggle/late_ranks": float(len(report.late_ranks)),
            "straggle/dropped": report.dropped_share,
            "straggle/step_s": report.whole_s,
            "straggle/waited_s": sum(rank.wait_s for rank in present) / len(present),
            "straggle/saved_s": self._ddp.add(report).seconds - report.whole_s,
            **_drawn(report),
        }
        known = {name: number for name, number in numbers.items() if not math.isnan(number)}
        logged = {name: number for name, number in report.scalars.items() if name not in awaited}
        for name, number in (known | logged).items():
            self._sums[name] += number
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """The means, by name; those of the steps to come begin again."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return means


def _drawn(report: StepReport) -> dict[str, float]:
    parts = [rank.parts for rank in report.ranks if not rank.absent]
    if not (report.pool_parts and parts):
        return {}
    return {"straggle/fewest_drawn": float(min(parts)), "straggle/most_drawn": float(max(parts))}


def log_scalars(
    model: StagedDataParallel, to: Write | Writer, *, every: int = 10, ranks: tuple[int, ...] = (0,)
) -> RemovableHandle:
    """Give ``to`` the means of `StepScalars` after every so many steps, on these ranks.

    ``to`` is called with a dict and the number of the step, or has ``add_scalar``. Raises ``TypeError`` for what is
    neither, ``ValueError`` for ``every`` below 1. The handle's ``remove`` ends it.
    """
    if every < 1:
        raise ValueError(f"every={every}: log after at least one step")
    write = _as_write(to)
    scalars = StepScalars()

    def after(record: StepRecord) -> None:
        scalars.add(record.report, record.awaited)
        if (record.step + 1) % every == 0:
            write(scalars.take(), record.step)

    return model.register_step_hook(after if model.rank in ranks else _nothing)


def _as_write(to: Write | Writer) -> Write:
    add_scalar = getattr(to, "add_scalar", None)
    if add_scalar is not None:

        def write(scalars: Mapping[str, float], step: int) -> None:
            for name, value in scalars.items():
                add_scalar(name, value, step)

        return write
    if not callable(to):
        raise TypeError(f"{type(to).__name__} is no function of a dict and a step, and has no add_scalar")
    return to


def _nothing(_record: StepRecord) -> None:
    """On the ranks that do not log."""
