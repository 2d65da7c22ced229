"""What a module holds beside its gradients is the same on all ranks after each step, whoever is late.

Each module writes what it is given; a rank that is late is stopped after its writes and before its forward pass ends.
On the CPU and on a queued device, a fake one: all scenarios of so many ranks are one run in each of these worlds.
"""

import time
import warnings
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from host_reads import HostReads
from job_loop import Remembers
from queued_device import RecordingDevice, queued_device
from ranks import digest, logged, run_forked, run_ranks, staged
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from training import Stopper
from worlds import WORLDS

from straggle import LateHandling, Merge

pytestmark = pytest.mark.light

LOG = "straggle.merge.state.module_state"
in_each_world = pytest.mark.parametrize("world", ["cpu", "queued"])


def all_scenarios(here, replicas):
    return [scenario(here, *args) for scenario, *args in SCENARIOS[replicas]]


@cache
def ends(world, replicas):
    """By scenario and its arguments, what it returns on each rank."""
    by_rank = WORLDS[world].run(all_scenarios, replicas, replicas=replicas)
    return dict(zip(map(tuple, SCENARIOS[replicas]), zip(*by_rank, strict=True), strict=True))


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
# from the lowest rank that finished
TAKEN = {"int64 that jumps", "uint8 that falls", "uint16", "bool", "float8", "complex"}
SMALL = {"int8", "uint8"}  # on a queued device too, where nobody has seen that they are no codes
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


def write(here, late):
    torch.manual_seed(0)
    module = Writes(here.rank)
    if here.rank == late:  # before the hook that looks whether to stop
        module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with here.staged(module) as model:
        with model.step() as step:
            model(torch.ones(1, 2)).sum().backward()
        return seen_in(module), model.last_report


@in_each_world
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_kind_of_buffer_is_averaged_or_taken_from_the_lowest_rank(world, world_size):
    taken = TAKEN | (SMALL if world == "queued" else set())
    for seen, _ in ends(world, world_size)[write, None]:
        for name, (before, value) in KINDS.items():
            if name in taken:
                assert seen[name] == bits(value(0)), name
            elif name in MEAN[world_size]:
                assert numbers(seen[name], before.dtype) == pytest.approx(MEAN[world_size][name], rel=1e-15), name
        assert numbers(seen["int64"], torch.int64) == MEAN[world_size]["int64"]
        assert numbers(seen["bfloat16"], torch.bfloat16) == [3.0 + (world_size - 1)] * 2
        assert set(numbers(seen["large"], torch.float32)) == {float(world_size)}


@in_each_world
@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_is_late_in_its_forward_pass_loses_its_own_changes(world, late):
    for seen, report in ends(world, 2)[write, late]:
        assert report.ranks[late].late
        for name, (_, value) in KINDS.items():
            assert seen[name] == bits(value(1 - late)), name


@in_each_world
def test_of_three_ranks_the_lowest_that_finished_is_taken(world):
    for seen, _ in ends(world, 3)[write, 0]:
        for name in TAKEN:
            assert seen[name] == bits(KINDS[name][1](1)), name
        assert numbers(seen["int64"], torch.int64) == [2**40, 2**60 + 4]


def write_twice_all_late(here):
    module = Writes(here.rank)
    module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with logged("straggle.merge.state.module_state") as messages, here.staged(module) as model:
        for _ in range(2):
            with model.step() as step:
                model(torch.ones(1, 2)).sum().backward()
        return seen_in(module), messages


@in_each_world
def test_what_no_rank_finished_is_set_back_and_said_once(world):
    for rank, (seen, messages) in enumerate(ends(world, 2)[(write_twice_all_late,)]):
        for name, (before, _) in KINDS.items():
            assert seen[name] == bits(before), name
        words = "buffer complex buffer changed in a step in which no rank's"
        (said,) = [message for message in messages if words in message]
        assert f"rank {rank}" in said


class Parts(nn.Module):
    """A code that falls on rank 0, and rises on rank 1, which is late after that."""

    def __init__(self, rank):
        super().__init__()
        self.linear, self.rank = nn.Linear(2, 1), rank
        self.register_buffer("code", torch.tensor([100], dtype=torch.uint8))

    def forward(self, x):
        self.code.fill_(50 + 100 * self.rank)
        return self.linear(x)


def part(here):
    module = Parts(here.rank)
    if here.rank == 1:
        module.linear.register_forward_pre_hook(lambda *_: step.stop())
    with logged("straggle.merge.state.module_state") as messages, here.staged(module) as model:
        with model.step() as step:
            model(torch.ones(1, 2)).sum().backward()
        return module.code.tolist(), messages


@in_each_world
def test_change_of_a_late_rank_alone_is_lost_without_a_word_if_another_rank_finished(world):
    assert ends(world, 2)[(part,)] == (([50], []),) * 2


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


def load_between_steps(here, late):
    torch.manual_seed(0)
    module, optimizer = Loaded(), None
    with here.staged(module) as model:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(4):
            with model.step() as step:
                if here.rank == late and number == 2:
                    step.stop()
                model(torch.arange(8.0).view(4, 2) + here.rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                module.load_state_dict({**module.state_dict(), **LOADED})
                module.norm.reset_running_stats()
                module.mask = module.mask.clone()
        return {name: buffer.clone() for name, buffer in module.named_buffers()}


@in_each_world
@pytest.mark.parametrize("late", [None, 1])
def test_buffers_that_are_loaded_after_wrapping_stay_as_they_are(world, late):
    first, second = ends(world, 2)[load_between_steps, late]
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


def count(here):
    module = Counts(here.rank)
    with here.staged(module) as model:
        for _ in range(8):
            with model.step():
                model(torch.ones(1, 2)).sum().backward()
    return module.sum.item(), module.count.item()


@in_each_world
def test_means_that_are_smaller_than_a_buffer_can_hold_add_up(world):
    assert ends(world, 4)[(count,)] == ((1 + 2 * 2**-7, 2),) * 4


# -- names, and which modules ran


def norms_in(make, here):
    torch.manual_seed(0)
    net = make()
    with here.staged(net, merge=Merge(check_every=2)) as model:
        for number in range(3):
            with model.step():
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * number + here.rank)) * (
                    1 + here.rank
                )
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


def norms(here):
    return {make.__name__: norms_in(make, here) for make in (checkpointed, compiled, spectral, shared, scripted)}


def test_buffers_are_merged_whatever_wrappers_call_them():
    first, second = WORLDS["cpu"].run(norms, run=run_forked)
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


def run_towers(here, late):
    """Rank 0 runs towers 0 and 1, the others 1 and 2; by a method, so that the wrapper's forward never runs."""
    torch.manual_seed(0)
    module = Towers()
    if here.rank == late:
        module.towers[1][1].register_forward_pre_hook(lambda *_: step.stop())
    with here.staged(module) as model:
        with model.step() as step:
            module.loss(
                (0, 1) if here.rank == 0 else (1, 2), torch.tensor([[1.0, 3.0], [3.0, 5.0]]) + 4 * here.rank
            ).backward()
        return [(int(t[0].num_batches_tracked), t[0].running_mean.tolist()) for t in module.towers]


@in_each_world
def test_statistics_are_the_mean_over_the_ranks_in_which_a_module_ran(world):
    for towers in ends(world, 2)[run_towers, None]:
        assert towers == [(1, [1.0, 2.0]), (1, [2.0, 3.0]), (1, [3.0, 4.0])]


@in_each_world
def test_statistics_of_a_method_that_was_cut_short_are_those_of_the_other_ranks(world):
    for towers in ends(world, 3)[run_towers, 1]:
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


def observe(here, late):
    torch.manual_seed(0)
    module = Observer()
    with here.staged(module) as model:
        for number in range(3):
            with model.step() as step:
                if here.rank == late and number == 0:
                    step.stop()
                model(torch.arange(8.0).view(4, 2) * (1 + here.rank)).sum().backward()
    return dict(module.named_buffers())


@in_each_world
@pytest.mark.parametrize(("world_size", "late"), [(2, None), (2, 0), (3, 1)])
def test_buffers_that_take_their_shape_in_the_first_forward_pass_are_merged(world, world_size, late):
    first, *others = ends(world, world_size)[observe, late]
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


LATE_IN = {2: {}, 3: {2: (1, "before"), 3: (0, "after"), 6: (1, "after")}}  # by number of ranks: step, rank and place


def momentum(here, way):
    torch.manual_seed(0)
    stops = LATE_IN[dist.get_world_size()]
    module = Momentum(way)
    module.q.register_forward_pre_hook(lambda *_: step.stop() if stops.get(number) == (here.rank, "after") else None)
    with here.staged(module, merge=Merge(check_every=1)) as model:
        optimizer = torch.optim.SGD(module.q.parameters(), 0.5)
        for number in range(8):
            with model.step() as step:
                if stops.get(number) == (here.rank, "before"):
                    step.stop()
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + here.rank))
                first, second = model(x)
                (first - second - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not model.last_report.different_ranks, number
        return [parameter.detach().clone() for parameter in module.parameters()]


@in_each_world
@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
@pytest.mark.parametrize("world_size", [2, 3], ids=["nobody", "late"])
def test_frozen_parameters_that_change_in_the_forward_pass_stay_equal(world, way, world_size):
    first, *others = ends(world, world_size)[momentum, way]
    for other in others:
        assert all(map(torch.equal, first, other))


def all_late_in_momentum(here):
    """All ranks are stopped, one before and one after the frozen parameters have changed."""
    torch.manual_seed(0)
    module = Momentum("in place")
    before = module.k.weight.detach().clone()
    module.q.register_forward_pre_hook(lambda *_: step.stop() if number == 1 and here.rank == 1 else None)
    with here.staged(module, merge=Merge(check_every=1)) as model:
        after = []
        for number in range(3):
            with model.step() as step:
                if number == 1 and here.rank == 0:
                    step.stop()
                first, second = model(torch.ones(2, 3))
                (first - second - 1).square().mean().backward()
            after.append(module.k.weight.detach().clone())
        return before, after, model.last_report.different_ranks


@in_each_world
def test_frozen_parameters_go_back_to_what_a_rank_still_has_if_no_rank_finished(world):
    (before, first, differ), (_, second, _) = ends(world, 2)[(all_late_in_momentum,)]
    assert torch.equal(first[1], first[0])
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
    assert not differ
    assert before.shape == first[0].shape


def untouched(here):
    """A frozen base and trained adapters: nothing that is frozen changes, and no more messages are sent."""
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    before = module[0].weight.clone()
    with here.staged(module) as model:
        for _ in range(4):
            with model.step():
                model(torch.ones(2, 4) + here.rank).sum().backward()
    return torch.equal(module[0].weight, before)


@in_each_world
def test_frozen_parameters_that_nobody_changes_stay_as_they_are(world):
    assert all(ends(world, 2)[(untouched,)])


# -- what differs is named


def part_silently(here, what):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False))
    with logged("straggle.loop.step_warnings") as messages, here.staged(module, merge=Merge(check_every=2)) as model:
        for number in range(3):
            if number == 2 and here.rank == 1:
                module.state_dict()[what].add_(1)
            with model.step():
                model(torch.arange(4.0).view(2, 2)).sum().backward()
        return model.last_report.different_ranks, model.last_report.different_tensors, messages


@in_each_world
@pytest.mark.parametrize("what", ["0.weight", "1.running_mean", "2.weight"])
def test_tensors_that_are_not_the_same_on_all_ranks_are_named(world, what):
    results = ends(world, 2)[part_silently, what]
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


def shape(here, late):
    module = Shaped()
    with here.staged(module) as model:
        for number in range(2):
            with model.step() as step:
                if here.rank == late and number == 1:
                    step.stop()
                model(torch.full((2, 2), 1.0 + 2 * here.rank)).sum().backward()
    return dict(module.named_buffers())


@in_each_world
@pytest.mark.parametrize(("late", "total"), [(None, 4.0), (1, 3.0)])
def test_views_and_expanded_buffers_are_merged(world, late, total):
    for seen in ends(world, 2)[shape, late]:
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


# -- Merge(buffers=...), infinite elements, and buffers that are replaced


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


def keep_buffers(here, buffers, stops):
    """Buffers after each step; ``stops[step][rank]`` as for `Stopper` (0: before its first forward pass)."""
    torch.manual_seed(0)
    module = Counting()
    stopper = Stopper(module)
    seen = []
    with here.staged(module, merge=Merge(buffers=buffers)) as model:
        for number, stop in enumerate(stops):
            with model.step() as step:
                stopper.arm(step, stop[here.rank])
                model(inputs(here.rank, number)).square().sum().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen


def alone(rank, num_steps):
    torch.manual_seed(0)
    module = Counting()
    for number in range(num_steps):
        module(inputs(rank, number))
    return dict(module.named_buffers())


@in_each_world
def test_rank_that_stopped_in_backward_counts_and_one_that_stopped_in_forward_does_not(world):
    mean = (alone(0, 1)["norm.running_mean"] + alone(1, 1)["norm.running_mean"]) / 2
    for (seen,) in ends(world, 3)[keep_buffers, "mean", ((None, 1, 0),)]:
        assert torch.allclose(seen["norm.running_mean"], mean, rtol=1e-5)
        assert seen["norm.num_batches_tracked"] == 1


@in_each_world
def test_rank0_gives_its_own_values_and_local_leaves_every_rank_its_own(world):
    of_first, of_each, mean = (
        ends(world, 2)[keep_buffers, kind, ((None, None),)] for kind in ("rank0", "local", "mean")
    )
    for rank in range(2):
        assert torch.allclose(of_first[rank][0]["norm.running_var"], alone(0, 1)["norm.running_var"], rtol=1e-6)
        assert torch.allclose(of_each[rank][0]["norm.running_mean"], alone(rank, 1)["norm.running_mean"], rtol=1e-5)
    assert not torch.equal(mean[0][0]["cache"], mean[1][0]["cache"])  # it is not saved


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


def watch_buffers(here, values):
    """All buffers after each step, on a rank whose input is ``values[step][rank]``."""
    torch.manual_seed(0)
    module = Watched()
    seen = []
    with logged(LOG) as messages, here.staged(module) as model:
        for value in values:
            with model.step():
                model(torch.arange(32.0).view(8, 4) + value[here.rank]).square().sum().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen, messages


BOTH, BAD = ((0.0, 2.0), (0.0, 2.0)), ((0.0, 0.0), (0.0, torch.inf))


@in_each_world
def test_buffer_with_infinite_elements_keeps_no_other_from_being_merged(world):
    for (first, second), _ in ends(world, 2)[watch_buffers, BOTH]:
        assert torch.equal(second["causal"], torch.triu(torch.full((3, 3), -torch.inf), 1))
        assert second["norm.num_batches_tracked"] == 2
        assert first["highest"].tolist() == [32.0, -torch.inf]  # the mean of 31 and 33; no rank has the other
        assert second["highest"].tolist() == [32.5, -torch.inf]  # of 32 and 33


@in_each_world
def test_buffer_that_the_module_replaces_is_merged_too(world):
    for (first, second), _ in ends(world, 2)[watch_buffers, BOTH]:
        assert first["mean"] == (15.5 + 17.5) / 2 / 2
        assert second["mean"] == first["mean"] / 2 + (15.5 + 17.5) / 2 / 2


@in_each_world
def test_buffer_with_a_bad_number_is_left_out_by_itself_and_named(world):
    for rank, ((first, second), messages) in enumerate(ends(world, 2)[watch_buffers, BAD]):
        assert second["mean"] == first["mean"] / 2 + 15.5 / 2  # rank 0's
        assert second["norm.num_batches_tracked"] == 2  # of both ranks
        assert torch.isfinite(second["norm.running_mean"]).all()
        assert any("rank 1: buffer mean has NaN or infinite elements" in message for message in messages) == (rank == 1)


def grow_a_buffer(here):
    module = Watched()
    with here.staged(module) as model, model.step():
        model(torch.ones(8, 4)).square().sum().backward()
        module.mean = torch.full((2,), 1.0) if here.rank == 0 else torch.zeros(3)
    return module.mean.tolist()


@in_each_world
def test_buffer_of_another_shape_is_taken_from_the_lowest_rank(world):
    assert ends(world, 2)[(grow_a_buffer,)] == ([1.0, 1.0],) * 2


# -- what a step reads of a queued device


OURS = ("averages.py", "module_state.py", "others.py", "exchange.py", "contents.py")


class Holds(nn.Module):
    """BatchNorm, two towers of which a step runs one, and what is not averaged; ``writes`` to some of it."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5)
        self.towers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2))
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
        self.register_buffer("ratio", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("code", torch.tensor([7], dtype=torch.uint8))
        self.register_buffer("seed", torch.tensor([3]))
        self.register_buffer("large", torch.zeros(70_000))
        self.runs, self.writes = 0, lambda: None

    def forward(self, x):
        self.ratio += x.mean().double()
        self.writes()
        self.runs += 1
        return self.towers[self.runs % 2](self.norm(self.linear(x)))


def x_of(rank, number):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * number + rank)) * (1 + rank)


def held_in(module):
    return [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]


def steps(rank, *, num_steps=9, writes=lambda _module, _number: None, check_every=5, behind=0):
    """For each step, the host's reads of what is held beside gradients, and its waits."""
    torch.manual_seed(0)
    module, found = Holds(), []
    with (
        queued_device(RecordingDevice(behind)) as device,
        staged(module, merge=Merge(check_every=check_every)) as model,
    ):
        for number in range(num_steps):
            module.writes = lambda number=number: writes(module, number)
            x = x_of(rank, number)
            with HostReads([*held_in(module), x]) as reads, model.step():
                model(x).square().mean().backward()
            found.append([one for one in reads.reads if one.partition(": ")[2].startswith(OURS)])
    return found, device.waits, digest(module.buffers())


def test_usual_steps_read_nothing_back_and_the_first_and_those_that_compare_do():
    for found, waits, state in (results := run_forked(steps, 2)):
        assert [bool(own) for own in found] == [number in (0, 1, 2, 5) for number in range(9)], found
        assert waits == 0
        assert state == results[0][2]


def frozen_moves(module, _number):
    with torch.no_grad():
        for parameter in module.frozen.parameters():
            parameter.mul_(0.9)


def mask_moves(module, number):
    module.mask.fill_(number % 2 == 0)
    module.code.add_(1)
    module.large.add_(1.0)


def write_others(rank, writes):
    return steps(rank, writes=writes, check_every=0)


@pytest.mark.parametrize(("writes", "number"), [(frozen_moves, 2), (mask_moves, 3)])
def test_steps_that_write_to_what_is_not_averaged_read_a_few_times_however_many_tensors_there_are(writes, number):
    for found, _, state in (results := run_forked(write_others, 2, writes)):
        assert [len(own) for own in found[3:]] == [number] * 6, found[3]
        assert state == results[0][2]


# -- what becomes of the buffers


LATENESS = [[None] * 3, [0, None, None], [None, 2, 0], [0, 0, 0], [None] * 3, [3, None, 1]]  # by step and rank


def train(here, buffers):
    """All buffers after each step; some ranks stop before, in or after their forward pass."""
    torch.manual_seed(0)
    module, seen = Holds(), []
    stopper = Stopper(nn.ModuleList([module.linear, module.norm, module.towers]))
    with here.staged(module, merge=Merge(buffers=buffers)) as model:
        for number, stop in enumerate(LATENESS):
            with model.step() as step:
                stopper.arm(step, stop[here.rank])
                model(x_of(here.rank, number)).square().mean().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen


@in_each_world
@pytest.mark.parametrize("buffers", ["mean", "rank0"])
def test_buffers_are_the_same_on_all_ranks_after_any_pattern_and_those_of_the_cpu_to_rounding(world, buffers):
    expected, *_ = ends("cpu", 3)[train, buffers]
    first, *others = ends(world, 3)[train, buffers]
    for number, own in enumerate(first):
        for name, value in own.items():
            torch.testing.assert_close(value, expected[number][name], rtol=1e-6, atol=0)
        assert {digest(other[number].values()) for other in others} == {digest(own.values())}
    assert torch.equal(first[3]["norm.running_mean"], first[2]["norm.running_mean"])  # no rank's step


def bad_number(rank, is_behind, num_steps=6):
    """The mean of a buffer after each step, and how many warnings there were by then; and by the end, and if its
    statistics are finite.

    The device has not come to the end of step 3 when the host enters step 4, if it ``is_behind``.
    """
    with queued_device() as device, logged("straggle.merge.state.module_state") as messages:
        seen, module = bad_steps(rank, is_behind, num_steps, device, messages)
    said = sum("ratio has NaN or infinite" in one for one in messages)
    return seen, said, bool(torch.isfinite(module.norm.running_mean).all())


def bad_steps(rank, is_behind, num_steps, device, messages):
    module, seen = Holds(), []
    with staged(module) as model:
        for number in range(num_steps):
            device.behind = 10**6 if is_behind and number == 4 else 0
            with model.step():
                x = torch.full((8, 4), torch.inf) if (rank, number) == (1, 3) else x_of(0, number)
                model(x).square().mean().backward()
            seen.append((module.ratio[0].item(), sum("ratio has NaN or infinite" in one for one in messages)))
    return seen, module


@pytest.mark.parametrize("is_behind", [False, True])
def test_buffer_with_a_bad_number_is_left_out_in_its_step_and_named_in_a_later_one(is_behind):
    first, second = run_ranks(bad_number, 2, is_behind)
    total = [sum(x_of(0, number).mean().double().item() for number in range(last + 1)) for last in range(6)]
    for seen, _, finite in (first, second):
        assert [own for own, _ in seen] == pytest.approx(total, rel=1e-6)  # rank 0's in that step
        assert finite
    assert [said for _, said in first[0]] == [0] * 6
    assert [said for _, said in second[0]] == [0, 0, 0, 0, int(not is_behind), 1]


def test_buffer_with_a_bad_number_in_the_last_step_is_named_at_the_end():
    (first, said, _), (second, said_too, _) = run_ranks(bad_number, 2, False, 4)
    assert (first[-1][1], said) == (0, 0)
    assert (second[-1][1], said_too) == (0, 1)


def written_by_another(here):
    module, seen = Holds(), []
    with here.staged(module) as model:
        for number in range(4):
            if here.rank == 1 and number == 2:  # tower 0 has run in step 1, and does not run in this one
                module.writes = lambda: module.towers[0][0].num_batches_tracked.add_(10)
            with model.step():
                model(x_of(here.rank, number)).square().mean().backward()
            module.writes = lambda: None
            seen.append([int(tower[0].num_batches_tracked) for tower in module.towers])
    return seen


@in_each_world
def test_buffer_of_a_module_that_did_not_run_counts_if_it_changed(world):
    expected = [[0, 1], [1, 1], [11, 2], [12, 2]]  # of rank 1 alone, as rank 0's tower neither ran nor changed
    assert ends(world, 2)[(written_by_another,)] == (expected,) * 2


def bad_in_large(here):
    module = Holds()
    module.large[0] = -torch.inf

    def writes():
        module.large[1:] = 1.0 + 2 * here.rank
        if here.rank == 0:
            module.large[2] = torch.nan

    module.writes = writes
    with logged(LOG) as messages, here.staged(module) as model:
        with model.step():
            model(x_of(here.rank, 0)).square().mean().backward()
        return module.large[:4].tolist(), messages


@in_each_world
def test_large_buffer_with_a_bad_number_that_was_not_there_before_is_left_out_and_named(world):
    (first, said), (second, said_too) = ends(world, 2)[(bad_in_large,)]
    assert first == second == [-torch.inf, 3.0, 3.0, 3.0]  # rank 1's
    assert ["buffer large has NaN or infinite elements" in one for one in said] == [True]
    assert said_too == []


EVERY = ((None, None),)
SCENARIOS = {
    2: [
        *((write, late) for late in (None, 0, 1)),
        (write_twice_all_late,),
        (part,),
        *((load_between_steps, late) for late in (None, 1)),
        (run_towers, None),
        *((observe, late) for late in (None, 0)),
        *((momentum, way) for way in ("in place", "data in place", "data")),
        (all_late_in_momentum,),
        (untouched,),
        *((part_silently, what) for what in ("0.weight", "1.running_mean", "2.weight")),
        *((shape, late) for late in (None, 1)),
        *((keep_buffers, kind, EVERY) for kind in ("mean", "rank0", "local")),
        *((watch_buffers, values) for values in (BOTH, BAD)),
        (grow_a_buffer,),
        (written_by_another,),
        (bad_in_large,),
    ],
    3: [
        *((write, late) for late in (None, 0)),
        (run_towers, 1),
        (observe, 1),
        *((momentum, way) for way in ("in place", "data in place", "data")),
        (keep_buffers, "mean", ((None, 1, 0),)),
        *((train, buffers) for buffers in ("mean", "rank0")),
    ],
    4: [(count,)],
}
