"""A module's other state, which its forward passes change beside gradients: equal on all ranks after each step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.device import device_of
from straggle.backward.hooks import ModuleHook
from straggle.merge.options import Buffers
from straggle.merge.rows.telemetry import UNCHANGED, UNFINISHED, UNSETTLED
from straggle.merge.state.averages import Averages
from straggle.merge.state.exchange import NOTHING_GIVEN, Given
from straggle.merge.state.held import BufferTables, Held, held_by
from straggle.merge.state.others import Others
from straggle.merge.wire.contents import Fingerprint, digests, fingerprint, number_of

_log = logging.getLogger(__name__)
_UNCHANGED = Given(mark=UNCHANGED)
_FIRST_STEPS = 3  # in which all elements are compared, to find the tensors that change without a trace


class MergedState(Protocol):
    """A merged step's results for this state.

    ``sent``: the tensors of the `Exchange`; ``None`` if the groups changed during it. ``stood_in``: this rank's last
    part has not reached its peers. ``finished_ranks``: those whose forward passes were complete.
    """

    @property
    def sent(self) -> Mapping[str, Tensor] | None: ...
    @property
    def stood_in(self) -> bool: ...
    @property
    def finished_ranks(self) -> Sequence[int]: ...


class ModuleState:
    """The persistent buffers and frozen parameters of a wrapped module; all on its training thread.

    Changes count from the values with which the rank enters a step. Small buffers of numbers are averaged over the
    ranks whose forward passes were complete, in one message with the gradients (`averages.py`). The others are
    compared, and sent only if they differ (`exchange.py`): floating-point tensors are averaged, the rest is taken from
    the lowest such rank. A rank whose forward pass was not complete loses its own change. ``held``: the tensors that
    are kept equal, by name.

    On a device that is a queue, the host waits for it in the first steps, in those in which the ranks compare their
    state, in those in which one of the others was written to or replaced, and if no rank's forward pass was complete.
    """

    def __init__(self, module: nn.Module, choice: Buffers, rank: int, device: torch.device) -> None:
        self._module, self._rank, self._choice = module, rank, choice
        self._device = device
        self._average = _queued_averages() if device_of(device).is_queued else Averages
        held = self._found()
        self._averages = self._averages_of(held)
        self._handles: list[RemovableHandle] = []
        self._owners: dict[int, str] = {}  # owners of buffers whose forward pass is seen
        self._ran: set[int] = set()  # owners that ran in this step
        self._ever_ran: set[int] = set()
        self._unsettled: set[str] = set()  # names that may differ on peers, and that this rank cannot restore
        self._said: set[str] = set()
        self._given = Given()
        self._changed: list[str] = []
        self._odd = frozenset[int]()  # averaged buffers without a mean in this step
        self._step = 0
        self._looks = False  # at all elements, in this step
        self._others = Others(())
        self._look(held)

    @property
    def numel(self) -> int:
        """How many numbers (float64) the message of the averaged buffers has."""
        return 0 if self._averages is None else self._averages.numel

    def _found(self) -> list[Held]:
        return [one for one in held_by(self._module) if not (one.is_buffer and self._choice == "local")]

    def _look(self, held: Sequence[Held]) -> None:
        """Note the module's present state tensors."""
        self._tables = BufferTables(self._module)
        self.held = {one.name: one for one in held}
        self._others.follow(one for one in held if one.name not in self._averaged_names)
        for one in held:
            if one.is_buffer and id(one.owner) not in self._owners:
                self._owners[id(one.owner)] = one.name.rpartition(".")[0]
                if not isinstance(one.owner, torch.jit.ScriptModule):
                    self._handles.append(one.owner.register_forward_hook(ModuleHook(self._forward_over)))

    def _averages_of(self, held: Sequence[Held]) -> Averages | None:
        averaged = [one for one in held if one.is_buffer and self._average.take(one.object, self._device)]
        return self._average(averaged, self._device) if averaged else None

    def look_again(self) -> None:
        """Look again, between two steps: other parameters are frozen now."""
        self._look(self._found())

    def modules_changed(self) -> None:
        """Look again, between two steps: modules were replaced, on all ranks alike, and `numel` may change."""
        self.close()
        self._handles.clear()
        # before looking again: `_look` hooks only the owners that it does not know
        self._owners.clear()  # keyed by ids of modules, which new modules may have by now
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
        """Remove all hooks, and say what is known by now."""
        self._say_left_out()
        for handle in self._handles:
            handle.remove()

    # -- a step

    def begin(self, *, checked: bool) -> None:
        """A step begins; ``checked``: the ranks compare their state in it, so all elements are compared."""
        if not self._tables.unchanged():
            self._notice_others()
        self._step += 1
        if not self.held:
            return
        self._ran.clear()
        self._looks = checked or self._step <= _FIRST_STEPS
        # before the buffers are begun again, which forgets what the device has told
        self._say_left_out()
        if self._averages is not None and self._averages.begin():
            self._look(list(self.held.values()))
        self._others.begin(by_content=self._looks)

    def _notice_others(self) -> None:
        """Follow buffers that were replaced or added."""
        self._tables = BufferTables(self._module)
        found = self._found()
        if [one.name for one in found] != list(self.held):
            self._look(found)

    def fingerprint(self, trained: Iterable[tuple[str, Tensor]]) -> Fingerprint:
        """The fingerprint of all that must be equal on all ranks: these parameters and this state."""
        held = ((name, tensor) for name, one in self.held.items() if (tensor := one.tensor) is not None)
        return fingerprint([*trained, *held])

    def give(self, *, finished: bool, forward_ran: bool) -> Given:
        """This rank's part of the merge; ``finished``: all its forward passes, possibly none, were complete.

        ``forward_ran``: the entire model's ran, so a module whose own forward pass cannot be seen ran, too.
        """
        if not self._tables.unchanged():
            self._notice_others()
        if not self.held:
            return _UNCHANGED if finished else NOTHING_GIVEN
        # first: buffers that have no mean in this step are among what has changed
        self._odd = odd = frozenset[int]() if self._averages is None else self._averages.end(looks=self._looks)
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
            if owner in self._ever_ran or not forward_ran  # else it ran without hooks, as in a compiled module
        }
        # after `idle` is known: a module that runs now for the first time did not run before
        self._ever_ran |= self._ran
        bad = self._others.with_bad(self._tensors(self._changed))
        message = None
        if self._averages is not None:
            gives = if_changed = frozenset[int]()
            if self._gives_buffers:
                without = odd | self._averages.retired
                gives, if_changed = (own - without for own in self._averages_given(idle))
            message, bad_averages = self._averages.message(gives, if_changed)
            bad |= {self._averaged[number].name for number in bad_averages}
        self._say_bad(bad)
        digests = self._digests([*self._changed, *sorted(self._unsettled)])
        # one number for all changes: ranks exchange state only if these marks differ
        mark = number_of(repr(sorted(digests.items()))) if digests else UNCHANGED
        return Given(message, mark, digests, self.held, partial(self._is_given, idle, bad, digests.keys()))

    @property
    def _gives_buffers(self) -> bool:
        return self._choice == "mean" or self._rank == 0

    def _averages_given(self, idle: set[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of the averaged buffers whose modules ran, and of the rest, which may have changed anyway."""
        held = frozenset(range(len(self._averaged)))
        if not idle:
            return held, frozenset()
        ran = frozenset(number for number in held if id(self._averaged[number].owner) not in idle)
        return ran, held - ran

    def _is_given(self, idle: set[int], bad: set[str], changed: Iterable[str], name: str) -> bool:
        held = self.held[name]
        if name in bad or (held.is_buffer and not self._gives_buffers):
            return False
        return name in changed or not held.is_buffer or id(held.owner) not in idle

    def _digests(self, names: Iterable[str]) -> dict[str, int]:
        tensors = self._tensors(names)
        return dict(zip(tensors, digests(list(tensors.values())), strict=True))

    def _tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = ((name, self.held[name].tensor) for name in names if name in self.held)
        return {name: tensor for name, tensor in found if tensor is not None}

    def apply(self, message: Tensor, merged: MergedState, *, took_part: bool) -> None:
        """Set the module's state to the agreed one; ``message``: the sum of all ranks' messages.

        ``took_part``: whether this rank did.
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
            # before the new tensors are set: those of peers settle the rest
            self._unsettled -= own.changed.keys()  # if they were equal on all ranks, nothing was sent
        for name, tensor in (sent or {}).items():
            self._set(name, tensor)
        kept = [name for name in self._changed if name not in (sent or {})]
        # after what was sent: only the changes that nobody sent are left, and are set back
        self._settle(kept, own, sent, say=took_part and not self._is_given_by(merged.finished_ranks))
        self._changed = []

    def _settle(self, names: Sequence[str], given: Given, sent: Mapping[str, Tensor] | None, *, say: bool) -> None:
        """Settle changes that were not sent: they are equal on all ranks, or this rank's change is lost."""
        if sent is None:
            self._unsettled |= set(names)
            return
        lost = [name for name in names if not (given.mark > 0 and name in given.changed)]
        for name in lost:
            if name in self._averaged_names:
                continue  # already set with the averages
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
        """Make a buffer that the peers' forward passes have made and this rank's has not."""
        path, _, key = name.rpartition(".")
        try:
            owner = self._module.get_submodule(path)
        except AttributeError:
            return False
        if key not in owner._buffers:
            owner.register_buffer(key, None)
        self.held[name] = Held(name, owner, key, is_buffer=True)
        return True

    # -- warnings, each logged once

    def _is_given_by(self, finished: Sequence[int]) -> bool:
        """Whether one of these ranks gives its state to all."""
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

    def _say_left_out(self) -> None:
        """Name the buffers that were left out in an earlier step, as a device has told by now."""
        if self._averages is not None:
            self._say_bad(self._averaged[number].name for number in self._averages.left_out_before())

    def _once(self, name: str, words: str) -> None:
        if (key := f"{name} {words}") not in self._said:
            self._said.add(key)
            _log.warning("rank %d: %s", self._rank, words)

    # -- what a rank that comes back must know

    def load_module(self, state: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a peer's state of the module, whose buffers may have got their shape since, by ``load(state)``."""
        for name, tensor in state.items():
            path, _, key = name.rpartition(".")
            with contextlib.suppress(AttributeError):
                buffers = self._module.get_submodule(path)._buffers
                if key in buffers and ((own := buffers[key]) is None or own.shape != tensor.shape):
                    buffers[key] = torch.empty_like(tensor, device=None if own is None else own.device)
        load(state)
        # all of it is a peer's now, so no change of this rank's own is left to settle
        self._unsettled.clear()
        self._changed = []

    def state_dict(self) -> dict[str, Any]:
        """What rounding has taken from averaged buffers so far."""
        return {} if self._averages is None else dict(self._averages.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on another rank."""
        if self._averages is not None:
            self._averages.load_state_dict(state)


def _queued_averages() -> type[Averages]:
    """Loaded where there is a device with a queue."""
    from straggle.merge.state.queued_averages import QueuedAverages

    return QueuedAverages
