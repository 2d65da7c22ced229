"""What the parts of one rank's coordinator share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from straggle.backward.clocks import Stopwatch
from straggle.backward.device import Device, device_of
from straggle.backward.stages import StagePlan
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.replica import Replica
from straggle.merge.late.sides import MergeSide, TrainingSide
from straggle.merge.late.stand_in import StandIn
from straggle.merge.options import Merge
from straggle.merge.round.round import Round
from straggle.merge.round.rounds import Rounds
from straggle.merge.rows.device_numbers import DeviceNumbers
from straggle.merge.rows.telemetry import Columns
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.loop_collectives import LoopCollectives
from straggle.source.source import Slot

if TYPE_CHECKING:
    from straggle.backward.device_clock import DeviceClock


@dataclass(frozen=True)
class RankParts:
    """The two sides of a rank, and what merges for it; ``merging.lock`` guards all of it.

    ``stopwatch`` measures the phases of the training thread, and tells the time. ``device``: where the gradients are.
    ``ring``: by their number, the merged rounds that wait for the training thread. ``device_clock``: if
    ranks are late by their devices.
    """

    stopwatch: Stopwatch
    device: Device
    device_numbers: DeviceNumbers
    channel: Channel
    replica: Replica
    training: TrainingSide
    merging: MergeSide
    deadline: CurrentDeadline
    stand_in: StandIn
    rounds: Rounds
    device_clock: DeviceClock | None = None
    ring: dict[int, Round] = field(default_factory=dict)

    @staticmethod
    def build(
        slots: Sequence[Slot],
        plan: StagePlan,
        channel: Channel,
        replica: Replica,
        deadline: CurrentDeadline,
        merge: Merge,
        *,
        num_state: int,
        columns: Columns,
    ) -> RankParts:
        """Those of a model with these slots; ``num_state``: numbers of other state that go beside each merge.

        ``columns``: where rows have their numbers.
        """
        stopwatch, device = Stopwatch(), device_of(slots[0].device)
        sides = TrainingSide(stopwatch, LoopCollectives(replica.ranks)), MergeSide(stopwatch)
        replica.tell(channel, sides[0].place)
        stand_in = StandIn(*sides, deadline, channel, device=device)
        all_or_nothing = deadline.late_handling.granularity == "step"
        rounds = Rounds(
            slots,
            plan,
            merge=merge,
            all_or_nothing=all_or_nothing,
            num_state=num_state,
            num_replicas=replica.count,
            queued=device.is_queued and not channel.groups_change,
            columns=columns,
        )
        if rounds.are_queued:
            from straggle.merge.late.device_watch import DeviceWatch  # where there is a device with a queue

            rounds.watch_device(DeviceWatch(device, channel, stand_in.end_unlocked))
        among = rounds.ranks if channel.formed is None else channel.formed.ranks
        rounds.merge_among(channel.formed, among, 0)
        if len(among) < channel.world_size:  # the job has begun without a rank that will not come
            deadline.of_ranks(len(among))
        clock: DeviceClock | None = None
        if device.is_queued and deadline.late_handling.late_by == "device":
            from straggle.backward.device_clock import DeviceClock

            between = deadline.late_handling.granularity == "microbatch"
            clock = DeviceClock(device, stopwatch.now, stand_in.limit_by_device, between_passes=between)
            stand_in.be_late_by(clock)
        numbers = DeviceNumbers(device)
        return RankParts(stopwatch, device, numbers, channel, replica, *sides, deadline, stand_in, rounds, clock)

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return max(0, self.merging.step - self.training.step)

    def where(self, step: int) -> str:
        """As errors begin."""
        return f"rank {self.channel.name}, step {step}"

    def check_ended(self) -> None:
        """Raise what ended the job for this rank, if anything did."""
        self.stand_in.check()

    def check_device(self) -> None:
        """Raise what ended this rank, if its device is stuck, or a peer's."""
        if (watch := self.rounds.watch) is not None and watch.error is not None:
            raise watch.error
