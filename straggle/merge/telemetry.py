"""What each rank reports with every merge: one row of numbers, in its own slot, so that no message is added.

A row holds the fixed fields of `Row`, then four numbers for each stage, then the user's scalars as (hash of the name,
value) pairs, so that ranks need not agree on names or their order.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from straggle.backward.kept import UNDECIDED
from straggle.backward.stages import StagePlan
from straggle.merge.names import ScalarNames, name_hash
from straggle.policies.cost import relative_cost
from straggle.policies.deadline import Granularity
from straggle.policies.history import StepProgress
from straggle.policies.links import Link
from straggle.policies.rank_links import RankLink, Way, rank_links
from straggle.policies.step_model import StopRules, computed_share, simulate_step
from straggle.policies.untruncated import UntruncatedTime, untruncated_step
from straggle.report import CAUSES, PHASES, Phase, RankReport, ShadowReport, StageReport, StepReport

MAX_SCALARS = 8
MICROBATCH_SLOTS = 16  # for the times at which micro-batches end; of more of them, several share one
_TIMES = tuple(f"{phase}_s" for phase in PHASES)
_FLAGS = ("late", "stood_in", "cause", "failed", "idle", "weight", "nonfinite", "fingerprint_high", "fingerprint_low")
_STATE = (
    "stepped",
    "kept",
    "without_store",
    "absent",
    "admits",
    "pool_parts",
    "pool_weight",
    "parts_done",
    "put_back",
    "ring_formed",
    "leaf_since",
)
MAX_WAYS = 4  # to peers, as this rank measured them last
_WAYS = tuple(f"way_{part}_{slot}" for slot in range(MAX_WAYS) for part in ("target", "latency", "rate", "age"))
_FIELDS = (*_TIMES, "compute_s", "busy_s", "overrun_s", *_FLAGS, "merge_s", "num_microbatches", *_STATE, "cost", *_WAYS)
_PER_STAGE = 4
_COLUMN = {name: column for column, name in enumerate(_FIELDS)}
NONFINITE = _COLUMN["nonfinite"]  # counted while the row is on its way
CAUSE = _COLUMN["cause"]  # so is what a leaf lost
LEAF_SINCE = _COLUMN["leaf_since"]  # not sent: all ranks know it; below 0: it is none
STANDING = [_COLUMN[name] for name in ("ring_formed", *_WAYS)]  # what a rank says until it says otherwise
NO_FINGERPRINT = -1


@dataclass(frozen=True)
class Row:
    """One rank's telemetry for one step; times in seconds, ``cause`` an index into ``CAUSES`` or -1.

    ``computed``, ``estimated`` and ``weights`` (of all that it submits; empty: as computed) are relative to the rank's
    own ``weight``; ``idle``: it has no more data. ``fingerprint`` has 48 bits, which go as two numbers, exact
    in float32. ``merge_s``: seconds from the end of the rank's own work in the step before to the end of its merge.
    ``microbatch_s``: when each micro-batch ended. ``stepped``: how often its optimizers stepped since the merge before
    (NaN: not known). ``kept``: which gradients it had before its first backward pass (`kept.mark`).
    ``without_store``: the job's store did not answer it. ``absent``: it is no member. ``admits``: it lets others in
    after this step. ``cost``: what the user gave the step (NaN: nothing). ``pool_parts`` and ``pool_weight``: the
    micro-batches in the step's pool, and the sum of their weights; ``parts_done``: those that the rank computed, and
    ``put_back``: those that it had drawn and gave back.
    ``ring_formed``: the number of the ring that it has formed last; negative: it could not.
    ``ways``: to peers, as it measured them last, at most ``MAX_WAYS``.
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
    weights: tuple[float, ...] = ()
    merge_s: float = 0.0
    num_microbatches: int = 1
    microbatch_s: tuple[float, ...] = ()
    stepped: float = math.nan
    kept: int = UNDECIDED
    without_store: bool = False
    absent: bool = False
    admits: bool = False
    ring_formed: int = 0
    cost: float = math.nan
    pool_parts: int = 0
    pool_weight: float = 0.0
    parts_done: int = 0
    put_back: int = 0
    ways: tuple[Way, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> Tensor:
        """The row as a tensor of `row_length` elements."""
        return torch.frombuffer(self.numbers(), dtype=torch.float32)

    def numbers(self) -> array[float]:
        """The same as plain memory."""
        fixed = [
            *(self.times[phase] for phase in PHASES),
            *(self.compute_s, self.busy_s, self.overrun_s, self.late, self.stood_in, self.cause, self.failed),
            *(self.idle, self.weight, 0.0, self.fingerprint >> 24, self.fingerprint & 0xFFFFFF),
            *(self.merge_s, self.num_microbatches, self.stepped, self.kept, self.without_store, self.absent),
            *(self.admits, self.pool_parts, self.pool_weight, self.parts_done, self.put_back, self.ring_formed),
            *(-1.0, self.cost),
            *(_numbers_of(self.ways) if self.ways else _NO_WAYS),
        ]
        slots = [math.nan] * MICROBATCH_SLOTS
        if self.num_microbatches <= MICROBATCH_SLOTS:
            slots[: len(self.microbatch_s)] = self.microbatch_s
        else:
            for number, seconds in enumerate(self.microbatch_s):
                slots[_slot(number, self.num_microbatches)] = seconds
        pairs = [number for name, value in self.scalars.items() for number in (name_hash(name), value)]
        pairs += [0.0] * (2 * MAX_SCALARS - len(pairs))
        weights = self.weights or self.computed
        return array("f", [*fixed, *self.computed, *self.estimated, *self.stage_s, *weights, *slots, *pairs])


_NO_WAYS = [-1.0, math.nan, math.nan, math.nan] * MAX_WAYS


def _numbers_of(ways: Sequence[Way]) -> list[float]:
    """Four numbers for each of these ways."""
    each = [(float(way.target), way.link.latency_s, way.link.bytes_per_s, way.age_s) for way in ways[:MAX_WAYS]]
    numbers = [number for own in each for number in own]
    return numbers + _NO_WAYS[len(numbers) :]


class StageColumns(NamedTuple):
    """Where a row has, for each stage, the share computed, the weight of its estimate, when it was complete, and its
    weight in the merge.
    """

    computed: slice
    estimated: slice
    stage_s: slice
    weights: slice


@lru_cache(maxsize=64)
def stage_columns(num_stages: int) -> StageColumns:
    """Those of rows with so many stages."""
    first = len(_FIELDS)
    return StageColumns(*(slice(first + k * num_stages, first + (k + 1) * num_stages) for k in range(_PER_STAGE)))


def absent_row(num_stages: int) -> Tensor:
    """The row of a rank that is no member; the others write it."""
    nothing = (0.0,) * num_stages
    row = Row(
        dict.fromkeys(PHASES, 0.0),
        compute_s=math.nan,
        busy_s=0.0,
        absent=True,
        computed=nothing,
        estimated=nothing,
        stage_s=(math.nan,) * num_stages,
    )
    return row.encode()


def row_length(num_stages: int) -> int:
    """Elements of an encoded row."""
    return len(_FIELDS) + _PER_STAGE * num_stages + MICROBATCH_SLOTS + 2 * MAX_SCALARS


def _slot(microbatch: int, num_microbatches: int) -> int:
    """The slot for the end of a micro-batch."""
    most = MICROBATCH_SLOTS
    return microbatch if num_microbatches <= most else microbatch * most // num_microbatches


@lru_cache(maxsize=64)
def _slot_counts(num_microbatches: int) -> list[int]:
    """How many micro-batches each slot stands for."""
    counts = [0] * MICROBATCH_SLOTS
    for number in range(num_microbatches):
        counts[_slot(number, num_microbatches)] += 1
    return counts


@lru_cache(maxsize=64)
def _unit_share(counts: tuple[int, ...], stage_share: tuple[float, ...], granularity: Granularity) -> Tensor:
    """`StepProgress.unit_share` of ranks with these numbers of micro-batches; not to be written to."""
    if granularity == "step":  # nothing comes before the end of the last micro-batch
        return torch.ones(len(counts), 1)
    share = torch.tensor([_slot_counts(number) for number in counts], dtype=torch.float32)
    share /= share.sum(1, keepdim=True)
    if granularity == "microbatch":
        return share
    of_stages = 1.0 - share[:, 1:].sum(1, keepdim=True)  # the last micro-batch comes in stages
    return torch.cat([share[:, 1:], of_stages * torch.tensor(stage_share)], 1)


_Given = TypeVar("_Given")


def _most(given: Mapping[int, _Given]) -> _Given:
    """What most ranks gave; of two that equally many gave, that of the lowest rank."""
    if len(alike := set(given.values())) == 1:  # as in nearly every step; counting takes five times as long
        return alike.pop()
    return Counter(given[rank] for rank in sorted(given)).most_common(1)[0][0]


def _minority(given: Mapping[int, _Given]) -> tuple[int, ...] | None:
    """The ranks that gave something else than most; ``None`` where fewer than two gave anything."""
    if len(given) < 2:
        return None
    most = _most(given)
    return tuple(rank for rank, own in given.items() if own != most)


class _Columns(dict[str, tuple[float, ...]]):
    """By its name, what each rank's row has for a field; read when it is first asked for."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._rows = rows

    def __missing__(self, name: str) -> tuple[float, ...]:
        column = _COLUMN[name]
        self[name] = found = tuple([row[column] for row in self._rows])
        return found


class Table:
    """The rows of all ranks for one step: a matrix of shape (ranks, `row_length`), on the CPU, or its numbers."""

    def __init__(self, rows: Tensor | array[float], num_stages: int) -> None:
        self._given = rows
        self._num_stages, self._of_stages = num_stages, stage_columns(num_stages)
        # every step needs some of these few numbers, and an operation on a tensor costs more than the entire list
        if isinstance(rows, Tensor):
            fixed: Sequence[Sequence[float]] = rows[:, : len(_FIELDS)].tolist()
        else:
            starts = range(0, len(rows), row_length(num_stages))
            fixed = [rows[start : start + len(_FIELDS)] for start in starts]
        self._columns, self.num_ranks = _Columns(fixed), len(fixed)
        if any(self._columns["pool_parts"]):
            self._weigh_by_pool()

    def _weigh_by_pool(self) -> None:
        """Of a step that has a pool, a rank that did not come to it had nothing: its weight is of another step."""
        pools = self._columns["pool_parts"]
        weights = zip(pools, self._columns["weight"], strict=True)
        self._columns["weight"] = tuple(weight if parts else 0.0 for parts, weight in weights)
        self._rows[:, _COLUMN["weight"]] = torch.tensor(self._columns["weight"])

    @cached_property
    def _rows(self) -> Tensor:
        if isinstance(self._given, Tensor):
            return self._given
        return torch.frombuffer(self._given, dtype=torch.float32).view(self.num_ranks, -1)

    def pool_parts(self) -> list[int]:
        """For each rank the micro-batches in its step's pool; 0: it had none, or did not come to it."""
        return [int(number) for number in self._columns["pool_parts"]]

    def parts_done(self) -> list[int]:
        """Micro-batches of the pool that each rank computed."""
        return [int(number) for number in self._columns["parts_done"]]

    def compute_s(self) -> list[float]:
        """Seconds from entering ``step()`` to the end of each rank's own work; NaN: it never entered."""
        return list(self._columns["compute_s"])

    def finished_ranks(self) -> list[bool]:
        """Which ranks finished all of their own work."""
        columns = (self._columns[name] for name in ("late", "idle", "absent", "cause"))
        return [
            not late and not idle and not absent and cause < 0
            for late, idle, absent, cause in zip(*columns, strict=True)
        ]

    def weight(self) -> list[float]:
        """Weight of each rank's step; 0 where it had no data, or is no member."""
        columns = (self._columns[name] for name in ("weight", "idle", "absent"))
        return [0.0 if idle or absent else own for own, idle, absent in zip(*columns, strict=True)]

    def network_s(self, seconds: float) -> float:
        """What was left of a step of ``seconds`` when the last rank had submitted.

        Each rank counts from the end of the merge before, which all see nearly at once.
        """
        return max(0.0, seconds - self._last_submitted_s)

    @property
    def _last_submitted_s(self) -> float:
        return max(self._columns["busy_s"])

    def costs(self) -> list[float]:
        """What each rank's step costs; NaN where it gave nothing."""
        return list(self._columns["cost"])

    def untruncated_times(self) -> list[UntruncatedTime]:
        """For each rank the time of all its own work in the step, with what a late one left."""
        compute_s, finished = self.compute_s(), self.finished_ranks()
        if all(finished):
            return [UntruncatedTime(own_s) for own_s in compute_s]
        counts = [int(number) for number in self._columns["num_microbatches"]]
        return untruncated_step(compute_s, finished, counts, self._microbatch_s().tolist(), self._stage_s().tolist())

    def any_late(self) -> bool:
        """Whether some rank was late or stood in for."""
        return any(self._columns["late"]) or any(self._columns["stood_in"])

    def failed_ranks(self) -> list[int]:
        """Ranks whose own code raised an error in this step."""
        return [rank for rank, failed in enumerate(self._columns["failed"]) if failed]

    def ranks_without_store(self) -> tuple[int, ...]:
        """Ranks that the job's store did not answer."""
        return tuple(rank for rank, without in enumerate(self._columns["without_store"]) if without)

    def all_idle(self) -> bool:
        """Whether no member has data any more."""
        absent = self._columns["absent"]
        return not all(absent) and all(map(max, self._columns["idle"], absent))

    def stood_in_ranks(self) -> frozenset[int]:
        """Ranks that were stood in for."""
        return frozenset(rank for rank, stood_in in enumerate(self._columns["stood_in"]) if stood_in)

    def rings_formed(self) -> list[int]:
        """The number of the ring that each rank has formed last; negative: it could not."""
        return [int(number) for number in self._columns["ring_formed"]]

    def leaves(self) -> dict[int, int]:
        """The ranks that were leaves in this step, and since which one."""
        return {rank: int(since) for rank, since in enumerate(self._columns["leaf_since"]) if since >= 0}

    def absent_ranks(self) -> frozenset[int]:
        """Ranks that are no members."""
        return frozenset(rank for rank, absent in enumerate(self._columns["absent"]) if absent)

    def admits_of(self, rank: int) -> bool:
        """Whether this rank lets others in after this step."""
        return bool(self._columns["admits"][rank])

    def admits(self) -> bool:
        """Whether ranks are let in after this step."""
        return any(self._columns["admits"])

    def nonfinite_ranks(self) -> list[int]:
        """Ranks of whose gradients some were left out, because they were not finite."""
        return [rank for rank, number in enumerate(self._columns["nonfinite"]) if number]

    def nothing_to_apply(self) -> bool:
        """Whether the step changes nothing, because it is `skipped` or no rank had data for it."""
        nothing = self.all_idle() or all(self._columns["absent"])
        return nothing or (any(self._columns["nonfinite"]) and self.skipped())

    def ways(self) -> list[Way]:
        """The ways between ranks as they were measured last; the same on all ranks."""
        columns = (self._columns[name] for name in _WAYS)
        slots = [tuple(zip(*four, strict=True)) for four in zip(*[iter(columns)] * 4, strict=True)]
        return [
            Way(rank, int(target), Link(latency_s, rate), age_s)
            for slot in slots
            for rank, (target, latency_s, rate, age_s) in enumerate(slot)
            if target >= 0
        ]

    def links(self) -> tuple[RankLink, ...]:
        """Each rank's link by these; the same on all ranks."""
        return rank_links(self.ways(), self.num_ranks)

    def skipped(self) -> bool:
        """Whether no rank has anything that could be applied, but some have gradients that are not finite."""
        nonfinite = self._rows[:, NONFINITE] > 0
        nothing = self._rows[:, self._of_stages.computed].sum(1) == 0
        return bool(nonfinite.any() and (nonfinite | nothing).all())

    def different_ranks(self) -> tuple[int, ...] | None:
        """Ranks whose parameters are not those of most ranks; ``None`` where that was not compared."""
        high, low = (self._columns[f"fingerprint_{half}"] for half in ("high", "low"))
        differ = _minority({rank: pair for rank, pair in enumerate(zip(high, low, strict=True)) if pair[0] >= 0})
        if unlike := self.stepped_unlike():
            return tuple(sorted({*unlike, *(differ or ())}))
        return differ

    def stepped_unlike(self) -> tuple[int, ...]:
        """Ranks whose optimizers stepped more or less often than those of most ranks since the merge before."""
        stepped = enumerate(self._columns["stepped"])
        return _minority({rank: number for rank, number in stepped if not math.isnan(number)}) or ()

    def kept(self) -> int:
        """The mark of the gradients that most ranks keep beside the merged ones; `UNDECIDED` where none knows."""
        known = {rank: mark for rank, mark in enumerate(self._columns["kept"]) if mark != UNDECIDED}
        return int(_most(known)) if known else UNDECIDED

    def progress(self, stage_share: Tensor, granularity: Granularity) -> StepProgress:
        """How each rank came through the step; ``stage_share`` is the share of the model that each stage is."""
        counts = tuple(map(int, self._columns["num_microbatches"]))
        share = _unit_share(counts, tuple(stage_share.tolist()), granularity)
        unit_s = self._microbatch_s()
        if granularity == "step":
            unit_s = unit_s.gather(1, torch.tensor([[_slot(number - 1, number)] for number in counts]))
        if granularity == "stage":
            unit_s = torch.cat([unit_s[:, :-1], self._stage_s()], 1)
        computed = self._rows[:, self._of_stages.computed]
        weight, overhead_s = torch.tensor(self.weight()), torch.tensor(max(0.0, min(self._columns["merge_s"])))
        return StepProgress(unit_s, share, computed, weight, self._entered_s(), overhead_s)

    def report(
        self,
        step: int,
        seconds: float,
        deadline_s: float,
        plan: StagePlan,
        names: ScalarNames,
        mean_cost: float = math.nan,
    ) -> StepReport:
        """The step's report; ``names`` are those of its scalars, ``mean_cost`` that of `CurrentDeadline`."""
        rows = self._rows.tolist()
        links = self.links()
        ranks = tuple(
            self._rank_report(rank, row, link, plan, mean_cost)
            for rank, (row, link) in enumerate(zip(rows, links, strict=True))
        )
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
            pool_parts=max(self.pool_parts()),
            pool_weight=max(self._columns["pool_weight"]),
            ranks_without_store=self.ranks_without_store(),
            network_s=self.network_s(seconds),
        )

    def _stage_s(self) -> Tensor:
        return self._rows[:, self._of_stages.stage_s]

    def _microbatch_s(self) -> Tensor:
        first = self._of_stages.weights.stop
        return self._rows[:, first : first + MICROBATCH_SLOTS]

    def shadow(self, seconds: float, deadline_s: float, rules: StopRules, plan: StagePlan) -> ShadowReport:
        """What a deadline of ``deadline_s`` would have made of this step, in which all ranks were waited for."""
        stage_share = torch.tensor([stage.numel / plan.numel for stage in plan.stages])
        progress = self.progress(stage_share, "microbatch" if rules.finish_running else "stage")
        busy_s, compute_s = (self._tensor(name).nan_to_num(0.0) for name in ("busy_s", "compute_s"))
        # slots without a unit end with the one before
        unit_s = progress.unit_s.where(progress.unit_share > 0, 0.0).nan_to_num(0.0).cummax(-1).values
        unit_s = torch.cat([unit_s[:, :-1], torch.maximum(unit_s[:, -1:], compute_s.unsqueeze(1))], 1)
        entered_s, has_data = progress.entered_s.nan_to_num(0.0), progress.weight > 0
        would = simulate_step(unit_s, deadline_s, rules, entered_s)
        part = computed_share(unit_s, would, rules) * has_data.unsqueeze(1)
        given = part * progress.unit_share
        by_stage = given.sum(1, keepdim=True).expand(-1, len(plan.stages))
        if not rules.finish_running:  # the last micro-batch comes in stages
            first = part.shape[1] - len(plan.stages)
            last_share = progress.unit_share[:, first:].sum(1, keepdim=True)
            by_stage = given[:, :first].sum(1, keepdim=True) + last_share * part[:, first:]
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

    def _entered_s(self) -> Tensor:
        """For each rank the seconds from the end of the step before to entering this one, or to its row.

        NaN for one that is no member.
        """
        times = zip(self._columns["busy_s"], self._columns["compute_s"], self._columns["absent"], strict=True)
        return torch.tensor(
            [
                math.nan if absent else max(0.0, busy_s if math.isnan(own_s) else busy_s - own_s)
                for busy_s, own_s, absent in times
            ]
        )

    def _tensor(self, name: str) -> Tensor:
        return torch.tensor(self._columns[name])

    def _rank_report(
        self, rank: int, row: list[float], link: RankLink, plan: StagePlan, mean_cost: float
    ) -> RankReport:
        computed, _, stage_s, weights = (tuple(row[columns]) for columns in self._of_stages)
        reach = sum(share * stage.numel for share, stage in zip(computed, plan.stages, strict=True)) / plan.numel
        cause = int(row[_COLUMN["cause"]])
        return RankReport(
            rank=rank,
            **{name: row[_COLUMN[name]] for name in (*_TIMES, "compute_s", "overrun_s")},
            wait_s=self._last_submitted_s - row[_COLUMN["busy_s"]],
            reach=reach,
            stages=computed,
            stage_s=stage_s,
            late=bool(row[_COLUMN["late"]]),
            stood_in=bool(row[_COLUMN["stood_in"]]),
            cause=CAUSES[cause] if cause >= 0 else None,
            idle=bool(row[_COLUMN["idle"]]),
            absent=bool(row[_COLUMN["absent"]]),
            weight=row[_COLUMN["weight"]],
            weights=tuple(row[_COLUMN["weight"]] * weight for weight in weights),
            nonfinite=int(row[NONFINITE]),
            cost=relative_cost(row[_COLUMN["cost"]], mean_cost),
            parts=int(row[_COLUMN["parts_done"]]),
            latency_s=link.latency_s,
            up_bytes_per_s=link.up_bytes_per_s,
            down_bytes_per_s=link.down_bytes_per_s,
            put_back=int(row[_COLUMN["put_back"]]),
            leaf_since=int(row[LEAF_SINCE]) if row[LEAF_SINCE] >= 0 else None,
        )

    def _stage_reports(self, rows: list[list[float]], plan: StagePlan) -> tuple[StageReport, ...]:
        of_rank = _COLUMN["weight"]
        of_stages = ([row[of_rank] * weight for weight in row[self._of_stages.weights]] for row in rows)
        weights = [sum(column) for column in zip(*of_stages, strict=True)]
        estimated = [max(column) > 0 for column in zip(*(row[self._of_stages.estimated] for row in rows), strict=True)]
        return tuple(
            StageReport(stage.name, stage.numel, weights[index], estimated[index])
            for index, stage in enumerate(plan.stages)
        )

    def _scalars(self, rows: list[list[float]], names: ScalarNames) -> dict[str, float]:
        values: dict[float, list[float]] = {}
        first = self._of_stages.weights.stop + MICROBATCH_SLOTS
        for row in rows:
            for key, value in zip(row[first::2], row[first + 1 :: 2], strict=True):
                if key > 0:
                    values.setdefault(key, []).append(value)
        known = names.of(values)
        return {known[key]: math.fsum(seen) / len(seen) for key, seen in values.items() if key in known}


@dataclass(frozen=True)
class StepRecord:
    """A merged step as it came: cheap to keep, and its report is built when it is first read, on any thread.

    ``names`` are those of its scalars. ``shadow_s``: the deadline of a policy that is not enforced,
    by whose ``rules`` the step would have ended; NaN: it is enforced. ``mean_cost``: that of `CurrentDeadline`.
    """

    step: int
    seconds: float
    deadline_s: float
    plan: StagePlan
    table: Table
    names: ScalarNames
    shadow_s: float = math.nan
    rules: StopRules | None = None
    mean_cost: float = math.nan

    @cached_property
    def report(self) -> StepReport:
        """What happened in the step, on all ranks."""
        report = self.table.report(self.step, self.seconds, self.deadline_s, self.plan, self.names, self.mean_cost)
        if self.rules is None or math.isnan(self.shadow_s):
            return report
        return replace(report, shadow=self.table.shadow(self.seconds, self.shadow_s, self.rules, self.plan))
