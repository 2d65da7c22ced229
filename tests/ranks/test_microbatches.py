"""A step over several calls of a loop that belongs to somebody else: begun, one micro-batch at a time, and ended."""

from contextlib import nullcontext

import pytest
import torch
from ranks import digest, logged, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, mlp

from straggle import DeadlineReached, PeerFailed

pytestmark = pytest.mark.light


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
