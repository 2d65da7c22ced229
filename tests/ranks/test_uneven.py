"""Ranks with different numbers of batches, and contributions weighted by samples."""

import math

import pytest
import torch
from ranks import run_ranks, staged
from torch import nn
from training import Chain, Stopper, grads, mlp

from straggle import QuantileDeadline

pytestmark = pytest.mark.light


def train_joined(rank, lengths):
    module = Chain(3)
    with staged(module, deadline=QuantileDeadline(0.5, warmup_steps=1000)) as model:
        for x in model.join([10.0 * rank + i + 1 for i in range(lengths[rank])]):
            with model.step():
                model(x).backward()
            module.zero_grad()
        return model.history.compute_s.isnan().tolist(), model.history.finished.tolist()


def test_rank_without_data_does_not_shift_the_deadline():
    never_entered, finished = run_ranks(train_joined, 2, [3, 1])[0]
    assert never_entered == [[False, False], [False, True], [False, True]]
    assert finished == [[True, True], [True, False], [True, False]]


def empty(rank):
    with staged(mlp()) as model, pytest.raises(ValueError, match="rank 0: the loader is empty"):
        next(iter(model.join([])))


def test_empty_loader_is_refused():
    run_ranks(empty, 1)


# -- weights


def weighted(rank, weights, stops):
    module = Chain(3)
    stopper = Stopper(module)
    with staged(module) as model:
        with model.step(num_microbatches=2) as step:
            step.weight = weights[rank]
            stopper.arm(step, stops[rank])
            for _ in range(2):
                (model(float(rank + 1)) / 2).backward()
        return grads(module), model.last_report


def test_contributions_count_by_their_weight():
    for gradients, report in run_ranks(weighted, 3, [1, 5, 2], [None] * 3):
        mean = (1 * 1 + 5 * 2 + 2 * 3) / 8
        for layer, gradient in enumerate(gradients):
            assert torch.allclose(gradient, torch.full((2 + layer,), (layer + 1) * mean))
        assert [stage.weight for stage in report.stages] == [8.0] * 3
        assert [rank.weight for rank in report.ranks] == [1.0, 5.0, 2.0]


def test_late_rank_counts_by_the_share_that_it_finished_of_its_weight():
    # rank 1 finishes its first micro-batch, and of the second the last layer alone
    for gradients, report in run_ranks(weighted, 2, [3, 4], [None, 4]):
        for layer, gradient in enumerate(gradients):
            share = 1.0 if layer == 2 else 0.5
            mean = (3 * 1 + 4 * share * 2) / (3 + 4 * share)
            assert torch.allclose(gradient, torch.full((2 + layer,), (layer + 1) * mean))
        assert [stage.weight for stage in report.stages] == [7.0, 5.0, 5.0]


def weighed_before(rank, default):
    """Step 1 has its weight from before it is begun, and step 2 has the default."""
    module = Chain(3)
    seen = []
    with staged(module) as model:
        model.default_weight = default
        for has_own in (True, False):
            step = model.step(num_microbatches=2)
            if has_own:
                step.weight = (3, 1)[rank]
                assert step.weight == (3, 1)[rank]
            step.begin()
            for _ in range(2):
                with step.microbatch():
                    (model(float(rank + 1)) / 2).backward()
            step.end()
            seen.append((grads(module)[0], [own.weight for own in model.last_report.ranks], step.weight))
    return seen


@pytest.mark.parametrize("default", [1.0, 2.0])
def test_weight_that_is_set_before_the_block_counts_in_it(default):
    for rank, (own, by_default) in enumerate(run_ranks(weighed_before, 2, default)):
        assert torch.allclose(own[0], torch.full((2,), (3 * 1 + 1 * 2) / 4))
        assert own[1:] == ([3.0, 1.0], (3, 1)[rank])
        assert by_default[1:] == ([default] * 2, default)


def wrong_weights(rank):
    module = nn.Linear(4, 2)
    messages = []
    with staged(module) as model:
        with pytest.raises(ValueError, match="must be a positive number"):
            model.step().weight = 0  # no step is begun with it
        for weight in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match="must be a positive number") as error, model.step() as step:
                step.weight = weight
            messages.append(str(error.value))
    return messages


def test_weight_that_is_not_positive_is_refused():
    (messages,) = run_ranks(wrong_weights, 1)
    assert messages[0].startswith("weight=0: ")


def late_weight(rank):
    module = nn.Linear(4, 2)
    too_late = pytest.raises(RuntimeError, match="before the first backward pass")
    with staged(module) as model, too_late, model.step() as step:
        model(torch.ones(1, 4)).sum().backward()
        step.weight = 2.0


def test_weight_that_comes_after_a_gradient_is_refused():
    run_ranks(late_weight, 1)
