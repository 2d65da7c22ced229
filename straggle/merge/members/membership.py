"""This rank's place in the chain of views: its sign of life, the members that it watches, and new views.

One thread sends signs of life and another one looks at those of others. Neither does anything else, so that a rank
whose other threads are busy is not taken for dead. Everything that is said here lies in a corner of the job's store
that is the same for all incarnations of all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from straggle.merge.channel import PeerFailed
from straggle.merge.members.agents import Exited, over, post_over
from straggle.merge.members.connections import Connections
from straggle.merge.members.heartbeat import BEAT_S, Heartbeat
from straggle.merge.members.joins import Joins
from straggle.merge.members.refill import Refill
from straggle.merge.members.stored_view import StoredView, StoreEmptied
from straggle.merge.members.view import DONE, Change, Elastic, Leaving, Seal, Silence, View, leader
from straggle.merge.store import ANSWER_S, StoreUnreachable, peek

_LOOK_S = 0.3  # between two looks at the others' signs of life and at the view: several requests, where a beat is one
_QUICK_S = 0.5  # the silence that is enough where a connection has just broken
_BROKEN_S = 3.0  # for how long a connection has just broken
_DEAD_S = 60.0  # of silence of all members, who would put one another out: longer than most cuts of a link
_LINGER_S = 2.0
_NO_SIGN = "0 -1"  # of a member that has not been heard since the store was started anew
_END_S = 5.0  # for threads to come back when the model is closed

_log = logging.getLogger(__name__)


class TooFewRanks(PeerFailed):
    """The job has fewer members than it may go on with: only ``ranks``."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class JobDone(PeerFailed):
    """This rank was out, or was started again, when the others came to the end of their loops with this model.

    A program that goes on with another model catches it, and wraps that one. Where it ends the process, the launcher
    does not start that again.
    """


class MembersChanged(Exception):
    """A collective was launched among other members than those of today."""


class Membership:
    """Beats, watches and proposes, from `start` to `close`; any thread may ask.

    ``connect()`` makes a connection to the job's store, in the corner of this model. ``exited(store, rank)`` is how the
    rank's last process ended, where an agent has said so.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        elastic: Elastic,
        *,
        connect: Callable[[], Any],
        exited: Callable[[Any, int], Exited | None],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.least = elastic.least(world_size)
        self.incarnation = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}-{uuid.uuid4().hex[:12]}"
        self.step = -1  # that this rank's merge is in; read by its own beats
        self.healing: frozenset[int] = frozenset()  # members that could give no state now; by whoever merges
        self.watches = False  # whether it puts silent members out, from the time on when it can go on without them
        self.held: tuple[int, bool] | None = None  # the step before which others are let in, and whether this one leads
        self.admitted: View | None = None  # the last view in which this rank let others in
        self.annulled = ""  # the job of a first view that was given up before it had begun
        self.kept_out: Mapping[int, Leaving] = {}  # ranks that are no members until their link is back; see `keep_out`
        self.alone = False  # this rank is no member, and no member gives a sign of life; by the thread
        self.left_for_good = False  # by its own will, so it does not ask to be let in again
        self.changes: dict[tuple[int, bool], Change] = {}  # how each rank left and joined last, in views that were seen
        self._elastic = elastic
        self.connections = Connections(connect)
        self._exited = exited
        self._seal = Seal(os.environ.get("STRAGGLE_JOB_SECRET", ""))
        self.joins = Joins(rank, world_size, self.incarnation, self._seal)
        self._stored = StoredView(self._seal, world_size)
        self._refill = Refill(rank, world_size, self.least, self._seal)
        self._silence = Silence(_LOOK_S)
        self._changed = threading.Condition()
        self._view: View | None = None
        self._steps: dict[int, int] = {}
        self._broken_at = -math.inf
        self._lost = False  # the store did not answer; by the thread
        self.num_looks = 0  # that the store has answered; by the thread
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._life = 0  # which of the threads looks: one that is stuck has a successor
        self.num_turns = 0  # that the thread has begun, whatever came of them; by the thread
        self._heartbeat = Heartbeat(connect, self._beat_once)
        self._thread = self._watcher()
        self._threads: list[threading.Thread] = []

    # -- any thread

    @property
    def view(self) -> View:
        """The last view that was seen."""
        assert self._view is not None
        return self._view

    @property
    def is_member(self) -> bool:
        """Whether this incarnation is a member in the last view that was seen."""
        return self.view.members.get(self.rank) == self.incarnation

    @property
    def furthest_step(self) -> int:
        """The step that the members are in, as they said last."""
        return max(self._steps.values(), default=-1)

    def check_done(self) -> None:
        """Raise `JobDone` where all others have ended their loops, and this rank has not.

        Where no member lives that could let this rank in, the job is done for those that have ended theirs; raises
        `TooFewRanks` where nobody has.
        """
        view, ended = self.view, sorted(self.view.ended)
        if self.left_for_good:
            return
        if view.is_done or (self.alone and ended):
            raise JobDone(f"rank {self.rank} comes late: ranks {ended} have ended their loops")
        if self.alone:
            raise TooFewRanks(
                f"rank {self.rank}: ranks {list(view.ranks)} were the members, and none of them gives a sign of life: "
                "nobody has the job's state; begin from a checkpoint",
                view.ranks,
            )

    def begin(self, limit_s: float) -> bool:
        """Find the job's view, or agree on the first one with all ranks; whether this rank comes to a running job.

        Raises `PeerFailed` where not all ranks come within ``limit_s``, or the job is over before it has begun.
        """
        store, until = self.connections.own(), time.monotonic() + limit_s
        self._beat_once(store)
        store.set(f"hello/{self.rank}", self._seal.seal(f"hello/{self.rank}", self.incarnation))
        while not self._finds_view(store):
            missing = [rank for rank in range(self.world_size) if not store.check([f"hello/{rank}"])]
            if not missing:
                words = {rank: self._open(store, f"hello/{rank}") for rank in range(self.world_size)}
                first = View(0, {r: own or "" for r, own in words.items()}, job=uuid.uuid4().hex[:12])
                self._stored.begin(store, first)
            elif (why := over(store)) is not None:
                raise PeerFailed(f"rank {self.rank}, before step 0: the job is over: {why}")
            elif time.monotonic() > until:
                raise PeerFailed(
                    f"rank {self.rank}, before step 0: ranks {missing} have not come within give_up_s={limit_s:g}: "
                    "each has to wrap the model; one has ended, hangs, or cannot be reached"
                )
            else:
                time.sleep(0.01)
        if not self._thread.is_alive():
            self._thread.start()
            self._heartbeat.start()
        return not (self.is_member and self.view.generation == 0)

    def _finds_view(self, store: Any) -> bool:
        """Whether there is a view that this process is in, or one of a job that has begun without it."""
        try:
            view = self._stored.read(store)
        except StoreEmptied:
            return False
        if not view.has_begun and view.members.get(self.rank) != self.incarnation:
            self.annul(view)  # it has a process of this rank that is gone: the ranks would never meet
            return False
        with self._changed:
            self._view = view
        return True

    def annul(self, view: View) -> None:
        """Give a first view up that has not begun: all its ranks agree on another one."""
        self._stored.annul(self.connections.own(), view)

    def has_wrapped(self, limit_s: float) -> bool:
        """This rank has wrapped its model: wait for the others. From then on, who is started again comes late.

        False where one was started again before that: the first view was given up. Raises `PeerFailed` where the others
        have not wrapped theirs within ``limit_s``.
        """
        view, store, until = self.view, self.connections.own(), time.monotonic() + limit_s
        keys = [f"wrapped/{view.job}/{rank}" for rank in view.ranks]
        store.set(f"wrapped/{view.job}/{self.rank}", "")
        while not store.check(keys):
            if self.annulled == view.job:
                return False
            if time.monotonic() > until:
                missing = [rank for rank, key in zip(view.ranks, keys, strict=True) if not store.check([key])]
                raise PeerFailed(
                    f"rank {self.rank}, before step 0: ranks {missing} have not wrapped the model within "
                    f"give_up_s={limit_s:g}"
                )
            time.sleep(0.005)
        self._stored.replace(store, view, replace(view, begun=True))
        now = self._stored.read(store)
        if now.job != view.job:
            return False
        self._saw(now)
        return True

    def admit(self, step: int) -> None:
        """Let those in that have asked: they take part from ``step`` on, and this rank sends them its state."""
        store, view = self.connections.own(), self.view
        new = self.joins.take(store, view)
        following = view.with_joined(new, step=step, giver=self.rank)  # even for none: all wait for it
        if self._propose(store, view, following):
            self.admitted = following

    def leave(self, why: Leaving, *, for_good: bool = True, if_spared: bool = False) -> None:
        """This rank takes no further part, or none ``for_good`` and none before it is let in again.

        ``if_spared``: only where the others may go on without it.
        """
        self.left_for_good |= for_good
        if self._view is None or not self.is_member:
            return
        with self.connections.lent() as store:
            for _ in range(5):
                view = self._read(store)
                if view.members.get(self.rank) != self.incarnation:
                    return
                following = view.without({self.rank: why})
                if if_spared and following.shortfall(self.least, with_returning=False):
                    return
                if self._propose(store, view, following):
                    return

    def leave_at_the_end(self) -> None:
        """The same when this rank's loop is over: first it waits, for a moment, for the others to come as far.

        They may need it for the step that it has just ended. A store that stands still is not waited for.
        """
        self.spawn(self._leave_with_the_others).join(_LINGER_S + ANSWER_S)

    def leave_with_an_error(self, reason: str) -> None:
        """The same when this rank's own code raised; for as long as a store that answers needs.

        Where the others cannot go on without it, the job is over: this process may be gone before they say so.
        """
        self.spawn(self._leave_with_an_error, reason).join(ANSWER_S)

    def _leave_with_an_error(self, reason: str) -> None:
        self.leave(Leaving("raised", reason))
        if self.view.shortfall(self.least, with_returning=True):
            with self.connections.lent() as store:
                post_over(store, f"{reason}, and too few ranks are left without it")

    def _leave_with_the_others(self) -> None:
        until = time.monotonic() + _LINGER_S
        try:
            with self.connections.lent() as store:
                while self.is_member and time.monotonic() < until:
                    signs = self._signs(store, self.view, self.view.ranks)
                    if min(int(sign.split(" ")[1]) for sign in signs.values()) >= self.step:
                        break
                    time.sleep(0.02)
            self.leave(DONE)
        except (RuntimeError, OSError, ValueError) as error:
            _log.info("rank %d left without a word: %s", self.rank, error)

    def connection_broke(self) -> None:
        """A merge ended in an error: who is silent now is suspected sooner."""
        self._broken_at = time.monotonic()
        self._wake.set()

    def hold(self, step: int, *, leads: bool) -> None:
        """The members wait before ``step`` for a view in which others are let in; this rank ``leads``, or another."""
        with self._changed:
            self.held = step, leads
            self._changed.notify_all()

    def keep_out(self, ranks: Mapping[int, Leaving]) -> None:
        """From now on put these out, as far as the others may go on without them, and let none of them in."""
        self.kept_out = ranks
        self.joins.hear_anew()
        self._wake.set()

    def wait_newer(self, generation: int, seconds: float) -> bool:
        """Wait for a view after ``generation``, or until others are to be let in."""
        with self._changed:
            return self._changed.wait_for(lambda: self.view.generation > generation or self.held is not None, seconds)

    def look(self) -> None:
        """Read the view now."""
        self._saw(self._read(self.connections.own()))

    @contextlib.contextmanager
    def connection(self, corner: str) -> Iterator[Any]:
        """A connection to a corner of the store that no other thread uses meanwhile.

        It is kept for the next one: making one takes seconds where a name server does not answer.
        """
        with self.connections.lent() as store:
            yield dist.PrefixStore(self.corner(corner), store)  # type: ignore[attr-defined]

    def publish(self, key: str, word: str) -> None:
        """Leave a word for all incarnations of all ranks, unless there is one."""
        sealed = self.connections.own().compare_set(key, "", self._seal.seal(key, word)).decode()
        self._refill.note(key, sealed)

    def published(self, key: str) -> str | None:
        """A word that was left, if there is one of this job."""
        if (sealed := peek(self.connections.own(), key)) is None:
            return None
        self._refill.note(key, sealed)
        return self._seal.open(key, sealed)

    def note(self, key: str, word: str) -> None:
        """Say this again where the store is started anew."""
        self._refill.note(key, word)

    def spawn(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        """Start a thread that waits for other ranks, and may be left to itself; `close` waits for it, for a moment."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=args, name="straggle-members", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def corner(self, name: str) -> str:
        """A corner of the store that who does not know the job's secret cannot guess."""
        return self._seal.seal(name, "").strip()

    def end(self, why: str) -> None:
        """The job goes on no more: who is started again would wait for members that are not there."""
        post_over(self.connections.own(), why)

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        self._wake.set()
        self._heartbeat.stop()
        # while Python ends, a thread that comes back from the store would end the process with an error
        until = time.monotonic() + _END_S
        for thread in (self._thread, *self._heartbeat.threads, *self._threads):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def connect_anew(self) -> None:
        """The thread is stuck in a request: another one goes on with a new connection, and so do the signs of life.

        A request that was on its way when a link was cut comes back when TCP tries again, which may be as long after
        the cut as the cut was long. Until then this rank would be out, and not know it.
        """
        if not self._closing.is_set():
            self._life += 1
            self._threads.append(self._thread)
            self._thread = self._watcher()
            self._thread.start()
            self._heartbeat.connect_anew()

    def _watcher(self) -> threading.Thread:
        return threading.Thread(target=self._run, args=(self._life,), name="straggle-watch", daemon=True)

    # -- the thread

    def _run(self, life: int) -> None:
        store, looked_at = None, -math.inf
        while not self._closing.is_set():
            self.num_turns += 1
            self._wake.wait(max(BEAT_S, looked_at + self._between_looks_s() - time.monotonic()))
            self._wake.clear()
            looked_at = time.monotonic()
            try:
                store = store or self.connections.connect()
                self._beat_once(store)
                view = self._read_or_fill(store)
                if self._life != life:  # it was stuck, and has a successor
                    return
                if view is None:
                    continue
                is_member = view.members.get(self.rank) == self.incarnation
                if not is_member:
                    self._look_from_outside(store, view)
                self._saw(view)
                if is_member and self.watches:
                    self._watch(store, view)
                self.num_looks += 1
                self._heartbeat.answered()
                self._note_lost(None)
            except (RuntimeError, OSError, ValueError, StoreUnreachable) as error:
                if self._life != life:
                    return
                self._note_lost(str(error).partition("\n")[0])
                store = None
                self.connections.forget_idle()  # theirs is the same store
                self._closing.wait(1.0)

    def _between_looks_s(self) -> float:
        """How often to look at the others: at each beat where something has happened, or is to."""
        quiet = self.watches and self.is_member and not self._lost
        return _LOOK_S if quiet and time.monotonic() - self._broken_at >= _BROKEN_S else BEAT_S

    def _read_or_fill(self, store: Any) -> View | None:
        """The view; ``None`` where the store was started anew, and this rank has done its part for there to be one."""
        try:
            view = self._read(store)
        except StoreEmptied:
            if not self.view.has_begun:
                return None
            self.joins.forget()
            self._refill.fill(store, self.view)
            return None
        self._refill.filled()
        known = self.view
        if view.generation > known.generation or view == known:
            return view
        # the ranks that filled the store did not know this view; where they did, it has changed, and nothing happens
        self._stored.replace(store, view, known.again())
        return None

    def _note_lost(self, problem: str | None) -> None:
        lost = problem is not None
        if lost != self._lost and not self._closing.is_set():
            if lost:
                _log.warning("rank %d: the job's store does not answer (%s): members cannot change", self.rank, problem)
            else:
                _log.warning("rank %d: the job's store answers again", self.rank)
        self._lost = lost

    def _beat_once(self, store: Any) -> None:
        store.set(f"beat/{self.rank}/{self.incarnation}", f"{time.monotonic()} {self.step}")

    def _watch(self, store: Any, view: View) -> None:
        signs = self._hear(store, view, view.watched_by(self.rank))
        now = time.monotonic()
        self._silence.look(now, signs)
        broken = now - self._broken_at < _BROKEN_S
        limit_s = min(_QUICK_S, self._elastic.suspect_s) if broken else self._elastic.suspect_s
        silent = Leaving("silent", f"no sign of life for {limit_s:g} s")
        gone = dict.fromkeys(self._silence.longer_than(limit_s), silent)
        for rank in signs:
            if (ended := self._ended(store, view, rank)) is not None:
                gone[rank] = Leaving("ended", f"its process ended {ended}")
        gone = {**self._leaving_by_link(view.without(gone)), **gone}
        if gone:
            self._propose(store, view, view.without(gone))
        if leader(view, self.healing) == self.rank:
            self.joins.hear(store, view, self.kept_out)
        else:
            self.joins.forget()

    def _look_from_outside(self, store: Any, view: View) -> None:
        """How far the members are, before this rank comes back; and whether there is one that could let it in."""
        signs = self._hear(store, view, view.ranks)
        self._silence.look(time.monotonic(), signs)
        silent = set(self._silence.longer_than(_DEAD_S))
        self.alone = bool(signs) and all(rank in silent or self._ended(store, view, rank) for rank in signs)

    def _ended(self, store: Any, view: View, rank: int) -> Exited | None:
        """How the process of this member ended, where its agent says so."""
        ended = self._exited(store, rank)
        return ended if ended is not None and ended.count >= int(view.members[rank].partition("-")[0]) else None

    def _leaving_by_link(self, view: View) -> dict[int, Leaving]:
        own = {rank: why for rank, why in self.kept_out.items() if rank in view.members}
        left = view.without(own)
        if not own or left.shortfall(self.least, with_returning=False):
            return {}
        return own if self.rank == min(left.ranks, default=-1) else {}  # all know; one is enough to do it

    def _hear(self, store: Any, view: View, ranks: Sequence[int]) -> dict[int, str]:
        """The last signs of life of these members."""
        signs = self._signs(store, view, ranks)
        self._steps = {rank: int(sign.split(" ")[1]) for rank, sign in signs.items()}
        return signs

    def _signs(self, store: Any, view: View, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: peek(store, f"beat/{rank}/{view.members[rank]}") or _NO_SIGN for rank in ranks}

    # -- views

    def _propose(self, store: Any, old: View, new: View) -> bool:
        """Whether the new view is the next one; either way, what is the next one is seen then."""
        if is_next := self._stored.replace(store, old, new):
            level = logging.DEBUG if all(change.kind == "done" for change in new.changes) else logging.WARNING
            words = "; ".join(f"rank {c.rank} {'joined' if c.joined else 'left'}: {c.reason}" for c in new.changes)
            _log.log(level, "generation %d, ranks %s: %s", new.generation, list(new.ranks), words)
        self._saw(self._read(store))
        return is_next

    def _saw(self, view: View) -> None:
        with self._changed:
            known = self._view
            if known is None or (view.generation, view.begun) > (known.generation, known.begun):
                self._view = view
                self.changes.update({(change.rank, change.joined): change for change in view.changes})
                self._changed.notify_all()

    def _read(self, store: Any) -> View:
        known = self._view
        try:
            view = self._stored.read(store)
            if known is not None and view.job != known.job:
                if known.has_begun:
                    raise ValueError("the job's store has the members of another job")
                raise StoreEmptied("the ranks of the job have met anew")
        except StoreEmptied:
            if known is not None and not known.has_begun:
                self.annulled = known.job
            raise
        return view

    def _open(self, store: Any, key: str) -> str | None:
        return self._seal.open(key, store.get(key).decode())
