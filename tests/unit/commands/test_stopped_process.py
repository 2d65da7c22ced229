"""What a node's launcher says of a worker's process that gives no word of itself."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from straggle.commands.launching.stopped_process import (
    SilentWorkers,
    StoppedWorkers,
    described,
    look_at,
    state_of,
    without_own_threads,
)
from straggle.members.agents import post_silent, post_stopped, stopped, take_silent
from straggle.merge.wire.store import StoreUnreachable

STAT = "4731 (python (a) b) {} 1 4731 4731 0 -1 4194560 5000"


@pytest.mark.parametrize(
    ("state", "wchan", "expected"),
    [
        ("T", "do_signal_stop", "(stopped by a signal), in the kernel's do_signal_stop; `kill -CONT 7` lets it go on"),
        (
            "D",
            "rpc_wait_bit_killable",
            "file system that does not answer), in the kernel's rpc_wait_bit_killable",
        ),
        ("R", "0", "(running: something may hold its GIL, or it is starved)"),
        ("X", "", "(see proc(5))"),
    ],
)
def test_state_and_what_the_kernel_waits_in_are_in_words(state, wchan, expected):
    words = described(7, STAT.format(state), wchan)
    assert words.startswith(f"process 7: state {state} (")
    assert words.endswith(expected)


def test_a_command_with_blanks_and_parentheses_hides_no_state():
    assert state_of(STAT.format("S")) == "S"


def test_a_process_is_looked_at_in_proc(tmp_path):
    process = tmp_path / "4731"
    process.mkdir()
    (process / "stat").write_text(STAT.format("T"))
    assert look_at(4731, tmp_path).startswith(
        "process 4731: state T (stopped by a signal); `kill -CONT 4731` lets it go on"
    )
    (process / "wchan").write_text("do_signal_stop")
    assert "(stopped by a signal), in the kernel's do_signal_stop; `kill" in look_at(4731, tmp_path)
    assert look_at(7, tmp_path) == "process 7: No such file or directory"


def test_a_dump_has_no_threads_that_only_wait():
    main = 'Thread 1 (idle): "MainThread"\n    load (job.py:23)'
    own, other = (
        'Thread 2 (idle): "straggle-stuck"\n    _run (wing.py:1)',
        'Thread 3 (active): "loader"\n    read (a.py:2)',
    )
    assert (
        without_own_threads(f"Process 1: python\n\n{main}\n{own}\n{other}\n") == f"Process 1: python\n\n{main}\n{other}"
    )


class Answers:
    """The launcher's connection to the job's store."""

    def __init__(self):
        self.store = HashStore()

    def ask(self, request):
        return request(self.store)


def test_workers_that_peers_miss_are_looked_at_once_and_no_others(capfd):
    store, looked = Answers(), threading.Event()
    post_silent(store.store, 1, "rank 0 has waited for it for 12 s")
    post_silent(store.store, 2, "it has ended")
    post_silent(store.store, 7, "it is another node's")

    def look(pid):
        looked.set()
        return f"process {pid}: state T"

    workers = [SimpleNamespace(rank=rank, pid=pid) for rank, pid in ((0, 10), (1, 11), (2, None))]
    silent = SilentWorkers(workers, store, look, look_s=0.001)
    silent.start()
    assert looked.wait(30)
    silent.close()
    silent.join()
    assert take_silent(store.store, 1) is None
    assert capfd.readouterr().err == (
        "straggle launch: rank 1 gives no word of itself (rank 0 has waited for it for 12 s); process 11: state T\n"
    )


def test_a_stopped_worker_is_reported_after_two_looks_until_it_goes_on_or_is_another_process(tmp_path):
    store, worker = Answers(), SimpleNamespace(rank=1, pid=4731)

    def is_in(state, pid=4731):
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "stat").write_text(STAT.format(state))
        watch.look()
        return stopped(store.store, 1)

    watch = StoppedWorkers([worker], store, proc=tmp_path)
    for runs in "RSDZt":
        assert not is_in(runs)
        assert not is_in(runs)
    assert not is_in("T")  # for a moment only, as far as one look can tell
    assert not is_in("S")
    assert not is_in("T")
    assert is_in("T")
    assert is_in("T")
    assert not is_in("S")
    assert not is_in("T")
    assert is_in("T")
    worker.pid = 4732
    assert not is_in("T", 4732)
    assert is_in("T", 4732)
    worker.pid = None
    watch.look()
    assert not stopped(store.store, 1)


def test_what_could_not_be_reported_of_a_stopped_worker_is_reported_later(tmp_path):
    class Away(Answers):
        away = True

        def ask(self, request):
            if self.away:
                raise StoreUnreachable("away")
            return super().ask(request)

    store = Away()
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "stat").write_text(STAT.format("T"))
    watch = StoppedWorkers([SimpleNamespace(rank=0, pid=11)], store, proc=tmp_path)
    watch.look()
    watch.look()
    store.away = False
    assert not stopped(store.store, 0)
    watch.look()
    assert stopped(store.store, 0)


def test_what_an_earlier_launcher_has_said_of_a_stopped_worker_is_taken_back_at_the_first_look(tmp_path):
    store = Answers()
    post_stopped(store.store, 0, is_stopped=True)
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "stat").write_text(STAT.format("R"))
    StoppedWorkers([SimpleNamespace(rank=0, pid=11)], store, proc=tmp_path).look()
    assert not stopped(store.store, 0)
