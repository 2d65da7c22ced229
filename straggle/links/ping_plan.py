"""When a rank pings whom, and with how many bytes: pure functions.

Two peers each time: the next and the previous one by rank, and the next time those after these, so that two slow ranks
with one between them are told from three. On another machine, if there is one: ranks of one machine share its link,
and what goes between them does not take it.
"""

from __future__ import annotations

from collections.abc import Mapping

from straggle.links.ping import LEAST_BYTES, MOST_BYTES

EVERY_S = 10.0
SLOW_EVERY_S = 2.5  # while a link is slow, so that it is known soon that it is not any more
DOUBT_EVERY_S = 1.0  # while one looks so, until several rounds show it
_LONGEST_S = 60.0
SHARE = 0.001  # of the bytes that merges send
_MERGED_SHARE = 256  # the large message is at most so small a part of what is merged
_MESSAGES = 8  # large ones with each ping: three to each of two peers, and what comes before them
DISTANCES = 2


def largest_bytes(merged_bytes: int) -> int:
    """The large message, if a step merges so much: the same on all ranks, and so is the highest rate.

    A power of two from 64 KB on. With 400 MB of gradients it is 1 MB, which shows rates up to 1 GB/s.
    """
    part = max(1, merged_bytes // _MERGED_SHARE)
    return min(MOST_BYTES // 4, max(LEAST_BYTES, 1 << (part.bit_length() - 1)))


def every_s(merged_bytes: int, step_s: float, num_ranks: int, *, is_slow: bool, in_doubt: bool = False) -> float:
    """Seconds between two pings: as many as keep them below `SHARE` of what merges send, from 10 s to a minute.

    A ring sends 2 (p - 1) / p of the gradients in each step. While a link is slow, or may be, pings are more frequent.
    """
    if in_doubt or is_slow:
        return DOUBT_EVERY_S if in_doubt else SLOW_EVERY_S
    sent_per_s = 2 * (num_ranks - 1) / num_ranks * merged_bytes / max(step_s, 1e-6)
    if sent_per_s <= 0:
        return _LONGEST_S
    return min(_LONGEST_S, max(EVERY_S, _MESSAGES * largest_bytes(merged_bytes) / (SHARE * sent_per_s)))


def peers_of(rank: int, hosts: Mapping[int, str], number: int) -> tuple[int, ...]:
    """Whom this rank pings the ``number``-th time; ``hosts`` of all ranks that answer pings."""
    ranks = sorted(hosts)
    following = [other for other in ranks if other > rank] + [other for other in ranks if other < rank]
    elsewhere = [other for other in following if hosts[other] != hosts.get(rank)]
    others = elsewhere or following
    if not others:
        return ()
    distance = number % min(DISTANCES, (len(others) + 1) // 2)
    return tuple(dict.fromkeys((others[distance], others[-1 - distance])))


def is_turn(step: int, place: int, count: int, overdue_s: float, patience_s: float) -> bool:
    """Whether a rank that is due pings now that ``step`` is merged: one after another, so that no two share a link.

    ``place`` is its number among ``count`` members. One that was not due in its turn for long does not wait for it.
    """
    return step % count == place or overdue_s >= patience_s
