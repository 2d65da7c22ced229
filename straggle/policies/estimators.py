"""What fills in for a missing gradient: a late rank's own contribution, or the gradient that nobody computed."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from straggle.policies.deadline import is_number, name_of


@dataclass(frozen=True)
class Estimate:
    """A substitute gradient, shaped as its parameter, and its weight relative to a computed gradient's 1."""

    gradient: Tensor
    weight: float


@dataclass(frozen=True)
class Supplement:
    """What a rank adds to its contribution: ``gradient`` to the sum, as it is, and ``weight`` to the weight.

    The weight is relative to a computed gradient's 1. With a supplement the contribution is ``g + gradient`` and counts
    ``1 + weight``; that sum must be positive.
    """

    gradient: Tensor
    weight: float


class Estimator(ABC):  # noqa: B024
    """Fills in for gradients that were not computed. Every method may be left out.

    ``gradient`` is always that of a whole step (all of its micro-batches), but for `observe_late`; its tensor is only
    lent: copy what you keep. `missed` may come from another thread than the rest, but never two calls at a time.

    ``watches_own``: `observe` is also shown this rank's own gradients. ``supplements``: `supplement` is asked.
    ``finishes_late``: a rank that is late in its backward pass hands in what it has and goes on; what it still computes
    is shown to `observe_late`. ``inner``: the estimator that this one wraps, whose memory is saved too.
    """

    watches_own: bool = False
    supplements: bool = False
    finishes_late: bool = False
    inner: Estimator | None = None

    @property
    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        """What it keeps from step to step, one tensor for each parameter: the state that a checkpoint saves."""
        return {}

    def remember(self, memory: Mapping[nn.Parameter, Tensor]) -> None:  # noqa: B027
        """Go on from a saved `memory`."""

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:  # noqa: ARG002
        """What this late rank puts in for a parameter that it did not reach; ``None``: the peers' mean stands."""
        return None

    def supplement(self, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:  # noqa: ARG002
        """What this rank hands in beside the gradient that it computed; ``None`` in its place: it did not reach it."""
        return None

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:  # noqa: ARG002
        """The gradient of a parameter that nobody contributed; only from state that is equal on all ranks."""
        return None

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:  # noqa: B027
        """See a gradient as this rank computed it (``merged=False``) or as the merge of all ranks made it."""

    def missed(self, parameter: nn.Parameter, share: float, estimate: Estimate | None) -> None:  # noqa: B027
        """Hear that this rank's contribution lacked a ``share`` of the gradient, in place of which the estimate went.

        Without an estimate nothing did, as where the rank was stood in for.
        """

    def observe_late(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:  # noqa: B027
        """See the gradient of one backward pass, a ``share`` of the step's, that came after the step was handed in."""


@final
class Abstain(Estimator):
    """Nothing fills in: the mean over the ranks that computed a gradient is used as it is.

    A parameter that nobody computed keeps ``grad = None``, and the optimizer leaves it and its state alone.
    """


@final
class Zero(Estimator):
    """A zero gradient with full weight: what systems do that fill with zeros and divide by the number of ranks."""

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        return Estimate(torch.zeros_like(parameter), 1.0)


class _Remembering(Estimator):
    """Keeps one tensor for each parameter."""

    def __init__(self, weight: float) -> None:
        self.weight = _checked(weight)
        self._memory: dict[nn.Parameter, Tensor] = {}

    @property
    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        return self._memory

    def remember(self, memory: Mapping[nn.Parameter, Tensor]) -> None:
        self._memory.update(memory)

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        kept = self._memory.get(parameter)
        return None if kept is None else Estimate(kept, self.weight)

    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter in self._memory:
            self._memory[parameter].copy_(gradient)
        else:
            self._memory[parameter] = gradient.detach().clone()


@final
class LastOwn(_Remembering):
    """The gradient that this rank computed when it last reached the parameter; never a substitute for everyone."""

    watches_own = True

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__(weight)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        if not merged:
            self._keep(parameter, gradient)


@final
class LastMerged(_Remembering):
    """The gradient that the last merge gave, as eager-SGD's stale gradients (PPoPP 2020, section 4) but global."""

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__(weight)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        return self._memory.get(parameter)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        if merged:
            self._keep(parameter, gradient)


@final
class MovingAverage(_Remembering):
    """``average = decay * average + (1 - decay) * merged``, starting from the first merged gradient."""

    def __init__(self, decay: float = 0.9, weight: float = 0.5) -> None:
        super().__init__(weight)
        if not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must be at least 0 and below 1, such as 0.9")
        self.decay = decay

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        return self._memory.get(parameter)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        if not merged:
            return
        if parameter in self._memory:
            self._memory[parameter].lerp_(gradient, 1 - self.decay)
        else:
            self._keep(parameter, gradient)


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
        self.weight = _checked(weight)
        self._group = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        mean = self.substitute(parameter)
        return None if mean is None else Estimate(mean, self.weight)

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        state = self.optimizer.state.get(parameter, {})
        group = self._group.get(parameter, {})
        if (moment := state.get("exp_avg")) is not None:
            mean: Tensor = moment / (1 - group["betas"][0] ** float(state["step"]))
            return mean
        if (buffer := state.get("momentum_buffer")) is not None:
            scaled: Tensor = buffer * ((1 - group["momentum"]) / (1 - group.get("dampening", 0)))
            return scaled
        return None


@dataclass
class _Account:
    """A sum of gradients (``None``: of nothing) and what belongs to it."""

    total: Tensor | None = None
    weight: float = 0.0
    count: float = 0.0

    def add(self, gradient: Tensor, weight: float) -> None:
        if self.total is None:
            self.total = gradient * weight
        else:
            self.total.add_(gradient, alpha=weight)

    def packed(self, parameter: nn.Parameter) -> Tensor:
        """All of it as one flat tensor."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        numbers = torch.tensor([self.weight, self.count], dtype=dtype, device=parameter.device)
        return numbers if self.total is None else torch.cat([numbers, self.total.flatten()])

    @staticmethod
    def unpacked(packed: Tensor, parameter: nn.Parameter) -> _Account:
        """The account that `packed` gave."""
        total = packed[2:].view(parameter.shape).to(parameter, copy=True) if len(packed) > 2 else None
        return _Account(total, float(packed[0]), float(packed[1]))


class _Accounts(Estimator):
    """Keeps an account for each parameter for which something is due."""

    supplements = True

    def __init__(self) -> None:
        self._accounts: dict[nn.Parameter, _Account] = {}

    @property
    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        # a copy, because the stand-in may add to it meanwhile
        return {parameter: account.packed(parameter) for parameter, account in dict(self._accounts).items()}

    def remember(self, memory: Mapping[nn.Parameter, Tensor]) -> None:
        self._accounts.update({parameter: _Account.unpacked(tensor, parameter) for parameter, tensor in memory.items()})


@final
class ErrorFeedback(_Accounts):
    """What was dropped is added to the next contribution, as with compressed gradients (Seide et al. 2014, section 2).

    A pass that was stopped never computed what it dropped, so the next gradient ``g`` that the rank computes of the
    parameter stands for it: after steps that lack the weight ``m`` in all, into which ``inner`` put the estimates
    ``e_i`` with weights ``a_i``, the rank hands in ``g + m * g - sum(a_i * e_i)`` with the weight ``1 + m - sum(a_i)``:
    over all these steps together its own gradients, with its whole weight. Where ``m`` is more than ``most``, all three
    are scaled down to ``most / m`` of themselves. With a `StagedBackward`, only ``inner`` acts.
    """

    inner: Estimator

    def __init__(self, inner: Estimator | None = None, most: float = 4.0) -> None:
        super().__init__()
        if not is_number(most) or not most > 0:
            raise ValueError(f"most={most}: how many missed gradients one may stand for, such as 4")
        self.inner = Abstain() if inner is None else inner
        if not isinstance(self.inner, Estimator):
            raise TypeError(f"inner={inner!r}: give a straggle.Estimator")
        if self.inner.supplements:
            raise ValueError(f"{type(self.inner).__name__} adds to later contributions itself: wrap another estimator")
        self.most = most
        self.watches_own = self.inner.watches_own

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:
        estimate = self.inner.contribution(parameter)
        if estimate is not None and estimate.weight > 1:
            raise ValueError(f"weight={estimate.weight} of {type(self.inner).__name__}: at most 1 inside ErrorFeedback")
        return estimate

    def substitute(self, parameter: nn.Parameter) -> Tensor | None:
        return self.inner.substitute(parameter)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        self.inner.observe(parameter, gradient, merged=merged)

    def missed(self, parameter: nn.Parameter, share: float, estimate: Estimate | None) -> None:
        account = self._accounts.setdefault(parameter, _Account())
        account.count += share
        if estimate is not None and estimate.weight > 0:
            account.add(estimate.gradient, share * estimate.weight)
            account.weight += share * estimate.weight

    def supplement(self, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:
        account = self._accounts.pop(parameter, None) if gradient is not None else None
        if gradient is None or account is None:
            return None
        scale = min(1.0, self.most / account.count)
        added = gradient * (scale * account.count)
        if account.total is not None:
            added.sub_(account.total, alpha=scale)
        return Supplement(added, scale * (account.count - account.weight))


@final
class Carry(_Accounts):
    """A rank that is late in its backward pass hands in what it has and goes on; the rest joins its next contribution.

    As eager-SGD's stale gradients (PPoPP 2020, section 4), but only of the stages that came too late, one step later
    where the rank keeps up. ``weight`` is that of a stale gradient; it is forgotten when more than ``max_staleness``
    merged steps came between, as after a long stall. Peers do not wait for the rest, but the rank itself has less time
    for its next step, whose deadline counts from the end of the merge.
    """

    finishes_late = True

    def __init__(self, weight: float = 1.0, max_staleness: int = 4) -> None:
        super().__init__()
        if not isinstance(max_staleness, int) or isinstance(max_staleness, bool) or max_staleness < 1:
            raise ValueError(f"max_staleness={max_staleness}: a late gradient is at least 1 step old when it is used")
        self.weight = _checked(weight)
        self.max_staleness = max_staleness

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:  # noqa: ARG002
        account = self._accounts.get(parameter)
        if merged and account is not None:
            account.count += 1
            if account.count > self.max_staleness:
                del self._accounts[parameter]

    def observe_late(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:
        account = self._accounts.setdefault(parameter, _Account())
        account.add(gradient.detach(), 1.0)
        account.weight += share

    def supplement(self, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:  # noqa: ARG002
        account = self._accounts.pop(parameter, None)
        if account is None or account.total is None or self.weight == 0:
            return None
        return Supplement(account.total * self.weight, account.weight * self.weight)


def check_estimate(estimate: Estimate | None, estimator: Estimator, parameter: Tensor) -> None:
    """Raise ``ValueError``, naming the estimator, for what cannot be put in for the gradient of this parameter."""
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


def supplement_of(estimator: Estimator, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:
    """The estimator's `supplement`. Raises ``ValueError``, naming it, for what cannot be added to a contribution."""
    supplement = estimator.supplement(parameter, gradient)
    if supplement is not None and (not is_number(supplement.weight) or not -1 < supplement.weight < math.inf):
        raise ValueError(
            f"{name_of(estimator)}.supplement() gave weight={supplement.weight!r}: must be a finite number above -1"
        )
    return supplement


def _checked(weight: float) -> float:
    if not is_number(weight) or not 0 <= weight <= 1:
        raise ValueError(f"weight={weight}: relative to a computed gradient's weight of 1, so from 0 to 1")
    return weight
