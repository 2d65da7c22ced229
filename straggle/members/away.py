"""Says in time that a rank is at work between two steps for too long, and what its loop is to write around that."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Container, Iterable

from straggle.merge.round.rank_parts import RankParts
from straggle.stuck.frames import frames_of_thread, place_of
from straggle.stuck.states import INSTEAD as NO_COLLECTIVE

INSTEAD = "write `with model.pause():` around an evaluation or a checkpoint of one rank, and the others wait for it"

_log = logging.getLogger(__name__)


class Away:
    """Counts the steps that are merged without a rank, and speaks after half of ``max_lag``, before anything is lost.

    After ``max_lag`` the rank needs a peer's state, and if the others come to the end of their loops before it is back
    it has nothing left to do. The rank itself names each line of its loop once, and one of its peers names it once. All
    methods need the lock of the merge.
    """

    def __init__(self, rank: RankParts) -> None:
        self._rank, self._ident = rank, threading.get_ident()  # the thread that wraps the model is the one that trains
        self._lines: set[str] = set()  # of this rank's loop, that were named
        self._told_before = -1  # which step
        self._missed: dict[int, tuple[int, float]] = {}  # by rank: the last step without it, and how many in a row
        self._named: set[int] = set()  # ranks that were named by this one

    @property
    def _max_lag(self) -> int:
        return self._rank.deadline.late_handling.max_lag

    def stands_in(self) -> None:
        """The stand-in is about to submit: this rank's training thread may be away."""
        training, lag = self._rank.training, self._rank.lag
        if training.entered_at is not None or lag < self._max_lag // 2 or training.step == self._told_before:
            return
        place = place_of(frames_of_thread(self._ident))
        if place is None or place.waits_in_straggle or (line := str(place.own)) in self._lines:
            return
        self._lines.add(line)
        self._told_before = training.step  # work of several lines is told once
        what = f"a collective of the loop's own {NO_COLLECTIVE}" if place.kind == "collective" else INSTEAD
        _log.warning("%s; %s", self._words(self._rank.channel.name, lag, f", {place.words()}"), what)

    def merged(self, step: int, stood_in: Iterable[int], away: Container[int], *, speaks: bool) -> None:
        """These ranks were stood in for, some of them ``away``, between two steps; ``speaks``: this rank names them."""
        for rank in stood_in:
            before, times = self._missed.get(rank, (-1, 0.0))
            if before != step - 1:
                times = 0.0 if rank in away else -math.inf  # it is in a step, which is no matter of this
            self._missed[rank] = step, times + 1
            if times + 1 < self._max_lag // 2 or rank in self._named:
                continue
            self._named.add(rank)
            if speaks:
                _log.warning("%s; %s", self._words(self._rank.channel.names[rank], int(times) + 1), INSTEAD)

    def _words(self, rank: int, times: int, place: str = "") -> str:
        return (
            f"rank {rank} has been at work between two steps while {times} steps were merged without it{place}: after "
            f"max_lag={self._max_lag} it needs a peer's state, and it is too late if the others' loops end before that"
        )
