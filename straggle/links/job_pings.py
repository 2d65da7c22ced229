"""The pings of a wrapped model: an optional part that measures this rank's ways to its peers while it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from straggle.links.pings import Merged, Pings
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import Row
from straggle.merge.wing import Wing
from straggle.policies.network.rank_links import RankLink, Way


class JobPings(Wing):
    """``num_bytes`` were sent for it. ``begins``: at once, and not with the first steps.

    ``out()``: the ranks that were put out because they are slow. ``on_long(links)``: a merge takes many times as long
    as usual, and meanwhile this rank has measured these.
    """

    def __init__(
        self,
        rank: RankParts,
        *,
        merged_bytes: int,
        begins: bool,
        out: Callable[[], Collection[int]],
        on_long: Callable[[Sequence[RankLink]], None] | None,
    ) -> None:
        channel = rank.channel
        self._rank, self._begins, self._out = rank, begins, out
        self._measured: tuple[tuple[float, Way], ...] = ()  # ways to peers as they were measured last, and when
        self._pings = Pings(
            channel.rank,
            channel.world_size,
            channel.store,
            merged_bytes=merged_bytes,
            sink=self.measure,
            on_its_way=rank.merging.on_its_way,
            on_long=on_long,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that were sent for it."""
        return self._pings.num_bytes

    def built(self) -> None:
        """Begin now, if peers want to know this rank's link before they let it in."""
        if self._begins:
            self._pings.begin()

    def measure(self, ways: tuple[tuple[float, Way], ...]) -> None:
        """Ways to peers are measured; by the pings' thread, without a lock."""
        self._measured = ways  # another tuple, never a changed one: whoever submits reads it whole

    def submit(self, current: Round, row: Row) -> Row:  # noqa: ARG002
        """Add the ways to peers, with how long ago each was measured."""
        if not (measured := self._measured):
            return row
        now = self._rank.stopwatch.now()
        return row._replace(ways=tuple(Way(way.source, way.target, way.link, now - at) for at, way in measured))

    def left(self, current: Round) -> None:
        """A step is merged; by the training thread, which does next to nothing for it."""
        record = current.record
        self._pings.merged(record.step, partial(self._merged, record))

    def close(self) -> None:
        """Measure nothing from here on, and answer no ping."""
        self._pings.close()

    def _merged(self, record: StepRecord) -> Merged:
        takes_part_from = self._rank.merging.takes_part_from
        return merged_step(record.step, record.seconds, record.table, self._out(), takes_part_from=takes_part_from)


def merged_step(step: int, seconds: float, table: Table, out: Collection[int], *, takes_part_from: int) -> Merged:
    """A merged step as the pings need it; ``out``: ranks that were put out because they are slow.

    ``takes_part_from``: the step from which on this rank takes part. Before that its last merged step shows nothing: it
    has been put out since, or has not come back yet.
    """
    absent = table.absent_ranks()
    members = tuple(rank for rank in range(table.num_ranks) if rank not in absent)
    put_out = tuple(sorted(absent.intersection(out)))
    if step < takes_part_from:
        members = put_out = ()
    return Merged(step, seconds, table.network_s(seconds), members, table.ways(), put_out)
