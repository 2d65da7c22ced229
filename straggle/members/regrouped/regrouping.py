"""The thread that takes a rank from view to view: it forms the new groups and ends the step that was running."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from straggle import world
from straggle.members.member import Member
from straggle.members.own.in_flight import InFlight
from straggle.members.regrouped.elastic import ElasticChannel
from straggle.members.views.membership import JobDone, TooFewRanks
from straggle.members.views.view import Leaving, MergeProgress, Silence, View, progress_length, repair
from straggle.members.views.view_chain import Hold
from straggle.merge.wire.channel import GroupsChanged, PeerFailed
from straggle.merge.wire.store import StoreUnreachable
from straggle.report import MembersReport
from straggle.waits import end_before_exit, until

_LOOK_S = 0.2  # between two checks for something to do
_ASKED_LOOK_S = 0.02  # the same for a rank that asks to be let in: once it is, the members wait for it
_ASK_AGAIN_S = 2.0
_STUCK_S = 12.0  # in one request to the store; connecting succeeds or fails in less
_ANSWERS, _TURNS = 0, 1  # keys of the store's silence: its answers, and requests that end
_LEADER_S = 0.1  # for the member that leads to write a view that all of them know
_VIEW_S = 5.0  # for the view that members wait for to be written; then they go on as they are
_REPLICA_S = 0.5  # after the merge of a step, for all ranks of a replica to have it, before the members change
_END_S = 5.0  # for a process whose replica has left to end by itself
_RETURN_S = 10.0  # within which a returning rank is not counted as missing

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MembershipEvents:
    """What a rank does when something becomes of its membership; called by the thread of `Regrouping`, with no lock.

    ``let_in(view)``: it is let in. ``look()``: it is a member, and may have to leave. ``changed(report)``: the members
    have changed, and their groups are formed. ``is_back()`` is asked while it is out: whether its training thread would
    take a state.
    """

    let_in: Callable[[View], None] = lambda _: None
    look: Callable[[], None] = lambda: None
    changed: Callable[[MembersReport], None] = lambda _: None
    is_back: Callable[[], bool] = lambda: False


class Regrouping:
    """The thread that takes a rank from view to view, from `start` to `close`, and tells ``events`` of it.

    The gradients of a step are merged in at most ``max_buckets``, whatever the stages. ``own``: the collectives of the
    loop's own, if they follow the members.
    A rank that was put out asks to be let in again as soon as its training thread is back.
    """

    def __init__(
        self,
        channel: ElasticChannel,
        member: Member,
        events: MembershipEvents,
        *,
        max_buckets: int,
        own: InFlight | None = None,
    ) -> None:
        self._channel, self._membership, self._member = channel, channel.membership, member
        self._events = events
        self._max_buckets = max_buckets
        self._own = own
        self._closing = world.Event()
        self._newer_at = world.monotonic()  # when the members changed last
        self._asked_at: float | None = None
        self._silence = Silence(_LOOK_S)  # the silence of the job's store
        self._reported = self._membership.view  # the view up to which changes were reported
        self._thread = world.Thread(target=self._run, name="straggle-regrouping", daemon=True)

    def start(self) -> None:
        """Start the thread: from now on the remaining members go on if one leaves."""
        self._membership.detector.put_out_silent()  # a view may come before the thread runs: it finds it then
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()  # first: what the channel raises from now on is no reason to end the job
        self._channel.close_soon()
        # unless a hook holds the model's last reference: this thread itself closes it
        end_before_exit([self._thread], _END_S)

    def ask(self) -> None:
        """Ask to be let in."""
        self._asked_at = world.monotonic()
        self._membership.joins.ask(self._membership.connections.own())

    def ask_anew(self) -> None:
        """Ask to be let in, if this rank left with an error and its loop goes on all the same."""
        if self._membership.left_for_good and not self._member.notice.asked:
            self._membership.may_return()
            self.ask()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._check_store()
                try:
                    self._look()
                except (dist.DistStoreError, dist.DistNetworkError, OSError):
                    self._membership.connections.forget_own()  # its loss is noticed by the store's silence
                    self._closing.wait(_LOOK_S)
        except BaseException as error:
            if not self._closing.is_set():
                self._member.end(error)
                self._channel.end(error)
                if isinstance(error, TooFewRanks):
                    self._membership.end(str(error))
                if self._membership.inside.size > 1:
                    world.Thread(target=self._end_process, args=(error,), daemon=True).start()

    def _end_process(self, error: BaseException) -> None:
        """End this process if it hangs in a collective of the user's, for which others of its replica may not come.

        Not if it closes the model, or knows the error: it may save a checkpoint then. Between two steps, as in an
        evaluation, it is given the time to come to the next one, unless the replica is no longer whole.
        """
        left_s, whole = _END_S, isinstance(error, TooFewRanks | JobDone | StoreUnreachable)
        while left_s > 0:
            if self._closing.wait(_LOOK_S) or self._member.knows_end:
                return
            if self._member.is_in_step or not whole:
                left_s -= _LOOK_S
        _log.error("%s; this process has not ended by itself in %g s, and is ended", error, _END_S)
        sys.stderr.flush()
        world.end_process(0 if isinstance(error, JobDone) else 1)

    def _look(self) -> None:
        """Do what is due now, or wait for a moment."""
        if self._membership.is_member:
            self._events.look()
        self._member.notice.look(self._membership.connections.own)
        asks = self._asked_at is not None and not self._membership.is_member
        if asks:
            with contextlib.suppress(ValueError):  # a view of another job, which `FailureDetector` reports
                self._membership.look()
        if self._membership.chain.wait_newer(self._channel.generation, _ASKED_LOOK_S if asks else _LOOK_S):
            self._newer_at = world.monotonic()
            self._follow()
        elif world.monotonic() - self._newer_at > _RETURN_S:
            self._check_number(self._membership.view, with_returning=False)
        if not self._membership.is_member:
            self._check_replica()
            self._ask_if_ready()

    def _check_store(self) -> None:
        """End the job if its store has been lost for too long: without it no rank can leave or come back."""
        membership = self._membership
        signs = {_ANSWERS: str(membership.detector.num_looks), _TURNS: str(membership.detector.num_turns)}
        self._silence.look(world.monotonic(), signs)
        if _TURNS in self._silence.longer_than(_STUCK_S):
            membership.detector.connect_anew()
            self._silence.forget(_TURNS)
        if _ANSWERS in self._silence.longer_than(self._channel.give_up_s):
            raise StoreUnreachable(
                f"rank {self._channel.name}, step {membership.step}: {self._channel.store.place} has not "
                f"answered for give_up_s={self._channel.give_up_s:g}, and without it members cannot change"
            )

    def _ask_if_ready(self) -> None:
        if self._asked_at is not None:
            self._membership.joins.check_refused(self._membership.connections.own())
            if world.monotonic() - self._asked_at > _ASK_AGAIN_S:  # the member that read the request may be gone
                self.ask()
        elif not self._membership.left_for_good and self._events.is_back():
            self.ask()

    def _follow(self) -> None:
        """Follow the newest view."""
        membership = self._membership
        if membership.chain.held is not None:
            self._await_view(membership.chain.held)
        view = membership.view
        if view.generation <= self._channel.generation:
            return
        if self._member.notice.has_left:  # its training thread has yet to take its last step
            self._channel.pass_over(view)
            return
        # before anything that takes the lock of the merge: whoever launches holds it, and nccl may not let it go before
        self._channel.revoke()
        self._check_number(view, with_returning=True)
        if not membership.is_member:
            self._member.put_out()
            self._say_why(view)
            self._channel.leave_groups(view)
            return
        if self._asked_at is not None and not self._member.is_out:
            self._member.put_out()  # the view that put this rank out was skipped: this newer one was there first
        began_at = world.monotonic()
        # before groups are formed: what this rank tells the others of itself must not change any more
        progress = self._member.freeze()
        told: Sequence[int] = [] if self._own is None else self._own.freeze(view)
        joins = progress.step < 0
        if joins and self._channel.rank not in view.joined:  # it was too late for the view that let it in
            late = "returns: it was let in, and the members changed before it was ready"
            membership.leave(Leaving("returns", late), for_good=False)
            return
        try:
            if not self._channel.form(view):
                return
            if joins:
                self._asked_at = None
                membership.joins.answered(membership.connections.own())
                self._events.let_in(view)
            self._regroup(view, progress, told)
        except GroupsChanged:
            return
        self._report(view, world.monotonic() - began_at)

    def _check_replica(self) -> None:
        """Raise `PeerFailed` if this rank's replica is no longer whole, and is not to end."""
        if not self._member.notice.asked and (why := self._membership.lost):
            raise PeerFailed(self.of_lost_replica(why))

    def of_lost_replica(self, why: str) -> str:
        """What to do if no rank of this one's replica can go on."""
        membership = self._membership
        return (
            f"rank {self._channel.name}, step {membership.step}: its replica, ranks "
            f"{list(membership.inside.ranks(membership.rank))}, is no member, and cannot come back as it is ({why}): "
            f"start all ranks of the replica again, together (straggle launch --replica-size {membership.inside.size})"
        )

    def _say_why(self, view: View) -> None:
        """Log why this rank is no longer a member, if others have put it out."""
        changes = view.changes_since(self._reported, dict(self._membership.chain.changes))
        self._reported = view
        for change in changes:
            if change.rank == self._channel.rank and not change.joined and change.kind != "done":
                _log.warning(
                    "%s %d is no member from generation %d on: %s",
                    self._membership.inside.kind,
                    change.rank,
                    view.generation,
                    change.reason,
                )

    def _report(self, view: View, seconds: float) -> None:
        changes = view.changes_since(self._reported, dict(self._membership.chain.changes))
        self._reported = view
        if changes:
            self._events.changed(
                MembersReport(
                    view.generation,
                    self._membership.step,
                    view.ranks,
                    self._membership.world_size,
                    left={change.rank: change.reason for change in changes if not change.joined},
                    joined={change.rank: change.reason for change in changes if change.joined},
                    seconds=seconds,
                    left_kinds={change.rank: change.kind for change in changes if not change.joined},
                    of=self._membership.inside.kind,
                )
            )

    def _check_number(self, view: View, *, with_returning: bool) -> None:
        membership = self._membership
        membership.check_done()
        kind = membership.inside.kind
        if view.shortfall(membership.least, with_returning=with_returning):
            raise TooFewRanks(
                f"rank {self._channel.name}, step {membership.step}: {len(view.members)} of {membership.world_size} "
                f"{kind}s are left ({view.said(kind)}), and the job goes on with {membership.least} at least "
                "(Elastic.min_ranks)",
                view.ranks,
            )

    def _regroup(self, view: View, progress: MergeProgress, told: Sequence[int]) -> None:
        channel = self._channel
        # the stages may be planned on some members and not yet on others
        own = torch.tensor(progress.encode(self._max_buckets), dtype=torch.int64)
        assert len(own) == progress_length(self._max_buckets)
        gathered = channel.exchange(own, view)
        known = {
            rank: MergeProgress.decode(numbers.tolist()) for rank, numbers in zip(view.ranks, gathered, strict=True)
        }
        way = repair(known)
        if progress.step < 0 and way.step > view.step:  # its state would lack steps that are merged already
            late = "returns: the members went on before its replica was let in"
            self._membership.leave(Leaving("returns", late), for_good=False)
            raise GroupsChanged
        if self._own is not None:  # before anything is merged again: the next step's row says who takes part after it
            known_of_own = channel.exchange(torch.tensor(told, dtype=torch.int64), view)
            self._own.follow(view, [numbers.tolist() for numbers in known_of_own])
        telemetry = torch.empty(0)
        if way.completed is not None:
            telemetry = self._member.telemetry_of(way.completed)
            channel.wait_in(view, channel.groups.control.broadcast(telemetry, view.ranks.index(way.giver)))
        self._member.regroup(channel.groups, view, way, telemetry)

    def _await_view(self, held: Hold) -> None:
        """Wait for the view in which newcomers come in or others are gone; this rank writes it if it leads."""
        membership = self._membership
        began = world.monotonic()
        # also if they have changed for another reason: other shards, not as far, wait for newcomers all the same
        if held.leads and not held.leaving and membership.view.step < held.step:
            self._await_replica(held.step)
            membership.admit(held.step)

        def look() -> bool:
            if not self._has_come(held):
                if held.leaving and (held.leads or world.monotonic() - began > _LEADER_S):
                    membership.let_go(held.leaving)
                membership.look()
            return self._has_come(held)

        has_come = until(look, every_s=0.002, limit_s=_VIEW_S - (world.monotonic() - began))
        if not has_come and membership.is_member and not self._closing.is_set():
            membership.go_on()  # nothing is merged before there is a view
        # not before: if this thread's connection broke with the store that it led to, all members would wait in vain
        membership.chain.release(held)

    def _has_come(self, held: Hold) -> bool:
        if held.leaving:
            return not held.leaving & set(self._membership.view.members)
        view = self._membership.view
        return view.generation > self._channel.generation or view.step >= held.step

    def _await_replica(self, step: int) -> None:
        """Wait until all ranks of this one's replica are at ``step``: others' gradients may be on their way there."""
        if self._membership.inside.size > 1:
            until(lambda: self._member.agreed_in >= step - 1, every_s=0.002, limit_s=_REPLICA_S)
