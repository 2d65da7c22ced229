"""A step over several calls of a loop that belongs to somebody else: begun, one micro-batch at a time, and ended."""

from contextlib import nullcontext

import pytest
import torch
from ranks import digest, logged, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, grads, mlp

from straggle import DeadlineReached, PeerFailed

pytestmark = pytest.mark.light


class Calls:
    """A trainer of somebody else: it calls ``training_step`` for each micro-batch, and ``sync`` after the last."""

    def __init__(self, model, num_microbatches):
        self.model, self.number = model, num_microbatches
        self.step = None

    def training_step(self, x):
        if self.step is None:
            self.step = self.model.step(self.number).begin()
        assert self.model.open_step is self.step
        loss = torch.tensor(float("nan"))  # of a micro-batch that is not computed
        with self.step.microbatch():
            loss = self.model(x).square().mean() / self.number
            loss.backward()
        return loss

    def sync(self):
        step, self.step = self.step, None
        step.end()
        assert self.model.open_step is None


def by_calls_and_in_a_block(rank, stop_after):
    """Gradients of both, where the last rank is stopped in the middle; and how many losses each of its calls had."""
    results = []
    for calls in (True, False):
        module = mlp()
        stopper = Stopper(module)
        with staged(module) as model:
            trainer = Calls(model, 3)
            batches = [features(rank, number) for number in range(3)]
            if calls:
                trainer.step = model.step(3).begin()
                stopper.arm(trainer.step, stop_after if rank else None)
                losses = [trainer.training_step(x) for x in batches]
                late = trainer.step.late
                trainer.sync()
            else:
                losses, late = [], None
                with model.step(3) as step:
                    stopper.arm(step, stop_after if rank else None)
                    for x in batches:
                        loss = model(x).square().mean() / 3
                        losses.append(loss)
                        loss.backward()
            report = model.last_report.ranks[rank]
            results.append((digest(grads(module)), report.reach, report.cause, late, len(losses)))
            assert all(bool(loss.isfinite()) for loss in losses) or rank
    return results


@pytest.mark.parametrize("stop_after", [None, 0, 4, 6, 9, 17])
def test_calls_merge_what_the_block_does(stop_after):
    (first, second), others = run_ranks(by_calls_and_in_a_block, 2, stop_after)
    assert first[0] == second[0] == others[0][0] == others[1][0]
    assert others[0][1:3] == others[1][1:3]
    assert others[0][3] == (stop_after is not None)
    assert others[0][4] == 3  # the loop of the other goes on, whatever it computes


def computed_after_late(rank):
    """How many forward passes come to their end where the first of four micro-batches is stopped in backward."""
    module = Chain()
    stopper = Stopper(module)
    ended = []
    with staged(module) as model:
        step = model.step(4).begin()
        stopper.arm(step, 2)
        for number in range(4):
            with step.microbatch():
                output = model(1.0)
                ended.append(number)
                output.backward()
        step.end()
        return ended, model.last_report.ranks[0].cause, model.last_report.ranks[0].late


def test_a_late_ranks_other_micro_batches_end_at_once_and_the_cause_stays():
    assert run_ranks(computed_after_late, 1) == [([0], "backward", True)]


def failing(rank):
    """Rank 1's own code raises in its second micro-batch, and its trainer never comes to the end of the step."""
    with staged(mlp()) as model:
        step = model.step(2).begin()
        for number in range(2):
            with step.microbatch():
                if rank == 1 and number == 1:
                    raise ArithmeticError("own code")
                model(features(rank, number)).square().mean().backward()
        step.end()


def test_an_error_in_a_micro_batch_ends_the_step_on_all_ranks():
    peer, own = run_ranks(failing, 2, outcomes=True)
    assert own.kind == "ArithmeticError"
    assert peer.kind == PeerFailed.__name__
    assert "own code" in peer.message


def in_a_block_with_micro_batches(rank):
    """An error passes through both blocks and is told once; a deadline through the inner one only."""
    module = mlp()
    with staged(module) as model:
        with model.step(2) as step:
            for number in range(2):
                with step.microbatch():
                    if number == 1:
                        step.stop()
                    model(features(rank, number)).square().mean().backward()
            after = True
        assert after
        assert step.late
        with pytest.raises(KeyError, match="own"), model.step(2) as step, step.microbatch():
            raise KeyError("own")
        return model.open_step is None


def test_micro_batches_inside_of_a_block():
    assert run_ranks(in_a_block_with_micro_batches, 1) == [True]


def wrong_order(rank):
    with staged(mlp()) as model:
        step = model.step()
        with pytest.raises(RuntimeError, match="not open: begin"):
            step.microbatch()
        step.begin()
        with pytest.raises(RuntimeError, match="still open"):
            model.step().begin()
        model(features(0, 0)).sum().backward()
        step.end()
        assert not step.end()  # it has ended
        assert not issubclass(DeadlineReached, Exception)


def test_calls_in_the_wrong_order_are_refused():
    run_ranks(wrong_order, 1)


def counted_as_it_goes(rank, announced, stop_after):
    """Two steps of two passes, said to have ``announced`` until the loop knows better; and the same steps known before.

    The last rank is stopped in the second one.
    """
    results = []
    for first_said in (announced, 2):
        module = mlp()
        stopper = Stopper(module)
        with staged(module) as model, logged("straggle") as said:
            for number in range(2):
                module.zero_grad()
                step = model.step(first_said).begin()
                stopper.arm(step, stop_after if rank and number else None)
                for place in range(2):
                    step.num_microbatches = 2 if place else max(2, first_said)
                    with step.microbatch():
                        model(features(rank, place)).square().mean().backward()
                step.end()
            report = model.last_report.ranks[rank]
            results.append((digest(grads(module)), report.reach, list(said)))
    return results


@pytest.mark.parametrize("announced", [1, 4])
@pytest.mark.parametrize("stop_after", [None, 4, 9])
def test_a_loop_may_say_before_its_last_micro_batch_how_many_there_are(announced, stop_after):
    first, second = run_ranks(counted_as_it_goes, 2, announced, stop_after)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][0] == second[0][0]
    assert first[0][2] == []  # of passes that are missing


def counted_too_late(rank):
    module = mlp()
    with staged(module) as model:
        step = model.step(2).begin()
        for number in range(2):
            with step.microbatch():
                model(features(rank, number)).sum().backward()
        with pytest.raises(RuntimeError, match="all 2 backward passes of this step have come"):
            step.num_microbatches = 3
        with pytest.raises(ValueError, match="2 backward passes of this step have come"):
            step.num_microbatches = 1
        with pytest.raises(ValueError, match="at least one backward pass"):
            step.num_microbatches = 0
        assert step.num_microbatches == 2
        step.end()
        step = model.step(3).begin()
        with step.microbatch():
            model(features(rank, 0)).sum().backward()
        step.num_microbatches = 1  # the loop was left in the middle
        step.end()
        return model.last_report.ranks[0].reach


def test_who_says_it_too_late_is_told_so():
    assert run_ranks(counted_too_late, 1) == [1.0]


def evaluated_between(rank):
    """A rank that is late in its first micro-batch evaluates before its second one."""
    module = mlp()
    with staged(module) as model:
        step = model.step(2).begin()
        step.stop()
        outputs = []
        for number in range(2):
            with step.microbatch():
                outputs.append(model(features(rank, number)).sum())
            module.eval()
            with torch.no_grad():
                outputs.append(model(features(rank, number)))
            module.train()
        step.end()
        return len(outputs), model.last_report.ranks[0].late


def test_an_evaluation_between_two_micro_batches_belongs_to_no_step():
    assert run_ranks(evaluated_between, 1) == [(2, True)]


def left_in_the_middle(rank):
    """A loop that leaves its epoch in the middle of a step, evaluates, and goes on in the next; DDP's, and ours."""
    ends = []
    for ours in (False, True):
        module = mlp()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        wrapped = staged(module) if ours else nullcontext(nn.parallel.DistributedDataParallel(module))
        num_steps = num_passes = 0
        with wrapped as model, logged("straggle") as said:
            for num_batches in (5, 1, 4):
                for number in range(num_batches):
                    num_passes += 1
                    is_last = num_passes % 3 == 0
                    x = features(rank, number)
                    if ours:
                        step = model.open_step or model.step(3).begin()
                        with step.microbatch():
                            model(x).square().mean().backward()
                        if is_last:
                            step.end()
                    else:
                        with nullcontext() if is_last else model.no_sync():
                            model(x).square().mean().backward()
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad()
                        num_steps += 1
                module.eval()
                with torch.no_grad():
                    model(features(rank, 0))
                module.train()
            if ours:
                model.open_step.num_microbatches = 1  # the loop ends with a part of a step, which is merged by itself
                model.open_step.end()
                assert model.last_report.ranks[rank].reach == 1
                optimizer.zero_grad()
            ends.append((digest(module.parameters()), num_steps, list(said)))
    return ends


def test_a_loop_that_leaves_its_epoch_in_the_middle_of_a_step_goes_on_as_under_ddp():
    (ddp, ours), second = run_ranks(left_in_the_middle, 2)
    assert ours == ddp
    assert [ddp, ours] == second
    assert ddp[1:] == (3, [])


def calls_the_module(rank, num_microbatches):
    """Not the wrapped model, so that a backward pass is seen to begin when it has its first gradient."""
    module, gradients = Chain(), []
    with staged(module) as model:
        for number in range(3):
            with model.step(num_microbatches) as step:
                for part in range(num_microbatches):
                    with step.microbatch():
                        module(float(1 + number + rank + part)).backward()
            gradients.append([layer.weight.grad[0].item() for layer in module.layers])
            model.zero_grad()
    return gradients


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_first_gradient_of_a_pass_that_comes_through_no_output_of_the_model_counts_once(num_microbatches):
    sums = [
        sum(1 + number + rank + part for rank in range(2) for part in range(num_microbatches)) for number in range(3)
    ]
    expected = [[(layer + 1) * total / 2 for layer in range(5)] for total in sums]
    assert run_ranks(calls_the_module, 2, num_microbatches) == [expected, expected]
