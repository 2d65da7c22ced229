"""BatchNorm's statistics and other buffers are the same on all ranks, from the ranks that finished the forward pass."""

import pytest
import torch
from ranks import digest, logged, run_ranks, staged
from torch import nn
from training import Stopper

from straggle import Merge

pytestmark = pytest.mark.light


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
    assert torch.equal(results[0][2]["norm.running_mean"], results[0][1]["norm.running_mean"])  # no rank's step


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


class Watched(nn.Module):
    """A causal mask, a maximum that begins at -inf, a mean that is a new tensor at every step, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.5)
        self.register_buffer("causal", torch.triu(torch.full((3, 3), -torch.inf), 1))
        self.register_buffer("highest", torch.tensor([-torch.inf, -torch.inf]))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.highest[0] = torch.maximum(self.highest[0], x.max())
        self.mean = 0.5 * self.mean + 0.5 * x.mean()
        return self.norm(self.linear(x))


def watch_buffers(rank, values):
    """All buffers after each step, on a rank whose input is ``values[step][rank]``."""
    torch.manual_seed(0)
    module = Watched()
    seen = []
    with staged(module) as model:
        for value in values:
            with model.step():
                model(torch.arange(32.0).view(8, 4) + value[rank]).square().sum().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen


def test_buffer_with_infinite_elements_keeps_no_other_from_being_merged():
    for first, second in run_ranks(watch_buffers, 2, [[0.0, 2.0], [0.0, 2.0]]):
        assert torch.equal(second["causal"], torch.triu(torch.full((3, 3), -torch.inf), 1))
        assert second["norm.num_batches_tracked"] == 2
        assert first["highest"].tolist() == [32.0, -torch.inf]  # the mean of 31 and 33; no rank has the other
        assert second["highest"].tolist() == [32.5, -torch.inf]  # of 32 and 33


def test_buffer_that_the_module_replaces_is_merged_too():
    for first, second in run_ranks(watch_buffers, 2, [[0.0, 2.0], [0.0, 2.0]]):
        assert first["mean"] == (15.5 + 17.5) / 2 / 2
        assert second["mean"] == first["mean"] / 2 + (15.5 + 17.5) / 2 / 2


def test_buffer_with_a_bad_number_is_left_out_by_itself_and_named():
    result = run_ranks(watch_with_log, 2, [[0.0, 0.0], [0.0, torch.inf]])
    for rank, ((first, second), messages) in enumerate(result):
        assert second["mean"] == first["mean"] / 2 + 15.5 / 2  # rank 0's
        assert second["norm.num_batches_tracked"] == 2  # of both ranks
        assert torch.isfinite(second["norm.running_mean"]).all()
        assert any("rank 1: buffer mean has NaN or infinite elements" in message for message in messages) == (rank == 1)


def watch_with_log(rank, values):
    with logged("straggle.merge.state.module_state") as messages:
        return watch_buffers(rank, values), messages


def test_buffer_of_another_shape_is_taken_from_the_lowest_rank():
    assert run_ranks(grow_a_buffer, 2) == [[1.0, 1.0], [1.0, 1.0]]


def grow_a_buffer(rank):
    module = Watched()
    with staged(module) as model, model.step():
        model(torch.ones(8, 4)).square().sum().backward()
        module.mean = torch.full((2,), 1.0) if rank == 0 else torch.zeros(3)
    return module.mean.tolist()
