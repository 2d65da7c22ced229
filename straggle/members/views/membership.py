"""This rank's place in the chain of views: how it comes into a job, what it publishes there, and how it leaves.

One thread sends signs of life and another one watches those of others. Neither does anything else, so that a rank whose
other threads are busy is not taken for dead. Everything published here lies under one prefix of the job's store, which
is the same for all incarnations of all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from straggle import world
from straggle.members.agents import IS_SPARE, Exited, over, post_over
from straggle.members.views.connections import Connections
from straggle.members.views.failure_detector import FailureDetector, key_of_end
from straggle.members.views.heartbeat import Heartbeat, signs_of, step_in
from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.join_requests import JoinRequests
from straggle.members.views.refill import GATHER_S, Refill
from straggle.members.views.view import DONE, NOTICE, OF_A_SPARE, Elastic, Leaving, View
from straggle.members.views.view_chain import StoredView, StoreEmptied, ViewChain
from straggle.merge.wire.arrivals import LongArrival
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.launcher_words import down
from straggle.merge.wire.store import ANSWER_S, peek
from straggle.waits import NowAndThen, end_before_exit, end_of, until

_DOWN_LOOK_S = 0.5  # between two questions whether ranks that are missing may come
_LINGER_S = 2.0
_END_S = 5.0  # for threads to end when the model is closed

_log = logging.getLogger(__name__)


class TooFewRanks(PeerFailed):
    """The job has fewer members than it may go on with: only ``ranks`` are left."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class JobDone(SystemExit):
    """This rank was out, or was restarted, when the others came to the end of their loops with this model.

    Nothing has failed, and nothing is left to do: uncaught, it ends the process with status 0 and without a traceback,
    and no ``except Exception`` takes it for an error. A program that goes on with another model catches it by its name
    and wraps that model.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 0


def new_incarnation() -> str:
    """The name of this process as a member, or of all processes of a replica, which are started together."""
    kind = OF_A_SPARE if IS_SPARE in os.environ else "-"
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}{kind}{uuid.uuid4().hex[:12]}"


class Membership:
    """The membership of one incarnation of one rank, from `begin` to `close`; any thread may use it.

    ``chain`` has the views, and ``detector`` watches the other members. ``connect()`` makes a connection to the job's
    store, under the prefix of this model. ``exited(store, rank)`` is how the rank's last process ended, if an agent has
    reported it. If members are replicas, ``rank`` and ``world_size`` count these, ``inside`` is this process's place in
    its own, and all ranks of a replica have one ``incarnation``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        elastic: Elastic,
        *,
        connect: Callable[[], Any],
        exited: Callable[[Any, int], Exited | None],
        inside: InReplica = ALONE,
        incarnation: str = "",
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.elastic, self.least = elastic, elastic.least(world_size)
        self.inside, self.incarnation = inside, incarnation or new_incarnation()
        self.step = -1  # the step of this rank's merge; sent with its signs of life
        self.is_closed = False  # nothing is waited for any more
        self._wrapped_in = ""  # the job whose ranks it has told that it has wrapped its model
        self.left_for_good = False  # it left by its own will, and does not ask to be let in again
        self._why_it_ends = DONE  # what the others are told when its loop is over
        self._waits_for_view = False  # the store was restarted when it was told
        self.connections = Connections(connect)
        self.joins = JoinRequests(rank, world_size, self.incarnation, inside)
        self.chain = ViewChain(rank, self.incarnation, StoredView(world_size), inside.kind)
        self._refill = Refill(rank, world_size, self.least, inside)
        self._heartbeat = Heartbeat(inside.rank(rank), self.incarnation, connect, lambda: self.step)
        self.detector = FailureDetector(
            self.chain,
            elastic,
            self._heartbeat,
            self.connections,
            joins=self.joins,
            refill=self._refill,
            least=self.least,
            exited=exited,
            inside=inside,
        )
        self._threads: list[world.Thread] = []
        self._spawning = world.Lock()

    @property
    def view(self) -> View:
        """The last view that was seen."""
        return self.chain.view

    @property
    def is_member(self) -> bool:
        """Whether this incarnation is a member in the last view that was seen."""
        return self.chain.is_member

    @property
    def lost(self) -> str:
        """Why this process cannot be let in again: its replica is no longer whole. Empty if it may be.

        What the ranks of a replica have in common, such as FSDP's own groups, is made when all of them are started.
        """
        chain, change = self.chain, self.chain.left
        if self.inside.size == 1 or self.is_member:
            return ""
        ended = change is not None and change.kind in ("ended", "raised")
        if chain.was_member and (ended or self.left_for_good or self.rank in self.view.members):
            return change.reason if change is not None else "it was started again"
        return self.detector.lost_of_replica

    def check_done(self) -> None:
        """Raise `JobDone` if all others have ended their loops and this rank has not.

        If no live member could let this rank in, the job is done if some rank has ended its loop; raises `TooFewRanks`
        if none has, or if they have ended early.
        """
        view, ended = self.view, sorted(self.view.ended)
        if self.left_for_good:
            return
        if (is_over := view.is_done or (self.detector.alone and bool(ended))) and view.ended_early:
            raise TooFewRanks(
                f"{self._own}: {self.inside.named(ended)} have ended their loops early, as ranks were told to end and "
                "too few would have been left: go on from the checkpoint of that step"
            )
        if is_over:
            done = JobDone(f"{self._own} comes late: {self.inside.named(ended)} have ended their loops")
            _log.warning("%s: there is nothing left to do for this rank", done)  # as Python prints nothing for it
            raise done
        if self.detector.alone:
            raise TooFewRanks(
                f"{self._own}: {self.inside.named(view.ranks)} were the members, and none of them gives a sign of "
                "life: nobody has the job's state; begin from a checkpoint",
                view.ranks,
            )

    def begin(self, limit_s: float, limit: str = "") -> bool:
        """Find the job's view, or agree on the first one with all ranks. Returns whether this rank joins a running job.

        Raises `PeerFailed` if not all ranks come within ``limit_s``, in words ``limit``, or if the job is over before
        it has begun.
        """
        store = self.connections.own()
        arrival = LongArrival(self.inside.rank(self.rank), self._ranks_of(range(self.world_size)))
        self._heartbeat.beat(store)
        store.set(f"hello/{self.rank}", self.incarnation)
        looks, gone = NowAndThen(_DOWN_LOOK_S), dict[int, str]()

        def is_found() -> bool:
            while not self.chain.find(store):
                if looks.is_due():
                    gone.clear()
                    gone.update(self._down(store))
                if missing := self._not_come(store, gone):
                    if self.rank in missing:  # the store was restarted, and has nobody's
                        store.set(f"hello/{self.rank}", self.incarnation)
                    if (why := over(store)) is not None:
                        raise PeerFailed(f"{self._own}, before step 0: the job is over: {why}")
                    arrival.look(partial(self._ranks_of, missing))
                    return False
                if not self._begin_without(store, gone):
                    return False
            return True

        if not until(is_found, every_s=0.01, limit_s=limit_s):
            raise PeerFailed(
                f"{self._own}, before step 0: {self.inside.named(self._not_come(store, gone))} have not come within "
                f"{limit or f'{limit_s:g} s'}: "
                "each has to wrap the model; one has ended, hangs, or cannot be reached"
            )
        self.detector.start()
        return not (self.is_member and (self.view.generation == 0 or self.is_under_way))

    @property
    def is_under_way(self) -> bool:
        """Whether the job has begun with this process: all have wrapped, and then the store has lost that they had."""
        return self.is_member and self.chain.has_begun(self._wrapped_in)

    def _not_come(self, store: Any, gone: Container[int]) -> list[int]:
        """The members that are neither there nor known to be gone."""
        return [rank for rank in range(self.world_size) if rank not in gone and not store.check([f"hello/{rank}"])]

    def _begin_without(self, store: Any, gone: Mapping[int, str]) -> bool:
        """All others are there: write a first view of them, unless there is one. False: the store was just emptied."""
        there = [rank for rank in range(self.world_size) if rank not in gone]
        names = {rank: name for rank in there if (name := peek(store, f"hello/{rank}")) is not None}
        if len(names) < len(there):
            return False
        # several ranks may do so at once, each with a job of its own: the store keeps the first
        self.chain.begin(store, View(0, names, job=uuid.uuid4().hex[:12]))
        if gone and self.rank == there[0]:
            _log.warning("the job begins with ranks %s: %s", self._ranks_of(there), "; ".join(gone.values()))
        return True

    def _down(self, store: Any) -> dict[int, str]:
        """Members that will not come, and why, as the launcher says it.

        Raises `PeerFailed`, and reports that the job is over, if too few are left without them.
        """
        gone = dict[int, str]()
        for rank, why in down(store, self._ranks_of(range(self.world_size))).items():
            gone[rank // self.inside.size] = why
        if self.world_size - len(gone) < self.least:
            if (told := over(store)) is not None:  # which a launcher says first
                raise PeerFailed(f"{self._own}, before step 0: the job is over: {told}")
            why = f"{'; '.join(gone.values())}, and too few ranks are left without it (Elastic.min_ranks)"
            post_over(store, why)
            raise PeerFailed(f"{self._own}, before step 0: {why}")
        return gone

    def annul(self, view: View) -> None:
        """Give up a first view that has not begun: all its ranks agree on another one."""
        self.chain.annul(self.connections.own(), view)

    def has_wrapped(self, limit_s: float, limit: str = "") -> bool:
        """This rank has wrapped its model: wait for the others. After that a restarted rank comes to a running job.

        False if a rank was restarted before that: the first view was given up. Raises `PeerFailed` if the others have
        not wrapped theirs within ``limit_s``, in words ``limit``.
        """
        view, store = self.view, self.connections.own()
        keys = {rank: f"wrapped/{view.job}/{rank}" for rank in self._ranks_of(view.ranks)}
        arrival = LongArrival(self.inside.rank(self.rank), list(keys))

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if not store.check([key])]

        store.set(f"wrapped/{view.job}/{self.inside.rank(self.rank)}", "")
        self._wrapped_in = view.job

        def is_over() -> bool:
            if store.check(list(keys.values())) or self.chain.annulled == view.job or self.chain.has_begun(view.job):
                return True
            arrival.look(missing)
            return False

        if not until(is_over, every_s=0.005, limit_s=limit_s):
            raise PeerFailed(
                f"{self._own}, before step 0: ranks {missing()} have not wrapped the model within "
                f"{limit or f'{limit_s:g} s'}"
            )
        if self.chain.has_begun(view.job):
            return True
        if self.chain.annulled == view.job:
            return False
        # all ranks write the same, so it does not matter which is first
        self.chain.replace(store, view, replace(view, begun=True))
        try:
            self.chain.look(store)
        except StoreEmptied:
            return False
        return True

    def admit(self, step: int) -> None:
        """Let in the ranks that have asked: they take part from ``step`` on, and this rank sends them its state."""
        store, view = self.connections.own(), self.view
        if not self.chain.is_in(view):  # it was put out meanwhile: newcomers would wait for its state
            return
        new = self.joins.take(store, view)
        following = view.with_joined(new, step=step, giver=self.rank)  # also if none has asked: all members wait for it
        self.chain.propose(store, view, following)

    def go_on(self) -> None:
        """Write a view with the same members: one that all of them wait for has not come."""
        view = self.view
        self.chain.propose(self.connections.own(), view, view.again())

    def let_go(self, ranks: frozenset[int]) -> None:
        """Write the view without these ranks, which have announced that they leave."""
        store = self.connections.own()
        for _ in range(5):
            view = self.view
            gone = dict.fromkeys(ranks & set(view.members), NOTICE)
            if not gone or self.chain.propose(store, view, view.without(gone)):
                return

    def leave(self, why: Leaving, *, for_good: bool = True, if_spared: bool = False) -> None:
        """This rank leaves the members, for good or until it is let in again.

        ``if_spared``: only if the others may go on without it.
        """
        self.left_for_good |= for_good
        if not self.chain.has_view or not self.is_member:
            return
        with self.connections.lent() as store:
            for _ in range(5):  # again if another member has replaced the view meanwhile
                view = self.chain.read(store)
                if not self.chain.is_in(view):
                    return
                following = view.without({self.rank: why})
                if if_spared and following.shortfall(self.least, with_returning=False):
                    return
                if self.chain.propose(store, view, following):
                    return

    def leave_for_good(self) -> None:
        """This rank is out, or leaves with its peers' agreement, and is not to ask to be let in again."""
        self.left_for_good = True

    def may_return(self) -> None:
        """It left with an error, and its loop goes on all the same."""
        self.left_for_good = False

    def ends_as_told(self, why: Leaving) -> None:
        """What the others are told when its loop is over, because of a notice to it or to another rank."""
        self._why_it_ends = why

    def merged(self, step: int) -> None:
        """``step`` is the one to be merged next: the others are told so by signs of life."""
        self.step = step

    def leave_at_the_end(self) -> None:
        """Leave when this rank's loop is over; first wait for a moment for the others to come as far.

        They may need this rank for the step that it has just ended. A store that does not answer is not waited for.
        A replica leaves with the last of its ranks.
        """
        self.left_for_good = True
        leaves = self.spawn(self._leave_with_the_others)
        if not end_of([leaves], _LINGER_S + ANSWER_S) and self._waits_for_view:
            end_of([leaves], GATHER_S)

    def leave_with_an_error(self, reason: str) -> None:
        """Leave because this rank's own code raised; waits only for as long as a store that answers needs.

        If the others cannot go on without it, this reports that the job is over: later this process may be gone.
        """
        end_of([self.spawn(self._leave_with_an_error, reason)], ANSWER_S)

    def _leave_with_an_error(self, reason: str) -> None:
        try:
            self.leave(Leaving("raised", reason))
            if self.view.shortfall(self.least, with_returning=True):
                with self.connections.lent() as store:
                    post_over(store, f"{reason}, and too few ranks are left without it")
        except (RuntimeError, OSError, ValueError) as error:  # its peers find it silent
            _log.info("%s left without notice: %s", self._own, error)

    def _leave_with_the_others(self) -> None:
        ends_at = world.monotonic() + _LINGER_S
        try:
            with self.connections.lent() as store:
                store.set(key_of_end(self.incarnation, self.inside.rank(self.rank)), "")
                # one counter for the replica: only the rank that ends last leaves, for all of them
                is_last = store.add(f"ended/{self.incarnation}", 1) >= self.inside.size

                def are_as_far() -> bool:
                    if not self.is_member:
                        return True
                    own = [self.inside.rank(member) for member in self.view.ranks]
                    signs = signs_of(store, self.view.members, own, self.inside.size)
                    return is_last and min(map(step_in, signs.values())) >= self.step

                until(are_as_far, every_s=0.02, limit_s=ends_at - world.monotonic())
            if is_last:
                until(self._has_left, every_s=0.05, limit_s=GATHER_S + ANSWER_S)
        except (RuntimeError, OSError, ValueError) as error:
            _log.info("%s left without notice: %s", self._own, error)

    def _has_left(self) -> bool:
        """Leave, because this rank's loop is over. False if the store was just restarted.

        Then it has no view until its members, this one's detector among them, have written again what it had. Nobody
        could tell a rank that comes later that their loops are over, if they were gone before that.
        """
        try:
            self.leave(self._why_it_ends)
        except StoreEmptied:
            self._waits_for_view = True
            return False
        return True

    def look(self) -> None:
        """Read the view now."""
        self.chain.look(self.connections.own())

    @contextlib.contextmanager
    def connection(self, corner: str) -> Iterator[Any]:
        """A connection to the part ``corner`` of the store, which no other thread uses meanwhile.

        It is kept for the next caller: making one takes seconds if a name server does not answer.
        """
        with self.connections.lent() as store:
            yield world.dist.PrefixStore(self.inside.key(corner), store)  # type: ignore[attr-defined]

    def publish(self, key: str, word: str) -> None:
        """Write a word for all incarnations of all ranks, unless the key has one."""
        key = self.inside.key(key)
        # what lies there, which may be another rank's word: that is what is to be written again
        self._refill.note(key, self.connections.own().compare_set(key, "", word).decode())

    def published(self, key: str) -> str | None:
        """The word that was published under this key in this job, if any."""
        key = self.inside.key(key)
        if (word := peek(self.connections.own(), key)) is not None:
            self._refill.note(key, word)
        return word

    def note(self, key: str, word: str) -> None:
        """Write this again if the store is restarted."""
        self._refill.note(self.inside.key(key), word)

    def spawn(self, target: Callable[..., None], *args: Any) -> world.Thread:
        """Start a thread that waits for other ranks and may be abandoned; `close` waits for it for a moment."""
        thread = world.Thread(target=target, args=args, name="straggle-members", daemon=True)
        with self._spawning:  # whoever spawns meanwhile would write the list as it was before
            thread.start()
            self._threads = [*(own for own in self._threads if own.is_alive()), thread]
        return thread

    def end(self, why: str) -> None:
        """Report that the job is over: a restarted rank would wait for members that are not there."""
        post_over(self.connections.own(), why)

    def close(self) -> None:
        """End the threads."""
        self.is_closed = True  # first: threads that wait for a peer see it and end
        self.detector.stop()
        end_before_exit((*self.detector.threads, *self._heartbeat.threads, *self._threads), _END_S)

    @property
    def _own(self) -> str:
        """This process in messages."""
        return f"rank {self.inside.rank(self.rank)}"

    def _ranks_of(self, members: Sequence[int]) -> list[int]:
        return [rank for member in members for rank in self.inside.ranks(member)]
