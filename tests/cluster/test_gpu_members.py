"""Members over nccl on GPUs, one rank on each: killed and back, frozen, and a communicator that is formed again.

python -m pytest -q -n0 -rs tests/cluster/test_gpu_members.py    # on 1, 2 and 4 GPUs; skips what needs more

NCCL takes no two ranks of a communicator on one GPU. On one, `benchmarks/on_gpu.sh` runs it, too. It needs torch 2.14,
and was not run yet: who has run it strikes that from docs/members.md, README.md and `formed_again.py`.
"""

import time

import pytest
import torch
import torch.distributed as dist
from job_loop import Loop, check_equal, gives_again, plain, train
from members import run_forked_job
from torch import nn

from straggle import Elastic
from straggle.backward.device import device_of
from straggle.members.regrouped.formed_again import Communicator
from straggle.merge.wire.groups import GlooGroup, is_over, kept_by, succeeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="needs torch 2.14"),
]
NCCL = {"BACKEND_OF_RANKS": "cpu:gloo,cuda:nccl2"}
A_WHILE = 4 * 10**9  # cycles, some seconds
spin = vars(torch.cuda)["_sleep"]


def needs(num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")


class OnDevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = plain().cuda()

    def forward(self, x):
        return self.network(x.cuda())


def trains(rank, board, loop):
    torch.cuda.set_device(rank)
    return train(rank, board, loop)


def check_lost_nothing(outcomes, ranks):
    """All that these ranks had computed was merged, though members changed."""
    rows = [row for own in outcomes for report in own.reports for row in report.ranks if row.rank in ranks]
    assert not [row for row in rows if row.cause == "members"]


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_members_train_alike(num_gpus):
    needs(num_gpus)
    with run_forked_job(num_gpus, trains, Loop(OnDevice), served=True, environment=NCCL) as job:
        job.walk(20)
        outcomes = job.finish()
    check_equal(outcomes)
    check_lost_nothing(outcomes, range(num_gpus))


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_members_go_on_without_a_killed_rank_lose_nothing_and_heal_it_when_it_is_back(num_gpus):
    needs(num_gpus)
    last, others = num_gpus - 1, [*range(num_gpus - 1)]
    with run_forked_job(num_gpus, trains, Loop(OnDevice), served=True, environment=NCCL) as job:
        job.walk(6)
        for _ in range(3):
            job.kill(last)
            job.walk(12, others)
            job.start(last)
            job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], last)
    check_lost_nothing(outcomes, others)


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_members_go_on_without_a_frozen_rank_and_take_it_back(num_gpus):
    needs(num_gpus)
    last, others = num_gpus - 1, [*range(num_gpus - 1)]
    with run_forked_job(
        num_gpus, trains, Loop(OnDevice, elastic=Elastic(suspect_s=1.0)), served=True, environment=NCCL
    ) as job:
        job.walk(6)
        job.stop(last)
        job.walk(12, others)
        job.resume(last)
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)


def test_two_ranks_that_are_gone_at_once_cost_seconds():
    needs(4)
    with run_forked_job(4, trains, Loop(OnDevice), served=True, environment=NCCL) as job:
        job.walk(6)
        job.kill(3)
        time.sleep(1.0)  # the others form their groups again about now
        job.kill(2)
        began = time.monotonic()
        job.walk(12, [0, 1])
        assert time.monotonic() - began < 20
        outcomes = job.finish()
    check_equal(outcomes)


def test_communicator_of_one_is_revoked_with_work_on_its_way_and_formed_again(record_property):
    """What is kept is what was there; the device is free within a moment, and each of ten rounds takes as little."""
    torch.cuda.set_device(0)
    device = device_of(torch.device("cuda", 0))
    store = dist.HashStore()
    communicator = Communicator(lambda: dist.PrefixStore("nccl", store), 0, 1, device)
    took_s = []
    for number in range(10):
        control = GlooGroup(dist.PrefixStore(f"control/{number}", store), 0, 1, 10.0, 60.0)
        began = time.perf_counter()
        group = communicator.form(control, 1, 10.0, communicator.revoke())
        took_s.append(time.perf_counter() - began)
        tensor = torch.full((1 << 20,), 3.0, device="cuda")
        over = group.all_reduce(tensor)
        assert is_over(over, 5.0)
        spin(A_WHILE)
        waits = group.all_reduce(tensor)
        communicator.revoke()
        assert waits.is_completed()
        assert not succeeded(waits)
        assert not succeeded(group.barrier())  # of a view that is over
        (kept,) = kept_by([waits])
        torch.cuda.synchronize()
        assert bool((kept == 3.0).all())
    communicator.close()
    record_property("formed_ms", [round(1000 * seconds, 1) for seconds in took_s])
