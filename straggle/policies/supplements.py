"""Estimators that add to a later contribution what an earlier one lacked: error feedback, and late gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from straggle.policies.deadline import check_count, is_number
from straggle.policies.estimators import Abstain, Estimate, Estimator, check_weight

_INNER = "/"  # begins the names of what an inner estimator keeps; no parameter's name does


@dataclass(frozen=True)
class Supplement:
    """What a rank adds to its contribution: ``gradient`` to the sum, as it is, and ``weight`` to the weight.

    The weight is relative to a computed gradient's 1. With a supplement the contribution is ``g + gradient`` and counts
    ``1 + weight``; that sum must be positive.
    """

    gradient: Tensor
    weight: float


class SupplementingEstimator(Estimator):
    """An estimator that also adds to contributions of later steps.

    ``finishes_late``: a rank that is late in its backward pass submits what it has and goes on; what it still computes
    is shown to `observe_late`. `missed` may come from another thread than the rest, but never two calls at a time.
    """

    finishes_late: bool = False

    def contribution(self, parameter: nn.Parameter) -> Estimate | None:  # noqa: ARG002
        return None

    @abstractmethod
    def supplement(self, parameter: nn.Parameter, gradient: Tensor | None) -> Supplement | None:
        """What this rank submits beside the gradient that it computed; ``None`` in its place: it did not reach it."""

    def missed(self, parameter: nn.Parameter, share: float, estimate: Estimate | None) -> None:
        """This rank's contribution lacked a ``share`` of the gradient; the estimate went in its place.

        Without an estimate nothing did, as where the rank was stood in for.
        """

    def observe_late(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:
        """See what of the step's gradient, a ``share`` of it, one backward pass gave after the step was submitted."""

    def shared_state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:  # noqa: ARG002
        """Nothing: what is due to a rank's later contributions is its own."""
        return {}


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


class _Accounts(SupplementingEstimator):
    """Keeps an account for each parameter for which something is due."""

    def __init__(self) -> None:
        self._accounts: dict[nn.Parameter, _Account] = {}

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        accounts = dict(self._accounts)  # a copy, because the stand-in may add to it meanwhile
        return {names[parameter]: own.packed(parameter) for parameter, own in accounts.items() if parameter in names}

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        for name, packed in state.items():
            self._accounts[parameters[name]] = _Account.unpacked(packed, parameters[name])

    def forget_own(self) -> None:
        self._accounts.clear()


@final
class ErrorFeedback(_Accounts):
    """What was dropped is added to the next contribution, as with compressed gradients (Seide et al. 2014, section 2).

    A pass that was stopped never computed what it dropped, so the next gradient ``g`` that the rank computes of the
    parameter stands for it: after steps that lack the weight ``m`` in all, into which ``inner`` put the estimates
    ``e_i`` with weights ``a_i``, the rank submits ``g + m * g - sum(a_i * e_i)`` with the weight ``1 + m - sum(a_i)``:
    over all these steps together its own gradients, with its full weight. Where ``m`` is more than
    ``max_residual``, all three are scaled down to ``max_residual / m`` of themselves. With a `StagedBackward`, only
    ``inner`` acts.
    """

    def __init__(self, inner: Estimator | None = None, max_residual: float = 4.0) -> None:
        super().__init__()
        if not is_number(max_residual) or not max_residual > 0:
            raise ValueError(f"max_residual={max_residual}: how many missed gradients one may stand for, such as 4")
        self.inner = Abstain() if inner is None else inner
        if not isinstance(self.inner, Estimator):
            raise TypeError(f"inner={inner!r}: give a straggle.Estimator")
        if isinstance(self.inner, SupplementingEstimator):
            raise ValueError(f"{type(self.inner).__name__} adds to later contributions itself: wrap another estimator")
        self.max_residual = max_residual
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

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        inner = self.inner.state_dict(names)
        return {**super().state_dict(names), **{_INNER + name: tensor for name, tensor in inner.items()}}

    def shared_state_dict(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        return {_INNER + name: tensor for name, tensor in self.inner.shared_state_dict(names).items()}

    def load_state_dict(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        inner = {name.removeprefix(_INNER): tensor for name, tensor in state.items() if name.startswith(_INNER)}
        self.inner.load_state_dict(inner, parameters)
        super().load_state_dict({n: t for n, t in state.items() if not n.startswith(_INNER)}, parameters)

    def forget_own(self) -> None:
        super().forget_own()
        self.inner.forget_own()

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
        scale = min(1.0, self.max_residual / account.count)
        added = gradient * (scale * account.count)
        if account.total is not None:
            added.sub_(account.total, alpha=scale)
        return Supplement(added, scale * (account.count - account.weight))


@final
class Carry(_Accounts):
    """A rank that is late in its backward pass submits what it has and goes on; the rest joins its next contribution.

    As eager-SGD's stale gradients (PPoPP 2020, section 4), but only of the stages that came too late, one step later
    where the rank keeps up. ``weight`` is that of a stale gradient; it is forgotten when more than ``max_staleness``
    merged steps came between, as after a long stall. Peers do not wait for the rest, but the rank itself has less time
    for its next step, whose deadline counts from the end of the merge.
    """

    finishes_late = True

    def __init__(self, weight: float = 1.0, max_staleness: int = 4) -> None:
        super().__init__()
        check_count("max_staleness", max_staleness, least=1)  # as old as a late gradient is when it is used
        self.weight = check_weight(weight)
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
