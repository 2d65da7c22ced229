"""Gradients of before: whatever the order of zero_grad, the result is DDP's; late ranks keep what their peers keep."""

from contextlib import nullcontext

import pytest
import torch
from host_reads import HostReads
from queued_device import queued_device
from ranks import digest, logged, run_forked, run_ranks, staged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Stopper, features, mlp

ORDERS = ("before the block", "first in the block", "before backward", "after the step", "never")


def passes(rank, number, num_microbatches, model, zero, last=nullcontext):
    """The passes of step ``number``; ``last`` is around all but the last of them."""
    zero("first in the block")
    for part in range(num_microbatches):
        with last() if part < num_microbatches - 1 else nullcontext():
            loss = model(features(rank, number * num_microbatches + part)).square().sum()
            if part == 0:
                zero("before backward")
            loss.backward()


def train(rank, order, set_to_none, num_microbatches, stop=None):
    """Hashes of the parameters after each of four steps; rank 1 stops before the forward pass of step ``stop``."""
    module = mlp()
    stopper = Stopper(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def zero(now):
        if now == order:
            optimizer.zero_grad(set_to_none=set_to_none)

    digests = []
    with staged(module) as model:
        for number in range(4):
            zero("before the block")
            with model.step(num_microbatches) as step:
                stopper.arm(step, 0 if (rank, number) == (1, stop) else None)
                passes(rank, number, num_microbatches, model, zero)
            optimizer.step()
            zero("after the step")
            digests.append(digest(module.parameters()))
    return digests


def train_ddp(rank, order, set_to_none, num_microbatches):
    module = mlp()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def zero(now):
        if now == order:
            optimizer.zero_grad(set_to_none=set_to_none)

    digests = []
    for number in range(4):
        zero("before the block")
        passes(rank, number, num_microbatches, model, zero, model.no_sync)
        optimizer.step()
        zero("after the step")
        digests.append(digest(module.parameters()))
    return digests


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ORDERS[:-1])
def test_zero_grad_at_any_place_gives_ddp_s_parameters(order, set_to_none):
    for num_microbatches in (1, 2):
        expected = run_ranks(train_ddp, 2, order, set_to_none, num_microbatches)
        assert run_ranks(train, 2, order, set_to_none, num_microbatches) == expected


def test_gradients_that_are_never_zeroed_accumulate_as_with_ddp():
    # DDP reduces what was kept with what is new, which is the same but for the rounding: gradients are compared
    (mine, _), (ddp, _) = run_ranks(accumulated, 2, True), run_ranks(accumulated, 2, False)
    for own, theirs in zip(mine, ddp, strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(theirs))


def accumulated(rank, with_straggle):
    module = mlp()
    if not with_straggle:
        model = DistributedDataParallel(module)
        for number in range(3):
            model(features(rank, number)).square().sum().backward()
        return [parameter.grad.tolist() for parameter in module.parameters()]
    with staged(module) as model:
        for number in range(3):
            with model.step():
                model(features(rank, number)).square().sum().backward()
        return [parameter.grad.tolist() for parameter in module.parameters()]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_rank_that_is_late_before_it_comes_to_zero_grad_ends_with_its_peers_parameters(order, set_to_none):
    first, second, third = run_ranks(train, 3, order, set_to_none, 1, 2)
    assert first == second == third


def two_networks(rank, stop):
    """Only one of two optimizers zeroes its gradients, in the block; rank 1 is late before it comes to that."""
    module = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})
    module.forward = lambda x: (module["one"](x) + module["two"](x)).square().sum()
    stopper = Stopper(module)
    optimizers = [torch.optim.SGD(module[name].parameters(), lr=0.01) for name in ("one", "two")]
    with staged(module) as model, logged("straggle.loop.open_step") as messages:
        for number in range(4):
            with model.step() as step:
                stopper.arm(step, 0 if (rank, number) == (1, stop) else None)
                loss = model(features(rank, number))
                optimizers[0].zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return digest(module.parameters()), messages


def test_rank_that_is_late_keeps_the_gradients_of_one_optimizer_as_its_peers_do():
    (first, said), (second, said_too) = run_ranks(two_networks, 2, 3)
    assert first == second
    assert said == said_too == []


def kept_beside_by_hand(rank, late):
    """Nothing is zeroed, and the loop gives one of two layers its gradient; a rank is late before its first pass."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("used", "other")})
    module.forward = lambda x: module["used"](x).sum()
    other = module["other"].weight
    with staged(module) as model:
        found = []
        for number in range(3):
            with model.step() as step:
                other.grad = torch.full((1, 1), 10.0 * (1 + rank))
                if number == 2 and rank in late:
                    step.stop()
                model(torch.full((1, 1), 1.0 + rank)).backward()
            found.append([own.grad.item() for own in module.parameters()])
        return found


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_rank_that_is_late_after_it_gave_a_gradient_by_hand_keeps_what_its_peers_keep(late):
    means = [[sum(1.0 + rank for rank in range(3) if rank not in late) / (3 - len(late))] for late in ((), late)]
    last = [2 * means[0][0] + means[1][0], 20.0]
    for found in run_ranks(kept_beside_by_hand, 3, late):
        assert found == [[2.0, 20.0], [4.0, 20.0], last]


def test_rank_that_cannot_tell_what_its_peers_kept_says_so():
    said = run_ranks(two_networks, 2, 1)[1][1]  # it was never in a step in which one optimizer alone zeroed
    assert len(said) == 1
    assert "its peers kept gradients of other parameters" in said[0]


def gradient_penalty(rank):
    """``torch.autograd.grad`` goes through the model before zero_grad, and then the loss's own backward pass."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with staged(module) as model:
        for number in range(3):
            with model.step():
                x = features(rank, number).requires_grad_()
                output = model(x).square().sum()
                (slope,) = torch.autograd.grad(output, x, create_graph=True)
                optimizer.zero_grad()
                (output + slope.square().sum()).backward()
            optimizer.step()
        return digest(module.parameters()), model.last_report.ranks[rank].reach


def gradient_penalty_alone(_rank):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for number in range(3):
        x = features(0, number).requires_grad_()
        output = module(x).square().sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        optimizer.zero_grad()
        (output + slope.square().sum()).backward()
        optimizer.step()
    return digest(module.parameters())


def test_gradient_penalty_before_zero_grad_is_no_backward_pass():
    assert run_ranks(gradient_penalty, 1) == [(gradient_penalty_alone(0), 1.0)]


def around_the_model(_rank, set_to_none):
    """Call a part of the model by itself, with the gradients of before still there."""
    module = mlp()
    with staged(module) as model:
        for _ in range(2):
            with model.step():
                loss = module[0](features(0, 0)).sum()
                module.zero_grad(set_to_none=set_to_none)
                loss.backward()
        return module[0].bias.grad.tolist()


def test_pass_that_does_not_come_through_the_model_is_told_from_what_was_there_or_refused():
    assert run_ranks(around_the_model, 1, True) == [[8.0] * 8]  # rows of the batch
    (raised,) = run_ranks(around_the_model, 1, False, outcomes=True)
    assert "zero_grad(set_to_none=True) before the block" in raised.message


# -- on a device that is a queue, the host does not look whether gradients are zeros


class Heads(nn.Module):
    """The first ``num_heads`` of three heads are used; the third never is."""

    def __init__(self):
        super().__init__()
        self.trunk = mlp()
        self.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
        self.num_heads = 2

    def forward(self, x):
        hidden = self.trunk(x)
        return sum(head(hidden) for head in self.heads[: self.num_heads])


def zeroed_in_place(rank, is_queued, order):
    """After each step the parameters and which gradients there are, and reads of the host before the merge."""
    torch.manual_seed(0)
    module, seen, found = Heads(), [], []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    with queued_device() if is_queued else nullcontext(), staged(module) as model:
        for number in range(4):
            module.num_heads = 1 if number == 3 else 2
            with HostReads([*module.parameters(), *(own.grad for own in module.parameters())]) as reads, model.step():
                if order == "first in the block":
                    optimizer.zero_grad(set_to_none=False)
                x = features(rank, number).requires_grad_()
                loss = model(x).square().sum()
                if order == "before backward":
                    optimizer.zero_grad(set_to_none=False)
                if number == 3:  # a pass that has no gradient for the model, with the gradients of before still there
                    torch.autograd.grad(loss, x, retain_graph=True)
                if number == 2 and module.trunk[0].weight.grad is not None:
                    module.trunk[0].weight.grad.add_(0.5)  # of a penalty
                loss.backward()
            optimizer.step()
            there = [own.grad is None for own in module.parameters()]
            seen.append((digest(module.parameters()), there))
            found.append([one for one in reads.reads if "kept.py" in one])
    return seen, found


@pytest.mark.parametrize("order", ["first in the block", "before backward"])
def test_device_is_not_read_to_see_which_gradients_are_zeros_and_the_result_is_that_of_the_cpu(order):
    on_cpu, queued = (run_forked(zeroed_in_place, 2, is_queued, order) for is_queued in (False, True))
    assert [seen for seen, _ in queued] == [seen for seen, _ in on_cpu]
    for _, found in queued:
        assert [len(own) for own in found] == [0, 0, 0, 2]  # in step 3, those without a gradient of the pass
    assert all(found[1] for _, found in on_cpu)
