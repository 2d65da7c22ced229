"""When the messages of a step are merged."""

from __future__ import annotations

import pytest

from straggle.policies.merge_time import (
    Link,
    Message,
    alone_seconds,
    busy_seconds,
    largest_message_bytes,
    merge_seconds,
    merged_at,
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
    ("ready_s", "merged"),
    [
        ([], []),
        ([0.0], [0.6]),
        ([0.0] * 8, [0.6] * 8),  # one latency for eight
        ([0.0] * 10, [0.6] * 8 + [1.2] * 2),  # the ninth sets out when the first is back
        ([0.0, 0.3], [0.6, 0.9]),
        ([0.3, 0.0], [0.9, 0.9]),  # in order
    ],
)
def test_messages_pay_their_latency_at_the_same_time(ready_s: list[float], merged: list[float]) -> None:
    messages = [Message(64, own_s) for own_s in ready_s]
    assert merged_at(messages, [FAR] * 4) == pytest.approx(merged, rel=1e-3)


@pytest.mark.parametrize("num_bytes", [64, 4e6, 100 * MB])
@pytest.mark.parametrize("num_messages", [1, 3, 8, 12, 20])
@pytest.mark.parametrize("links", [[FAST] * 2, [FAR] * 4, [FAR, NARROW, FAST, FAST], [NARROW] * 3, [FAR]])
def test_equal_messages_without_anything_to_compute_are_merged_when_the_last_is(
    num_bytes: float, num_messages: int, links: list[Link]
) -> None:
    each = [Message(num_bytes / num_messages)] * num_messages
    assert merge_seconds(num_bytes, links, num_messages) == pytest.approx(merged_at(each, links)[-1])


def test_a_merge_has_as_few_messages_as_pay_no_more_latencies_where_their_number_is_not_given() -> None:
    assert merge_seconds(16 * MB, [FAR] * 4) == merge_seconds(16 * MB, [FAR] * 4, 2)
    assert merge_seconds(0, [FAR] * 4) == merge_seconds(0, [FAR] * 4, 1)


def test_messages_share_the_rate() -> None:
    together = [Message(1e6)] * 4
    assert merged_at(together, [NARROW] * 4) == pytest.approx([6.0] * 4)
    # the first has the link to itself for 0.5 s; then each has half of it, until the first is through at 2.5 s
    assert merged_at([Message(1e6), Message(1e6, 0.5)], [NARROW] * 4) == pytest.approx([2.5, 3.0])


def test_many_messages_hide_their_latency_behind_their_bytes() -> None:
    links = [Link(0.05, 20e6)] * 4
    num_bytes = 8e6  # of which one takes the link for 0.6 s, and 1.2 s or more by itself
    last = merged_at([Message(num_bytes)] * 8, links)[-1]
    assert last == pytest.approx(8 * busy_seconds(num_bytes, links))
