"""The rows of all ranks for one step, and what follows from them: the same on every rank."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from operator import mul
from typing import TypeVar

import torch
from torch import Tensor

from straggle.merge.rows.telemetry import (
    COLUMN,
    COUNTS_BEHIND,
    MAX_SCALARS,
    MICROBATCH_SLOTS,
    NONFINITE,
    OF_THE_CORE,
    UNCHANGED,
    UNFINISHED,
    UNSETTLED,
    WAYS,
    Column,
    Columns,
    means_of,
    microbatch_slot,
    must_exchange,
)
from straggle.policies.deadline import Granularity
from straggle.policies.history import ProgressRow, StepProgress
from straggle.policies.network.merge_time import Link
from straggle.policies.network.rank_links import RankLink, Way, rank_links
from straggle.policies.what_if.untruncated import UntruncatedTime, untruncated_step
from straggle.report import CAUSES
from straggle.source.kept import UNDECIDED

_SKIPPED = CAUSES.index("skipped")
# phases that a loop has between two steps
_BETWEEN = tuple(map(CAUSES.index, ("outside", "optimizer", "loop_end", "collective", "data")))


@lru_cache(maxsize=64)
def _slot_counts(num_microbatches: int) -> list[int]:
    """How many micro-batches each slot covers."""
    counts = [0] * MICROBATCH_SLOTS
    for number in range(num_microbatches):
        counts[microbatch_slot(number, num_microbatches)] += 1
    return counts


@lru_cache(maxsize=64)
def _unit_share(counts: tuple[int, ...], stage_share: tuple[float, ...], granularity: Granularity) -> Tensor:
    """`StepProgress.unit_share` of ranks with these numbers of micro-batches; read-only."""
    if granularity == "step":  # the only unit ends with the last micro-batch
        return torch.ones(len(counts), 1)
    share = torch.tensor([_slot_counts(number) for number in counts], dtype=torch.float32)
    share /= share.sum(1, keepdim=True)
    if granularity == "microbatch":
        return share
    of_stages = 1.0 - share[:, 1:].sum(1, keepdim=True)  # the last micro-batch is merged in stages
    return torch.cat([share[:, 1:], of_stages * torch.tensor(stage_share)], 1)


@lru_cache(maxsize=64)
def _unit_shares(
    counts: tuple[int, ...], stage_share: tuple[float, ...], granularity: Granularity
) -> tuple[array[float], ...]:
    """`_unit_share` for each rank, as plain memory."""
    return tuple(array("f", own) for own in _unit_share(counts, stage_share, granularity).tolist())


_Given = TypeVar("_Given")


def _most(given: Mapping[int, _Given]) -> _Given:
    """What most ranks gave; in a tie, that of the lowest rank."""
    if len(alike := set(given.values())) == 1:  # as in nearly every step; counting takes five times as long
        return alike.pop()
    return Counter(given[rank] for rank in sorted(given)).most_common(1)[0][0]


def _minority(given: Mapping[int, _Given]) -> tuple[int, ...] | None:
    """The ranks that gave something else than most; ``None`` if fewer than two gave anything."""
    if len(given) < 2:
        return None
    most = _most(given)
    return tuple(rank for rank, own in given.items() if own != most)


class _Values(dict[str, tuple[float, ...]]):
    """The values of a field in all rows, by its name; read when first needed."""

    def __init__(self, rows: Sequence[Sequence[float]], place: Mapping[str, int]) -> None:
        self._rows, self._place = rows, place

    def __missing__(self, name: str) -> tuple[float, ...]:
        column = self._place[name]
        self[name] = found = tuple([row[column] for row in self._rows])
        return found


class Table:
    """The rows of a matrix of shape (ranks, ``columns.row_length``), on the CPU, or of its numbers.

    ``of_stages``: where a row has its numbers of each stage. ``total_weight``: the weight of the entire step over all
    ranks, if known (`share_weight`). ``is_usual``: all ranks have done all of their work, their optimizers stepped
    once, and only the step's times matter. ``probed``: this rank took no part, and went through the step all the same,
    to time its own work.
    """

    def __init__(
        self, rows: Tensor | array[float], num_stages: int, columns: Columns = OF_THE_CORE, *, probed: bool = False
    ) -> None:
        self._given, self.columns = rows, columns
        self._num_stages, self.of_stages = num_stages, columns.of_stages(num_stages)
        self._row_length, num_fixed = columns.row_length(num_stages), len(columns.place)
        # every step needs some of these few numbers, and one tensor operation costs more than the entire list
        if isinstance(rows, Tensor):
            fixed: Sequence[Sequence[float]] = rows[:, :num_fixed].tolist()
        else:
            fixed = [rows[start : start + num_fixed] for start in range(0, len(rows), self._row_length)]
        self._columns, self.num_ranks = _Values(fixed, columns.place), len(fixed)
        # no row has `Row.is_unusual`, and all gradients are finite
        self.is_usual = not (any(self._columns["unusual"]) or any(self._columns["nonfinite"]))
        self.total_weight: float | None = None
        self.probed = probed

    @cached_property
    def rows(self) -> Tensor:
        """The matrix."""
        if isinstance(self._given, Tensor):
            return self._given
        return torch.frombuffer(self._given, dtype=torch.float32).view(self.num_ranks, -1)

    def share_weight(self, weights: Sequence[float], total: float) -> None:
        """Set each rank's weight to its part of a step of weight ``total``, whatever its row has."""
        self._columns["weight"], self.total_weight = tuple(weights), total
        self.rows[:, COLUMN["weight"]] = torch.tensor(weights)

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
        """Weight of each rank's step; 0 if it had no data, or took no part."""
        columns = (self._columns[name] for name in ("weight", "idle", "absent"))
        return [0.0 if idle or absent else own for own, idle, absent in zip(*columns, strict=True)]

    def given(self, shares: Sequence[float]) -> list[float]:
        """Weight of the gradients that each rank gave; ``shares``: of the model, in each stage."""
        if self.is_usual:
            return self.weight()
        computed = self.rows[:, self.of_stages.computed].tolist()
        return [own * sum(map(mul, part, shares)) for own, part in zip(self.weight(), computed, strict=True)]

    def network_s(self, seconds: float) -> float:
        """The rest of a step of ``seconds`` after the last rank had submitted.

        Each rank counts from the end of the merge before, which is nearly simultaneous on all.
        """
        return max(0.0, seconds - self.last_submitted_s)

    @property
    def last_submitted_s(self) -> float:
        """When the last rank had submitted, in seconds from the end of the merge before."""
        return max(self._columns["busy_s"])

    def costs(self) -> list[float]:
        """The cost of each rank's step; NaN if it gave none."""
        return list(self._columns["cost"])

    def num_microbatches(self) -> list[float]:
        """How many micro-batches each rank's step had; NaN if it did not enter it, or had no data."""
        pairs = zip(self._columns["num_microbatches"], self._columns["compute_s"], strict=True)
        return [math.nan if math.isnan(own_s) else number for number, own_s in pairs]

    def untruncated_times(self) -> list[UntruncatedTime]:
        """For each rank the time of all its own work in the step, including work that a late rank left."""
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
        """Whether no rank that takes part has data left."""
        absent = self._columns["absent"]
        return not all(absent) and all(map(max, self._columns["idle"], absent))

    def joins_over(self) -> int:
        """How many loops over `join` are over: no rank has data for them after this step."""
        columns = zip(self._columns["joins_over"], self._columns["absent"], strict=True)
        return int(min((over for over, absent in columns if not absent), default=0))

    def stood_in_ranks(self) -> frozenset[int]:
        """Ranks that were stood in for."""
        return frozenset(rank for rank, stood_in in enumerate(self._columns["stood_in"]) if stood_in)

    def missed_ranks(self) -> frozenset[int]:
        """Ranks that were stood in for before they had entered the step."""
        entered = self._columns["compute_s"]
        return frozenset(rank for rank in self.stood_in_ranks() if math.isnan(entered[rank]))

    def away_ranks(self) -> frozenset[int]:
        """Ranks that were stood in for while their loops were at work between two steps."""
        causes = self._columns["cause"]
        return frozenset(rank for rank in self.missed_ranks() if causes[rank] in _BETWEEN)

    def absent_ranks(self) -> frozenset[int]:
        """Ranks that took no part."""
        return frozenset(rank for rank, absent in enumerate(self._columns["absent"]) if absent)

    def nonfinite_ranks(self) -> list[int]:
        """Ranks with gradients that were left out because they were not finite."""
        return [rank for rank, number in enumerate(self._columns["nonfinite"]) if number]

    def nothing_to_apply(self) -> bool:
        """Whether the step changes nothing, because it is `skipped` or no rank had data for it."""
        nothing = self.all_idle() or all(self._columns["absent"])
        return nothing or (any(self._columns["nonfinite"]) and self.skipped())

    def ways(self) -> list[Way]:
        """The ways between ranks as last measured; the same on all ranks."""
        columns = (self._columns[name] for name in WAYS)
        slots = [tuple(zip(*four, strict=True)) for four in zip(*[iter(columns)] * 4, strict=True)]
        return [
            Way(rank, int(target), Link(latency_s, rate), age_s)
            for slot in slots
            for rank, (target, latency_s, rate, age_s) in enumerate(slot)
            if target >= 0
        ]

    def links(self) -> tuple[RankLink, ...]:
        """Each rank's link, by `ways`; the same on all ranks."""
        return rank_links(self.ways(), self.num_ranks)

    def all_skipped(self) -> bool:
        """Whether every rank left its block without a gradient and was not late."""
        return set(self._columns["cause"]) == {_SKIPPED} and not any(self._columns["late"])

    def skipped(self) -> bool:
        """Whether no rank has a gradient that could be applied, and some have gradients that are not finite.

        On a device with a queue only that knows it, and tells it later: `skipped_before`.
        """
        nonfinite = (self.rows[:, NONFINITE] > 0) & (self.rows[:, COUNTS_BEHIND] == 0)
        nothing = self.rows[:, self.of_stages.computed].sum(1) == 0
        return bool(nonfinite.any() and (nonfinite | nothing).all())

    @property
    def skipped_before(self) -> bool:
        """Whether a step before was skipped, of which devices tell now; by the first rank's, so that it counts once."""
        return bool(self._columns["skipped_before"][0])

    def different_ranks(self) -> tuple[int, ...] | None:
        """Ranks whose parameters or buffers are not those of most ranks; ``None`` if not compared."""
        differ = self.differ_in_tensors()
        if unlike := self.stepped_unlike():
            return tuple(sorted({*unlike, *(differ or ())}))
        return differ

    def differ_in_tensors(self) -> tuple[int, ...] | None:
        """Ranks that entered the step with other parameters or buffers than most; ``None`` if not compared."""
        if self.is_usual:
            return None
        high, low = (self._columns[f"fingerprint_{half}"] for half in ("high", "low"))
        return _minority({rank: pair for rank, pair in enumerate(zip(high, low, strict=True)) if pair[0] >= 0})

    def stepped_unlike(self) -> tuple[int, ...]:
        """Ranks whose optimizers stepped more or less often than those of most ranks since the merge before."""
        if len(set(stepped := self._columns["stepped"])) == 1:  # as after nearly every step
            return ()
        return _minority({rank: number for rank, number in enumerate(stepped) if not math.isnan(number)}) or ()

    def state_marks(self) -> list[int]:
        """The mark of each rank's other state (`state/exchange.py`)."""
        if self.is_usual:
            return [UNCHANGED] * self.num_ranks
        high, low = (self._columns[f"state_{half}"] for half in ("high", "low"))
        return [(int(first) << 24) | int(second) for first, second in zip(high, low, strict=True)]

    def frozen_unlike(self) -> tuple[int, ...]:
        """Ranks whose frozen parameters are not those of most."""
        if self.is_usual:
            return ()
        frozen = self._columns["frozen"]
        return _minority({rank: mark for rank, mark in enumerate(frozen) if mark != UNDECIDED}) or ()

    def replanning(self) -> tuple[int, ...]:
        """Ranks that have other parameters, for which the stages are to be planned again."""
        return () if self.is_usual else tuple(rank for rank, own in enumerate(self._columns["replans"]) if own)

    def kept(self) -> int:
        """The mark of the gradients that most ranks keep beside the merged ones; `UNDECIDED` if no rank knows."""
        if len(of_all := set(marks := self._columns["kept"])) == 1:
            return int(of_all.pop())
        known = {rank: mark for rank, mark in enumerate(marks) if mark != UNDECIDED}
        return int(_most(known)) if known else UNDECIDED

    def must_exchange(self, ranks: Sequence[int]) -> bool:
        """Whether state beside gradients differs between these ranks, and some of them cannot restore it alone."""
        if self.is_usual:
            return False
        marks = self.state_marks()
        return must_exchange([marks[rank] for rank in ranks])

    def finished_forward(self) -> list[int]:
        """Ranks whose forward passes were complete."""
        return [rank for rank, mark in enumerate(self.state_marks()) if mark not in (UNFINISHED, UNSETTLED)]

    def progress(self, stage_share: Tensor, granularity: Granularity) -> StepProgress:
        """Each rank's progress through the step; ``stage_share``: the share of the model in each stage."""
        counts = tuple(map(int, self._columns["num_microbatches"]))
        share = _unit_share(counts, tuple(stage_share.tolist()), granularity)
        unit_s = self._microbatch_s()
        if granularity == "step":
            unit_s = unit_s.gather(1, torch.tensor([[microbatch_slot(number - 1, number)] for number in counts]))
        if granularity == "stage":
            unit_s = torch.cat([unit_s[:, :-1], self._stage_s()], 1)
        computed = self.rows[:, self.of_stages.computed]
        weight, overhead_s = torch.tensor(self.weight()), torch.tensor(max(0.0, min(self._columns["merge_s"])))
        return StepProgress(unit_s, share, computed, weight, torch.tensor(self._entered()), overhead_s)

    def progress_row(self, stage_share: tuple[float, ...], granularity: Granularity) -> ProgressRow:
        """`progress` as plain memory, for callers that only store it."""
        counts = tuple(map(int, self._columns["num_microbatches"]))
        shares, weights, entered_s = _unit_shares(counts, stage_share, granularity), self.weight(), self._entered()
        overhead_s = max(0.0, min(self._columns["merge_s"]))
        given = array("f", self._given.flatten().tolist()) if isinstance(self._given, Tensor) else self._given
        length, numbers = self._row_length, array("f")
        stage_s, computed, slots = self.of_stages.stage_s, self.of_stages.computed, self.of_stages.weights.stop
        for rank, (count, share) in enumerate(zip(counts, shares, strict=True)):
            first = rank * length
            if granularity == "step":
                numbers.append(given[first + slots + microbatch_slot(count - 1, count)])
            else:
                numbers += given[first + slots : first + slots + MICROBATCH_SLOTS - (granularity == "stage")]
            if granularity == "stage":
                numbers += given[first + stage_s.start : first + stage_s.stop]
            numbers += share
            numbers += given[first + computed.start : first + computed.stop]
            numbers.extend((weights[rank], entered_s[rank], overhead_s))
        return ProgressRow(numbers, len(shares[0]), self._num_stages)

    def _stage_s(self) -> Tensor:
        return self.rows[:, self.of_stages.stage_s]

    def _microbatch_s(self) -> Tensor:
        first = self.of_stages.weights.stop
        return self.rows[:, first : first + MICROBATCH_SLOTS]

    def _entered(self) -> list[float]:
        """For each rank the seconds from the end of the step before to entering this one, or else to its row.

        NaN for one that took no part.
        """
        times = zip(self._columns["busy_s"], self._columns["compute_s"], self._columns["absent"], strict=True)
        return [
            math.nan if absent else max(0.0, busy_s if math.isnan(own_s) else busy_s - own_s)
            for busy_s, own_s, absent in times
        ]

    def scalars(self) -> dict[float, float]:
        """The mean of each scalar over the ranks that have it, by the hash of its name, as `means_of` gives them."""
        first, pairs = self.of_stages.weights.stop + MICROBATCH_SLOTS, 2 * MAX_SCALARS
        by_rank = self.rows[:, first:].tolist()
        return means_of([*own[:pairs], *(part for key in own[pairs:] for part in (-key, math.nan))] for own in by_rank)

    def column(self, name: str) -> tuple[float, ...]:
        """The values of a field of `Row` that is one number, by rank."""
        return self._columns[name]

    def told(self, column: Column) -> tuple[float, ...]:
        """What an optional part says there, by rank; zeros in a job without that part."""
        return self._columns[column.name] if column.name in self.columns.place else (0.0,) * self.num_ranks
