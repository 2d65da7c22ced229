"""On a GPU: a device that is stuck, and ranks that leave and come back."""

import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from job_loop import Loop, check_equal, gives_again, plain, train
from members import run_forked_job
from ranks import rank_environment, run_forked, staged, started
from stores import serve_store
from torch import nn
from training import features, mlp

from straggle import LateHandling
from straggle.merge.wire.channel import Channel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

A_MINUTE = 120 * 10**9  # cycles at 2 GHz, longer than any bound here
spin = vars(torch.cuda)["_sleep"]
groups_of_torch = vars(dist.distributed_c10d)["_world"]


def hang_in_step_5(rank, stuck):
    """In step 5 rank ``stuck`` queues a kernel that takes a minute; then all read their losses."""
    module, late_handling = mlp().cuda(), LateHandling(give_up_s=3.0)
    with staged(module, late_handling=late_handling) as model:
        for step in range(10):
            with model.step():
                loss = model(features(rank, step).cuda()).sum()
                if (rank, step) == (stuck, 5):
                    spin(A_MINUTE)
                loss.backward()
            loss.item()


WORDS = r"rank {}, step 5, stage [^:]+: its device has not finished these gradients in"


def test_ranks_end_with_the_rank_step_and_stage_of_the_one_whose_device_is_stuck():
    ends = run_forked(hang_in_step_5, 2, 1, outcomes=True, timeout_s=45)
    assert ends[0].kind == "PeerFailed", ends
    assert re.search(WORDS.format(1), ends[0].message)
    assert ends[1].kind in ("PeerFailed", "Killed"), ends  # as it waits for gloo, or in the driver


def hang_over_nccl():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    hang_in_step_5(0, 0)


def test_process_over_nccl_whose_device_is_stuck_ends_with_status_1_and_the_error(tmp_path):
    server = serve_store()
    with started(hang_over_nccl, folder=tmp_path, environment=rank_environment(0, 1, server.port)) as process:
        assert process.status(45) == 1, process.log.read_text()
    assert re.search(WORDS.format(0), process.log.read_text())
    assert "this process ends: its device is stuck" in process.log.read_text()


def abort_and_destroy():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    channel = Channel(None, give_up_s=30.0)
    channel.broadcast(torch.ones(4, device="cuda"))
    before = len(groups_of_torch.pg_map)
    channel.abort()
    until = time.monotonic() + 20
    while len(groups_of_torch.pg_map) == before and time.monotonic() < until:
        time.sleep(0.01)
    aborted = len(groups_of_torch.pg_map) == before - 1
    dist.destroy_process_group()
    sys.exit(0 if aborted else 2)


def test_group_of_nccl_that_is_aborted_is_no_more_there_to_be_destroyed(tmp_path):
    server = serve_store()
    with started(abort_and_destroy, folder=tmp_path, environment=rank_environment(0, 1, server.port)) as process:
        assert process.status() == 0, process.log.read_text()


class OnDevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = plain().cuda()

    def forward(self, x):
        return self.network(x.cuda())


def test_members_on_a_device_go_on_without_a_killed_rank_and_heal_it_when_it_is_back():
    with run_forked_job(3, train, Loop(OnDevice)) as job:
        job.walk(6)
        job.kill(2)
        job.walk(12, [0, 1])
        job.start(2)
        job.walk(6)
        outcomes = job.finish()
    check_equal(outcomes)
    assert gives_again(outcomes[0], 2)
