"""What the ranks of a run drop: counted as its steps end, and said in the log, so that a plain script sees it, too."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from straggle import world
from straggle.merge.late.replica import Replica
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.wire.channel import Channel
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import CAUSE_WORDS, CAUSES, Cause

FIRST = 20  # steps from the first one with drops, after which there is enough to say
_KEPT = 8  # steps without drops that show how slow ranks usually are
_ONE_IN = 8  # steps in which a rank left its pass is one predicted, from the first ones on: that takes long
_LENGTH = 120  # of a line
_NAMED = 3  # ranks in a list
_HALF = 0.5  # a rank that gives less of what it could is named with what to do about it
_DATA = CAUSES.index("data")

_log = logging.getLogger("straggle")


@dataclass
class RankDrops:
    """One rank: ``missing`` counts steps, 0.5 for one in which it gave half; ``causes`` those with something missing.

    ``slowest``: if it is a replica of several ranks, which of them its others waited for when it was late.
    ``missed``: most steps in a row that were over before it had loaded its data, and entered them.
    """

    late: int = 0
    missing: float = 0.0
    nonfinite_steps: int = 0
    without_data: int = 0  # steps
    causes: Counter[Cause] = field(default_factory=Counter)
    slowest: Counter[int] = field(default_factory=Counter)
    missed: int = 0
    _missed_since: int = 0  # the first of the last ones in a row
    _missed_last: int = -2

    def miss(self, step: int) -> None:
        """It missed this step as it loaded data."""
        if step > self._missed_last + 1:
            self._missed_since = step
        self._missed_last = step
        self.missed = max(self.missed, step + 1 - self._missed_since)

    def add(self, cause: Cause | None, reach: float, *, late: bool, nonfinite: bool, slowest: int) -> bool:
        """One more step for which this rank had data; true if something is missing that its loop did not leave out."""
        self.nonfinite_steps += nonfinite
        self.late += late
        if late and slowest >= 0:
            self.slowest[slowest] += 1
        if cause is None or cause == "skipped" or not reach < 1:
            return False
        self.missing += 1 - reach
        self.causes[cause] += 1
        return True


@dataclass
class Saved:
    """By ``number`` steps of one kind, in seconds, from those of them that were predicted."""

    number: int = 0
    num_predicted: int = 0
    predicted_s: float = 0.0

    def count(self) -> int:
        """One more of this kind; how many there are."""
        self.number += 1
        return self.number

    def predict(self, seconds: float) -> None:
        """What one of them has saved is known to be this."""
        self.num_predicted += 1
        self.predicted_s += seconds

    @property
    def seconds(self) -> float:
        """By all of them."""
        return self.number * self.predicted_s / max(1, self.num_predicted)


class Drops:
    """What was dropped since the model was wrapped, and how long its steps took; the first of them is in no time.

    ``is_dealt``: each rank gets as much work as it has time for. ``max_lag``: of `LateHandling`.
    """

    def __init__(self, max_lag: int = 8) -> None:
        self._max_lag = max_lag
        self.num_steps = 0
        self.is_dealt = False
        self._ranks: dict[int, RankDrops] = {}
        self._seconds = 0.0
        self._whole: deque[StepRecord] = deque(maxlen=_KEPT)  # the last steps in which nothing was dropped
        self._prediction = DdpPrediction()
        # steps in which a rank left its pass, those in which one was stuck, and those in which nothing was dropped
        self._late, self._stuck, self._others = Saved(), Saved(), Saved()

    def add(self, current: Round) -> None:
        """A step is merged. If it is a usual one, this call is all that it costs."""
        record = current.record
        if not record.table.is_usual:
            self._add_unusual(record)
            return
        self.num_steps += 1
        self._seconds += record.seconds
        self._whole.append(record)

    def share(self, rank: int) -> float:
        """Which share of its gradients this rank dropped, over the steps for which it had data: 0 to 1."""
        own = self._ranks[rank]
        return own.missing / max(1, self.num_steps - own.without_data)

    @property
    def ranks(self) -> dict[int, RankDrops]:
        """All that is known of some ranks; those that dropped most come first."""
        return {rank: self._ranks[rank] for rank in sorted(self._ranks, key=lambda rank: (-self.share(rank), rank))}

    def loads_in_vain(self, rank: int) -> bool:
        """Whether this rank loads data for each step that it has missed, so that it comes too late for the next one.

        One that does not takes part again after at most ``max_lag`` steps and those that it missed meanwhile.
        """
        return self._ranks[rank].missed > 2 * self._max_lag > 0

    @property
    def mean_s(self) -> float:
        """The mean step."""
        return self._seconds / max(1, self.num_steps - 1)

    @property
    def num_with_drops(self) -> int:
        """Steps in which something was dropped."""
        return self._late.number + self._stuck.number

    @property
    def ddp_s(self) -> float:
        """The mean step as DDP would have made it."""
        timed = max(1, self.num_steps - 1)
        others = replace(self._others, number=timed - self.num_with_drops)
        return self.mean_s + sum(kind.seconds for kind in (self._late, self._stuck, others)) / timed

    def _add_unusual(self, record: StepRecord) -> None:
        table = record.table
        idle, absent = table.column("idle"), table.column("absent")
        if all(absent):  # this rank took no part, and knows nothing of the step
            return
        self._seconds += record.seconds if self.num_steps else 0.0
        self.num_steps += 1
        for rank, has_none in enumerate(map(max, idle, absent)):
            if has_none:
                self._of(rank).without_data += 1
        if max(table.column("cause")) >= 0 or any(table.column("late")) or any(table.column("nonfinite")):
            self._add_drops(record)
        else:
            self._whole.append(record)

    def _add_drops(self, record: StepRecord) -> None:
        table, dropped = record.table, False
        parts = _parts_of(table)
        for rank, row in enumerate(zip(*map(table.column, ("cause", "late", "nonfinite")), strict=True)):
            cause, late, nonfinite = row
            if cause < 0 and not late and not nonfinite:  # which a rank without data always is
                continue
            dropped |= self._of(rank).add(
                CAUSES[int(cause)] if cause >= 0 else None,
                1.0 - parts[rank] * (1.0 - record.reach_of(rank)),
                late=bool(late),
                nonfinite=nonfinite > 0,
                slowest=record.slowest_ranks[rank] if record.slowest_ranks else -1,
            )
        for rank in table.missed_ranks():
            if table.column("cause")[rank] == _DATA:
                self._of(rank).miss(record.step)
        self.is_dealt = record.dealt
        if not dropped:
            self._whole.append(record)
        elif any(table.column("stood_in")) or any(table.column("overrun_s")):
            self._stuck.count()
            self._predict(record, self._stuck)  # in one of a few steps is all the time for which a rank was stuck
        else:
            if (number := self._late.count()) <= FIRST or number % _ONE_IN == 0:
                self._predict(record, self._late)

    def _predict(self, record: StepRecord, kind: Saved) -> None:
        pending = [(earlier, self._others) for earlier in self._whole]
        self._whole.clear()
        for earlier, its_kind in (*pending, (record, kind)):
            report = earlier.brief()
            saved_s = self._prediction.add(report).seconds - report.seconds
            its_kind.predict(saved_s if math.isfinite(saved_s) else 0.0)

    def _of(self, rank: int) -> RankDrops:
        return self._ranks.setdefault(rank, RankDrops())


def _parts_of(table: Table) -> list[float]:
    """What each rank had of a step, over an equal part: 1 if the ranks did not draw; who drew nothing drops nothing."""
    if not table.total_weight:
        return [1.0] * table.num_ranks
    columns = zip(table.column("idle"), table.column("absent"), strict=True)
    equal = table.total_weight / max(1, sum(not (idle or absent) for idle, absent in columns))
    return [weight / equal for weight in table.weight()]


@dataclass(frozen=True)
class Names:
    """What lines call things: the ``model``, and its ``ranks`` by their row, each of which is a ``row``."""

    model: str
    ranks: Sequence[int]
    row: Literal["rank", "replica"] = "rank"

    @staticmethod
    def of(module: nn.Module, channel: Channel, replica: Replica) -> Names:
        """The class of a model's module; replicas by their place, single ranks as the job numbers them."""
        model = type(getattr(module, "_orig_mod", module)).__name__  # `torch.compile` wraps it
        if replica.vote is not None:
            return Names(model, range(replica.count), "replica")
        return Names(model, channel.names)


def words_of(drops: Drops, names: Names) -> tuple[str, bool]:
    """A line on what was dropped; and, if ranks give less than half, true and a second line on what to do."""
    ranks, row = drops.ranks, names.row
    times = f"{_time(drops.mean_s)} (DDP: ~{_time(drops.ddp_s)})"
    line = f"straggle, {names.model}: {drops.num_steps:,} steps of {times}; dropped gradients: "
    end = _not_finite(ranks, names)
    dropped = [rank for rank, own in ranks.items() if own.missing]
    line += ", ".join(_that_fit([_dropped(drops, names, rank) for rank in dropped], len(line + end), row)) + end
    little = [rank for rank in dropped if drops.share(rank) > _HALF]
    loading = [str(names.ranks[rank]) for rank in little if drops.loads_in_vain(rank)]
    others = [str(names.ranks[rank]) for rank in little if not drops.loads_in_vain(rank)]
    remedies = [_load_less(loading, names)] * bool(loading) + [_remedy(others, names, drops)] * bool(others)
    return "\n".join([line, *remedies]), bool(little)


def _not_finite(ranks: Mapping[int, RankDrops], names: Names) -> str:
    bad = [names.ranks[rank] for rank, own in ranks.items() if own.nonfinite_steps]
    more = f", {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"; not finite: {names.row} {bad[0]}{more}" if bad else ""


def _list(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:_NAMED]) + (" and others" if len(ranks) > _NAMED else "")


def _remedy(little: Sequence[str], names: Names, drops: Drops) -> str:
    one, row = len(little) == 1, names.row
    who, it = (f"{row} {_list(little)} gives", "it") if one else (f"{row}s {_list(little)} give", "them")
    less = "" if drops.is_dealt or row == "replica" else f"deal {it} less (straggle.Rebalance), "
    return f"{who} less than half: {less}wait longer (deadline=), leave {it} out, or see straggle watch"


def _load_less(loading: Sequence[str], names: Names) -> str:
    plural, it = ("", "it") if len(loading) == 1 else ("s", "they")
    return (
        f"{names.row}{plural} {_list(loading)} missed step after step, because {it} loaded data for each: write "
        "for batch in straggle.LateLoader(model, loader)"
    )


def _that_fit(clauses: Sequence[str], length: int, row: str) -> Iterator[str]:
    """As many of them as go into a line of this length, at least one, and how many are left out."""
    for number, clause in enumerate(clauses):
        length += len(clause) + 2
        if number and length > _LENGTH:
            yield f"{len(clauses) - number} more {row}{'s' if len(clauses) - number > 1 else ''}"
            return
        yield clause


def _dropped(drops: Drops, names: Names, rank: int) -> str:
    own, share = drops.ranks[rank], drops.share(rank)
    ((cause, often),) = own.causes.most_common(1)
    number = own.late or often
    times = ("late " if own.late else "") + ("once" if number == 1 else f"{number:,} times")
    by = f", by rank {own.slowest.most_common(1)[0][0]}" if own.slowest else ""
    return (
        f"{share:.{0 if share >= 0.1 else 1}%} of {names.row} {names.ranks[rank]}'s ({times}, {CAUSE_WORDS[cause]}{by})"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class DropLog:
    """Says it: ``place`` is this rank's row, and the lowest that takes part speaks. ``clock`` gives seconds.

    All ranks that may speak keep the same books, so one that becomes the lowest says nothing again as if it were new.
    """

    def __init__(
        self,
        names: Names,
        place: int,
        every_s: float,
        *,
        max_lag: int = 8,
        clock: Callable[[], float] = world.clock,
    ) -> None:
        self.drops = Drops(max_lag)
        self._names, self._place, self._every_s, self._clock = names, place, every_s, clock
        self._speaks = place == 0
        self._due_at, self._due_step = math.inf, 0  # of the next line
        self._num_said = 0  # steps with drops that were in the last line

    def merged(self, current: Round) -> None:
        """A step that was not usual is merged, and counted."""
        num_with_drops = self.drops.num_with_drops
        if num_with_drops == self._num_said:
            return
        table, now = current.record.table, self._clock()
        if len(absent := table.absent_ranks()) < table.num_ranks:
            self._speaks = self._place == min(set(range(table.num_ranks)) - absent)
        if self._due_at == math.inf:
            self._due_at, self._due_step = now + self._every_s, current.step + FIRST
        if now >= self._due_at or (not self._num_said and current.step >= self._due_step):
            self._due_at = now + self._every_s
            self._say()

    def close(self) -> None:
        """No more steps come. What is said now is the last that a user sees, so a bad end is a warning again."""
        if self.drops.num_with_drops:
            self._say(closing=True)

    def _say(self, *, closing: bool = False) -> None:
        is_first, self._num_said = not self._num_said, self.drops.num_with_drops
        if not (self._speaks and _log.isEnabledFor(logging.WARNING)):
            return
        words, is_bad = words_of(self.drops, self._names)
        _log.log(logging.WARNING if is_first or (closing and is_bad) else logging.INFO, words)
