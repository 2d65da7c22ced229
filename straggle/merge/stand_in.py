"""The stand-in: a second thread that hands in for the training thread where that is late, or stuck.

It sleeps until shortly before the deadline is over, and asks whether a quorum of peers waits. If so, the training
thread is to stop when the deadline is over; if it has not handed in when the grace is over too, the stand-in hands in
for it, with weight 0 for what is not finished.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable

import torch

from straggle.merge.channel import LONG_S, Channel, PeerFailed
from straggle.merge.current_deadline import DeadlineInForce
from straggle.merge.rank_state import Whereabouts
from straggle.merge.round import Round

_log = logging.getLogger(__name__)


class StandIn:
    """The thread, from `start` to `close`. All but these two is to be called with the lock of ``where`` held.

    ``device``: where the gradients are.
    """

    def __init__(
        self, where: Whereabouts, deadline: DeadlineInForce, channel: Channel, *, device: torch.device
    ) -> None:
        self._where = where
        self._deadline = deadline
        self._channel = channel
        self._device = device
        self._wakes = threading.Condition(where.lock)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._paused = False
        self._waited_since = math.inf  # when a quorum was seen to wait
        self._unposted: int | None = None  # the step whose end the peers are to learn of, if it comes to that
        self._handed_over: Round | None = None  # closed, and the training thread does not wait for its merge
        self._doing = ""  # what the peers were last told that the training thread is stuck in
        self.error: BaseException | None = None  # what ended the thread

    @property
    def started(self) -> bool:
        """Whether this rank can be late."""
        return self._thread is not None

    def start(self, hand_in: Callable[[], Round], complete: Callable[[Round], None]) -> None:
        """Start the thread.

        ``hand_in()``, which it calls with the lock held, closes the round that is being merged, for the training
        thread; ``complete(round)``, which it calls without, waits for the merge of a closed round. Only the running
        thread holds the two: it keeps nothing of their owner once it has ended.
        """
        work = (hand_in, complete)
        self._thread = threading.Thread(target=self._loop, args=work, name="straggle-stand-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._where.lock:
            self._closing = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # -- what it is told

    def pause(self) -> None:
        """Until `resume`, watch nothing."""
        self._paused = True

    def resume(self) -> None:
        """Go on watching."""
        self._paused = False
        self._wakes.notify()

    def entered(self) -> None:
        """The training thread has entered its step."""
        where = self._where
        if where.entered_at is not None and where.entered_at >= where.merged_at + self._deadline.seconds:
            self._wakes.notify()  # it sleeps until it would hand in for a rank that has not entered

    def finished(self, step: int, *, truncated: bool) -> bool:
        """The training thread has handed in its own work; whether it is to tell the peers of that itself, at once.

        Otherwise the stand-in tells them: when they want to know, if the step is not over by then; and of a step that
        is ``truncated``, because nobody waits to hear of that, but all for the training thread.
        """
        if self._deadline.seconds == math.inf:
            return False
        due = self._where.now() >= self._post_at()
        if due and not truncated:
            return True
        self._unposted = step
        if due:
            self._wakes.notify()
        return False

    def hand_over(self, current: Round) -> None:
        """The training thread has handed in what it has, and computes on: wait for the merge in its place."""
        self._handed_over = current
        if self._deadline.seconds < math.inf:
            self._unposted = current.step
        self._wakes.notify()

    def took(self, *, behind: bool) -> None:
        """The training thread has taken a merged step; ``behind``: it was, or is, behind its peers."""
        if behind:
            self._wakes.notify()  # it may have stopped at max_lag

    def merged(self, *, before_s: float) -> None:
        """A step is merged, whose deadline was ``before_s``."""
        self._waited_since = math.inf
        if self._deadline.seconds < 0.9 * before_s:  # it sleeps until the end of a longer one
            self._wakes.notify()

    # -- the thread

    def _loop(self, hand_in: Callable[[], Round], complete: Callable[[Round], None]) -> None:
        try:
            with _own_stream(self._device):
                while not self._closing:
                    self._watch(hand_in, complete)
        except BaseException as error:
            with self._where.lock:
                self.error = error
                if not isinstance(error, PeerFailed):  # which the training thread raises
                    _log.error("rank %d: its stand-in ended, nobody hands in for it: %r", self._channel.rank, error)
                self._where.stop(self._where.merging)
                self._where.step_merged.notify_all()

    def _watch(self, hand_in: Callable[[], Round], complete: Callable[[Round], None]) -> None:
        """Tell the peers what they want to know; then watch the step: stop a late rank, or hand in for it."""
        where = self._where
        with where.lock:
            if self._paused and not self._closing:
                self._wakes.wait()
                return
            finished = self._to_post()
            handed_over, self._handed_over = self._handed_over, None
            doing, was_doing = self._stuck_in(), self._doing
            self._doing = doing
        if finished is not None:
            self._channel.post_finished(finished)
        if doing or was_doing:
            self._channel.post_doing(doing)
        if handed_over is not None:
            complete(handed_over)
            return
        with where.lock:
            step, (stop_at, _), post_at = where.merging, self._limits(), self._post_at()
            ask_at = stop_at - self._notice_s() / 2  # the answer takes a while, the longer the busier the machine
            wake_at = min(ask_at, post_at) if where.now() < post_at else ask_at
            if self._closing or self._handed_over or self._post_due() or self._sleep_until(wake_at):
                return
            waited_for = self._waited_since < math.inf
        waited_for = waited_for or self._channel.num_finished(step) >= self._deadline.rules.quorum
        with where.lock:
            if not self._grace_is_over(step, waited_for=waited_for):
                return
            current = hand_in()
        complete(current)

    def _grace_is_over(self, step: int, *, waited_for: bool) -> bool:
        """Stop the training thread if it is late in ``step``; true once it has had its time to hand in, too.

        ``waited_for``: a quorum waits. Where it is too early for either, this sleeps, and is to be asked again.
        """
        where = self._where
        if waited_for and step == where.merging:
            self._waited_since = min(self._waited_since, where.now())
        stop_at, hand_in_at = self._limits()
        # where all is issued there is nothing left to say
        if step != where.merging or where.all_issued or self._sleep_until(stop_at):
            return False
        if not waited_for:
            asked_for_s = where.now() - max(stop_at, where.merged_at)
            self._wakes.wait(0.002 + 0.02 * min(asked_for_s, 1.0))  # asks less often as time goes by
            return False
        if self._sleep_until(self._waited_since + self._deadline.after_quorum_s):
            return False
        if where.entered:
            where.stop(step)
        return not self._sleep_until(hand_in_at)

    def _limits(self) -> tuple[float, float]:
        """When the training thread is to stop and when it is stood in for, by the clock, if a quorum waits."""
        where, patience, deadline_s = self._where, self._deadline.patience, self._deadline.seconds
        if where.all_issued:  # nothing can be late before the next deadline is over
            next_stop_at = where.now() + deadline_s
            return next_stop_at, next_stop_at
        if where.lag > int(where.taking):  # still stuck in an earlier step
            waited_for = where.lag >= patience.max_lag or deadline_s == math.inf
            return (math.inf, math.inf) if waited_for else (-math.inf, -math.inf)
        stop_at = deadline_s + (where.clock_from if where.entered else where.merged_at)
        if patience.max_lag == 0:
            return stop_at, math.inf
        if self._waited_since == math.inf:
            return stop_at, stop_at + patience.grace_s
        return stop_at, max(stop_at, self._waited_since + self._deadline.after_quorum_s) + patience.grace_s

    def _sleep_until(self, moment: float) -> bool:
        """Sleep, without the lock, until ``moment`` or until woken; false where it is already over."""
        remaining = moment - self._where.now()
        if remaining <= 0:
            return False
        self._wakes.wait(min(remaining, LONG_S))
        return True

    # -- what the peers are told

    def _post_at(self) -> float:
        """When the peers want to know that this rank has finished: shortly before one of them could be late.

        A step in which nobody is late is over by then, and costs no message. After one in which somebody was, at once:
        a rank that is stuck is stood in for as soon as its peers have finished.
        """
        if self._where.any_late:
            return -math.inf
        return self._where.merged_at + self._deadline.seconds - self._notice_s()

    def _notice_s(self) -> float:
        """How long before the deadline who has finished says so; half of it is left to who asks."""
        return min(max(0.004, 0.04 * self._deadline.seconds), 0.1)

    def _to_post(self) -> int | None:
        """The step of which the peers are to learn now that this rank has finished it."""
        if not self._post_due():
            return None
        step, self._unposted = self._unposted, None
        return step if step == self._where.merging else None

    def _post_due(self) -> bool:
        if self._unposted is None:
            return False
        return self._unposted != self._where.merging or self._where.now() >= self._post_at()

    def _stuck_in(self) -> str:
        """What the training thread has been doing for long, in words; empty where it is not."""
        where = self._where
        mine = where.lag == 0 and where.all_issued
        seconds = where.now() - (where.took_at if where.entered_at is None else where.entered_at)
        if mine or not LONG_S < seconds < math.inf:
            return ""
        behind = f" ({where.lag} merged steps behind)" if where.lag else ""
        place = f"{where.stopwatch.phase} of step {where.training}{behind}"
        return f"rank {self._channel.rank} has been in {place} for {seconds:.0f} s"


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a CUDA device the stand-in's collectives must not queue behind the kernels of the training thread."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
