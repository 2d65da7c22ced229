"""A loop that draws its micro-batches, each with random numbers of its own, and what one process makes of the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from straggle import Elastic, StagedDataParallel
from straggle.pools.pulling import random_numbers_of

NUM_SAMPLES, PARTS, SIZE = 48, 8, 2
EACH_EPOCH = NUM_SAMPLES // (PARTS * SIZE)  # steps
LAYER_S = 0.004  # forward, and as long backward


class Counter:
    """How many steps were made, for a rank that comes back."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@dataclass(frozen=True)
class Made:
    """A step that a process made; ``was_out``: as no member."""

    step: int
    attempts: int
    dropped_share: float
    was_out: bool


class Net(nn.Module):
    """Three layers with dropout, whose gradients tell which samples they are of; ``in_layer()`` takes its time."""

    def __init__(self, in_layer: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]).double()
        self.dropout = nn.Dropout(0.3)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: in_layer())
            layer.weight.register_hook(lambda _: in_layer())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def samples_of(step: int) -> list[list[int]]:
    """The samples of each micro-batch of a step: each comes once in an epoch."""
    epoch, place = divmod(step, EACH_EPOCH)
    order = random.Random(epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
    own = order[place * PARTS * SIZE : (place + 1) * PARTS * SIZE]
    return [own[first : first + SIZE] for first in range(0, len(own), SIZE)]


def loss_of(model: nn.Module, numbers: list[int]) -> Tensor:
    x = torch.tensor([[math.sin(7 * number + k) for k in range(4)] for number in numbers], dtype=torch.float64)
    return (model(x) - x.mean()).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)  # of shards, dozens of times as fast


def train(
    module: Net,
    *,
    end: Callable[[int], bool],
    members: bool = True,
    told: Callable[[], bool] = lambda: False,
    made: Callable[[int], None] = lambda _: None,
    costs: bool = False,
    **options: Any,
) -> tuple[list[list[float]], int, list[Made]]:
    """The parameters, the steps that were made, and those of them that this process made.

    ``told()``: it is to end soon. ``costs``: the pool is dealt by those of its micro-batches, which differ.
    """
    optimizer, counter, seen = optimizer_of(module), Counter(), list[Made]()
    model = StagedDataParallel(module, members=Elastic(1, 1.0) if members else None, links=False, **options)
    model.register_state(optimizer=optimizer, counter=counter)
    while not end(counter.steps):
        with model.step() as step:
            if told() and step.departure is not None:
                step.departure.ask()
            parts = samples_of(counter.steps)
            of_parts = [1.0 + sum(numbers) for numbers in parts] if costs else None
            for numbers in step.pull(parts, costs=of_parts, seed=counter.steps):
                loss_of(model, numbers).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert report is not None
        was_out = report.ranks[model.rank].absent
        seen.append(Made(counter.steps, report.pool_attempts, report.dropped_share, was_out))
        counter.steps += 1
        made(counter.steps)
        if step.departure is not None and step.departure.ends_after(report.step):
            break
    result = numbers_of(module), counter.steps, seen
    model.close()
    return result


def numbers_of(module: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in module.parameters()]


def alone(steps: int) -> list[list[float]]:
    """The parameters of one process that computes all of each step."""
    module = Net()
    optimizer = optimizer_of(module)
    for step in range(steps):
        for number, samples in enumerate(samples_of(step)):
            with random_numbers_of(step, number):
                (loss_of(module, samples) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers_of(module)


def assert_equal(own: list[list[float]], expected: list[list[float]]) -> None:
    """To the rounding of sums in another order."""
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-7, atol=1e-9)
