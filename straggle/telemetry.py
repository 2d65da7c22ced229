"""What each rank tells the others with every merge: one row of numbers, in its own slot, so that no message is added.

A row holds the fixed fields of `Row`, then three numbers for each stage, then the user's scalars as (hash of the name,
value) pairs, so that ranks need not agree on names or their order.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from straggle.deadline import Granularity
from straggle.history import StepProgress
from straggle.outcome import Rules, computed_share, outcome
from straggle.report import PHASES, Phase, RankReport, ShadowReport, StageReport, StepReport
from straggle.stages import StagePlan

MAX_SCALARS = 8
MICROBATCH_SLOTS = 16  # for the times at which micro-batches end; of more of them, several share one
_TIMES = tuple(f"{phase}_s" for phase in PHASES)
_FLAGS = ("late", "stood_in", "cause", "failed", "idle", "weight", "nonfinite", "fingerprint_high", "fingerprint_low")
_FIELDS = (*_TIMES, "compute_s", "busy_s", "overrun_s", *_FLAGS, "merge_s", "num_microbatches")
_COLUMN = {name: column for column, name in enumerate(_FIELDS)}
NONFINITE = _COLUMN["nonfinite"]  # counted while the row is on its way
NO_FINGERPRINT = -1


@dataclass(frozen=True)
class Row:
    """One rank's telemetry for one step; times in seconds, ``cause`` an index into ``PHASES`` or -1.

    ``computed`` and ``estimated`` are relative to the rank's own ``weight``; ``idle``: it has no more data.
    ``fingerprint`` has 48 bits, which go as two numbers that are exact in float32. ``merge_s``: seconds from the end of
    the rank's own work in the step before to the end of its merge. ``microbatch_s``: when each micro-batch ended.
    """

    times: Mapping[Phase, float]
    compute_s: float
    busy_s: float
    overrun_s: float = 0.0
    late: bool = False
    stood_in: bool = False
    cause: int = -1
    failed: bool = False
    idle: bool = False
    weight: float = 1.0
    fingerprint: int = NO_FINGERPRINT
    computed: tuple[float, ...] = ()
    estimated: tuple[float, ...] = ()
    stage_s: tuple[float, ...] = ()
    merge_s: float = 0.0
    num_microbatches: int = 1
    microbatch_s: tuple[float, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> Tensor:
        """The row as a tensor of `row_length` elements."""
        fixed = [self.times[phase] for phase in PHASES]
        fixed += [self.compute_s, self.busy_s, self.overrun_s]
        fixed += [float(self.late), float(self.stood_in), float(self.cause), float(self.failed)]
        fixed += [float(self.idle), self.weight, 0.0]
        fixed += [float(self.fingerprint >> 24), float(self.fingerprint & 0xFFFFFF)]
        fixed += [self.merge_s, float(self.num_microbatches)]
        slots = [math.nan] * MICROBATCH_SLOTS
        for number, seconds in enumerate(self.microbatch_s):
            slots[_slot(number, self.num_microbatches)] = seconds
        pairs = [number for name, value in self.scalars.items() for number in (name_hash(name), value)]
        pairs += [0.0] * (2 * MAX_SCALARS - len(pairs))
        numbers = array("f", [*fixed, *self.computed, *self.estimated, *self.stage_s, *slots, *pairs])
        return torch.frombuffer(numbers, dtype=torch.float32)


def row_length(num_stages: int) -> int:
    """Elements of an encoded row."""
    return len(_FIELDS) + 3 * num_stages + MICROBATCH_SLOTS + 2 * MAX_SCALARS


def _slot(microbatch: int, num_microbatches: int) -> int:
    """Where the end of a micro-batch is told."""
    most = MICROBATCH_SLOTS
    return microbatch if num_microbatches <= most else microbatch * most // num_microbatches


def name_hash(name: str) -> float:
    """A number for a scalar's name, exact in float32 and never 0, which marks an empty slot."""
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big") | 1)


@lru_cache(maxsize=64)
def _slot_counts(num_microbatches: int) -> list[int]:
    """How many micro-batches each slot stands for."""
    counts = [0] * MICROBATCH_SLOTS
    for number in range(num_microbatches):
        counts[_slot(number, num_microbatches)] += 1
    return counts


class Table:
    """The rows of all ranks for one step: a matrix of shape (ranks, `row_length`), on the CPU."""

    def __init__(self, rows: Tensor, num_stages: int) -> None:
        self._rows = rows
        self._num_stages = num_stages
        # of these few numbers every step needs some, and a tensor's operation costs more than the whole list
        self._fixed: list[list[float]] = rows[:, : len(_FIELDS)].tolist()

    def compute_s(self) -> list[float]:
        """Seconds from entering ``step()`` to the end of each rank's own work; NaN: it never entered."""
        return self._column("compute_s")

    def finished(self) -> list[bool]:
        """Which ranks finished all of their own work."""
        return [not late and not idle for late, idle in zip(self._column("late"), self._column("idle"), strict=True)]

    def any_late(self) -> bool:
        """Whether some rank was late or spoken for."""
        return any(self._column("late")) or any(self._column("stood_in"))

    def failed_ranks(self) -> list[int]:
        """Ranks whose own code raised an error in this step."""
        return [rank for rank, failed in enumerate(self._column("failed")) if failed]

    def all_idle(self) -> bool:
        """Whether no rank has data any more."""
        return all(self._column("idle"))

    def nothing_to_apply(self) -> bool:
        """Whether the step changes nothing, because it is `skipped` or nobody had data for it."""
        return self.all_idle() or (any(self._column("nonfinite")) and self.skipped())

    def skipped(self) -> bool:
        """Whether no rank has anything that could be applied, but some have gradients that are not finite."""
        nonfinite = self._rows[:, NONFINITE] > 0
        first = len(_FIELDS)
        nothing = self._rows[:, first : first + self._num_stages].sum(1) == 0
        return bool(nonfinite.any() and (nonfinite | nothing).all())

    def different_ranks(self) -> tuple[int, ...] | None:
        """Ranks whose parameters are not those of most ranks; ``None`` where fewer than two ranks have told."""
        high, low = (self._column(f"fingerprint_{half}") for half in ("high", "low"))
        known = {rank: pair for rank, pair in enumerate(zip(high, low, strict=True)) if pair[0] >= 0}
        if len(known) < 2:
            return None
        most = Counter(known.values()).most_common(1)[0][0]
        return tuple(rank for rank, own in known.items() if own != most)

    def progress(self, stage_share: Tensor, granularity: Granularity) -> StepProgress:
        """How each rank came through the step; ``stage_share`` is the share of the model that each stage is."""
        first, stages, slots = len(_FIELDS), self._num_stages, MICROBATCH_SLOTS
        computed, stage_s = (self._rows[:, first + k * stages : first + (k + 1) * stages] for k in (0, 2))
        microbatch_s = self._rows[:, first + 3 * stages : first + 3 * stages + slots]
        counts = [_slot_counts(int(number)) for number in self._column("num_microbatches")]
        share = torch.tensor(counts, dtype=torch.float32)
        share /= share.sum(1, keepdim=True)
        if granularity == "stage":  # the last micro-batch comes in stages
            share, microbatch_s = share[:, 1:], microbatch_s[:, : slots - 1]
            of_stages = 1.0 - share.sum(1, keepdim=True)
            share, microbatch_s = torch.cat([share, of_stages * stage_share], 1), torch.cat([microbatch_s, stage_s], 1)
        busy_s, compute_s = self._column("busy_s"), [s for s in self._column("compute_s") if not math.isnan(s)]
        overhead_s = max(busy_s) - max(compute_s, default=0.0) + min(self._column("merge_s"))
        weight = [0.0 if idle else own for own, idle in zip(self._column("weight"), self._column("idle"), strict=True)]
        return StepProgress(microbatch_s, share, computed, torch.tensor(weight), torch.tensor(max(0.0, overhead_s)))

    def report(self, step: int, seconds: float, deadline_s: float, plan: StagePlan, names: Iterable[str]) -> StepReport:
        """The step's report; ``names`` are the scalars that this rank knows by name."""
        rows = self._rows.tolist()
        slowest = max(row[_COLUMN["busy_s"]] for row in rows)
        ranks = tuple(self._rank_report(rank, row, slowest, plan) for rank, row in enumerate(rows))
        stages, scalars = self._stage_reports(rows, plan), self._scalars(rows, names)
        return StepReport(
            step,
            seconds,
            deadline_s,
            ranks,
            stages,
            scalars,
            skipped=any(row[NONFINITE] for row in rows) and self.skipped(),
            different_ranks=self.different_ranks(),
        )

    def shadow(self, seconds: float, deadline_s: float, rules: Rules, plan: StagePlan) -> ShadowReport:
        """What a deadline of ``deadline_s`` would have made of this step, for which everyone was waited for."""
        stage_share = torch.tensor([stage.numel / plan.numel for stage in plan.stages])
        progress = self.progress(stage_share, "microbatch" if rules.finish_running else "stage")
        busy_s, compute_s = (torch.tensor(self._column(name)).nan_to_num(0.0) for name in ("busy_s", "compute_s"))
        # slots without a unit end with the one before
        unit_s = progress.unit_s.where(progress.unit_share > 0, 0.0).nan_to_num(0.0).cummax(-1).values
        unit_s = torch.cat([unit_s[:, :-1], torch.maximum(unit_s[:, -1:], compute_s.unsqueeze(1))], 1)
        entered_s, has_data = (busy_s - compute_s).clamp(min=0.0), progress.weight > 0
        would = outcome(unit_s, deadline_s, rules, entered_s)
        own = replace(would, end_s=would.end_s - entered_s)
        part = computed_share(unit_s, own, rules) * has_data.unsqueeze(1)
        given = part * progress.unit_share
        by_stage = given.sum(1, keepdim=True).expand(-1, len(plan.stages))
        if not rules.finish_running:  # the last micro-batch comes in stages
            first = part.shape[1] - len(plan.stages)
            whole = progress.unit_share[:, first:].sum(1, keepdim=True)
            by_stage = given[:, :first].sum(1, keepdim=True) + whole * part[:, first:]
        weight = progress.weight / progress.weight.sum().clamp(min=1e-12)
        stages, reach = (by_stage * weight.unsqueeze(1)).sum(0), given.sum(1)
        return ShadowReport(
            deadline_s=deadline_s,
            seconds=seconds - float(busy_s.max() - would.seconds),
            late_ranks=tuple(would.late.nonzero().flatten().tolist()),
            reach=tuple(reach.tolist()),
            stages=tuple(stages.tolist()),
            dropped_share=1.0 - float(reach[has_data].mean()) if bool(has_data.any()) else 0.0,
        )

    def _column(self, name: str) -> list[float]:
        column = _COLUMN[name]
        return [row[column] for row in self._fixed]

    def _rank_report(self, rank: int, row: list[float], slowest: float, plan: StagePlan) -> RankReport:
        computed, _, stage_s = self._per_stage(row)
        reach = sum(share * stage.numel for share, stage in zip(computed, plan.stages, strict=True)) / plan.numel
        cause = int(row[_COLUMN["cause"]])
        return RankReport(
            rank=rank,
            **{name: row[_COLUMN[name]] for name in (*_TIMES, "compute_s", "overrun_s")},
            wait_s=slowest - row[_COLUMN["busy_s"]],
            reach=reach,
            stages=computed,
            stage_s=stage_s,
            late=bool(row[_COLUMN["late"]]),
            stood_in=bool(row[_COLUMN["stood_in"]]),
            cause=PHASES[cause] if cause >= 0 else None,
            idle=bool(row[_COLUMN["idle"]]),
            weight=row[_COLUMN["weight"]],
            nonfinite=int(row[NONFINITE]),
        )

    def _stage_reports(self, rows: list[list[float]], plan: StagePlan) -> tuple[StageReport, ...]:
        numbers = [(row[_COLUMN["weight"]], *self._per_stage(row)) for row in rows]
        computed = [sum(column) for column in zip(*([n[0] * share for share in n[1]] for n in numbers), strict=True)]
        estimated = [sum(column) for column in zip(*([n[0] * share for share in n[2]] for n in numbers), strict=True)]
        return tuple(
            StageReport(stage.name, stage.numel, computed[index] + estimated[index], estimated[index] > 0)
            for index, stage in enumerate(plan.stages)
        )

    def _per_stage(self, row: list[float]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """The shares computed, the weights estimated, and the times at which the stages were whole."""
        first, length = len(_FIELDS), self._num_stages
        computed, estimated, stage_s = (tuple(row[first + k * length : first + (k + 1) * length]) for k in range(3))
        return computed, estimated, stage_s

    def _scalars(self, rows: list[list[float]], names: Iterable[str]) -> dict[str, float]:
        known = {name_hash(name): name for name in names}
        values: dict[str, list[float]] = {}
        first = len(_FIELDS) + 3 * self._num_stages + MICROBATCH_SLOTS
        for row in rows:
            for key, value in zip(row[first::2], row[first + 1 :: 2], strict=True):
                if key in known:
                    values.setdefault(known[key], []).append(value)
        return {name: math.fsum(seen) / len(seen) for name, seen in values.items()}


@dataclass(frozen=True)
class StepRecord:
    """A merged step as it came: cheap to keep, and its report is built when somebody asks, on any thread.

    ``names`` are the scalars that this rank knows by name. ``shadow_s``: the deadline of a policy that is not enforced,
    by whose ``rules`` the step would have ended; NaN: it is enforced.
    """

    step: int
    seconds: float
    deadline_s: float
    plan: StagePlan
    table: Table
    names: frozenset[str]
    shadow_s: float = math.nan
    rules: Rules | None = None

    @cached_property
    def report(self) -> StepReport:
        """What happened in the step, on all ranks."""
        report = self.table.report(self.step, self.seconds, self.deadline_s, self.plan, self.names)
        if self.rules is None or math.isnan(self.shadow_s):
            return report
        return replace(report, shadow=self.table.shadow(self.seconds, self.shadow_s, self.rules, self.plan))
