"""Checks that all ranks have the same options of a wrapped model, and go on from the same state."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from torch import nn

from straggle.merge.round.round import Round
from straggle.merge.wire.channel import Channel
from straggle.policies.deadline import Deadline
from straggle.policies.estimators import Estimator
from straggle.policies.history import History

Described: TypeAlias = "str | list[Any]"  # text, or a class's name and its described arguments


def describe(value: Any) -> Described:
    """An option in a form that can be compared: a plain value, or a policy's class and its constructor's arguments.

    The arguments are read from attributes of their names, with an underscore or without. A value that is neither plain
    nor a policy, such as an optimizer, is described by its class alone.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, map(describe, value)))}]"
    kind = type(value)
    if not isinstance(value, (Deadline, Estimator)) and not is_dataclass(value):
        return kind.__qualname__
    state = vars(value)
    # a class without a constructor has no arguments; `signature` would take milliseconds to find that
    has_one = any("__init__" in vars(base) or "__new__" in vars(base) for base in kind.__mro__ if base is not object)
    takes = inspect.signature(kind).parameters if has_one else ()
    names = [name for name in takes if name in state or f"_{name}" in state]
    names = names or [name for name in state if name != "memory"]  # `memory` is not an option
    return [kind.__qualname__, {name: describe(state.get(name, state.get(f"_{name}"))) for name in names}]


def difference(ours: Described, theirs: Described) -> tuple[str, str]:
    """Both as text; for two policies of the same class only the differing arguments: ``LateHandling(quorum=2)``."""
    if isinstance(ours, str) or isinstance(theirs, str) or ours[0] != theirs[0]:
        return in_words(ours), in_words(theirs)
    pairs = {name: (ours[1].get(name, "nothing"), theirs[1].get(name, "nothing")) for name in ours[1] | theirs[1]}
    differing = {name: difference(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    first, second = (
        f"{ours[0]}({', '.join(f'{name}={pair[side]}' for name, pair in differing.items())})" for side in range(2)
    )
    return first, second


def in_words(described: Described) -> str:
    """The described value as it would be written: ``LateHandling(quorum=2)``."""
    if isinstance(described, str):
        return described
    return f"{described[0]}({', '.join(f'{name}={in_words(value)}' for name, value in described[1].items())})"


@dataclass(frozen=True)
class Wrapped:
    """One rank's model and options, described: parameters, buffers and options, or why it cannot be wrapped."""

    refusal: str = ""
    parameters: Sequence[str] = ()
    buffers: Sequence[str] = ()
    options: Mapping[str, Described] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module, options: Mapping[str, Any]) -> Wrapped:
        """The description of a module that can be trained in stages."""
        saved = module.state_dict().keys()
        return Wrapped(
            parameters=[
                repr((name, tuple(p.shape), str(p.dtype), p.requires_grad)) for name, p in module.named_parameters()
            ],
            buffers=[repr((name, tuple(b.shape), str(b.dtype), name in saved)) for name, b in module.named_buffers()],
            options={name: describe(option) for name, option in options.items()},
        )


def check_alike(mine: Wrapped, channel: Channel) -> None:
    """Raise ``ValueError``, on every rank, naming the first that cannot be wrapped, or the first difference."""
    gathered = [Wrapped(**theirs) for theirs in channel.gather(asdict(mine), "models")]
    if refusals := [(rank, theirs.refusal) for rank, theirs in enumerate(gathered) if theirs.refusal]:
        alone = len({theirs.refusal for theirs in gathered}) > 1
        raise ValueError(f"rank {refusals[0][0]}: {refusals[0][1]}" if alone else refusals[0][1])
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        for ours, others in ((first.parameters, theirs.parameters), (first.buffers, theirs.buffers)):
            for own, other in zip_longest(ours, others, fillvalue="nothing"):
                if own != other:
                    raise ValueError(f"the model differs between ranks: rank 0 has {own} where rank {rank} has {other}")
        for name in {**first.options, **theirs.options}:
            option, their_option = (each.options.get(name, "nothing") for each in (first, theirs))
            if their_option != option:
                own, other = difference(option, their_option)
                raise ValueError(
                    f"{name} differs between ranks: rank {rank} has {other} where rank 0 has {own}; "
                    "give the same to all"
                )


def check_same_state(history: History, channel: Channel, merged: Round) -> None:
    """Raise ``ValueError`` on every rank if some have gone on from another state; after the first step, ``merged``.

    A rank that was out while its peers made that step again without it has merged another one, and is no reason.
    """
    content = hashlib.sha256()
    for name, numbers in sorted(history.tensors().items()):
        content.update(f"{name} {numbers.tolist()}".encode())
    gathered = channel.gather((merged.generation, history.num_steps, content.hexdigest()), "histories")
    alike = [(rank, steps, of) for rank, (made, steps, of) in enumerate(gathered) if made == merged.generation]
    for rank, num_steps, theirs in alike[1:]:
        first, of_first, same = alike[0]
        if (num_steps, theirs) != (of_first, same):
            raise ValueError(
                f"rank {rank} has a history of {num_steps} steps, and not that of rank {first}, of {of_first} steps: "
                "call load_straggle_state() on all ranks with what was saved together, or on none"
            )
