"""When a rank pings whom, and with how many bytes."""

from __future__ import annotations

import pytest

from straggle.links.ping_plan import (
    DOUBT_EVERY_S,
    SHARE,
    SLOW_EVERY_S,
    every_s,
    is_turn,
    largest_bytes,
    peers_of,
)


@pytest.mark.parametrize(
    ("rank", "hosts", "rounds"),
    [
        (0, "a", [()]),
        (0, "ab", [(1,), (1,)]),
        (1, "abc", [(2, 0), (2, 0)]),
        (1, "abcd", [(2, 0), (3,), (2, 0)]),
        (0, "abcdef", [(1, 5), (2, 4), (1, 5)]),
        (1, "aabbcc", [(2, 5), (3, 4)]),  # on other machines
        (3, "aabb", [(0, 1), (1, 0)]),
        (1, "aaa", [(2, 0)]),  # all on one
    ],
)
def test_peers_are_the_next_and_the_previous_rank_on_another_machine(
    rank: int, hosts: str, rounds: list[tuple[int, ...]]
) -> None:
    found = [peers_of(rank, dict(enumerate(hosts)), number) for number in range(len(rounds))]
    assert [set(peers) for peers in found] == [set(peers) for peers in rounds]


def test_a_rank_that_does_not_answer_is_no_peer() -> None:
    assert peers_of(0, {0: "a", 2: "c", 3: "d"}, 0) == (2, 3)


@pytest.mark.parametrize(
    ("merged", "largest"),
    [(0, 1 << 16), (5 << 20, 1 << 16), (100 << 20, 1 << 18), (400 << 20, 1 << 20), (1 << 40, 1 << 22)],
)
def test_the_large_message_grows_with_what_is_merged(merged: int, largest: int) -> None:
    assert largest_bytes(merged) == largest


@pytest.mark.parametrize("merged", [5_000_000, 100_000_000, 1_600_000_000])
@pytest.mark.parametrize("step_s", [0.05, 0.2, 1.0, 8.0])
@pytest.mark.parametrize("count", [2, 4, 64])
def test_pings_are_a_thousandth_of_what_merges_send_or_one_a_minute(merged: int, step_s: float, count: int) -> None:
    interval_s = every_s(merged, step_s, count, is_slow=False)
    sent = 8 * largest_bytes(merged) / interval_s
    assert interval_s >= 10
    assert interval_s == 60 or sent <= 1.001 * SHARE * 2 * (count - 1) / count * merged / step_s
    assert every_s(merged, step_s, count, is_slow=True) == SLOW_EVERY_S
    assert every_s(merged, step_s, count, is_slow=False, in_doubt=True) == DOUBT_EVERY_S < SLOW_EVERY_S


def test_ranks_ping_one_after_another_and_none_waits_for_ever() -> None:
    turns = [[rank for rank in range(3) if is_turn(step, rank, 3, 0.0, 1.5)] for step in range(4)]
    assert turns == [[0], [1], [2], [0]]
    assert is_turn(1, 0, 3, 2.0, 1.5)
