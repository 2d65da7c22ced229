"""Nothing lost: a run with a slow rank, kills, freezes and cuts has the parameters of one process that had none.

Each step is drawn from a pool with a seed. So each of its micro-batches is in it once, with the same random numbers,
whoever computed it; and as each step has its own samples, each sample comes once in an epoch.
"""

from __future__ import annotations

import itertools
import logging
import random
import time

import pytest
import torch
from members import run_forked_job
from ranks import run_ranks, staged
from training import features, mlp
from whole_steps import (
    EACH_EPOCH,
    LAYER_S,
    NUM_SAMPLES,
    Net,
    alone,
    assert_equal,
    loss_of,
    optimizer_of,
    samples_of,
    train,
)

from straggle import Merge, StagedDataParallel
from straggle.lab.world.faults import Cut, Freeze, Kill, Notice, Stall, StoreAway
from straggle.lab.world.run import run_world
from straggle.observe.findings import advise
from straggle.observe.numbers.run import run_of
from straggle.observe.numbers.run_numbers import numbers_of

pytestmark = pytest.mark.light


def faults_of(seed, ranks, *, kills, freezes, cuts=0, length_s):
    """So many of each, at drawn times; the last rank, which is slow, is never harmed."""
    chance = random.Random(seed)

    def any_rank():
        return chance.randrange(ranks - 1)

    def any_time():
        return round(chance.uniform(0.0, length_s), 3)

    def turns():
        return chance.randrange(200)

    return [
        *(Kill(any_rank(), any_time(), chance.choice([0.3, 1.0, 3.0]), turns=turns()) for _ in range(kills)),
        *(Freeze(any_rank(), any_time(), chance.choice([0.1, 0.5, 1.5, 4.0]), turns=turns()) for _ in range(freezes)),
        *(Cut(any_rank(), any_time(), chance.choice([0.2, 3.0]), turns=turns()) for _ in range(cuts)),
    ]


def run_with(faults, *, ranks, steps, seed=0, **options):
    """Checks each rank that took part in the last step; the steps that each process made, and how often."""

    def loop(rank):
        layer_s = LAYER_S * (2.0 if rank.number == rank.size - 1 else 1.0)
        own = {"end": lambda made: made >= steps, "told": lambda: rank.is_told}
        return train(Net(lambda: rank.work(layer_s)), **own, **options)

    run, expected = run_world(loop, ranks=ranks, seed=seed, faults=faults, longest_s=1200.0), alone(steps)
    ends = [own for own in run.results if isinstance(own, tuple)]  # others came back when all was over
    assert run.results[-1][1] == steps
    for parameters, made, seen in ends:
        if not seen[-1].was_out:
            assert_equal(parameters, expected if made == steps else alone(made))
    last = ends[-1][2]
    assert [own.step for own in last] == list(range(steps))
    assert all(own.dropped_share == pytest.approx(0.0) for own in last)
    return last


def test_each_sample_comes_once_in_an_epoch():
    for epoch in range(3):
        steps = [samples_of(epoch * EACH_EPOCH + place) for place in range(EACH_EPOCH)]
        assert sorted(number for step in steps for part in step for number in part) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_faults_no_step_is_made_again(ranks):
    seen = run_with([], ranks=ranks, steps=6)
    assert [own.attempts for own in seen] == [1] * 6


@pytest.mark.parametrize(("ranks", "steps"), [(2, 30), (4, 30), (8, 12)])
def test_kills_and_freezes_change_no_parameter(ranks, steps):
    faults = faults_of(ranks, ranks, kills=3, freezes=2, cuts=1, length_s=0.15 * steps * 4 / ranks)
    assert any(own.attempts > 1 for own in run_with(faults, ranks=ranks, steps=steps))


@pytest.mark.parametrize("ranks", [2, 4])
def test_pool_that_is_dealt_by_cost_loses_nothing_either(ranks):
    faults = faults_of(ranks, ranks, kills=3, freezes=2, cuts=1, length_s=0.15 * 16 * 4 / ranks)
    assert any(own.attempts > 1 for own in run_with(faults, ranks=ranks, steps=16, costs=True))


@pytest.mark.parametrize("fault", [Kill(0, 0.05), Freeze(0, 0.05, 4.0), Cut(0, 0.05, 4.0)], ids=repr)
def test_what_is_lost_in_the_first_step_is_computed_in_it_too(fault):
    seen = run_with([fault], ranks=3, steps=4)
    assert seen[0].attempts > 1


def test_a_rank_that_is_late_in_a_micro_batch_has_it_computed_by_others_and_what_it_gives_is_not_merged():
    stalls = [Stall(0, 0.63, 1.5), Stall(1, 2.93, 0.5)]
    seen = run_with(stalls, ranks=3, steps=30, deadline=0.2, members=False)
    assert sum(own.attempts > 1 for own in seen) >= 2


def times_of_steps(rank):
    """The reports that hooks are given, when each step was merged, and which attempts the log speaks of."""
    layer_s = LAYER_S * (2.0 if rank.number == rank.size - 1 else 1.0)
    module, seen = Net(lambda: rank.work(layer_s)), []
    optimizer = optimizer_of(module)
    model = StagedDataParallel(module, links=False, deadline=0.2)
    model.register_step_hook(lambda record: seen.append((record.merged_at, record.report)))
    for number in range(30):
        with model.step() as step:
            for numbers in step.pull(samples_of(number), seed=number):
                loss_of(model, numbers).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return seen


def test_rank_that_was_stuck_and_had_drawn_nothing_is_not_said_to_have_dropped_gradients(caplog):
    """Nothing is lost of these steps, and the log, the page and each report say the same."""
    caplog.set_level(logging.INFO, "straggle")
    seen, *_ = run_world(times_of_steps, ranks=3, seed=0, faults=[Stall(0, 0.63, 1.5), Stall(1, 2.93, 0.5)]).results
    reports = [report for _, report in seen]
    assert any(rank.stood_in and rank.reach == 0 and not rank.weight for report in reports for rank in report.ranks)
    assert all(report.dropped_share == pytest.approx(0.0) for report in reports)
    assert [rank.reach for rank in numbers_of(run_of(reports)).ranks] == pytest.approx([1.0] * 3)
    assert not [record.message for record in caplog.records if "dropped gradients" in record.message]


def test_seconds_of_discarded_attempts_are_in_the_report_of_the_step_and_count_as_lost():
    """Only the last attempt at a step is reported; a merge ends where the next one begins, so no time is nobody's."""
    for seen in run_world(times_of_steps, ranks=3, seed=0, faults=[Stall(0, 0.63, 1.5), Stall(1, 2.93, 0.5)]).results:
        again = [report for _, report in seen if report.pool_attempts > 1]
        assert len(again) == 2
        for (before, _), (after, report) in itertools.pairwise(seen):
            assert report.seconds + report.again_s == pytest.approx(after - before)
            assert (report.again_s > 0.05) == (report.pool_attempts > 1)
        run = run_of(report for _, report in seen)
        assert run.goodput.seconds["again"] == pytest.approx(sum(report.again_s for report in again))
        assert run.seconds[1:].sum() == pytest.approx(seen[-1][0] - seen[0][0])
        assert not any("lacks" in sentence for sentence in advise(run, numbers_of(run)))


@pytest.mark.parametrize("at_s", [0.62, 0.9])
def test_what_is_lost_while_the_store_does_not_answer_is_dealt_out_equally(at_s):
    faults = [StoreAway(0.55, 4.0), Stall(0, at_s, 1.5)]
    seen = run_with(faults, ranks=3, steps=24, deadline=0.2, members=False)
    assert max(own.attempts for own in seen) <= 3


@pytest.mark.parametrize("at_s", [0.5, 0.52, 0.54, 0.56])
def test_a_rank_that_leaves_by_notice_changes_no_parameter_though_another_dies_in_that_step(at_s):
    run_with([Notice(0, 0.5), Kill(1, at_s)], ranks=4, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_drawn_faults_change_no_parameter(seed):
    ranks = random.Random(seed).choice([2, 3, 4, 8])
    faults = faults_of(seed, ranks, kills=2, freezes=1, cuts=1, length_s=0.15 * 24 * 4 / ranks)
    run_with(faults, ranks=ranks, steps=24, seed=seed, deadline=random.Random(seed).choice([None, None, 0.3]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ten_kills_and_five_freezes_in_300_steps_change_no_parameter(ranks):
    faults = faults_of(ranks, ranks, kills=10, freezes=5, length_s=0.08 * 300 * 4 / ranks)
    assert sum(own.attempts > 1 for own in run_with(faults, ranks=ranks, steps=300)) >= 3


def forked(rank, board):
    """A process of it; the last rank is twice as slow."""
    layer_s = 0.002 * (2.0 if rank == 2 else 1.0)
    made = lambda steps: board.note(rank, steps)  # noqa: E731
    return train(Net(lambda: time.sleep(layer_s)), end=lambda steps: steps >= board.end, made=made)


@pytest.mark.slow
def test_processes_that_are_killed_and_stopped_change_no_parameter():
    with run_forked_job(3, forked) as job:
        job.walk(3)
        job.kill(0)
        job.walk(5, (1, 2))
        job.start(0)
        job.wait(lambda: job.board.made(0) > 0, "it is back")
        job.stop(1)
        job.walk(8, (0, 2))
        job.resume(1)
        job.meet()
        ends = job.finish()
    expected = alone(ends[2][1])
    for parameters, _, seen in ends:
        assert not seen[-1].was_out
        assert_equal(parameters, expected)
    assert any(own.attempts > 1 for own in ends[2][2])


def with_a_seed(model, optimizer, after):
    with model.step(optimizer=optimizer) as step:
        for x in step.pull([features(part, 0) for part in range(2)], seed=0):
            model(x).sum().backward()
        after(step)


def wrong_uses(rank):
    module, told = mlp(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module, merge=Merge(nonfinite="keep")) as model:
        for use in ((None, lambda step: step.log(loss=1.0)), (optimizer, lambda _: None)):
            with pytest.raises(RuntimeError) as error:
                with_a_seed(model, *use)
            told.append(str(error.value))
    return told


def test_wrong_uses_of_a_seed_are_refused_with_what_to_write():
    (told,) = run_ranks(wrong_uses, 1)
    assert "call it inside of that loop" in told[0]
    assert "leave out optimizer=, and call optimizer.step() after the block" in told[1]


def wrong_seeds(rank):
    told = []
    with staged(mlp()) as model:
        for seed in ("a", 1.5, True, -1):
            with pytest.raises(ValueError, match="seed") as error, model.step() as step:
                step.pull([features(0, 0)], seed=seed)
            told.append(str(error.value))
    return told


def test_seed_that_is_no_number_is_refused_where_it_is_given():
    (told,) = run_ranks(wrong_seeds, 1)
    assert told == [f"step.pull: seed={seed}: must be an integer of at least 0" for seed in ("a", 1.5, True, -1)]


def own_numbers(rank):
    """What the loop draws by itself after each step."""
    module, seen = mlp(), []
    torch.manual_seed(rank)
    with staged(module) as model:
        for number in range(3):
            with model.step() as step:
                for x in step.pull([features(part, 0) for part in range(4)], seed=number):
                    model(x + torch.rand(1)).sum().backward()
            seen.append(torch.rand(1).item())
    return seen


def test_random_numbers_of_the_loop_are_its_own():
    for rank, seen in enumerate(run_ranks(own_numbers, 2)):
        torch.manual_seed(rank)
        assert seen == [torch.rand(1).item() for _ in range(3)]
