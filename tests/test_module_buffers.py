"""BatchNorm's statistics and other buffers are the same on all ranks, from the ranks that finished the forward pass."""

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Stopper

from straggle import Merge


class Counting(nn.Module):
    """Buffers of several kinds around a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.5)
        self.register_buffer("constant", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("ratio", torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        self.ratio += x.mean().double()
        self.cache += x.mean()
        return self.norm(self.linear(x))


def inputs(rank, step):
    return torch.full((8, 4), float(rank + 1)) + torch.arange(8.0).unsqueeze(1) * (step + 1)


def train(rank, buffers, stops):
    """Buffers after each step; ``stops[step][rank]`` as for `Stopper` (0: before its first forward pass)."""
    torch.manual_seed(0)
    module = Counting()
    stopper = Stopper(module)
    seen = []
    with staged(module, merge=Merge(buffers=buffers)) as model:
        for number, stop in enumerate(stops):
            with model.step() as step:
                stopper.arm(step, stop[rank])
                model(inputs(rank, number)).square().sum().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen


def alone(rank, num_steps):
    torch.manual_seed(0)
    module = Counting()
    for number in range(num_steps):
        module(inputs(rank, number))
    return dict(module.named_buffers())


def test_buffers_are_the_mean_over_all_ranks():
    results = run_ranks(train, 3, "mean", [[None] * 3])
    expected = [alone(rank, 1) for rank in range(3)]
    for (seen,) in results:
        for name in ("norm.running_mean", "norm.running_var", "ratio"):
            mean = sum(one[name] for one in expected) / 3
            assert torch.allclose(seen[name], mean, rtol=1e-5), name
        assert seen["norm.num_batches_tracked"] == 1
        assert torch.equal(seen["constant"], torch.tensor([0.1, 0.2, 0.3]))
        assert torch.equal(seen["mask"], torch.tensor([True, False]))


def test_rank_that_stopped_in_backward_counts_and_one_that_stopped_in_forward_does_not():
    results = run_ranks(train, 3, "mean", [[None, 1, 0]])
    mean = (alone(0, 1)["norm.running_mean"] + alone(1, 1)["norm.running_mean"]) / 2
    for (seen,) in results:
        assert torch.allclose(seen["norm.running_mean"], mean, rtol=1e-5)
        assert seen["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("buffers", ["mean", "rank0"])
def test_buffers_are_identical_on_all_ranks_after_any_pattern(buffers):
    stops = [[None, None, 1], [0, None, None], [0, 0, 0], [None, 2, 0], [3, None, 1]]
    results = run_ranks(train, 3, buffers, stops)
    for step in range(len(stops)):
        shared = [{n: b for n, b in seen[step].items() if n != "cache"} for seen in results]
        assert len({digest(one.values()) for one in shared}) == 1
    assert torch.equal(results[0][2]["norm.running_mean"], results[0][1]["norm.running_mean"])  # nobody's step


def test_rank0_gives_its_own_values():
    for (seen,) in run_ranks(train, 2, "rank0", [[None] * 2]):
        assert torch.allclose(seen["norm.running_var"], alone(0, 1)["norm.running_var"], rtol=1e-6)


def test_local_leaves_every_rank_its_own():
    results = run_ranks(train, 2, "local", [[None] * 2])
    for rank, (seen,) in enumerate(results):
        assert torch.allclose(seen["norm.running_mean"], alone(rank, 1)["norm.running_mean"], rtol=1e-5)


def test_buffer_that_is_not_saved_stays_local():
    results = run_ranks(train, 2, "mean", [[None] * 2])
    assert not torch.equal(results[0][0]["cache"], results[1][0]["cache"])
