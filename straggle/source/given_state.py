"""A sharded model's state on its way to the rank with the same shards in another replica: plain tensors.

There the DTensors are built again, by the parameter that is sharded in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from straggle.source.fsdp2 import around, shard_of

_LIKE, _SHARD = "straggle.sharded_like", "straggle.shard"


def given(state: Any, parameters: Iterable[nn.Parameter]) -> Any:
    """``state``, with a plain tensor in place of each DTensor. Raises ``TypeError`` for one like no parameter."""
    like = {_way(own): number for number, own in enumerate(parameters) if isinstance(own, DTensor)}

    def replaced(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if (number := like.get(_way(value))) is None:
            raise TypeError(
                f"a tensor of shape {tuple(value.shape)} and {value.dtype} is sharded as no parameter is, so a replica "
                "that comes back could not be given it: shard it as a parameter, or keep it out of what you register"
            )
        return {_LIKE: number, _SHARD: shard_of(value)}

    return _walk(state, replaced)


def taken(state: Any, parameters: Sequence[nn.Parameter]) -> Any:
    """What `given` was called with on the other rank, as DTensors of this one."""

    def rebuilt(value: Any) -> Any:
        if isinstance(value, Mapping) and value.keys() == {_LIKE, _SHARD}:
            return around(value[_SHARD], parameters[value[_LIKE]])
        return value

    return _walk(state, rebuilt)


def _way(tensor: Any) -> tuple[Any, ...]:
    """How a DTensor is sharded."""
    return tensor.placements, tensor.device_mesh, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _walk(value: Any, change: Any) -> Any:
    """The state with each value changed that is a dict, a list, a tuple or a tensor, from the outside in."""
    if (changed := change(value)) is not value or isinstance(value, Tensor):
        return changed
    if isinstance(value, Mapping):
        return type(value)({key: _walk(own, change) for key, own in value.items()})  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_walk(own, change) for own in value)
    return value
