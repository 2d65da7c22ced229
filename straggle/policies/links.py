"""What sending costs: a link's latency and rate, and what a merge over links takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction of a rank's connection to its peers: seconds until the first byte is there, and bytes a second."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Until all of a message has arrived."""
        return self.latency_s + num_bytes / self.bytes_per_s


# A part sets out when its receiver has said that it has room for it, so each round of gloo's ring takes two latencies:
# 12.6 of them for a small message of four ranks whose links have 20 ms (benchmarks/network.py has the network).
WAYS_A_ROUND = 2


def ring_seconds(num_bytes: float, links: Sequence[Link]) -> float:
    """What one allreduce of ``num_bytes`` takes in a ring over ranks whose links to the next rank are these.

        2 (p - 1) max over links of (WAYS_A_ROUND latency + bytes / p / rate)

    Each of 2 (p - 1) rounds sends a part of 1 / p, and takes as long as the slowest link (Thakur, Rabenseifner and
    Gropp 2005, section 4.3; bandwidth-optimal ring of Patarasuk and Yuan 2009).
    """
    num_ranks = len(links)
    if num_ranks < 2:
        return 0.0
    part = num_bytes / num_ranks
    slowest_s = max((WAYS_A_ROUND - 1) * link.latency_s + link.seconds(part) for link in links)
    return 2 * (num_ranks - 1) * slowest_s
