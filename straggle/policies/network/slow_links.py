"""Whose link is slow, and since when: a function of what all ranks know, step after step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from straggle.policies.network.rank_links import RankLink, others_links, ring_cost_s

TIMES = 1.5  # as slow as the others' links, from which on a link may be slow
STILL = 1.25  # and until which it is, once it was
MATTERS = 0.1  # of a step, that a merge takes longer because of it
_STILL_MATTERS = 0.05
_LEAST_LATENCY_S = 0.002  # above the others': less is what a busy machine takes to answer
_LASTS_S = 5.0  # that it has to be so, and at least two steps


@dataclass(frozen=True)
class SlowLink:
    """A rank's link that is slow since ``since_step``, in ``slow`` ("up", "down", "latency"); and the others' links."""

    rank: int
    since_step: int
    slow: tuple[str, ...]
    link: RankLink
    others: RankLink

    def words(self, row: str = "rank") -> str:
        """What is slow, and how the others are: ``rank 2's link: 1.0 MB/s up, the others 20 MB/s``."""
        return f"{row} {self.rank}'s link: {compared(self.link, self.others, self.slow)}"


def compared(link: RankLink, others: RankLink, slow: Collection[str] = ("up", "down")) -> str:
    """In words: a link beside the others', in what is ``slow``, as far as that is known."""
    parts = []
    if "up" in slow and not math.isnan(link.up_bytes_per_s):
        parts.append(f"{rate(link.up_bytes_per_s)} up, the others {rate(others.up_bytes_per_s)}")
    if "down" in slow and not math.isnan(link.down_bytes_per_s):
        parts.append(f"{rate(link.down_bytes_per_s)} down, the others {rate(others.down_bytes_per_s)}")
    if "latency" in slow:
        parts.append(f"{1e3 * link.latency_s:.1f} ms each way, the others {1e3 * others.latency_s:.1f} ms")
    return "; ".join(parts)


def rate(bytes_per_s: float) -> str:
    """Bytes a second in words."""
    mega = bytes_per_s / 1e6
    return f"{mega:.1f} MB/s" if mega < 9.95 else f"{mega:.0f} MB/s"


class SlowLinks:
    """Follows the links of all ranks. ``now`` are those that are slow, the costliest first."""

    def __init__(self) -> None:
        self.now: tuple[SlowLink, ...] = ()
        self._seen: dict[int, tuple[int, float, int]] = {}  # of each suspect: since which step, seconds, and steps

    def add(
        self, step: int, links: Sequence[RankLink], *, num_bytes: float, step_s: float, passed_s: float | None = None
    ) -> None:
        """A step of ``step_s`` merged so many bytes, and the links were these; ``passed_s`` since the one before."""
        passed_s = step_s if passed_s is None else passed_s
        found = list[tuple[float, SlowLink]]()
        was = {slow.rank for slow in self.now}
        for rank, (link, others) in enumerate(zip(links, others_links(links), strict=True)):
            slow = slow_in(link, others, times=STILL if rank in was else TIMES)
            cost_s = ring_cost_s(link, others, num_bytes=num_bytes, num_ranks=len(links)) if slow else 0.0
            if not slow or cost_s < (_STILL_MATTERS if rank in was else MATTERS) * step_s:
                self._seen.pop(rank, None)
                continue
            since, lasted_s, steps = self._seen.get(rank, (step, 0.0, 0))
            self._seen[rank] = since, lasted_s + passed_s, steps + 1
            if rank in was or (lasted_s + passed_s >= _LASTS_S and steps >= 1):
                found.append((cost_s, SlowLink(rank, since, slow, link, others)))
        self.now = tuple(slow for _, slow in sorted(found, key=lambda pair: -pair[0]))


def slow_in(link: RankLink, others: RankLink, times: float = TIMES) -> tuple[str, ...]:
    """In what a link is slower than the others', by this factor: of "up", "down", "latency"."""
    slow = [
        direction
        for direction, own, usual in (
            ("up", link.up_bytes_per_s, others.up_bytes_per_s),
            ("down", link.down_bytes_per_s, others.down_bytes_per_s),
        )
        if own * times < usual  # NaN is not
    ]
    if link.latency_s > max(times * others.latency_s, others.latency_s + _LEAST_LATENCY_S):
        slow.append("latency")
    return tuple(slow)
