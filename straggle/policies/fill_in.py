"""An estimator as the merge calls it: one call for each event of a gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from straggle.policies.deadline import is_number, name_of
from straggle.policies.estimators import Estimate, Estimator


@final
class FillIn:
    """Checks an estimator's answers. ``reads_own``: `computed` must be called; ``reads_merged``: `merged` must be."""

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
