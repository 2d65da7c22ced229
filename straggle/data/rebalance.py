"""`Rebalance`: each rank gets as many samples, or micro-batches, of a step as it has time for.

A rank takes `f + p n` seconds for `n` samples, from batch to batch (`BatchTimes`). Shares let all ranks finish
together, as far as `p n` is what makes one slow. At first all of the time is taken to go with the samples. What does
not is learned from what changes of the shares did to the times (`sample_time.py`); it is no reason for a small share.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from straggle.data.deal import Parts
from straggle.data.measured import MeasuredSteps, ShareChanges
from straggle.data.rank_times import HeldUp, held_up
from straggle.data.shares import deal
from straggle.members.rows import leaving_ranks
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count
from straggle.policies.shares.sample_time import Level, RankTime, split

_AT_FIRST = 20  # steps, after which it is said that dealing is no help

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankShare:
    """A rank's part of a step: ``count`` samples (or micro-batches) from number ``first`` on; at least one."""

    first: int
    count: int

    def __iter__(self) -> Iterator[int]:
        """For ``first, count = rebalance.share()``."""
        return iter((self.first, self.count))


@final
class Rebalance:
    """Deals the ``total`` samples of a step out to the ranks by their measured speed; equally at first.

    >>> rebalance = straggle.Rebalance(model, total=256, min_share=8, multiple_of=8)
    >>> first, count = rebalance.share()
    >>> with model.step() as step:
    ...     step.weight = count
    ...     criterion(model(x[first : first + count]), y[first : first + count]).backward()

    Set ``step.weight`` to the share, so that the merged gradient is the mean over all samples of the step. To shift
    micro-batches, let ``total`` count those of all ranks and give the share as ``num_microbatches``. Each rank has at
    least ``min_share`` of them, and a multiple of ``multiple_of``.

    A rank's time is the median over the last ``window`` steps, at least half as many, since its last change: one that
    sometimes stalls is not slow. It is that from batch to batch, so loading counts. Shares change only if that makes
    the slowest rank's expected time shorter by ``least_gain`` (0.05: a twentieth). Of a rank that is slow whatever its
    share the log says so, after twenty steps, and `AutoDeadline` may stop it. An absent rank (`Elastic`) has none, the
    others have all. All comes from the telemetry of the merged steps, so that every rank computes the same shares and
    no message is needed. ``schedule``: which shares held from which step on.

    Raises ``ValueError`` if ``total`` cannot be dealt out so.
    """

    def __init__(
        self,
        model: StagedDataParallel,
        *,
        total: int,
        min_share: int = 1,
        multiple_of: int = 1,
        window: int = 20,
        least_gain: float = 0.05,
    ) -> None:
        check_shares(
            model.world_size,
            total=total,
            min_share=min_share,
            multiple_of=multiple_of,
            window=window,
            least_gain=least_gain,
        )
        self._least = _rounded_up(min_share, multiple_of)
        self._model: Any = weakref.proxy(model)  # which holds this one by its hook
        self._rank = model.rank
        self._total = total
        self._multiple_of = multiple_of
        self._least_gain = least_gain
        self._measured = MeasuredSteps(model.world_size, window)
        self._changes = ShareChanges()
        self._held_up: HeldUp | None = None
        self._said: set[int] = set()  # ranks of which it was said
        self._active = frozenset(range(model.world_size))
        self._given: tuple[int, ...] = ()  # the shares of which the loop has its own
        self._abstains = False  # the loop has something that does not count
        self._shares = self._dealt({rank: RankTime(0.0, 1.0) for rank in self._active})
        self.schedule: list[tuple[int, tuple[int, ...]]] = [(0, self._shares)]
        self._replayed: dict[int, tuple[int, ...]] | None = None
        self._warned = False
        self._weights_are_set = False  # by who deals (`Epochs`): the loop cannot forget them
        self._work: Callable[[], Sequence[float]] | None = None
        model.work_is_dealt()
        self._hook = model.register_step_hook(self._measure)

    @property
    def shares(self) -> tuple[int, ...]:
        """What each rank has in the next step."""
        return self._shares

    def share(self) -> RankShare:
        """What this rank has in the next step; ask for it before each one.

        A rank that has just come back (`Elastic`) is given ``min_share`` that do not count, and has a share of its own
        in the step after that.
        """
        own, self._given = self._shares[self._rank], self._shares
        self._abstain(own == 0)
        return RankShare(sum(self._shares[: self._rank]), own) if own else RankShare(0, self._least)

    def _abstain(self, wanted: bool) -> None:
        if wanted != self._abstains:
            self._abstains = wanted
            self._model.dealt(idle=wanted)

    def weighed_by_loader(self) -> None:
        """Who deals these shares gives each step the weight of its samples, too."""
        self._weights_are_set = True

    def follow_work(self, work: Callable[[], Sequence[float]]) -> None:
        """Take a rank's time for what it had in the step that is merged, by ``work()``, and not for its weight.

        For who deals: in samples or micro-batches, as the shares are, the same on all ranks.
        """
        self._work = work

    def replay(self, schedule: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Give the shares of a recorded run's ``schedule`` instead of measured ones; before the first step."""
        self._replayed = {step: tuple(shares) for step, shares in schedule}
        self._follow(0)

    def close(self) -> None:
        """Leave the shares as they are from here on."""
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, as plain numbers."""
        return {
            "total": self._total,
            "shares": list(self._shares),
            "active": sorted(self._active),
            **self._measured.state_dict(),
            **self._changes.state_dict(),
            "held_up": self._held_up and list(vars(self._held_up).values()),
            "schedule": [[step, list(shares)] for step, shares in self.schedule],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved shares. Raises ``ValueError`` if they are of another total or number of ranks."""
        if state["total"] != self._total or len(state["shares"]) != len(self._shares):
            raise ValueError(
                f"these shares are of {state['total']} for {len(state['shares'])} ranks, not of {self._total} for "
                f"{len(self._shares)}: begin without them"
            )
        self._shares = tuple(state["shares"])
        self._measured.load_state_dict(state)
        self._active = frozenset(state.get("active", range(len(self._shares))))
        if "changes" in state:  # an older version has none
            self._changes.load_state_dict(state)
            self._hold(state["held_up"] and HeldUp(*state["held_up"]), -1)
        self.schedule = [(step, tuple(shares)) for step, shares in state["schedule"]]
        if self._given:  # in the middle of a loop, which has its own part of other shares, or none
            self._abstain(self._given != self._shares or not self._shares[self._rank])

    # -- after each step

    def _measure(self, record: StepRecord) -> None:
        if self._replayed is not None:
            self._follow(record.step + 1)
            return
        table = record.table
        parts = Parts((), table.absent_ranks(), table.stood_in_ranks(), leaving_ranks(table))
        if self._rank in parts.absent:  # it does not know what the others do, and is given their state
            return
        self._measured.add(table, self._weights(table), loads_missed=self._model.loads_missed)
        if (active := parts.active(self._active, len(self._shares))) != self._active:
            self._active = active
            self._deal_to_others(record.step + 1)
        elif self._measured.is_enough:
            self._rebalance(record)

    def _deal_to_others(self, next_step: int) -> None:
        """Ranks have left or come back: deal out by the times that are known."""
        self._change(self._dealt(self._times(self._level())), next_step)

    def _rebalance(self, record: StepRecord) -> None:
        """Deal out again, if that is worth it."""
        level = self._level()
        if self._measured.is_full:
            self._changes.settle(level)
        times = self._times(level)
        own_s = {rank: of.seconds(self._shares[rank]) for rank, of in times.items()}
        slowest = max(own_s, key=lambda rank: own_s[rank])
        error = level.errors[slowest]
        if math.isnan(error):  # next to nothing is known of it
            return
        most_s = own_s[slowest] / (1 + self._least_gain + 3 * error)
        if len(own_s) * most_s < math.fsum(own_s.values()):  # not even the mean is as low
            self._hold(None, record.step)
            return
        shares = self._equal_enough(times)
        helps = max(of.seconds(shares[rank]) for rank, of in times.items()) <= most_s
        if helps or self._unequal(shares) < self._unequal(self._shares) / 2:
            self._change(shares, record.step + 1)
        elif record.step + 1 >= _AT_FIRST:
            self._judge(times, record)

    def _equal_enough(self, times: Mapping[int, RankTime]) -> tuple[int, ...]:
        """The best shares, or equal ones if these are next to as good."""
        best = self._dealt(times, spare=self._least_gain / 2)
        equal = self._dealt({rank: RankTime(0.0, 1.0) for rank in times})
        equal_s, best_s = (max(of.seconds(way[rank]) for rank, of in times.items()) for way in (equal, best))
        return equal if equal_s <= (1 + self._least_gain) * best_s else best

    def _judge(self, times: Mapping[int, RankTime], record: StepRecord) -> None:
        """Shares stay as they are: is some rank slow whatever it is given?"""
        phases = self._measured.phase_means()
        found = held_up(times, self._shares, phases, least=self._least, before=self._held_up)
        self._hold(found, record.step)
        if found is not None and found.rank not in self._said:
            self._said.add(found.rank)
            words = found.words(waits=math.isinf(record.deadline_s), loads_missed=self._model.loads_missed)
            level = logging.WARNING if self._rank == min(self._active) else logging.DEBUG
            _log.log(level, "step %d: %s", record.step, words)

    def _hold(self, found: HeldUp | None, step: int) -> None:
        """Tell the deadline policy whether dealing makes up for what ranks take."""
        if (found is None) != (self._held_up is None):
            self._model.work_is_dealt(evenly=found is None, after=step)
        self._held_up = found

    def _unequal(self, shares: Sequence[int]) -> float:
        """How many samples lie where they would not with equal shares, twice."""
        return math.fsum(abs(shares[rank] - self._total / len(self._active)) for rank in self._active)

    def _change(self, shares: tuple[int, ...], next_step: int) -> None:
        if shares == self._shares:
            return
        self._changes.changed(self._level())
        self._use(shares, next_step)
        self._measured.begin_anew()

    def _level(self) -> Level:
        """What ranks take with the present shares, as far as it is known."""
        return self._measured.level(self._shares)

    def _times(self, level: Level) -> dict[int, RankTime]:
        """Of each rank that something is dealt to; of one of which nothing is known, as of the others."""
        mean = self._total / len(self._active)
        counts = [float(share) or mean for share in self._shares]  # one that comes back has had none
        usual_s = [count / speed for count, speed in zip(counts, self._measured.usual_speeds(), strict=True)]
        times = split(self._changes.known(level), mean, counts, usual_s)
        return {rank: times[rank] for rank in sorted(self._active)}

    def _weights(self, table: Table) -> list[float]:
        """What each rank had in the step, by its own word: a loader that fetches ahead is late with new shares."""
        weights = table.weight()
        if self._work is not None:
            return [own if weight > 0 else 0.0 for own, weight in zip(self._work(), weights, strict=True)]
        if self._weights_are_set:
            return weights
        if len(set(self._shares)) > 1 and all(weight in (0.0, 1.0) for weight in weights) and max(self._shares) > 1:
            if not self._warned:
                self._warned = True
                _log.log(
                    logging.WARNING if self._rank == 0 else logging.DEBUG,
                    "the ranks' shares differ (%s) and step.weight is not set: write step.weight = count in the step, "
                    "or the samples of ranks with fewer of them count more",
                    ", ".join(map(str, self._shares)),
                )
            return [weight * share for weight, share in zip(weights, self._shares, strict=True)]
        return weights

    def _follow(self, step: int) -> None:
        """Use what the recorded run used from this step on."""
        assert self._replayed is not None
        if step in self._replayed:
            self._use(self._replayed[step], step)

    def _use(self, shares: tuple[int, ...], step: int) -> None:
        self._shares = shares
        self.schedule = [entry for entry in self.schedule if entry[0] < step] + [(step, shares)]

    # -- arithmetic

    def _dealt(self, times: Mapping[int, RankTime], spare: float = 0.0) -> tuple[int, ...]:
        unit, ranks = self._multiple_of, sorted(self._active)
        of_units = [replace(times[rank], per_sample_s=unit * times[rank].per_sample_s) for rank in ranks]
        units = deal(self._total // unit, of_units, least=self._least // unit, spare=spare)
        counts = dict(zip(ranks, units, strict=True))
        return tuple(unit * counts.get(rank, 0) for rank in range(self._model.world_size))


def check_shares(
    ranks: int,
    *,
    total: int | None,
    min_share: int = 1,
    multiple_of: int = 1,
    window: int = 20,
    least_gain: float = 0.05,
) -> None:
    """Raise ``ValueError`` for what `Rebalance` cannot do with these ranks; a ``total`` of ``None`` is not known."""
    check_count("min_share", min_share, least=1)
    check_count("multiple_of", multiple_of, least=1)
    check_count("window", window, least=2)
    if not 0 < least_gain < math.inf:
        raise ValueError(f"least_gain={least_gain}: must be a positive number, such as 0.05 for a twentieth")
    each = _rounded_up(min_share, multiple_of)
    if total is not None and (total % multiple_of or total < each * ranks):
        raise ValueError(
            f"total={total}: must be a multiple of {multiple_of}, and {each} at least for each of {ranks} ranks"
        )


def _rounded_up(count: int, multiple_of: int) -> int:
    return -(-count // multiple_of) * multiple_of
