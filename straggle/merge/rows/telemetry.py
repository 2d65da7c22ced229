"""What each rank reports with every merge: one row of numbers, in its own slot, so that no message is added.

A row holds the numbers that `Row` declares, then those that optional parts declare (`Column`), then four numbers for
each stage, then the user's scalars as (hash of the name, value) pairs, so that ranks need not agree on names or their
order, then the hashes of those that a device has not told yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from straggle.merge.wire.channel import Channel
from straggle.policies.network.rank_links import Way
from straggle.report import PHASES, Phase, RankNumbers
from straggle.schema import numbers_of
from straggle.source.kept import NONE, UNDECIDED

UNCHANGED = 0  # a forward pass was complete and changed nothing
UNFINISHED = -1  # no forward pass was complete, and its changes can be restored
UNSETTLED = -2  # the changes cannot be restored: a peer must send the old tensors


def must_exchange(marks: Sequence[int]) -> bool:
    """Whether state differs between ranks with these marks, and some of them cannot restore it alone."""
    return any(mark not in (UNCHANGED, UNFINISHED) for mark in marks) and len(set(marks)) > 1


class ScalarNames:
    """The names that one rank knows: those that it has logged, and those that it has looked up.

    ``channel``: where the ranks publish names for one another.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._logged: set[str] = set()
        self._known: dict[float, str] = {}

    def log(self, names: Iterable[str]) -> None:
        """Publish new names. Raises ``ValueError`` for a name with the same hash as another."""
        for name in names:
            if name not in self._logged:
                self._publish(name)

    def of(self, hashes: Iterable[float]) -> dict[float, str]:
        """The names of these hashes; an unknown one is left out if the job's store is gone."""
        with contextlib.suppress(RuntimeError):
            for key in hashes:
                if key not in self._known and (name := self._channel.published_name(int(key))) is not None:
                    self._known[key] = name
        return dict(self._known)

    def _publish(self, name: str) -> None:
        key, first = name_hash(name), name
        with contextlib.suppress(RuntimeError):  # the store is gone: the merge will report it
            first = self._channel.publish_name(int(key), name)
        first = self._known.get(key, first)
        if first != name:
            raise ValueError(
                f"scalars {first!r} and {name!r} have the same hash by chance: give one of them another name"
            )
        self._known[key] = name
        self._logged.add(name)


def name_hash(name: str) -> float:
    """A number for a scalar's name, exact in float32 and never 0, which marks an empty slot."""
    return float(int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big") | 1)


MAX_SCALARS = 8
MICROBATCH_SLOTS = 16  # for the times at which micro-batches end; of more of them, several share one
TIMES = tuple(f"{phase}_s" for phase in PHASES)
MAX_WAYS = 4  # to peers, as this rank measured them last
WAYS = tuple(f"way_{part}_{slot}" for slot in range(MAX_WAYS) for part in ("target", "latency", "rate", "age"))
NO_FINGERPRINT = -1


class Column(NamedTuple):
    """One number of a row that an optional part declares, writes and reads; 0 on a rank that says nothing.

    ``unusual``: a rank that says it had no usual step.
    """

    name: str
    unusual: bool = False


class Row(NamedTuple):
    """One rank's telemetry for one step: what its report has as it is, and what only ranks read.

    ``reported``: the first. ``times``: seconds of each phase. ``computed``, ``estimated`` and ``weights`` (of all that
    it submits; empty: as computed) are shares of each stage, relative to the rank's own weight. ``stage_s``: when each
    stage was complete, and ``microbatch_s``: each micro-batch. ``ways``: to peers, as it measured them last, at most
    ``MAX_WAYS``. ``of_wings``: what optional parts say. Each field that is one number has a slot; marks are integers of
    48 bits, which go as two numbers, exact in float32.
    """

    times: Mapping[Phase, float]
    reported: RankNumbers
    busy_s: float  # from the merge before to the end of its own work
    computed: tuple[float, ...] = ()
    estimated: tuple[float, ...] = ()
    stage_s: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    microbatch_s: tuple[float, ...] = ()
    ways: tuple[Way, ...] = ()
    scalars: Mapping[str, float] = MappingProxyType({})
    awaited: tuple[str, ...] = ()  # scalars of this step that only the device knows so far
    of_wings: Mapping[Column, float] = MappingProxyType({})
    merge_s: float = 0.0  # from the end of its own work in the step before to the end of its merge
    num_microbatches: int = 1
    cause: int = -1  # an index into `CAUSES`
    failed: bool = False  # its own code raised
    cost: float = math.nan  # what the user gave the step
    stepped: float = math.nan  # how often its optimizers stepped since the merge before; NaN: not known
    kept: int = UNDECIDED  # which gradients it had before its first backward pass (`kept.mark`)
    frozen: int = UNDECIDED  # a number for the merged parameters that need no gradient
    replans: bool = False  # it has other parameters, and reports only that
    without_store: bool = False  # the job's store did not answer it
    counts_behind: int = 0  # as `StepReport` has it
    skipped_before: bool = False  # so many steps before, no rank had a gradient that could be applied
    gathers: bool = False  # its loop begins collectives of its own in its steps
    joins_over: int = 0  # the loops over `join` for which it has no more data after this step
    fingerprint: int = NO_FINGERPRINT  # of what it holds
    state: int = UNFINISHED  # the mark of what its forward pass changed beside gradients (`state/exchange.py`)

    def telling(self, own: Mapping[Column, float]) -> Row:
        """The row with these numbers of an optional part."""
        return self._replace(of_wings={**self.of_wings, **own})

    def encode(self, columns: Columns | None = None) -> Tensor:
        """The row as a tensor of ``columns.row_length`` elements; without ``columns`` it has the core's numbers."""
        return torch.frombuffer(self.numbers(columns), dtype=torch.float32)

    def numbers(self, columns: Columns | None = None) -> array[float]:
        """The same as plain memory."""
        fixed = [*map(self.times.__getitem__, PHASES), *_reported(self.reported), *_plain(self)]
        for mark in (self.fingerprint, self.state):
            fixed += (mark >> 24, mark & 0xFFFFFF)
        fixed.append(self.is_unusual)
        numbers = array("f", fixed)
        numbers += _numbers_of(self.ways) if self.ways else _NO_WAYS
        of_wings = () if columns is None else columns.of_wings
        assert self.of_wings.keys() <= set(of_wings) if self.of_wings else True
        numbers.fromlist([self.of_wings.get(column, 0.0) for column in of_wings])
        numbers.fromlist([*self.computed, *self.estimated, *self.stage_s, *(self.weights or self.computed)])
        ends = self.microbatch_s if self.num_microbatches <= MICROBATCH_SLOTS else self._shared_slots()
        numbers.fromlist([*ends])
        numbers += _NO_ENDS[len(ends) :]
        pairs = [number for name, value in self.scalars.items() for number in (name_hash(name), value)]
        numbers.fromlist(pairs)
        numbers += _NO_SCALARS[len(pairs) : 2 * MAX_SCALARS]
        numbers.fromlist([*map(name_hash, self.awaited)])
        numbers += _NO_SCALARS[2 * MAX_SCALARS + len(self.awaited) :]
        return numbers

    @property
    def is_unusual(self) -> bool:
        """Whether it tells anything that rows of most steps do not: a usual step needs to be asked for nothing else."""
        reported = self.reported
        return (
            self.state != UNCHANGED
            or self.stepped != 1
            or self.cause >= 0
            or (reported.late or reported.stood_in or reported.idle or reported.absent)
            or (self.failed or self.replans or self.without_store)
            or (self.kept != NONE or self.frozen != NONE)
            or self.skipped_before
            or (self.fingerprint >= 0 or self.cost == self.cost)
            or any(column.unusual and value for column, value in self.of_wings.items())
        )

    def _shared_slots(self) -> list[float]:
        """When the last micro-batch of each slot ended."""
        slots = [math.nan] * MICROBATCH_SLOTS
        for number, seconds in enumerate(self.microbatch_s):
            slots[microbatch_slot(number, self.num_microbatches)] = seconds
        return slots


_MARKS = ("fingerprint", "state")
_REPORTED = tuple(own.name for own in numbers_of(RankNumbers))
_ONE_NUMBER = [name for name, kind in get_type_hints(Row).items() if kind in (bool, int, float)]
_PLAIN = tuple(name for name in _ONE_NUMBER if name not in _MARKS)
_reported, _plain = attrgetter(*_REPORTED), attrgetter(*_PLAIN)
# the core's slots of a row, in their order, as `Row.numbers` writes them; those of wings, stages and others follow
_HALVES = tuple(f"{mark}_{half}" for mark in _MARKS for half in ("high", "low"))
FIELDS = (*TIMES, *_REPORTED, *_PLAIN, *_HALVES, "unusual", *WAYS)
COLUMN = {name: column for column, name in enumerate(FIELDS)}
NONFINITE = COLUMN["nonfinite"]  # on the CPU counted while the row is on its way
COUNTS_BEHIND = COLUMN["counts_behind"]
_PER_STAGE = 4
_NO_WAYS = array("f", [-1.0, math.nan, math.nan, math.nan] * MAX_WAYS)
_NO_ENDS = array("f", [math.nan] * MICROBATCH_SLOTS)
_NO_SCALARS = array("f", [0.0] * (3 * MAX_SCALARS))  # pairs, then hashes


def _numbers_of(ways: Sequence[Way]) -> array[float]:
    """Four numbers for each of these ways."""
    each = [(float(way.target), way.link.latency_s, way.link.bytes_per_s, way.age_s) for way in ways[:MAX_WAYS]]
    numbers = array("f", [number for own in each for number in own])
    return numbers + _NO_WAYS[len(numbers) :]


def means_of(pairs_by_rank: Iterable[Sequence[float]]) -> dict[float, float]:
    """Of each rank's scalars, as (hash, value, hash, value, ...), the means by hash; a hash of 0 is of none.

    A hash below 0 is of a scalar whose value comes later: so it is in the result, with NaN, if no rank has a value.
    """
    values: dict[float, list[float]] = {}
    for pairs in pairs_by_rank:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if key:
                values.setdefault(key, []).append(value)
    means = {key: math.fsum(seen) / len(seen) for key, seen in values.items() if key > 0}
    return means | {key: math.nan for key in values if key < 0 and -key not in means}


class StageColumns(NamedTuple):
    """Where a row has, for each stage, the share computed, the weight of its estimate, when it was complete, and its
    weight in the merge.
    """

    computed: slice
    estimated: slice
    stage_s: slice
    weights: slice


class Columns:
    """Where the rows of one model have their numbers, on all ranks alike: those of the core, then those ``of_wings``.

    ``place``: of each number that does not belong to a stage, by its name.
    """

    def __init__(self, of_wings: Iterable[Column] = ()) -> None:
        self.of_wings = tuple(of_wings)
        self.place = {**COLUMN}
        for column in self.of_wings:
            self.place[column.name] = len(self.place)

    def __str__(self) -> str:
        """How many numbers a row has beside those of stages, and a check sum of what they are.

        Two builds of one version may differ in it, and would misread each other's rows.
        """
        names = [*self.place, _PER_STAGE, MICROBATCH_SLOTS, MAX_SCALARS]
        return f"{self.row_length(0)} numbers ({zlib.crc32(repr(names).encode()):08x})"

    def of_stages(self, num_stages: int) -> StageColumns:
        """Those of rows with so many stages."""
        return _stage_columns(len(self.place), num_stages)

    def row_length(self, num_stages: int) -> int:
        """Elements of an encoded row."""
        return len(self.place) + _PER_STAGE * num_stages + MICROBATCH_SLOTS + len(_NO_SCALARS)


OF_THE_CORE = Columns()


@lru_cache(maxsize=64)
def _stage_columns(first: int, num_stages: int) -> StageColumns:
    return StageColumns(*(slice(first + k * num_stages, first + (k + 1) * num_stages) for k in range(_PER_STAGE)))


def absent_row(num_stages: int, columns: Columns = OF_THE_CORE) -> Tensor:
    """The row of a rank that takes no part; the others write it."""
    nothing = (0.0,) * num_stages
    row = Row(
        dict.fromkeys(PHASES, 0.0),
        RankNumbers(compute_s=math.nan, absent=True),
        busy_s=0.0,
        computed=nothing,
        estimated=nothing,
        stage_s=(math.nan,) * num_stages,
    )
    return row.encode(columns)


def microbatch_slot(microbatch: int, num_microbatches: int) -> int:
    """In which of the row's slots a micro-batch's end is."""
    most = MICROBATCH_SLOTS
    return microbatch if num_microbatches <= most else microbatch * most // num_microbatches
