"""Waits for the merge of a step, and keeps what is merged in a ring until the training thread takes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from straggle.merge.channel import PeerFailed
from straggle.merge.groups import succeeded
from straggle.merge.members.member import Member
from straggle.merge.members.view_chain import MembersChanged
from straggle.merge.names import ScalarNames
from straggle.merge.other_state import OtherState
from straggle.merge.phases import when_merged
from straggle.merge.rank_parts import RankParts
from straggle.merge.round import Round
from straggle.merge.step_result import StepResult


class MergedSteps:
    """Called by the training thread, and by the stand-in in its place, without the lock.

    `complete` closed rounds, whichever thread has closed them; only the training thread may `take` a merged step.
    """

    def __init__(self, rank: RankParts, member: Member, names: ScalarNames) -> None:
        self._rank, self._member = rank, member
        self._channel, self._rounds, self._lock = rank.channel, rank.rounds, rank.merging.lock
        self._others = OtherState(rank)
        self._result = result = StepResult(rank, names, member, self._others)
        self._phases = when_merged(
            read=result.read,
            decide=result.decide,
            record=result.record,
            keep=result.keep,
            begin_next=rank.merging.merged,
            stop_training=rank.training.merged,
            watch_next=rank.stand_in.merged,
            wings=(member.merged, rank.rounds.merged),
        )

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

    def take(self) -> Round:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            training, merging = self._rank.training, self._rank.merging
            while (merged := self._rank.ring.pop(training.step, None)) is None:
                self._member.check_ended()
                if training.step < self._member.absent_until:
                    merged = self._result.of_absent(training.step)
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
            for phase in self._phases:
                phase(current)
        self._result.raise_error()
        return True
