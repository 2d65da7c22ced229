"""Many ranks of data-parallel training in one process, some of which are late: what partial gradients do to learning.

Replicas stay identical, so one module stands for all of them. One vectorized pass (``torch.func.vmap``) computes all
ranks' gradients. What a rank did not finish is left out: ``merged = sum(w * g) / sum(w)``. A unit is what a late rank
finishes or not, a stage or a single gradient; units are numbered in the order in which backward finishes them. The
losses are those of all ranks, late or not, so that runs are compared by the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from straggle.backward.clocks import FinishTimes
from straggle.backward.stages import plan_stages
from straggle.lab.workloads.shard import Shard
from straggle.lab.workloads.workload import Batch, Workload

Samples = Callable[[int], Tensor]  # of a step: the sample numbers, of shape (ranks, batch_size)
Lateness = Callable[[int, int, Generator], Iterator[Tensor]]  # of ranks, units: which are finished, step after step
Weights = Callable[[Tensor, Sequence[Tensor]], Tensor]  # of what is finished, and was in earlier steps; 0 if it is not
Reach = Callable[[int, int, Generator], Tensor]  # of late ranks, units: how many units each of these ranks finishes


@dataclass(frozen=True)
class Setting:
    """What is trained, the same for all treatments; ``num_units=None``: each gradient is a unit by itself."""

    workload: Workload
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    samples: Samples
    steps: int
    seed: int = 0
    num_units: int | None = None


def count(finished: Tensor, _earlier: Sequence[Tensor]) -> Tensor:
    """Every finished gradient counts the same."""
    return finished.float()


@dataclass(frozen=True)
class Treatment:
    """Which ranks are late, and what a gradient counts; ``over_all``: the sum is divided by the number of all ranks."""

    lateness: Lateness
    weights: Weights = count
    over_all: bool = False


@dataclass(frozen=True)
class Learned:
    """How a run went: each step's ``losses`` (mean over ranks), the ``scores`` on held-out data after the last step.

    ``reached``, of shape (ranks, units): the share of the steps in which a rank finished a unit.
    """

    losses: tuple[float, ...]
    scores: dict[str, float]
    reached: Tensor
    model: nn.Module


def learn(setting: Setting, treatment: Treatment) -> Learned:
    """Train under a treatment; the model and who is late follow from the setting's seed."""
    torch.manual_seed(setting.seed)
    model = setting.workload.model()
    optimizer = setting.make_optimizer(model.parameters())
    units = units_of(setting, model)
    lateness = treatment.lateness(len(setting.samples(0)), len(units), torch.Generator().manual_seed(setting.seed))
    losses: list[float] = []
    earlier: list[Tensor] = []
    for step in range(setting.steps):
        finished = next(lateness)
        gradients, loss = _computed(setting, model, step)
        weights = _by_parameter(treatment.weights(finished, earlier), units)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.grad = _mean(gradients[name], weights[:, index], treatment.over_all)
        optimizer.step()
        losses.append(float(loss.mean()))
        earlier.append(finished)
    reached = torch.stack(earlier).float().mean(0)
    return Learned(tuple(losses), setting.workload.evaluate(model), reached, model)


def _computed(setting: Setting, model: nn.Module, step: int) -> tuple[dict[str, Tensor], Tensor]:
    """All ranks' gradients, by the parameters' names, and losses; their first dimension is the rank."""
    indices = setting.samples(step)
    x, y = setting.workload.batch(indices.flatten())
    batch = (x.view(*indices.shape, *x.shape[1:]), y.view(*indices.shape, *y.shape[1:]))
    loss = _Loss(setting.workload, model)

    def loss_of(values: dict[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = functional_call(loss, {f"model.{name}": value for name, value in values.items()}, (batch,))
        return result

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be vectorized over ranks
        gradients, losses = vmap(grad_and_value(loss_of), in_dims=(None, 0), randomness="different")(values, batch)
    return gradients, losses


def _mean(gradients: Tensor, weights: Tensor, over_all: bool) -> Tensor | None:
    """The merged gradient of one parameter; ``None`` if no rank finished it.

    Each gradient is scaled by 1 / ranks first, as in a real merge's buffer.
    """
    num_ranks, there = len(weights), weights > 0  # no product with 0: what a rank did not finish may be infinite
    summed: Tensor = torch.tensordot(weights[there] / num_ranks, gradients[there], dims=1)
    total = float(weights.sum())
    if over_all or total == num_ranks:
        return summed
    return summed * (num_ranks / total) if total else None


class _Loss(nn.Module):
    """A workload's loss as a module, whose parameters can be replaced by name."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, batch: Batch) -> Tensor:
        return self._workload.loss(self.model, batch)


def units_of(setting: Setting, model: nn.Module) -> Sequence[Sequence[int]]:
    """The parameters of each unit, in the order in which backward finishes them."""
    parameters = list(model.parameters())
    times = FinishTimes(parameters[0].device)

    def finished(index: int, _parameter: Tensor) -> None:
        times.finished(index)

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(finished, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    setting.workload.loss(model, setting.workload.batch(torch.arange(1))).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    order = times.order(len(parameters))
    if setting.num_units is None:
        return [[parameter] for parameter in order]
    return [stage.parameters for stage in plan_stages(model, setting.num_units, order).stages]


def _by_parameter(by_unit: Tensor, units: Sequence[Sequence[int]]) -> Tensor:
    """A number for each parameter, of shape (ranks, parameters), from one for each unit, of shape (ranks, units)."""
    unit_of = {parameter: number for number, unit in enumerate(units) for parameter in unit}
    return by_unit[:, [unit_of[parameter] for parameter in range(len(unit_of))]]


# -- samples


def from_one_pool(workload: Workload, num_ranks: int, batch_size: int, seed: int) -> Samples:
    """Every epoch is shuffled and dealt out, as `straggle train` does: all ranks' samples are alike."""
    shards = [
        Shard(workload.num_samples, rank=rank, world_size=num_ranks, batch_size=batch_size, seed=seed)
        for rank in range(num_ranks)
    ]
    return lambda step: torch.stack([shard.indices(step) for shard in shards])


def of_their_own(workload: Workload, num_ranks: int, batch_size: int, seed: int, *, by_class: bool) -> Samples:
    """Each rank goes through a fixed part of the samples, in a new order each epoch.

    ``by_class``: the parts are cut from the samples sorted by class (for sequences, by their position in the text), so
    that each rank has as few classes as possible; otherwise they are alike.
    """
    order = torch.randperm(workload.num_samples, generator=torch.Generator().manual_seed(seed))
    if by_class:
        targets = workload.batch(order)[1]
        order = order[(targets if targets.dim() == 1 else order).argsort(stable=True)]
    parts = order.tensor_split(num_ranks)

    def of_rank(rank: int, step: int) -> Tensor:
        epoch, batch = divmod(step, len(parts[rank]) // batch_size)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) * 1_009 + rank)
        return parts[rank][torch.randperm(len(parts[rank]), generator=generator)[batch * batch_size :][:batch_size]]

    return lambda step: torch.stack([of_rank(rank, step) for rank in range(num_ranks)])


# -- who is late


def nobody(num_ranks: int, num_units: int, _generator: Generator) -> Iterator[Tensor]:
    """All ranks finish all units."""
    while True:
        yield torch.ones(num_ranks, num_units, dtype=torch.bool)


def nothing(late: int, _num_units: int, _generator: Generator) -> Tensor:
    """A late rank's complete gradient is dropped, as with backup workers."""
    return torch.zeros(late, dtype=torch.int64)


def same_ranks(late: int, reach: Reach = nothing) -> Lateness:
    """The last ``late`` ranks are late in every step, and finish as much as ``reach`` draws."""

    def steps(num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
        while True:
            finished = torch.full((num_ranks,), num_units)
            finished[num_ranks - late :] = reach(late, num_units, generator)
            yield torch.arange(num_units) < finished.unsqueeze(1)

    return steps
