"""An estimator as the merge asks it, whichever kind it is: one call for each thing that happens to a gradient."""

from __future__ import annotations

import math
from typing import final

from torch import Tensor, nn

from straggle.policies.deadline import LateHandling, is_number, name_of
from straggle.policies.estimators import Estimate, Estimator
from straggle.policies.supplements import Supplement, SupplementingEstimator


@final
class FillIn:
    """``reads_own``: `computed` wants to see this rank's gradients; ``reads_merged``: `merged` wants the merged ones.

    ``finishes_late``: a late rank finishes its backward pass.

    Raises ``ValueError`` for an estimator that does not go with ``late_handling``, and for what it gives that
    cannot be merged.
    """

    def __init__(self, estimator: Estimator, late_handling: LateHandling | None = None) -> None:
        late_handling = late_handling or LateHandling()
        self._estimator = estimator
        self._supplementing = estimator if isinstance(estimator, SupplementingEstimator) else None
        if late_handling.granularity == "step" and self._supplementing is not None:
            raise ValueError(
                f"granularity='step' with {type(estimator).__name__}: it adds to gradients that are dropped then; "
                "use granularity='stage' or another estimator"
            )
        # most estimators do not observe: asked once, because a call for each parameter of each step costs
        self.reads_merged = getattr(estimator.observe, "__func__", None) is not Estimator.observe
        self.reads_own = estimator.watches_own or self._supplementing is not None
        finishes_late = self._supplementing is not None and self._supplementing.finishes_late
        self.finishes_late = finishes_late and late_handling.max_lag > 0

    def computed(self, parameter: nn.Parameter, own: Tensor) -> Supplement | None:
        """This rank computed its gradient; what it submits beside it."""
        if self._estimator.watches_own:
            self._estimator.observe(parameter, own, merged=False)
        return self._supplement(parameter, own)

    def missing(self, parameter: nn.Parameter, share: float) -> tuple[Supplement | None, Estimate | None]:
        """A ``share`` of its gradient is missing; what it submits all the same, and the estimate in its place."""
        supplement = self._supplement(parameter, None)
        estimate = self._estimator.contribution(parameter)
        _check(estimate, self._estimator, parameter)
        if self._supplementing is not None:
            self._supplementing.missed(parameter, share, estimate)
        return supplement, estimate if estimate is not None and estimate.weight > 0 else None

    def abstained(self, parameter: nn.Parameter, share: float) -> None:
        """A ``share`` of its gradient is missing, and nothing takes its place."""
        if self._supplementing is not None:
            self._supplementing.missed(parameter, share, None)

    def merged(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """All ranks' gradients were merged into this one."""
        self._estimator.observe(parameter, gradient, merged=True)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        """No rank has anything for it; what takes the merged gradient's place."""
        return self._estimator.substitute(parameter)

    def came_late(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:
        """A gradient, a ``share`` of the step's, came after the step was submitted."""
        if self._supplementing is not None and self.finishes_late:
            self._supplementing.observe_late(parameter, gradient, share)

    def _supplement(self, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:
        if self._supplementing is None:
            return None
        supplement = self._supplementing.supplement(parameter, gradient)
        if supplement is not None and (not is_number(supplement.weight) or not -1 < supplement.weight < math.inf):
            raise ValueError(
                f"{name_of(self._estimator)}.supplement() gave weight={supplement.weight!r}: must be a finite number "
                "above -1"
            )
        return supplement


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
