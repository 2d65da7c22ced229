"""Over real ranks an epoch sees every sample, also those whose step was cut short."""

import pytest
from ranks import run_ranks, staged
from torch.utils.data import DataLoader, Dataset
from training import Ahead, Stopper, features, mlp

from straggle import RequeueSampler


class Numbers(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index, features(0, index, rows=1)[0]


def epoch(rank, world_size, late_at, num_ahead):
    """The samples whose steps were complete; rank 1 stops early in the steps ``late_at``."""
    module = mlp()
    stopper = Stopper(module)
    sampler = RequeueSampler(len(Numbers()), rank=rank, world_size=world_size)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    whole, dropped = [], 0
    with staged(module) as model:
        for number, (samples, x) in enumerate(model.join(sampler.epoch(Ahead(loader, num_ahead)))):
            with model.step() as step:
                stopper.arm(step, 2 if rank == 1 and number in late_at else None)
                model(x).sum().backward()
            report = model.last_report.ranks[rank]
            if report.late:
                sampler.requeue(samples)
                dropped += len(samples)
            elif not report.idle:
                whole += samples.tolist()
    return whole, dropped


@pytest.mark.parametrize("late_at", [(), (0, 2), (2,), (1, 2, 3)])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_every_sample_is_in_a_whole_step_once(late_at, num_ahead):
    results = run_ranks(epoch, 2, 2, late_at, num_ahead)
    assert sorted(sample for whole, _ in results for sample in whole) == list(range(22))
    assert (results[1][1] > 0) == bool(late_at)
