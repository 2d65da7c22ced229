"""The stand-in: a second thread that submits for the training thread if that is late or stuck.

`lateness.py` decides its actions; this module carries them out.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from straggle import world
from straggle.backward.clocks import Limit
from straggle.backward.device import Device
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.lateness import (
    Ask,
    End,
    GiveBack,
    Limits,
    Post,
    Situation,
    Sleep,
    Stop,
    SubmitForStuck,
    decide,
    post_at,
)
from straggle.merge.late.sides import MergeSide, TrainingSide
from straggle.merge.round.round import Round
from straggle.merge.wire.channel import Channel, PeerFailed
from straggle.waits import end_before_exit

if TYPE_CHECKING:
    from straggle.backward.device_clock import DeviceClock

_log = logging.getLogger(__name__)
_LOCK_S = 1.0  # nobody has the lock for so long who does not wait for a device
_END_S = 5.0  # for the thread to end when the model is closed
_SOON_S = 0.005  # a rank's report that it has finished may be so late


class StandIn:
    """The thread, from `start` to `close`. All methods but `end_unlocked` need the lock of ``merging``.

    ``device``: where the gradients are.
    """

    def __init__(
        self,
        training: TrainingSide,
        merging: MergeSide,
        deadline: CurrentDeadline,
        channel: Channel,
        *,
        device: Device,
    ) -> None:
        self._training, self._merging = training, merging
        self._deadline = deadline
        self._channel = channel
        self._stopwatch = training.stopwatch
        self._device = device
        self._device_clock: DeviceClock | None = None  # if ranks are late by their devices
        self._waits_for_room = True  # after `max_lag` merged steps the peers wait for this rank
        self._wakes = world.Condition(merging.lock)
        self._thread: world.Thread | None = None
        self._closing = False
        self._paused = False
        self._rests = False
        self.gives_nothing = False  # every step is submitted at once, empty; written with the lock held
        self._waited_since = math.inf  # when a quorum was first seen to wait
        self._asked_at = -math.inf  # when last no quorum waited
        self._looks_at = math.inf  # when the thread decides next, unless woken; in the past while it works
        self._unposted = False  # the stand-in has yet to report that this rank has finished, if that is needed
        self._posted_stuck_s = 0  # for how long the training thread is stuck, as last reported
        self.error: BaseException | None = None  # what ended the thread
        self.is_known = False  # the training thread has raised that, or an error of its own, and is in no step since
        self._place: Callable[[], str] = str  # where the training thread is, in words; called without the lock

    # -- before it starts

    def be_late_by(self, clock: DeviceClock) -> None:
        """This rank is late by its device."""
        self._device_clock = clock

    def need_no_room(self) -> None:
        """A rank that is far behind goes on in another way, so no peer waits for it after `max_lag` merged steps."""
        self._waits_for_room = False

    def say_where(self, place: Callable[[], str]) -> None:
        """``place()``: where the training thread is, in words; called without the lock."""
        self._place = place

    @property
    def watches(self) -> bool:
        """Whether it watches for what the training thread does; from any thread."""
        return not (self._paused or self._rests or self.gives_nothing or self._closing)

    @property
    def started(self) -> bool:
        """Whether this rank can be late."""
        return self._thread is not None

    def start(self, submit_for_stuck: Callable[[], Round], complete: Callable[[Round], None]) -> None:
        """Start the thread.

        ``submit_for_stuck()`` is called with the lock held, and closes the current round for the training thread.
        ``complete(round)`` is called without the lock, and waits for the merge of a closed round. Only the running
        thread refers to both, so their owner is free once it has ended.
        """
        work = (submit_for_stuck, complete)
        # set before it runs: `started` says to all ranks alike that stages stay
        self._thread = world.Thread(target=self._run, args=work, name="straggle-stand-in", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._merging.lock:
            # with the lock, between its decision and its sleep: it would sleep past this
            self._closing = True
            self._wakes.notify()
        # without the lock, which the thread takes once more before it ends
        if self._thread is not None:
            end_before_exit([self._thread], _END_S)

    # -- what happens to this rank

    def pause(self) -> None:
        """Do not watch the training thread until `resume`."""
        self._paused = True

    @property
    def is_paused(self) -> bool:
        """Whether it does not watch the training thread until `resume`; from any thread."""
        return self._paused

    def resume(self) -> None:
        """Go on watching."""
        self._paused = False
        self._wakes.notify()

    def rest(self) -> None:
        """Do nothing, whatever the training thread does, until `give_nothing`."""
        self._rests = True

    def entered(self, now: float) -> None:
        """The training thread has entered its step."""
        if now >= self._merging.merged_at + self._shortest_s:
            self._wakes.notify()  # the thread sleeps until it would submit for a rank that has not entered

    def wake(self) -> None:
        """Decide again: the running step's deadline has changed, or the training thread has taken a merged step.

        The thread sleeps until the old deadline, or without end if the rank was `max_lag` steps behind.
        """
        self._wakes.notify()

    def work_done(self, now: float, *, truncated: bool) -> bool:
        """The training thread has submitted its own work; returns whether it must post that itself, at once.

        Otherwise the stand-in posts it: shortly before a peer could be late, unless the step is over by then; if it
        decides in a moment anyway, because a step that is over by then costs no message (not after a step in which some
        rank was late); and if the step is ``truncated``, because no peer waits for that report, but all wait for the
        training thread.
        """
        if (deadline_s := self._shortest_s) == math.inf:
            return False
        due = now >= post_at(deadline_s, self._merging.merged_at, any_late=self._merging.any_late)
        done = self._device_done
        if due and done and not truncated and (self._merging.any_late or self._looks_at > now + _SOON_S):
            return True
        self._unposted = True
        if due and (truncated or not done):
            self._wakes.notify()
        return False

    def limit_by_device(self) -> Limit:
        """When this rank may be late in its step, by its device, as far as the last step tells; needs no lock.

        Not before its deadline, and not before a quorum has finished.
        """
        deadline, training, by_number = self._deadline, self._training, self._by_number
        own_s = by_number * deadline.late_after_s + self._more_s()
        if own_s == math.inf:
            return Limit(math.inf, training.passes.number)
        quorum_s = by_number * deadline.quorum_s + deadline.after_quorum_of(by_number)
        return Limit(self._clock_from(self._stopwatch.now()) + max(own_s, quorum_s), training.passes.number)

    def _clock_from(self, now: float) -> float:
        """What the deadline of the training thread's step counts from: its entry, or that of the device."""
        training = self._training
        if self._device_clock is None or training.entered_at is None or training.clock_from < training.entered_at:
            return training.clock_from
        return self._device_clock.began_at(now)

    @property
    def _device_done(self) -> bool:
        """Whether this rank's own work is done when it is submitted, or by now."""
        return self._device_clock is None or self._device_clock.is_done

    def give_nothing(self, gives_nothing: bool) -> None:
        """Submit every step at once, empty, or stop doing so."""
        self.gives_nothing = gives_nothing
        self._rests = self._rests and not gives_nothing
        self._wakes.notify()

    def end(self, error: BaseException) -> None:
        """The job ends here: the training thread raises this."""
        # before anybody is woken: whoever wakes asks for it
        self.error, self._closing = error, True
        self._training.stops.up_to(sys.maxsize)
        self._wakes.notify()
        self._merging.step_merged.notify_all()

    def know(self, known: bool) -> None:
        """The training thread has raised what ended this rank, or an error of its own; or it enters a step."""
        self.is_known = known

    def check(self) -> None:
        """Raise what ended the thread, if anything did; by any thread, also without the lock."""
        if self.error is not None:
            self.is_known |= threading.current_thread() is not self._thread
            raise self.error

    def end_unlocked(self, error: BaseException) -> None:
        """The same, without the lock: a training thread that waits for its device may have it, and raises later."""
        if self._merging.lock.acquire(timeout=_LOCK_S):
            try:
                self.end(error)
            finally:
                self._merging.lock.release()
        else:
            self.error, self._closing = error, True
            self._training.stops.up_to(sys.maxsize)

    def merged(self, current: Round) -> None:
        """A step is merged, and the deadline of the next one is decided."""
        self._waited_since, self._asked_at, self._unposted = math.inf, -math.inf, False
        if self._deadline.seconds < 0.9 * current.record.deadline_s:  # the thread sleeps until a longer deadline
            self._wakes.notify()

    # -- the thread

    def _run(self, submit_for_stuck: Callable[[], Round], complete: Callable[[Round], None]) -> None:
        try:
            with self._device.own_queue():  # not behind the kernels of the training thread
                while self._act(submit_for_stuck, complete):
                    pass
        except BaseException as error:
            with self._merging.lock:
                self.error = error
                if not isinstance(error, PeerFailed | SystemExit):  # the training thread raises these
                    _log.error("rank %d: its stand-in ended, no thread submits for it: %r", self._channel.name, error)
                # it may be waiting for a step that nobody merges now, or computing one: both come to an end
                self._training.stops.up_to(self._merging.step)
                self._merging.step_merged.notify_all()

    def _act(self, submit_for_stuck: Callable[[], Round], complete: Callable[[Round], None]) -> bool:
        """Carry out the action for this moment; false if that is the end."""
        current, words = None, ""
        # one lock from the decision to the sleep: a notification in between would be lost
        with self._merging.lock:
            step, now = self._merging.step, self._stopwatch.now()
            action = decide(now, self._situation(now), self._limits())
            match action:
                case Sleep(until):
                    # while it sleeps others ask whether it would look in time
                    self._looks_at = until
                    self._wakes.wait(None if until == math.inf else until - now)
                    self._looks_at = -math.inf
                case Post(finished, stuck_s):
                    words = self._words(stuck_s)
                    changed, self._posted_stuck_s = stuck_s != self._posted_stuck_s, stuck_s
                    self._unposted = self._unposted and not finished
                case Stop():
                    self._training.stops.up_to(step)
                case GiveBack():
                    self._give_back()
                # with the lock of the decision: in between the training thread might have come back, and submit itself
                case SubmitForStuck():
                    current = submit_for_stuck()
        # without the lock, because these actions wait for the store or for the peers
        if current is not None:
            complete(current)
        elif isinstance(action, Ask):
            # the step may be over when the answer comes: `_note_answer` looks, with the lock
            waits = self._channel.num_finished(step) >= self._deadline.quorum
            self._note_answer(step, waits=waits, owed=self._channel.num_collectives(step) if waits else 0)
        elif isinstance(action, Post):
            if action.finished:
                self._channel.post_finished(step, self._training.collectives.number)
            if changed:
                self._channel.post_doing(words and words + self._place())
        return not isinstance(action, End)

    def _give_back(self) -> None:
        """Give back the passes that the training thread has not begun."""
        self._training.use(passes := self._training.passes.give_back())
        if (current := self._merging.round) is not None:
            current.use(passes)

    def _note_answer(self, step: int, *, waits: bool, owed: int | None) -> None:
        """Note whether a quorum waits in ``step``, unless that is merged by now.

        ``owed``: the collectives of the loop's own that it has begun; ``None``: it is not known, so nobody is late.
        """
        with self._merging.lock:
            # the answer took time, without the lock: it may be of a step that is over
            if step != self._merging.step:
                return
            if waits and owed is not None:
                self._training.collectives.owe(step, owed)
                self._waited_since = self._stopwatch.now()
            else:
                self._asked_at = self._stopwatch.now()

    @property
    def _shortest_s(self) -> float:
        """`Limits.shortest_s`, which every step reads twice."""
        deadline = self._deadline
        if not deadline.can_be_late:
            return math.inf
        return min(self._by_number * deadline.seconds, self._training.unentered_s)

    @property
    def _by_number(self) -> float:
        """The relative length of the rank's step, by its micro-batches; until it enters, by those of the last step.

        So the ranks that have finished report that at the deadline of such a step.
        """
        return self._deadline.usual_cost.by_number(self._training.passes.usual_number)

    def _limits(self) -> Limits:
        deadline, by_number = self._deadline, self._by_number
        max_lag, late_after_s = deadline.late_handling.max_lag, by_number * deadline.late_after_s
        return Limits(
            late_after_s,
            deadline.after_quorum_of(by_number),
            grace_s=deadline.late_handling.grace_of(late_after_s),
            max_lag=max_lag if self._waits_for_room or not max_lag else sys.maxsize,
            unentered_s=self._training.unentered_s if deadline.can_be_late else math.inf,
        )

    def _situation(self, now: float) -> Situation:
        training, merging = self._training, self._merging
        return Situation(
            lag=max(0, merging.step - training.step),
            entered=training.entered_at is not None and not training.taking,
            taking=training.taking,
            clock_from=self._clock_from(now) + self._more_s(),
            busy_since=training.applied_at if training.entered_at is None else training.entered_at,
            stopped=training.stops.has(merging.step),
            merged_at=merging.merged_at,
            any_late=merging.any_late,
            submitted=merging.submitted,
            waited_since=self._waited_since,
            asked_at=self._asked_at,
            unposted=self._unposted,
            computes=self._unposted and not self._device_done,
            posted_stuck_s=self._posted_stuck_s,
            # in a pause peers wait for this rank, but not for one that gives nothing
            paused=self._rests or (self._paused and not self.gives_nothing),
            gives_nothing=self.gives_nothing,
            give_back_at=training.passes.give_back_at if training.is_in(merging.step) else math.inf,
            closing=self._closing,
        )

    def _more_s(self) -> float:
        """The seconds by which the rank's deadline is longer because of its step's cost."""
        relative, deadline_s = self._training.cost / self._deadline.usual_cost.given, self._deadline.late_after_s
        return 0.0 if math.isnan(relative) or deadline_s == math.inf else (relative - self._by_number) * deadline_s

    def _words(self, stuck_s: int) -> str:
        """What the training thread is stuck in; empty if it is not stuck."""
        if not stuck_s:
            return ""
        lag = self._merging.step - self._training.step
        behind = f" ({lag} merged steps behind)" if lag > 0 else ""
        phase, step = self._stopwatch.phase, f"step {self._training.step}{behind}"
        place = f"outside of a step, before {step}," if phase == "outside" else f"in {phase} of {step}"
        return f"rank {self._channel.name} has been {place} for {stuck_s} s"
