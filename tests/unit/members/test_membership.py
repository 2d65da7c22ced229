"""The threads that send a rank's signs of life and look at others: what becomes of them where no answer comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from straggle.members.agents import Exited
from straggle.members.views.heartbeat import UNANSWERED_S, Heartbeat
from straggle.members.views.membership import JobDone, Membership, TooFewRanks
from straggle.members.views.view import DONE, Change, Elastic, Leaving, View
from straggle.members.views.view_chain import Hold, StoredView, ViewChain

LIMIT_S = 20.0


class Cut:
    """A connection to a store whose requests do not come back while its link is cut."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked_by = ""  # the thread that asked something last
        self.link, self.held = threading.Event(), threading.Event()
        self.link.set()

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self.asked_by = threading.current_thread().name
            if not self.link.is_set():
                self.held.set()
            self.link.wait()
            return getattr(self._store, name)(*args)

        return request


@pytest.fixture
def connections() -> Iterator[list[Cut]]:
    made: list[Cut] = []
    yield made
    for connection in made:
        connection.link.set()


def wait_until(so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not so():
        assert time.monotonic() < until, what
        time.sleep(0.01)


@pytest.fixture
def membership(connections: list[Cut]) -> Iterator[Membership]:
    """That of one rank, which has come to its third look at the store."""
    store = dist.HashStore()

    def connect() -> Cut:
        connections.append(Cut(store))
        return connections[-1]

    one = Membership(0, 1, Elastic(), connect=connect, exited=lambda _store, _rank: None)
    one.begin(LIMIT_S)
    wait_until(lambda: one.detector.num_looks >= 3, "no look at the store")
    yield one
    one.close()


def cut_one(connections: list[Cut], thread_name: str) -> Cut:
    """Cut the connection that this thread asks by, and wait until a request is held."""
    stuck = next(own for own in connections if own.asked_by == thread_name)
    stuck.link.clear()
    assert stuck.held.wait(LIMIT_S)
    return stuck


def signs_of_life(membership: Membership) -> str:
    return str(membership.connections.own().get(f"beat/0/{membership.incarnation}").decode())


@pytest.mark.parametrize("thread_name", ["straggle-watch", "straggle-heartbeat"])
def test_rank_whose_request_does_not_come_back_goes_on_by_a_new_connection(
    thread_name: str, membership: Membership, connections: list[Cut]
) -> None:
    stuck = cut_one(connections, thread_name)
    before = membership.detector.num_looks
    membership.detector.connect_anew()
    wait_until(lambda: membership.detector.num_looks >= before + 3, "no look at the store")
    wait_until(lambda: sum(own.asked_by == thread_name for own in connections) == 2, "no new connection")
    stuck.link.set()  # what was stuck comes back, and leaves the rest to its successor
    membership.close()
    ours = [thread for thread in threading.enumerate() if thread.name in ("straggle-watch", "straggle-heartbeat")]
    assert not ours


@pytest.mark.parametrize("thread_name", ["straggle-watch", "straggle-heartbeat"])
def test_signs_of_life_go_on_where_one_connection_is_stuck(
    thread_name: str, membership: Membership, connections: list[Cut]
) -> None:
    stuck = cut_one(connections, thread_name)
    for _ in range(3):
        before = signs_of_life(membership)
        wait_until(lambda before=before: signs_of_life(membership) != before, "no sign of life")
    stuck.link.set()


def test_rank_that_has_no_answers_gives_no_sign_of_life() -> None:
    beats, now, turns = [0], [0.0], [0]
    store = SimpleNamespace(set=lambda _key, _word: beats.append(len(beats)))

    def clock() -> float:
        turns[0] += 1
        return now[0]

    def after_turns() -> int:
        """Beats that were given when the thread has looked at the clock a few times more."""
        until = turns[0] + 3
        wait_until(lambda: turns[0] >= until, "the thread does nothing")
        return len(beats)

    one = Heartbeat(0, "a", lambda: store, lambda: 0, clock)
    one.start()
    before = after_turns()
    assert after_turns() > before
    now[0] = 1.1 * UNANSWERED_S
    silent = after_turns()  # with what was on its way
    assert after_turns() == silent
    one.answered()
    after_turns()
    assert after_turns() > silent
    one.stop()
    for thread in one.threads:
        thread.join()


def meet(store: Any, number: int, exited: Callable[[Any, int], Exited | None]) -> list[Membership]:
    """Ranks that have met, and have wrapped their model."""
    made = [
        Membership(rank, number, Elastic(min_ranks=1), connect=lambda: store, exited=exited) for rank in range(number)
    ]
    with ThreadPoolExecutor(number) as threads:
        list(threads.map(lambda own: own.begin(LIMIT_S) or own.has_wrapped(LIMIT_S), made))
    return made


@pytest.mark.parametrize("last_is_done", [True, False])
def test_who_is_started_again_where_no_member_lives_waits_for_none(last_is_done: bool) -> None:
    dead: dict[int, Exited] = {}
    store = dist.HashStore()
    first = meet(store, 2, lambda _, rank: dead.get(rank))
    if last_is_done:
        first[1].leave(DONE)
    first[1].close()
    again = Membership(0, 2, Elastic(min_ranks=1), connect=lambda: store, exited=lambda _, rank: dead.get(rank))
    assert again.begin(LIMIT_S)  # it comes late
    if not last_is_done:
        dead[1] = Exited(0, 1.0, signal="SIGKILL")
    looks = again.detector.num_looks
    wait_until(lambda: again.detector.num_looks >= looks + 3, "no look at the store")
    again.check_done()  # rank 0's first process is still a member, and beats
    first[0].close()
    dead[0] = Exited(0, 1.0, signal="SIGKILL")
    wait_until(lambda: again.detector.alone, "it does not see that the others are dead")
    with pytest.raises(JobDone if last_is_done else TooFewRanks, match=r"ranks \[1\] have ended|none of them gives"):
        again.check_done()
    again.close()


def test_rank_that_was_put_out_lets_nobody_in() -> None:
    """Newcomers would wait for the state of a rank that is no member."""
    store = dist.HashStore()
    first, other = meet(store, 2, lambda _store, _rank: None)
    first.leave(DONE)
    other.look()
    for one in (first, other):
        one.admit(7)
    assert (other.view.generation, other.view.step, other.view.giver) == (2, 7, 1)
    for one in (first, other):
        one.close()


def test_view_that_is_known_to_come_by_now_is_held_when_an_older_one_has_come() -> None:
    chain = ViewChain(0, "a", StoredView(2))
    older, newer = Hold(3, leads=True), Hold(4, leads=False)
    chain.hold(older)
    chain.hold(newer)
    chain.release(older)
    assert chain.held is newer
    chain.release(newer)
    assert chain.held is None


@pytest.mark.parametrize("why", [Leaving("slow", "its steps take too long"), Leaving("silent", "no sign of life")])
def test_why_a_rank_left_is_known_though_it_has_not_seen_the_view_that_put_it_out(why: Leaving) -> None:
    chain = ViewChain(0, "a", StoredView(3))
    first = View(0, {0: "a", 1: "b", 2: "c"}, begun=True)
    chain.saw(first)
    chain.saw(first.without({0: why}).without({2: DONE}))
    assert chain.left == Change.left(0, why)
