"""The times of a real run's trace, and delays that are drawn from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Generator, Tensor

from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.units import Units
from straggle.observe.run import read_reports
from straggle.policies.deadline import check_count
from straggle.policies.untruncated import untruncated_stages
from straggle.report import StepReport


@dataclass(frozen=True)
class Recorded:
    """The steps of a trace: seconds of each unit as if no rank had been stopped, and what a step takes beside them.

    ``unit_s`` (steps, ranks, stages): what a late rank did not finish is taken as its peers' typical time, times how
    much longer than they it took for what it did finish (`untruncated_times`). ``overhead_s`` (steps,).
    """

    unit_s: Tensor
    overhead_s: Tensor
    stage_share: Tensor

    @property
    def units(self) -> Units:
        """The stages as units of work; what a step takes beside them is recorded, the merge included."""
        stages = len(self.stage_share)
        base_s = self.unit_s.flatten(0, 1).median(0).values
        overhead_s = float(self.overhead_s.median())
        return Units(
            base_s, self.stage_share, torch.eye(stages), self.stage_share, None, overhead_s, overlaps=False, merged=True
        )


def read_times(path: Path) -> Recorded:
    """The times in a ``trace.jsonl``, or in that of a run's folder, without the first step: after it stages are
    planned.

    Raises ``ValueError`` if the file is not a trace, or has no step in which all ranks had data.
    """
    path = path / "trace.jsonl" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path}: no such file; give a trace.jsonl or the folder of a run")
    try:
        return recorded_times([report for report in read_reports(path) if report.step > 0])
    except LookupError as error:
        raise ValueError(f"{path}: {error.args[0]}") from None


def recorded_times(reports: Sequence[StepReport]) -> Recorded:
    """The times of steps. Raises ``LookupError`` if in none of them all ranks had data."""
    names = [stage.name for stage in reports[-1].stages] if reports else []
    ranks = len(reports[-1].ranks) if reports else 0
    kept = [report for report in reports if _usable(report, names, ranks)]
    if not kept:
        raise LookupError("no step after the first one in which all ranks had data")
    numel = torch.tensor([float(stage.numel) for stage in kept[-1].stages])
    ends = torch.tensor([[rank.stage_s for rank in report.ranks] for report in kept])
    compute_s = torch.tensor([[rank.compute_s for rank in report.ranks] for report in kept])
    late = torch.tensor([[rank.late for rank in report.ranks] for report in kept])
    # a rank that finished is done when its last hook is
    ends[..., -1] = torch.where(late, ends[..., -1], compute_s)
    untruncated = untruncated_stages(ends, compute_s, numel / numel.sum())
    typical = untruncated.flatten(0, 1).nanmedian(0).values
    never = untruncated.isnan()  # it never entered the step: its own typical times, or all ranks'
    own = untruncated.nanmedian(0).values.where(~never.all(0), typical)
    untruncated = torch.where(never, own, untruncated)
    spent = untruncated.diff(dim=-1, prepend=torch.zeros_like(untruncated[..., :1])).clamp(min=0)
    seconds = torch.tensor([report.seconds for report in kept])
    work_s = compute_s.nan_to_num(0.0).amax(1)
    return Recorded(spent, (seconds - work_s).clamp(min=0), numel / numel.sum())


def _usable(report: StepReport, names: Sequence[str], ranks: int) -> bool:
    """Whether all ranks had data in the step, and its stages are those of the last step."""
    same = [stage.name for stage in report.stages] == names and len(report.ranks) == ranks
    return same and not any(rank.idle for rank in report.ranks)


@final
class RecordedDelays(Delays):
    """The steps of a recorded run (a ``trace.jsonl`` or its folder), in blocks of ``block`` steps that begin at random.

    Adjacent steps stay together, and so do the ranks of a step. With more ranks than were recorded, each further group
    of ranks has its own blocks. ``block=0``: all steps in their order, again and again.
    """

    def __init__(self, trace: str, *, block: int = 20) -> None:
        check_count("block", block)
        self.block = block
        self.recorded = read_times(Path(trace))

    def units(self, units: Units) -> Units:  # noqa: ARG002
        return self.recorded.units

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:  # noqa: ARG002
        unit_s = self.recorded.unit_s
        groups = -(-ranks // unit_s.shape[1])
        orders = [self._order(len(unit_s), generator) for _ in range(groups)]
        while True:
            yield torch.cat([unit_s[next(order)] for order in orders])[:ranks]

    def _order(self, steps: int, generator: Generator) -> Iterator[int]:
        """Numbers of recorded steps: blocks, from the end around to the beginning, so that all are equally likely."""
        while True:
            first = int(torch.randint(steps, (), generator=generator)) if self.block else 0
            yield from (number % steps for number in range(first, first + (self.block or steps)))
