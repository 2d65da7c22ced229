"""An optimizer that is stepped in parts, during the merge, trains bit for bit as one that is stepped after it."""

from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import digest, run_forked, run_ranks, staged
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import Signals, Stopper, features, mlp

from straggle import Merge, PeerFailed
from straggle.merge.late.replica import Agreed, Replica
from straggle.merge.round.round import Round

KEEP = Merge(nonfinite="keep")
OPTIMIZERS = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "momentum, loop": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False),
    "momentum, foreach": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "momentum, fused": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.01),
    "AdamW, loop": lambda groups: optim.AdamW(groups, lr=0.01, foreach=False),
    "AdamW, foreach": lambda groups: optim.AdamW(groups, lr=0.01, foreach=True),
    "AdamW, fused": lambda groups: optim.AdamW(groups, lr=0.01, fused=True),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.01),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.01),
    "Adamax": lambda groups: optim.Adamax(groups, lr=0.01),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.01),
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=0.1),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
}
NUM_STEPS = 4


class Held(nn.Module):
    """Merged as three messages; ``hold()`` is called before backward comes to the last of them."""

    def __init__(self, *, unused):
        super().__init__()
        self.layers = mlp(width=520, depth=4)
        if unused:
            self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.frozen.grad = torch.ones(3)  # of before it was frozen: an optimizer steps it all the same
        self.hold = lambda: None

    def forward(self, x):
        first = self.layers[0](x)
        first.register_hook(lambda _gradient: self.hold())
        return self.layers[1:](first)


def groups_of(module):
    """Matrices with a weight decay, the rest with another learning rate."""
    named = list(module.named_parameters())
    matrices = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": others, "lr": 0.03}]


def train(rank, kind, early, stops, unused=True):
    """Of each step a hash of the parameters, one of the gradients, and which there are; and the calls of the optimizer.

    Where rank 1 is not stopped it waits, before its last message, until rank 0 has stepped a part.
    """
    module, signals, number = Held(unused=unused), Signals(), 0
    stopper, calls, seen = Stopper(module.layers), [], []
    optimizer = OPTIMIZERS[kind](groups_of(module))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def stepped(*_):
        calls.append(number)
        if rank == 0:
            signals.send(f"{kind} {early} {unused} {number}")

    counter = register_optimizer_step_post_hook(stepped)
    with staged(module, merge=KEEP) as model:
        for number in range(NUM_STEPS):
            stop = stops[number] if rank == 1 else None
            waits = early and rank == 1 and stop is None
            module.hold = (lambda: signals.wait(f"{kind} {early} {unused} {number}")) if waits else (lambda: None)  # noqa: B023
            with model.step(optimizer=optimizer if early else None) as step:
                stopper.arm(step, stop)
                model(features(rank, number)).square().mean().backward()
            if not early:
                optimizer.step()
            scheduler.step()
            gradients = [parameter.grad for parameter in module.parameters()]
            present = [gradient is not None for gradient in gradients]
            seen.append((digest(module.parameters()), digest(g for g in gradients if g is not None), present))
            optimizer.zero_grad()
            module.frozen.grad = torch.ones(3)
    counter.remove()
    return seen, calls


def train_both(rank, kinds, stops, unused=True):
    return {kind: [train(rank, kind, early, stops, unused) for early in (False, True)] for kind in kinds}


@pytest.mark.parametrize("kinds", [tuple(OPTIMIZERS)[::2], tuple(OPTIMIZERS)[1::2]], ids=" ".join)
def test_parameters_are_those_of_one_step_bit_for_bit(kinds):
    check_alike(kinds, run_ranks(train_both, 2, kinds, [None] * NUM_STEPS))


def test_they_are_where_every_parameter_is_used():
    kinds = ("momentum",)
    check_alike(kinds, run_ranks(train_both, 2, kinds, [None] * NUM_STEPS, False))


def check_alike(kinds, of_ranks):
    """Steps in parts gave what steps at the end did."""
    first, second = of_ranks
    for kind in kinds:
        (whole, calls), (parts, calls_in_parts) = first[kind]
        assert parts == whole, kind
        assert second[kind][1][0] == parts, kind
        assert calls == list(range(NUM_STEPS))
        # two calls at least in each: rank 1 has waited for the first, and its own gradients came after that
        assert min(calls_in_parts.count(number) for number in range(NUM_STEPS)) > 1
        assert len({parameters for parameters, *_ in parts}) == NUM_STEPS


def test_parameters_are_the_same_where_a_rank_is_late():
    kinds = ("momentum", "AdamW, fused")
    first, second = run_ranks(train_both, 2, kinds, [None, 3, 0, None])
    for kind in kinds:
        (whole, _), (parts, _) = first[kind]
        assert parts == whole, kind
        assert second[kind][1][0] == parts, kind


class SharedVote:
    """Of a replica of all ranks: a parameter has a gradient if any of them says so. It stops nobody."""

    def __init__(self):
        self.group = dist.new_group()

    def begin(self, _step, **_):
        pass

    def forget_waits(self):
        pass

    def __call__(self, _own, _at):
        return False

    def agree(self, present, _waited_s, _weights, _scalars, _tells):
        said = torch.tensor(present, dtype=torch.int32)
        dist.all_reduce(said, group=self.group)
        return Agreed((said > 0).tolist(), ())

    def close(self):
        pass


class LostVote(SharedVote):
    """Of a replica whose other rank is gone."""

    def weigh(self, _weight):
        raise PeerFailed("rank 1 is gone")


def weigh_alone(_rank):
    vote = LostVote()
    of_one_rank = staticmethod(lambda channel: Replica(channel.rank, channel.world_size, vote))
    with mock.patch.object(Replica, "of_one_rank", of_one_rank), staged(Held(unused=False), merge=KEEP) as model:
        step = model.step()
        step.weight = 2.0
        with pytest.raises(PeerFailed, match="rank 1 is gone"), step:
            pass
        return model.open_step is None


def test_step_whose_weight_cannot_be_told_to_its_replica_is_not_left_open():
    assert run_ranks(weigh_alone, 1) == [True]


def all_but_the_last(merging):
    """The messages that are over, where the last one always takes longer than the others."""
    *others, _ = merging.launched
    for work in chain.from_iterable(others):
        work.wait()
    return list(range(len(others)))


def train_one_early(rank):
    """Rank 0 steps parameters early, and rank 1, of the same replica, sees all messages over at once."""
    vote, stepped = SharedVote(), []
    Replica.of_one_rank = staticmethod(lambda channel: Replica(channel.rank, channel.world_size, vote))
    Round.merged_early = all_but_the_last if rank == 0 else lambda _round: []
    module = Held(unused=False)
    module.head = nn.LayerNorm(3)  # it is not called, and would be the first in backward
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    counter = register_optimizer_step_post_hook(lambda *_: stepped.append(rank))
    with staged(module, merge=KEEP) as model:
        for number in range(NUM_STEPS):
            with model.step(optimizer=optimizer):
                model(features(rank, number)).square().mean().backward()
            optimizer.zero_grad()
    counter.remove()
    return digest(module.parameters()), module.head.weight.tolist(), len(stepped)


def test_ranks_of_a_replica_step_the_same_parameters_whichever_of_their_messages_are_over_early():
    (first, unused, num_parts), (second, *others) = run_forked(train_one_early, 2)
    assert first == second
    assert unused == others[0] == [1.0] * 3  # of no gradient, on no rank: it does not decay
    assert num_parts > others[1] == NUM_STEPS


def one_step(model, optimizer=None):
    with model.step(optimizer=optimizer):
        model(features(0, 0)).square().mean().backward()


class Own(optim.SGD):
    """May do in its step what it likes."""


def refuse(rank):
    """What is said to each optimizer and model that cannot be stepped so."""
    module, words = mlp(), {}

    def note(name, kind, function, *args, **kwargs):
        with pytest.raises(kind) as raised:
            function(*args, **kwargs)
        words[name] = str(raised.value)

    parameters = list(module.parameters())
    hooked = optim.SGD(parameters, lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    optimizer = optim.SGD(parameters, lr=0.1)
    with staged(module, merge=KEEP) as model:
        note("LBFGS", ValueError, model.step, optimizer=optim.LBFGS(parameters))
        note("own", ValueError, model.step, optimizer=Own(parameters))
        note("hooks", ValueError, model.step, optimizer=hooked)
        note("another model", ValueError, model.step, optimizer=optim.SGD(mlp().parameters()))
        note("no optimizer", ValueError, model.step, optimizer="SGD")
        one_step(model, optimizer)
        note("again", RuntimeError, optimizer.step)
        note("clipping", RuntimeError, nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        note("scaler", RuntimeError, scaled_step, optimizer, module)
        with model.step(optimizer=optimizer):
            model(features(0, 0)).square().mean().backward()
            note("inside", RuntimeError, optimizer.step)
        one_step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with staged(module) as model:
        note("dropping", ValueError, model.step, optimizer=optimizer)
    return words


def scaled_step(optimizer, module):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(features(0, 0)).sum())
    scaler.step(optimizer)


def test_what_must_see_all_gradients_is_refused_with_a_sentence():
    (words,) = run_ranks(refuse, 1)
    assert words["LBFGS"].startswith("LBFGS computes the loss again in its step")
    assert words["own"].startswith("Own may look at all gradients at once")
    assert words["hooks"].startswith("this SGD has step hooks")
    assert words["another model"] == "this SGD has no parameter of the wrapped model"
    assert words["no optimizer"] == "optimizer='SGD': give a torch.optim.Optimizer"
    assert words["again"].startswith("optimizer.step() after `with model.step(optimizer=optimizer)`")
    assert words["scaler"] == words["again"]
    assert "clipping must see all gradients before it" in words["clipping"]
    assert words["inside"].startswith("optimizer.step() inside of `with model.step()`")
    assert 'merge=straggle.Merge(nonfinite="keep")' in words["dropping"]
