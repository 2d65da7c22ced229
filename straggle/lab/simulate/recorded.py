"""The times of a real run's trace, and delays that are drawn from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Generator, Tensor

from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.units import Units
from straggle.observe.trace import read_trace
from straggle.policies.deadline import check_count
from straggle.policies.untruncated import untruncated_stages


@dataclass(frozen=True)
class Recorded:
    """The steps of a trace: seconds of each unit as if no rank had been stopped, and what a step takes beside them.

    ``unit_s`` (steps, ranks, stages): what a late rank did not finish is taken as its peers' typical time, times how
    much longer than they it took for what it did finish (`untruncated_times`). ``overhead_s`` (steps,).
    """

    unit_s: Tensor
    overhead_s: Tensor
    stage_share: Tensor
    stage_names: tuple[str, ...]

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
    records = list(read_trace(path))
    try:
        return recorded_times([record for record in records if record["step"] > 0])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a trace of straggle train: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def recorded_times(records: Sequence[Mapping[str, Any]]) -> Recorded:
    """The times in step reports as `StepReport.as_dict` gives them."""
    names = tuple(stage["name"] for stage in records[-1]["stages"]) if records else ()
    ranks = len(records[-1]["ranks"]) if records else 0
    kept = [r for r in records if _usable(r, names, ranks)]
    if not kept:
        raise ValueError("no step after the first one in which all ranks had data")
    numel = torch.tensor([float(stage["numel"]) for stage in kept[-1]["stages"]])
    ends = _of_ranks(kept, "stage_s")
    compute_s = _of_ranks(kept, "compute_s")
    late = _of_ranks(kept, "late") > 0
    ends = ends.clone()
    last = ends[..., -1]
    ends[..., -1] = torch.where(late, last, compute_s)  # a rank that finished is done when its last hook is
    untruncated = untruncated_stages(ends, compute_s, numel / numel.sum())
    typical = untruncated.flatten(0, 1).nanmedian(0).values
    never = untruncated.isnan()  # it never entered the step: its own typical times, or all ranks'
    own = untruncated.nanmedian(0).values.where(~untruncated.isnan().all(0), typical)
    untruncated = torch.where(never, own, untruncated)
    spent = untruncated.diff(dim=-1, prepend=torch.zeros_like(untruncated[..., :1])).clamp(min=0)
    seconds = torch.tensor([float(record["seconds"]) for record in kept])
    work_s = torch.where(compute_s.isnan(), 0.0, compute_s).amax(1)
    return Recorded(spent, (seconds - work_s).clamp(min=0), numel / numel.sum(), names)


def _usable(record: Mapping[str, Any], names: tuple[str, ...], ranks: int) -> bool:
    """Whether all ranks had data in the step, and its stages are those of the last step."""
    same = tuple(stage["name"] for stage in record["stages"]) == names and len(record["ranks"]) == ranks
    return same and not any(rank.get("idle") for rank in record["ranks"])


def _of_ranks(records: Sequence[Mapping[str, Any]], key: str) -> Tensor:
    """A number, or a row of numbers, for every rank in every step; unknown ones are NaN."""
    values = [[rank[key] for rank in record["ranks"]] for record in records]
    known = [[[math.nan if v is None else float(v) for v in _row(rank)] for rank in row] for row in values]
    tensor = torch.tensor(known)
    return tensor if isinstance(values[0][0], list) else tensor.squeeze(-1)


def _row(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@final
class Replay(Delays):
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
