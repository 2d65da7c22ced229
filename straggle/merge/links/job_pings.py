"""The pings of a wrapped model: what they need of its merges, and where what they measure goes."""

from __future__ import annotations

from functools import partial

from straggle.merge.channel import Channel
from straggle.merge.coordinator import Coordinator
from straggle.merge.links.pings import Merged, Pings
from straggle.merge.telemetry import StepRecord


class JobPings:
    """Measures this rank's ways to its peers while it trains. ``num_bytes`` were sent for it."""

    def __init__(self, channel: Channel, coordinator: Coordinator) -> None:
        training = coordinator.training
        self._pings = Pings(
            channel.rank,
            channel.world_size,
            channel.store,
            merged_bytes=coordinator.num_bytes,
            sink=partial(setattr, training, "measured"),
            on_its_way=coordinator.merging.on_its_way,
        )
        self._links = coordinator.member.links
        self.close = self._pings.close

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent for it."""
        return self._pings.num_bytes

    def merged(self, record: StepRecord) -> None:
        """A step is merged; by the training thread, which does next to nothing for it."""
        self._pings.merged(record.step, partial(self._merged, record))

    def _merged(self, record: StepRecord) -> Merged:
        table = record.table
        absent = table.absent_ranks()
        members = tuple(rank for rank in range(table.num_ranks) if rank not in absent)
        out = () if self._links is None else tuple(sorted(self._links.out & absent))
        return Merged(record.step, record.seconds, table.network_s(record.seconds), members, table.ways(), out)
