"""What a module holds beside gradients, on a device that is a queue: no step waits for the averaged buffers.

The device is a fake one, with tensors on the CPU, for which each read by the host is counted.
"""

from contextlib import nullcontext

import pytest
import torch
from host_reads import HostReads
from queued_device import RecordingDevice, queued_device
from ranks import digest, logged, run_ranks, staged
from torch import nn
from training import Stopper

from straggle import Merge

pytestmark = pytest.mark.light

OURS = ("averages.py", "module_state.py", "others.py", "exchange.py", "tensor_bytes.py", "fingerprint.py")


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
    for found, waits, state in (results := run_ranks(steps, 2)):
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
    for found, _, state in (results := run_ranks(write_others, 2, writes)):
        assert [len(own) for own in found[3:]] == [number] * 6, found[3]
        assert state == results[0][2]


# -- what becomes of the buffers


def train(rank, queued, buffers):
    """All buffers after each step; some ranks stop before, in or after their forward pass."""
    torch.manual_seed(0)
    module, seen = Holds(), []
    stopper = Stopper(nn.ModuleList([module.linear, module.norm, module.towers]))
    with queued_device() if queued else nullcontext(), staged(module, merge=Merge(buffers=buffers)) as model:
        for number, stop in enumerate([[None] * 3, [0, None, None], [None, 2, 0], [0, 0, 0], [None] * 3, [3, None, 1]]):
            with model.step() as step:
                stopper.arm(step, stop[rank])
                model(x_of(rank, number)).square().mean().backward()
            seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return seen


@pytest.mark.parametrize("buffers", ["mean", "rank0"])
def test_buffers_are_those_of_the_cpu_to_rounding_and_the_same_on_all_ranks(buffers):
    expected, *_ = run_ranks(train, 3, False, buffers)
    first, *others = run_ranks(train, 3, True, buffers)
    for number, own in enumerate(first):
        for name, value in own.items():
            torch.testing.assert_close(value, expected[number][name], rtol=1e-6, atol=0)
        assert {digest(other[number].values()) for other in others} == {digest(own.values())}


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


def odd_integers(rank):
    module = Holds()

    def writes():
        module.code.fill_(200 + 10 * rank)
        module.seed.fill_(2**62 + rank)

    module.writes = writes
    with queued_device(), staged(module) as model, model.step():
        model(x_of(rank, 0)).square().mean().backward()
    return module.code.item(), module.seed.item()


def test_codes_and_integers_that_jump_at_first_are_taken_from_the_lowest_rank():
    assert run_ranks(odd_integers, 2) == [(200, 2**62)] * 2


def written_by_another(rank, is_queued):
    module, seen = Holds(), []
    with queued_device() if is_queued else nullcontext(), staged(module) as model:
        for number in range(4):
            if rank == 1 and number == 2:  # tower 0 has run in step 1, and does not run in this one
                module.writes = lambda: module.towers[0][0].num_batches_tracked.add_(10)
            with model.step():
                model(x_of(rank, number)).square().mean().backward()
            module.writes = lambda: None
            seen.append([int(tower[0].num_batches_tracked) for tower in module.towers])
    return seen


@pytest.mark.parametrize("is_queued", [False, True])
def test_buffer_of_a_module_that_did_not_run_counts_if_it_changed(is_queued):
    expected = [[0, 1], [1, 1], [11, 2], [12, 2]]  # of rank 1 alone, as rank 0's tower neither ran nor changed
    assert run_ranks(written_by_another, 2, is_queued) == [expected] * 2


def bad_in_large(rank, is_queued):
    module = Holds()
    module.large[0] = -torch.inf

    def writes():
        module.large[1:] = 1.0 + 2 * rank
        if rank == 0:
            module.large[2] = torch.nan

    module.writes = writes
    with (
        queued_device() if is_queued else nullcontext(),
        logged("straggle.merge.state.module_state") as messages,
        staged(module) as model,
    ):
        with model.step():
            model(x_of(rank, 0)).square().mean().backward()
        return module.large[:4].tolist(), messages


@pytest.mark.parametrize("is_queued", [False, True])
def test_large_buffer_with_a_bad_number_that_was_not_there_before_is_left_out_and_named(is_queued):
    (first, said), (second, said_too) = run_ranks(bad_in_large, 2, is_queued)
    assert first == second == [-torch.inf, 3.0, 3.0, 3.0]  # rank 1's
    assert ["buffer large has NaN or infinite elements" in one for one in said] == [True]
    assert said_too == []
