"""What a node's launcher says of a worker's process that gives no word of itself."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from straggle.commands.launching.stopped_process import (
    SilentWorkers,
    described,
    look_at,
    state_of,
    without_own_threads,
)
from straggle.members.agents import post_silent, take_silent

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
