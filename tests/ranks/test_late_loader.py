"""A rank that loads slowly loads nothing for the steps that it has missed, and takes part in a step after them."""

import math
from collections import Counter
from itertools import islice

import pytest
import torch
from ranks import digest, run_forked, staged
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from training import Signals, features, mlp

from straggle import DealtLoader, Epochs, FixedDeadline, LateHandling, LateLoader, StagedDataParallel
from straggle.lab.world.run import run_world

ROWS = 2  # of a batch
FIRST, LAST = 2, 4  # steps that the last rank misses, while it loads
MISSED = LAST - FIRST + 1


class Slow(Dataset):
    """Of the last rank, the first sample that is loaded after step 1 waits until the others have merged `LAST`."""

    def __init__(self, num_samples):
        self._num_samples = num_samples
        self.loaded, self.wait = [], None

    def __len__(self):
        return self._num_samples

    def __getitem__(self, index):
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait()
        self.loaded.append(index)
        return index, features(0, index, rows=1)[0]


def epochs_of(model, data):
    epochs = Epochs(model, num_samples=len(data), batch_size=ROWS)
    return epochs.batches(DataLoader(data, batch_sampler=epochs.sampler))


def own_sampler(model, data):
    numbers = DistributedSampler(data, model.world_size, model.rank)
    return LateLoader(model, DataLoader(data, batch_sampler=BatchSampler(numbers, ROWS, drop_last=False)))


WAYS = {
    "plain": lambda model, data: DataLoader(data, ROWS, sampler=DistributedSampler(data, model.world_size, model.rank)),
    "LateLoader": own_sampler,
    "Epochs": epochs_of,
    "DealtLoader": lambda model, data: DealtLoader(model, DataLoader(data, ROWS, shuffle=True)),
}


def train(rank, way, num_samples):
    """One epoch: for each step the samples that this rank had, and whether they counted; what it loaded; its end."""
    world_size, signals = torch.distributed.get_world_size(), Signals()
    last, data, steps = rank == world_size - 1, Slow(num_samples), []
    with staged(mlp(), deadline=FixedDeadline(1.0), late_handling=LateHandling(grace_s=0.0)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = WAYS[way](model, data)
        for number, (samples, x) in enumerate(loader):
            if number == LAST + 1:
                if last:
                    signals.send("in time")
                else:
                    signals.wait("in time")  # no rank waits for the last one until then
            with model.step():
                model(x).square().mean().backward()
            own = model.last_report.ranks[rank]
            steps.append((samples.tolist(), not own.idle and own.reach == 1))
            optimizer.step()
            optimizer.zero_grad()
            if last and number == FIRST - 1:
                data.wait = lambda: signals.wait(f"merged {LAST}")
            elif rank == 0 and number == LAST:
                signals.send(f"merged {LAST}")
        left = getattr(loader, "num_left", None)
        return steps, data.loaded, left, digest(module_of(model))


def module_of(model):
    return model.module.parameters()


def check(results, way):
    """Identical parameters, equally many steps, no sample twice; what the last rank had in its steps."""
    assert len({parameters for *_, parameters in results}) == 1
    assert len({len(steps) for steps, *_ in results}) == 1
    counted = Counter(sample for steps, *_ in results for samples, counts in steps if counts for sample in samples)
    assert set(counted.values()) == {1}, way
    return counted


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["LateLoader", "Epochs", "DealtLoader"])
def test_rank_that_loads_slowly_loads_nothing_for_the_steps_that_it_missed(way, world_size):
    num_samples = world_size * ROWS * 10
    results = run_forked(train, world_size, way, num_samples)
    counted = check(results, way)
    steps, loaded, left, _ = results[-1]
    assert [counts for _, counts in steps[: LAST + 2]] == [True] * FIRST + [False] * MISSED + [True]
    assert [steps[number][0] for number in range(FIRST, LAST + 1)] == [steps[LAST + 1][0]] * MISSED
    assert len(loaded) == len(set(loaded)), "it loaded something twice"
    if way == "LateLoader":
        assert (left, len(steps)) == (MISSED, 10)
        assert len(counted) == num_samples - MISSED * ROWS
        assert len(loaded) == (10 - MISSED) * ROWS
        assert [left for *_, left, _ in results[:-1]] == [0] * (world_size - 1)
    else:
        assert len(counted) == num_samples  # what it had not come to was dealt to all ranks
        assert len(steps) == 10 + -(-MISSED // world_size)


def test_plain_loader_has_it_load_a_batch_for_each_of_them():
    *_, (steps, loaded, *_) = run_forked(train, 2, "plain", 40)
    assert [counts for _, counts in steps[: LAST + 2]] == [True] * FIRST + [False] * MISSED + [True]
    assert len(loaded) == 20


def accumulate(rank):
    """Two batches in each step, of which the last rank's third pair is late; what it had in each step."""
    signals, last = Signals(), rank == 1
    loaded, steps = [], []

    def numbers():
        for number in range(16):
            if last and number == 2 * FIRST:
                signals.wait(f"merged {LAST}")
            loaded.append(number)
            yield number

    with staged(mlp(), deadline=FixedDeadline(1.0), late_handling=LateHandling(grace_s=0.0)) as model:
        batches = iter(LateLoader(model, numbers(), num_steps=16))
        for number in range(8):
            pair = list(islice(batches, 2))
            if number == LAST + 1:
                signals.send("in time") if last else signals.wait("in time")
            with model.step(num_microbatches=2):
                for batch in pair:
                    model(features(rank, batch)).square().mean().backward()
            steps.append(pair)
            if not last and number == LAST:
                signals.send(f"merged {LAST}")
        assert next(batches, None) is None
        return steps, loaded


def test_all_batches_of_a_step_that_was_missed_come_again():
    (others, _), (own, loaded) = run_forked(accumulate, 2)
    pairs = [[2 * number, 2 * number + 1] for number in range(8)]
    assert others == pairs
    assert own == [pairs[place] for place in (0, 1, 2, 2, 2, 2, 3, 4)]
    assert loaded == list(range(10))


def steps_twice(rank):
    """Each batch has two steps, and the second is in time: it does not come again."""
    had, signals = [], Signals()

    def numbers():
        for number in range(6):
            if rank == 1 and number == 2:
                signals.wait("merged 4")  # the first step of this batch
            yield number

    with staged(mlp(), deadline=FixedDeadline(1.0), late_handling=LateHandling(grace_s=0.0)) as model:
        for batch in LateLoader(model, numbers(), num_steps=6):
            for place in range(2):
                step = 2 * len(had) + place
                if step == 5:
                    signals.send("in time") if rank else signals.wait("in time")
                with model.step():
                    model(features(rank, batch)).square().mean().backward()
                if step == 4 and rank == 0:
                    signals.send("merged 4")
            had.append(batch)
        return had


def test_batch_whose_second_step_is_in_time_does_not_come_again():
    assert run_forked(steps_twice, 2) == [list(range(6))] * 2


class StuckAt:
    """Twelve batches, of which one takes so long to load."""

    def __init__(self, number, wait):
        self._number, self._wait = number, wait

    def __len__(self):
        return 12

    def __iter__(self):
        for number in range(12):
            if number == self._number:
                self._wait()
            yield number


def left_of(rank, stuck_at, stall_s):
    """The batches with which this rank was in a step, how many it says that it left, and how many came at all."""
    layer, counted, given = torch.nn.Linear(4, 2), set(), 0
    layer.register_forward_pre_hook(lambda *_: rank.work(0.01))
    model = StagedDataParallel(layer, deadline=FixedDeadline(0.02), late_handling=LateHandling(grace_s=0.0))
    stuck = StuckAt(stuck_at if rank.number == 2 else None, lambda: rank.work(stall_s))
    loader = LateLoader(model, stuck)
    for batch in loader:
        given += 1
        with model.step():
            model(torch.ones(1, 4)).sum().backward()
        if not math.isnan(model.last_report.ranks[rank.number].compute_s):
            counted.add(batch)
    model.close()
    return counted, loader.num_left, given


@pytest.mark.parametrize("stuck_at", range(1, 12))
@pytest.mark.parametrize("stall_s", [0.05, 5.0])
def test_batches_that_came_to_no_step_are_counted_wherever_the_rank_was_stuck(stuck_at, stall_s):
    """Also the one that it has in hand when the last step is over."""
    run = run_world(lambda rank: left_of(rank, stuck_at, stall_s), ranks=3)
    for number, (counted, num_left, given) in enumerate(run.results):
        assert given == 12
        assert num_left == 12 - len(counted)
        assert (num_left > 0) == (number == 2)
