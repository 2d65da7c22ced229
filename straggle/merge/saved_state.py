"""What a rank must save beside the module and the optimizer, as one flat dict in the form of a ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from straggle.backward.stages import BalancedByTime
from straggle.merge.alike import describe, in_words
from straggle.merge.coordinator import Coordinator
from straggle.policies.deadline import name_of
from straggle.policies.estimators import Estimator
from straggle.policies.history import History

SavedState: TypeAlias = "dict[str, Tensor | int | str]"

_HISTORY, _ESTIMATOR = "history.", "estimator."


class PartState(Protocol):
    """What an optional part of the model saves: the same on all ranks."""

    def tensors(self) -> dict[str, Tensor]:
        """Its state, by name; empty if there is none."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from there."""


class ResumeState:
    """Saves and loads the state of one rank.

    ``ranks``, ``stages``, ``estimator`` and ``model`` say what it is of. ``history.*`` is equal on all ranks, as is
    the state of each of ``parts`` under its name, and ``estimator.*`` is the rank's own.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        module: nn.Module,
        estimator: Estimator,
        *,
        stages: int | Sequence[str] | BalancedByTime | None,
        world_size: int,
        parts: Mapping[str, PartState],
    ) -> None:
        self._coordinator = coordinator
        self._parts = {f"{name}.": part for name, part in parts.items()}
        self._estimator, self._module = estimator, module
        self._of: dict[str, int | str] = {
            "ranks": world_size,
            "stages": in_words(describe(stages)),
            "estimator": name_of(estimator),
        }
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """The model has these parameters from here on."""
        self._parameters = dict(self._module.named_parameters())
        numel = sum(parameter.numel() for parameter in self._parameters.values())
        self._of["model"] = f"{len(self._parameters)} parameters of {numel} elements"

    def state_dict(self, *, own: bool = True) -> SavedState:
        """Tensors, numbers and strings; the estimator's tensors are lent. ``own``: with what only this rank has."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        history, estimator = self._coordinator.history.tensors(), self._estimator
        kept = estimator.state_dict(names) if own else estimator.shared_state_dict(names)
        state: SavedState = {**self._of, **{_HISTORY + name: tensor for name, tensor in history.items()}}
        for prefix, part in self._parts.items():
            state |= {prefix + name: tensor for name, tensor in part.tensors().items()}
        return {**state, **{_ESTIMATOR + name: tensor for name, tensor in kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises ``ValueError`` for the state of something else.

        With another number of ranks, what is the rank's own begins again.
        """
        if _HISTORY + "num_steps" not in state:
            raise ValueError(f"no state of straggle_state(): it has no {_HISTORY}num_steps, but {list(state)[:3]}")
        for what, ours in self._of.items():
            if what != "ranks" and (saved := state.get(what, ours)) != ours:  # an older checkpoint does not say it
                raise ValueError(
                    f"the saved state is of {what}={saved}, and this run has {what}={ours}: load it into a model that "
                    "is wrapped as the saved one was, or begin without it"
                )
        history, ranks = History.from_tensors(_below(_HISTORY, state)), int(self._of["ranks"])
        if state.get("ranks", ranks) != ranks:
            self._coordinator.restore(history.of_ranks(ranks))
            return
        try:
            self._estimator.load_state_dict(_below(_ESTIMATOR, state), self._parameters)
        except (LookupError, RuntimeError) as error:  # a name, or a shape, that is none of this model's
            raise ValueError(f"the saved state is of another model than this: {error}") from error
        self._coordinator.restore(history)
        for prefix, part in self._parts.items():
            part.restore(_below(prefix, state))


class SharedMemory:
    """What of an estimator's memory all ranks have, as a state that a rank gets with the model when it comes back.

    With another memory it would put another gradient where no rank has any.
    """

    def __init__(self, estimator: Estimator, module: nn.Module) -> None:
        self._estimator = estimator
        self._parameters = dict(module.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """By the parameters' names; the tensors are lent."""
        return self._estimator.shared_state_dict({parameter: name for name, parameter in self._parameters.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Have the same."""
        self._estimator.load_state_dict(state, self._parameters)


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
