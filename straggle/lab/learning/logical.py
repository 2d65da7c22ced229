"""Many ranks of data-parallel training in one process: each rank's gradients, merged as real ranks merge theirs.

For every parameter ``merged = sum(w * g) / sum(w)`` over the ranks that computed it and over the estimates of those
that did not. The gradients of all ranks come from one vectorised pass (``torch.func.vmap``); the estimators are the
library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from straggle.backward.clocks import FinishTimes
from straggle.backward.stages import trainable
from straggle.lab.workloads.workload import Batch, Workload
from straggle.policies.estimators import Abstain, Estimator
from straggle.policies.fill_in import FillIn


@dataclass(frozen=True)
class MergedGradients:
    """One step: each rank's ``losses``, of shape (ranks,), and for each parameter the sum of weights in its merge."""

    losses: Tensor
    weights: tuple[float, ...]


class Computed(NamedTuple):
    """Some ranks' gradients, by the parameters' names, and losses; their first dimension is the rank."""

    ranks: Tensor
    gradients: dict[str, Tensor]
    losses: Tensor


class LogicalRanks:
    """``num_ranks`` replicas of ``model`` that are one module, because replicas stay identical.

    ``estimator`` makes the estimator; it is called once for each rank if it keeps anything of a rank's own, else once.
    ``chunk``: how many ranks' gradients are in memory at a time. A step has one micro-batch; a late rank stops by
    itself, and is not stood in for.
    Raises ``ValueError`` for a module with buffers: ranks would have to merge them as well.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        num_ranks: int,
        *,
        estimator: Callable[[], Estimator] = Abstain,
        chunk: int = 64,
    ) -> None:
        if buffers := [name for name, _ in model.named_buffers()]:
            raise ValueError(f"{type(model).__name__} has buffers, such as {buffers[0]}: use a model without BatchNorm")
        self.num_ranks = num_ranks
        self.parameters = [parameter for _, parameter in trainable(model)]
        self._loss = _Loss(workload, model)
        self._names = [f"model.{name}" for name, _ in trainable(model)]
        first = estimator()
        self._own_state = FillIn(first).reads_own
        self._estimators = [first, *(estimator() for _ in range(num_ranks - 1 if self._own_state else 0))]
        self._fill_ins = [FillIn(each) for each in self._estimators]
        self._chunk = chunk
        self._gradients = vmap(grad_and_value(self._loss_of), in_dims=(None, 0), randomness="different")

    def merge(self, batch: Batch, weights: Tensor) -> MergedGradients:
        """Give each parameter the merged gradient of all ranks' batches, as ``grad``.

        ``batch`` has tensors of shape (ranks, samples, ...). ``weights`` of shape (ranks, parameters) is what each
        rank's gradient counts; 0 if the rank did not reach it.
        """
        return self.merge_computed(self.compute(batch), weights)

    def compute(self, batch: Batch) -> Iterator[Computed]:
        """All ranks' gradients, some ranks at a time."""
        x, y = batch
        for ranks in torch.split(torch.arange(self.num_ranks), self._chunk):
            values = dict(zip(self._names, (p.detach() for p in self.parameters), strict=True))
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be vectorised over ranks
                yield Computed(ranks, *self._gradients(values, (x[ranks], y[ranks])))

    def merge_computed(self, computed: Iterable[Computed], weights: Tensor) -> MergedGradients:
        """As `merge`, with gradients that were computed before, perhaps by another object of the same model."""
        sums = [_Sum(torch.zeros_like(parameter), self.num_ranks) for parameter in self.parameters]
        losses = []
        for ranks, gradients, loss in computed:
            losses.append(loss)
            for index, name in enumerate(self._names):
                sums[index].add_all(gradients[name], weights[ranks, index])
                if self._own_state:
                    self._add_own(index, ranks, gradients[name], weights[ranks], sums[index])
        for index, total in enumerate(sums):
            if not self._own_state:
                self._add_same(index, int((weights[:, index] == 0).sum()), total)
            self._settle(index, total)
        return MergedGradients(torch.cat(losses), tuple(total.weight for total in sums))

    def _loss_of(self, values: dict[str, Tensor], batch: Batch) -> Tensor:
        loss: Tensor = functional_call(self._loss, values, (batch,))
        return loss

    def _add_own(self, index: int, ranks: Tensor, gradients: Tensor, weights: Tensor, total: _Sum) -> None:
        """What estimators with state of a rank's own add: each is asked as a real rank would ask it."""
        parameter = self.parameters[index]
        for rank, gradient, weight in zip(ranks.tolist(), gradients, weights, strict=True):
            fill_in, estimate = self._fill_ins[rank], None
            if weight[index] > 0:
                supplement = fill_in.computed(parameter, gradient)
            else:
                supplement, estimate = fill_in.missing(parameter, 1.0)
                if (weight > 0).any():  # it was in its backward pass
                    fill_in.came_late(parameter, gradient, 1.0)
            if supplement is not None:
                total.add(supplement.gradient, 1.0, supplement.weight)
            if estimate is not None:
                total.add(estimate.gradient, estimate.weight, estimate.weight)

    def _add_same(self, index: int, num_late: int, total: _Sum) -> None:
        """What one estimator adds for all ranks that did not compute a parameter."""
        estimate = self._estimators[0].contribution(self.parameters[index]) if num_late else None
        if estimate is not None and estimate.weight > 0:
            total.add(estimate.gradient, num_late * estimate.weight, num_late * estimate.weight)

    def _settle(self, index: int, total: _Sum) -> None:
        """Give a parameter its gradient."""
        parameter, gradient = self.parameters[index], total.mean()
        if gradient is None:
            substitute = self._estimators[0].substitute(parameter)
            parameter.grad = None if substitute is None else substitute.clone()
            return
        parameter.grad = gradient
        for estimator in self._estimators:
            estimator.observe(parameter, gradient, merged=True)


@dataclass
class _Sum:
    """The sum of what the ranks submit for one parameter, scaled by ``1 / num_ranks`` as in the real buffers."""

    gradient: Tensor
    num_ranks: int
    weight: float = 0.0

    def add(self, gradient: Tensor, scale: float, weight: float) -> None:
        """One contribution: ``scale * gradient``, which counts ``weight``."""
        self.gradient.add_(gradient, alpha=scale / self.num_ranks)
        self.weight += weight

    def add_all(self, gradients: Tensor, weights: Tensor) -> None:
        """The gradients of several ranks; not the products with 0, as what no rank takes may be infinite."""
        there = weights > 0
        self.gradient += torch.tensordot(weights[there] / self.num_ranks, gradients[there], dims=1)
        self.weight += float(weights.sum())

    def mean(self) -> Tensor | None:
        """The merged gradient; ``None`` where no rank has anything."""
        if self.weight == 0:
            return None
        return self.gradient if self.weight == self.num_ranks else self.gradient.mul_(self.num_ranks / self.weight)


class _Loss(nn.Module):
    """A workload's loss as a module, whose parameters can be replaced by name."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, batch: Batch) -> Tensor:
        return self._workload.loss(self.model, batch)


def finish_order(workload: Workload, model: nn.Module) -> list[int]:
    """The numbers of the parameters in the order in which one backward pass finishes their gradients."""
    parameters = [parameter for _, parameter in trainable(model)]
    times = FinishTimes(parameters[0].device)
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(_finished, times, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    try:
        workload.loss(model, workload.batch(torch.arange(1))).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad()
    return times.order(len(parameters))


def _finished(times: FinishTimes, index: int, _parameter: Tensor) -> None:
    times.finished(index)


def per_parameter(by_unit: Tensor, units: Sequence[Sequence[int]]) -> Tensor:
    """A number for each parameter, of shape (ranks, parameters), from one for each unit, of shape (ranks, units)."""
    unit_of = {parameter: number for number, unit in enumerate(units) for parameter in unit}
    return by_unit[:, [unit_of[parameter] for parameter in range(len(unit_of))]]
