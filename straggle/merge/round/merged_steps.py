"""A closed round on its way to the training thread: waited for, published, and kept in a ring until it is taken.

A round is merged as soon as all of its messages are; a wing may have another way. State that is no gradient is sent
after a merge that found it unlike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import ScalarNames
from straggle.merge.state.exchange import NOTHING_GIVEN, Exchange, Manifest, different_tensors, transfers
from straggle.merge.wing import WaitsForMerge, Wings
from straggle.merge.wire.channel import GroupsChanged
from straggle.merge.wire.groups import ProcessGroups


class MergedSteps:
    """Called by the training thread, and by the stand-in in its place, without the lock.

    `complete` closed rounds, whichever thread has closed them; only the training thread may `take` a merged step.
    ``names``: of the scalars that users log.
    """

    def __init__(self, rank: RankParts, wings: Wings, names: ScalarNames) -> None:
        self._rank, self._wings, self._lock, self._names = rank, wings, rank.merging.lock, names
        self._completion: WaitsForMerge = wings.completion or Completion(rank)
        self._others = OtherState(rank, self._completion)
        groups = rank.rounds.groups
        self._looks_at_links = groups is not None and groups.wide is not None
        self._ended_s = math.inf, math.nan  # the deadline that the step had, and one that is not enforced

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
                    merged = self._of_absent(training.step)
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
        rank = self._rank
        with self._lock:
            # looked at with the lock: the groups may have changed while this thread waited for it
            if current.abandoned or not self._completion.is_current(epoch):
                return False
            self._read(current)  # the rows of all ranks: all that follows goes by them
            error = self._decide(current)  # the next step's deadline; its own is noted first, for the report
            self._record(current)  # its seconds end now, and no part of the next step is in them
            self._keep(current)  # for the training thread to take, whatever the policy raised
            rank.merging.merged(current)  # the next step begins, and whoever waits for this one may take it
            rank.training.merged(current)  # if it is still in this step, or an earlier one, it comes to take the merge
            rank.stand_in.merged(current)  # by the next deadline: it may have to look earlier than it planned
            for phase in self._wings.merged:  # who takes part in the next step, which must have begun
                phase(current)
            if self._looks_at_links:  # by which group the next step is merged
                rank.rounds.merged(current)
        if error is not None:
            raise error
        return True

    # -- with the lock held

    def _read(self, current: Round) -> None:
        """Read the rows of all ranks."""
        # before they are read: a rank that was not among the groups has a row of zeros, which would count
        for phase in self._wings.rows_merged:
            phase(current)
        if not current.is_read:
            current.read_rows()
        # before `_decide`: weights that they change are part of what the deadline goes by
        for phase in () if current.table.is_usual else self._wings.rows_read:
            phase(current)

    def _decide(self, current: Round) -> Exception | None:
        """Decide the deadline of the next step. An error of the policy's is reported to the peers, and returned."""
        deadline, table = self._rank.deadline, current.table
        # noted before the next one is decided: the record is of the step that ends
        self._ended_s = deadline.seconds, deadline.shadow_s
        try:
            if table.is_usual or not table.replanning():  # which is no step of the training
                deadline.decide(table)
        except Exception as error:  # a policy may be the user's
            self._rank.channel.post_failure(f"{self._rank.where(current.step)}: {error!r}")
            # not raised here: what comes after this begins the next step, for which peers wait
            return error
        return None

    def _record(self, current: Round) -> None:
        """Note what happened in the step, whose time ends now."""
        now = self._rank.stopwatch.now()
        sent = {} if current.table.is_usual else self._others.sent_in(current, current.table)
        current.recorded(self._recorded(current, now - self._rank.merging.merged_at, now), sent)

    def _keep(self, current: Round) -> None:
        """Put the round into the ring, for the training thread to take."""
        # before the next step begins: whoever is notified then looks here
        self._rank.ring[current.step] = current
        # the last word of a rank that ends now says that it had this step
        self._rank.channel.merged(current.step)

    def _of_absent(self, step: int) -> Round:
        """What a step comes to for a rank that takes no part in it."""
        rank, now = self._rank, self._rank.stopwatch.now()
        current = rank.rounds.empty(step)
        current.merged_without(probed=rank.training.stops.probes)
        self._ended_s = rank.deadline.seconds, rank.deadline.shadow_s
        since_s = now - rank.training.applied_at
        current.recorded(self._recorded(current, since_s if math.isfinite(since_s) else 0.0, now), {})
        return current

    def _recorded(self, current: Round, seconds: float, now: float) -> StepRecord:
        deadline, (deadline_s, shadow_s) = self._rank.deadline, self._ended_s
        return StepRecord(
            current.step,
            seconds,
            deadline_s,
            current.layout.plan,
            current.table,
            self._names,
            shadow_s=shadow_s,
            rules=deadline.rules,
            usual_cost=deadline.usual_cost,
            merged_weights=() if current.terms.rows_tell_all else current.merged_weights(),
            differing=current.differing,
            dealt=deadline.dealt,
            merged_at=now,
        )


class Completion:
    """When a closed round is merged: as soon as all of its messages are.

    Called by whichever thread has closed it; without the lock, if nothing else is said. ``epoch``: that of the
    channel's groups.
    """

    def __init__(self, rank: RankParts) -> None:
        self._rank = rank

    def wait(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int | None:
        """Wait for all of a closed round; the epoch that it was merged in, or ``None`` if the rank has given it up.

        ``on_merged(round)`` is called after each message. Raises `PeerFailed` as `Channel.wait` does.
        """
        rank = self._rank
        # the epoch first: if the groups change during the wait, what comes of it is of an older one
        where, epoch = rank.where(current.step), rank.channel.epoch
        for work, name in current.works:
            rank.channel.wait(work, current.step, f"{where}, stage {name}", give_up_s, epoch)
            if on_merged is not None:
                on_merged(current)
        return epoch

    def is_current(self, epoch: int) -> bool:
        """Whether what was merged in this epoch may be published; with the lock held."""
        return epoch == self._rank.channel.epoch

    def groups_for(self, current: Round, epoch: int) -> ProcessGroups | None:  # noqa: ARG002
        """Among whom more may be sent of a merged round before it is published; ``None``: nothing. With the lock."""
        return self._rank.rounds.groups


class OtherState:
    """What ranks send each other of their modules beside gradients, if a merge found it unlike.

    Called by whichever thread completes a round, without the lock.
    """

    def __init__(self, rank: RankParts, completion: WaitsForMerge) -> None:
        self._rank, self._completion = rank, completion

    def send(self, current: Round, epoch: int, give_up_s: float | None) -> None:
        """Exchange what is unlike by the telemetry of a merged round; nothing if it is alike.

        If the groups change meanwhile, what was sent is lost: `sent_in` says so, and the marks of the next step ask for
        it again.
        """
        if current.sent is not None or not self._is_asked(current):
            return
        rank = self._rank
        # only to read who merges: the exchange itself waits for peers, without the lock
        with rank.merging.lock:
            if (groups := self._completion.groups_for(current, epoch)) is None:
                return
        what = f"{rank.where(current.step)}, what the modules hold beside gradients"
        wait = partial(rank.channel.wait, step=current.step, what=what, give_up_s=give_up_s, epoch=epoch)
        try:
            self._exchange(current, Exchange(groups.control, groups.ranks, rank.replica.place, wait))
        except GroupsChanged:
            return

    def _exchange(self, current: Round, exchange: Exchange) -> None:
        training = self._rank.training
        sums: Mapping[str, int] = {}
        if training.is_in(current.step) and training.entry.tensors is not None:
            sums = training.entry.tensors.as_mapping()
        given = NOTHING_GIVEN if current.submitted is None else current.submitted.given
        manifests = exchange.manifests(Manifest.of(given, sums))
        current.exchanged(different_tensors(manifests.values()), exchange.carry_out(transfers(manifests), given))

    def _is_asked(self, current: Round) -> bool:
        table = current.read_rows()
        if table.is_usual:
            return False
        return table.must_exchange(self._rank.rounds.ranks) or bool(table.differ_in_tensors())

    def sent_in(self, current: Round, table: Table) -> Mapping[str, Tensor] | None:
        """What was sent; ``None``: it was not, though it was asked for."""
        if current.sent is None and not table.must_exchange(self._rank.rounds.ranks):
            return {}
        return current.sent
