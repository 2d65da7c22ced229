"""Ranks with unequal numbers of batches, of which one leaves and comes back: all end the same epochs together."""

import time

import pytest
import torch
from members import run_job
from ranks import digest, staged
from training import features, mlp

from straggle import Elastic
from straggle.backward import stages

EPOCHS = 6  # the one that left is back well before the last one


def num_batches(rank):
    return 15 + 15 * rank


def train(rank, board):
    """Its parameters at the end, and for each step in which it was a member the epoch and whether it had data."""
    stages.BUCKET_BYTES = 1
    seen = {}
    network = mlp()
    network.register_forward_pre_hook(lambda *_: time.sleep(0.015))  # which a rank that is late skips
    with staged(network, members=Elastic(suspect_s=1.0)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = model.register_state(optimizer=optimizer)
        for epoch in range(EPOCHS):
            for x in model.join([features(rank, number) for number in range(num_batches(rank))]):
                with model.step():
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                own = model.last_report.ranks[rank]
                if not own.absent and not own.stood_in:
                    seen[step] = epoch, own.idle
                step += 1
                board.note(rank, step)
        return digest(model.parameters()), step, seen


@pytest.mark.parametrize("leaves", ["killed", "stopped"])
def test_epochs_end_together_though_a_rank_leaves_and_comes_back_in_a_later_one(leaves):
    with run_job(3, train) as job:
        job.walk(10)
        job.kill(1) if leaves == "killed" else job.stop(1)
        job.walk(num_batches(2) + 1, [0, 2])  # the others end this epoch without it
        job.start(1) if leaves == "killed" else job.resume(1)
        results = [job.result(rank) for rank in range(3)]
    assert len({own[:2] for own in results}) == 1
    epochs = {step: epoch for step, (epoch, _) in results[0][2].items()}
    assert set(epochs.values()) == set(range(EPOCHS))
    back = {step: epoch for step, (epoch, _) in results[1][2].items() if epoch > 0}
    assert len(back) >= num_batches(1)
    assert back == {step: epochs[step] for step in back}
    # the last epoch is over with the last batch of the rank that has most, and each rank has had all of its own
    last = [[idle for epoch, idle in own[2].values() if epoch == EPOCHS - 1] for own in results]
    assert [idle.count(False) for idle in last] == [num_batches(rank) for rank in range(3)]
    assert [len(idle) for idle in last] == [num_batches(2)] * 3
