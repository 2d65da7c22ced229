"""Estimators fill in missing gradients: a late rank's own contribution, or a gradient that no rank computed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from straggle.policies.deadline import is_number, name_of


@dataclass(frozen=True)
class Estimate:
    """A substitute gradient, shaped as its parameter, and its weight relative to a computed gradient's 1."""

    gradient: Tensor
    weight: float


class Estimator(ABC):
    """Fills in for gradients that were not computed. Only `contribution` must be written.

    ``gradient`` is always that of a complete step with all its micro-batches. Its tensor is only lent: copy what you
    keep. ``watches_own``: `observe` also gets this rank's own gradients. Tensors in ``memory`` are saved and loaded
    with the model (`StagedDataParallel.straggle_state`); an estimator with other state must override `state_dict`. If a
    model is sharded, gradients and estimates are those of this rank's shard, and ``parameter`` is the DTensor.
    """

    watches_own: bool = False

    @cached_property
    def memory(self) -> dict[nn.Parameter, Tensor]:
        """The tensors kept from step to step, one for each parameter."""
        return {}

    @abstractmethod
    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        """This late rank's contribution for a parameter that it did not reach; ``None``: the peers' mean is used."""

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:  # noqa: ARG002
        """The gradient of a parameter to which no rank contributed; only from state that is equal on all ranks."""
        return None

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:  # noqa: B027
        """See a gradient as this rank computed it (``merged=False``) or as the merge of all ranks made it."""

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The kept tensors, by the parameters' names."""
        return {names[parameter]: tensor for parameter, tensor in self.memory.items() if parameter in names}

    def shared_state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The state that is equal on all ranks, for returning ranks (`Elastic`): all that `substitute` reads."""
        return {} if self.watches_own else self.state_dict(names)

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Go on from the result of `state_dict`; ``parameters``: by their names."""
        for name, tensor in state.items():
            self.memory[parameters[name]] = tensor.to(parameters[name].device, copy=True)


@final
class Abstain(Estimator):
    """Fills in nothing: the mean over the ranks that computed a gradient is used.

    A parameter whose gradient no rank computed keeps ``grad = None``, and the optimizer skips it and its state.
    """

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:  # noqa: ARG002
        return None


@final
class Zero(Estimator):
    """A zero gradient with full weight, as in systems that fill with zeros and divide by the number of ranks."""

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        return Estimate(torch.zeros_like(parameter), 1.0)


class _Remembering(Estimator):
    """Contributes what it keeps of the merged gradients, or of this rank's own gradients if it watches these."""

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = check_weight(weight)

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        kept = self.memory.get(parameter)
        return None if kept is None else Estimate(kept, self.weight)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        return None if self.watches_own else self.memory.get(parameter)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        if merged == self.watches_own:
            return
        if parameter in self.memory:
            self._update(self.memory[parameter], gradient)
        else:
            self.memory[parameter] = gradient.detach().clone()

    def _update(self, kept: Tensor, gradient: Tensor) -> None:
        kept.copy_(gradient)


@final
class LastOwn(_Remembering):
    """The gradient that this rank computed when it last reached the parameter; never a substitute for all ranks."""

    watches_own = True


@final
class LastMerged(_Remembering):
    """The gradient of the last merge, as eager-SGD's stale gradients (PPoPP 2020, section 4) but global."""


@final
class MovingAverage(_Remembering):
    """``average = decay * average + (1 - decay) * merged``, starting from the first merged gradient."""

    def __init__(self, decay: float = 0.9, weight: float = 0.5) -> None:
        super().__init__(weight)
        if not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must be at least 0 and below 1, such as 0.9")
        self.decay = decay

    def _update(self, kept: Tensor, gradient: Tensor) -> None:
        kept.lerp_(gradient, 1 - self.decay)


@final
class OptimizerMomentum(Estimator):
    """The optimizer's own running mean of the gradient, so it needs no memory of its own.

    Adam's first moment with its bias removed, ``exp_avg / (1 - beta1^step)`` (Kingma and Ba 2015, section 3), and SGD's
    momentum buffer scaled to a mean, ``(1 - momentum) / (1 - dampening) * buffer``. Nothing before the first update.
    Raises ``ValueError`` for an optimizer without momentum.
    """

    def __init__(self, optimizer: Optimizer, weight: float = 0.5) -> None:
        if not all("betas" in group or group.get("momentum", 0) > 0 for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__} keeps no momentum: use Adam, AdamW or SGD(momentum=...)")
        self.optimizer = optimizer
        self.weight = check_weight(weight)
        self._group: dict[nn.Parameter, dict[str, Any]] = {}

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        mean = self.substitute(parameter)
        return None if mean is None else Estimate(mean, self.weight)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        state = self.optimizer.state.get(parameter, {})
        if state and parameter not in self._group:  # groups may be added later
            self._group = {own: group for group in self.optimizer.param_groups for own in group["params"]}
        group = self._group.get(parameter, {})
        if (moment := state.get("exp_avg")) is not None:
            mean: Tensor = moment / (1 - group["betas"][0] ** float(state["step"]))
            return mean
        if (buffer := state.get("momentum_buffer")) is not None:
            scaled: Tensor = buffer * ((1 - group["momentum"]) / (1 - group.get("dampening", 0)))
            return scaled
        return None


def check_weight(weight: float) -> float:
    """The weight of an estimate. Raises ``ValueError`` unless it is from 0 to 1."""
    if not is_number(weight) or not 0 <= weight <= 1:
        raise ValueError(f"weight={weight}: relative to a computed gradient's weight of 1, so from 0 to 1")
    return weight


@final
class FillIn:
    """An estimator as the merge calls it, once for each event of a gradient; checks its answers.

    ``reads_own``: `computed` must be called; ``reads_merged``: `merged` must be.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        # most estimators do not observe: checked once, because a call for each parameter of each step costs time
        self.reads_merged = getattr(estimator.observe, "__func__", None) is not Estimator.observe
        self.reads_own = estimator.watches_own

    def computed(self, parameter: nn.Parameter, own: Tensor) -> None:
        """This rank computed the parameter's gradient."""
        self._estimator.observe(parameter, own, merged=False)

    def missing(self, parameter: nn.Parameter) -> Estimate | None:
        """The parameter's gradient, or a part of it, is missing; returns the estimate in its place, if any.

        Raises ``ValueError`` for an estimate that cannot be merged.
        """
        estimate = self._estimator.contribution(parameter)
        if isinstance(estimate, Estimate):
            estimate = replace(estimate, gradient=_own_part(estimate.gradient))
        _check(estimate, self._estimator, _own_part(parameter))
        return estimate if estimate is not None and estimate.weight > 0 else None

    def merged(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """All ranks' gradients were merged into this one."""
        self._estimator.observe(parameter, gradient, merged=True)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        """No rank has a gradient for the parameter; returns what takes the merged gradient's place."""
        substitute = self._estimator.substitute(parameter)
        return None if substitute is None else _own_part(substitute)


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that may be sharded over several, as estimators see gradients."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        own: Tensor = tensor.to_local()
    return own


def _check(estimate: Estimate | None, estimator: Estimator, parameter: Tensor) -> None:
    if estimate is None:
        return
    who = f"{name_of(estimator)}.contribution() gave"
    if not isinstance(estimate, Estimate):
        raise ValueError(f"{who} {estimate!r}: give a straggle.Estimate, or None to abstain")
    if not is_number(estimate.weight) or not 0 <= estimate.weight < math.inf:
        raise ValueError(f"{who} weight={estimate.weight!r}: must be a finite number of at least 0, such as 0.5")
    if estimate.gradient.shape != parameter.shape:
        shapes = f"{tuple(estimate.gradient.shape)} for a parameter of shape {tuple(parameter.shape)}"
        raise ValueError(f"{who} a gradient of shape {shapes}: they must be the same")
