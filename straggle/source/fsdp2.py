"""What is asked of FSDP2 (``torch.distributed.fsdp.fully_shard``) beside hooks on modules and parameters.

Some of it has no public name in torch. All of that is in this file, and `check_version` looks for it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

_NEEDED = ("reset_iter_state", "set_force_sum_reduction_for_comms", "reshard", "_get_fsdp_state")


def check_version() -> None:
    """Raise ``ValueError`` if this torch has not all that is needed to go on after a pass that was cut."""
    if missing := [name for name in _NEEDED if not hasattr(FSDPModule, name)]:
        raise ValueError(
            f"torch {torch.__version__} has no FSDPModule.{missing[0]}, without which a replica of fully_shard() "
            "cannot go on after a pass that it left: use torch 2.13 or newer"
        )


def units_of(module: nn.Module) -> list[nn.Module]:
    """The modules that were given to ``fully_shard``, the outer ones first."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def roots_of(module: nn.Module) -> list[nn.Module]:
    """Those of them that are in no other one."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in roots_of(child)]


def reshard(units: Iterable[Any]) -> None:
    """Register the sharded parameters again, as after an evaluation: the root keeps the whole ones after a forward."""
    for unit in units:
        unit.reshard()


def discard_pass(units: Iterable[nn.Module], roots: Iterable[Any]) -> None:
    """Forget a pass that was left in the middle, with all that ranks of the replica have of its gradients.

    FSDP's own reset keeps gradients of whole parameters, which the next pass would add to its own.
    """
    for own in _params_of(units):
        if (whole := getattr(own, "_unsharded_param", None)) is not None:
            whole.grad = None
        own.unsharded_accumulated_grad = None
    for root in roots:
        root.reset_iter_state()


def sum_only(units: Iterable[Any]) -> None:
    """Reduce gradients by sums: gloo has no mean."""
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)


class Scaled:
    """How FSDP reduces the gradients of a unit, with those of this rank times ``factor`` before."""

    def __init__(self, reduce: Any) -> None:
        self._reduce = reduce
        self.factor = 1.0
        self.allocate = reduce.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.factor != 1.0:
            input_tensor.mul_(self.factor)
        return self._reduce(output_tensor, input_tensor, *args, **kwargs)


def scale_own(units: Iterable[nn.Module], factor: float) -> None:
    """In the means over the ranks of a replica, this rank's gradients count ``factor`` times from here on."""
    for group in (group for unit in units for group in _groups_of(unit)):
        if not isinstance(group._reduce_scatter_comm, Scaled):
            group._reduce_scatter_comm = Scaled(group._reduce_scatter_comm)
        group._reduce_scatter_comm.factor = factor


def offloads(units: Iterable[nn.Module]) -> bool:
    """Whether shards are kept on the CPU while a device computes."""
    groups = (group for unit in units for group in _groups_of(unit))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor: the same object at each call."""
    with torch.no_grad():  # else it would be a view, in autograd's graph
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def around(shard: Tensor, like: Tensor) -> Tensor:
    """A DTensor of which this rank has ``shard`` itself, and no view of it; laid out as the DTensor ``like``."""
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[attr-defined, no-untyped-call]


def _params_of(units: Iterable[nn.Module]) -> Iterator[Any]:
    return (own for unit in units for group in _groups_of(unit) for own in group.fsdp_params)


def _groups_of(unit: Any) -> list[Any]:
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups
