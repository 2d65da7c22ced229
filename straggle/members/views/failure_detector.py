"""The thread that watches the members' signs of life and the view, and proposes to put out members that are gone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from straggle import world
from straggle.members.agents import Exited, stopped
from straggle.members.views.connections import Connections
from straggle.members.views.heartbeat import BEAT_S, Heartbeat, signs_of, step_in
from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.join_requests import JoinRequests
from straggle.members.views.refill import Refill
from straggle.members.views.view import DONE, Elastic, Leaving, Silence, View, leader
from straggle.members.views.view_chain import StoreEmptied, ViewChain
from straggle.merge.wire.launcher_words import down
from straggle.merge.wire.store import StoreUnreachable

_LOOK_S = 0.3  # between two looks at signs of life and the view: several requests each, and a beat is one
_QUICK_S = 0.5  # the silence that suffices if a connection has just broken, or an agent says that a rank is stopped
_BROKEN_S = 3.0  # for how long a broken connection counts as just broken
_ANEW_S = 5.0  # after which members that are all alive, and one of whose merges has broken, begin anew
_LOST_S = 10.0  # the silence after which a rank whose replica is out is not waited for by the others of it
_DEAD_S = 60.0  # silence of all members that have the job's state: longer than most cuts of a link

_log = logging.getLogger(__name__)


def key_of_end(incarnation: str, rank: int) -> str:
    """The key in the store of a rank of a replica whose loop is over; others of it may still have work to do."""
    return f"ended/{incarnation}/{rank}"


class FailureDetector:
    """Watches the members for one incarnation of one rank, from `start` to `stop`; it also beats at each look.

    ``exited(store, rank)`` is how the rank's last process ended, if an agent has reported it. At least ``least``
    members stay when one is put out because it is slow. A rank of a replica watches those of the other replicas that
    have its shard, and the next one of its own: a replica is put out if one of its ranks is gone before its loop is
    over.
    """

    def __init__(
        self,
        chain: ViewChain,
        elastic: Elastic,
        heartbeat: Heartbeat,
        connections: Connections,
        *,
        joins: JoinRequests,
        refill: Refill,
        least: int,
        exited: Callable[[Any, int], Exited | None],
        inside: InReplica = ALONE,
    ) -> None:
        self.is_on = False  # whether silent members are put out: from when this rank can go on without them
        self.healing: frozenset[int] = frozenset()  # members that could give no state now; written by the merge
        self._without_state: frozenset[int] = frozenset()  # members that wait for their state; written by the merge
        self._is_out = False  # this rank is no member, or its view is not formed yet; written by the merge
        self.kept_out: Mapping[int, Leaving] = {}  # ranks that are no members while they are slow; see `keep_out`
        self.is_in_step: Callable[[], bool] = lambda: False  # whether the training thread is in a step
        self.alone = False  # this rank is no member, and no member gives a sign of life
        self.lost_of_replica = ""  # this rank is no member, and why a rank of its replica will not come back, if so
        self.num_looks = 0  # looks that the store has answered
        self.num_turns = 0  # looks that the thread has begun, answered or not
        self._chain, self._elastic, self._least = chain, elastic, least
        self._heartbeat, self._connections = heartbeat, connections
        self._joins, self._refill, self._exited, self._inside = joins, refill, exited, inside
        self._silence = Silence(_LOOK_S)
        self._steps: dict[int, int] = {}
        self._broken_at, self._replica_broke = -math.inf, False
        self._broken_in = -1  # in the groups of which view a merge has broken last
        self._lost = False  # the store did not answer
        self._stopping = world.Event()
        self._wake = world.Event()
        self._life = 0  # the number of the thread in charge: a stuck thread gets a successor
        self.threads: list[world.Thread] = []  # those that may still run, the newest last

    # -- any thread

    @property
    def furthest_step(self) -> int:
        """The furthest step that the members have reported with their signs of life."""
        return max(self._steps.values(), default=-1)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self.threads:
            self._start()
            self._heartbeat.start()

    def stop(self) -> None:
        """Tell the threads to end; does not wait for them."""
        self._stopping.set()
        self._wake.set()  # after it, or the thread would wake, see nothing and sleep again
        self._heartbeat.stop()

    def connect_anew(self) -> None:
        """Replace the thread, which is stuck in a request, by one with a new connection; also for the signs of life.

        A request that was on its way when a link was cut comes back when TCP tries again, which may be as long after
        the cut as the cut was long. Until then this rank would be put out and not know it.
        """
        if not self._stopping.is_set():
            self._life += 1  # first: the stuck thread ends as soon as its request returns
            self._start()
            self._heartbeat.connect_anew()

    def connection_broke(self, *, of_replica: bool = False, generation: int = -1) -> None:
        """Suspect silent members sooner: a merge has ended in an error.

        ``of_replica``: a collective inside of this rank's replica has. ``generation``: the groups of this view are of
        no more use. If no member is gone, gloo has ended a collective to which one did not come for long, as in a
        pause: a view with the same members follows.
        """
        self._broken_in = max(self._broken_in, generation)
        self._broken_at, self._replica_broke = world.monotonic(), self._replica_broke or of_replica
        # last: the thread that wakes reads what is written above
        self._wake.set()

    def put_out_silent(self) -> None:
        """From now on put out members that fall silent: this rank can go on without them."""
        self.is_on = True

    def follow_step(self, is_in_step: Callable[[], bool]) -> None:
        """``is_in_step()``: whether this rank's training thread is in a step; asked by this thread and others."""
        self.is_in_step = is_in_step

    def note_own(self, *, is_out: bool) -> None:
        """Note whether this rank is no member, or has yet to form the groups of its view; with the merge's lock."""
        self._is_out = is_out

    def note_healing(self, members: frozenset[int], without_state: frozenset[int] | None = None) -> None:
        """Note which members could give no state now, and which wait for theirs, if that has changed; by the merge."""
        self.healing = members
        if without_state is not None:
            self._without_state = without_state

    def keep_out(self, ranks: Mapping[int, Leaving]) -> None:
        """From now on put these ranks out, as far as the others may go on without them, and let none of them in."""
        self.kept_out = ranks
        self._joins.hear_anew()
        self._wake.set()

    def _start(self) -> None:
        thread = world.Thread(target=self._run, args=(self._life,), name="straggle-watch", daemon=True)
        self.threads = [*(old for old in self.threads if old.is_alive()), thread]
        thread.start()

    # -- the thread

    def _run(self, life: int) -> None:
        store, looked_at = None, -math.inf
        while not self._stopping.is_set():
            self.num_turns += 1
            self._wake.wait(max(BEAT_S, looked_at + self._between_looks_s() - world.monotonic()))
            self._wake.clear()  # before the look: what happens during it wakes the next one
            looked_at = world.monotonic()
            try:
                store = store or self._connections.connect()
                self._heartbeat.beat(store)
                view = self._read_or_fill(store)
                if self._life != life:  # this thread was stuck, and has a successor: what it has read is old
                    return
                if view is None:
                    continue
                is_member = self._chain.is_in(view)
                if not is_member:
                    self._look_from_outside(store, view)
                self._chain.saw(view)
                if is_member and self.is_on:
                    self._watch(store, view)
                elif is_member and not view.has_begun and down(store, self._processes_of(view)):
                    self._chain.annul(store, view)
                self.num_looks += 1
                self._heartbeat.answered()
                self._note_lost(None)
            except (RuntimeError, OSError, ValueError, StoreUnreachable) as error:
                if self._life != life:
                    return
                self._note_lost(str(error).partition("\n")[0])
                store = None
                self._connections.forget_idle()  # they lead to the same store
                self._stopping.wait(1.0)

    def _between_looks_s(self) -> float:
        """Seconds between two looks at the others: those of a beat if a change has happened or is expected."""
        quiet = self.is_on and self._chain.is_member and not self._lost
        return _LOOK_S if quiet and world.monotonic() - self._broken_at >= _BROKEN_S else BEAT_S

    def _read_or_fill(self, store: Any) -> View | None:
        """The view; ``None`` if the store was restarted, after this rank has done its part in filling it."""
        try:
            view = self._chain.read(store)
        except StoreEmptied:
            if not (known := self._chain.view).has_begun:
                # others may have seen that it had: they do not meet anew, and need this rank to fill the store
                if (begun := self._refill.begun(store, known.job)) is None:
                    return None
                self._chain.saw(begun)
            self._joins.forget()
            if self._refill.fill(store, self._chain.view):
                self.num_looks += 1  # it has answered, and its members have as long again to fill it
            return None
        self._refill.filled()
        known = self._chain.view
        if view.generation > known.generation or view == known:
            return view
        # in case the ranks that filled the store did not know this view; if they did, `replace` changes nothing
        self._chain.replace(store, view, known.again())
        return None

    def _processes_of(self, view: View) -> list[int]:
        return [rank for member in view.ranks for rank in self._inside.ranks(member)]

    def _note_lost(self, problem: str | None) -> None:
        lost, own = problem is not None, self._inside.rank(self._chain.rank)
        if lost != self._lost and not self._stopping.is_set():
            if lost:
                _log.warning("rank %d: the job's store does not answer (%s): members cannot change", own, problem)
            else:
                _log.warning("rank %d: the job's store answers again", own)
        self._lost = lost

    def _watch(self, store: Any, view: View) -> None:
        watched = [self._inside.rank(member) for member in view.watched_by(self._chain.rank)]
        if self._inside.size > 1:
            watched.append(self._inside.next_rank(self._chain.rank))
        signs = self._hear(store, view.members, watched)
        now = world.monotonic()
        self._silence.look(now, signs)
        broken = now - self._broken_at < _BROKEN_S
        limit_s = min(_QUICK_S, self._elastic.suspect_s) if broken else self._elastic.suspect_s
        lost = {
            rank: Leaving("silent", self._said(rank, f"no sign of life for {limit_s:g} s"))
            for rank in self._silence.longer_than(limit_s)
        }
        for rank in self._silence.longer_than(min(_QUICK_S, limit_s)):
            if rank not in lost and stopped(store, rank):  # asked of those that are silent: no request in a quiet job
                lost[rank] = Leaving("silent", self._said(rank, "its process is stopped by a signal"))
        for rank in signs:
            if ended := self._ended(store, view.members, rank):
                lost[rank] = Leaving("ended", ended)
        gone = {self._member(rank): why for rank in lost if (why := self._why(store, view.members, rank, lost[rank]))}
        if not (broken or self._have_state(view.without(gone), view)):
            dead = set(map(self._member, self._silence.longer_than(_DEAD_S)))
            gone = {member: why for member, why in gone.items() if why.kind != "silent" or member in dead}
        gone = {**self._leaving_as_slow(view.without(gone)), **gone}
        if gone:
            self._chain.propose(store, view, view.without(gone))
        elif self._broken_in == view.generation and now - self._broken_at >= _ANEW_S:
            self._begin_anew(store, view)
        if leader(view, self.healing) == self._chain.rank:
            self._joins.hear(store, view, self.kept_out)
        else:
            self._joins.forget()

    def _begin_anew(self, store: Any, view: View) -> None:
        if self._chain.propose(store, view, view.again()):
            _log.warning(
                "generation %d, the same members: all of them live, and a merge of theirs has failed, as after a long "
                "wait for one of them; what was on its way is merged again",
                view.generation + 1,
            )

    def _have_state(self, left: View, view: View) -> bool:
        """Whether one of the members that are left has the state; if none, members that were stopped are waited for."""
        joined = view.joined if self._is_out else frozenset()
        return bool(set(left.ranks) - self._without_state - joined)

    def _look_from_outside(self, store: Any, view: View) -> None:
        """Learn how far the members are before this rank comes back, and whether one could let it in.

        Of its own replica it also learns whether all ranks are there: none of them can come back alone.
        """
        ranks, own = [self._inside.rank(member) for member in view.ranks], self._inside.others(self._chain.rank)
        # an earlier process of this rank may be a member: the others of its replica have this one's incarnation
        members, replica = view.members, {self._chain.rank: self._chain.incarnation}
        signs = self._hear(store, members, ranks)
        self._silence.look(world.monotonic(), {**signs, **signs_of(store, replica, own, self._inside.size)})
        limit_s = _QUICK_S if self._replica_broke else _LOST_S
        dead, lost = set(self._silence.longer_than(_DEAD_S)), self._silence.longer_than(limit_s)
        self.alone = bool(ranks) and all(rank in dead or self._ended(store, members, rank) for rank in ranks)
        silent = {rank: self._said(rank, f"no sign of life for {limit_s:g} s") for rank in own if rank in lost}
        why = (self._ended(store, replica, rank) or silent.get(rank, "") for rank in own)
        self.lost_of_replica = next(filter(None, why), "")

    def _ended(self, store: Any, members: Mapping[int, str], rank: int) -> str:
        """How the process of this rank of a member ended, if its agent has reported it."""
        ended = self._exit_of(store, members, rank)
        return "" if ended is None else self._said(rank, f"its process ended {ended}")

    def _exit_of(self, store: Any, members: Mapping[int, str], rank: int) -> Exited | None:
        ended, incarnation = self._exited(store, rank), members[self._member(rank)]
        return None if ended is None or ended.count < int(incarnation.partition("-")[0]) else ended

    def _why(self, store: Any, members: Mapping[int, str], rank: int, lost: Leaving) -> Leaving | None:
        """Why the member of a ``lost`` rank leaves. ``None``: it does not.

        A replica leaves with the last of its ranks, so one whose loop is over is not missed. It is if this rank is of
        the same replica, and in a step: without the other it would not come to the end of that.
        """
        inside, member = self._inside, self._member(rank)
        if inside.size == 1 or (member == self._chain.rank and self.is_in_step()):
            return lost
        over = [store.check([key_of_end(members[member], each)]) for each in (rank, *inside.ranks(member))]
        if not over[0] or ((ended := self._exit_of(store, members, rank)) is not None and ended.code != 0):
            return lost
        return DONE if all(over) else None

    def _member(self, rank: int) -> int:
        return rank // self._inside.size

    def _said(self, rank: int, words: str) -> str:
        """Why a member leaves; of a replica, which of its ranks is the reason."""
        return words if self._inside.size == 1 else f"rank {rank} of it: {words}"

    def _leaving_as_slow(self, view: View) -> dict[int, Leaving]:
        own = {rank: why for rank, why in self.kept_out.items() if rank in view.members}
        left = view.without(own)
        if not own or left.shortfall(self._least, with_returning=False):
            return {}
        return own if self._chain.rank == min(left.ranks, default=-1) else {}  # one proposes it for all

    def _hear(self, store: Any, members: Mapping[int, str], ranks: Sequence[int]) -> dict[int, str]:
        """Read the last signs of life of these ranks."""
        signs = signs_of(store, members, ranks, self._inside.size)
        # the others of a replica merge other shards, and may be a step further
        others = (rank for rank in signs if self._member(rank) != self._chain.rank)
        self._steps = {rank: step_in(signs[rank]) for rank in others}
        return signs
