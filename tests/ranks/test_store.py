"""The job's store may stand still, die, or be cut off: no rank waits for it longer than it wants to."""

import logging
import queue
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from ranks import digest, run_forked, staged
from stores import Stuck, network, store_server
from torch.distributed import TCPStore
from training import features, mlp

import straggle.merge.wire.store
from straggle import LateHandling, PeerFailed, StagedDataParallel
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.store import JobStore, StoreUnreachable, connect, place_of


class Lines(logging.Handler):
    """What is logged, as it comes."""

    def __init__(self):
        super().__init__()
        self._lines = queue.SimpleQueue()

    def emit(self, record):
        self._lines.put(record.getMessage())

    def next(self):
        return self._lines.get(timeout=60)


@pytest.fixture
def lines():
    handler = Lines()
    logging.getLogger("straggle.merge.wire.store").addHandler(handler)
    yield handler
    logging.getLogger("straggle.merge.wire.store").removeHandler(handler)


@pytest.fixture
def hurry(monkeypatch):
    """Gives up soon, and tries again soon."""
    for name, seconds in {"ANSWER_S": 0.2, "_LOOK_S": 0.01, "_RETRY_S": 0.02}.items():
        monkeypatch.setattr(straggle.merge.wire.store, name, seconds)


def job_store(connect_it, place="the job's store at node0:29400", **options):
    return JobStore(connect_it, place, who="rank 3", without="no rank is late", watched=("trouble",), **options)


def test_request_that_is_not_answered_ends_with_the_place_of_the_store():
    stuck = Stuck()
    store = job_store(lambda: stuck, look_s=600.0)
    assert store.ask(lambda one: one.check(["word"])) is False
    stuck.free.clear()
    with pytest.raises(StoreUnreachable, match="the job's store at node0:29400 does not answer"):
        store.ask(lambda one: one.check(["word"]), 0.01)
    stuck.free.set()
    store.close()


def test_what_nobody_waits_for_any_more_is_not_asked_later():
    stuck = Stuck()
    store = job_store(lambda: stuck, look_s=600.0)
    stuck.free.clear()
    for key in "ab":
        with pytest.raises(StoreUnreachable):
            store.ask(lambda one, key=key: one.check([key]), 0.01)
    stuck.free.set()
    store.ask(lambda one: one.check(["c"]))
    assert stuck.asked == ["check ['a']", "check ['c']"]
    store.close()


def test_what_is_posted_is_carried_out_in_order_and_nobody_waits_for_it():
    stuck = Stuck()
    stuck.free.clear()
    store = job_store(lambda: stuck, look_s=600.0)
    for key in "abc":
        store.post(lambda one, key=key: one.set(key, ""))
    stuck.free.set()
    store.close()
    assert stuck.asked == ["set a", "set b", "set c"]


def test_loss_is_logged_with_what_does_not_work_and_the_same_connection_may_answer_again(lines, hurry):
    stuck = Stuck()
    store = job_store(lambda: stuck, look_s=0.01)
    stuck.free.clear()
    told = lines.next()
    assert told.startswith(
        "rank 3: the job's store at node0:29400 does not answer (no answer in time): no rank is late"
    )
    assert not store.reachable
    store.post(lambda one: one.set("lost", ""))
    with pytest.raises(StoreUnreachable, match="no answer in time"):
        store.ask(lambda one: one.check(["word"]))
    stuck.free.set()
    assert "rank 3: the job's store at node0:29400 answers again, after" in lines.next()
    assert store.reachable
    store.ask(lambda one: one.set("trouble", ""))
    assert "set lost" not in stuck.asked
    store.close()


def test_connections_that_are_not_answered_do_not_pile_up(lines, hurry):
    made = []
    enough = threading.Event()

    def connect_it():
        made.append(Stuck())
        made[-1].free.clear()
        if len(made) == straggle.merge.wire.store._MAX_UNANSWERED:
            enough.set()
        return made[-1]

    store = job_store(connect_it, look_s=0.01)
    lines.next()
    assert enough.wait(60)
    for stuck in list(made):
        stuck.free.set()
    assert "answers again" in lines.next()
    assert len(made) == straggle.merge.wire.store._MAX_UNANSWERED
    store.close()


def test_what_is_watched_is_seen():
    stuck = Stuck()
    store = job_store(lambda: stuck, look_s=600.0)
    store.look()
    store.ask(lambda one: one.set("trouble", ""))
    assert store.seen == frozenset()
    store.look()
    store.ask(lambda one: one.check(["word"]))
    assert store.seen == {"trouble"}
    store.close()


def test_closed_store_says_so_and_leaves_no_thread():
    before = threading.active_count()
    store = job_store(Stuck)
    store.close()
    assert threading.active_count() == before
    with pytest.raises(StoreUnreachable, match="the connection to the job's store at node0:29400 is closed"):
        store.ask(lambda one: one.check(["word"]))


# -- real stores


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_each_kind_of_store_has_connections_in_a_corner_of_their_own(kind, tmp_path):
    with store_server() as server:
        given = {
            "HashStore": dist.HashStore,
            "FileStore": partial(dist.FileStore, str(tmp_path / "store")),
            "TCPStore": partial(TCPStore, "127.0.0.1", server.port),
        }[kind]()
        store = job_store(partial(connect, dist.PrefixStore("default_pg", given), "corner"), place_of(given))
        store.ask(lambda one: one.set("word", "heard"))
        assert given.get("default_pg/corner/word") == b"heard"
        place = {"FileStore": f"in the file {tmp_path}/store", "TCPStore": f"at 127.0.0.1:{server.port}"}.get(kind, "")
        assert store.place == f"the job's store {place}".strip()
        store.close()


def test_store_whose_process_is_killed_is_lost_at_once_and_a_new_one_there_is_found(lines, hurry):
    with store_server() as server:
        client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=300))
        store = job_store(partial(connect, client, "corner"), place_of(client), look_s=0.01)
        store.ask(lambda one: one.set("word", ""))
        server.kill()
        assert f"the job's store at 127.0.0.1:{server.port} does not answer" in lines.next()
        with store_server(server.port):
            assert "answers again" in lines.next()
            assert not store.ask(lambda one: one.check(["word"]))  # it is another one
            store.close()


def test_store_behind_a_network_that_was_cut_is_found_when_that_is_healed(lines, hurry):
    with store_server() as server, network(server) as between:
        client = TCPStore("127.0.0.1", between.port)
        store = job_store(partial(connect, client, "corner"), place_of(client), look_s=0.01)
        store.ask(lambda one: one.set("word", ""))
        assert store.ask(lambda one: one.check(["word"]))  # set() does not wait until it has arrived
        between.cut()
        assert "does not answer (no answer in time)" in lines.next()
        between.heal()
        assert "answers again" in lines.next()
        assert store.ask(lambda one: one.check(["word"]))
        store.close()


# -- ranks


def train(rank, server, at_step, num_steps, deadline_s, fault, slow_s=0.0):
    """The store has ``fault`` before step ``at_step``; the last rank is slow from the first. How each step came."""
    world_size = dist.get_world_size()
    server.join(rank, world_size)
    module = mlp()
    lines = Lines()
    logging.getLogger("straggle").addHandler(lines)
    sleep_s = slow_s if rank == world_size - 1 else 0.0
    module[2].register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    reports = []
    with staged(module, deadline=deadline_s, late_handling=LateHandling(grace_s=600.0)) as model:
        for number in range(num_steps):
            if number == at_step:
                dist.barrier()
                if rank == 0:
                    getattr(server, fault)()
                lines.next()  # each rank has noticed
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
        reachable = model.store_reachable
    return digest(module.parameters()), reports, reachable


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_ranks_train_on_without_the_store_and_every_report_says_so(fault):
    with store_server() as server:
        results = run_forked(train, 3, server, 5, 40, 0.001, fault)
    assert len({parameters for parameters, _, _ in results}) == 1
    for _, reports, reachable in results:
        assert [report.step for report in reports] == list(range(40))
        assert not reachable
        assert {report.ranks_without_store for report in reports[:5]} == {()}
        assert {report.ranks_without_store for report in reports[5:]} == {(0, 1, 2)}


def wrap_over_frozen_store(rank, server):
    server.join(rank, 1)
    server.freeze()
    Channel(None, give_up_s=0.5)


def test_model_is_not_wrapped_over_a_store_that_does_not_answer():
    with store_server() as server:
        (end,) = run_forked(wrap_over_frozen_store, 1, server, outcomes=True)
        assert end.kind == "StoreUnreachable"
        assert f"the job's store at 127.0.0.1:{server.port} does not answer" in end.message


def train_while_it_stands_still(rank, server):
    """No rank is slow, and all report in each step that they have finished. How long the steps took from then on."""
    server.join(rank, 3)
    module, seconds = mlp(), []
    with staged(module, deadline=0.001, late_handling=LateHandling(grace_s=600.0)) as model:
        for number in range(500):
            if number == 100 and rank == 0:
                server.freeze()
            began_at = time.monotonic()
            with model.step():
                model(features(rank, number)).square().mean().backward()
            seconds.append(time.monotonic() - began_at)
            time.sleep(0.01)
        return seconds[100:], model.last_report.ranks_without_store


@pytest.mark.slow
def test_no_step_waits_for_a_store_that_stands_still():
    with store_server() as server:
        for seconds, without_store in run_forked(train_while_it_stands_still, 3, server):
            assert max(seconds) < 5.0  # who waits for the store does so for give_up_s=300
            assert without_store == (0, 1, 2)


@pytest.mark.slow
def test_slow_rank_is_late_again_when_the_store_is_back():
    with store_server() as server:
        results = run_forked(lose_and_find, 3, server)
    for reports in results:
        before, without, after = (
            [report for report in reports if report.scalars["phase"] == phase] for phase in range(3)
        )
        assert all(report.late_ranks == (2,) for report in before[5:])
        assert not any(report.late_ranks for report in without[1:])
        assert all(report.ranks_without_store == (0, 1, 2) for report in without[1:])
        assert all(report.late_ranks == (2,) for report in after[1:])
        assert not any(report.ranks_without_store for report in after[1:])


def lose_and_find(rank, server):
    """Rank 2 is slow; the store stands still for a while. The steps before, meanwhile and after."""
    server.join(rank, 3)
    module, reports, lines = mlp(), [], Lines()
    logging.getLogger("straggle").addHandler(lines)
    module[2].register_forward_pre_hook(lambda *_: time.sleep(0.2 if rank == 2 else 0.0))
    with staged(module, deadline=0.05, late_handling=LateHandling(grace_s=600.0)) as model:
        for phase in range(3):
            for number in range(10):
                with model.step() as step:
                    step.log(phase=phase)
                    model(features(rank, number)).square().mean().backward()
                reports.append(model.last_report)
            dist.barrier()
            if rank == 0 and phase < 2:
                (server.freeze, server.thaw)[phase]()
            if phase < 2:
                lines.next()
            dist.barrier()
    return reports


GIVE_UP_S = 4.0
_silent = []  # of a rank that is there and does nothing; one whose model is gone would say that it has ended


def hang_without_the_store(rank, server, fault):
    """Rank 2 hangs in step 5, and the store has its fault: when the others gave up, and with which words."""
    server.join(rank, 3)
    module = mlp()
    late_handling = LateHandling(grace_s=0.0, give_up_s=GIVE_UP_S)
    model = StagedDataParallel(module, deadline=0.05, late_handling=late_handling)
    for number in range(100):
        if number == 5:
            dist.barrier()
            if rank == 2:
                getattr(server, fault)()
                _silent.append(model)
                return None
        began_at = time.monotonic()
        try:
            with model.step():
                model(features(rank, number)).square().mean().backward()
        except PeerFailed as failure:
            return time.monotonic() - began_at, str(failure)
    raise AssertionError("it did not give up")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_peers_give_up_in_time_and_say_where_the_store_is_that_does_not_answer(fault):
    with store_server() as server:
        ends = run_forked(hang_without_the_store, 3, server, fault, outcomes=True, timeout_s=GIVE_UP_S + 10)
        for seconds, words in ends[:2]:
            assert seconds < GIVE_UP_S + 2
            assert "step 5, stage" in words
            assert f"the job's store at 127.0.0.1:{server.port} does not answer" in words
