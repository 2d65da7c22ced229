"""A rank that comes back has the registered objects of the others, whatever they are; its place in its data is its own.

The ranks train with a `GradScaler`, so each death also ends a step in which no rank has a gradient.
"""

import time
from collections import OrderedDict

import pytest
import torch
from members import run_job
from ranks import digest, staged
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from training import mlp

from straggle import Elastic, FixedDeadline, LateHandling, Merge

STEP_S = 0.015


class Counted:
    """A place in the data, and whose it is: a state that a loop of the rank's own changes."""

    owner, drawn = -1, 0

    def state_dict(self):
        return {"owner": self.owner, "drawn": self.drawn}

    def load_state_dict(self, state):
        self.owner, self.drawn = state["owner"], state["drawn"]


class Loader(Counted, DataLoader):
    pass


class Order(Counted, Sampler):
    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4


class Stream(Counted, IterableDataset):
    def __iter__(self):
        yield 0


class Nodes(Counted):
    """As torchdata's loaders: it has no length."""

    def __iter__(self):
        yield 0


class Drawing(Counted):
    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def __len__(self):
        return 4


class Plain:
    """Follows a model's first layer."""

    def __init__(self):
        self.seen = [torch.zeros(8)]

    def follow(self, model):
        self.seen = [own.mul(0.9).add(model[0].bias.detach(), alpha=0.1) for own in self.seen]

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


class Sized(Plain):
    """The same, which can be iterated over."""

    def __len__(self):
        return len(self.seen)

    def __iter__(self):
        return iter(self.seen)


class Mapped(Plain, OrderedDict):
    def __init__(self):
        Plain.__init__(self)


class Metric(nn.Module):
    """As torchmetrics' are: they have ``__iter__``, which raises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def __iter__(self):
        raise NotImplementedError


def shared():
    """Objects that are alike on all ranks, each changed in each step by what the model has become."""
    names = ["a", "b"]
    return {
        "sequential": mlp(1),
        "modules": nn.ModuleList(mlp(1)),
        "by_name": nn.ModuleDict(zip(names, mlp(1)[::2], strict=False)),
        "parameters": nn.ParameterList([nn.Parameter(torch.ones(8), requires_grad=False)]),
        "averaged": AveragedModel(mlp(), multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "metric": Metric(),
        "plain": Plain(),
        "sized": Sized(),
        "mapped": Mapped(),
    }


def own(rank):
    """What has the rank's own place in its data."""
    objects = {"loader": Loader([0]), "order": Order(), "stream": Stream(), "nodes": Nodes(), "drawing": Drawing()}
    for place in objects.values():
        place.owner = rank
    return objects


@torch.no_grad()
def follow(objects, model):
    for name, value in objects.items():
        if name == "averaged":
            value.update_parameters(model)
        elif name == "metric":
            value.total += model[0].bias.sum()
        elif isinstance(value, nn.Module):
            layers = value.values() if isinstance(value, nn.ModuleDict) else value
            for layer in layers:
                bias = layer if isinstance(layer, nn.Parameter) else getattr(layer, "bias", None)
                if bias is not None:
                    bias.mul_(0.9).add_(model[0].bias.sum(), alpha=0.1)
        else:
            value.follow(model)


def leaves(state):
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in leaves(value)]
    return [torch.tensor(float(state))] if isinstance(state, (int, float)) else []


def stay(rank, step, board, fault):
    """Rank 2 stays in step 15: until it is killed, or until more steps are merged than may wait for it."""
    while (rank, step) == (2, 15) and (fault == "killed" or (fault == "stuck" and board.made(0) < 60)):
        time.sleep(0.02)


def train(rank, board, fault):
    network, follows, places = mlp(), shared(), own(rank)
    network.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))  # which a rank that is late skips
    deadline = {"deadline": FixedDeadline(0.05), "late_handling": LateHandling(max_lag=4)} if fault == "stuck" else {}
    with staged(network, members=Elastic(suspect_s=1.0), merge=Merge(nonfinite="keep"), **deadline) as model:
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=10)
        warmup, decay = lr_scheduler.LinearLR(optimizer, total_iters=20), lr_scheduler.StepLR(optimizer, 7, 0.99)
        tools = {
            "optimizer": optimizer,
            "scaler": scaler,
            "one_by_one": lr_scheduler.SequentialLR(optimizer, [warmup, decay], [20]),
        }
        objects = {**tools, **follows, **places}
        begun = step = model.register_state(**objects)
        empty = 0
        while step < board.end:
            with model.step():
                for place in places.values():
                    place.drawn += 1
                stay(rank, step, board, fault)
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
                scaler.scale(model(x).square().mean()).backward()
            empty += all(own.grad is None or not own.grad.any() for own in network.parameters())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            tools["one_by_one"].step()
            follow(follows, network)
            step = model.last_report.step + 1
            board.note(rank, step)
        states = {name: digest(leaves(value.state_dict())) for name, value in {**tools, **follows}.items()}
        states["model"] = digest(network.parameters())
        return begun, states, {name: (place.owner, place.drawn - step) for name, place in places.items()}, empty


@pytest.mark.parametrize("fault", ["killed", "frozen", "stuck"])
def test_rank_that_is_back_has_the_state_of_all_that_is_alike_and_its_own_place_in_its_data(fault):
    with run_job(3, train, fault) as job:
        job.walk(15 if fault != "frozen" else 10)
        if fault == "killed":
            job.sleep(1.0)  # the others have launched their merges of step 15
            job.kill(2)
            job.walk(12, [0, 1])
            job.start(2)
        elif fault == "frozen":
            job.stop(2)
            job.walk(40, [0, 1])
            job.resume(2)
        job.walk(20)
        job.meet()
        (_, states, places, empty), *others, (begun, last, own, _) = job.finish()
        log = job.log()
    assert [other[1] for other in others] == [states]
    assert {name for name in states if states[name] != last[name]} == set()
    assert "takes part again from step" in log
    assert set(places.values()) == {(0, 0)}
    assert (begun > 15) == (fault == "killed")
    assert set(own.values()) == ({(0, 0)} if fault == "killed" else {(2, 0)})  # a new process goes on from a peer's
    assert empty >= (fault == "killed")
