"""What the library promises with torch alone: two ranks, one of them late, and a staged backward pass.

python .ci/smoke.py    # in an environment with torch and straggle; needs no extra, no numpy and no pytest
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import straggle

STEPS = 100  # in which the slow rank is late at least once, however busy the machine


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))


def train(model: straggle.StagedDataParallel, steps: int) -> bool:
    """Whether rank 1 was late in one of the steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        with model.step() as step:
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if model.last_report is not None and model.last_report.ranks[1].late:
            return True
    return False


def rank_main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = straggle.StagedDataParallel(network(), deadline=straggle.AutoDeadline())
    train(model, 20)
    model.close()
    net = network()
    if rank == 1:
        net[8].register_forward_hook(lambda *_: time.sleep(0.3))
    model = straggle.StagedDataParallel(net, deadline=0.05, estimator=straggle.LastMerged(0.25))
    assert train(model, STEPS), f"rank 1 was in time in all of {STEPS} steps, 0.25 s after its deadline"
    own = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    assert torch.equal(*gathered), "the replicas are not the same"
    model.close()
    dist.destroy_process_group()


def run_two_ranks() -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(rank, str(Path(folder, "store")))) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    assert [process.exitcode for process in ranks] == [0, 0], [process.exitcode for process in ranks]


def stop_a_pass() -> None:
    net, x = network(), torch.randn(8, 16)
    net(x).square().mean().backward()
    complete = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()

    def stop_at_the_third(stage: straggle.FinishedStage) -> None:
        finished.append(stage.name)
        if len(finished) == 3:
            stage.stop()

    finished: list[str] = []
    straggle.StagedBackward(net, stages=8, on_stage=stop_at_the_third).backward(net(x).square().mean())
    own = [parameter.grad for parameter in net.parameters()]
    assert own[:10] == [None] * 10, "stages were computed after the stop"
    assert all(torch.equal(one, other) for one, other in zip(own[10:], complete[10:], strict=True))


if __name__ == "__main__":
    run_two_ranks()
    stop_a_pass()
    sys.stdout.write(f"straggle {straggle.__version__} runs with torch {torch.__version__} alone\n")
