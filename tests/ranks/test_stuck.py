"""A rank that hangs is named once, with the line of the user's code that it is in, whatever it hangs in."""

import ctypes
import json
import math
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch.distributed as dist
import torch.distributed.debug as debug
from ranks import logged, run_forked, staged
from repository import ROOT
from torch._C._distributed_c10d import _WorkerServer
from torch.utils.data import DataLoader, Dataset
from training import features, mlp

from straggle import LateHandling
from straggle.members import agents
from straggle.observe.metrics import MetricsExporter

pytestmark = pytest.mark.slow

HANG_S = 2.5  # many times as long as the watching threads need, also on a busy machine
LATE = LateHandling(stuck_after_s=0.4, grace_s=0.0, max_lag=100)
HERE = "tests/ranks/test_stuck.py"


def in_sleep():
    time.sleep(HANG_S)  # in_sleep


def in_lock():
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(HANG_S, lock.release).start()
    lock.acquire()  # in_lock


def in_c_call():
    ctypes.CDLL(None).usleep(int(1e6 * HANG_S))  # in_c_call


def with_the_gil():
    ctypes.PyDLL(None).usleep(int(1e6 * HANG_S))  # with_the_gil


def stopped():
    subprocess.Popen(["sh", "-c", f"sleep {HANG_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)  # stopped


class Hangs(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(HANG_S)
        return index


def in_loader():
    mp.current_process().daemon = False  # python lets no process of run_forked have workers
    next(iter(DataLoader(Hangs(), num_workers=1, multiprocessing_context="fork")))  # in_loader


def train(rank, hang, steps=6, deadline=None, inside=False, of_rank=1, late_handling=LATE):
    """One rank hangs before step 3, or in its forward pass; what is logged, reported, and how far it comes."""
    module, reports, hanging = mlp(), [], [False]
    module[2].register_forward_pre_hook(lambda *_: hang() if hanging[0] and inside else None)
    with logged("straggle.stuck") as lines, staged(module, deadline=deadline, late_handling=late_handling) as model:
        model.register_stuck_hook(reports.append)
        for number in range(steps):
            hanging[0] = number == 3 and of_rank in (rank, None)
            if hanging[0] and not inside:
                hang()
            with model.step():
                model(features(rank, number)).sum().backward()
        while reports and not reports[-1].over:
            time.sleep(0.01)
        if rank == 0:
            lines += filter(None, [agents.take_silent(dist.distributed_c10d._get_default_store(), 1)])
        return lines, reports, model.last_report.step


@pytest.mark.parametrize("hang", [in_sleep, in_lock, in_c_call, in_loader])
def test_a_rank_that_hangs_between_two_steps_names_its_line_and_who_waits(hang):
    (of_peer, no_reports, last), (lines, reports, _) = run_forked(train, 2, hang)
    assert (of_peer, no_reports, last) == ([], [], 5)
    (line,) = lines
    assert line.startswith("rank 1 has been before step 3 for ")
    assert f"s, in {hang.__name__} ({HERE}:" in line
    assert f"  # {hang.__name__})" in line
    assert line.endswith("; rank 0 waits for it")
    began, over = reports
    assert (began.rank, began.step, began.entered, began.waiting, began.over) == (1, 3, False, (0,), False)
    assert began.line.startswith(f"{hang.__name__} ({HERE}:")
    assert any(frame.startswith(f"train ({HERE}:") for frame in began.stack)
    assert (over.over, over.where, over.seconds > began.seconds >= LATE.stuck_after_s) == (True, began.where, True)
    assert ("inside of _try_get_data (torch/utils/data/dataloader.py:" in line) == (hang is in_loader)


def hang_and_go_on_unseen(rank):
    """Rank 1 hangs before step 3, makes two steps, and holds its GIL before the watching thread has looked again."""
    reports, hold_gil = [], ctypes.PyDLL(None).usleep
    with logged("straggle.stuck"), staged(mlp(), late_handling=LATE) as model:
        model.register_stuck_hook(reports.append)
        for number in range(5):
            if (rank, number) == (1, 3):
                time.sleep(HANG_S)
                hold_gil(300_000)  # the watching thread looks as soon as it can, and then not for a tenth of a second
            with model.step():
                model(features(rank, number)).sum().backward()
        hold_gil(400_000)
        while reports and not any(report.over for report in reports):
            time.sleep(0.01)
    return [(report.step, report.over) for report in reports]


def test_a_hang_is_over_though_its_rank_has_stopped_in_a_later_step_since():
    _, reports = run_forked(hang_and_go_on_unseen, 2)
    assert reports[:2] == [(3, False), (3, True)]


@pytest.mark.parametrize("hang", [with_the_gil, stopped])
def test_a_rank_that_cannot_speak_is_named_by_one_that_waits(hang):
    (lines, reports, _), (own_lines, _, last), (others, none, _) = run_forked(train, 3, hang)
    line, to_the_agent = lines
    assert line.startswith("ranks 0, 2 have waited for rank 1 in step 3 for ")
    assert to_the_agent.startswith("rank 0 has waited for it for ")
    assert "its process is stopped, something holds its GIL, or its host is gone" in line
    assert [(report.rank, report.step, report.waiting, report.over) for report in reports] == [
        (1, 3, (0, 2), False),
        (1, 3, (0, 2), True),
    ]
    assert (others, none, last) == ([], [], 5)
    assert all(f"in {hang.__name__} ({HERE}:" in said for said in own_lines)  # when it can speak again
    assert all(
        "nothing ran in this process: its GIL was held, or it was stopped); ranks 0, 2" in said for said in own_lines
    )


def test_a_rank_that_is_stood_in_for_names_its_line_and_how_far_the_others_are():
    (of_peer, _, last), (lines, reports, _), _ = run_forked(train, 3, in_sleep, 12, 0.1, True)
    assert (of_peer, last) == ([], 11)
    (line,) = lines
    assert line.startswith("rank 1 has been in step 3 for ")
    assert "; the others go on without it, by " in line
    first = reports[0]
    assert (first.stood_in, first.step, first.entered, first.line[:8]) == (1, 3, True, "in_sleep")


def calls_barrier():
    if dist.get_rank() == 1:
        threading.Timer(HANG_S, dist.barrier).start()
    else:
        dist.barrier()  # calls_barrier


def test_a_collective_of_the_loop_that_one_rank_skips_names_that_rank_and_the_line_of_the_others():
    (lines, reports, last), (skips, no_reports, _), (others, _, _) = run_forked(
        train, 3, calls_barrier, 6, None, False, None
    )
    assert (skips, no_reports, others, last) == ([], [], [], 5)
    (line,) = lines
    assert line.startswith("ranks 0, 2 have been before step 3 for ")
    assert f"in calls_barrier ({HERE}:" in line
    assert line.endswith(
        "a collective of the loop's own (gloo:barrier number 1 of group default_pg (no tensor, scheduled)) that rank 1 "
        "has not begun"
    )
    assert (reports[0].waiting, reports[0].collective[:12]) == ((1,), "gloo:barrier")


def train_another(rank):
    """Steps of one model, and then of another one for longer than a rank may be stuck."""
    with logged("straggle.stuck") as lines, staged(mlp(), late_handling=LATE) as first, staged(mlp()) as second:
        for number in range(12):
            model = first if number < 2 else second
            with model.step():
                if rank == 1:
                    time.sleep(LATE.stuck_after_s / 2)
                model(features(rank, number)).sum().backward()
        return lines


def test_a_model_that_rests_while_another_one_trains_waits_for_nobody():
    assert run_forked(train_another, 2) == [[], []]


def evaluates():
    time.sleep(HANG_S)


def test_nobody_warns_while_all_ranks_are_at_work_between_two_steps():
    for lines, reports, _ in run_forked(train, 2, evaluates, 6, None, False, None):
        assert (lines, reports) == ([], [])


def test_infinite_stuck_after_s_watches_nothing():
    results = run_forked(train, 2, in_sleep, 6, None, False, 1, LateHandling(stuck_after_s=math.inf))
    assert [(lines, reports) for lines, reports, _ in results] == [([], []), ([], [])]


def asks_debug_server(url):
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        return json.loads(answer.read())


def seen_from_outside(rank):
    """What rank 1's metrics and its debug server say while it hangs, and when it goes on again."""
    debug._WORKER_SERVER = server = _WorkerServer("127.0.0.1", 0)  # as `start_debug_server` does on each rank
    seen, url = [], f"http://127.0.0.1:{server.port}/handler/straggle_stuck"

    def look():
        where = exporter.registry.restricted_registry(["straggle_stuck_info"]).collect()
        samples = [sample for family in where for sample in family.samples]
        seen.append((samples, asks_debug_server(url)))

    def hang():
        looks = threading.Timer(0.8 * HANG_S, look)
        looks.start()
        time.sleep(HANG_S)
        looks.join()

    with staged(mlp(), late_handling=LATE) as model, MetricsExporter(model, port=None) as exporter:
        over = threading.Event()
        model.register_stuck_hook(lambda report: report.gone)
        model.register_stuck_hook(lambda report: over.set() if report.over else None)
        for number in range(4):
            if (rank, number) == (1, 3):
                hang()
            with model.step():
                model(features(rank, number)).sum().backward()
        if rank == 1:
            over.wait()
            look()
    closed = asks_debug_server(url)
    server.shutdown()
    return seen, closed


def test_a_process_with_the_handler_of_the_debug_server_ends_as_any_other():
    code = "import torch.distributed.debug as debug; from straggle.stuck.wing import DebugServer\n"
    code += "debug._WORKER_SERVER = object(); DebugServer(dict).offer()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_metrics_and_the_debug_server_of_torch_say_where_a_rank_is_stuck():
    (none, _), (((samples, described), (over, _)), closed) = run_forked(seen_from_outside, 2)
    assert none == []
    (sample,) = samples
    assert (sample.name, sample.value, sample.labels["rank"]) == ("straggle_stuck_info", 1.0, "1")
    assert sample.labels["where"].startswith(f"hang ({HERE}:")
    assert (described["rank"], described["step"], described["goes_on"]) == (1, 3, False)
    assert described["kind"] == "stuck"
    assert described["for_s"] >= LATE.stuck_after_s
    assert f"in hang ({HERE}:" in described["where"]
    assert any(frame.startswith(f"seen_from_outside ({HERE}:") for frame in described["stack"])
    assert [(one.value, one.labels["where"]) for one in over] == [(0.0, "")]
    assert closed == {"closed": True}
