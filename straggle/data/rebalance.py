"""`Rebalance`: each rank gets as many samples, or micro-batches, of a step as it has time for.

A rank that takes `t_r` seconds for `n_r` samples takes `t_r (n + c) / (n_r + c)` for `n` of them, where `c` is what a
step costs beside its samples, in samples. Shares `n = T v_r - c` with the speed `v_r = (n_r + c) / t_r` let all ranks
finish together after `T = (total + ranks * c) / sum(v)`. `c` is taken as 0 at first, and learned from what the changes
of shares did to the times. If it is too small, a change is too small too: shares come to the balance from one side.
"""

from __future__ import annotations

import heapq
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from straggle.data.deal import Parts
from straggle.merge.step_record import StepRecord
from straggle.merge.table import Table
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count
from straggle.policies.overhead import Overhead

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

    A rank's speed is the median over the last ``window`` steps, at least half as many, since its last change: one that
    sometimes stalls is not slow. Shares change only if that makes the slowest rank's expected time shorter by
    ``least_gain`` (0.05: a twentieth). An absent rank (`Elastic`) has none, the others have all. All comes from the
    telemetry of the merged steps, so that every rank computes the same shares and no message is needed. ``schedule``:
    which shares held from which step on.

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
        self._window = window
        self._least_gain = least_gain
        self._speeds: list[list[float]] = []  # samples a second in the last steps with these shares; NaN: not known
        self._vague: list[list[bool]] = []  # where the time was only "at least"
        self._last_known = [math.nan] * model.world_size
        self._before: tuple[list[int], list[float]] | None = None  # shares and seconds before the last change
        self._overhead = Overhead(total / model.world_size)
        self._active = frozenset(range(model.world_size))
        self._given: tuple[int, ...] = ()  # the shares of which the loop has its own
        self._abstains = False  # the loop has something that does not count
        self._shares = self._dealt([1.0] * model.world_size, 0.0)
        self.schedule: list[tuple[int, tuple[int, ...]]] = [(0, self._shares)]
        self._replayed: dict[int, tuple[int, ...]] | None = None
        self._warned = False
        self.weights_are_set = False  # by who deals (`Epochs`): the loop cannot forget them
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
            self._abstains = self._model.idle = wanted

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
            "speeds": [list(speeds) for speeds in self._speeds],
            "vague": [list(vague) for vague in self._vague],
            "last_known": list(self._last_known),
            "active": sorted(self._active),
            "before": self._before,
            "overhead": list(self._overhead.misfit),
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
        self._speeds = [list(speeds) for speeds in state["speeds"]]
        self._vague = [list(vague) for vague in state["vague"]]
        self._last_known = list(state["last_known"])
        self._active = frozenset(state.get("active", range(len(self._shares))))
        self._before = state["before"] and (list(state["before"][0]), list(state["before"][1]))
        self._overhead.misfit = list(state["overhead"])
        self.schedule = [(step, tuple(shares)) for step, shares in state["schedule"]]
        if self._given:  # in the middle of a loop, which has its own part of other shares, or none
            self._abstain(self._given != self._shares or not self._shares[self._rank])

    # -- after each step

    def _measure(self, record: StepRecord) -> None:
        if self._replayed is not None:
            self._follow(record.step + 1)
            return
        table = record.table
        parts = Parts((), table.absent_ranks(), table.stood_in_ranks(), table.leaving_ranks())
        if self._rank in parts.absent:  # it does not know what the others do, and is given their state
            return
        weights = self._weights(record.table)
        untruncated = record.table.untruncated_times()
        pairs = zip(weights, untruncated, strict=True)
        self._speeds.append(
            [weight / of.seconds if weight > 0 and of.seconds > 0 else math.nan for weight, of in pairs]
        )
        self._vague.append([of.at_least for of in untruncated])
        for rows in (self._speeds, self._vague):
            del rows[: -self._window]
        if (active := parts.active(self._active, len(self._shares))) != self._active:
            self._active = active
            self._deal_to_others(record.step + 1)
        elif 2 * len(self._speeds) >= self._window:
            self._rebalance(record.step + 1)

    def _deal_to_others(self, next_step: int) -> None:
        """Ranks have left or come back: deal out by the speeds that are known."""
        mean = self._total / len(self._active)
        cautious, speeds = min(self._overhead.samples, mean), self._typical()
        counts = [share or mean for share in self._shares]  # one that comes back has had none
        self._change(
            self._dealt(
                [(count + cautious) * speed / count for count, speed in zip(counts, speeds, strict=True)], cautious
            ),
            next_step,
        )
        self._before = None

    def _rebalance(self, next_step: int) -> None:
        """Deal out again, if that is worth it."""
        # an absent rank has nothing to do, in no time
        times_s = [count / speed for count, speed in zip(self._shares, self._typical(), strict=True)]
        vague = [2 * sum(column) >= len(column) for column in zip(*self._vague, strict=True)]
        known_s = [
            math.nan if unknown or not time_s else time_s for time_s, unknown in zip(times_s, vague, strict=True)
        ]
        if self._before is not None:
            self._overhead.learn(*self._before, self._shares, known_s)
            self._before = None
        slowest = times_s.index(max(times_s))
        most_s = times_s[slowest] / (1 + self._least_gain + 3 * self._error(slowest))
        if len(self._active) * most_s < math.fsum(times_s):  # not even the mean is as low
            return
        overhead = self._overhead.samples
        cautious = min(overhead, self._total / len(self._active))  # at most twice as far as without
        pairs = list(zip(self._shares, times_s, strict=True))
        shares = self._dealt([(count + cautious) / time_s if count else 1.0 for count, time_s in pairs], cautious)
        new = zip(pairs, shares, strict=True)
        if max(time_s * (share + overhead) / (count + overhead) for (count, time_s), share in new if count) <= most_s:
            before = list(self._shares), known_s
            self._change(shares, next_step)
            self._before = before

    def _change(self, shares: tuple[int, ...], next_step: int) -> None:
        self._use(shares, next_step)
        self._speeds.clear()
        self._vague.clear()

    def _typical(self) -> list[float]:
        """Each rank's median speed, or the last one known; of a rank never seen, the others' median."""
        medians = torch.tensor(self._speeds, dtype=torch.float64).nanmedian(dim=0).values.tolist()
        pairs = zip(medians, self._last_known, strict=True)
        self._last_known = [before if math.isnan(own) else own for own, before in pairs]
        known = torch.tensor(self._last_known, dtype=torch.float64).nanmedian().item()
        others = 1.0 if math.isnan(known) else known
        return [others if math.isnan(own) else own for own in self._last_known]

    def _error(self, rank: int) -> float:
        """Standard error of a rank's median speed, relative to it, from the median absolute deviation."""
        own = torch.tensor([speeds[rank] for speeds in self._speeds], dtype=torch.float64)
        median = own.nanmedian()
        spread = (own - median).abs().nanmedian().item() / median.item()
        return 0.0 if math.isnan(spread) else 1.2533 * 1.4826 * spread / math.sqrt(len(self._speeds))

    def _weights(self, table: Table) -> list[float]:
        """What each rank had in the step, by its own word: a loader that fetches ahead is late with new shares."""
        weights = table.weight()
        if self.weights_are_set:
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

    def _dealt(self, speeds: Sequence[float], overhead: float) -> tuple[int, ...]:
        unit, ranks = self._multiple_of, sorted(self._active)
        of_active = [speeds[rank] for rank in ranks]
        units = deal(self._total // unit, of_active, least=self._least // unit, overhead=overhead / unit)
        counts = dict(zip(ranks, units, strict=True))
        return tuple(unit * counts.get(rank, 0) for rank in range(len(speeds)))


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


def exact_shares(
    total: float, speeds: Sequence[float], overheads: Sequence[float], *, least: float = 0.0
) -> list[float]:
    """Shares of sum ``total``, at least ``least`` each, with which all ranks that have more finish together.

    ``share + overhead`` of a rank takes it that many times ``1 / speed`` seconds.
    """
    small: set[int] = set()  # ranks that would have less than the least
    while True:
        others = [rank for rank in range(len(speeds)) if rank not in small]
        left = total - least * len(small) + math.fsum(overheads[rank] for rank in others)
        seconds = left / math.fsum(speeds[rank] for rank in others) if others else 0.0
        shares = [seconds * speed - overhead for speed, overhead in zip(speeds, overheads, strict=True)]
        if not (more := {rank for rank in others if shares[rank] < least}):
            return [least if rank in small else share for rank, share in enumerate(shares)]
        small |= more


def deal(total: int, speeds: Sequence[float], *, least: int = 0, overhead: float = 0.0) -> list[int]:
    """Integers of sum ``total``, at least ``least`` each, with the largest ``(units + overhead) / speed`` minimal.

    The exact shares rounded down, and what is left one by one to whoever is done with it first. In Python's own floats,
    whose results are the same on every machine.
    """
    exact = exact_shares(total, speeds, [overhead] * len(speeds), least=least)
    units = list(map(int, exact))
    queue = [
        ((count + 1 + overhead) / speed, rank) for rank, (count, speed) in enumerate(zip(units, speeds, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        _, rank = queue[0]
        units[rank] += 1
        heapq.heapreplace(queue, ((units[rank] + 1 + overhead) / speeds[rank], rank))
    return units
