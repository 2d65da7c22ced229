"""How a rank that comes back gets the state of the job: from one member, in the background, between two steps.

The members let it in after step S. The leader copies its own state as it enters step S + 1 and sends it, while the
newcomer takes part at weight 0. With that state the newcomer's training thread goes on from step S + 1, and takes the
steps that were merged meanwhile from the ring.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Sampler

from straggle import world
from straggle.members.agents import ENDED_AT, IS_SPARE
from straggle.members.healed.ask_replica import all_have_state
from straggle.members.healed.pace import Pace
from straggle.members.healed.state_wire import Encoded, break_off, check_sendable, encode, receive, send
from straggle.members.member import Member
from straggle.members.regrouped.elastic import ElasticChannel
from straggle.members.views.view import TOO_FAR_BEHIND, Leaving, View
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.state.module_state import ModuleState
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.groups import gloo_group
from straggle.merge.wire.patience import Heard
from straggle.merge.wire.store import StoreUnreachable
from straggle.policies.history import History
from straggle.report import HealingReport
from straggle.source.source import GradientSource
from straggle.waits import NowAndThen, until

_SEND_S = 60.0  # for a message, and for the view in which the newcomers come in
_MEET_S = 10.0  # for two that are both there to connect
_WATCH_S = 0.2  # between two looks whether a state that is on its way is still awaited
_ASK_S = 0.5
_LOOK_S = 0.005  # between two looks of the training thread that waits
_SAY_S = 10.0  # of waiting after a step, before it is logged
_MAX_BYTES = 1 << 40
_OTHER_BYTES = 1 << 20  # of samplers, schedulers, and the policy's history

_log = logging.getLogger(__name__)


class Healing:
    """Gives and takes state for one wrapped model. The training thread calls everything but `arrived`."""

    def __init__(
        self,
        channel: ElasticChannel,
        rank: RankParts,
        coordinator: Coordinator,
        member: Member,
        state: ModuleState,
        source: GradientSource,
    ) -> None:
        self._channel, self._membership = channel, channel.membership
        self._rank, self._coordinator, self._member = rank, coordinator, member
        self._module_state, self._source = state, source
        self._registered: Mapping[str, Any] = {}
        self._arrival: _Arrival | None = None
        self._given_bytes = 0  # size of the state that was given last
        self.report = HealingReport()

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add objects whose ``state_dict()`` is given with the model. Raises ``TypeError`` for one without it."""
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(f"{name}={value!r} has no state_dict() and load_state_dict()")
        self._registered = {**self._registered, **objects}

    def before_step(self) -> None:
        """Between two steps: give this rank's state to a newcomer, or wait for another rank's state."""
        step = self._rank.training.step
        if self._member.gives_state:
            self._give(step)
        else:
            self._make_room()
        if self._rank.merging.takes_part_from > step:
            self._member.beside.lack()
        until(lambda: self._may_enter(step), every_s=_LOOK_S)
        self._member.goes_on()

    def _may_enter(self, step: int) -> bool:
        """Whether this rank takes part in ``step``, or is not to wait before it; takes a state if one has come."""
        while self._rank.merging.takes_part_from > step or self._arrival is not None:
            self._rank.check_ended()
            if self._member.notice.asked and self._member.is_out:  # it is not to come back
                return True
            self._member.is_between_steps()
            # each is read once: the thread of `Regrouping` writes both
            arrival, begins = self._arrival, self._rank.merging.takes_part_from
            if step < begins and (begins < sys.maxsize or step < self._membership.detector.furthest_step):
                return True  # its peers have made this step without this rank
            self._member.waits_for_state()
            if begins != step or arrival is None or arrival.state is None:
                return False
            self._take(arrival, arrival.state, loaders_too=False)
        return True

    def after_step(self) -> None:
        """After a step that was made without this rank, wait until the members let it in or end their loops.

        If this rank's loop ended now, its model would be older than the others'. Raises `JobDone` if their loops have
        ended.
        """
        member, following = self._member, self._coordinator.training.step
        is_long = NowAndThen(math.inf, after_s=_SAY_S)
        if self._rank.merging.takes_part_from >= following:
            member.beside.lack()

        def may_end() -> bool:
            takes_part = self._rank.merging.takes_part_from < following
            if takes_part or self._is_made(following) or (member.notice.asked and member.is_out):
                return True
            self._rank.check_ended()
            member.is_between_steps()
            member.waits_for_state()
            if is_long.is_due():
                _log.warning(
                    "rank %d was out in step %d, and its peers have not made step %d yet: it waits to be let in, or to "
                    "hear that their loops have ended",
                    self._channel.name,
                    following - 1,
                    following,
                )
            return False

        until(may_end, every_s=_LOOK_S)
        member.goes_on()

    def _is_made(self, step: int) -> bool:
        """Whether the members have made or begun this step, as far as this rank, which is no member, knows."""
        if (begins := self._rank.merging.takes_part_from) < sys.maxsize:
            return step < begins or ((arrival := self._arrival) is not None and arrival.state is not None)
        return step < self._membership.detector.furthest_step

    def take_first(self) -> None:
        """Wait for the state before the first step of a rank that comes to a running job, and go on from it.

        If another model of this process has its state, this one's comes when the loop is as far.
        """
        if self._member.beside.lacks_state:
            return
        began_at, heard = world.monotonic(), Heard(self._channel.patience.silent_s, world.monotonic)
        asks = NowAndThen(_ASK_S, after_s=self._channel.patience.give_up_s)
        self._member.waits_for_state()

        def arrived() -> _Arrival | None:
            arrival = self._arrival
            if arrival is not None and arrival.state is not None and self._was_reached(arrival.view):
                return arrival
            self._rank.check_ended()
            self._member.is_between_steps()  # also if it was put out because its state did not come
            if asks.is_due() and (why := self._given_up(world.monotonic() - began_at, heard)):
                raise PeerFailed(
                    f"rank {self._channel.name} has asked to be let in, and the members "
                    f"({self._membership.inside.named(self._membership.view.ranks)}) have not answered within {why}"
                )
            return None

        arrival = until(arrived, every_s=_LOOK_S)
        assert arrival is not None
        assert arrival.state is not None
        self._member.beside.is_first(arrival.state["others"])
        self._take(arrival, arrival.state, loaders_too=True)
        self._member.goes_on()

    def _given_up(self, waited_s: float, heard: Heard) -> str:
        """The limit that is over for all members; nothing if one may still be outside of its step, as in a pause."""
        patience = self._channel.patience
        try:
            places = {rank.place for rank in self._channel.places(self._membership.view.ranks, heard)}
        except StoreUnreachable:
            places = set()
        place = max(places, key=patience.limit_s, default=None)
        return patience.words(place) if waited_s >= patience.limit_s(place) else ""

    def _was_reached(self, view: View) -> bool:
        """Whether the coordinator has reached this view, or is past it; the state may arrive earlier."""
        return self._rank.merging.takes_part_from == view.step or self._channel.generation > view.generation

    def is_back(self) -> bool:
        """Whether the training thread would take a state, as far as the stages are planned."""
        return self._member.is_back and self._coordinator.is_planned

    def let_in(self, view: View) -> None:
        """This rank is a member again from ``view.step`` on; called by the thread of `Regrouping`."""
        # before the thread that receives it: an arrival of an older view is not awaited any more
        self._arrival = arrival = _Arrival(self._channel, view)
        self._membership.spawn(arrival.receive, lambda: self._arrival is arrival and self._membership.is_member)

    def leave_if_lost(self) -> None:
        """Leave if the state that this rank waits for will not come, or if it has fallen behind too far.

        If the others may not go on without it, a rank that fell behind stays a member and gives nothing; it leaves for
        a moment when its training thread is back.
        """
        if self._member.fell_behind:
            at_once = self._member.is_back or self._member.owes_state
            why = Leaving("returns", f"returns: {TOO_FAR_BEHIND}") if at_once else Leaving("restarted", TOO_FAR_BEHIND)
            self._membership.leave(why, for_good=False, if_spared=not at_once)
        elif lost := self._lost_state():
            self._membership.leave(Leaving("returns", f"returns: {lost}"), for_good=False)

    def _lost_state(self) -> str:
        """Why the awaited state will not come, or comes too late; empty if it may still come, or if none is awaited."""
        if (arrival := self._arrival) is None:
            return ""
        if (step := self._rank.training.step) > self._rank.merging.takes_part_from == arrival.view.step:
            return f"it was told to end, and went on to step {step} without the state of step {arrival.view.step}"
        if arrival.state is not None:
            return ""
        giver, members = arrival.view.giver, self._membership.view.members
        if members.get(giver) != arrival.view.members[giver]:
            return f"{self._membership.inside.kind} {giver}, which was to send it the state of the job, has left"
        return f"the state of the job did not come: {arrival.error}" if arrival.error is not None else ""

    def _make_room(self) -> None:
        """Take memory for the state if a newcomer asks; it is let in after the step in which that is done."""
        room = self._member.room
        if not self._membership.joins.wanted:
            room.forget()
        elif not room.is_asked_for and not self._membership.joins.refusal:
            try:
                take = room.ask(self._expected_bytes())
            except TypeError as error:
                self._refuse(error)
            else:
                self._membership.spawn(take)

    def _expected_bytes(self) -> int:
        """Expected size of the state; asks only objects that lend their tensors, as others may copy them or block.

        Raises ``TypeError`` if what they have cannot be sent.
        """
        lends = {
            name: value
            for name, value in self._registered.items()
            if name.startswith("straggle.") or isinstance(value, (nn.Module, Optimizer))
        }
        check_sendable(states := self._of_model(lends))
        return max(self._given_bytes, _num_bytes(states) + _OTHER_BYTES)

    def _refuse(self, error: TypeError) -> None:
        """Let no rank in, as none could go on without this state; the members train on."""
        _log.error("rank %d: no rank can come back to this job: %s", self._channel.name, error)
        self._membership.joins.refuse(f"the job's members cannot give it their state: {error}")

    def _give(self, step: int) -> None:
        began_at = world.monotonic()
        room = self._member.room.take_over()
        try:
            # a copy: the training thread goes on to change its state while another thread sends it
            encoded = encode(self._state(), room)
        except TypeError as error:  # of an object that was not asked before
            self._refuse(error)
            self._membership.spawn(self._send, encode(str(error)), step)  # no state: the newcomer asks again
            return
        self._given_bytes = len(encoded.data)
        was_there = room is not None and room.data_ptr() == encoded.data.data_ptr()
        _log.info(
            "rank %d: copied its state in %.3f s, into memory that was %s",
            self._channel.name,
            world.monotonic() - began_at,
            "there" if was_there else "taken for it",
        )
        self._membership.spawn(self._send, encoded, step)

    def _state(self) -> dict[str, Any]:
        rank, deadline = self._rank, self._coordinator.deadline
        of_model = self._of_model(self._registered)
        with rank.merging.lock:  # the stand-in may be adding a step: all three are as of the same one
            records = [rank.ring[number].record for number in sorted(rank.ring) if number >= rank.training.step]
            return {
                **of_model,
                "others": self._member.beside.steps(),
                "history": deadline.history.tensors(),
                "decided": deadline.decided,
                # of steps that are merged before the newcomer knows any deadline
                "decided_before": {record.step: record.decided for record in records},
            }

    def _of_model(self, registered: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the model and of these objects. Raises ``TypeError``, with the name, for one not to be sent."""
        module, given = self._source.given(self._source.module_state()), dict[str, Any]()
        for name, value in registered.items():
            state = value.state_dict()
            try:
                given[name] = self._source.given(state)
            except TypeError as error:
                raise TypeError(f"registered.{name}: {error}") from None
        return {"module": module, "registered": given}

    def _send(self, encoded: Encoded, step: int) -> None:
        until(lambda: self._membership.is_closed or self._giving_from(step), every_s=_LOOK_S, limit_s=_SEND_S)
        view = self._giving_from(step)
        if view is None or view.step > step:  # the newcomers were not let in after all
            return
        for rank in sorted(view.joined):
            pause = self._pace(encoded, step).pause
            try:
                with _pair(self._channel, view, rank, 0, partial(self._is_awaited_by, rank, view)) as pair:
                    send(encoded, pair, 1, pause)
            except (RuntimeError, ValueError, OSError) as error:
                there = self._channel.names[rank]
                _log.warning("rank %d could not send its state to rank %d: %s", self._channel.name, there, error)

    def _is_awaited_by(self, rank: int, view: View) -> bool:
        """Whether a newcomer of ``view`` still waits for this rank's state: both are members as they were then."""
        membership = self._membership
        return membership.is_member and membership.view.members.get(rank) == view.members[rank]

    def _giving_from(self, step: int) -> View | None:
        """The view in which this rank gives its state as of ``step``, or a later one, once it is there."""
        view = self._membership.chain.giving
        return view if view is not None and view.step >= step else None

    def _pace(self, encoded: Encoded, step: int) -> Pace:
        """The pace of a state as of ``step``: no more is to be merged meanwhile, in bytes, than the state has."""
        coordinator = self._coordinator
        most = max(coordinator.deadline.late_handling.max_lag, len(encoded.data) // max(1, coordinator.num_bytes))
        return Pace(self._is_merging, lambda: self._membership.step >= step + most)

    def _is_merging(self) -> bool:
        with self._rank.merging.lock:
            return self._member.travels()

    def _take(self, arrival: _Arrival, state: Mapping[str, Any], *, loaders_too: bool) -> None:
        """Go on from a state; ``loaders_too``: as a new process does, whose loop has drawn nothing from them yet."""
        before, view = self.report, arrival.view
        seconds, nbytes = world.monotonic() - arrival.began_at, _num_bytes(state)
        self.report = HealingReport(before.num_states + 1, before.nbytes + nbytes, before.seconds + seconds)
        if self._arrival is arrival:  # or another view has let this rank in meanwhile, whose state is still to come
            self._arrival = None
        of_model = self._source.taken({name: state[name] for name in ("module", "registered")})
        self._module_state.load_module(of_model["module"], self._source.load_module)
        for name, own in of_model["registered"].items():
            value = self._registered.get(name)
            if value is not None and (loaders_too or not is_loader(value)):
                value.load_state_dict(own)
        # last: from here on this rank's gradients may count, and all of its state is to be in place
        history = History.from_tensors(state["history"])
        self._member.beside.has_state()
        self._member.healed(view.step, history, state["decided"], state["decided_before"])
        if not self._member.is_out:
            _log.warning(
                "rank %d takes part again from step %d on%s",
                self._channel.name,
                view.step,
                since_its_end(os.environ, world.monotonic()),
            )


def since_its_end(environment: MutableMapping[str, str], now: float) -> str:
    """How long ago this rank's process before ended, said once, if this one was started for it on the same machine."""
    if (ended_at := environment.pop(ENDED_AT, None)) is None:
        return ""
    what = "a spare took its place" if IS_SPARE in environment else "it was started again"
    return f": {what}, and has the state {now - float(ended_at):.2f} s after its end"


def is_loader(value: object) -> bool:
    """Whether the loop draws its data from this, so that its place is this rank's own: the loop walks on with it.

    A loader or sampler of torch's, an iterator, or a stream, which has no length. Whatever else can be iterated over
    holds what all ranks have alike, as a module does, or deals by what all have seen, as `DealtLoader` does.
    """
    if isinstance(value, nn.Module):
        return False
    return isinstance(value, DataLoader | Sampler | IterableDataset | Iterator) or (
        isinstance(value, Iterable) and not isinstance(value, Sized)
    )


class _Arrival:
    """A state on its way to this rank, on a thread of its own. In a replica it is there when all ranks have theirs."""

    def __init__(self, channel: ElasticChannel, view: View) -> None:
        self.view = view
        self.began_at = world.monotonic()
        self.state: dict[str, Any] | None = None
        self.error: Exception | None = None
        self._channel = channel

    def receive(self, awaits: Callable[[], bool]) -> None:
        """Receive it; ``awaits()``: whether this rank still waits for it."""
        try:
            with _pair(self._channel, self.view, self._channel.rank, 1, awaits) as pair:
                state = receive(pair, 0, max_bytes=_MAX_BYTES)
            if not isinstance(state, dict):
                raise ValueError("what came is no state")
            self._check_replica(awaits)
            self.state = state  # last, and whole: the training thread takes it as soon as it is there
        except Exception as error:  # any error, such as too little memory: otherwise this rank would wait for ever
            self.error = error

    def _check_replica(self, awaits: Callable[[], bool]) -> None:
        """Wait until the other ranks of the replica have theirs, too."""
        membership = self._channel.membership
        if (inside := membership.inside).size > 1:
            own, ranks = inside.rank(member := membership.rank), inside.ranks(member)
            key, lent = f"have/{self.view.generation}/{member}", membership.connections.lent
            if not all_have_state(lent, key, own, ranks, awaits):
                raise RuntimeError("another rank of its replica has not got its own")


@contextmanager
def _pair(channel: ElasticChannel, view: View, rank: int, place: int, is_awaited: Callable[[], bool]) -> Iterator[Any]:
    """A group of two, the giver at place 0 and one newcomer at place 1, while the state is awaited.

    Raises ``RuntimeError`` here, and in what is sent or received in the block, once it is not.
    """
    membership, has_ended = channel.membership, world.Event()

    def is_over() -> bool:
        return has_ended.is_set() or membership.is_closed or not is_awaited()

    with membership.connection(f"state/{view.generation}/{rank}") as store:
        store.set(f"here/{place}", "")
        # gloo's own wait for the other one cannot be interrupted; this one can
        until(lambda: is_over() or store.check([f"here/{1 - place}"]), every_s=_LOOK_S, limit_s=_SEND_S)
        if is_over():
            raise RuntimeError("the state is not awaited any more")
        pair = gloo_group(store, place, 2, _MEET_S)
    pair._set_default_timeout(timedelta(seconds=_SEND_S))

    def watch() -> None:
        until(is_over, every_s=_WATCH_S, pause=has_ended.wait)
        if not has_ended.is_set():
            break_off(pair, 1 - place)

    # by another thread: what gloo sends or receives ends only when its connection does
    membership.spawn(watch)
    try:
        yield pair
    finally:
        has_ended.set()


def _num_bytes(state: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(_num_bytes, values))
