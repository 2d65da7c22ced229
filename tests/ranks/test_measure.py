"""All ranks plan their stages by the same times, and stop where the granularity says."""

import pytest
import torch
from ranks import run_forked, staged
from training import Stopper, features, mlp

from straggle import BalancedByTime, LateHandling


def plans_by_time(rank):
    torch.manual_seed(0)
    module = mlp(depth=6)
    with staged(module, stages=BalancedByTime(3), deadline=None) as model:
        plans = []
        for step in range(5):
            with model.step():
                model(features(rank, step)).sum().backward()
            plans.append([stage.name for stage in model.last_report.stages])
    return plans


def test_all_ranks_balance_alike_by_rank_0s_times():
    first, second = run_forked(plans_by_time, 2)
    assert first == second
    assert all(len(plan) == 3 for plan in first)
    assert first[0] == first[1] == first[2]
    assert first[3] == first[4]


def whole_microbatches(rank, granularity):
    """Rank 1 stops after two gradients of its second micro-batch of three; gradients are 1, 2 and 4 times the input."""
    module = mlp(depth=3)
    stopper = Stopper(module)
    with staged(module, late_handling=LateHandling(granularity=granularity)) as model:
        with model.step(num_microbatches=3) as step:
            stopper.arm(step, 6 + 2 if rank == 1 else None)
            for part in range(3):
                (model(features(rank, part)).sum() / 3).backward()
        return model.last_report.ranks[1].stages


def test_microbatch_granularity_finishes_the_running_microbatch_and_drops_the_rest():
    assert run_forked(whole_microbatches, 2, "microbatch")[0] == pytest.approx([2 / 3] * 3)


def test_stage_granularity_keeps_the_finished_layers_of_the_running_microbatch():
    shares = run_forked(whole_microbatches, 2, "stage")[0]
    assert [round(3 * share) for share in shares] == [2, 1, 1]
