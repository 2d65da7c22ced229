"""When a rank is late, and when it is stood in for: a pure function decides what the stand-in does next.

No rank is late while no rank waits. Once a quorum of ranks has finished the step, a rank is stopped when its deadline
is over, and stood in for when the grace is over too. A rank that is still in an earlier step is stood in for at once.
If others can do the work of a rank, a rank that has not entered the step is waited for only so long, even without a
deadline, because nothing is lost; and a rank that is stuck in a pass gives back the work that it has not begun.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from straggle.merge.wire.long_wait import LONG_S

_SHORTEST_S = 0.002  # between two looks


@dataclass(frozen=True)
class Limits:
    """How long a rank is waited for in the running step: seconds of the step, once a quorum waits, and of grace.

    After ``max_lag`` merged steps without it, its peers wait; after 0, they always do. ``unentered_s``: for a rank that
    has not entered the step, and whose work others can do.
    """

    deadline_s: float
    after_quorum_s: float = 0.0
    grace_s: float = 0.0
    max_lag: int = 1
    unentered_s: float = math.inf

    @property
    def shortest_s(self) -> float:
        """Seconds at the start of a step in which no rank needs attention."""
        return min(self.deadline_s, self.unentered_s)


@dataclass(frozen=True)
class Situation:
    """A rank at one moment, with times by its clock: its two threads, and what its stand-in has seen and posted.

    ``lag``: merged steps that the training thread has not taken. ``entered``: that thread is in its step and not yet
    done; ``taking``: it has merged the step itself. ``clock_from``: when its deadline began; ``busy_since``: since when
    it has been in the same step, or between the same two. ``stopped``: it was asked to leave. ``submitted``: all of
    this rank's part of the merge is in flight. ``waited_since``: when a quorum was seen to wait; ``asked_at``: the last
    time when none was. ``unposted``: its work is done, and the peers do not know; ``computes``: its device is still at
    that work, which is queued. ``posted_stuck_s``: for how long it
    is stuck, as reported to them. ``gives_nothing``: its gradients are not merged. ``give_back_at``: from then on it
    counts as stuck, and gives back the work that it has not begun; infinite: never.
    """

    lag: int = 0
    entered: bool = False
    taking: bool = False
    clock_from: float = -math.inf
    busy_since: float = -math.inf
    stopped: bool = False
    merged_at: float = 0.0
    any_late: bool = False
    submitted: bool = False
    waited_since: float = math.inf
    asked_at: float = -math.inf
    unposted: bool = False
    computes: bool = False
    posted_stuck_s: int = 0
    paused: bool = False
    gives_nothing: bool = False
    give_back_at: float = math.inf
    closing: bool = False


@dataclass(frozen=True)
class Sleep:
    """Sleep until this moment, or until another thread wakes the stand-in."""

    until: float


@dataclass(frozen=True)
class Post:
    """Report to the peers whether this rank has finished its work, and for how long it is stuck; 0: it is not."""

    finished: bool
    stuck_s: int


@dataclass(frozen=True)
class Ask:
    """Ask whether a quorum waits."""


@dataclass(frozen=True)
class Stop:
    """Ask the training thread to leave the step: it is late."""


@dataclass(frozen=True)
class GiveBack:
    """Give back the passes that the training thread has not begun: other ranks may take them, or this one later."""


@dataclass(frozen=True)
class SubmitForStuck:
    """Submit, for the training thread, what it has finished, and wait for the merge."""


@dataclass(frozen=True)
class End:
    """End the thread: the model is closed."""


def post_at(deadline_s: float, merged_at: float, *, any_late: bool) -> float:
    """When to report to the peers that this rank has finished: shortly before one of them could be late.

    A step in which no rank is late is over by then, and costs no message. After a step in which some rank was late,
    report at once: a stuck rank is stood in for as soon as its peers have finished.
    """
    return -math.inf if any_late else merged_at + deadline_s - _notice_s(deadline_s)


def _notice_s(deadline_s: float) -> float:
    """How long before the deadline a finished rank reports that; half of it is left for ranks that ask."""
    return min(max(0.004, 0.04 * deadline_s), 0.2 * deadline_s, 0.1)


Action = Sleep | Post | Ask | Stop | GiveBack | SubmitForStuck | End


def decide(now: float, at: Situation, limits: Limits) -> Action:
    """The stand-in's next action."""
    if at.closing:
        return End()
    if at.paused:
        return Sleep(math.inf)
    if at.gives_nothing:  # the peers need not wait for a rank that gives nothing
        return Sleep(math.inf) if at.submitted else SubmitForStuck()
    due_at, stuck_s = post_at(limits.shortest_s, at.merged_at, any_late=at.any_late), _stuck_s(now, at)
    finished = at.unposted and now >= due_at and not at.computes
    if finished or stuck_s != at.posted_stuck_s:
        return Post(finished, stuck_s)
    wake_at = now + LONG_S if now >= due_at else min(due_at, now + LONG_S)  # to notice a stuck rank, or to post
    if at.unposted and now >= due_at:  # look whether the device is done
        return Sleep(now + _SHORTEST_S)
    if at.submitted:  # nothing can be late before the next deadline
        shortest_s = limits.shortest_s
        return Sleep(min(wake_at, now + max(shortest_s - _notice_s(shortest_s) / 2, _SHORTEST_S)))
    if now >= at.give_back_at:
        return GiveBack()
    wake_at = min(wake_at, at.give_back_at)
    stop_at, grace_s = _stop_at(at, limits), _grace_s(at, limits)
    if at.waited_since == math.inf:
        ask_at = _ask_at(at, stop_at, limits)
        return Ask() if now >= ask_at else Sleep(min(wake_at, ask_at))
    late_at = max(stop_at, at.waited_since + limits.after_quorum_s)
    if now < late_at:
        return Sleep(min(wake_at, late_at))
    if at.give_back_at < math.inf and not at.stopped:  # to ranks that still take work
        return GiveBack()
    if now >= late_at + grace_s:
        return SubmitForStuck()
    if at.entered and not at.stopped:
        return Stop()
    return Sleep(min(wake_at, late_at + grace_s))


def _is_behind(at: Situation) -> bool:
    """Whether the training thread is stuck in an earlier step than the one that is being merged."""
    return at.lag > int(at.taking)


def _stop_at(at: Situation, limits: Limits) -> float:
    """When the training thread must stop if a quorum waits."""
    if _is_behind(at):
        return math.inf if at.lag >= limits.max_lag or limits.shortest_s == math.inf else -math.inf
    # from its own entry or, before that, from that of its peers
    return limits.deadline_s + at.clock_from if at.entered else limits.shortest_s + at.merged_at


def _grace_s(at: Situation, limits: Limits) -> float:
    """Seconds from `_stop_at` until the rank is stood in for."""
    if _is_behind(at):
        return 0.0
    if limits.max_lag == 0:
        return math.inf
    return limits.grace_s if at.entered or limits.deadline_s <= limits.unentered_s else 0.0


def _ask_at(at: Situation, stop_at: float, limits: Limits) -> float:
    """When to ask whether a quorum waits: shortly before the deadline, at it, and then less and less often."""
    # the answer takes longer on a busy machine; each request is a large part of a short step
    seconds = limits.deadline_s if at.entered else limits.shortest_s
    first_at = stop_at - min(_notice_s(seconds) / 2, 0.1 * seconds)
    if at.asked_at < first_at:
        return first_at
    if at.asked_at < stop_at:
        return max(stop_at, at.asked_at + _SHORTEST_S)
    asked_for_s = max(0.0, at.asked_at - max(stop_at, at.merged_at))
    return at.asked_at + _SHORTEST_S + 0.02 * min(asked_for_s, 1.0)


def _stuck_s(now: float, at: Situation) -> int:
    """For how many seconds the training thread has been in the same phase; 0 if that is not long."""
    seconds = now - at.busy_since
    waits = at.lag == 0 and at.submitted
    return 0 if waits or not LONG_S < seconds < math.inf else round(seconds)
