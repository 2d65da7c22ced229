"""Waits for the merge of a step, and keeps what is merged in a ring until the training thread takes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from straggle.merge.channel import PeerFailed
from straggle.merge.groups import succeeded
from straggle.merge.members.member import Member
from straggle.merge.members.view_chain import MembersChanged
from straggle.merge.other_state import OtherState
from straggle.merge.rank_parts import RankParts
from straggle.merge.round import MergedStep, Round
from straggle.merge.table import Table
from straggle.merge.telemetry import absent_row


class MergedSteps:
    """Called by the training thread, and by the stand-in in its place, without the lock.

    `complete` closed rounds, whichever thread has closed them; only the training thread may `take` a merged step.
    """

    def __init__(self, rank: RankParts, member: Member) -> None:
        self._rank, self._member = rank, member
        self._channel, self._rounds, self._lock = rank.channel, rank.rounds, rank.merging.lock
        self._others = OtherState(rank)

    def complete(
        self, current: Round, give_up_s: float | None = None, on_merged: Callable[[Round], None] | None = None
    ) -> None:
        """Wait for the merge of a closed round and publish it.

        ``on_merged(round)`` is called after each message that was merged.
        """
        while not current.abandoned:
            try:
                epoch = self._wait_merged(current, give_up_s, on_merged)
            except MembersChanged:
                self._wait_regrouped(current)
            else:
                self._others.send(current, epoch, give_up_s)
                if self._publish(current, epoch):
                    break

    def take(self) -> MergedStep:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            training, merging = self._rank.training, self._rank.merging
            while (merged := self._rank.ring.pop(training.step, None)) is None:
                self._member.check_ended()
                if training.step < self._member.absent_until:
                    merged = self._nothing()
                    break
                merging.step_merged.wait()
            training.take(merged, self._rank.stopwatch.now())
            self._member.taken()
            self._rounds.hold(merged.buffers)
            if merged.stood_in or merging.step > training.step:
                self._rank.stand_in.wake()
            return merged

    def _wait_merged(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int:
        """Wait for all collectives of a closed round; the epoch that they were launched in.

        Where members come and go, no rank may give merged gradients to its training thread before all have all of them:
        one that had stepped with them could not give them to those that have not. So a barrier follows the last bucket,
        which ends when all have all; or the telemetry does, where it goes apart, which is launched when all is merged.
        Then, if members leave, either no rank has given merged gradients to its training thread, or all can do so.
        """
        where = self._rank.where(current.step)
        with self._lock:
            epoch, works, apart = self._channel.epoch, current.works, self._rounds.tells_apart(current.step)
            if current.complete:
                return epoch
            if self._rounds.groups is None or current.abandoned:
                raise MembersChanged
            if self._rank.membership is not None and not apart and current.last_message is None:
                current.last_message = self._rounds.groups.gradients.barrier()
        # a thread that wakes for each bucket, and then for the barrier, takes the core from those that merge
        if current.last_message is not None and self._channel.ends_soon(current.last_message):
            works = [(work, name) for work, name in works if not succeeded(work)]
        for work, name in works:
            self._channel.wait(work, current.step, f"{where}, stage {name}", give_up_s, epoch)
            if on_merged is not None:
                on_merged(current)
        if apart or current.last_message is not None:
            with self._lock:
                if epoch != self._channel.epoch or self._rounds.groups is None:
                    raise MembersChanged
                work = current.last_message or self._launch_telemetry(current)
            self._channel.wait(work, current.step, f"{where}, the sign that all ranks have it", give_up_s, epoch)
        return epoch

    def _launch_telemetry(self, current: Round) -> dist.Work:
        """All of this rank's gradients are merged: tell the others how it came through the step."""
        assert current.row is not None
        groups = self._rounds.groups
        assert groups is not None
        current.buffers.use_telemetry(torch.zeros_like(current.buffers.telemetry))
        # asked again: while the members change, a step may be submitted that others are let in before
        row = current.lost_in(current.row)._replace(admits=self._member.admits(current))
        current.buffers.write_telemetry(self._channel.rank, row.numbers())
        current.told = self._rounds.ranks
        current.last_message = current.buffers.merge_telemetry(groups.control)
        return current.last_message

    def _wait_regrouped(self, current: Round) -> None:
        with self._lock:
            if not self._rank.merging.step_merged.wait_for(
                lambda: self._rounds.groups is not None or current.abandoned or self._rank.stand_in.error is not None,
                self._channel.give_up_s,
            ):
                raise PeerFailed(f"{self._rank.where(current.step)}: the members found to no new view")
            self._member.check_ended()

    def _publish(self, current: Round, epoch: int) -> bool:
        """Give a merged step to the training thread; false where members have left meanwhile."""
        with self._lock:
            if epoch != self._channel.epoch or current.abandoned:
                return False
            if current.last_message is not None or current.complete:
                self._member.telemetry_merged(current)
                current.table = None  # ranks that are no members have other rows now
            now, before_s = self._rank.stopwatch.now(), self._rank.deadline.seconds
            merged = self._rank.ring[current.step] = self._merged(current, now)
            self._member.published()
            self._channel.merged(current.step)
            try:
                if not merged.table.replanning():  # which is no step of the training
                    self._rank.deadline.decide(merged.table)
            except Exception as error:  # a policy may be the user's
                self._channel.post_failure(f"{self._rank.where(current.step)}: {error!r}")
                raise
            finally:
                self._rank.merging.merged(now, any_late=merged.table.any_late())
                self._rank.training.stop_up_to(current.step)  # where it still is in this step, it comes to take it
                self._rank.stand_in.merged(before_s=before_s)
                self._member.merged(current.step, merged.table, given=current.complete)
                self._rounds.merged(current.step, merged.table)
        return True

    def _merged(self, current: Round, now: float) -> MergedStep:
        table = current.table or Table(current.buffers.copy_rows(), len(self._rounds.plan.stages))
        return MergedStep(
            step=current.step,
            plan=self._rounds.plan,
            buffers=current.buffers,
            table=table,
            seconds=now - self._rank.merging.merged_at,
            deadline_s=self._rank.deadline.seconds,
            shadow_s=self._rank.deadline.shadow_s,
            merged_at=now,
            stood_in=current.stood_in,
            num_gradients=current.num_gradients,
            num_over=current.num_over,
            idle=current.idle,
            entered=current.entered,
            members_changed=current.generation > 0,
            had_work=current.had_work,
            joins_over=current.joins_over,
            num_drawn=None if current.drawn is None else len(current.drawn.numbers),
            merged_weights=current.merged_weights() if current.has_more_than_told else (),
            sent=self._others.sent_in(current, table),
            differing=current.differing,
        )

    def _nothing(self) -> MergedStep:
        """What a step comes to for a rank that is no member."""
        buffers, training, deadline = self._rounds.new_buffers(), self._rank.training, self._rank.deadline
        buffers.rows[:] = absent_row(len(self._rounds.plan.stages))
        now = self._rank.stopwatch.now()
        return MergedStep(
            step=training.step,
            plan=self._rounds.plan,
            buffers=buffers,
            table=Table(buffers.rows.clone(), len(self._rounds.plan.stages)),
            seconds=now - training.applied_at if math.isfinite(training.applied_at) else 0.0,
            deadline_s=deadline.seconds,
            shadow_s=deadline.shadow_s,
            merged_at=now,
            stood_in=True,
            num_gradients=0,
            num_over=0,
            members_changed=True,
        )
