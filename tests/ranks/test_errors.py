"""What is refused, with which words, and how the failure of one rank ends the others."""

import gc
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import die, run_forked, run_ranks, staged
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from training import Signals, features, mlp

from straggle import LateHandling, PeerFailed, StagedDataParallel

PEERS_END_WITHIN_S = 30.0


def frozen():
    return mlp().requires_grad_(False)


def sparse():
    return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))


def synchronized():
    return nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))


def lazy():
    return nn.Sequential(nn.LazyLinear(4))


def sharded():
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, init_device_mesh("cpu", (1,))))
    return module


def wrap(rank, build, options=None):
    with staged(build(), **(options or {})):
        pass


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (frozen, "Sequential has no parameter with requires_grad=True"),
        (sparse, "0 has sparse gradients, which have no place in flat buffers: set sparse=False"),
        (synchronized, "1 is a SyncBatchNorm"),
        (lazy, "parameter 0.weight is not initialized"),
        (sharded, "parameter weight is sharded"),
    ],
)
def test_module_that_cannot_be_trained_in_stages_is_refused(build, words):
    (end,) = run_ranks(wrap, 1, build, outcomes=True)
    assert end.kind == "ValueError"
    assert words in end.message


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"deadline": "soon"}, "TypeError", "deadline='soon': give a straggle.Deadline"),
        ({"deadline": -1.0}, "ValueError", "budget_s=-1.0"),
        ({"stages": 0}, "ValueError", "stages=0: this model can be divided into 1 to 3 stages"),
        ({"stages": 4}, "ValueError", "stages=4"),
        ({"stages": ["body"]}, "ValueError", "stages not found in Sequential: ['body']; it has 0, 2, 4"),
        ({"late_handling": LateHandling(quorum=2)}, "ValueError", "quorum=2: there are only 1 ranks"),
    ],
)
def test_option_that_makes_no_sense_is_refused_with_its_value(options, kind, words):
    (end,) = run_ranks(wrap, 1, mlp, options, outcomes=True)
    assert end.kind == kind
    assert words in end.message


def test_model_without_a_process_group_is_refused():
    with pytest.raises(RuntimeError, match=r"launch with torchrun and call torch\.distributed\.init_process_group"):
        StagedDataParallel(mlp())


def wrap_different(rank, difference):
    module = mlp()
    if rank == 1:
        if difference == "shape":
            module[2] = nn.Linear(8, 9)
        elif difference == "dtype":
            module[2].double()
        elif difference == "frozen":
            module[2].weight.requires_grad = False
        else:
            module.add_module("more", nn.Linear(2, 2))
    wrap(rank, lambda: module)


@pytest.mark.parametrize(
    ("difference", "name"),
    [("shape", "2.weight"), ("dtype", "2.weight"), ("frozen", "2.weight"), ("more", "more.weight")],
)
def test_models_that_differ_are_refused_on_every_rank_by_the_first_difference(difference, name):
    for end in run_ranks(wrap_different, 3, difference, outcomes=True):
        assert end.kind == "ValueError"
        assert "the model differs between ranks" in end.message
        assert "rank 1 has" in end.message
        assert f"'{name}'" in end.message


def misuse(rank, kind):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module) as model:
        if kind == "nothing to count":
            model.step(num_microbatches=0)
        if kind == "outside":
            model(features(0, 0)).sum().backward()
        with model.step() as step:
            if kind == "nested":
                with model.step():
                    pass
            loss = model(features(0, 0)).sum()
            if kind == "two passes":
                loss.backward(retain_graph=True)
            if kind == "scalars":
                step.log(**{f"scalar_{number}": 0.0 for number in range(9)})
            loss.backward()
            if kind == "optimizer":
                optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("nothing to count", "ValueError", "num_microbatches=0: a step has at least one backward pass"),
        ("outside", "RuntimeError", "backward outside of a step: write `with model.step():`"),
        ("nested", "RuntimeError", "step 0 is still open: a step() cannot be nested in another"),
        ("two passes", "RuntimeError", "model.step(num_microbatches=<number of backward passes>)"),
        ("scalars", "ValueError", "9 scalars in one step: at most 8"),
        ("optimizer", "RuntimeError", "step after it"),
    ],
)
def test_misuse_is_refused_with_the_remedy(kind, error, words, world_size):
    for end in run_ranks(misuse, world_size, kind, outcomes=True, timeout_s=PEERS_END_WITHIN_S):
        assert end.kind == error
        assert words in end.message


def recover(rank):
    """After each refusal that ends no step, training goes on."""
    module = mlp()
    with staged(module) as model:
        refused = []
        try:
            model(features(0, 0)).sum().backward()
        except RuntimeError as error:
            refused.append(str(error))
        with model.step():
            model(features(0, 0)).sum().backward()
        return len(refused), all(parameter.grad is not None for parameter in module.parameters())


def test_training_goes_on_after_a_backward_outside_of_a_step():
    assert run_ranks(recover, 2) == [(1, True)] * 2


class Broken(Exception):
    pass


def fail(rank, at_step, place, deadline):
    """The last rank raises in one place of a step; its process stays alive until the others have ended."""
    module = mlp()
    last = rank == dist.get_world_size() - 1
    number = 0

    def break_down(*_):
        if last and number == at_step:
            raise Broken("of the user")

    module[2].register_forward_pre_hook(break_down if place == "forward" else lambda *_: None)
    module[2].weight.register_post_accumulate_grad_hook(break_down if place == "backward" else lambda *_: None)
    with staged(module, deadline=deadline) as model:
        for number in range(6):
            with model.step():
                if place == "data":
                    break_down()
                model(features(rank, number)).sum().backward()
                if place == "end":
                    break_down()


@pytest.mark.parametrize("deadline", [None, 60.0], ids=["no deadline", "deadline"])
@pytest.mark.parametrize("place", ["data", "forward", "backward", "end"])
@pytest.mark.parametrize(("world_size", "at_step"), [(2, 0), (3, 2)])
def test_failure_of_one_rank_ends_the_others_with_its_name_while_it_lives(world_size, at_step, place, deadline):
    ends = run_ranks(fail, world_size, at_step, place, deadline, outcomes=True, timeout_s=PEERS_END_WITHIN_S)
    assert (ends[-1].kind, ends[-1].message) == ("Broken", "of the user")
    for end in ends[:-1]:
        assert end.kind == "PeerFailed"
        assert f"rank {world_size - 1} raised in step {at_step}" in end.message
        assert "Broken" in end.message


def fail_alone(rank):
    with staged(mlp()) as model, model.step():
        model(features(0, 0)).sum().backward()
        raise Broken("of the user")


def test_exception_of_the_user_leaves_the_step_unchanged():
    (end,) = run_ranks(fail_alone, 1, outcomes=True)
    assert (end.kind, end.message) == ("Broken", "of the user")


def collect_garbage_after_a_peer_ended(rank):
    """Rank 0 ends with its groups still there; rank 1, whose next merge is on its way in vain, frees its own."""
    gc.disable()
    with suppress(PeerFailed), staged(mlp()) as model:
        for number in range(1 + rank):
            with model.step():
                model(features(rank, number)).sum().backward()
    del model
    if rank == 1:
        gc.collect()


def test_rank_that_lost_a_peer_frees_its_groups_without_waiting_for_what_never_ends():
    assert run_forked(collect_garbage_after_a_peer_ended, 2, timeout_s=PEERS_END_WITHIN_S) == [None, None]


def fail_while_stuck(rank):
    """Rank 1 is stood in for in step 2, and then raises in it."""
    module, signals = mlp(), Signals()
    with staged(module, deadline=0.1, late_handling=LateHandling(grace_s=0.0)) as model:
        for number in range(50):
            with model.step():
                if (rank, number) == (1, 2):
                    signals.wait("merged 2")
                    raise Broken("of the user")
                model(features(rank, number)).sum().backward()
            if rank == 0:
                signals.send(f"merged {number}")
        return number


def test_failure_of_a_rank_that_was_stood_in_for_ends_the_others_too():
    peer, failed = run_ranks(fail_while_stuck, 2, outcomes=True, timeout_s=PEERS_END_WITHIN_S)
    assert failed.kind == "Broken"
    assert peer.kind == "PeerFailed"
    assert "rank 1 raised in step 2" in peer.message


def train_and_die(rank, at_step, deadline):
    module = mlp()
    with staged(module, deadline=deadline) as model:
        for number in range(100):
            with model.step():
                loss = model(features(rank, number)).sum()
                if (rank, number) == (1, at_step):
                    die()
                loss.backward()


@pytest.mark.parametrize("deadline", [None, 0.2], ids=["no deadline", "deadline"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_killed_rank_ends_the_others_with_its_name(world_size, deadline):
    ends = run_forked(train_and_die, world_size, 3, deadline, outcomes=True, timeout_s=PEERS_END_WITHIN_S)
    assert ends[1].kind == "Killed"
    for end in (ends[0], *ends[2:]):
        assert end.kind == "PeerFailed"
        assert "no answer from ranks [1]" in end.message
        assert "step 3" in end.message


def swallow(rank):
    """The failing rank's own code catches the error and goes on."""
    with staged(mlp()) as model:
        for number in range(4):
            try:
                with model.step():
                    loss = model(features(rank, number)).sum()
                    if (rank, number) == (1, 1):
                        raise Broken("of the user")
                    loss.backward()
            except Broken:
                pass


def test_rank_that_swallows_its_error_cannot_go_on_alone_for_ever():
    peer, failed = run_ranks(swallow, 2, outcomes=True, timeout_s=PEERS_END_WITHIN_S)
    assert peer.kind == "PeerFailed"
    assert "rank 1 raised in step 1" in peer.message
    assert failed.kind == "PeerFailed"
