"""This rank as a member of a job whose members change: since when it is a member, and what it lacks when it is back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from straggle.members.away import Away
from straggle.members.healed.beside import Beside
from straggle.members.healed.newcomers import Backlog, LetsIn
from straggle.members.healed.state_wire import StateRoom
from straggle.members.notice import Notice
from straggle.members.own.in_flight import InFlight
from straggle.members.regrouped.moved_round import Notes, RoundNotes, freeze, go_on, travels
from straggle.members.rows import admits, admits_of, leaving_ranks
from straggle.members.slow.put_out import PutOut
from straggle.members.views.membership import Membership
from straggle.members.views.view import MergeProgress, Repair, View
from straggle.members.views.view_chain import Hold
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.table import Table
from straggle.merge.wire.groups import ProcessGroups
from straggle.policies.history import History
from straggle.policies.network.rank_links import RankLink

_NEWCOMERS_LAG = 64  # steps that are merged before a rank which was let in counts as stuck
_log = logging.getLogger(__name__)


class Member:
    """The state of this rank that follows the members; a part of the coordinator.

    It has three kinds of callers. The thread of `Regrouping` calls `freeze`, `telemetry_of`, `regroup`, `put_out` and
    `end`; `healing.py` calls the methods after them; all of these take the lock. The methods at the end are called by
    the coordinator and its parts, which hold the lock. ``is_back`` and ``_awaits_state`` are set by the training
    thread alone. ``number``: that of the model among those of its process, the same on all ranks.
    """

    def __init__(self, rank: RankParts, membership: Membership, number: int) -> None:
        self._rank = rank
        self._lock = rank.merging.lock
        self._membership = membership
        membership.detector.follow_step(lambda: self.is_in_step)
        self.notice = Notice(membership, is_out=lambda: self.is_out)
        self._own: InFlight | None = None  # collectives of the loop's own, if they follow the members
        self.slow: PutOut | None = None  # who is put out because it is slow; `None`: no rank
        self.changed_in = -1  # the step in which the members changed last, the same on all of them
        self.is_closed = False  # the model is
        self.fell_behind = False  # a member that needs a state, because more steps were merged than may wait for it
        self.is_back = False  # the training thread has been between two steps since
        self._awaits_state = False  # it waits for its state and does nothing else
        self.room = StateRoom()  # for its state's copy
        self._backlog = Backlog()
        self._lets_in = LetsIn()
        self._away = Away(rank)
        self._healing: frozenset[int] = frozenset()  # members that wait for their state
        self._notes = RoundNotes()
        self._last_telemetry = torch.empty(0)  # of the last merged step, for a member that lacks it
        self.beside = Beside(number, rank.training, self)
        self.agreed_in = -1  # the last step that all ranks of this rank's replica have merged

    @property
    def is_out(self) -> bool:
        """Whether this rank is no member, or waits for the view that lets it in."""
        return self._rank.merging.takes_part_from == sys.maxsize and not self.fell_behind

    @property
    def is_out_for_work(self) -> bool:
        """Whether it is no member because its work takes too long, and may show that it does no more."""
        left = self._membership.chain.left
        return self.is_out and left is not None and left.kind == "slow" and not self._rank.training.collectives.gathers

    @property
    def is_in_step(self) -> bool:
        """Whether the training thread is in a step, and not between two; from any thread."""
        return self._rank.training.entered_at is not None

    @property
    def knows_end(self) -> bool:
        """Whether the training thread has raised what ended the job for this rank, or an error of its own."""
        return self._rank.stand_in.is_known

    def notes_of(self, current: Round) -> Notes:
        """The notes kept with a round, with the current members' ranks."""
        return self._notes.of(current, self._rank.rounds.ranks)

    def travels(self) -> bool:
        """Whether anything of the step that is being merged is still in flight; with the lock held."""
        current = self._rank.merging.round
        return current is not None and travels(current, self._notes.found(current))

    # -- the members change; called by the thread of `Regrouping`

    def freeze(self) -> MergeProgress:
        """The members change: launch nothing before `regroup`. Returns how far this rank has come."""
        with self._lock:
            return self._freeze()

    def _freeze(self) -> MergeProgress:
        self._rank.channel.begin_epoch()
        self._rank.rounds.merge_among_none()
        if self.is_out:
            return MergeProgress(-1)
        current, step = self._rank.merging.round, self._rank.merging.step
        progress = MergeProgress(step) if current is None else freeze(current, self.notes_of(current))
        return replace(progress, is_first=step == self._backlog.came_in_at)

    def telemetry_of(self, step: int) -> Tensor:
        """The merged telemetry of ``step``, for members that lack it; zeros if this rank has none."""
        merging = self._rank.merging
        with self._lock:
            if merging.round is not None and merging.round.step == step:
                return merging.round.buffers.telemetry.clone()
            if merging.step == step + 1 and len(self._last_telemetry):
                return self._last_telemetry.clone()
            return torch.zeros_like(self._rank.rounds.new_buffers().telemetry)

    def regroup(self, groups: ProcessGroups, view: View, repair: Repair, telemetry: Tensor) -> None:
        """Go on among the members of ``view``; ``telemetry`` of the step that is complete on some of them."""
        merging = self._rank.merging
        with self._lock:
            if merging.round is not None:
                self.notes_of(merging.round)  # made now, with the ranks of the old view
            self._rank.rounds.merge_among(groups, view.ranks, view.generation)
            self.changed_in = repair.step
            self._lets_in.follow(view.step)
            self._note_healing((self._healing | view.joined) & set(view.ranks))
            self._rank.deadline.of_ranks(len(view.ranks))
            new = self._rank.channel.rank in view.joined and merging.takes_part_from == sys.maxsize
            if new:
                self._come_in(view, repair)
            if self.slow is not None:
                self.slow.follow(view, repair.step, new=new)
            if (current := merging.round) is not None:
                device = self._rank.device
                device.wait_for_all()  # here the round is copied by a queue of which no other thread's knows
                self._go_on(current, groups, view, repair, telemetry, new=new)
                device.wait_for_all()
            merging.step_merged.notify_all()

    def _go_on(
        self,
        current: Round,
        groups: ProcessGroups,
        view: View,
        repair: Repair,
        telemetry: Tensor,
        *,
        new: bool,
    ) -> None:
        """Go on with the round that is being merged."""
        notes = self.notes_of(current)
        if current.step == repair.completed:
            current.buffers.use_telemetry(telemetry)
            notes.found_complete()
        elif current.step == repair.step:
            place_of = {rank: place for place, rank in enumerate(view.ranks)}
            renew = self._rank.rounds.new_buffers
            go_on(current, notes, groups, repair, place_of, renew, new=new, generation=view.generation)

    def _come_in(self, view: View, repair: Repair) -> None:
        """This rank is let in; it gives no gradients until it has its state."""
        training, merging = self._rank.training, self._rank.merging
        merging.take_part_from(view.step)
        self._backlog.begin_anew()
        self._membership.detector.note_own(is_out=False)
        merging.restore(repair.step)
        self._backlog.came_in(repair.step)
        merging.begin_now(self._rank.stopwatch.now())
        training.stops.up_to(view.step - 1)
        if repair.num_launched:
            self._rank.rounds.begin(training, merging)
        self._rank.stand_in.give_nothing(True)

    def lead(self, own: InFlight) -> None:
        """Collectives of the loop's own follow the members from here on."""
        self._own = own

    def judge_long_merge(self, links: Sequence[RankLink]) -> None:
        """Judge the links that this rank has measured during a merge that takes many times as long as usual."""
        with self._lock:
            if self.slow is not None:
                self.slow.long_merge(links)

    def put_out(self) -> None:
        """This rank is no longer a member: its steps have no merge until it is let in again."""
        merging = self._rank.merging
        with self._lock:
            self._rank.channel.begin_epoch()
            self._rank.rounds.merge_among_none()
            merging.take_part_from(sys.maxsize)
            self._lets_in.stop()
            self._membership.detector.note_own(is_out=True)
            if (current := merging.round) is not None:  # whoever still has it would hold the groups' connections
                current.let_go()
                self.notes_of(current).forget_message()
            self.is_back = self.is_back and self.fell_behind  # if it fell behind, it is known already that it was away
            self.fell_behind = False
            merging.restore(merging.step)
            self._rank.ring.clear()
            self._rank.stand_in.rest()
            self._rank.training.stops.up_to(sys.maxsize)
            if self.slow is not None:
                self.slow.begin_anew()
            merging.step_merged.notify_all()
        if self._own is not None:
            self._own.put_out()

    def close(self) -> None:
        """The model is closed: whoever waits for the members to agree on a view waits in vain."""
        with self._lock:
            self.is_closed = True
            self._rank.merging.step_merged.notify_all()

    def end(self, error: BaseException) -> None:
        """The job ends here."""
        with self._lock:
            self._rank.stand_in.end(error)

    # -- this rank's state, given and taken; called by `healing.py`, on the training thread

    def judge_slow(self, put_out: PutOut) -> None:
        """From the first step on, members that are slow are put out as this says."""
        self.slow = put_out

    def is_between_steps(self) -> None:
        """Note that the training thread is between two steps, and would take a state there."""
        self.is_back = True

    def waits_for_state(self) -> None:
        """Note that it waits for its state, and does nothing else."""
        self._awaits_state = True

    def goes_on(self) -> None:
        """Note that it waits no more."""
        self._awaits_state = False

    @property
    def gives_state(self) -> bool:
        """Whether a newcomer is to go on from the state with which the training thread enters its step."""
        return self._lets_in.gives_at == self._rank.training.step

    @property
    def owes_state(self) -> bool:
        """Whether a newcomer waits for the state of a step that the training thread has not entered yet."""
        return self._lets_in.gives_at >= self._rank.training.step

    def healed(
        self,
        step: int,
        history: History,
        decided: Mapping[str, float],
        decided_before: Mapping[int, Mapping[str, float]],
    ) -> None:
        """The training thread has its peers' state at the beginning of ``step``, and takes part from there on.

        ``decided``: what the giver's deadline had `decided` for the step that followed ``history``, and
        ``decided_before`` for those that it had merged since ``step``.
        """
        training, merging, deadline, ring = (
            self._rank.training,
            self._rank.merging,
            self._rank.deadline,
            self._rank.ring,
        )
        with self._lock:
            training.restore(step)
            if self.is_out:  # it was put out meanwhile, and walks on
                return
            # it takes no part in a step that the stand-in has submitted meanwhile either: its work there is not merged
            training.stops.only_up_to(max(step - 1, merging.step if merging.submitted else merging.step - 1))
            for number in [number for number in ring if number < step]:
                del ring[number]
            deadline.restore(history, decided)
            for number, of_step in decided_before.items():
                if (merged := ring.get(number)) is not None:
                    merged.correct(merged.record.as_decided(**of_step))
            for number, table in self._backlog.healed(training.step):
                if number >= history.num_steps:
                    self._decide_again(number, table)
                self._judge(number, table)
            self._note_healing(self._healing)
            self._end_healing_if_caught_up()

    def _decide_again(self, number: int, table: Table) -> None:
        """Decide the next deadline as the peers did; the step's own was recorded by what this rank knew then."""
        deadline = self._rank.deadline
        deadline_s, shadow_s = deadline.seconds, deadline.shadow_s
        deadline.decide(table)
        if (merged := self._rank.ring.get(number)) is not None:
            own_s = {"deadline_s": deadline_s, "shadow_s": shadow_s, "after_quorum_s": deadline.after_quorum_s}
            merged.correct(merged.record.as_decided(**own_s, **vars(deadline.usual_cost)))

    def begin_at(self, step: int) -> None:
        """The training thread is out, and begins with this step as if it had gone through those before."""
        self.beside.lack()
        with self._lock:
            self._rank.training.restore(step)

    def wait_for_others(self) -> None:
        """Give nothing until this process has the states of its other models."""
        with self._lock:
            if not (self.is_out or self._rank.stand_in.gives_nothing):
                self._backlog.healed(self._rank.training.step)
                self._rank.stand_in.give_nothing(True)

    @property
    def has_ended(self) -> bool:
        """Whether no step of this model is made here any more."""
        return self.is_closed or self._rank.stand_in.error is not None

    def probe(self) -> None:
        """The training thread goes through the step that it is about to enter, though nothing of it is merged."""
        with self._lock:
            if self.is_out:
                self._rank.training.stops.probe(self._rank.training.step)

    # -- the ranks of a replica, after each merged step; on the training thread

    def asks(self, wanted: int) -> int:
        """``wanted``, if this rank could let others in after the step that it is about to enter, and else 0."""
        with self._lock:
            return wanted if self._is_up_to_date and not self.owes_state and self._could_admit() else 0

    def is_to_leave(self) -> bool:
        """Whether this rank could leave after the step that it is about to enter, because it was told to end."""
        with self._lock:
            return self.notice.needs > 0 and self._rank.stand_in.started and (self.is_out or self._is_up_to_date)

    @property
    def lacks_step(self) -> bool:
        """Whether the training thread went through its last step without taking part in it."""
        return self._rank.training.step <= self._rank.merging.takes_part_from

    def lose_state(self) -> None:
        """Another rank of the replica lacks the step: what this one has, it has alone, and it takes a state as well."""
        with self._lock:
            if not self.lacks_step:
                self._need_state()

    @property
    def _is_up_to_date(self) -> bool:
        """Whether the training thread is about to enter the step that is merged next, with the state for it."""
        merging, step = self._rank.merging, self._rank.training.step
        is_next = merging.takes_part_from <= step == merging.step and not merging.submitted
        return is_next and not self._backlog.catches_up

    def answered(self, *, agreed: bool, leaves: bool) -> None:
        """All ranks of the replica have merged the step; ``agreed``: they let others in after the next one.

        The states that they give are of one step. If another thread has merged the next step here meanwhile, members
        are held all the same, or those of other shards would wait for the new view for ever; but not if that view is
        followed here already, since none comes after it. ``leaves``: they leave.
        """
        with self._lock:
            step = self._rank.training.step
            self.agreed_in = step - 1
            if leaves:
                self.notice.leave_after(step)
            if agreed and self._lets_in.agreed(step) and self._rank.merging.step > step:
                self._hold(step)

    # -- both threads, with the lock held

    def admits(self, current: Round) -> bool:
        """Whether ranks that ask may come in after this round's step, as far as this rank is concerned.

        A rank that is stood in for could not give its state, and one without memory for the copy would give it late.
        Before the stages are planned no rank can merge with newcomers. The ranks of a replica have agreed before.
        """
        if self._membership.inside.size > 1:
            return self._lets_in.admits_after(current.step)
        return self._could_admit() and not current.stood_in

    def _could_admit(self) -> bool:
        return (
            bool(self._membership.joins.wanted)
            and not self.notice.asked
            and self.room.is_taken
            and self._rank.stand_in.started
        )

    def leaves(self, current: Round) -> int:
        """As this rank's row has it, for a step that it submits; before the stages are planned no rank leaves."""
        return self.notice.needs if self._rank.stand_in.started and self.notice.may_leave_after(current.step) else 0

    def rows_merged(self, current: Round) -> None:
        """Clear the rows of ranks that were no members when rows were merged; the members may have changed since."""
        notes = self.notes_of(current)
        current.rows_changed()
        if len(notes.row_ranks) < (count := self._rank.replica.count):
            absent = current.layout.absent_row()
            for rank in set(range(count)) - set(notes.row_ranks):
                current.buffers.rows[rank] = absent
        self._last_telemetry = current.buffers.telemetry.clone()

    def merged(self, current: Round) -> None:
        """A step is merged: note which ranks have their state, and which are let in.

        If another member had this step complete earlier, the members have changed since. Then newcomers after this step
        are decided already: no view comes that this rank could wait for. So it is if their view is followed already.
        """
        membership, step, table = self._membership, current.step, current.table
        if self.fell_behind:  # a rank that is to take a state needs nothing of the ring
            self._rank.ring.clear()
        place, stood_in = self._rank.replica.place, table.stood_in_ranks()
        membership.merged(self._rank.merging.step)
        self._note_healing(self._healing & stood_in)
        membership.detector.note_healing(stood_in)
        if missed := stood_in - self._healing:
            speaks = place == min(set(self._rank.rounds.ranks) - stood_in, default=-1)
            self._away.merged(step, missed, table.away_ranks(), speaks=speaks)
        if self._rank.stand_in.gives_nothing and not self._backlog.catches_up and not self.fell_behind:
            self._backlog.merged(step, table)
        else:
            self._judge(step, table)
        if self._backlog.catches_up and stood_in >= set(self._rank.rounds.ranks):
            self._end_healing()  # the others have ended or are no further: none of them waits for this rank
        self.notice.merged(step, table, place)
        if self._own is not None:
            present = frozenset(range(table.num_ranks)) - table.absent_ranks() - leaving_ranks(table)
            self._own.merged(step, present, stood_in)
        if leaving := leaving_ranks(table):
            self._leave(step, leaving, complete=self.notes_of(current).complete)
        elif self._lets_in.admits_after(step):
            self._hold(step)  # whoever else holds: without this rank nothing of the next step is merged
        elif admits(table) and self._lets_in.is_open(step) and not self.notes_of(current).complete:
            leads = membership.inside.size == 1 and admits_of(table, place)
            if leads:
                self._lets_in.gives_after(step)
            self._freeze()  # so that nothing of the next step is in flight when newcomers come in
            membership.chain.hold(Hold(step + 1, leads))
        # it has the connections of its groups, which take 10 ms each to close: not when the loop drops this round
        self.notes_of(current).forget_message()

    def _hold(self, step: int) -> None:
        """This rank's replica lets others in after ``step``: one of its ranks writes the view, for all shards."""
        self._freeze()
        self._membership.chain.hold(Hold(step + 1, leads=self._membership.inside.shard == 0))

    def _leave(self, step: int, leaving: frozenset[int], *, complete: bool) -> None:
        """These ranks leave after ``step``: the others form their groups while they compute the next one.

        ``complete``: another member had this step earlier, and the members have changed since.
        """
        if not complete:
            self._freeze()
        leads = self._rank.channel.rank == min(set(self._rank.rounds.ranks) - leaving, default=-1)
        self._membership.chain.hold(Hold(step + 1, leads, leaving))

    def _judge(self, step: int, table: Table) -> None:
        if self.slow is not None:
            self.slow.merged(step, table, len(self._rank.rounds.plan.buckets()), self._rank.rounds.plan.shares)

    def _note_healing(self, ranks: frozenset[int]) -> None:
        self._healing = ranks
        own = {self._rank.channel.rank} if self._backlog.catches_up else set()
        self._membership.detector.note_healing(ranks, without_state=ranks - own)

    def taken(self) -> None:
        """Note that the training thread has taken a merged step."""
        self._backlog.taken(self._rank.merging.step)
        self._end_healing_if_caught_up()

    def fall_behind_if_full(self) -> None:
        """If the ring is full, drop it: the training thread takes a peer's state when it is back.

        The peers do not wait for this rank meanwhile.
        """
        if not self._ring_is_full():
            if not self._rank.stand_in.gives_nothing:
                self._away.stands_in()
            return
        _log.warning(
            "rank %d has been %s step %d while %d steps were merged (max_lag=%d): it takes the state of a peer "
            "when it is back",
            self._rank.channel.name,
            f"in {self._rank.stopwatch.phase} of" if self.is_in_step else "between two steps, before",
            self._rank.training.step,
            self._rank.lag,
            self._rank.deadline.late_handling.max_lag,
        )
        self._need_state()

    def _need_state(self) -> None:
        self.fell_behind, self.is_back = True, False
        self._rank.merging.take_part_from(sys.maxsize)
        self._rank.ring.clear()
        self._backlog.begin_anew()
        self._rank.training.stops.up_to(sys.maxsize)
        self._rank.stand_in.give_nothing(True)

    def _ring_is_full(self) -> bool:
        """Whether no more merged steps may wait for the training thread.

        A rank that was let in may keep as many as it needs to catch up, unless it is stuck.
        """
        max_lag = self._rank.deadline.late_handling.max_lag
        if self._rank.stand_in.gives_nothing:
            stuck = self._backlog.none_taken_for(self._rank.merging.step) >= max(max_lag, _NEWCOMERS_LAG)
            return stuck and not (self._awaits_state or self.fell_behind)
        return len(self._rank.ring) - int(self._rank.training.taking) >= max_lag

    def _end_healing_if_caught_up(self) -> None:
        """End healing if it has taken the steps merged meanwhile; until then it gives nothing and nobody waits.

        Nor before this process has the states of all models: gradients through another one would be of none.
        """
        rank = self._rank
        if not self.beside.lack_state() and self._backlog.is_caught_up(rank.training.step, rank.merging.step, rank.lag):
            self._end_healing()

    def _end_healing(self) -> None:
        self._backlog.is_over()
        self._rank.stand_in.give_nothing(False)
