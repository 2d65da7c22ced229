"""Sees a device that is stuck: it does not finish gradients that are queued on it, for longer than ranks wait.

Hosts wait for each other's rows only, and run ahead of their devices: a kernel that never ends, or a collective that a
peer's device never begins, shows in no wait of theirs until the loop reads a tensor, and then nothing brings it back.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from straggle import world
from straggle.backward.device import Device
from straggle.merge.wire.channel import Channel, PeerFailed
from straggle.waits import end_of, until

_LOOK_S = 0.5
_WORD_S = 1.0  # peers wait so much longer: the rank whose device is stuck knows more
_MARK_S = 0.005  # at least, between two marks of one step
_TROUBLE_S = 5.0  # for devices to finish what is on its way, after a peer has failed
_ANSWER_S = 2.0  # after which a device that does not even answer is stuck; a driver may block all of a process' calls
LEAVE_S = 10.0  # for a process to end whose device is stuck, once the error is known

_log = logging.getLogger(__name__)


class QueuedStep:
    """The marks of one step: some behind this rank's own gradients, and one behind the merge of all buckets.

    A mark costs the host as much as a kernel, so there is none behind a bucket that follows another one at once.
    """

    def __init__(self, watch: DeviceWatch, step: int, names: Sequence[str]) -> None:
        self.step, self.names = step, names
        self.own: list[tuple[int, Any]] = []  # each mark with the number of buckets that it stands behind
        self.merged: Any = None
        self.submitted_at = self.merged_at = math.inf
        self.is_over = False  # written by the watching thread
        self._watch = watch

    def over(self) -> None:
        """The device has done all of it; by the watching thread, and nobody writes it again."""
        self.is_over = True

    def launches(self, bucket: int) -> None:
        """This rank's gradients of a bucket are queued, and their merge is about to be."""
        watch = self._watch
        if bucket == len(self.names) - 1 or watch.now() >= watch.marked_at + _MARK_S:
            self.own.append((bucket + 1, watch.mark()))

    def submitted(self) -> None:
        """The merge of all buckets is queued."""
        self.submitted_at = self._watch.now()
        # a deque, which the watching thread reads meanwhile: it must see a stuck device without any lock
        self._watch.steps.append(self)

    def comes_after(self) -> None:
        """What is queued from here on comes after the merge of all buckets."""
        self.merged = self._watch.mark()
        self.merged_at = self._watch.now()
        self._watch.forget_before(self)

    def marks(self) -> list[Any]:
        """All of them."""
        return [*(mark for _, mark in self.own), *([] if self.merged is None else [self.merged])]


class Stuck(NamedTuple):
    """What a device has not finished for so long: this rank's ``own`` gradients of these stages, or their merge."""

    queued: QueuedStep
    stages: str
    own: bool
    seconds: float
    mark: Any  # that is not ready


class DeviceWatch:
    """Ends a rank whose device does not finish what is queued on it, or a peer's does not, within ``give_up_s``.

    ``tell(error)`` lets the training thread raise what is in ``error`` with its next call. ``steps`` are those that may
    not be over: who submits one adds it, and the training thread forgets it. A thread looks, from `start` to `close`.
    """

    def __init__(
        self,
        device: Device,
        channel: Channel,
        tell: Callable[[PeerFailed], None],
        *,
        clock: Callable[[], float] = world.clock,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.now = device, clock
        self.error: PeerFailed | None = None
        self._channel, self._tell = channel, tell
        self._end_process = end_process or _end_process
        self.steps: deque[QueuedStep] = deque()  # that may not be over
        self.marked_at = -math.inf
        self._free: list[Any] = []  # marks to be used again
        self._trouble_at = math.inf  # when a peer was first seen to have failed
        self._queue: Callable[[], object] = object
        self._closing = world.Event()
        channel.device_is_watched(self.own_failure)

    def begin(self, step: int, names: Sequence[str]) -> QueuedStep:
        """Where the marks of this step go; ``names``: of its buckets."""
        return QueuedStep(self, step, names)

    def start(self, queue: Callable[[], object]) -> None:
        """Look now and then from here on; ``queue()`` is that of the training thread."""
        self._queue = queue
        world.Thread(target=self._run, name="straggle-device-watch", daemon=True).start()

    def forget_before(self, queued: QueuedStep) -> None:
        """Forget steps before this one: those that are over, and those whose merge the training thread passed over.

        Not by the watching thread: to ask for a mark may break a graph that another thread captures meanwhile.
        """
        steps = self.steps
        while (first := steps[0]) is not queued:
            if first.merged is not None and not self.device.ready(first.merged):
                return
            steps.popleft()
            self._free += first.marks()

    def close(self) -> None:
        """Look no more; a rank whose device is stuck goes on to see that its process ends. From any thread."""
        self._closing.set()

    def mark(self) -> Any:
        """A mark, perhaps one that stood for a step which is forgotten."""
        self.marked_at, again = self.now(), None
        with contextlib.suppress(IndexError):  # the other thread may have taken the last one
            again = self._free.pop()
        return self.device.mark(again)

    # -- any thread

    def own_failure(self) -> str | None:
        """What this rank's device has not finished, for so long that peers may have given up because of it."""
        return None if (found := self._find_own()) is None else self._words(found)

    # -- the watching thread

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            if (found := self.look()) is not None:
                self._end(found)
                return

    def look(self) -> Stuck | None:
        """What is stuck now, if anything is."""
        if (found := self._find(self._channel.give_up_s)) is not None or not self._channel.has_trouble:
            return found
        if self._trouble_at == math.inf:
            self._trouble_at = self.now()
            self._watch_the_rest()
        if (found := self._find_own()) is not None or self.now() - self._trouble_at < _TROUBLE_S:
            return found
        found = self._find(_TROUBLE_S)  # what a peer that has failed does not merge any more
        return None if found is None or found.own else found

    def _watch_the_rest(self) -> None:
        """Watch also what was queued since the last step that was submitted: the training thread may wait for that.

        Only after a peer has failed: to mark another thread's queue may break a graph that this one captures.
        """
        rest = self.begin(self.steps[-1].step + 1 if self.steps else 0, ["(not submitted)"])

        def mark() -> None:
            with self.device.own_queue():
                self.device.after_queue(self._queue())
                rest.launches(0)
                rest.submitted()

        _within(_ANSWER_S, mark)

    def _find_own(self) -> Stuck | None:
        return self._find(self._channel.give_up_s / 2, own_only=True)

    def _find(self, limit_s: float, *, own_only: bool = False) -> Stuck | None:
        """The first stages that a device has not finished for so long."""
        now = self.now()
        for queued in self.steps.copy():
            if now - queued.submitted_at < limit_s:
                break
            if queued.is_over:
                continue
            found = self._stuck_in(queued, now, math.inf if own_only else limit_s)
            if found is not None and queued in self.steps:  # or its marks may stand for another step by now
                return found
        return None

    def _stuck_in(self, queued: QueuedStep, now: float, limit_s: float) -> Stuck | None:
        """The first stages of this step that are not ready, or not merged for so long."""
        num_ready = 0
        if not self._ready(queued.own[-1][1]):  # they become ready in their order
            for num_behind, mark in queued.own:
                if not self._ready(mark):
                    stages = _in_words(queued.names[num_ready:num_behind])
                    return Stuck(queued, stages, True, now - queued.submitted_at, mark)
                num_ready = num_behind
        if now - queued.merged_at < limit_s + _WORD_S:
            return None
        if not self._ready(queued.merged):
            return Stuck(queued, _in_words(queued.names), False, now - queued.merged_at, queued.merged)
        queued.over()
        return None

    def _ready(self, mark: Any) -> bool:
        """Whether a mark is ready; if the driver does not answer, it is not."""
        answers: list[bool] = []

        def ask() -> None:
            try:
                with self.device.own_queue():  # of this device: by another one's, some of its memory would be taken
                    answers.append(self.device.ready(mark))
            except RuntimeError:  # the device has failed: the training thread's next call raises that
                answers.append(True)

        _within(_ANSWER_S, ask)
        return bool(answers and answers[0])

    def _words(self, found: Stuck) -> str:
        where = f"rank {self._channel.name}, step {found.queued.step}, stage {found.stages}"
        if not found.own:
            return f"{where}, not merged by this rank's device"
        return (
            f"{where}: its device has not finished these gradients in {found.seconds:.0f} s "
            f"(give_up_s={self._channel.give_up_s:g}): a kernel hangs, or a collective of your own waits for a peer"
        )

    def _end(self, found: Stuck) -> None:
        """Report what is stuck, free what can be freed, and see to it that the process ends."""
        words = self._words(found)
        if found.own:
            self._channel.post_failure(words)
        else:
            words = self._channel.explain(words)
        self.error = PeerFailed(words)
        atexit.register(self._end_if_stuck, found, words)
        self._channel.abort()
        self._tell(self.error)
        if until(lambda: self._ready(found.mark), every_s=_LOOK_S, limit_s=LEAVE_S):
            return  # the training thread comes back, if it was in the driver at all
        self._end_if_stuck(found, words)

    def _end_if_stuck(self, found: Stuck, words: str) -> None:
        """End the process if its device is stuck still, where any call, or destructor, may wait for it for ever."""
        if not self._ready(found.mark):
            self._end_process(words)


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _end_process(words: str) -> None:
    """End at once, as nccl's own watchdog does: nothing can free a thread that waits in the driver.

    That thread may hold the lock of a log's handler.
    """
    words += "; this process ends: its device is stuck, and nothing can free it"

    def last_words() -> None:
        _log.critical(words)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    if not _within(_ANSWER_S, last_words):
        os.write(2, f"{words}\n".encode())
    world.end_process(1)


def _within(seconds: float, call: Callable[[], None]) -> bool:
    """Whether ``call()``, on a thread of its own, is over within this time."""
    thread = world.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end, and starts none
        call()
        return True
    for _ in range(4):  # in parts: while the process is stopped, only one part passes
        end_of([thread], seconds / 4)
    return not thread.is_alive()
