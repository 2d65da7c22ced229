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


def ring_seconds(num_bytes: float, links: Sequence[Link]) -> float:
    """What one allreduce of ``num_bytes`` takes in a ring over ranks whose links to the next rank are these.

    Each of 2 (p - 1) rounds sends a part of 1 / p, and takes as long as the slowest link (Thakur, Rabenseifner and
    Gropp 2005, section 4.3; bandwidth-optimal ring of Patarasuk and Yuan 2009).
    """
    if len(links) < 2:
        return 0.0
    return 2 * (len(links) - 1) * max(link.seconds(num_bytes / len(links)) for link in links)
