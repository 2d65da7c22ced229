"""Each sample of an epoch is merged, also those of ranks that were killed, stopped or stood in for."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from members import run_job
from ranks import run_forked, staged
from torch.utils.data import DataLoader, Dataset
from training import Ahead, Stopper, features, mlp

from straggle import Elastic, Epochs, Rebalance
from straggle.backward import stages


class Numbers(Dataset):
    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return index, features(0, index, rows=1)[0]


def one_epoch(rank, num_samples, stopped_at, repeat_up_to, num_ahead):
    """For each step the ranks' samples that counted; rank 1 is stopped before its first gradient in ``stopped_at``."""
    module = mlp()
    stopper = Stopper(module)
    brought = []
    with staged(module) as model:
        epochs = Epochs(model, num_samples=num_samples, batch_size=4, repeat_up_to=repeat_up_to)
        loader = DataLoader(Numbers(num_samples), batch_sampler=epochs.sampler)
        for number, (samples, x) in enumerate(epochs.batches(Ahead(loader, num_ahead))):
            with model.step() as step:
                step.weight = len(x)
                stopper.arm(step, stopped_at.get(number) if rank == 1 else None)
                model(x).sum().backward()
            own = model.last_report.ranks[rank]
            brought += samples.tolist() if not own.idle and own.reach > repeat_up_to else []
        assert epochs.number == 1
        return brought, number + 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [24, 29])
def test_every_sample_comes_once(world_size, num_samples):
    results = run_forked(one_epoch, world_size, num_samples, {}, 0.0, 0)
    assert sorted(sample for own, _ in results for sample in own) == list(range(num_samples))
    assert {steps for _, steps in results} == {-(-num_samples // (4 * world_size))}


@pytest.mark.parametrize(
    ("stopped_at", "repeat_up_to", "more"),
    [
        ({1: 0}, 0.0, 1),  # all of its gradient is missing
        ({1: 2}, 0.0, 0),  # a part of it
        ({1: 2, 2: 2}, 0.99, 1),
    ],
)
def test_samples_of_a_late_rank_come_again_where_that_is_wanted(stopped_at, repeat_up_to, more):
    results = run_forked(one_epoch, 2, 32, stopped_at, repeat_up_to, 0)
    assert sorted(sample for own, _ in results for sample in own) == list(range(32))
    assert {steps for _, steps in results} == {4 + more}


def test_loader_that_fetches_ahead():
    results = run_forked(one_epoch, 2, 32, {1: 0}, 0.0, 2)
    assert sorted(sample for own, _ in results for sample in own) == list(range(32))


def too_many_steps(_rank):
    with staged(mlp()) as model:
        epochs = Epochs(model, num_samples=8, batch_size=2)
        for _, x in epochs.batches(DataLoader(Numbers(8), batch_sampler=epochs.sampler)):
            for _ in range(2):
                with model.step():
                    model(x).sum().backward()


def test_two_steps_with_one_batch_are_refused():
    (refused,) = run_forked(too_many_steps, 1, outcomes=True)
    assert (refused.kind, "2 steps with one batch" in refused.message) == ("RuntimeError", True)


def leaves_a_batch_out(rank, inside):
    """Rank 1's loop does not want its second batch."""
    with staged(mlp()) as model:
        epochs = Epochs(model, num_samples=16, batch_size=2, shuffle=False)
        skipped = []
        for samples, x in epochs.batches(DataLoader(Numbers(16), batch_sampler=epochs.sampler)):
            unwanted = rank == 1 and 6 in samples.tolist()
            if unwanted and not inside:
                continue
            with model.step():
                if unwanted:
                    skipped.append(model.last_report.step + 1)
                    continue
                model(x).sum().backward()
        return skipped, model.last_report.step + 1


def test_batch_that_a_loop_always_leaves_out_is_refused_and_not_offered_for_ever():
    peer, own = run_forked(leaves_a_batch_out, 2, False, outcomes=True)
    assert "11 times the same batch" in own.message
    assert peer.kind == "PeerFailed"


def test_batch_that_is_left_out_inside_of_its_step_comes_again_and_is_dealt_to_both_ranks():
    assert run_forked(leaves_a_batch_out, 2, True) == [([], 5), ([1], 5)]  # four steps, and one for its two samples


def train(rank, board, folder, num_samples, num_epochs, rebalanced):
    """Trains whole epochs; what it had in each step is noted in a file, which outlives it."""
    stages.BUCKET_BYTES = 1
    brought, shares = {}, {}
    with staged(mlp(), members=Elastic(suspect_s=1.0)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rebalance = Rebalance(model, total=12, window=6)
        dealt = {"batch_size": 1, "rebalance": rebalance} if rebalanced else {"batch_size": 4}
        epochs = Epochs(model, num_samples=num_samples, seed=3, **dealt)
        loader = DataLoader(Numbers(num_samples), batch_sampler=epochs.sampler)
        step = model.register_state(optimizer=optimizer, rebalance=rebalance, epochs=epochs)
        with Path(folder, f"rank{rank}").open("a") as had:
            while epochs.number < num_epochs:
                number = epochs.number
                for samples, x in epochs.batches(loader):
                    had.write(json.dumps([number, step, samples.tolist()]) + "\n")
                    had.flush()
                    with model.step() as block:
                        block.weight = len(x)
                        shares[step] = rebalance.shares
                        time.sleep(0.004 * len(x) * (1 + (rank == 2)))
                        model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    for own in model.last_report.ranks:
                        counts = not (own.idle or own.absent) and own.reach > 0
                        brought[f"{step}/{own.rank}"] = counts
                    if model.last_report.ranks[rank].absent:
                        del shares[step]  # it does not know them
                    step += 1
                    board.note(rank, step)
        return brought, step, epochs.num_lost, shares


def counted(folder, brought, world_size):
    """How often each sample was brought in each epoch, by what the ranks had and what was merged."""
    seen = {}
    for rank in range(world_size):
        had = {}
        for line in Path(folder, f"rank{rank}").read_text().splitlines():
            epoch, step, samples = json.loads(line)
            had[step] = epoch, samples
        for step, (epoch, samples) in had.items():
            if brought[f"{step}/{rank}"]:
                seen.setdefault(epoch, Counter()).update(samples)
    return seen


@pytest.mark.parametrize(("leaves", "rebalanced"), [("killed", False), ("stopped", False), ("killed", True)])
def test_every_sample_of_each_epoch_is_merged_once_though_a_rank_leaves_and_comes_back(leaves, rebalanced, tmp_path):
    num_samples = 3 * 4 * 50 + 7
    with run_job(3, train, str(tmp_path), num_samples, 2, rebalanced) as job:
        job.walk(15)
        job.kill(1) if leaves == "killed" else job.stop(1)
        job.walk(20, [0, 2])
        if leaves == "killed":
            job.start(1)
        else:
            job.resume(1)
        results = [job.result(rank) for rank in range(3)]
    brought, steps, _, shares = results[0]
    assert {(own[1], own[2]) for own in results} == {(steps, 0)}
    gives = [brought[f"{step}/1"] for step in range(steps)]
    assert gives.count(False) >= 20
    assert sum(gives[gives.index(False) :]) >= 20  # it takes part again
    everything = dict.fromkeys(range(num_samples), 1)
    for own in results[1:]:
        assert {step: shares[step] for step in own[3]} == own[3]
    if rebalanced:
        assert all(sum(own) == 12 for own in shares.values())
        assert {own[1] > 0 for own in shares.values()} == {True, False}
    assert counted(tmp_path, brought, 3) == {0: everything, 1: everything}
