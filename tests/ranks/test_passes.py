"""Passes that do not come to their end: what is missing counts as missing, for the reason that there is."""

import pytest
import torch
from ranks import digest, logged, run_forked, run_ranks, staged
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Chain, Stopper, features, mlp

from straggle import LateHandling, Merge

NUM_LAYERS = 5


class Towers(nn.Module):
    """Two towers; a call uses one of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (mlp(seed) for seed in (1, 2))
        self.calls = []

    def forward(self, x, which):
        self.calls.append(which)
        return getattr(self, which)(x)


def recompute(rank, use_reentrant, granularity):
    """Rank 1 stops in its second step when tower a is computed again, in backward, after tower b is done."""
    net = Towers()
    x = features(0, 0).requires_grad_()  # which a reentrant checkpoint wants
    with staged(net, late_handling=LateHandling(granularity=granularity)) as model:
        steps = []
        for number in range(2):
            net.zero_grad()
            net.calls.clear()

            def late(*_, number=number):
                if (rank, number) == (1, 1) and net.calls == ["a", "b", "b", "a"]:
                    steps[-1].stop()

            hook = net.a[0].register_forward_pre_hook(late)
            with model.step() as step:
                steps.append(step)
                a, b = (checkpoint(model, x, which, use_reentrant=use_reentrant) for which in "ab")
                (a * b).sum().backward()
            hook.remove()
        report = model.last_report
        return [digest(p.grad for p in tower.parameters()) for tower in (net.a, net.b)], report.ranks[1]


def whole_towers():
    net = Towers()
    x = features(0, 0)
    (net(x, "a") * net(x, "b")).sum().backward()
    return [digest(p.grad for p in tower.parameters()) for tower in (net.a, net.b)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_rank_that_stops_while_a_checkpoint_computes_again_has_no_gradient_of_that_part(use_reentrant):
    for gradients, part in run_forked(recompute, 2, use_reentrant, "stage"):
        assert gradients == whole_towers()  # both ranks have the same data, and the merge is the mean of who has it
        assert part.late
        assert part.cause == "backward"
        assert 0 < part.reach < 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_whole_microbatch_is_not_stopped_while_a_checkpoint_computes_again(use_reentrant):
    for gradients, part in run_forked(recompute, 2, use_reentrant, "microbatch"):
        assert gradients == whole_towers()
        assert part.reach == 1.0


class Shared(nn.Module):
    """A layer that is used twice, each time in a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.twice(t)), self.first(x), use_reentrant=self.use_reentrant)
        return x.sum()


def share_weights(_rank, use_reentrant, num_microbatches):
    module = Shared(use_reentrant)
    with staged(module) as model:
        for _ in range(2):
            module.zero_grad()
            with model.step(num_microbatches):
                for part in range(num_microbatches):
                    model(features(0, part)).backward()
        return digest(p.grad for p in module.parameters()), model.last_report.ranks[0].reach


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_shared_weights_under_checkpoints_get_their_whole_gradient(num_microbatches, use_reentrant):
    module = Shared(False)
    for part in range(num_microbatches):
        module(features(0, part)).backward()
    expected = digest(p.grad for p in module.parameters())
    assert run_forked(share_weights, 1, use_reentrant, num_microbatches) == [(expected, 1.0)]


def heads(rank, stop_before):
    """A loss for each of three heads, as passes of a step; rank 1 stops before pass ``stop_before`` of its third step.

    Pass ``i`` gives head ``i`` the gradient 1 and the body ``i + 1``.
    """
    net = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("body", "0", "1", "2")})
    net.forward = lambda head: net["body"].weight.sum() * (head + 1) + net[str(head)].weight.sum()
    with staged(net, stages=["body", "0", "1", "2"]) as model:
        for number in range(3):
            net.zero_grad()
            with model.step(num_microbatches=3) as step:
                for head in range(3):
                    if (rank, number, head) == (1, 2, stop_before):
                        step.stop()
                    model(head).backward()
        gradients = {name: net[name].weight.grad.item() for name in net}
        return gradients, {stage.name: stage.weight for stage in model.last_report.stages}, model.last_report.late_ranks


@pytest.mark.parametrize("stop_before", [1, 2])
def test_head_of_a_loss_that_a_rank_did_not_come_to_has_the_mean_over_those_that_did(stop_before):
    for gradients, weights, late in run_forked(heads, 2, stop_before):
        assert late == (1,)
        assert {name: gradients[name] for name in "012"} == {"0": 1.0, "1": 1.0, "2": 1.0}
        assert {name: weights[name] for name in "012"} == {str(head): 1.0 + (head < stop_before) for head in range(3)}
        done = sum(head + 1 for head in range(stop_before))  # of the body, as micro-batches count
        assert gradients["body"] == pytest.approx((6 + done) / (1 + stop_before / 3))


def left_early(rank, how, num_steps=4):
    """In its second step rank 1 leaves the block before its backward pass, and skips the optimizer."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    reports = []
    with staged(module, merge=Merge(check_every=0)) as model, logged("straggle.loop.step_warnings") as messages:
        for number in range(num_steps):
            optimizer.zero_grad()
            with model.step():
                loss = model(features(rank, number)).sum()
                if (rank, number) == (1, 1) and how == "before":
                    reports.append(None)
                    continue
                loss.backward()
                if (rank, number) == (1, 1) and how == "after":
                    reports.append(None)
                    continue
            optimizer.step()
            reports.append(model.last_report)
    return digest(module.parameters()), reports, messages


@pytest.mark.parametrize("how", ["before", "after"])
def test_optimizer_step_that_one_rank_skipped_is_said_in_the_next_step(how):
    results = run_forked(left_early, 3, how)
    assert results[0][0] == results[2][0] != results[1][0]
    for rank, (_, reports, messages) in enumerate(results):
        assert [report.different_ranks for report in reports if report] == [
            None,
            *([] if rank == 1 else [None]),
            (1,),
            None,
        ]
        if rank < 2:  # it names itself, and one rank speaks for all
            (message,) = messages
            assert message.startswith("step 2: the optimizers of ranks [1] have not stepped as often")
        else:
            assert messages == []


def test_block_that_is_left_without_a_backward_pass_is_counted_as_that():
    _, reports, _ = run_forked(left_early, 3, "before")[0]
    part = reports[1].ranks[1]
    assert (part.late, part.cause, part.reach) == (False, "skipped", 0.0)
    assert reports[1].stages[0].weight == 2.0
    assert [rank.cause for rank in reports[2].ranks] == [None] * 3


def stop_after_all(rank):
    """Rank 1 is asked to stop with its last gradient, when there is nothing left to save."""
    module = Chain(NUM_LAYERS)
    stopper = Stopper(module)
    with staged(module) as model:
        for _ in range(2):
            came_to_the_end = False
            with model.step() as step:
                stopper.arm(step, NUM_LAYERS if rank == 1 else None)
                model(1.0).backward()
                came_to_the_end = True
        return came_to_the_end, model.last_report.ranks[1].late


def test_rank_with_all_its_gradients_is_not_stopped():
    assert run_forked(stop_after_all, 2) == [(True, False)] * 2


def look_again(rank):
    """Rank 1 is stopped by a forward pass that comes after its last backward pass."""
    module = Chain(NUM_LAYERS)
    with staged(module) as model:
        with model.step() as step:
            model(1.0).backward()
            if rank == 1:
                step.stop()
            model(1.0)
        part = model.last_report.ranks[1]
        return part.late, part.cause, part.reach


def test_block_that_is_cut_after_its_last_gradient_is_counted_as_late():
    assert run_forked(look_again, 2) == [(True, "forward", 1.0)] * 2


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one, self.two = nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        x = self.norm(x)
        return self.one(x).sum(), self.two(x).sum()


def two_losses(rank):
    """One forward pass, and a backward pass for each of its two losses."""
    module = Normed()
    with staged(module) as model:
        with model.step(num_microbatches=2):
            one, two = model(features(rank, 0))
            one.backward(retain_graph=True)
            two.backward()
        return module.norm.num_batches_tracked.item(), model.last_report.ranks[rank].reach


def test_statistics_of_one_forward_pass_with_two_losses_are_merged():
    assert run_forked(two_losses, 2) == [(1, 1.0)] * 2


class Called(nn.Module):
    """Two layers, and how often the module was called."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.last(self.first(x)).sum()


def called(rank, num_microbatches, num_calls, at_once, after):
    """Each pass goes through several calls of the model; rank 1 is stopped after so many gradients of its second step.

    ``at_once``: all calls of the step come before its first backward pass.
    """
    module = Called()
    stopper = Stopper(module)
    with staged(module) as model:
        for number in range(2):
            with model.step(num_microbatches) as step:
                stopper.arm(step, after if (rank, number) == (1, 1) else None)
                losses = (sum(model(torch.ones(1, 1)) for _ in range(num_calls)) for _ in range(num_microbatches))
                for loss in list(losses) if at_once else losses:
                    loss.backward()
        return module.calls.item(), model.last_report.ranks[1].late


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("num_microbatches", "num_calls"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_statistics_of_a_rank_count_if_all_of_its_forward_passes_came_to_their_end(
    num_microbatches, num_calls, at_once, after
):
    results = run_ranks(called, 2, num_microbatches, num_calls, at_once, after)
    assert results == [(2 * num_microbatches * num_calls, after < 2 * num_microbatches)] * 2


def stop_in_shared_weights(_rank, number):
    """Shared weights in reentrant checkpoints, in a step that is asked to stop after the first gradient of one."""
    module = Shared(True)
    stopper = Stopper(module)
    with staged(module) as model:
        for step_number in range(number + 1):
            module.zero_grad()
            with model.step() as step:
                stopper.arm(step, 1 if step_number == number else None)
                model(features(0, 0)).backward()
        return digest(p.grad for p in module.parameters()), digest(p.grad for p in module.twice.parameters())


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_a_shared_weights_gradient_never_counts_under_reentrant_checkpoints(number):
    module = Shared(False)
    module(features(0, 0)).backward()
    whole = digest(p.grad for p in module.parameters())
    ((own, shared),) = run_forked(stop_in_shared_weights, 1, number)
    if number == 0:  # that weights are shared is known after one pass, which is not stopped
        assert own == whole
    else:
        assert shared == digest([None, None])
