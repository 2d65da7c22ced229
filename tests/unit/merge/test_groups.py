"""What a group of gloo holds of what was launched in it, and how that ends."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from straggle.merge.wire.channel import PeerFailed, comes_of_peer
from straggle.merge.wire.groups import GlooGroup, is_over, let_go, succeeds


def two_ranks(limit_s=5.0):
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        return ranks.map(lambda rank: GlooGroup(store, rank, 2, 5.0, limit_s), range(2))


def test_group_holds_no_collective_that_is_over_and_all_that_are_not():
    here, there = two_ranks()
    works = [here.all_reduce(torch.ones(4)), here.all_reduce(torch.ones(4))]
    first = there.all_reduce(torch.ones(4))
    assert is_over(first, 5.0)
    assert is_over(works[0], 5.0)
    held = [weakref.ref(work) for work in works]
    del works

    assert None not in [work() for work in held]
    here.forget_ended()
    assert [work() is None for work in held] == [True, False]

    second = there.all_reduce(torch.ones(4))
    assert is_over(second, 5.0)
    assert is_over(held[1](), 5.0)
    here.forget_ended()
    assert held[1]() is None
    for group in (here, there):
        group.drop()


def test_barrier_ends_when_all_that_was_launched_before_it_is_over_on_all_ranks():
    here, there = two_ranks()
    mine = here.all_reduce(torch.ones(4)), here.barrier()
    assert not succeeds(mine[1], 0.001)

    theirs = [there.all_reduce(torch.ones(4))]
    assert succeeds(mine[0], 5.0)
    assert not succeeds(mine[1], 0.001)

    theirs.append(there.barrier())
    assert all(succeeds(work, 5.0) for work in (*mine, *theirs))
    for group in (here, there):
        group.drop()


def test_collective_that_fails_has_not_succeeded_when_it_is_over():
    here, there = two_ranks(limit_s=0.05)
    late, after_it = here.all_reduce(torch.ones(4)), here.barrier()
    assert not succeeds(after_it, 5.0)
    assert not succeeds(late, 5.0)
    assert late.is_completed()
    assert after_it.is_completed()
    for group in (here, there):
        group.drop()


def test_group_that_is_dropped_is_held_until_what_was_launched_in_it_is_over():
    here, there = two_ranks()
    work = here.all_reduce(torch.ones(4))
    here.drop()
    assert not let_go()  # or gloo would wait for a rank that may not come

    other = there.all_reduce(torch.ones(4))
    assert is_over(other, 5.0)
    assert is_over(work, 5.0)
    held = weakref.ref(work)
    del work
    assert let_go()
    assert held() is None  # or the connections would stay
    there.drop()
    assert let_go()


def _after(error, first):
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "of_peer"),
    [
        (PeerFailed("rank 1 ended"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (_after(KeyError("loss"), PeerFailed("rank 1 ended")), True),
        (ConnectionError("the data base's socket is closed"), False),
        (ValueError("PeerFailed, says this text alone"), False),
        (None, False),
    ],
    ids=str,
)
def test_error_comes_of_a_peer_by_what_it_is_or_followed_and_not_by_a_name_in_its_text(error, of_peer):
    assert comes_of_peer(error) == of_peer
