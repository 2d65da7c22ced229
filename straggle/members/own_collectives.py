"""The error of a collective of the loop's own, such as an ``all_reduce`` of the loss, that a rank which is gone fails.

A group of `torch.distributed` is one of processes. If one of them ends, its collectives fail on all ranks from then on,
also when the rank is back: its new process is in none of the others' groups.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.c10d_logger import _c10d_logger

from straggle.members.views.membership import Membership
from straggle.members.views.view import NOT_KNOWN, SLOW, Change, View
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.groups import is_of_peer
from straggle.stuck.frames import frames_of, place_of
from straggle.stuck.states import INSTEAD
from straggle.waits import until

_LIVES = ("returns", *SLOW, "restarted")  # kinds of leaving of a process that may still run
_log = logging.getLogger(__name__)


class OwnCollectives:
    """From `begin` to `close`, puts in front of such an error who is gone and what to write instead.

    torch tells a logger of each error of a collective, on the thread that called it and before the code that called it
    has the error. So loops that catch it read that, too. ``known_s``: after so long the members know who is gone.
    """

    def __init__(self, membership: Membership, *, known_s: float) -> None:
        self._membership, self._known_s = membership, known_s
        self._first: View | None = None  # of the processes that are in torch's groups; `None`: not this one
        self._may_wait = True  # until it is known who is gone

    def begin(self, *, comes_late: bool) -> None:
        """This rank has wrapped its model; ``comes_late``: its process was started again."""
        self._first = None if comes_late else self._membership.view
        _c10d_logger.addFilter(self._explain)

    def close(self, uncaught: BaseException | None) -> None:
        """Look no more. ``uncaught``: what ends the process; of an error of ``work.wait()`` torch tells nobody."""
        _c10d_logger.removeFilter(self._explain)
        if uncaught is not None and "gloo" in str(uncaught) and (words := self._words(uncaught)):
            _log.error(words)

    def _explain(self, record: logging.LogRecord) -> bool:  # noqa: ARG002
        """A collective has failed, and torch is about to raise its error in the code that called it."""
        error, place = sys.exc_info()[1], place_of(frames_of(sys._getframe(1)))
        is_own = place is not None and place.kind != "inside" and not self._may_be_of_replica
        if error is not None and is_own and (words := self._words(error)):
            error.args = (f"{words}: {error}",)
        return True

    @property
    def _may_be_of_replica(self) -> bool:
        """Whether the error may be one of the replica's own collectives, whose ranks leave together."""
        return self._membership.inside.size > 1 and self._membership.detector.is_in_step()

    def _words(self, error: BaseException) -> str:
        """Who is gone, and what to write instead; empty if nobody is, or if the error says so already."""
        is_told = isinstance(error, PeerFailed) or INSTEAD in str(error)
        if is_told or not (isinstance(error, RuntimeError) and is_of_peer(error)):
            return ""
        return f"{gone}, and a collective of the loop's own {INSTEAD}" if (gone := self._wait_for_gone()) else ""

    def _wait_for_gone(self) -> str:
        """Who is gone, as soon as the members know it; as such errors go on, only the first one waits for that."""
        if not (gone := self._gone()) and self._may_wait:
            self._membership.detector.connection_broke()
            gone = until(self._gone, every_s=0.01, limit_s=self._known_s)
        self._may_wait = False
        return gone

    def _gone(self) -> str:
        membership = self._membership
        if self._first is None:
            return f"rank {membership.inside.rank(membership.rank)} was started again"
        view, changes = membership.view, dict(membership.chain.changes)
        left = [change for change in view.changes_since(self._first, changes) if not change.joined]
        left = [change for change in left if change.rank in view.members or _is_gone(change)]
        because = [change for change in left if change.kind != "raised"] or left  # others raised because of these
        whys = ["" if change.reason == NOT_KNOWN else f" ({change.reason})" for change in because]
        named = [f"{membership.inside.kind} {change.rank} left{why}" for change, why in zip(because, whys, strict=True)]
        return "; ".join(named)


def _is_gone(change: Change) -> bool:
    """Whether the process of a rank that left may have ended; of one that left in a view not seen, it is not known."""
    return change.kind not in _LIVES or change.reason == NOT_KNOWN
