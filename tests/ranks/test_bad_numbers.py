"""Gradients that are not finite are left out and counted; a step in which no rank has others is skipped everywhere."""

import math

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Chain, features, grads, mlp, shared

from straggle import LastMerged, Merge

pytestmark = pytest.mark.light


def poisoned_chain(rank, poison, nonfinite, estimator=None):
    """Gradients, parameters and report of a step in which ``poison[rank]`` maps layers to what their gradient gets."""
    module = Chain(4)
    for layer, value in poison[rank].items():
        module.layers[layer].weight.register_hook(lambda gradient, value=value: gradient + value)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with staged(module, merge=Merge(nonfinite=nonfinite), estimator=estimator) as model:
        for _ in range(2):
            with model.step():
                model(float(rank + 1)).backward()
            kept = grads(module)
            optimizer.step()
            optimizer.zero_grad()
        return kept, digest(module.parameters()), len(optimizer.state), model.last_report


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradient_with_bad_numbers_is_left_out_of_the_mean_and_counted(value):
    results = run_ranks(poisoned_chain, 3, [{}, {1: value}, {}], "drop")
    for gradients, _, _, report in results:
        for layer, gradient in enumerate(gradients):
            mean = (1 + 3) / 2 if layer == 1 else (1 + 2 + 3) / 3
            assert torch.allclose(gradient, torch.full((2 + layer,), (layer + 1) * mean))
        assert [rank.nonfinite for rank in report.ranks] == [0, 1, 0]
        assert not report.skipped
    assert len({parameters for _, parameters, _, _ in results}) == 1
    assert len({shared(report) for *_, report in results}) == 1


def test_parameter_whose_gradient_is_bad_on_every_rank_has_none():
    results = run_ranks(poisoned_chain, 2, [{2: math.nan}, {2: math.inf}], "drop")
    for gradients, _, num_states, report in results:
        assert report.skipped
        assert gradients == [None] * 4
        assert num_states == 0  # the optimizer was not touched


def test_step_is_skipped_on_all_ranks_when_every_rank_has_bad_numbers_even_with_an_estimator():
    everything = dict.fromkeys(range(4), math.nan)
    results = run_ranks(poisoned_chain, 2, [everything, everything], "drop", LastMerged())
    assert all(report.skipped and num_states == 0 for _, _, num_states, report in results)
    assert len({parameters for _, parameters, _, _ in results}) == 1


def test_keep_merges_bad_numbers_as_ddp_does():
    for gradients, _, _, report in run_ranks(poisoned_chain, 2, [{}, {1: math.inf}], "keep"):
        assert torch.isinf(gradients[1]).all()
        assert torch.isfinite(gradients[0]).all()
        assert [rank.nonfinite for rank in report.ranks] == [0, 0]


def half_precision(rank):
    """One rank's gradients overflow in bfloat16 parameters, whose weights travel in a message of their own."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2).to(torch.bfloat16)
    with staged(module) as model, model.step():
        (model(features(rank, 0).to(torch.bfloat16)).sum() * (math.inf if rank == 1 else 1.0)).backward()
    return grads(module), model.last_report.ranks[1].nonfinite


def test_bad_numbers_are_left_out_in_half_precision_too():
    results = run_ranks(half_precision, 2)
    for gradients, nonfinite in results:
        assert nonfinite == 2
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert torch.equal(gradients[1], torch.full((2,), 8.0, dtype=torch.bfloat16))


def large_but_finite(rank):
    module = nn.Linear(4, 2, bias=False)
    with staged(module) as model, model.step():
        (model(torch.ones(1, 4)) * 3e38).sum().backward()
    return grads(module), model.last_report.ranks[0].nonfinite


def test_large_finite_gradients_whose_sum_overflows_are_not_left_out():
    gradients, nonfinite = run_ranks(large_but_finite, 1)[0]
    assert nonfinite == 0
    assert torch.equal(gradients[0], torch.full((2, 4), 3e38))


def clipped(rank):
    """Training goes on after rank 1's loss was NaN for three steps."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module) as model:
        for step in range(8):
            with model.step():
                loss = model(features(rank, step)).square().mean()
                (loss * math.nan if rank == 1 and 2 <= step < 5 else loss).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return digest(module.parameters()), all(torch.isfinite(p).all() for p in module.parameters())


def test_training_survives_a_rank_with_a_nan_loss():
    results = run_ranks(clipped, 3)
    assert len(set(results)) == 1
    assert results[0][1]


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="nonfinite='zero': choose one of drop, keep"):
        Merge(nonfinite="zero")
    with pytest.raises(ValueError, match="buffers='sum': choose one of mean, rank0, local"):
        Merge(buffers="sum")


class Complex(nn.Module):
    """A small complex parameter and a large one, which is summed as it is copied; and a real one."""

    def __init__(self):
        super().__init__()
        self.small = nn.Parameter(torch.full((3,), 1 + 2j))
        self.large = nn.Parameter(torch.full((2**15,), 2 - 1j))
        self.real = nn.Parameter(torch.ones(3))

    def forward(self, factor):
        return factor * ((self.small.abs() ** 2).sum() + (self.large.abs() ** 2).sum() + self.real.sum())


def train_complex(rank, poison):
    """Gradients of the last of three steps, and which ranks had bad ones; a rank's factor is its number plus 1."""
    module = Complex()
    if rank == 1 and poison is not None:
        name, value = poison
        module.get_parameter(name).register_hook(
            lambda gradient: gradient.clone().index_fill_(0, torch.tensor(1), value)
        )
    with staged(module) as model:
        for _ in range(3):
            module.zero_grad()
            with model.step():
                model(rank + 1.0).backward()
        report = model.last_report
        return {name: own.grad[0].item() for name, own in module.named_parameters()}, [
            r.nonfinite for r in report.ranks
        ]


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("value", [complex(math.nan, 0.0), complex(0.0, math.nan), complex(0.0, math.inf)], ids=str)
@pytest.mark.filterwarnings("error")
def test_complex_gradients_are_looked_at_in_both_parts(name, value):
    of_all = {"small": 3 + 6j, "large": 6 - 3j, "real": 1.5}
    expected = {**of_all, name: {"small": 2 + 4j, "large": 4 - 2j}[name]}  # the mean over rank 0 alone
    assert run_ranks(train_complex, 2, None) == [(of_all, [0, 0])] * 2
    assert run_ranks(train_complex, 2, (name, value)) == [(expected, [0, 1])] * 2
