"""What sending costs: a link's latency and rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction of a rank's connection to its peers: seconds until the first byte is there, and bytes a second."""

    latency_s: float
    bytes_per_s: float
