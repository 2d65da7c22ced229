"""What each rank reports with every merge: one row of numbers, in its own slot, so that no message is added.

A row holds the fixed fields of `Row`, then four numbers for each stage, then the user's scalars as (hash of the name,
value) pairs, so that ranks need not agree on names or their order.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from straggle.backward.kept import NONE, UNDECIDED
from straggle.merge.names import name_hash
from straggle.merge.state.marks import UNCHANGED, UNFINISHED
from straggle.policies.rank_links import Way
from straggle.report import PHASES, Phase

MAX_SCALARS = 8
MICROBATCH_SLOTS = 16  # for the times at which micro-batches end; of more of them, several share one
TIMES = tuple(f"{phase}_s" for phase in PHASES)
_FLAGS = ("late", "stood_in", "cause", "failed", "idle", "weight", "nonfinite", "fingerprint_high", "fingerprint_low")
_STATE = (
    "stepped",
    "kept",
    "frozen",
    "replans",
    "without_store",
    "absent",
    "admits",
    "pool_parts",
    "pool_weight",
    "parts_done",
    "joins_over",
    "put_back",
    "state_high",
    "state_low",
    "unusual",
)
MAX_WAYS = 4  # to peers, as this rank measured them last
WAYS = tuple(f"way_{part}_{slot}" for slot in range(MAX_WAYS) for part in ("target", "latency", "rate", "age"))
FIELDS = (*TIMES, "compute_s", "busy_s", "overrun_s", *_FLAGS, "merge_s", "num_microbatches", *_STATE, "cost", *WAYS)
_PER_STAGE = 4
COLUMN = {name: column for column, name in enumerate(FIELDS)}
NONFINITE = COLUMN["nonfinite"]  # counted while the row is on its way
NO_FINGERPRINT = -1


class Row(NamedTuple):
    """One rank's telemetry for one step; times in seconds, ``cause`` an index into ``CAUSES`` or -1.

    ``computed``, ``estimated`` and ``weights`` (of all that it submits; empty: as computed) are relative to the rank's
    own ``weight``; ``idle``: it has no more data. ``fingerprint`` has 48 bits, which go as two numbers, exact
    in float32. ``merge_s``: seconds from the end of the rank's own work in the step before to the end of its merge.
    ``microbatch_s``: when each micro-batch ended. ``stepped``: how often its optimizers stepped since the merge before
    (NaN: not known). ``kept``: which gradients it had before its first backward pass (`kept.mark`). ``frozen``: a
    number for the merged parameters that need no gradient; ``replans``: it has other parameters, and says only that.
    ``without_store``: the job's store did not answer it. ``absent``: it is no member. ``admits``: it lets others in
    after this step. ``cost``: what the user gave the step (NaN: nothing). ``pool_parts`` and ``pool_weight``: the
    micro-batches in the step's pool, and the sum of their weights; ``parts_done``: those that the rank computed, and
    ``put_back``: those that it had drawn and gave back. ``joins_over``: the loops over `join` for which it has no more
    data after this step.
    ``state``: the mark of what its forward pass changed beside gradients (`state/exchange.py`), as two numbers.
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
    frozen: int = UNDECIDED
    replans: bool = False
    without_store: bool = False
    absent: bool = False
    admits: bool = False
    cost: float = math.nan
    pool_parts: int = 0
    pool_weight: float = 0.0
    parts_done: int = 0
    joins_over: int = 0
    put_back: int = 0
    state: int = UNFINISHED
    ways: tuple[Way, ...] = ()
    scalars: Mapping[str, float] = MappingProxyType({})

    @property
    def is_unusual(self) -> bool:
        """Whether it says more of the rank's state than rows of most steps do."""
        return self.state != UNCHANGED or self.fingerprint >= 0 or self.replans or self.frozen != NONE

    def encode(self) -> Tensor:
        """The row as a tensor of `row_length` elements."""
        return torch.frombuffer(self.numbers(), dtype=torch.float32)

    def numbers(self) -> array[float]:
        """The same as plain memory."""
        fixed = [
            *(self.times[phase] for phase in PHASES),
            *(self.compute_s, self.busy_s, self.overrun_s, self.late, self.stood_in, self.cause, self.failed),
            *(self.idle, self.weight, 0.0, self.fingerprint >> 24, self.fingerprint & 0xFFFFFF),
            *(self.merge_s, self.num_microbatches, self.stepped, self.kept, self.frozen, self.replans),
            *(self.without_store, self.absent),
            *(self.admits, self.pool_parts, self.pool_weight, self.parts_done, self.joins_over, self.put_back),
            *(self.state >> 24, self.state & 0xFFFFFF, self.is_unusual, self.cost),
            *(_numbers_of(self.ways) if self.ways else _NO_WAYS),
        ]
        slots = [math.nan] * MICROBATCH_SLOTS
        if self.num_microbatches <= MICROBATCH_SLOTS:
            slots[: len(self.microbatch_s)] = self.microbatch_s
        else:
            for number, seconds in enumerate(self.microbatch_s):
                slots[microbatch_slot(number, self.num_microbatches)] = seconds
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
    first = len(FIELDS)
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
    return len(FIELDS) + _PER_STAGE * num_stages + MICROBATCH_SLOTS + 2 * MAX_SCALARS


def microbatch_slot(microbatch: int, num_microbatches: int) -> int:
    """In which of the row's slots a micro-batch's end is."""
    most = MICROBATCH_SLOTS
    return microbatch if num_microbatches <= most else microbatch * most // num_microbatches
