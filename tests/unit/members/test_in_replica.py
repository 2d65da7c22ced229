"""Members that are replicas: whose requests count, and what their ranks say to each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from straggle.members.agents import Exited
from straggle.members.healed.ask_replica import AskReplica, all_have_state
from straggle.members.views.failure_detector import key_of_end
from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.join_requests import JoinRequests
from straggle.members.views.membership import Membership
from straggle.members.views.view import DONE, Change, Elastic, View

LIMIT_S = 20.0
VIEW = View(0, {0: "a", 1: "b"})


def test_ranks_of_a_member_are_one_after_the_other() -> None:
    inside = InReplica(shard=1, size=3)
    assert list(inside.ranks(2)) == [6, 7, 8]
    assert (inside.rank(2), inside.next_rank(2), InReplica(2, 3).next_rank(2)) == (7, 8, 6)
    assert (ALONE.rank(2), list(ALONE.ranks(2)), ALONE.key("plan")) == (2, [2], "plan")
    assert inside.key("plan") != InReplica(0, 3).key("plan")


def test_replica_is_wanted_when_all_of_its_ranks_have_asked_as_one() -> None:
    store = dist.HashStore()
    asking = [JoinRequests(1, 2, name, InReplica(shard, 2)) for shard, name in ((0, "new"), (1, "new"))]
    leader = JoinRequests(0, 2, "a", InReplica(1, 2))

    def wanted() -> dict[int, str]:
        leader.hear(store, VIEW, ())
        return dict(leader.wanted)

    asking[0].ask(store)
    assert wanted() == {}
    JoinRequests(1, 2, "older", InReplica(1, 2)).ask(store)  # of a process that is gone
    assert wanted() == {}
    asking[1].ask(store)
    assert wanted() == {1: "new"}
    assert leader.take(store, VIEW) == {1: "new"}
    leader.hear_anew()
    assert wanted() == {}
    asking[1].ask(store)  # once more, before it knows the answer
    asking[1].answered(store)
    asking[0].ask(store)  # as it is out again, and the other one does not know of it yet
    assert wanted() == {}


@pytest.mark.parametrize("come", [True, False])
def test_all_ranks_of_a_replica_go_on_from_their_states_or_none(come: bool) -> None:
    store = dist.HashStore()
    if come:
        store.set("have/1", "")
    lent = partial(nullcontext, store)
    assert all_have_state(lent, "have", 0, [0, 1], awaits=lambda: False) == come
    assert all_have_state(lent, "have", 1, [0, 1], awaits=lambda: True) == come  # the other one has decided


def test_rank_whose_connection_breaks_gets_the_answer_by_another_one() -> None:
    """The other ranks of its replica go on from their states."""
    store, broken = dist.HashStore(), SimpleNamespace(set=_break)
    connections = [broken, broken, store]
    store.set("have/1", "")
    assert all_have_state(lambda: nullcontext(connections.pop(0)), "have", 0, [0, 1], awaits=lambda: True)
    with pytest.raises(dist.DistNetworkError):
        all_have_state(lambda: nullcontext(broken), "have", 0, [0, 1], awaits=lambda: False)


def _break(*_words: str) -> None:
    raise dist.DistNetworkError("connection reset by peer")


def ask(wanted: dict[int, str], *, healing: frozenset[int] = frozenset(), rank: int = 0) -> int:
    membership = SimpleNamespace(
        view=VIEW, rank=rank, joins=SimpleNamespace(wanted=wanted), detector=SimpleNamespace(healing=healing)
    )
    member = SimpleNamespace(asks=lambda number: number, is_to_leave=lambda: False, lacks_step=False)
    return AskReplica(member, membership)()[0]  # type: ignore[arg-type]


def test_ranks_of_a_replica_say_the_same_if_they_would_let_in_the_same() -> None:
    assert ask({2: "c", 1: "d"}) == ask({1: "d", 2: "c"}) != ask({2: "c"})
    assert 0 < ask({2: "c"}) < 2**20


@pytest.mark.parametrize(
    "word",
    [ask({}), ask({1: "b"}), ask({2: "c"}, healing=frozenset({0})), ask({2: "c"}, rank=1)],
    ids=["nobody asks", "a member already", "it is healed itself", "another leads"],
)
def test_rank_says_no_if_it_would_let_nobody_in(word: int) -> None:
    assert word == 0


def watched(number: int, exited: Exited, *, over: Sequence[int] = (), in_step: bool = False) -> Sequence[Change]:
    """What rank ``number`` of two replicas with two ranks each changes when rank 3 has ended.

    ``over``: the ranks whose loops are over. ``in_step``: it is in a step.
    """
    store, ended = dist.HashStore(), {3: exited}
    ranks = [
        Membership(
            rank // 2,
            2,
            Elastic(min_ranks=1),
            connect=lambda: store,
            exited=lambda _, rank: ended.get(rank),
            inside=InReplica(rank % 2, 2),
            incarnation=f"0-{rank // 2}",
        )
        for rank in (0, 1, 2, 3)
    ]
    first = View(0, {0: "0-0", 1: "0-1"}, job="j", begun=True)
    ranks[0].chain.begin(store, first)
    for one in ranks:
        one.chain.look(store)
    for rank in over:
        store.set(key_of_end(f"0-{rank // 2}", rank), "")
    watching, until = ranks[number], time.monotonic() + LIMIT_S
    watching.detector.put_out_silent()
    watching.detector.follow_step(lambda: in_step)
    watching.detector.start()
    while watching.view == first and watching.detector.num_looks < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    watching.close()
    return watching.view.changes


KILLED, DID_ITS_WORK = Exited(0, 1.0, signal="SIGKILL"), Exited(0, 1.0, code=0)


@pytest.mark.parametrize(("number", "notices"), [(1, True), (2, True), (0, False)])
def test_end_of_a_rank_puts_out_its_replica_and_is_seen_by_its_shard_and_inside(number: int, notices: bool) -> None:
    assert [(change.rank, change.reason) for change in watched(number, KILLED)] == (
        [(1, "rank 3 of it: its process ended by SIGKILL, after 1.0 s")] if notices else []
    )


@pytest.mark.parametrize("number", [1, 2])
def test_replica_stays_while_one_of_its_ranks_has_work_to_do_after_the_loop(number: int) -> None:
    assert not watched(number, DID_ITS_WORK, over=[3])


def test_replica_whose_loop_is_over_on_all_ranks_has_done_its_work() -> None:
    assert watched(1, DID_ITS_WORK, over=[2, 3]) == (Change.left(1, DONE),)


@pytest.mark.parametrize(
    ("exited", "over", "in_step"),
    [(DID_ITS_WORK, [3], True), (DID_ITS_WORK, [2], False), (KILLED, [3], False)],
    ids=["another rank of it needs it", "in its loop", "killed after it"],
)
def test_replica_leaves_with_a_rank_that_is_missed(exited: Exited, over: list[int], in_step: bool) -> None:
    ((rank, kind),) = [(own.rank, own.kind) for own in watched(2, exited, over=over, in_step=in_step)]
    assert (rank, kind) == (1, "ended")


def test_rank_of_a_replica_that_is_started_again_does_not_take_itself_for_the_member_that_it_was() -> None:
    """It beats, and its earlier process, which is a member in the last view, does not: no member is left."""
    store, ended = dist.HashStore(), {rank: Exited(0, 1.0, signal="SIGKILL") for rank in range(4)}
    again = Membership(
        0,
        2,
        Elastic(min_ranks=1),
        connect=lambda: store,
        exited=lambda _, rank: ended.get(rank),
        inside=InReplica(0, 2),
        incarnation="1-new",
    )
    again.chain.begin(store, View(0, {0: "0-old", 1: "0-other"}, job="j", begun=True))
    again.chain.look(store)
    again.detector.start()
    until = time.monotonic() + LIMIT_S
    while not again.detector.alone:
        assert time.monotonic() < until
        time.sleep(0.01)
    again.close()
