"""Waits for the merge of a step, and keeps what is merged in a ring until the training thread takes it."""

from __future__ import annotations

from collections.abc import Callable

from straggle.merge.phases import when_merged
from straggle.merge.round.completion import Completion, OtherState
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.round.step_result import StepResult
from straggle.merge.rows.telemetry import ScalarNames
from straggle.merge.wing import Wings


class MergedSteps:
    """Called by the training thread, and by the stand-in in its place, without the lock.

    `complete` closed rounds, whichever thread has closed them; only the training thread may `take` a merged step.
    """

    def __init__(self, rank: RankParts, wings: Wings, names: ScalarNames) -> None:
        self._rank, self._wings, self._lock = rank, wings, rank.merging.lock
        self._completion = wings.completion or Completion(rank)
        self._others = OtherState(rank, self._completion)
        self._result = result = StepResult(rank, names, wings, self._others)
        self._phases = when_merged(
            read=result.read,
            decide=result.decide,
            record=result.record,
            keep=result.keep,
            begin_next=rank.merging.merged,
            stop_training=rank.training.merged,
            watch_next=rank.stand_in.merged,
            wings=wings.merged,
            links=(rank.rounds.merged,) if rank.rounds.groups is not None and rank.rounds.groups.wide else (),
        )

    def complete(
        self, current: Round, give_up_s: float | None = None, on_merged: Callable[[Round], None] | None = None
    ) -> None:
        """Wait for the merge of a closed round and publish it.

        ``on_merged(round)`` is called after each message that was merged.
        """
        # again, if the groups changed between the wait and the lock: what was merged is not all ranks' then
        while (epoch := self._completion.wait(current, give_up_s, on_merged)) is not None:
            # before it is published: the training thread must not apply state that is still on its way
            self._others.send(current, epoch, give_up_s)
            if self._publish(current, epoch):
                break

    def take(self) -> Round:
        """Wait until the training thread's step is merged; the training thread goes on to the next."""
        with self._lock:
            training, merging = self._rank.training, self._rank.merging
            while (merged := self._rank.ring.pop(training.step, None)) is None:
                # in each turn: whoever ends this rank notifies, and there is nothing to take then
                self._rank.check_ended()
                if training.step < merging.takes_part_from:
                    merged = self._result.of_absent(training.step)
                    break
                # the lock is free meanwhile: the stand-in publishes the step with it
                merging.step_merged.wait()
            # before the wings: they look at the step that this rank is in now
            training.take(merged, self._rank.stopwatch.now())
            merged.taken()
            for phase in self._wings.taken:
                phase()
            # from here on p.grad lies in them: nothing may begin a round in these buffers until `free_held`
            self._rank.rounds.hold(merged.buffers)
            # it waits for room in the ring, or for this rank to come back: both have changed
            if merged.stood_in or merging.step > training.step:
                self._rank.stand_in.wake()
            return merged

    def _publish(self, current: Round, epoch: int) -> bool:
        """Give a merged step to the training thread; false if the groups have changed meanwhile."""
        with self._lock:
            # looked at with the lock: the groups may have changed while this thread waited for it
            if current.abandoned or not self._completion.is_current(epoch):
                return False
            for phase in self._phases:
                phase(current)
            # with the lock still held: the other thread may publish the next step as soon as it is free
            error = self._result.take_error()
        if error is not None:
            raise error
        return True
