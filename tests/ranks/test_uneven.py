"""Ranks with different numbers of batches, and contributions weighted by samples."""

import math

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, grads, mlp, shared

from straggle import LastMerged, QuantileDeadline

pytestmark = pytest.mark.light


def train_joined(rank, lengths, epochs=1, estimator=None):
    """Per step the input of this rank's batch, the gradients and the report, in epochs of ``lengths[rank]`` batches."""
    module = Chain(3)
    seen = []
    with staged(module, estimator=estimator, deadline=QuantileDeadline(0.5, warmup_steps=1000)) as model:
        for _ in range(epochs):
            for x in model.join([10.0 * rank + i + 1 for i in range(lengths[rank])]):
                with model.step():
                    model(x).backward()
                seen.append((grads(module), model.last_report))
                for parameter in module.parameters():
                    parameter.grad = None
        history = model.history
    return seen, history.compute_s.isnan().tolist(), history.finished.tolist()


@pytest.mark.parametrize("lengths", [[3, 1], [1, 3], [2, 4, 1], [2, 2]])
def test_every_rank_takes_part_until_the_last_one_is_done(lengths):
    results = run_ranks(train_joined, len(lengths), lengths)
    for seen, _, _ in results:
        assert len(seen) == max(lengths)
        for number, (gradients, report) in enumerate(seen):
            inputs = [10.0 * rank + number + 1 for rank, length in enumerate(lengths) if number < length]
            mean = sum(inputs) / len(inputs)
            for layer, gradient in enumerate(gradients):
                assert torch.allclose(gradient, torch.full((2 + layer,), (layer + 1) * mean))
            assert [rank.idle for rank in report.ranks] == [number >= length for length in lengths]
            assert report.late_ranks == ()
            assert report.dropped_share == 0.0
    assert len({tuple(shared(report) for _, report in seen) for seen, _, _ in results}) == 1


def test_rank_without_data_does_not_shift_the_deadline():
    _, never_entered, finished = run_ranks(train_joined, 2, [3, 1])[0]
    assert never_entered == [[False, False], [False, True], [False, True]]
    assert finished == [[True, True], [True, False], [True, False]]


def test_second_epoch_begins_with_everybody():
    seen, _, _ = run_ranks(train_joined, 2, [2, 1], 2)[0]
    assert [[rank.idle for rank in report.ranks] for _, report in seen] == 2 * [
        [False, False],
        [False, True],
    ]


def test_estimator_has_no_part_in_a_rank_without_data():
    seen, _, _ = run_ranks(train_joined, 2, [2, 1], 1, LastMerged())[0]
    gradients, report = seen[1]
    assert torch.allclose(gradients[0], torch.full((2,), 2.0))
    assert not any(stage.estimated for stage in report.stages)


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


def by_samples(rank, sizes):
    """Per-rank means, weighted by the number of samples, against the mean over all samples at once."""
    module = mlp()
    with staged(module) as model, model.step() as step:
        step.weight = sizes[rank]
        model(features(rank, 0, rows=sizes[rank])).square().mean().backward()
    everything = mlp()
    rows = torch.cat([features(r, 0, rows=size) for r, size in enumerate(sizes)])
    everything(rows).square().mean().backward()
    close = [torch.allclose(a, b, atol=1e-6) for a, b in zip(grads(module), grads(everything), strict=True)]
    return close, digest(grads(module))


def test_weighting_by_samples_is_the_mean_over_all_samples():
    results = run_ranks(by_samples, 3, [2, 16, 7])
    assert all(all(close) for close, _ in results)
    assert len({gradients for _, gradients in results}) == 1


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
