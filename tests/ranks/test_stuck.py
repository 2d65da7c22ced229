"""A rank that hangs is named once, with the line of the user's code that it is in, whatever it hangs in."""

import ctypes
import multiprocessing as mp
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import logged, run_ranks, staged
from torch.utils.data import DataLoader, Dataset
from training import features, mlp

from straggle import FixedDeadline, LateHandling

HANG_S = 3.0
LATE = LateHandling(stuck_after_s=0.4)


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


class Hangs(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(HANG_S)
        return index


def in_loader():
    mp.current_process()._config["daemon"] = False  # python lets no process of run_ranks have workers
    next(iter(DataLoader(Hangs(), num_workers=1, multiprocessing_context="fork")))  # in_loader


def train(rank, hang, steps=6, late_handling=LATE, deadline=None, inside=False):
    """Rank 1 hangs before step 3, or in its forward pass; what is logged, reported, and how far it comes."""
    module, reports, hanging = mlp(), [], [False]
    module[2].register_forward_pre_hook(lambda *_: hang() if hanging[0] and inside else None)
    with logged("straggle.stuck") as lines, staged(module, deadline=deadline, late_handling=late_handling) as model:
        model.register_stuck_hook(reports.append)
        for number in range(steps):
            hanging[0] = (rank, number) == (1, 3)
            if hanging[0] and not inside:
                hang()
            with model.step():
                model(features(rank, number)).sum().backward()
        time.sleep(0.3)
        return lines, reports, model.last_report.step


@pytest.mark.parametrize("hang", [in_sleep, in_lock, in_c_call])
def test_a_rank_that_hangs_between_two_steps_names_its_line_and_who_waits(hang):
    (of_peer, no_reports, last), (lines, reports, _) = run_ranks(train, 2, hang)
    assert (of_peer, no_reports, last) == ([], [], 5)
    (line,) = lines
    assert line.startswith("rank 1 has been before step 3 for ")
    assert f"in {hang.__name__} (tests/ranks/test_stuck.py:" in line
    assert line.endswith(f"  # {hang.__name__}); rank 0 waits for it")
    began, over = reports
    assert (began.rank, began.step, began.entered, began.waiting, began.over) == (1, 3, False, (0,), False)
    assert began.seconds >= LATE.stuck_after_s
    assert began.line.startswith(f"{hang.__name__} (tests/ranks/test_stuck.py:")
    assert any(frame.startswith("train (tests/ranks/test_stuck.py:") for frame in began.stack)
    assert (over.over, over.where) == (True, began.where)
