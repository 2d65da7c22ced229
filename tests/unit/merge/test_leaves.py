"""What is known of a leaf in time, and what goes over its connection."""

from __future__ import annotations

import math
import socket
import threading
from queue import SimpleQueue

import pytest
import torch

from straggle.merge.links.leaf_rows import mark, missing_row, put_row, read_marks
from straggle.merge.links.leaf_wire import MERGED, PART, TOKEN_BYTES, Message, Wire, close_all, greet, greeted
from straggle.merge.links.patience import FirstSent, Patience
from straggle.merge.links.seen import bytes_on_wire
from straggle.merge.table import Table
from straggle.merge.telemetry import LEAF_SINCE, Row
from straggle.report import CAUSES, PHASES

LINK = CAUSES.index("link")


def test_a_parent_waits_as_much_longer_as_it_may_and_compares_with_steps_in_which_it_did_not_wait() -> None:
    patience = Patience(1.2)
    for step in range(200):
        patience.begin()
        # each step is as late as the parent waits: a step that is compared with one that waited would grow
        until = patience.until(1, 0.3)
        assert until == pytest.approx(0.3 if step < 3 or step % 16 == 0 else 0.3 + 0.2 * 0.5)
        patience.end(0.5 + until - 0.3)


def test_a_parent_does_not_wait_where_the_step_is_late_already() -> None:
    patience = Patience(1.2)
    for _ in range(3):
        patience.begin()
        patience.until(0, 0.1)
        patience.end(0.5)
    patience.begin()
    assert patience.until(0, 0.9) == 0.9


@pytest.mark.parametrize(
    ("came", "first"),
    [
        ([[True] * 4] * 20, 0),
        ([[False, True, True, True]], 1),
        ([[False] * 4] * 20, 3),
        ([[True, True, False, False]] * 20, 0),
        ([[False, True, True, True], *[[False, True, True, True]] * 3], 1),
        ([[False, True, True, True], *[[False, True, True, True]] * 4], 0),
    ],
)
def test_a_leaf_begins_with_the_first_bucket_that_comes_in_time(came: list[list[bool]], first: int) -> None:
    sent = FirstSent()
    for merged in came:
        sent.learn(merged)
    assert sent.first == first


def row_of(computed: tuple[float, ...]) -> Row:
    nothing = (0.0,) * len(computed)
    return Row(dict.fromkeys(PHASES, 0.1), 0.5, 0.5, computed=computed, estimated=nothing, stage_s=nothing)


def test_rows_of_all_parents_say_what_of_a_leaf_came_in_time() -> None:
    own = [torch.zeros(3, len(row_of((1.0,) * 3).encode())) for _ in range(2)]
    for rank, rows in enumerate(own):
        rows[rank] = row_of((1.0, 1.0, 1.0)).encode()
    put_row(own[0], 2, None, 3)
    mark(own[0], 2, {0: 1.0}, 3)
    put_row(own[1], 2, row_of((1.0, 1.0, 0.5)).encode(), 3)
    mark(own[1], 2, {2: 0.5}, 3)
    merged = own[0] + own[1]
    read_marks(merged, {2: 5}, 3)
    assert merged[2, :1].item() == pytest.approx(0.1)
    expected = row_of((1.0, 0.0, 0.5))
    encoded = expected._replace(cause=LINK, weights=(1.0, 0.0, 0.5)).encode()
    encoded[LEAF_SINCE] = 5
    assert torch.equal(merged[2].nan_to_num(-9), encoded.nan_to_num(-9))


def test_a_row_that_did_not_come_has_what_its_rank_said_last() -> None:
    last = row_of((1.0, 1.0))._replace(ring_formed=7).encode()
    rows = missing_row(2, last).unsqueeze(0)
    mark(rows, 0, {0: 2.0, 1: 0.0}, 2)  # it gave nothing to the second stage
    read_marks(rows, {0: 5}, 2)
    table = Table(rows, 2)
    assert table.weight() == [2.0]
    assert rows[0, table.of_stages.computed].tolist() == rows[0, table.of_stages.weights].tolist() == [1.0, 0.0]
    assert (table.rings_formed(), table.leaves()) == ([7], {0: 5})
    assert math.isnan(table.compute_s()[0])
    assert table.finished_ranks() == [False]


def test_messages_arrive_as_they_were_sent_and_a_stopped_one_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = greet(listener.getsockname(), bytes(TOKEN_BYTES), 5, 5.0)
        found = greeted(listener, bytes(TOKEN_BYTES), 5.0)
    assert found is not None
    assert found[0] == 5
    received: SimpleQueue[object] = SimpleQueue()
    ends = [Wire(own, max_bytes=1 << 20, on_message=received.put, on_lost=received.put) for own in (sender, found[1])]
    ends[0].post(Message(PART, 3, 1, payload=bytearray(b"a"), stopped=True))
    ends[0].post(Message(MERGED, 3, 1, flag=True, last=True, waited=True, payload=bytearray(b"x" * 200_000)))
    assert received.get(timeout=10) == Message(MERGED, 3, 1, True, True, True, bytearray(b"x" * 200_000))
    ends[0].close()
    assert received.get(timeout=10) == "the connection was closed"
    ends[1].close()


def test_who_does_not_know_the_word_is_not_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        greet(listener.getsockname(), b"x" * TOKEN_BYTES, 0, 5.0).close()
        assert greeted(listener, bytes(TOKEN_BYTES), 5.0) is None


def test_an_end_whose_other_end_is_silent_is_closed_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = greet(listener.getsockname(), bytes(TOKEN_BYTES), 5, 5.0)
        found = greeted(listener, bytes(TOKEN_BYTES), 5.0)
    assert found is not None
    end = Wire(sender, max_bytes=1 << 20, on_message=print, on_lost=print)
    end.post(Message(MERGED, 3, 1, payload=bytearray(1 << 24)))  # more than the kernels keep
    closing = threading.Thread(target=close_all, args=([end],))
    closing.start()
    closing.join(30.0)  # without an end to its patience it takes a minute
    assert not closing.is_alive()
    found[1].close()


@pytest.mark.parametrize(("wire_dtype", "expected"), [(None, 4 * 6 + 8 * 5), (torch.bfloat16, 2 * 6 + 8 * 5)])
def test_bytes_are_counted_as_they_travel(wire_dtype: torch.dtype | None, expected: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    assert bytes_on_wire(parameters, wire_dtype) == expected
