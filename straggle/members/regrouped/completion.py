"""When a round counts as merged in a job whose members change: as soon as all members have all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from straggle.members.member import Member
from straggle.members.regrouped.moved_round import Notes, without_lost
from straggle.members.rows import ADMITS
from straggle.merge.round.merged_steps import Completion
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.wire.channel import GroupsChanged, PeerFailed
from straggle.merge.wire.groups import ProcessGroups, succeeded
from straggle.merge.wire.store import StoreUnreachable


class MembersCompletion(Completion):
    """No rank gives merged gradients to its training thread before all members have all of them.

    A rank whose optimizer has stepped with them could not pass them on to ranks that lack them. So a barrier follows
    the last bucket and ends when all members have all buckets. In a step in which the members changed, the rows take
    its place: they report what was lost, and are launched when all buckets are merged. Then, if members leave, either
    no rank has given merged gradients to its training thread, or all can do so.
    """

    def __init__(self, rank: RankParts, member: Member) -> None:
        super().__init__(rank)
        self._member = member

    def wait(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int | None:
        """Wait as the base class does, and go on waiting after each change of members."""
        while not current.abandoned:
            try:
                return self._wait(current, self._member.notes_of(current), give_up_s, on_merged)
            except GroupsChanged:
                self._wait_formed(current)
            except (PeerFailed, StoreUnreachable):  # the channel raises what ended the job, too
                self._rank.check_ended()
                raise
        return None

    def groups_for(self, current: Round, epoch: int) -> ProcessGroups | None:
        """The process groups; ``None`` if the members changed in the step, or when it was complete.

        Then others may be in the next step already, and would not come.
        """
        changed = current.step == self._member.changed_in or self._member.notes_of(current).complete
        return self._rank.rounds.groups if self.is_current(epoch) and not changed else None

    def _wait(
        self, current: Round, notes: Notes, give_up_s: float | None, on_merged: Callable[[Round], None] | None
    ) -> int:
        rank, channel, where = self._rank, self._rank.channel, self._rank.where(current.step)
        with rank.merging.lock:
            epoch, works, apart = channel.epoch, current.works, current.step == self._member.changed_in
            if notes.complete:
                return epoch
            if rank.rounds.groups is None or current.abandoned:
                raise GroupsChanged
            if not apart and notes.last_message is None:
                notes.end_with(rank.rounds.groups.data.barrier())
        # waking for each bucket, and then for the barrier, would take the core from the threads that merge
        if notes.last_message is not None and channel.ends_soon(notes.last_message):
            works = [(work, name) for work, name in works if not succeeded(work)]
        for work, name in works:
            channel.wait(work, current.step, f"{where}, stage {name}", give_up_s, epoch)
            if on_merged is not None:
                on_merged(current)
        with rank.merging.lock:
            if not self.is_current(epoch) or (groups := rank.rounds.groups) is None:
                raise GroupsChanged
            last = notes.last_message or self._launch_rows(current, notes, groups)
        channel.wait(last, current.step, f"{where}, the confirmation that all ranks have it", give_up_s, epoch)
        return epoch

    def _launch_rows(self, current: Round, notes: Notes, groups: ProcessGroups) -> dist.Work:
        """Launch the rows, when all of this rank's gradients are merged: they tell the others how its step went."""
        assert current.submitted is not None
        current.buffers.use_telemetry(torch.zeros_like(current.buffers.telemetry))
        # asked again: while the members change, a step may be submitted before which others are let in
        row = without_lost(current.submitted.row, current, notes).telling({ADMITS: self._member.admits(current)})
        current.buffers.write_telemetry(self._rank.replica.place, row.numbers(current.layout.columns))
        rows = current.buffers.merge_telemetry(groups.control)
        notes.end_with(rows, self._rank.rounds.ranks)
        return rows

    def _wait_formed(self, current: Round) -> None:
        rank = self._rank
        with rank.merging.lock:
            if not rank.merging.step_merged.wait_for(
                lambda: (
                    rank.rounds.groups is not None
                    or current.abandoned
                    or rank.stand_in.error is not None
                    or self._member.is_closed
                ),
                rank.channel.give_up_s,
            ):
                raise PeerFailed(f"{rank.where(current.step)}: the members did not agree on a new view")
            rank.check_ended()
            if self._member.is_closed:
                raise PeerFailed(f"{rank.where(current.step)}: the model is closed")
