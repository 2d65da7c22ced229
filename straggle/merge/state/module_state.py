"""A module's other state, the same on all ranks after each step: what its forward passes change beside gradients."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.hooks import ModuleHook
from straggle.merge.fingerprint import Fingerprint, digest, fingerprint, number_of
from straggle.merge.options import Buffers
from straggle.merge.state.averages import Averages, is_averaged
from straggle.merge.state.exchange import NOTHING_GIVEN, Given
from straggle.merge.state.held import BufferTables, Held, held_by
from straggle.merge.state.marks import UNCHANGED, UNFINISHED, UNSETTLED
from straggle.merge.state.others import Others

_log = logging.getLogger(__name__)
_UNCHANGED = Given(mark=UNCHANGED)
_FIRST_STEPS = 3  # in which all elements are looked at, to know which tensors change without a trace


class MergedState(Protocol):
    """What a merged step says of it.

    ``sent``: what came by `Exchange`; ``None``: the groups changed during it. ``stood_in``: what this rank gave last
    has not reached its peers. ``finished_ranks``: those whose forward passes came to their end.
    """

    @property
    def sent(self) -> Mapping[str, Tensor] | None: ...
    @property
    def stood_in(self) -> bool: ...
    @property
    def finished_ranks(self) -> Sequence[int]: ...


class ModuleState:
    """The persistent buffers and frozen parameters of a wrapped module; all on its training thread.

    What they hold when the rank enters a step is what they change from. Small buffers of numbers are averaged over the
    ranks whose forward passes came to their end, in one message with the gradients (`averages.py`). The others are
    compared, and sent only if they are not alike (`exchange.py`): those of floating point are averaged, the rest is
    taken from the lowest such rank. A rank whose forward pass did not come to its end loses its own change.
    ``held``: what is kept the same, by its name.
    """

    def __init__(self, module: nn.Module, choice: Buffers, rank: int, device: torch.device) -> None:
        self._module, self._rank, self._choice = module, rank, choice
        self._device = device
        held = self._found()
        self._averages = self._averages_of(held)
        self._handles: list[RemovableHandle] = []
        self._owners: dict[int, str] = {}  # of buffers: those whose forward pass is seen
        self._ran: set[int] = set()  # in this step
        self._ever_ran: set[int] = set()
        self._unsettled: set[str] = set()  # what peers may hold otherwise, and this rank cannot set back
        self._said: set[str] = set()
        self._given = Given()
        self._changed: list[str] = []
        self._odd = frozenset[int]()  # of the averaged buffers: what has no mean in this step
        self._step = 0
        self._others = Others(())
        self._look(held)

    @property
    def numel(self) -> int:
        """Numbers in the message of the averaged buffers (float64)."""
        return 0 if self._averages is None else self._averages.numel

    def _found(self) -> list[Held]:
        return [one for one in held_by(self._module) if not (one.is_buffer and self._choice == "local")]

    def _look(self, held: Sequence[Held]) -> None:
        """These are what the module holds from here on."""
        self._tables = BufferTables(self._module)
        self.held = {one.name: one for one in held}
        self._others.follow(one for one in held if one.name not in self._averaged_names)
        for one in held:
            if one.is_buffer and id(one.owner) not in self._owners:
                self._owners[id(one.owner)] = one.name.rpartition(".")[0]
                if not isinstance(one.owner, torch.jit.ScriptModule):
                    self._handles.append(one.owner.register_forward_hook(ModuleHook(self._forward_over)))

    def _averages_of(self, held: Sequence[Held]) -> Averages | None:
        averaged = [one for one in held if one.is_buffer and is_averaged(one.object)]
        return Averages(averaged, self._device) if averaged else None

    def look_again(self) -> None:
        """Other parameters are frozen now; between two steps."""
        self._look(self._found())

    def modules_changed(self) -> None:
        """The module has other modules now, alike on all ranks, and `numel` may be another; between two steps."""
        self.close()
        self._handles.clear()
        self._owners.clear()  # by the identity of modules, which that of a new one may be by now
        self._ever_ran.clear()
        held = self._found()
        self._averages = self._averages_of(held)
        self._look(held)

    @property
    def _averaged(self) -> Sequence[Held]:
        return () if self._averages is None else self._averages.held

    @property
    def _averaged_names(self) -> set[str]:
        retired = set() if self._averages is None else self._averages.retired
        return {one.name for number, one in enumerate(self._averaged) if number not in retired}

    def _forward_over(self, module: nn.Module, *_args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._ran.add(id(module))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    # -- a step

    def begin(self, *, checked: bool) -> None:
        """A step begins; ``checked``: the ranks compare what they hold in it, so that all elements are looked at."""
        if not self._tables.unchanged():
            self._notice_others()
        self._step += 1
        if not self.held:
            return
        self._ran.clear()
        if self._averages is not None and self._averages.begin():
            self._look(list(self.held.values()))
        self._others.begin(by_content=checked or self._step <= _FIRST_STEPS)

    def _notice_others(self) -> None:
        """A buffer was replaced, or there are others."""
        self._tables = BufferTables(self._module)
        found = self._found()
        if [one.name for one in found] != list(self.held):
            self._look(found)

    def fingerprint(self, trained: Iterable[tuple[str, Tensor]]) -> Fingerprint:
        """Of all that is to be equal on all ranks: these parameters, and what this holds."""
        held = ((name, tensor) for name, one in self.held.items() if (tensor := one.tensor) is not None)
        return fingerprint([*trained, *held])

    def give(self, *, finished: bool, forward_ran: bool) -> Given:
        """What this rank gives now; ``finished``: its forward passes came to their end, of which it may have had none.

        ``forward_ran``: the entire model's did, so that a module whose own forward pass cannot be seen ran too.
        """
        if not self._tables.unchanged():
            self._notice_others()
        if not self.held:
            return _UNCHANGED if finished else NOTHING_GIVEN
        self._odd = odd = frozenset[int]() if self._averages is None else self._averages.end()
        reshaped = [one.name for number in odd if (one := self._averaged[number]).object is not None]
        self._changed = [*self._others.changed(), *reshaped]
        if finished:
            self._given = self._of_finished(odd, forward_ran=forward_ran)
        else:
            lost = [name for name in self._changed if not self.held[name].is_buffer] + sorted(self._unsettled)
            self._given = Given(None, UNSETTLED if lost else UNFINISHED, self._digests(lost), self.held)
        return self._given

    def _of_finished(self, odd: frozenset[int], *, forward_ran: bool) -> Given:
        idle = {
            owner
            for owner in self._owners.keys() - self._ran
            if owner in self._ever_ran or not forward_ran  # else it ran where no hook is called, as in a compiled one
        }
        self._ever_ran |= self._ran
        bad = self._with_bad_numbers()
        message = None
        if self._averages is not None:
            gives = frozenset[int]()
            if self._gives_buffers:
                gives = self._averages_given(idle) - odd - self._averages.retired
            message, bad_averages = self._averages.message(gives)
            bad |= {self._averaged[number].name for number in bad_averages}
        self._say_bad(bad)
        digests = self._digests([*self._changed, *sorted(self._unsettled)])
        mark = number_of(repr(sorted(digests.items()))) if digests else UNCHANGED
        return Given(message, mark, digests, self.held, partial(self._is_given, idle, bad, digests.keys()))

    @property
    def _gives_buffers(self) -> bool:
        return self._choice == "mean" or self._rank == 0

    def _averages_given(self, idle: set[int]) -> frozenset[int]:
        """The numbers of the averaged buffers whose modules ran, or which changed all the same."""
        held = range(len(self._averaged))
        if not idle:
            return frozenset(held)
        assert self._averages is not None
        ran = {number for number in held if id(self._averaged[number].owner) not in idle}
        return frozenset(ran) | self._averages.changed()

    def _is_given(self, idle: set[int], bad: set[str], changed: Iterable[str], name: str) -> bool:
        held = self.held[name]
        if name in bad or (held.is_buffer and not self._gives_buffers):
            return False
        return name in changed or not held.is_buffer or id(held.owner) not in idle

    def _digests(self, names: Iterable[str]) -> dict[str, int]:
        tensors = ((name, self.held[name].tensor) for name in names if name in self.held)
        return {name: digest(tensor) for name, tensor in tensors if tensor is not None}

    def _with_bad_numbers(self) -> set[str]:
        tensors = ((name, self.held[name].tensor) for name in self._changed)
        return {name for name, tensor in tensors if tensor is not None and self._others.has_bad(name, tensor)}

    def apply(self, message: Tensor, merged: MergedState, *, took_part: bool) -> None:
        """Set what the module holds to what all ranks have agreed on; ``message`` is the sum of all ranks' messages.

        ``took_part``: this rank did.
        """
        sent, stood_in = merged.sent, merged.stood_in
        if self._averages is not None:
            given = frozenset[int]() if stood_in or self._given.mark <= 0 else self._odd
            lost = self._averages.apply(message, given)
            if took_part and lost and not self._is_given_by(merged.finished_ranks):
                names = (self._averaged[number].name for number in lost & self._averages.changed() - self._odd)
                self._say_lost(name for name in names if name not in (sent or {}))
        if not (self._changed or sent or self._unsettled):
            return
        own = Given() if stood_in else self._given
        if sent is not None and not stood_in:
            self._unsettled -= own.changed.keys()  # where they were alike on all ranks, nothing was sent
        for name, tensor in (sent or {}).items():
            self._set(name, tensor)
        kept = [name for name in self._changed if name not in (sent or {})]
        self._settle(kept, own, sent, say=took_part and not self._is_given_by(merged.finished_ranks))
        self._changed = []

    def _settle(self, names: Sequence[str], given: Given, sent: Mapping[str, Tensor] | None, *, say: bool) -> None:
        """Of what changed here and was not sent: it is alike on all ranks, or this rank's change is lost."""
        if sent is None:
            self._unsettled |= set(names)
            return
        lost = [name for name in names if not (given.mark > 0 and name in given.changed)]
        for name in lost:
            if name in self._averaged_names:
                continue  # set with the averages
            if not self._others.restore(self.held[name]):
                self._unsettled.add(name)
        if say:
            self._say_lost(lost)

    def _set(self, name: str, tensor: Tensor) -> None:
        self._unsettled.discard(name)
        if name not in self.held and not self._make_room(name):
            _log.warning("rank %d has no %s, which its peers have: it is left out here", self._rank, name)
            return
        self.held[name].put(tensor)

    def _make_room(self, name: str) -> bool:
        """For a buffer that the peers' forward passes have made, and this rank's has not."""
        path, _, key = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return False
        if key not in owner._buffers:
            owner.register_buffer(key, None)
        self.held[name] = Held(name, owner, key, is_buffer=True)
        return True

    # -- what is said of it, once

    def _is_given_by(self, finished: Sequence[int]) -> bool:
        """Whether one of these ranks gives what it holds to all."""
        return bool(finished) if self._choice != "rank0" else 0 in finished

    def _say_lost(self, names: Iterable[str]) -> None:
        whose = "no rank's" if self._choice != "rank0" else "not rank 0's"
        for name in names:
            self._once(
                name,
                f"{self.held[name].kind} changed in a step in which {whose} forward pass came to its end: no rank "
                "gave the change a weight, and it was set back to what it was before the step",
            )

    def _say_bad(self, names: Iterable[str]) -> None:
        for name in names:
            self._once(name, f"{self.held[name].kind} has NaN or infinite elements now: it is left out of the merge")

    def _once(self, name: str, words: str) -> None:
        if (key := f"{name} {words}") not in self._said:
            self._said.add(key)
            _log.warning("rank %d: %s", self._rank, words)

    # -- what a rank that comes back must know

    def load_module(self, state: Mapping[str, Tensor]) -> None:
        """Give the module the ``state_dict`` of a peer, whose buffers may have taken their shape since."""
        for name, tensor in state.items():
            path, _, key = name.rpartition(".")
            with contextlib.suppress(AttributeError):
                buffers = self._module.get_submodule(path)._buffers
                if key in buffers and ((own := buffers[key]) is None or own.shape != tensor.shape):
                    buffers[key] = torch.empty_like(tensor, device=None if own is None else own.device)
        self._module.load_state_dict(state)
        self._unsettled.clear()
        self._changed = []

    def state_dict(self) -> dict[str, Any]:
        """What rounding took from averaged buffers so far."""
        return {} if self._averages is None else dict(self._averages.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on another rank."""
        if self._averages is not None:
            self._averages.load_state_dict(state)
