"""What is asked of FSDP2 (``torch.distributed.fsdp.fully_shard``) beside hooks on modules and parameters.

Some of it has no public name in torch. All of that is in this file, and `check_version` looks for it first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from straggle import world
from straggle.backward.hooks import take_gradient

_NEEDED = ("reset_iter_state", "set_force_sum_reduction_for_comms", "reshard", "_get_fsdp_state")


def check_version() -> None:
    """Raise ``ValueError`` if this torch has not all that is needed to go on after a pass that was cut."""
    if missing := [name for name in _NEEDED if not hasattr(FSDPModule, name)]:
        raise ValueError(
            f"torch {torch.__version__} has no FSDPModule.{missing[0]}, which a model of fully_shard() needs to go on "
            "after a pass that was cut: use torch 2.13 or newer"
        )


def units_of(module: nn.Module) -> list[nn.Module]:
    """The modules that were given to ``fully_shard``, the outer ones first."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def places_of(module: nn.Module) -> list[nn.Module]:
    """The modules between which a pass may be left: units of FSDP or, without it, those with sharded parameters."""
    if units := units_of(module):
        return units
    own = ((child, child.parameters(recurse=False)) for child in module.modules())
    return [child for child, parameters in own if any(isinstance(one, DTensor) for one in parameters)]


def place_of_data(units: Sequence[nn.Module]) -> int:
    """Which of a replica's ranks with samples of their own this one is: those over which FSDP shards; 0 without it."""
    return next((int(group.mesh_info.shard_mesh_rank) for unit in units for group in _groups_of(unit)), 0)


class UnitStates:
    """What FSDP knows of these units: whether it is in the middle of a pass, and what it keeps from one to the next."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._states = dict.fromkeys(unit._get_fsdp_state() for unit in units)
        self._groups = [group for state in self._states for group in state._fsdp_param_groups]

    def reshard(self) -> None:
        """Register the sharded parameters, as before a pass: a root keeps the whole ones after a forward pass."""
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()

    @property
    def in_pass(self) -> bool:
        """Whether a forward or a backward pass has begun and has not come to its end."""
        return any(_is_in_pass(state._state_ctx) for state in self._states)

    @property
    def has_prefetched(self) -> bool:
        """Whether parameters were fetched that no unit has used: they are those of before the optimizer's step."""
        return any(group._all_gather_result is not None for group in self._groups)

    def begins_again(self, unit: Any) -> bool:
        """Whether a forward pass began at this unit before, and has not come to its end."""
        state = unit._get_fsdp_state()
        return state._state_ctx.iter_forward_root is state

    @property
    def in_forward(self) -> bool:
        """Whether a forward pass began at one of the units, and not at a module around them, and has not ended."""
        return any(state._state_ctx.iter_forward_root in self._states for state in self._states)

    @property
    def accumulate(self) -> bool:
        """Whether the loop lets a unit keep its gradients for a later pass (`set_requires_gradient_sync`)."""
        return any(not group.reduce_grads for group in self._groups)

    def keeping(self) -> list[str]:
        """The names of parameters of which a unit keeps gradients."""
        return [own._param_fqn or "" for own in _params_of(self._groups) if _keeps_gradient(own)]

    def settings(self) -> list[Any]:
        """What a loop may set for the passes of a step, in which order it will."""
        last = [state._state_ctx.is_last_backward for state in self._states]
        return [last, *((group.reduce_grads, group.reshard_after_backward) for group in self._groups)]

    def set_again(self, settings: Sequence[Any]) -> None:
        """Set it as it was."""
        for state, last in zip(self._states, settings[0], strict=True):
            state._state_ctx.is_last_backward = last
        for group, own in zip(self._groups, settings[1:], strict=True):
            group.reduce_grads, group.reshard_after_backward = own

    def reset(self) -> None:
        """A forward pass was left in the middle, and the next one begins as if it had not been."""
        for context in self._contexts():
            _reset(context)

    def forget(self) -> None:
        """Forget all passes so far, with all that ranks of the replica have of their gradients.

        FSDP's own reset keeps gradients of whole parameters, which the next pass would add to its own. A model that is
        none of ours, but whose pass was left with ours, is as before it, too.
        """
        for context in {*self._contexts(), *filter(_is_in_pass, _contexts_of_all())}:
            for own in _params_of(group for state in context.all_states for group in state._fsdp_param_groups):
                _drop_gradient(own)
            _reset(context)
        self.reshard()

    def _contexts(self) -> set[Any]:
        return {state._state_ctx for state in self._states}


def _is_in_pass(context: Any) -> bool:
    return context.iter_forward_root is not None or context.post_backward_final_callback_queued


def _contexts_of_all() -> set[Any]:
    """What each root of FSDP in this process shares with its units."""
    states = [found() for found in [*_composable_state._module_state_mapping.values()]]
    return {state._state_ctx for state in states if isinstance(state, FSDPState)}


def _reset(context: Any) -> None:
    """By its root, the first of its states; before the first forward pass it is not known which one that is."""
    if context.all_states:
        context.all_states[0]._modules[0].reset_iter_state()


def _keeps_gradient(own: Any) -> bool:
    whole = getattr(own, "_unsharded_param", None)
    return own.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _drop_gradient(own: Any) -> None:
    if (whole := getattr(own, "_unsharded_param", None)) is not None:
        take_gradient(whole)
    own.unsharded_accumulated_grad = None


class MethodHooks:
    """Hooks on methods of units that are called in place of ``forward`` (`register_fsdp_forward_method`).

    No hook of the module sees these calls. ``before`` is called with the number of the unit, the module and its
    arguments before FSDP begins it, ``after`` with the output as well before FSDP ends it.
    """

    def __init__(self, units: Iterable[Any], before: Callable[..., object], after: Callable[..., object]) -> None:
        self._before, self._after = before, after
        self._states = list[Any]()
        for number, unit in enumerate(units):
            self._states.append(state := unit._get_fsdp_state())
            state._pre_forward = partial(self._pre_forward, number, state)  # in place of its class's
            state._post_forward = partial(self._post_forward, number, state)

    def _pre_forward(self, number: int, state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._before(number, module, args)
        return type(state)._pre_forward(state, module, args, kwargs)

    def _post_forward(self, number: int, state: Any, module: nn.Module, args: Any, output: Any) -> Any:
        self._after(number, module, args, output)
        return type(state)._post_forward(state, module, args, output)

    def remove(self) -> None:
        """Let the units have their own again."""
        for state in self._states:
            for name in ("_pre_forward", "_post_forward"):
                if (own := vars(state).get(name)) is not None and own.func.__self__ is self:
                    delattr(state, name)


def sum_only(units: Iterable[Any]) -> None:
    """Reduce gradients by sums: gloo has no mean."""
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)


class Inside:
    """What this rank does inside of its replica. ``factor``: by which its gradients are scaled before they are reduced.

    ``num_replicas``: over which they are merged. `waited_s` may be read by any thread.
    """

    def __init__(self, num_replicas: int = 1, clock: Callable[[], float] = world.clock) -> None:
        self.factor = 1.0
        self.num_replicas = num_replicas
        self._clock = clock
        self._waited_s = 0.0
        self._since: float | None = None  # it is in a collective

    def begin(self, *, goes_on: bool) -> None:
        """A step begins; ``goes_on``: what it waits in it is of the one before."""
        self.factor = 1.0
        if not goes_on:
            self._waited_s = 0.0

    def weigh(self, factor: float) -> None:
        """Until the step ends this rank's gradients count by so much more or less."""
        self.factor = factor

    def waited_s(self) -> float:
        """Seconds that it was in FSDP's collectives in this step, and in those before it that this one goes on.

        The rank that the others wait for has the fewest.
        """
        since = self._since
        return self._waited_s + (0.0 if since is None else self._clock() - since)

    def run(self, collective: Callable[[], Any]) -> Any:
        """Do that, and count its time."""
        self._since = began = self._clock()
        try:
            return collective()
        finally:
            self._since = None
            self._waited_s += self._clock() - began


class Watched:
    """A collective of FSDP's, for the parameters of a unit or for their gradients: then ``group`` has the unit's."""

    def __init__(self, collective: Any, inside: Inside, group: Any = None) -> None:
        self._collective, self.inside, self._group = collective, inside, group
        self.allocate = collective.allocate

    @property  # type: ignore[misc]  # FSDP asks of what class it is before it takes another one
    def __class__(self) -> type[Any]:
        return type(self._collective)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if self._group is not None and self.inside.factor != 1.0:
            input_tensor.mul_(self.inside.factor)
        done = self.inside.run(partial(self._collective, output_tensor, input_tensor, **options))
        # FSDP divides by this number in place of that of the ranks, as if the sum over replicas were made: the merge
        # gives their mean, which is a sum again if each gives as many times its own
        if self._group is not None and self._group.gradient_divide_factor is not None:
            output_tensor.mul_(self.inside.num_replicas)
        return done


def watch(units: Iterable[nn.Module], inside: Inside) -> None:
    """Count the time of the units' collectives, and scale this rank's gradients as it does.

    A unit has others if the loop has set some since they were watched.
    """
    for group in (group for unit in units for group in _groups_of(unit)):
        gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
        if getattr(gather, "inside", None) is not inside:
            gather = Watched(_plain(gather), inside)
        if getattr(scatter, "inside", None) is not inside:
            scatter = Watched(_plain(scatter), inside, group)
        _set_collectives(group, gather, scatter)


def check_reduction(units: Iterable[nn.Module], num_ranks: int) -> None:
    """Raise ``ValueError`` if gradients are reduced in a way that cannot be followed; ``num_ranks``: of a replica."""
    for group in (group for unit in units for group in _groups_of(unit)):
        if group._all_reduce_hook is not None:
            raise ValueError(
                "set_all_reduce_hook(...): FSDP would call it with the gradients of one replica, before those of all "
                "are merged. Leave it out: change a gradient by parameter.register_post_accumulate_grad_hook(...), or "
                "the merged ones after the block"
            )
        if num_ranks == 1 and group.gradient_divide_factor is not None:
            raise ValueError(
                f"set_gradient_divide_factor({group.gradient_divide_factor}) with replicas of one rank, in which FSDP "
                "reduces nothing: leave fully_shard() and mesh= out, and multiply the loss by ranks / factor"
            )


def unwatch(units: Iterable[nn.Module]) -> None:
    """Let the units have their own collectives again."""
    for group in (group for unit in units for group in _groups_of(unit)):
        _set_collectives(group, _plain(group._all_gather_comm), _plain(group._reduce_scatter_comm))


def _set_collectives(group: Any, gather: Any, scatter: Any) -> None:
    group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def _plain(collective: Any) -> Any:
    return collective._collective if isinstance(collective, Watched) else collective


def waits_of(units: Sequence[Any]) -> list[tuple[Any, str]]:
    """Where FSDP waits for other ranks, or lets a device wait: objects, and the names of their methods.

    Only the unit's own part of a pass is between these calls, whatever is fetched ahead, nested or computed again.
    """
    names = ("pre_forward", "pre_backward", "post_backward", "unshard", "wait_for_unshard")
    roots = [(unit._get_fsdp_state(), "_root_post_backward_final_callback") for unit in units]
    return [*roots, *((group, name) for unit in units for group in _groups_of(unit) for name in names)]


def offloads(units: Iterable[nn.Module]) -> bool:
    """Whether shards are kept on the CPU while a device computes."""
    groups = (group for unit in units for group in _groups_of(unit))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same object at each call; all of another tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it would be a view, in autograd's graph
        local: Tensor = tensor.to_local()
    return local


def around(shard: Tensor, like: Tensor) -> Tensor:
    """A tensor as ``like``; if that is a DTensor, one of which this rank has ``shard`` itself, and no view of it."""
    return DTensor(shard, like._spec, requires_grad=False) if isinstance(like, DTensor) else shard  # type: ignore[no-untyped-call]


def lay_out(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient that is sharded as its parameter is; it may come as a sum that is still to be made over ranks."""
    if not isinstance(like, DTensor) or gradient.placements == like.placements:  # type: ignore[attr-defined]
        return gradient
    with torch.no_grad():
        laid_out = gradient.redistribute(placements=like.placements)  # type: ignore[attr-defined]
        local = laid_out.to_local()
        return around(local.wait() if isinstance(local, AsyncCollectiveTensor) else local, like)


def is_copied(parameter: Tensor, num_ranks: int) -> bool:
    """Whether the ranks of a replica, which are so many, have copies of its elements."""
    if not isinstance(parameter, DTensor):
        return num_ranks > 1
    mesh = parameter.device_mesh
    shards = [size for each, size in zip(parameter.placements, mesh.shape, strict=True) if each.is_shard()]
    return math.prod(shards) < num_ranks


def _params_of(groups: Iterable[Any]) -> Iterator[Any]:
    return (own for group in groups for own in group.fsdp_params)


def _groups_of(unit: Any) -> list[Any]:
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups
