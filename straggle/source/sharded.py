"""The source of a model that is sharded over the ranks of each replica, by ``fully_shard`` (FSDP2) for instance.

A rank merges its own shards. FSDP gives it their gradients, in the middle of its own work, and a pass is left only
between two of its units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from straggle.backward.compiled import not_compiled
from straggle.backward.device import device_of
from straggle.backward.hooks import (
    ModuleHook,
    ParameterHooks,
    UnitObserver,
    put_gradients,
    take_gradient,
    tensors_in,
)
from straggle.backward.passes import after_callbacks, current_run, in_backward
from straggle.source.fsdp2 import (
    Inside,
    MethodHooks,
    UnitStates,
    around,
    check_reduction,
    is_copied,
    lay_out,
    place_of_data,
    places_of,
    shard_of,
    sum_only,
    units_of,
    unwatch,
    watch,
)
from straggle.source.held_state import held_state, hold_state
from straggle.source.kept import KeptGradients
from straggle.source.replicated import ReplicatedSource
from straggle.source.source import Slot

_NO_RUN = -2  # is no number of a run, nor that of being outside of all
_LOST_PASSES = (
    "an error was caught in a backward pass inside of `with model.step()` while FSDP keeps the gradients of earlier "
    "passes (set_requires_gradient_sync(False)), which are lost with it: let the error leave the block, or write "
    "model.step(num_microbatches=...) and let each pass reduce its gradients"
)
_NOT_REDUCED = (
    "FSDP keeps the gradient of parameter {} for a later pass (set_requires_gradient_sync(False)), and the step ends: "
    "it can be merged only if the last backward pass of the block reduces it. Call set_requires_gradient_sync(True) "
    "before that pass, have all passes that FSDP accumulates in one block, and let an error of one of them leave it"
)


class Shard:
    """This rank's part of one parameter, with its gradient as a plain tensor; ``p.grad`` is the DTensor around that."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        """The gradient in ``p.grad``: the same object until another one is put there."""
        gradient = self.parameter.grad
        return None if gradient is None else shard_of(gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self.parameter.grad = None if gradient is None else around(gradient, self.parameter)


class ShardedSource(ReplicatedSource):
    """The sharded parameters of one module; each slot is this rank's shard of one of them (`GradientSource`)."""

    between_units = True

    def __init__(self, module: nn.Module, num_ranks: int, num_replicas: int) -> None:
        """``num_ranks``: of a replica."""
        self._num_ranks = num_ranks
        self._units = units_of(module)
        self._states = UnitStates(self._units)
        self._settings = self._states.settings()
        self._shards: list[Shard] = []
        self._hooks: UnitHooks | None = None
        super().__init__(module)
        if self.slots[0].device.type == "cpu":
            sum_only(self._units)
        self.inside = Inside(num_replicas)
        self.follow_reduction()

    @property
    def own_data(self) -> int:
        """This rank's number among those of its replica that compute other samples."""
        return place_of_data(self._units)

    def renew(self) -> list[nn.Parameter]:
        self._states.reshard()
        new = super().renew()
        self._shards[:] = map(Shard, self.all)
        self._take_shards()
        self.copied = [index for index, own in enumerate(self.all) if is_copied(own, self._num_ranks)]
        return new

    def check(self) -> str:
        if self._states.in_pass:  # the loop caught an error of a pass between two steps
            self._states.forget()
        self._states.reshard()
        if any(slot.tensor.data_ptr() != shard_of(slot.parameter).data_ptr() for slot in self.slots):
            self._take_shards()  # FSDP has other memory for them since a state was loaded
        return super().check()

    def _take_shards(self) -> None:
        self.slots[:] = [Slot(name, shard_of(own).detach(), own) for name, own in self.named]

    def attach(self, observer: UnitObserver) -> UnitHooks:
        """Report each gradient when FSDP has reduced it, and check where a unit begins."""
        self._hooks = UnitHooks(self._module, self.all, observer, self._shards, self._states, self.follow_reduction)
        return self._hooks

    def keep(self, merged: Sequence[Tensor | None]) -> KeptGradients:
        self._settings = self._states.settings()
        return KeptGradients(self._shards, merged, is_queued=device_of(self.slots[0].device).is_queued)

    def place(self, gradients: Sequence[Tensor | None]) -> None:
        put_gradients(zip(self._shards, gradients, strict=True))

    def module_state(self) -> dict[str, Any]:
        self._states.reshard()
        return held_state(self._module)

    def load_module(self, state: Mapping[str, Any]) -> None:
        hold_state(self._module, state)

    def given(self, state: Any) -> Any:
        """This rank's shards of it, as plain tensors."""
        self._states.reshard()
        return given(state, self._module.parameters())

    def taken(self, state: Any) -> Any:
        """The same shards, as this rank's."""
        self._states.reshard()  # a pass that was left may have kept whole parameters
        return taken(state, [*self._module.parameters()])

    def of_parameters(self, gradients: Mapping[int, Tensor]) -> Sequence[tuple[nn.Parameter, Tensor]]:
        return [(self.all[index], around(gradient, self.all[index])) for index, gradient in gradients.items()]

    def pass_over(self) -> None:
        if self._hooks is not None:
            self._hooks.pass_over()

    def follow_reduction(self) -> None:
        """FSDP reduces the gradients of the next backward pass as the loop has set it by now."""
        check_reduction(self._units, self._num_ranks)
        watch(self._units, self.inside)

    def step_over(self, *, left: bool) -> None:
        accumulated = self._hooks is not None and self._hooks.step_over()
        if left or self._states.in_pass:
            self._states.set_again(self._settings)
            self._states.forget()
        elif accumulated and (names := self._states.keeping()):
            self._states.forget()
            raise RuntimeError(_NOT_REDUCED.format(names[0]))
        elif self._states.has_prefetched:
            self._states.reset()
        self._states.reshard()  # all replicas alike, whatever ran last


class _Call:
    """One forward pass of a unit; ``run``: of the engine, in which its backward pass has begun."""

    def __init__(self) -> None:
        self.run = _NO_RUN

    def begins_in(self, run: int) -> None:
        """Its backward pass begins."""
        self.run = run


class UnitHooks(ParameterHooks):
    """Hooks on the sharded parameters and on the units of one model.

    A unit that is called more than once gives its gradients with the last of its backward passes, or at the end.
    """

    _observer: UnitObserver

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        observer: UnitObserver,
        shards: Sequence[Shard],
        states: UnitStates,
        follow_reduction: Callable[[], None],
    ) -> None:
        self._shards, self._states, self._follow_reduction = shards, states, follow_reduction
        self._units, self._fsdp = places_of(module), units_of(module)
        self._run: int | None = None  # the backward pass that began, and has not come to its end
        self._accumulated = False  # FSDP had kept gradients when a backward pass of the step was over
        self._held: dict[int, Tensor | None] = {}  # gradients that are held back, as they are in ``p.grad``
        self._to_come = [0] * len(self._units)  # backward passes of each unit: for each forward pass one
        self._unit_of = self._owners(parameters)
        super().__init__(module, parameters, observer)
        self._of_units = self._watch_units()

    def _owners(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """For each parameter the innermost unit that it is in."""
        innermost: dict[nn.Parameter, int] = {}
        for number, unit in enumerate(self._units):  # inner ones come later
            innermost |= dict.fromkeys(unit.parameters(), number)
        return [innermost.get(own, -1) for own in parameters]  # without FSDP, some are in none

    def _watch_units(self) -> list[Any]:
        """All of them before FSDP's own: it has not begun a unit yet where the rank may leave."""
        model, handles = self._module, []
        for number, unit in enumerate(self._units):
            if unit is not model:  # where that begins, the open step checks
                handles.append(
                    unit.register_forward_pre_hook(ModuleHook(partial(self._before_unit, number)), prepend=True)
                )
            # after the unit's own forward pass: only an output that it has given tells when its backward pass begins
            handles.append(unit.register_forward_hook(ModuleHook(partial(self._after_unit, number)), prepend=True))
        handles.append(model.register_forward_pre_hook(ModuleHook(self._before_model), prepend=True))
        return [*handles, MethodHooks(self._fsdp, self._before_unit, self._after_unit)]

    def check_at(self, modules: Sequence[str]) -> None:
        """It is checked between units, whatever the stages are."""

    def renew(self) -> None:
        self._unit_of = self._owners(self._parameters)
        super().renew()

    def close(self) -> None:
        super().close()
        unwatch(self._fsdp)
        for handle in self._of_units:
            handle.remove()

    # -- gradients

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return partial(self._reduced, index)

    def _reduced(self, index: int, parameter: Tensor) -> None:
        """FSDP has reduced a gradient, and goes on with the next of the unit: nothing may leave the pass here."""
        if parameter.grad is not None:
            # at once: FSDP leaves it in another layout, and the optimizer would see that one
            parameter.grad = lay_out(parameter.grad, parameter)
        # a unit that is called again adds to it: what is there now is a part
        if self._is_held_back(index):
            self._held[index] = parameter.grad
        else:
            self._held.pop(index, None)
            self._observer.gradient_ready(index, self._shards[index])

    def _is_held_back(self, index: int) -> bool:
        return self._unit_of[index] >= 0 and self._to_come[self._unit_of[index]] > 0

    def pass_over(self) -> None:
        """The pass has come to its end: report what was held back."""
        held, self._held = self._held, {}
        for index in sorted(held):
            if (shard := self._shards[index]).grad is not None:
                self._observer.gradient_ready(index, shard)
        self._to_come = [0] * len(self._units)

    def step_over(self) -> bool:
        """Forget what was held back of a pass that was left. Whether FSDP had kept gradients of a pass of the step."""
        for index, gradient in self._held.items():
            if (shard := self._shards[index]).parameter.grad is gradient:  # and not one that was kept from before
                take_gradient(shard)
        # asked before it is forgotten: who calls has to refuse a step whose kept gradients are lost
        accumulated, self._accumulated = self._accumulated, False
        self._forget_pass()
        return accumulated

    def _forget_pass(self) -> None:
        self._run, self._held, self._to_come = None, {}, [0] * len(self._units)

    # -- where units begin

    @not_compiled
    def _before_model(self, _module: nn.Module, _args: Any) -> None:
        if not in_backward() and (self._run is not None or self._states.in_forward):  # not a checkpoint's
            self._recover()

    def _recover(self) -> None:
        """A pass was left in the middle by an error that the loop caught, and the step goes on with another one."""
        if self._run is None:
            self._states.reset()
        else:
            self._states.forget()
            if self._accumulated:
                raise RuntimeError(_LOST_PASSES)
        self._forget_pass()

    @not_compiled
    def _before_unit(self, number: int, _module: nn.Module, _args: Any) -> None:
        if in_backward():
            return
        if self._run is not None or (self._fsdp and self._states.begins_again(self._units[number])):
            self._recover()
        self._observer.check(2 * number + 1)

    @not_compiled
    def _after_unit(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        """A unit's backward pass begins with the gradient of one of its outputs."""
        if not torch.is_grad_enabled():
            return
        begins = partial(self._backward_begins, number, _Call())
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]
        if outputs and not in_backward():
            self._to_come[number] += 1

    def _backward_begins(self, number: int, call: _Call, _gradient: Tensor) -> None:
        if call.run == (run := current_run()):  # another of its outputs: FSDP has begun it
            return
        # noted before anything may leave: the unit's other outputs come to this hook, too
        call.begins_in(run)
        self._to_come[number] = max(0, self._to_come[number] - 1)
        if self._run is None:
            self._follow_reduction()
            self._run = run
            # after FSDP's own callback, which reduces what is left: until then the pass is not over
            after_callbacks(self._run_over)
            self._observer.backward_begins()
        # last: it may leave the pass, and what was noted above has to hold then
        self._observer.check(2 * number + 2)

    @not_compiled
    def _run_over(self) -> None:
        self._run = None
        self._accumulated = self._accumulated or self._states.accumulate


_LIKE, _SHARD = "straggle.sharded_like", "straggle.shard"


def given(state: Any, parameters: Iterable[nn.Parameter]) -> Any:
    """``state`` on its way to the rank with the same shards in another replica: plain tensors in place of DTensors.

    There they are built again, by the parameter that is sharded in the same way. Raises ``TypeError`` for another one.
    """
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
