"""Which thread of which rank runs, and what time it is.

Exactly one thread of the world runs; whenever it asks the world for something, another may be chosen, by the seed. Time
passes when all wait: then the next timer is due. Only what is drawn here decides, so a seed is a schedule, and gives
the same one again.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from straggle.lab.world.later import Later

SWITCH_S = 5e-6  # of virtual time that passes until the next thread runs, in the mean
OUTSIDE_S = 60.0  # real seconds after which a thread that runs must have asked the world for something
_OWN = ("/lab/world/", "/threading.py", "/concurrent/futures/")  # files whose frames say nothing of where a thread is
_numbers = itertools.count()


class Ended(BaseException):
    """This thread's rank was killed, or its world is over: it unwinds, and does nothing more."""


class Broken(AssertionError):
    """Something that always holds did not; the text has the time, and where each thread is."""


class Thread(threading.Thread):
    """A thread of a rank, on an OS thread that waits for its turn."""

    world: Scheduler  # set for the threads of one world by a class derived from this one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.daemon = True
        self.turn = threading.Lock()  # free while it may run
        self.turn.acquire()
        self.rank = -1  # set when it is started
        self.number = -1  # of all threads of the world
        self.process = -1  # the number of its process, of which a rank has several one after another
        self.waits_for: object = None  # what wakes it
        self.holds: list[object] = []  # locks
        self.is_over = False
        self.interrupts: list[Callable[[], object]] = []  # what it calls when it runs next: handlers of signals
        self.joiners: list[Thread] = []

    def begin(self, rank: int, process: int, number: int) -> None:
        """It is of this process, and the world's so-manyth."""
        self.rank, self.process, self.number = rank, process, number

    def waits(self) -> object:
        """It waits from now on; what is returned wakes it."""
        self.waits_for = token = object()
        return token

    def is_woken(self, token: object) -> bool:
        """Whether this was what it waited for; then it waits no longer."""
        if token is None or self.waits_for is not token:
            return False
        self.waits_for = None
        return True

    def is_at_its_end(self) -> None:
        """It does nothing more."""
        self.is_over = True

    def start(self) -> None:
        """From now on it is chosen now and then."""
        self.world.add(self)
        super().start()
        self.world.switch()

    def run(self) -> None:
        """On its OS thread."""
        self.turn.acquire()
        try:
            if not self.world.has_ended(self):
                super().run()
        except Ended:
            pass
        except BaseException as error:
            self.world.broken(f"rank {self.rank}'s thread {self.name} ended by {error!r}")
        finally:
            self.world.over(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it is over, in virtual time."""
        if not self.is_over:
            self.world.wait(self.joiners, timeout)

    def is_alive(self) -> bool:
        """Whether it runs, or would."""
        return self.rank >= 0 and not self.is_over

    def place(self) -> str:
        """Where it is, innermost first."""
        frame = sys._current_frames().get(self.ident or 0)
        frames = [] if frame is None else traceback.extract_stack(frame)
        own = [f"{at.name} ({at.filename.rpartition('/')[2]}:{at.lineno})" for at in frames if not _is_own(at.filename)]
        return " < ".join(own[:-4:-1]) or "the world"


def _is_own(file: str) -> bool:
    return any(part in file for part in _OWN)


class _Ready:
    """The threads that may be chosen: they wait for nothing, their process lives, and nothing pauses them."""

    def __init__(self) -> None:
        self.paused: Counter[object] = Counter()  # ranks and threads that are not chosen, and for how many reasons
        self.dead: set[int] = set()  # processes
        self._threads: list[Thread] = []
        self._num_paused = 0  # of the reasons
        self._dead_seen = 0  # processes whose threads are no longer in the list

    def add(self, thread: Thread) -> None:
        """It waits for nothing."""
        self._threads.append(thread)

    def pause(self, who: object, number: int) -> None:
        """So many reasons more not to choose this rank, or this thread."""
        self.paused[who] += number
        self._num_paused += number

    def may_run(self) -> list[Thread]:
        """Those that may be chosen now."""
        if len(self.dead) != self._dead_seen:
            self._dead_seen = len(self.dead)
            self._threads = [thread for thread in self._threads if thread.process not in self.dead]
        if not self._num_paused:
            return self._threads
        return [own for own in self._threads if not (self.paused[own.rank] or self.paused[own])]

    def take(self, ready: list[Thread], number: int) -> Thread:
        """That of these, which may be chosen, is: it is no longer among them."""
        if ready is self._threads:
            return ready.pop(number)
        self._threads.remove(chosen := ready[number])
        return chosen


class Scheduler:
    """Threads, timers and the time of one world. ``longest_s``: virtual seconds after which it is `Broken`.

    ``on_switch(before, after)`` is called between turns of two processes.
    """

    def __init__(self, seed: int, longest_s: float, on_switch: Callable[[int, int], None]) -> None:
        self._number = next(_numbers)  # of all worlds: what processes of another have left behind is not this one's
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_switches = 0
        self.threads: list[Thread] = []
        self.digest = 0  # of who was chosen, and when: equal in all processes, as hashes of numbers are
        self._may_be_over = True  # something has happened after which nothing may be left: see `run`
        self._longest_s = longest_s
        self._ready = _Ready()
        self.dead = self._ready.dead  # processes
        self._later = Later()
        self._current: Thread | None = None
        self._turn_of: Thread | None = None  # whose turn was the last one
        self.clocks: dict[int, tuple[float, float]] = {}  # by rank, what its clock shows at 0, and seconds a second
        self._caller = threading.Semaphore(0)  # the thread that has called `run`
        self._broken: Broken | None = None
        self._is_ending = False
        self._last = -1  # the process whose thread ran last; that of the caller at first
        self._on_switch = on_switch

    # -- what threads of the world call

    @property
    def current(self) -> Thread:
        """The thread that runs."""
        assert self._current is not None, "a thread that the world has not made calls it"
        return self._current

    def add(self, thread: Thread) -> None:
        """It may be chosen from now on, and is of the process whose thread calls this."""
        self.begin(thread, self.check().rank, self.current.process)

    def begin(self, thread: Thread, rank: int, process: int) -> None:
        """It may be chosen from now on, and is of this process."""
        thread.begin(rank, process, len(self.threads))
        self.threads.append(thread)
        self._ready.add(thread)

    def check(self) -> Thread:
        """The thread that calls; raises `Ended` if it has ended."""
        me = self._current
        if me is None or me.ident != threading.get_ident():  # it unwinds, or is none of the world
            me = self._stranger()
        if self._is_ending or me.process in self.dead:
            raise Ended
        return me

    def _stranger(self) -> Thread:
        me = threading.current_thread()
        assert isinstance(me, Thread), "a thread that the world has not made calls it"
        return me

    def has_ended(self, thread: Thread) -> bool:
        """Whether it is to unwind."""
        return self._is_ending or thread.process in self.dead

    def process(self) -> tuple[str, int]:
        """That of the thread that calls, of all worlds; of one that has ended, or is not the world's, it is none."""
        me = threading.current_thread()
        number = me.process if isinstance(me, Thread) and not self.has_ended(me) else -1
        return f"simulated {self._number}", number

    def switch(self) -> None:
        """Another thread may run here."""
        if self._is_ending and self._is_left():
            return
        me = self.check()
        self._ready.add(me)
        self._hand_over(me)

    def wait(self, waiters: list[Thread], timeout: float | None = None) -> bool:
        """Wait among these until woken; false if the time is over first."""
        if self._is_ending and self._is_left():
            return True
        me = self.check()
        waiters.append(me)
        token = me.waits()
        if timeout is not None:
            self.at(self.now + max(0.0, timeout), lambda: self._wake(me, token))
        self._hand_over(me)
        woken = me not in waiters
        if not woken:
            waiters.remove(me)
        return woken

    def wake(self, waiters: list[Thread], number: int | None = None) -> None:
        """Let so many of them go on, or all."""
        for thread in waiters[:number]:
            waiters.remove(thread)
            self._wake(thread, thread.waits_for)

    def sleep(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        self.wait([], seconds)

    def pause(self, who: object, seconds: float) -> None:
        """Choose this rank, or this thread, for so long not."""
        self.hold(who)
        self.after(seconds, lambda: self.let_go(who))

    def hold(self, who: object) -> None:
        """Choose this rank, or this thread, no more until `let_go`."""
        self._ready.pause(who, 1)

    def let_go(self, who: object) -> None:
        """Choose it again, if nothing else holds it."""
        self._ready.pause(who, -1)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it then, between two threads' turns."""
        self._later.at(when, call)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it so much later, between two threads' turns."""
        self.at(self.now + seconds, call)

    def after_turns(self, rank: int, number: int, call: Callable[[], None]) -> None:
        """Call it after so many turns of this rank's threads; with 0 at once."""
        self._later.after_turns(rank, number, call)

    def monotonic(self) -> float:
        """What the clock of the rank whose thread asks shows."""
        if not self.clocks or self._current is None:
            return self.now
        first, rate = self.clocks.get(self._current.rank, (0.0, 1.0))
        return first + rate * self.now

    def broken(self, what: str) -> Broken:
        """The world ends here, with an error that says so; the caller raises it."""
        if self._broken is None:
            self._broken = Broken(f"at {self.now:.6f} s: {what}{self.places()}")
        return self._broken

    def places(self) -> str:
        """Where each thread is, a line each."""
        left = (thread for thread in self.threads if not (thread.is_over or thread.process in self.dead))
        return "".join(f"\n  rank {own.rank}, {own.name}: {own.place()}" for own in left)

    def look(self) -> None:
        """Something has happened after which nothing may be left to do."""
        self._may_be_over = True

    def over(self, thread: Thread) -> None:
        """A thread has come to its end."""
        thread.is_at_its_end()
        if self._is_ending:
            self._caller.release()
            return
        self.look()
        self.wake(thread.joiners)
        self._next()

    # -- the caller

    def run(self, until: Callable[[], bool]) -> None:
        """Run the threads until that holds, which is asked after each `look`. Raises `Broken`."""
        self._until = until
        self._next()
        seen = -1
        while not self._caller.acquire(timeout=OUTSIDE_S):
            if seen == self.num_switches:
                raise self.broken(f"a thread does not come back: it waits outside of the world, at {self._place()}")
            seen = self.num_switches
        if self._broken is not None:
            raise self._broken

    def end(self) -> None:
        """Let all threads unwind, one after another."""
        self._is_ending = True
        for thread in self.threads:
            if not thread.is_over:
                if thread.turn.locked():
                    thread.turn.release()
                if not self._caller.acquire(timeout=OUTSIDE_S / 10):  # it is outside of the world, and stays there
                    thread.is_at_its_end()
        self._let(-1)

    # -- inside

    def _place(self) -> str:
        return "an unknown place" if self._current is None else self._current.place()

    def _is_left(self) -> bool:
        """Whether a finalizer calls, of what a process that was killed has left behind, after the end of the world."""
        return self._is_ending and not isinstance(threading.current_thread(), Thread)

    def _wake(self, thread: Thread, token: object) -> None:
        if thread.is_woken(token) and thread.process not in self.dead:
            self._ready.add(thread)

    def _hand_over(self, me: Thread) -> None:
        if not self._next(me):
            me.turn.acquire()
            if self.has_ended(me):
                raise Ended
        while me.interrupts:
            me.interrupts.pop(0)()

    def _next(self, me: Thread | None = None) -> bool:
        """Choose a thread and let it run; true if it is ``me``, which calls this and goes on."""
        chosen = None if self._broken is not None else self._choose()
        self._current = self._turn_of = chosen
        if chosen is None:
            self._caller.release()
            return False
        self._let(chosen.process)
        if chosen is not me:
            chosen.turn.release()
        return chosen is me

    def _let(self, process: int) -> None:
        if process != self._last:
            self._on_switch(self._last, process)
            self._last = process

    def _choose(self) -> Thread | None:
        """The thread whose turn it is; ``None`` if the world is over."""
        self.num_switches += 1
        self._later.turn_is_over(-1 if self._turn_of is None else self._turn_of.rank)
        self.now -= math.log(1.0 - self.random.random()) * SWITCH_S  # as expovariate does
        while not self._is_done():
            if ready := self._ready.may_run():
                chosen = self._ready.take(ready, self._below(len(ready)))
                self.digest = hash((self.digest, self.now, chosen.number))
                return chosen
            if (due := self._later.next_at) is None:
                self.broken("no thread can go on, and no timer is left")
                return None
            self.now = max(self.now, due)
        return None

    def _is_done(self) -> bool:
        """Let timers come that are due; whether the world is over, or broken."""
        self._later.let_come(self.now)
        if self._may_be_over:
            self._may_be_over = False
            if self._until():
                return True
        if self.now > self._longest_s:
            self.broken(f"not over after {self._longest_s} s")
        return self._broken is not None

    def _below(self, number: int) -> int:
        """As ``randrange(number)``, which checks what it is given at length."""
        bits = number.bit_length()
        while (drawn := self.random.getrandbits(bits)) >= number:
            pass
        return drawn
