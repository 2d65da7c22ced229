"""What a sharded module holds, tensor by tensor, past the hooks of its ``state_dict``.

Hooks of a user's may give the tensors other names and shapes, and gather the shards for it: a collective, to which the
other ranks of the replica would have to come at the same moment. Torch's own wrapper for activation checkpointing and
torchtitan's fused attention have such hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_EXTRA = "_extra_state"  # as torch names it


def held_state(module: nn.Module) -> dict[str, Any]:
    """Its parameters, the buffers that are saved, and what its modules add (``get_extra_state``), by their places."""
    return {
        **{name: tensor.detach() for name, tensor in _tensors(module)},
        **{name: own.get_extra_state() for name, own in _with_more(module)},
    }


def hold_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Overwrite all of it with `held_state` of another rank. Raises ``RuntimeError`` if that is another module's."""
    own, more = dict(_tensors(module)), dict(_with_more(module))
    if other := sorted({*own, *more} ^ state.keys()):
        raise RuntimeError(f"the state of {type(module).__name__} is of another module: {other[0]} is in one of them")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
    for name, child in more.items():
        child.set_extra_state(state[name])


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                yield name, buffer


def _with_more(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{_EXTRA}".lstrip("."), child
