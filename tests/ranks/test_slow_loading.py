"""A rank that loads slowly, dealt to by its speed: what its samples cost goes to others, and a fixed delay is said."""

import logging
import time

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch.utils.data import DataLoader, Dataset
from training import features, mlp

from straggle import AutoDeadline, DealtLoader, FixedDeadline, LateLoader, Rebalance

ROWS = 8
SLOW = 1


class Data(Dataset):
    """A batch takes ``sample_s`` for each sample, and ``batch_s`` beside that."""

    def __init__(self, num_samples, sample_s, batch_s):
        self._num_samples, self._sample_s, self._batch_s, self.num_loads = num_samples, sample_s, batch_s, 0

    def __len__(self):
        return self._num_samples

    def __getitem__(self, number):
        return features(0, number % 32, rows=1)[0]

    def __getitems__(self, numbers):
        time.sleep(self._batch_s + self._sample_s * len(numbers))
        self.num_loads += 1
        return [self[number] for number in numbers]


def train(rank, steps, sample_s, slow_sample_s, delay_s, deadline=None):
    """The shares of each step, what is said, when the slow rank was late, and this rank's loads and parameters."""
    heard, world_size = [], torch.distributed.get_world_size()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("straggle.data.rebalance").addHandler(handler)
    is_slow = rank == SLOW
    data = Data(world_size * ROWS * steps, slow_sample_s if is_slow else sample_s, delay_s * is_slow)
    with staged(mlp(), deadline=deadline) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DealtLoader(model, DataLoader(data, batch_size=ROWS))
        shares, late = [], []
        for x in loader:
            shares.append(loader.shares)
            with model.step():
                model(x).square().mean().backward()
            late.append(model.last_report.ranks[SLOW].late)
            optimizer.step()
            optimizer.zero_grad()
        return shares, heard, late, data.num_loads, digest(model.parameters())


@pytest.mark.parametrize("world_size", [2, 4])
def test_samples_that_a_rank_loads_slowly_go_to_the_others_until_all_take_as_long(world_size):
    results = run_ranks(train, world_size, 60, 0.004, 0.012, 0.0)
    assert len({repr(shares) for shares, *_ in results}) == 1
    assert len({parameters for *_, parameters in results}) == 1
    others = ROWS * world_size * 3 / (3 * (world_size - 1) + 1)  # per sample it takes three times as long
    expected = [others / 3 if rank == SLOW else others for rank in range(world_size)]
    assert results[0][0][-1] == pytest.approx(expected, abs=2.5)
    assert [heard for _, heard, *_ in results] == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_rank_with_a_fixed_delay_keeps_its_share_and_is_named_with_its_place_and_what_to_do(world_size):
    results = run_ranks(train, world_size, 45, 0.0, 0.0, 0.2)
    assert results[0][0][-1] == (ROWS,) * world_size
    (words,) = results[0][1]
    assert int(words.split()[1].strip(":")) >= 19
    assert float(words.split(" takes ")[1].split()[0]) > 120  # ms; it slept for 200, and the others took a part of that
    assert "rank 1 takes" in words
    assert "most of it loading data: set deadline=straggle.AutoDeadline(), or leave it out" in words


def test_what_is_said_to_do_helps():
    results = run_ranks(train, 4, 80, 0.0, 0.0, 0.2, AutoDeadline())
    shares, (words,), late, *_ = results[0]
    assert "its deadline stops it there; look what it waits for, or leave it out" in words
    assert sum(late[-40:]) > 20  # its peers go on without it
    assert results[SLOW][3] < len(shares) - 20  # which loads nothing for the steps that it missed
    assert len({parameters for *_, parameters in results}) == 1


def own_loop(rank, load, deadline):
    """`Rebalance` in a loop of one's own: what is said, and how many batches were loaded for 40 steps."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("straggle.data.rebalance").addHandler(handler)
    data = Data(16 * 40, 0.0, 0.1 * (rank == SLOW))
    with staged(mlp(), deadline=deadline) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rebalance = Rebalance(model, total=16)
        for x in load(model, DataLoader(data, batch_size=16)):
            first, count = rebalance.share()
            with model.step() as step:
                step.weight = count
                model(x[first : first + count]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return heard, data.num_loads


def plain(_model, loader):
    return loader


LOAD = "write for batch in straggle.LateLoader(model, loader)"


@pytest.mark.parametrize(
    ("deadline", "told"),
    [
        (None, f"loading data: set deadline=straggle.AutoDeadline(), and {LOAD}; or leave it out"),
        (FixedDeadline(100.0), f"loading data: {LOAD}, or leave it out"),
    ],
)
def test_loop_of_ones_own_is_told_what_keeps_a_late_rank_from_loading_for_each_step(deadline, told):
    ((words,), _), (_, num_loads) = run_ranks(own_loop, 2, plain, deadline)
    assert words.endswith(told)
    assert num_loads == 40
    *_, (_, num_loads) = run_ranks(own_loop, 2, LateLoader, AutoDeadline())
    assert num_loads < 40
