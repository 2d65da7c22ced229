"""`step.cost` with real ranks: a long batch is not late, and all ranks know what it cost."""

import math
import time

import pytest
from ranks import run_ranks, staged
from training import Chain, Signals

from straggle import FixedDeadline, LateHandling

MANY = 400  # micro-batches: their deadline is 20 s


def give_costs(rank):
    """Rank 1's steps cost three times as much as rank 0's."""
    costs = []
    with staged(Chain(), deadline=600.0) as model:
        for number in range(4):
            step = model.step()
            assert math.isnan(step.cost)
            if number == 3:
                step.cost = (100, 300)[rank]
            with step:
                if number in (1, 2):
                    step.cost = (100, 300)[rank]
                model(1.0).backward()
            costs.append([own.cost for own in model.last_report.ranks])
        with pytest.raises(ValueError, match="cost=0: must be a positive number"):
            model.step().cost = 0
        with pytest.raises(ValueError, match="cost=0: must be a positive number"), model.step() as step:
            step.cost = 0
    return costs


def test_all_ranks_know_what_a_step_cost_over_the_mean():
    (first, *costs), again = run_ranks(give_costs, 2)
    assert [first, *costs] == again
    assert first == [1.0, 1.0]
    assert costs == [[0.5, 1.5]] * 3  # set in the block or before it


def wait_in_a_long_step(rank, has):
    """In step 3 rank 1 goes on for longer than the deadline after its peer is done, or until it is stopped."""
    signals, late_handling = Signals(), LateHandling(grace_s=600.0)
    with staged(Chain(), deadline=FixedDeadline(0.05), late_handling=late_handling) as model:
        for number in range(4):
            is_long = (rank, number) == (1, 3)
            parts = MANY if is_long and has == "micro-batches" else 1
            with model.step(num_microbatches=parts) as step:
                if has == "a cost":
                    step.cost = 1e9 if is_long else 1.0
                if is_long:
                    signals.wait("posted")
                    time.sleep(0.3)  # six times the deadline of the mean cost: nothing but the longer one saves it
                    for _ in range(1 if has else 10_000):
                        model(1.0)
                for _ in range(parts):
                    model(1.0).backward()
                if (rank, number) == (0, 3):
                    signals.send("posted")
        return model.last_report.late_ranks


@pytest.mark.parametrize("has", ["", "a cost", "micro-batches"])
def test_rank_whose_step_costs_more_has_more_time(has):
    assert run_ranks(wait_in_a_long_step, 2, has) == [() if has else (1,)] * 2


def go_from_one_to_four(rank):
    costs = []
    with staged(Chain(), deadline=600.0) as model:
        for number in (1, 4, 2):
            with model.step(num_microbatches=number) as step:
                for _ in range(number):
                    model(1.0).backward()
                assert math.isnan(step.cost)
            costs.append([own.cost for own in model.last_report.ranks])
    return costs


def test_step_without_a_cost_costs_its_number_of_micro_batches():
    assert run_ranks(go_from_one_to_four, 2) == [[[1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]] * 2
