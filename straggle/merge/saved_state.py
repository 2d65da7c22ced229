"""The state that a rank saves beside module and optimizer, as one flat dict in the form of a ``state_dict``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from straggle.backward.stages import BalancedByTime
from straggle.merge.alike import describe, in_words
from straggle.merge.round.coordinator import Coordinator
from straggle.policies.deadline import name_of
from straggle.policies.estimators import Estimator
from straggle.policies.history import History

SavedState: TypeAlias = "dict[str, Tensor | int | str]"

_HISTORY, _ESTIMATOR = "history.", "estimator."


class PartState(Protocol):
    """An optional part of the model with state to save, which is the same on all ranks."""

    def tensors(self) -> dict[str, Tensor]:
        """The part's state by name; empty if there is none."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the result of `tensors`."""


class ResumeState:
    """Saves and loads the state of one rank.

    ``ranks``, ``stages``, ``estimator`` and ``model`` describe the run that it is of. ``history.*`` is equal on all
    ranks, as is the state of each of ``parts`` under its name, and ``estimator.*`` is the rank's own.
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
        sharded: bool = False,
    ) -> None:
        self._coordinator = coordinator
        self._parts = {f"{name}.": part for name, part in parts.items()}
        self._estimator, self._module, self._sharded = estimator, module, sharded
        self._of: dict[str, int | str] = {
            "ranks": world_size,
            "stages": in_words(describe(stages)),
            "estimator": name_of(estimator),
        }
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Note the model's present parameters."""
        self._parameters = dict(self._module.named_parameters())
        numel = sum(parameter.numel() for parameter in self._parameters.values())
        self._of["model"] = f"{len(self._parameters)} parameters of {numel} elements"

    def state_dict(self, *, own: bool = True) -> SavedState:
        """Tensors, numbers and strings; the estimator's tensors are lent. ``own``: with this rank's own state."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        history, estimator = self._coordinator.history.tensors(), self._estimator
        if own:
            kept = estimator.state_dict(names)
        else:  # of shards, ranks have different memories
            kept = {} if self._sharded else estimator.shared_state_dict(names)
        state: SavedState = {**self._of, **{_HISTORY + name: tensor for name, tensor in history.items()}}
        for prefix, part in self._parts.items():
            state |= {prefix + name: tensor for name, tensor in part.tensors().items()}
        return {**state, **{_ESTIMATOR + name: tensor for name, tensor in kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a result of `state_dict`. Raises ``ValueError`` for the state of another run.

        With another number of ranks, the rank's own state begins again.
        """
        if _HISTORY + "num_steps" not in state:
            raise ValueError(f"no state of straggle_state(): it has no {_HISTORY}num_steps, but {list(state)[:3]}")
        for what, ours in self._of.items():
            if what != "ranks" and (saved := state.get(what, ours)) != ours:  # an older checkpoint lacks it
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
        except (LookupError, RuntimeError) as error:  # a name or a shape that this model does not have
            raise ValueError(f"the saved state is of another model than this: {error}") from error
        self._coordinator.restore(history)
        for prefix, part in self._parts.items():
            part.restore(_below(prefix, state))


class SharedState:
    """The state that is equal on all ranks as one string, for ``torch.distributed.checkpoint``.

    That loads tensors only into such of the saved shape, which a new run does not know.
    """

    def __init__(self, resume_state: ResumeState) -> None:
        self._resume_state = resume_state

    def state_dict(self) -> dict[str, str]:
        """Tensors as nested lists with their dtypes."""
        state = self._resume_state.state_dict(own=False)
        plain = {
            name: [str(value.dtype).rpartition(".")[2], value.tolist()] if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        return {"state": json.dumps(plain)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from it, as `ResumeState.load_state_dict` does."""
        plain: dict[str, Any] = json.loads(state["state"])
        loaded = {
            name: torch.tensor(value[1], dtype=getattr(torch, value[0])) if isinstance(value, list) else value
            for name, value in plain.items()
        }
        self._resume_state.load_state_dict(loaded)


class SharedMemory:
    """The part of an estimator's memory that is equal on all ranks, which a returning rank gets with the model.

    With another memory it would substitute another gradient if no rank has any.
    """

    def __init__(self, estimator: Estimator, module: nn.Module) -> None:
        self._estimator = estimator
        self._parameters = dict(module.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The memory by the parameters' names; the tensors are lent."""
        return self._estimator.shared_state_dict({parameter: name for name, parameter in self._parameters.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the memory of another rank."""
        self._estimator.load_state_dict(state, self._parameters)


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
