"""How long a merge takes: several messages at a time, each in gloo's ring over the ranks' links.

gloo cuts a message of n bytes into p parts, one for each of p ranks, and a part into s segments of at most 1 MB, two at
least. In each of two phases a rank sends (p - 1) s segments, of which two are in flight at a time. A segment is sent
when its receiver has reported room for it. With the latency and rate of the slowest link that is

    s = max(2, n / p / 1 MB, rounded up),     g = n / p / s,     busy = 2 (p - 1) / p n / rate,
    alone = (p - 1) s max(2 latency + g / rate, 2 g / rate)

where ``busy`` is for how long the message occupies the link, and ``alone`` how long it takes if no other is in flight.
So a message of more than 2 p MB pays more latencies than a smaller one. At most `MESSAGES_AT_A_TIME` are in flight,
each as fast as alone, unless together they need more than the link has: N equal ones take ``max(alone, N busy)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A segment is sent when its receiver has reported room for it, so each round of gloo's ring takes two
# latencies: 12.6 for a small message of four ranks whose links have 20 ms (benchmarks/network.py has the network).
_WAYS_A_ROUND = 2
SEGMENT_BYTES = 2**20  # gloo's largest
SEGMENTS = 2  # segments of a part at least, and in flight at a time

# Each has a thread of gloo's that waits for it. torch has two: on a link with latency the third message of a step would
# set out only when one of the first two has gone all the way round the ring.
MESSAGES_AT_A_TIME = 8
# If a small message takes no longer than this, two large ones keep links of 10 Gb/s busy. Each thread that is not
# needed keeps a few megabytes, those of its last message.
QUICK_S, QUICK_AT_A_TIME = 1e-3, 2


@dataclass(frozen=True)
class Link:
    """One direction of a rank's connection to its peers: seconds until the first byte is there, and bytes a second."""

    latency_s: float
    bytes_per_s: float


def largest_message_bytes(num_ranks: int) -> int:
    """The largest message that pays no more latencies than a small one."""
    return SEGMENTS * num_ranks * SEGMENT_BYTES


def busy_seconds(num_bytes: float, links: Sequence[Link]) -> float:
    """For how many seconds a message occupies the slowest of the ranks' ``links``."""
    if len(links) < 2:
        return 0.0
    return 2 * (len(links) - 1) / len(links) * num_bytes / min(link.bytes_per_s for link in links)


def alone_seconds(num_bytes: float, links: Sequence[Link]) -> float:
    """Seconds of a message if no other is in flight; ``links``: from each rank to the next one."""
    if (num_ranks := len(links)) < 2:
        return 0.0
    segments = _segments(num_bytes, num_ranks)
    part = num_bytes / num_ranks / segments
    turn_s = max(
        max(_WAYS_A_ROUND * link.latency_s + part / link.bytes_per_s, SEGMENTS * part / link.bytes_per_s)
        for link in links
    )
    return (num_ranks - 1) * segments * turn_s


def merge_seconds(num_bytes: float, links: Sequence[Link], num_messages: int | None = None) -> float:
    """Seconds to merge so much in equal messages, if nothing is left to compute.

    ``num_messages``: by default as few as pay no more latencies than a small one.
    """
    if len(links) < 2:
        return 0.0
    count = num_messages or max(1, math.ceil(num_bytes / largest_message_bytes(len(links))))
    alone, busy = alone_seconds(num_bytes / count, links), busy_seconds(num_bytes / count, links)
    full, rest = divmod(count, MESSAGES_AT_A_TIME)
    return full * max(alone, MESSAGES_AT_A_TIME * busy) + (max(alone, rest * busy) if rest else 0.0)


def _segments(num_bytes: float, num_ranks: int) -> int:
    """The number of segments of each part."""
    return max(SEGMENTS, math.ceil(num_bytes / num_ranks / SEGMENT_BYTES))
