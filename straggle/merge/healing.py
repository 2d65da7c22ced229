"""How a rank that comes back gets the state of the job: from one member, in the background, between two steps.

The members let it in after step S. The one that leads copies its state as it enters step S + 1 and sends it, while the
newcomer takes part at weight 0. With that state its training thread goes on from step S + 1, and takes what has been
merged meanwhile from the ring.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from straggle.merge.channel import PeerFailed
from straggle.merge.coordinator import Coordinator
from straggle.merge.elastic import ElasticChannel, Regrouping
from straggle.merge.state_wire import Encoded, encode, receive, send
from straggle.merge.view import View
from straggle.policies.history import History

_SEND_S = 60.0
_MAX_BYTES = 1 << 40

_log = logging.getLogger(__name__)


class Healing:
    """Gives and takes state, for one wrapped model. All but `arrived` is called by the training thread."""

    def __init__(
        self, channel: ElasticChannel, coordinator: Coordinator, regrouping: Regrouping, module: nn.Module
    ) -> None:
        self._channel, self._membership = channel, channel.membership
        self._coordinator = coordinator
        self._regrouping = regrouping
        self._module = module
        self._registered: Mapping[str, Any] = {}
        self._arrival: _Arrival | None = None
        regrouping.on_joined = self.let_in

    def register(self, objects: Mapping[str, Any]) -> None:
        """What has a ``state_dict`` and is to be given with the model."""
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(f"{name}={value!r} has no state_dict() and load_state_dict()")
        self._registered = {**self._registered, **objects}

    def before_step(self) -> None:
        """Between two steps: give this rank's state to a newcomer, or wait for that of another."""
        coordinator, step = self._coordinator, self._coordinator.training.step
        if coordinator.gives_state:
            self._give(step)
        while (begins := coordinator.absent_until) > step:
            coordinator.check_ended()
            if begins < sys.maxsize or step < self._membership.furthest_step:
                return  # its peers have made this step without it
            time.sleep(0.01)
        if self._arrival is not None and self._arrival.view.step == step:
            self._take(loaders_too=False)

    def take_first(self) -> None:
        """Of a rank that comes to a running job, before its first step: wait for the state, and go on from there."""
        until = time.monotonic() + self._channel.give_up_s
        while self._coordinator.absent_until == sys.maxsize or self._arrival is None:
            self._coordinator.check_ended()
            if time.monotonic() > until:
                raise PeerFailed(
                    f"rank {self._channel.rank} has asked to be let in, and the members (ranks "
                    f"{list(self._membership.view.ranks)}) have not answered within "
                    f"give_up_s={self._channel.give_up_s:g}"
                )
            time.sleep(0.01)
        self._take(loaders_too=True)

    def let_in(self, view: View) -> None:
        """This rank is a member again, from ``view.step`` on; called by the thread that leads it from view to view."""
        self._arrival = _Arrival(self._channel, view)

    def _give(self, step: int) -> None:
        began_at = time.monotonic()
        encoded = encode(self._state())
        _log.info("rank %d: copied its state in %.3f s", self._channel.rank, time.monotonic() - began_at)
        threading.Thread(target=self._send, args=(encoded, step), name="straggle-healing", daemon=True).start()

    def _state(self) -> dict[str, Any]:
        coordinator = self._coordinator
        return {
            "module": dict(self._module.state_dict()),
            "registered": {name: value.state_dict() for name, value in self._registered.items()},
            "history": coordinator.history.tensors(),
            "deadline_s": coordinator.deadline.seconds,
        }

    def _send(self, encoded: Encoded, step: int) -> None:
        until = time.monotonic() + _SEND_S
        while not ((view := self._membership.view).giver == self._channel.rank and view.step == step):
            if time.monotonic() > until or view.step > step:
                return  # it was not let in after all
            time.sleep(0.005)
        for rank in sorted(view.joined):
            try:
                send(encoded, _pair(self._channel, view, rank, place=0), 1)
            except (RuntimeError, ValueError) as error:
                _log.warning("rank %d could not send its state to rank %d: %s", self._channel.rank, rank, error)

    def _take(self, *, loaders_too: bool) -> None:
        """Load what arrived; ``loaders_too``: the loop has not begun, so what it iterates over begins there as well."""
        arrival, self._arrival = self._arrival, None
        assert arrival is not None
        while arrival.state is None and arrival.error is None:
            self._coordinator.check_ended()
            time.sleep(0.002)
        if arrival.state is None:
            raise RuntimeError(f"rank {self._channel.rank}: the state of the job did not come: {arrival.error}")
        state = arrival.state
        self._module.load_state_dict(state["module"])
        for name, own in state["registered"].items():
            value = self._registered.get(name)
            if value is not None and (loaders_too or not hasattr(value, "__iter__")):
                value.load_state_dict(own)
        self._coordinator.healed(arrival.view.step, History.from_tensors(state["history"]), state["deadline_s"])
        _log.warning("rank %d takes part again from step %d on", self._channel.rank, arrival.view.step)


class _Arrival:
    """A state on its way to this rank, on a thread of its own."""

    def __init__(self, channel: ElasticChannel, view: View) -> None:
        self.view = view
        self.state: dict[str, Any] | None = None
        self.error: Exception | None = None
        self._channel = channel
        threading.Thread(target=self._receive, name="straggle-healing", daemon=True).start()

    def _receive(self) -> None:
        try:
            pair = _pair(self._channel, self.view, self._channel.rank, place=1)
            state = receive(pair, 0, max_bytes=_MAX_BYTES)
            if not isinstance(state, dict):
                raise ValueError("what came is no state")
            self.state = state
        except (RuntimeError, ValueError) as error:
            self.error = error


def _pair(channel: ElasticChannel, view: View, rank: int, *, place: int) -> Any:
    """A group of the giver, at place 0, and of one newcomer."""
    membership = channel.membership
    store = membership.connection(membership.corner(f"state/{view.generation}/{rank}"))
    store.set_timeout(timedelta(seconds=_SEND_S))
    return dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=_SEND_S))
