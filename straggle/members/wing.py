"""Members as an optional part of a wrapped model: what is done for them in each phase of a step."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from straggle.members.healed.ask_replica import AskReplica
from straggle.members.healed.healing import Healing
from straggle.members.member import Member
from straggle.members.own.group import LoopGroup, give_back, take_place
from straggle.members.own.in_flight import InFlight
from straggle.members.own_collectives import OwnCollectives
from straggle.members.regrouped.completion import MembersCompletion
from straggle.members.regrouped.elastic import ElasticChannel
from straggle.members.regrouped.regrouping import MembershipEvents, Regrouping
from straggle.members.rows import ADMITS, LEAVES, PROBE_NUMBER, PROBE_S, PROBED
from straggle.members.slow.probe import Probes
from straggle.members.slow.put_out import PutOut
from straggle.members.views.membership import JobDone
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.telemetry import Row
from straggle.merge.state.module_state import ModuleState
from straggle.merge.wing import Wing
from straggle.merge.wire.channel import PeerFailed, comes_of_peer
from straggle.report import HealingReport, MembersReport
from straggle.source.source import GradientSource
from straggle.waits import until

_GONE_S = 1.5  # more than what it takes to suspect a rank whose connection broke

_log = logging.getLogger(__name__)

OnChanged = Callable[[MembersReport], None]


class Members(Wing):
    """The wing of ranks that leave and come back. It is built before the coordinator, which `attach` passes to it.

    ``comes_late``: the job runs already, and this process has not yet asked to be let in.
    ``begin_with_plan(order, seconds)``: plan the stages as the running job did.
    """

    option, goes_on, keeps_stages = "members", True, True

    def __init__(self, rank: RankParts, channel: ElasticChannel) -> None:
        self.channel, self._rank = channel, rank
        self.member = Member(rank, channel.membership, channel.number)
        self.completion = MembersCompletion(rank, self.member)
        self.departure = self.member.notice
        self.comes_late = channel.comes_late
        self._heard_at_entry = False  # of an error that has ended the job for this rank
        self.own: InFlight | None = None
        self._group: LoopGroup | None = None
        self._probes = Probes(rank.stopwatch.now, self._tell_probe)
        self._own_collectives = OwnCollectives(channel.membership, known_s=_GONE_S)
        rank.stand_in.need_no_room()  # a rank that is far behind takes a state instead

    def attach(
        self,
        coordinator: Coordinator,
        state: ModuleState,
        *,
        max_buckets: int,
        on_changed: OnChanged,
        begin_with_plan: Callable[[list[int], list[float]], None],
        shared: Mapping[str, Any],
        source: GradientSource,
    ) -> None:
        """Connect the coordinator. ``shared``: objects of the library whose state a returning rank needs."""
        self._coordinator, self._begin_with_plan = coordinator, begin_with_plan
        put_out: dict[str, Any] = {}
        vote = self._rank.replica.vote
        if vote is None or self.channel.membership.inside.size == 1:
            put_out["straggle.put_out"] = slow = PutOut(self.channel.membership, num_bytes=coordinator.num_bytes)
            self.member.judge_slow(slow)
        else:  # each shard has rows and links of its own: no replica is put out because it is slow
            vote.ask_too(AskReplica(self.member, self.channel.membership))
        self.healing = healing = Healing(self.channel, self._rank, coordinator, self.member, state, source)
        events = MembershipEvents(healing.let_in, healing.leave_if_lost, on_changed, healing.is_back)
        self.own = self._own_collectives_of_default_group()
        self.regrouping = Regrouping(self.channel, self.member, events, max_buckets=max_buckets, own=self.own)
        self.healing.register({**put_out, **shared})
        if self.comes_late:
            self.member.put_out()

    def _own_collectives_of_default_group(self) -> InFlight | None:
        channel = self.channel
        if channel.membership.inside.size > 1:  # its ranks know of their own shard's members
            return None
        own = InFlight(
            channel.membership,
            name=channel.name,
            limit_s=channel.patience.outside_s,
            give_up_s=channel.give_up_s,
            ended=lambda: channel.ended,
            drop=channel.drop,
        )
        self.member.lead(own)
        return own

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, as far as this rank knows."""
        return self.channel.membership.view.ranks

    def put_out_ranks(self) -> frozenset[int]:
        """The ranks that are no members, or are about to be none, because they are slow."""
        return self.member.slow.out if self.member.slow is not None else frozenset()

    @property
    def report(self) -> HealingReport:
        """The states that this rank has taken from its peers to take part again."""
        return self.healing.report

    def register(self, objects: Mapping[str, Any]) -> None:
        """Register, before the loop, what a returning rank needs. A rank that comes late waits for its state here."""
        self.healing.register(objects)
        if self.comes_late:
            self._come_late()
            self.healing.take_first()

    def _come_late(self) -> None:
        """Ask the members of the running job to be let in."""
        self.comes_late = False
        self.channel.membership.joins.tell_probe(*self._of_new_process())
        order, seconds = self.channel.plan()
        self._begin_with_plan(list(map(int, order)), seconds)
        self._coordinator.make_spare()
        if (step := self.member.beside.begins_at) is not None:
            self.member.begin_at(step)
        self.regrouping.start()
        self.regrouping.ask()

    # -- phases

    def built(self) -> None:
        """Follow the members, unless this rank has yet to ask to be let in."""
        self._own_collectives.begin(comes_late=self.comes_late)
        if self.own is not None and (group := take_place(self.own)) is not None:
            self._group = group
            if not self.comes_late:
                self.own.built(self.channel.membership.view)
        if not self.comes_late:
            self.regrouping.start()

    def enter(self) -> None:
        """Give this rank's state to a newcomer, or wait for another rank's state.

        A loop that caught what ended the job for this rank hears it once more, and is ended in the step after that: it
        would go through its data without a gradient, and its process would end as if it had done its work.
        """
        end = self._rank.stand_in.error
        if end is not None and self._heard_at_entry and not isinstance(end, JobDone):
            why = "the loop has caught this and goes on, and none of its steps is merged: it is ended"
            raise SystemExit(f"{end}; {why}")
        self._heard_at_entry = end is not None
        self._rank.stand_in.know(False)
        if self.comes_late:
            self._come_late()
        self.member.beside.entered()
        own_s = self._probes.came()
        if self.channel.membership.inside.size == 1:  # the others of a replica cannot know in which pass it raised
            self.regrouping.ask_anew()
        self.healing.before_step()
        if not self.member.is_out_for_work:
            self._probes.forget()
        elif self._probes.enter(own_s, self.channel.membership.detector.furthest_step - self._rank.training.step):
            self.member.probe()

    def _of_new_process(self) -> tuple[float, float]:
        """Of this process nobody knows how slow it is; the number is that of no other, and exact in a row."""
        return -1.0 - zlib.crc32(self.channel.membership.incarnation.encode()) % 2**20, 0.0

    def _tell_probe(self, seconds: float) -> None:
        """Say with the next request to be let in what a step of this rank's own work takes now."""
        step = self._rank.training.step
        self.channel.membership.joins.tell_probe(float(step + 1), seconds)
        _log.info("rank %d: %.3f s for a step of its own, while it is no member", self._rank.channel.name, seconds)

    def stands_in(self) -> None:
        """Drop the ring if no more merged steps may wait for the training thread."""
        self.member.fall_behind_if_full()

    def submit(self, current: Round, row: Row) -> Row:
        """Add to the row whether newcomers may come in after this step, and whether this rank is to leave."""
        if probes := self.channel.membership.joins.probes:
            rank = sorted(probes)[current.step % len(probes)]
            row = row.telling({PROBED: rank + 1, PROBE_NUMBER: probes[rank][0], PROBE_S: probes[rank][1]})
        if leaves := self.member.leaves(current):
            return row.telling({LEAVES: leaves})
        return row.telling({ADMITS: 1}) if self.member.admits(current) else row

    def leave(self) -> None:
        """Raise the error that ended the job, if any, and note that the work of a probe's step is over."""
        self._rank.check_ended()
        self._probes.leave()

    def rows_merged(self, current: Round) -> None:
        """Clear the rows of ranks that were no members."""
        self.member.rows_merged(current)

    def merged(self, current: Round) -> None:
        """Note which ranks have their state, which are let in, and which are slow."""
        self.member.merged(current)

    def taken(self) -> None:
        """A healed rank has caught up by one step."""
        self.member.taken()

    def left(self, current: Round) -> None:
        """Collectives of the loop's own are those of the members that have made this step."""
        if self.own is not None:
            self.own.left(current.step)

    def last(self, current: Round) -> None:
        """Wait until it is known whether this rank's loop goes on."""
        notice = self.member.notice
        if notice.has_left and notice.ends_after(current.step):
            self.member.put_out()
        else:
            self.healing.after_step()
        if self.member.is_out:
            self._probes.left()

    def failed(self, what: str, error: BaseException) -> None:
        """Leave the members, so that the peers go on."""
        self._rank.stand_in.know(True)
        membership = self.channel.membership
        if membership.inside.size > 1 and comes_of_peer(error):
            self._await_view_without_replica()  # which names the rank that is gone, as this error does not
        membership.leave_with_an_error(what)
        if not membership.is_member:
            # at once: otherwise its next step could begin before the other thread has seen the new view
            self.member.put_out()

    def _await_view_without_replica(self) -> None:
        """A collective inside of the replica broke: raise `PeerFailed` if the members find a rank of it gone soon."""
        membership = self.channel.membership
        membership.detector.connection_broke(of_replica=True)
        until(lambda: membership.lost, every_s=0.01, limit_s=_GONE_S)
        self._rank.check_ended()
        if not membership.is_member:
            membership.leave_for_good()  # what the ranks of the replica have in common is broken
            raise PeerFailed(self.regrouping.of_lost_replica(membership.lost))

    def close(self) -> None:
        """End the thread that follows the members."""
        self._own_collectives.close(self.channel.uncaught)
        if self.own is not None:
            self.own.close()
        if self._group is not None:
            give_back(self._group)
        if (why := self.member.notice.why_it_ends) is not None:
            self.channel.membership.ends_as_told(why)
        self.regrouping.close()
        self.member.close()
