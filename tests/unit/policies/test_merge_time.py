"""How long the messages of a step take, by closed forms and beside what was measured."""

from __future__ import annotations

import pytest

from straggle.policies.network.merge_time import (
    Link,
    alone_seconds,
    largest_message_bytes,
    merge_seconds,
)

MB = 2**20
FAST = Link(0.0, 1e9)
FAR = Link(0.05, 1e9)  # a small message of four ranks takes 6 rounds of 0.1 s
NARROW = Link(0.0, 1e6)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 16])
def test_the_largest_message_pays_the_latencies_of_a_small_one_and_the_next_more(num_ranks: int) -> None:
    largest, links = largest_message_bytes(num_ranks), [Link(1.0, 1e12)] * num_ranks
    assert alone_seconds(largest, links) == pytest.approx(alone_seconds(64, links), rel=1e-3)
    assert alone_seconds(largest + 4, links) == pytest.approx(1.5 * alone_seconds(64, links), rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "links", "seconds"),
    [
        (64, [FAR] * 4, 6 * 0.1),
        (64, [FAST, FAR, FAST, FAST], 6 * 0.1),  # the slowest link
        (4e6, [NARROW] * 4, 6.0),  # 2 (p - 1) / p of the bytes
        (16 * MB, [FAR] * 4, 12 * (0.1 + MB / 1e9)),  # more rounds
        (4e6, [FAR, NARROW, FAR, FAR], 6.0),
        (4e6, [FAR], 0.0),
    ],
)
def test_a_message_alone(num_bytes: float, links: list[Link], seconds: float) -> None:
    assert alone_seconds(num_bytes, links) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("num_bytes", "num_messages", "links", "seconds"),
    [
        (8 * 64, 8, [FAR] * 4, 0.6),  # one latency for eight
        (10 * 64, 10, [FAR] * 4, 1.2),  # the ninth sets out when the first is back
        (4e6, 4, [NARROW] * 4, 6.0),  # they share the rate
        (20e6, 20, [NARROW] * 3, 4 / 3 * 20),
        (64e6, 8, [Link(0.05, 20e6)] * 4, 8 * 0.6),  # they hide their latency behind their bytes: 1.2 s for one alone
        (4e6, 3, [FAR], 0.0),
    ],
)
def test_equal_messages_are_as_fast_as_alone_until_they_need_more_than_the_link_has(
    num_bytes: float, num_messages: int, links: list[Link], seconds: float
) -> None:
    assert merge_seconds(num_bytes, links, num_messages) == pytest.approx(seconds, rel=1e-3)


BYTES = 8 * (400 * 400 + 400) * 4
BESIDE_S = 0.1 + 0.036  # of a step's work, and of what else it takes: the row without a slow link, which is so given
# Seconds of a median step: straggle in `SLOWNET=... python benchmarks/network.py --ways none`, with the cases
# one-5ms ... all-jitter, half and one-1MB/s.
MEASURED = {
    "one rank 5 ms": (0.196, [*[FAST] * 3, Link(0.005, 1e9)]),
    "one rank 20 ms": (0.380, [*[FAST] * 3, Link(0.02, 1e9)]),
    "one rank 50 ms": (0.756, [*[FAST] * 3, Link(0.05, 1e9)]),
    "all 5 ms": (0.212, [Link(0.005, 1e9)] * 4),
    "all 20 ms": (0.377, [Link(0.02, 1e9)] * 4),
    "all 50 ms": (0.766, [Link(0.05, 1e9)] * 4),
    # 10 ms and up to 20 ms more for each packet: a part of a message waits for the last of its packets, and what says
    # that there is room for the next one is a single packet
    "jitter": (0.452, [Link(0.01 + 0.02 * (1 + 0.5) / 2, 1e9)] * 4),
    "one rank 10 MB/s": (0.827, [*[Link(0.0, 20e6)] * 3, Link(0.0, 10e6)]),
    "one rank 1 MB/s": (8.1, [*[FAST] * 3, NARROW]),
}


@pytest.mark.parametrize("name", MEASURED)
def test_prediction_is_within_a_tenth_of_what_was_measured_over_namespaces(name: str) -> None:
    measured_s, links = MEASURED[name]
    assert BESIDE_S + merge_seconds(BYTES, links) == pytest.approx(measured_s, rel=0.1)


def test_a_merge_has_as_few_messages_as_pay_no_more_latencies_where_their_number_is_not_given() -> None:
    assert merge_seconds(16 * MB, [FAR] * 4) == merge_seconds(16 * MB, [FAR] * 4, 2)
    assert merge_seconds(0, [FAR] * 4) == merge_seconds(0, [FAR] * 4, 1)
