"""Since when a rank is slow for good, or no longer: steps before that say nothing of those to come.

A rank's end of a step counts in times of the quorum's, so that a moment in which all are slow is no change. It has
changed for good if four steps in a row all lie beyond what its twenty steps before show: by a quarter of their median,
and by 2.5 times their spread. One step says nothing: a checkpoint, garbage, a busy moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from straggle.policies.history import History

CERTAIN = 4  # steps that make a change
_WITHIN = 12  # so many in a row must have them, if a rank is stopped in the others
_BEFORE, _LEAST_BEFORE = 20, 5  # steps that a change is measured against; the fewest, at the beginning
_LEAST_SLOW = 3  # of these steps, at the least, have a slow rank before or after a change
_CLEARLY = 1.25  # times the quorum's time
_MOST = 4.0  # times it, for a rank that was stopped
_SPREADS = 2.5
_SIGMA = 0.16  # the share of a normal distribution that lies more than one standard deviation below its mean


@dataclass(frozen=True)
class _Ends:
    """How many times the quorum's time each rank took for a step; NaN: it had no data, is away, or in an earlier step.

    Of a rank that was stopped (``stopped``) that is a guess: it had gone on as with the share that it gave, and had
    taken four times the quorum's time at most. ``slow``: those that are clearly above 1.
    """

    times: list[float]
    stopped: list[bool]
    slow: frozenset[int]

    @staticmethod
    def of(history: History, row: int, quorum: Callable[[int], int]) -> _Ends:
        """Those of a row of the history."""
        progress = history.progress
        assert progress is not None
        entered_s = progress.entered_s[row].tolist()
        compute_s = history.compute_s[row].tolist()
        # a rank that does not enter a step was held up in the first of them; the rest say nothing but that it still is
        has_before = -row < len(progress.unit_s)
        before_s = history.compute_s[row - 1].tolist() if has_before else [math.nan] * len(compute_s)
        end_s = list[float]()
        for begun_s, own_s, last_s, weight in zip(
            entered_s, compute_s, before_s, progress.weight[row].tolist(), strict=True
        ):
            entered = own_s == own_s
            end_s.append(
                begun_s + (own_s if entered else 0.0) if weight and (entered or last_s == last_s) else math.nan
            )
        known_s = sorted(own_s for own_s in end_s if own_s == own_s)
        if not known_s:
            return _Ends(end_s, [True] * len(end_s), frozenset())
        wanted = quorum(sum(begun_s == begun_s for begun_s in entered_s))
        quorum_s = max(known_s[min(wanted, len(known_s)) - 1], 1e-9)
        times, stopped = [own_s / quorum_s for own_s in end_s], [not own for own in history.finished[row].tolist()]
        if any(stopped):
            share = (progress.computed[row] @ progress.stage_share.to(progress.computed)).tolist()
            guesses = (own / max(given, own / _MOST, 1e-9) for own, given in zip(times, share, strict=True))
            times = [max(own, guess) if cut else own for own, guess, cut in zip(times, guesses, stopped, strict=True)]
        elif known_s[-1] <= _CLEARLY * quorum_s:
            return _Ends(times, stopped, frozenset())  # as in nearly every step
        return _Ends(times, stopped, frozenset(rank for rank, own in enumerate(times) if own > _CLEARLY))


class ChangedTimes:
    """What `steps_since` has worked out for earlier steps; its answer is a function of the history alone."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._ends: list[_Ends] = []  # of the last steps
        self._likely: list[int] = []  # numbers of steps with which a change may have begun
        self._found: dict[int, tuple[int, bool | None]] = {}  # by the change: against which first step; not yet known

    def steps_since(self, history: History, quorum: Callable[[int], int], first: int) -> int | None:
        """The number of steps since the last change; ``None``: there was none in these steps.

        ``quorum``: how many of so many members must have finished; ``first``: the number of the first step that counts.
        """
        oldest = self._look(history, quorum)
        changed, begin = None, max(first, oldest)
        # if steps have left the window, its first changes would be measured against fewer steps than they were, what
        # follows one that is no longer seen looks like one, and what was before its oldest step is not known
        whole = oldest <= first
        for number in self._likely:
            since = max(begin, number - _BEFORE)
            if self._found.get(number) == (since, False) or (number <= oldest + _BEFORE and not whole):
                continue  # as most of them, in a job with a slow rank
            if number - since >= _LEAST_BEFORE and self._is_change(since, number, oldest):
                begin = number
                if whole or number >= oldest + _BEFORE + CERTAIN:
                    changed = number
        return None if changed is None else history.num_steps - changed

    def _look(self, history: History, quorum: Callable[[int], int]) -> int:
        """Look at the steps that are new; the number of the oldest."""
        rows = 0 if history.progress is None else len(history.progress.unit_s)
        oldest = history.num_steps - rows
        if self._num_steps - oldest != rows - 1 or rows - 1 > len(self._ends):  # another run's, or through new stages
            self._num_steps, self._ends, self._likely, self._found = oldest, [], [], {}
        for row in range(self._num_steps - history.num_steps, 0):
            self._ends.append(_Ends.of(history, row, quorum))
            self._num_steps += 1
            seen = self._ends[-_BEFORE - CERTAIN :]
            if len(seen) >= _LEAST_BEFORE + CERTAIN and sum(bool(step.slow) for step in seen) >= _LEAST_SLOW:
                self._likely.append(self._num_steps - CERTAIN)
        del self._ends[: len(self._ends) - rows]
        while self._likely and self._likely[0] < oldest:
            self._found.pop(self._likely.pop(0), None)
        return oldest

    def _is_change(self, since: int, number: int, oldest: int) -> bool:
        """Whether one began with the step of this number, measured against those from ``since`` on."""
        earlier, later = self._ends[since - oldest : number - oldest], self._ends[number - oldest :]
        before, found = self._found.get(number, (None, None))
        if before != since:
            found = _one_turned_slow(earlier, later[:CERTAIN]) or None  # it stays so
        if found is None:
            found = _one_turned_quick(earlier, later[:_WITHIN])
            if not found and len(later) < _WITHIN and earlier[-1].slow - later[0].slow:
                found = None
        self._found[number] = since, found
        return bool(found)


def _one_turned_slow(earlier: list[_Ends], later: list[_Ends]) -> bool:
    """Whether some rank is slow in all later steps, and was not before, where it was not stopped."""
    for rank in frozenset.intersection(*(step.slow for step in later)):
        known = [(step.times[rank], step.stopped[rank]) for step in earlier if step.times[rank] == step.times[rank]]
        usual, apart = _usual([math.inf if stopped else own for own, stopped in known])
        if math.log(min(step.times[rank] for step in later)) - usual > apart:
            return True
    return False


def _one_turned_quick(earlier: list[_Ends], later: list[_Ends]) -> bool:
    """Whether some rank was slow, and has ended four steps before it was slow again.

    That it is stopped in others says nothing, as a deadline that is short for it also stops one that is quick again.
    """
    for rank in earlier[-1].slow - later[0].slow:
        until = next((number for number, step in enumerate(later) if rank in step.slow), len(later))
        ended = [step.times[rank] for step in later[:until] if not step.stopped[rank]][:CERTAIN]
        if len(ended) == CERTAIN:
            usual, apart = _usual([step.times[rank] for step in earlier])
            if usual > math.log(_CLEARLY) and usual - math.log(max(*ended, 1e-9)) > apart:
                return True
    return False


def _usual(times: list[float]) -> tuple[float, float]:
    """The median's logarithm, and how far from it a change lies at least; infinite if too few are known."""
    ordered = [math.log(max(own, 1e-9)) for own in sorted(own for own in times if own == own)]
    if len(ordered) < _LEAST_BEFORE:
        return math.inf, math.inf
    low, middle = int(_SIGMA * len(ordered)), ordered[(len(ordered) - 1) // 2]
    if ordered[-1 - low] == math.inf:
        return middle, math.inf
    return middle, max(math.log(_CLEARLY), _SPREADS / 2 * (ordered[-1 - low] - ordered[low]))
