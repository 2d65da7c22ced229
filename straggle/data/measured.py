"""What the ranks took in the last steps, and what became of their times when their shares were changed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from straggle.data.rank_times import BatchTimes
from straggle.merge.rows.table import Table
from straggle.policies.shares.sample_time import Change, Level
from straggle.report import PHASES, Phase

_KEPT = 4  # changes that are looked back at
_OTHER = 0.2  # a rank whose time for the same samples changes by so much is another: what it took before says nothing
_FEW = 3  # steps show nothing


class MeasuredSteps:
    """The last ``window`` steps, as far as the ranks had the shares in them that they have now.

    A speed is samples a second, and NaN where it is not known.
    """

    def __init__(self, world_size: int, window: int) -> None:
        self._window = window
        self._speeds: list[list[float]] = []  # of each step, and in it of each rank
        self._vague: list[list[bool]] = []  # where the time was only "at least"
        self._last_known = [math.nan] * world_size  # speeds, with whatever shares
        self._phases: deque[list[tuple[float, ...]]] = deque(maxlen=window)  # with whatever shares
        self._batch_times = BatchTimes(world_size)

    @property
    def is_enough(self) -> bool:
        """Whether the window is half full."""
        return 2 * len(self._speeds) >= self._window

    @property
    def is_full(self) -> bool:
        """Whether all of the window's steps had these shares."""
        return len(self._speeds) == self._window

    def add(self, table: Table, weights: Sequence[float], *, loads_missed: bool) -> None:
        """One more step is merged, in which the ranks had so many samples."""
        whole = self._batch_times.of(table, loads_missed=loads_missed)
        pairs = zip(weights, whole, strict=True)
        self._speeds.append(
            [weight / of.seconds if weight > 0 and of.seconds > 0 else math.nan for weight, of in pairs]
        )
        self._vague.append([of.at_least for of in whole])
        self._phases.append([table.column(f"{phase}_s") for phase in PHASES])
        for rows in (self._speeds, self._vague):
            del rows[: -self._window]

    def begin_anew(self) -> None:
        """The shares are others from here on."""
        self._speeds.clear()
        self._vague.clear()

    def level(self, shares: Sequence[int]) -> Level:
        """What ranks take with these, the present shares, as far as it is known."""
        if not self._speeds:
            nothing = (math.nan,) * len(shares)
            return Level(tuple(map(float, shares)), nothing, nothing)
        rows = torch.tensor(self._speeds, dtype=torch.float64)
        speed = rows.nanmedian(dim=0).values
        # the median's standard error, from the median absolute deviation; that of a few is none
        spread, number = (rows - speed).abs().nanmedian(dim=0).values / speed, (~rows.isnan()).sum(dim=0)
        errors = (1.2533 * 1.4826 * spread / number.sqrt()).where(number >= _FEW, math.nan).tolist()
        vague = [2 * sum(column) >= len(column) for column in zip(*self._vague, strict=True)]
        times = zip(shares, speed.tolist(), errors, vague, strict=True)
        seconds = [
            math.nan if unknown or not count or math.isnan(error) else count / own
            for count, own, error, unknown in times
        ]
        return Level(tuple(map(float, shares)), tuple(seconds), tuple(errors))

    def usual_speeds(self) -> list[float]:
        """Each rank's median speed, or the last one known; of a rank never seen, the others' median."""
        if self._speeds:
            medians = torch.tensor(self._speeds, dtype=torch.float64).nanmedian(dim=0).values.tolist()
            pairs = zip(medians, self._last_known, strict=True)
            self._last_known = [before if math.isnan(own) else own for own, before in pairs]
        known = torch.tensor(self._last_known, dtype=torch.float64).nanmedian().item()
        others = 1.0 if math.isnan(known) else known
        return [others if math.isnan(own) else own for own in self._last_known]

    def phase_means(self) -> dict[Phase, list[float]]:
        """Of each phase the mean seconds of each rank."""
        return {
            phase: [fmean(column) for column in zip(*rows, strict=True)]
            for phase, rows in zip(PHASES, zip(*self._phases, strict=True), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "speeds": [list(speeds) for speeds in self._speeds],
            "vague": [list(vague) for vague in self._vague],
            "last_known": list(self._last_known),
            "batch_times": self._batch_times.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._speeds = [list(speeds) for speeds in state["speeds"]]
        self._vague = [list(vague) for vague in state["vague"]]
        self._last_known = list(state["last_known"])
        if "batch_times" in state:  # an older version has none
            self._batch_times.load_state_dict(state["batch_times"])


class ShareChanges:
    """The last changes of the shares: what the ranks took before and after each."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._before: Level | None = None  # the last one, of which it is not known well enough yet what came after it
        self._settled: Level | None = None  # what ranks took with these shares, when that was known well first

    def changed(self, level: Level) -> None:
        """The shares are changed, with which the ranks took that."""
        self._learn(level)
        self._before, self._settled = level, None

    def known(self, level: Level) -> list[Change]:
        """All, if the ranks take that now."""
        return self._changes if self._before is None else [*self._changes, Change(self._before, level)]

    def settle(self, level: Level) -> None:
        """It is known well what ranks take now: forget what was known of those that have become slower."""
        if self._settled is None:
            self._learn(level)
            self._settled = level
            return
        before = self._settled.seconds
        ratios = [new / old for old, new in zip(before, level.seconds, strict=True)]
        common = median([own for own in ratios if not math.isnan(own)] or [1.0])
        # neither what the machine does to all is a rank's own, nor that it is as before while the machine is quicker
        changes = [min(abs(own - 1), abs(own / common - 1)) for own in ratios]
        pairs = enumerate(zip(changes, level.errors, strict=True))
        others = [rank for rank, (change, error) in pairs if change > _OTHER + 3 * error]
        if others:
            self._changes = [change.without([r for r in others if ratios[r] > 1]) for change in self._changes]
            now = zip(before, level.seconds, strict=True)
            seconds = [new if rank in others else old for rank, (old, new) in enumerate(now)]
            self._settled = replace(level, seconds=tuple(seconds))

    def _learn(self, level: Level) -> None:
        """This is what ranks take after the last change."""
        if self._before is not None:
            self._changes = [*self._changes, Change(self._before, level)][-_KEPT:]
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "changes": [[_plain(change.before), _plain(change.after)] for change in self._changes],
            "before": self._before and _plain(self._before),
            "settled": self._settled and _plain(self._settled),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._changes = [Change(_level(before), _level(after)) for before, after in state["changes"]]
        self._before = state["before"] and _level(state["before"])
        self._settled = state["settled"] and _level(state["settled"])


def _plain(level: Level) -> list[list[float]]:
    return [list(level.counts), list(level.seconds), list(level.errors)]


def _level(plain: Sequence[Sequence[float]]) -> Level:
    return Level(*map(tuple, plain))
