"""The pings of a wrapped model: what they need of its merges, and where what they measure goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from straggle.merge.channel import Channel
from straggle.merge.coordinator import Coordinator
from straggle.merge.links.pings import Merged, Pings
from straggle.merge.members.member import Member
from straggle.merge.round import Round
from straggle.merge.step_record import StepRecord
from straggle.merge.table import Table
from straggle.policies.rank_links import RankLink


class JobPings:
    """Measures this rank's ways to its peers while it trains. ``num_bytes`` were sent for it."""

    def __init__(self, channel: Channel, coordinator: Coordinator, member: Member | None) -> None:
        training = coordinator.training
        self._pings = Pings(
            channel.rank,
            channel.world_size,
            channel.store,
            merged_bytes=coordinator.num_bytes,
            sink=partial(setattr, training, "measured"),
            on_its_way=coordinator.merging.on_its_way,
            on_long=_nothing if member is None else member.judge_long_merge,
        )
        self._member, self._merging = member, coordinator.merging
        self.begin, self.close = self._pings.begin, self._pings.close

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent for it."""
        return self._pings.num_bytes

    def merged(self, current: Round) -> None:
        """A step is merged; by the training thread, which does next to nothing for it."""
        record = current.record
        self._pings.merged(record.step, partial(self._merged, record))

    def _merged(self, record: StepRecord) -> Merged:
        links, returns = None if self._member is None else self._member.links, self._merging.takes_part_from
        return merged_step(
            record.step, record.seconds, record.table, frozenset() if links is None else links.out, absent_until=returns
        )


def merged_step(step: int, seconds: float, table: Table, out: Collection[int], *, absent_until: int) -> Merged:
    """A merged step as the pings need it; ``out``: ranks that were put out because of their links.

    ``absent_until``: the step from which on this rank takes part. Before that its last merged step says nothing: it has
    been put out since, or has not come back yet.
    """
    absent = table.absent_ranks()
    members = tuple(rank for rank in range(table.num_ranks) if rank not in absent)
    put_out = tuple(sorted(absent.intersection(out)))
    if step < absent_until:
        members = put_out = ()
    return Merged(step, seconds, table.network_s(seconds), members, table.ways(), put_out)


def _nothing(_links: Sequence[RankLink]) -> None:
    """No member can be put out."""
