"""What a module holds beside its gradients is the same on all ranks after each step, whoever is late.

Each module writes what it is given; a rank that is late is stopped after its writes and before its forward pass ends.
"""

import time
import warnings
from functools import partial

import pytest
import torch
from job_loop import Remembers
from ranks import digest, logged, run_ranks, staged
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from straggle import LateHandling, Merge

pytestmark = pytest.mark.light

# by name: the buffer before, and what each rank writes into it in its forward pass
KINDS = {
    "float64": (
        torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        lambda r: torch.tensor([0.7, r / 3], dtype=torch.float64),
    ),
    "int64": (torch.tensor([1, 2**60 + 1]), lambda r: torch.tensor([2**40, 2**60 + 1 + 2 * r])),
    "int64 that jumps": (torch.tensor([1]), lambda r: torch.tensor([2**62 + r])),
    "int32": (torch.tensor([5], dtype=torch.int32), lambda r: torch.tensor([7 - 2 * r], dtype=torch.int32)),
    "int8": (torch.tensor([1], dtype=torch.int8), lambda r: torch.tensor([3 + 2 * r], dtype=torch.int8)),
    "uint8": (torch.tensor([1, 9], dtype=torch.uint8), lambda r: torch.tensor([3 + 2 * r, 9], dtype=torch.uint8)),
    "uint8 that falls": (torch.tensor([200], dtype=torch.uint8), lambda r: torch.tensor([9 + r], dtype=torch.uint8)),
    "uint16": (torch.tensor([1], dtype=torch.uint16), lambda r: torch.tensor([65535 - r], dtype=torch.uint16)),
    "bool": (torch.tensor([False, True]), lambda r: torch.tensor([r == 1, r == 0])),
    "float8": (torch.ones(2).to(torch.float8_e4m3fn), lambda r: torch.full((2,), 2.0 + r).to(torch.float8_e4m3fn)),
    "complex": (torch.tensor([1 + 2j]), lambda r: torch.tensor([3 + r * 1j])),
    "bfloat16": (torch.ones(2, dtype=torch.bfloat16), lambda r: torch.full((2,), 3.0 + 2 * r, dtype=torch.bfloat16)),
    "empty": (torch.zeros(0), lambda _r: torch.zeros(0)),
    "large": (torch.zeros(70_000), lambda r: torch.full((70_000,), 1.0 + 2 * r)),
}
TAKEN = {
    "int64 that jumps",
    "uint8 that falls",
    "uint16",
    "bool",
    "float8",
    "complex",
}  # from the lowest rank that finished
MEAN = {
    2: {"float64": [0.7, 1 / 6], "int64": [2**40, 2**60 + 2], "int32": [6], "int8": [4], "uint8": [4, 9]},
    3: {"float64": [0.7, 1 / 3], "int64": [2**40, 2**60 + 3], "int32": [5], "int8": [5], "uint8": [5, 9]},
}


class Writes(nn.Module):
    """A linear layer, and a buffer of each kind that is overwritten with this rank's value in the forward pass."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.rank = rank
        for name, (before, _) in KINDS.items():
            self.register_buffer(f"{name} buffer", before.clone())

    def forward(self, x):
        for name, (_, value) in KINDS.items():
            getattr(self, f"{name} buffer").copy_(value(self.rank))
        return self.linear(x)


def write(rank, late):
    torch.manual_seed(0)
    module = Writes(rank)
    if rank == late:  # before the hook that looks whether to stop
        module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with staged(module) as model:
        with model.step() as step:
            model(torch.ones(1, 2)).sum().backward()
        return seen_in(module), model.last_report


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_kind_of_buffer_is_averaged_or_taken_from_the_lowest_rank(world_size):
    for seen, _ in run_ranks(write, world_size, None):
        for name, (before, value) in KINDS.items():
            if name in TAKEN:
                assert seen[name] == bits(value(0)), name
            elif name in MEAN[world_size]:
                assert numbers(seen[name], before.dtype) == pytest.approx(MEAN[world_size][name], rel=1e-15), name
        assert numbers(seen["int64"], torch.int64) == MEAN[world_size]["int64"]
        assert numbers(seen["bfloat16"], torch.bfloat16) == [3.0 + (world_size - 1)] * 2
        assert set(numbers(seen["large"], torch.float32)) == {float(world_size)}


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_is_late_in_its_forward_pass_loses_its_own_changes(late):
    results = run_ranks(write, 2, late)
    for seen, report in results:
        assert report.ranks[late].late
        for name, (_, value) in KINDS.items():
            assert seen[name] == bits(value(1 - late)), name


def test_of_three_ranks_the_lowest_that_finished_is_taken():
    for seen, _ in run_ranks(write, 3, 0):
        for name in TAKEN:
            assert seen[name] == bits(KINDS[name][1](1)), name
        assert numbers(seen["int64"], torch.int64) == [2**40, 2**60 + 4]


def test_what_no_rank_finished_is_set_back_and_said_once():
    results = run_ranks(write_twice_all_late, 2)
    for rank, (seen, messages) in enumerate(results):
        for name, (before, _) in KINDS.items():
            assert seen[name] == bits(before), name
        said = [
            message for message in messages if "buffer complex buffer changed in a step in which no rank's" in message
        ]
        assert len(said) == 1
        assert f"rank {rank}" in said[0]


def write_twice_all_late(rank):
    module = Writes(rank)
    module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with logged("straggle.merge.state.module_state") as messages, staged(module) as model:
        for _ in range(2):
            with model.step() as step:
                model(torch.ones(1, 2)).sum().backward()
        return seen_in(module), messages


class Parts(nn.Module):
    """A code that falls on rank 0, and rises on rank 1, which is late after that."""

    def __init__(self, rank):
        super().__init__()
        self.linear, self.rank = nn.Linear(2, 1), rank
        self.register_buffer("code", torch.tensor([100], dtype=torch.uint8))

    def forward(self, x):
        self.code.fill_(50 + 100 * self.rank)
        return self.linear(x)


def part(rank):
    module = Parts(rank)
    if rank == 1:
        module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with logged("straggle.merge.state.module_state") as messages, staged(module) as model:
        with model.step() as step:
            model(torch.ones(1, 2)).sum().backward()
        return module.code.tolist(), messages


def test_change_of_a_late_rank_alone_is_lost_without_a_word_if_another_rank_finished():
    assert run_ranks(part, 2) == [([50], [])] * 2


def seen_in(module):
    return {name.removesuffix(" buffer"): bits(buffer) for name, buffer in module.named_buffers()}


def bits(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def numbers(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=dtype).tolist()


# -- the base is what a rank holds when it enters the step


class Loaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("ids", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean64", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("scale", torch.full((2,), 1e6))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.linear(self.norm(x))


LOADED = {
    "ids": torch.tensor([123456789, 987654321, 2**53 + 1]),
    "mean64": torch.tensor([0.1, 1 / 3], dtype=torch.float64),
    "scale": torch.tensor([1e-3, 0.7]),
    "mask": torch.tensor([False, False]),
}


def load_between_steps(rank, late):
    torch.manual_seed(0)
    module, optimizer = Loaded(), None
    with staged(module) as model:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(4):
            with model.step() as step:
                if rank == late and number == 2:
                    step.stop()
                model(torch.arange(8.0).view(4, 2) + rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                module.load_state_dict({**module.state_dict(), **LOADED})
                module.norm.reset_running_stats()
                module.mask = module.mask.clone()
        return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("late", [None, 1])
def test_buffers_that_are_loaded_after_wrapping_stay_as_they_are(late):
    first, second = run_ranks(load_between_steps, 2, late)
    for name, value in LOADED.items():
        assert torch.equal(first[name], value), name
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert first["norm.num_batches_tracked"] == 2


class Counts(nn.Module):
    """A bfloat16 sum and an integer, to which rank 0 alone adds the least that it can."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.rank = rank
        self.register_buffer("sum", torch.ones(1, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int32))

    def forward(self, x):
        if self.rank == 0:
            self.sum += 2**-7
            self.count += 1
        return self.linear(x)


def count(rank):
    module = Counts(rank)
    with staged(module) as model:
        for _ in range(8):
            with model.step():
                model(torch.ones(1, 2)).sum().backward()
    return module.sum.item(), module.count.item()


def test_means_that_are_smaller_than_a_buffer_can_hold_add_up():
    assert run_ranks(count, 4) == [(1 + 2 * 2**-7, 2)] * 4


# -- names, and which modules ran


def norms_in(make, rank):
    torch.manual_seed(0)
    net = make()
    with staged(net, merge=Merge(check_every=2)) as model:
        for number in range(3):
            with model.step():
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * number + rank)) * (1 + rank)
                model(x).square().mean().backward()
            assert not model.last_report.different_ranks
        return {name: value.clone() for name, value in net.state_dict().items()}


def checkpointed():
    return nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), nn.Linear(4, 1))


def compiled():
    norm = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), backend="eager")
    return nn.Sequential(norm, nn.Linear(4, 1))


def spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 1))


def shared():
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 1))


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it, and models that have it are trained all the same
        norm = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False))
    return nn.Sequential(norm, nn.Linear(4, 1))


def norms(rank):
    return {make.__name__: norms_in(make, rank) for make in (checkpointed, compiled, spectral, shared, scripted)}


def test_buffers_are_merged_whatever_wrappers_call_them():
    first, second = run_ranks(norms, 2)
    for kind, state in first.items():
        for name, value in state.items():
            assert torch.equal(second[kind][name], value), f"{kind}: {name}"
        counts = [int(value) for name, value in state.items() if name.endswith("num_batches_tracked")]
        assert set(counts) == ({6} if kind in ("shared", "checkpointed") else {3}), kind  # a checkpoint runs twice


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(2, momentum=0.5), nn.Linear(2, 1)) for _ in range(3))

    def loss(self, numbers, x):
        return sum(self.towers[number](x).square().mean() for number in numbers)


def run_towers(rank, late):
    """Rank 0 runs towers 0 and 1, the others 1 and 2; by a method, so that the wrapper's forward never runs."""
    torch.manual_seed(0)
    module = Towers()
    if rank == late:
        module.towers[1][1].register_forward_pre_hook(lambda *_: step.stop())
    with staged(module) as model:
        with model.step() as step:
            module.loss((0, 1) if rank == 0 else (1, 2), torch.tensor([[1.0, 3.0], [3.0, 5.0]]) + 4 * rank).backward()
        return [(int(t[0].num_batches_tracked), t[0].running_mean.tolist()) for t in module.towers]


def test_statistics_are_the_mean_over_the_ranks_in_which_a_module_ran():
    for towers in run_ranks(run_towers, 2, None):
        assert towers == [(1, [1.0, 2.0]), (1, [2.0, 3.0]), (1, [3.0, 4.0])]


def test_statistics_of_a_method_that_was_cut_short_are_those_of_the_other_ranks():
    for towers in run_ranks(run_towers, 3, 1):
        assert towers == [(1, [1.0, 2.0]), (1, [3.0, 4.0]), (1, [5.0, 6.0])]


# -- buffers that take their shape in the first forward pass


class Observer(nn.Module):
    """As quantization observers and lazy statistics: an empty buffer, one that is None, and one of another shape."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", None)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        y = self.linear(x)
        if self.low.numel() == 0:
            self.low, self.high, self.seen = y.detach().amin(0), y.detach().amax(0), torch.zeros(3)
            self.linear.register_buffer("made", torch.zeros(2))
        else:
            self.low, self.high = self.low.minimum(y.detach().amin(0)), self.high.maximum(y.detach().amax(0))
        self.seen += 1
        self.linear.made += y.detach().mean()
        return y


def observe(rank, late):
    torch.manual_seed(0)
    module = Observer()
    with staged(module) as model:
        for number in range(3):
            with model.step() as step:
                if rank == late and number == 0:
                    step.stop()
                model(torch.arange(8.0).view(4, 2) * (1 + rank)).sum().backward()
    return dict(module.named_buffers())


@pytest.mark.parametrize(("world_size", "late"), [(2, None), (2, 0), (3, 1)])
def test_buffers_that_take_their_shape_in_the_first_forward_pass_are_merged(world_size, late):
    first, *others = run_ranks(observe, world_size, late)
    assert set(first) == {"low", "high", "seen", "linear.made"}
    assert first["seen"].tolist() == [3.0] * 3
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


# -- frozen parameters that change in the forward pass


class Momentum(nn.Module):
    """A momentum encoder: frozen, and changed in the forward pass by one of the usual ways."""

    def __init__(self, way):
        super().__init__()
        self.q, self.k, self.way = nn.Linear(3, 2), nn.Linear(3, 2), way
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)

    def forward(self, x):
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            if self.way == "in place":
                with torch.no_grad():
                    b.mul_(0.9).add_(a, alpha=0.1)
            elif self.way == "data in place":
                b.data.mul_(0.9).add_(a.data, alpha=0.1)
            else:
                b.data = b.data * 0.9 + a.data * 0.1
        return self.q(x), self.k(x).detach()


def momentum(rank, way, stops):
    torch.manual_seed(0)
    module = Momentum(way)
    module.q.register_forward_pre_hook(lambda *_: step.stop() if stops.get(number) == (rank, "after") else None)
    with staged(module, merge=Merge(check_every=1)) as model:
        optimizer = torch.optim.SGD(module.q.parameters(), 0.5)
        for number in range(8):
            with model.step() as step:
                if stops.get(number) == (rank, "before"):
                    step.stop()
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
                first, second = model(x)
                (first - second - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not model.last_report.different_ranks, number
        return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
@pytest.mark.parametrize("stops", [{}, {2: (1, "before"), 3: (0, "after"), 6: (1, "after")}], ids=["nobody", "late"])
def test_frozen_parameters_that_change_in_the_forward_pass_stay_equal(way, stops):
    first, *others = run_ranks(momentum, 3 if stops else 2, way, stops)
    for other in others:
        assert all(map(torch.equal, first, other))


def all_late_in_momentum(rank):
    """All ranks are stopped, one before and one after the frozen parameters have changed."""
    torch.manual_seed(0)
    module = Momentum("in place")
    before = module.k.weight.detach().clone()
    module.q.register_forward_pre_hook(lambda *_: step.stop() if number == 1 and rank == 1 else None)
    with staged(module, merge=Merge(check_every=1)) as model:
        after = []
        for number in range(3):
            with model.step() as step:
                if number == 1 and rank == 0:
                    step.stop()
                first, second = model(torch.ones(2, 3))
                (first - second - 1).square().mean().backward()
            after.append(module.k.weight.detach().clone())
        return before, after, model.last_report.different_ranks


def test_frozen_parameters_go_back_to_what_a_rank_still_has_if_no_rank_finished():
    (before, first, differ), (_, second, _) = run_ranks(all_late_in_momentum, 2)
    assert torch.equal(first[1], first[0])
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
    assert not differ
    assert before.shape == first[0].shape


def untouched(rank):
    """A frozen base and trained adapters: nothing that is frozen changes, and no more messages are sent."""
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    before = module[0].weight.clone()
    with staged(module) as model:
        for _ in range(4):
            with model.step():
                model(torch.ones(2, 4) + rank).sum().backward()
    return torch.equal(module[0].weight, before)


def test_frozen_parameters_that_nobody_changes_stay_as_they_are():
    assert all(run_ranks(untouched, 2))


# -- what differs is named


def part_silently(rank, what):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False))
    with logged("straggle.loop.step_warnings") as messages, staged(module, merge=Merge(check_every=2)) as model:
        for number in range(3):
            if number == 2 and rank == 1:
                module.state_dict()[what].add_(1)
            with model.step():
                model(torch.arange(4.0).view(2, 2)).sum().backward()
        return model.last_report.different_ranks, model.last_report.different_tensors, messages


@pytest.mark.parametrize("what", ["0.weight", "1.running_mean", "2.weight"])
def test_tensors_that_are_not_the_same_on_all_ranks_are_named(what):
    results = run_ranks(part_silently, 2, what)
    for ranks, tensors, _ in results:
        assert ranks == (1,)
        assert tensors == (what,)
    assert any(
        f"ranks [1], or their buffers, are not those of the others: {what};" in message for message in results[0][2]
    )


# -- views


class Shaped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("transposed", torch.zeros(2, 3).t())
        self.register_buffer("every_other", torch.zeros(6)[::2])

    def forward(self, x):
        self.expanded = self.expanded + x.mean()
        self.transposed += torch.arange(6.0).view(3, 2) * x.mean()
        self.every_other += torch.arange(3.0) * x.mean()
        return self.linear(x)


def shape(rank, late):
    module = Shaped()
    with staged(module) as model:
        for number in range(2):
            with model.step() as step:
                if rank == late and number == 1:
                    step.stop()
                model(torch.full((2, 2), 1.0 + 2 * rank)).sum().backward()
    return dict(module.named_buffers())


@pytest.mark.parametrize(("late", "total"), [(None, 4.0), (1, 3.0)])
def test_views_and_expanded_buffers_are_merged(late, total):
    for seen in run_ranks(shape, 2, late):
        assert seen["expanded"].tolist() == [1.0 + total] * 4
        assert torch.equal(seen["transposed"], torch.arange(6.0).view(3, 2) * total)
        assert torch.equal(seen["every_other"], torch.arange(3.0) * total)


# -- a rank that is stood in for


class Sleeps(Remembers):
    """Stalls in the middle of its writes."""

    def __init__(self):
        super().__init__()
        self.stall = lambda: None

    def forward(self, x):
        self.flag = ~self.flag
        with torch.no_grad():
            self.frozen.weight.add_(0.1)
        self.stall()
        return super().forward(x)


def stall(rank, num_steps):
    torch.manual_seed(0)
    module = Sleeps()
    late_handling = LateHandling(grace_s=0.02, max_lag=16)
    with staged(module, deadline=0.05, late_handling=late_handling, merge=Merge(check_every=4)) as model:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        different, stood_in = set(), 0
        for number in range(num_steps):
            module.stall = partial(time.sleep, 0.3) if (rank, number) in {(1, 6), (2, 12), (1, 13)} else lambda: None
            with model.step():
                time.sleep(0.02)
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            different |= set(model.last_report.different_ranks or ())
            stood_in += any(one.stood_in for one in model.last_report.ranks)
        return digest([*module.parameters(), *module.buffers()]), different, stood_in


@pytest.mark.slow
def test_rank_that_is_stood_in_for_comes_back_to_what_its_peers_hold():
    results = run_ranks(stall, 3, 30)
    assert len({state for state, _, _ in results}) == 1
    assert all(different == set() for _, different, _ in results)
    assert all(stood_in >= 2 for _, _, stood_in in results)
