"""`join`: each batch of each rank counts once, however a loop draws them, and no step is made for nothing."""

import math
import random
import time
from itertools import chain, islice

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Signals, Stopper, shared

from straggle import FixedDeadline, LastMerged, LateHandling
from straggle.observe.recording import DecisionWriter, read_recording


class Slots(nn.Module):
    """The gradient of its weight by a batch is 1 in that batch's place: a merged one says which batches count."""

    def __init__(self, num_batches):
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.zeros(num_batches)), nn.Parameter(torch.zeros(3))

    def forward(self, number):
        return self.weight[number] + 0.0 * self.more.sum()


def one_each(model, batches, _passes, entered):
    for number in batches:
        with model.step() as step:
            entered(step)
            model(number).backward()
        yield


def before_the_block(model, batches, passes, entered):
    while chunk := list(islice(batches, passes)):
        with model.step(num_microbatches=passes) as step:
            entered(step)
            for number in chunk:
                (model(number) / passes).backward()
        yield


def in_the_block(model, batches, passes, entered):
    for first in batches:
        with model.step(num_microbatches=passes) as step:
            entered(step)
            for number in chain([first], islice(batches, passes - 1)):
                (model(number) / passes).backward()
        yield


def open_step(model, batches, passes, entered):
    for place, number in enumerate(batches):
        if place % passes == 0:
            step = model.step(num_microbatches=passes).begin()
            entered(step)
        with step.microbatch():
            (model(number) / passes).backward()
        if place % passes == passes - 1:
            step.end()
            yield


WAYS = {"one each": one_each, "before": before_the_block, "in": in_the_block, "open": open_step}


def numbers_of(lengths, rank):
    return list(range(sum(lengths[:rank]), sum(lengths[: rank + 1])))


def train(rank, lengths, way, passes, late_at=None, epochs=1, options=None):
    """How often each batch counts; for each step whether there was a gradient, and its report; the late step's draws.

    Rank 1 is late in step ``late_at``, before its first forward pass.
    """
    module = Slots(sum(lengths))
    stopper = Stopper(module)
    counts, reports, lost, drawn = torch.zeros(sum(lengths)), [], [], []

    def noted(batches):
        for number in batches:
            drawn.append(number)
            yield number

    def entered(step):
        stopper.arm(step, 0 if rank == 1 and len(reports) == late_at else None)

    with staged(module, **(options or {})) as model:
        for _ in range(epochs):
            batches = noted(model.join(numbers_of(lengths, rank)))
            for _ in WAYS[way](model, batches, passes, entered):
                report = model.last_report
                assert module.weight.grad is not None
                counts += module.weight.grad * passes * report.stages[0].weight
                if len(reports) == late_at and rank == 1:
                    lost = list(drawn)
                drawn.clear()
                reports.append(report)
                module.zero_grad()
    return counts.round(decimals=4).tolist(), [shared(report) for report in reports], reports, lost


CASES = [("one each", 1), *((way, passes) for way in ("before", "in", "open") for passes in (2, 3))]
LENGTHS = [(5, 3), (3, 5), (1, 4, 2), (3, 3), (2, 6)]


def train_all(rank, lengths, late_at=None, epochs=1):
    """For each of the cases what `train` returns."""
    return [train(rank, lengths, way, passes, late_at, epochs) for way, passes in CASES]


def alike(results):
    """For each case the batches that count, the reports and what rank 1 had drawn, of which the first two are alike."""
    for (_, passes), of_ranks in zip(CASES, zip(*results, strict=True), strict=True):
        assert len({(tuple(counts), tuple(words)) for counts, words, _, _ in of_ranks}) == 1
        counts, _, reports, _ = of_ranks[0]
        yield passes, counts, reports, of_ranks[1][3]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_batch_counts_once_in_as_many_steps_as_the_longest_loader_is_enough_for(lengths):
    for passes, counts, reports, _ in alike(run_ranks(train_all, len(lengths), lengths)):
        assert counts == [1.0] * sum(lengths)
        assert len(reports) == math.ceil(max(lengths) / passes)
        for number, report in enumerate(reports):
            left = [min(max(length - number * passes, 0), passes) for length in lengths]
            weights = [0 if own.idle else own.weight for own in report.ranks]
            assert [own.idle for own in report.ranks] == [not own for own in left]
            assert weights == pytest.approx([own / passes for own in left])
            assert report.dropped_share == 0.0
            assert report.late_ranks == ()
            assert all(own.cause is None for own in report.ranks)


@pytest.mark.parametrize(("lengths", "late_at"), [((5, 4), 1), ((4, 6), 1), ((1, 4, 2), 0)], ids=str)
def test_batches_of_a_late_rank_count_but_for_those_of_the_step_in_which_it_is_late(lengths, late_at):
    for passes, counts, reports, lost in alike(run_ranks(train_all, len(lengths), lengths, late_at)):
        assert reports[late_at].late_ranks == (1,)
        assert counts == [0.0 if number in lost else 1.0 for number in range(sum(lengths))]
        # what it has not drawn in that step comes in later ones
        assert math.ceil(max(lengths) / passes) <= len(reports) <= math.ceil((max(lengths) + passes) / passes)


def test_epochs_follow_one_another_without_a_step_between():
    for passes, counts, reports, _ in alike(run_ranks(train_all, 2, (2, 5), None, 3)):
        assert counts == [3.0] * 7
        assert len(reports) == 3 * math.ceil(5 / passes)


@pytest.mark.parametrize(("way", "passes"), [("before", 3), ("in", 3)])
def test_estimator_fills_in_nothing_for_batches_that_there_are_not(way, passes):
    for counts, _, reports, _ in run_ranks(train, 2, (4, 5), way, passes, None, 1, {"estimator": LastMerged()}):
        assert counts == [1.0] * 9
        assert not any(stage.estimated for report in reports for stage in report.stages)


def weigh(rank, lengths, passes):
    """Each step counts as many samples as it has batches; the second rank's batches have 3 samples each."""
    module, size = Slots(sum(lengths)), (1, 3)[rank]
    with staged(module) as model:
        batches = model.join(numbers_of(lengths, rank))
        while chunk := list(islice(batches, passes)):
            with model.step(num_microbatches=passes) as step:
                step.weight = float(size * passes)
                for number in chunk:
                    (model(number) / passes).backward()
            gradient = module.weight.grad.tolist()
            module.zero_grad()
        return gradient, [own.weight for own in model.last_report.ranks]


def test_weight_of_a_step_that_ends_early_is_that_of_the_batches_it_has():
    for gradient, weights in run_ranks(weigh, 2, (3, 2), 4):  # 3 batches of 1 sample, 2 of 3 samples
        assert weights == [3.0, 6.0]
        assert gradient == pytest.approx([1 / 9] * 3 + [3 / 9] * 2)


def fall_behind(rank, lengths, stuck_at, until):
    """Rank 1 is stuck between two steps until another step is merged without it."""
    module, signals = Slots(sum(lengths)), Signals()
    counts, steps = torch.zeros(sum(lengths)), 0
    with staged(module, deadline=FixedDeadline(0.2), late_handling=LateHandling(grace_s=0.0)) as model:
        for number in model.join(numbers_of(lengths, rank)):
            if (rank, steps) == (1, stuck_at):
                signals.wait(f"merged {until}")
            with model.step():
                model(number).backward()
            if module.weight.grad is not None:
                counts += module.weight.grad * model.last_report.stages[0].weight
            if rank == 0:
                signals.send(f"merged {steps}")
            steps += 1
            module.zero_grad()
        return counts.tolist(), steps, digest(module.parameters())


@pytest.mark.parametrize(("stuck_at", "until"), [(2, 3), (4, 5)])
def test_loops_end_together_though_a_rank_was_stood_in_for(stuck_at, until):
    lengths = (7, 5)
    results = run_ranks(fall_behind, 2, lengths, stuck_at, until)
    assert len({(tuple(counts), *rest) for counts, *rest in results}) == 1
    counts, steps, _ = results[0]
    assert counts[:7] == [1.0] * 7
    assert set(counts) <= {0.0, 1.0}
    assert counts[7 : 7 + stuck_at] == [1.0] * stuck_at
    if stuck_at == 4:  # it has drawn its last batch, and need not come for its peer to know that there is no more
        assert steps == 7


def repeat(rank, folder, way, replay):
    """Trains under random stalls, or as recorded, with data that end within a step on all ranks."""
    lengths, passes = (10, 8, 7), 3
    module, chance, path = Slots(sum(lengths)), random.Random(rank), folder / f"{way}{rank}.jsonl"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    options = {"deadline": 0.02, "late_handling": LateHandling(grace_s=0.005, max_lag=4), "estimator": LastMerged()}
    shares, again = [], folder / f"{way}{rank}.again"

    def stalls(batches):
        for number in batches:
            time.sleep(0.05 if not replay and chance.random() < 0.2 else 0.0)
            yield number

    with staged(module, **options) as model:
        if replay:
            model.replay(read_recording(path))
        with DecisionWriter(again if replay else path) as writer:
            for _ in range(3):
                batches = stalls(model.join(numbers_of(lengths, rank)))
                for _ in WAYS[way](model, batches, passes, lambda _step: None):
                    optimizer.step()
                    optimizer.zero_grad()
                    shares.append([(own.stages, own.idle, own.reach and own.weight) for own in model.last_report.ranks])
                    writer.write(model.last_decision, model.learned)
        return digest(module.parameters()), shares


@pytest.mark.parametrize("way", ["before", "in"])
def test_a_run_whose_data_end_within_steps_is_repeated_as_it_was(tmp_path, way):
    first = run_ranks(repeat, 3, tmp_path, way, False)
    assert len({parameters for parameters, _ in first}) == 1
    assert run_ranks(repeat, 3, tmp_path, way, True) == first


def draw_ahead(rank):
    """The order in which batches are fetched and steps made."""
    seen = []

    def loader():
        for number in range(3):
            seen.append(f"fetch {number}")
            yield number

    module = Slots(3)
    with staged(module) as model:
        for number in model.join(loader()):
            with model.step():
                model(number).backward()
            seen.append(f"step {number}")
    return seen


def test_one_batch_is_fetched_ahead_and_no_more():
    (seen,) = run_ranks(draw_ahead, 1)
    assert seen == ["fetch 0", "fetch 1", "step 0", "fetch 2", "step 1", "step 2"]


def two_steps_each(rank):
    module, steps = Slots(5), 0
    counts = torch.zeros(5)
    with staged(module) as model:
        for number in model.join(numbers_of((2, 3), rank)):
            for _ in range(2):
                with model.step():
                    model(number).backward()
                counts += module.weight.grad * model.last_report.stages[0].weight
                module.zero_grad()
                steps += 1
    return counts.tolist(), steps


def test_a_loop_may_make_several_steps_with_each_batch():
    assert run_ranks(two_steps_each, 2) == [([2.0] * 5, 6)] * 2
