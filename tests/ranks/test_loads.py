"""The loaders of straggle load for the loop: what they take is loading, as that of a plain ``DataLoader`` is."""

import pytest
import torch
from ranks import run_forked, staged
from torch.utils.data import DataLoader
from training import features, mlp

from straggle import DealtLoader, LateLoader
from straggle.backward.loop_hooks import around_loads

STEPS = 3
LOADERS = {
    "plain": lambda _model, loader: loader,
    "late": LateLoader,
    "dealt": DealtLoader,
    "join": lambda model, loader: model.join(loader),
}


def loads(_rank, name):
    """How many batches the loop is given, and the calls that count as loading."""
    calls = []

    def around(call):
        calls.append(batch := call())
        return batch

    brackets, batches = around_loads(around), 0
    with staged(mlp()) as model:
        for x in LOADERS[name](model, DataLoader(features(0, 0, rows=STEPS))):
            batches += 1
            with model.step():
                model(x).square().mean().backward()
    for bracket in brackets:
        bracket.remove()
    return batches, sum(isinstance(own, torch.Tensor) for own in calls)


@pytest.mark.parametrize("name", LOADERS)
def test_each_batch_of_a_loader_counts_as_loading(name):
    assert run_forked(loads, 1, name) == [(STEPS, STEPS)]
