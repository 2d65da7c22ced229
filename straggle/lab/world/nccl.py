"""nccl in a simulated world: a communicator that is revoked and formed again, and the queue of each rank's device.

As ``straggle/members/regrouped/formed_again.py`` has read it in torch 2.14. A collective is queued when it is
launched, and begins on its device when those before it are over there. A peer that dies does not end it: it hangs
until it is revoked or, as the seed has it, fails after a second. What is revoked leaves NaN behind, and a work that
was not seen to be over has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from straggle.lab.world import groups
from straggle.lab.world.groups import Group, Kind, Meeting, Network, Operation, path_of

_NOTICED_S = 1.0  # after which the watchdog sees that a peer is gone, if NCCL does
FAILED = "NCCL operation failed"
LATE = "NCCL operation timed out"


class Ring(Meeting):
    """A communicator as all of its ranks see it."""

    def __init__(self, network: Network, name: str, size: int) -> None:
        super().__init__(network, name, size)
        self.handles: list[str] = []
        self.ends: list[Nccl] = []

    def lose(self) -> None:
        """A rank is gone: some networks notice, and others do not."""
        if self.network.world.random.random() < 0.5:
            return
        self.is_lost = True
        self.network.world.wake(self.waiters)
        for end in self.ends:
            self.network.world.after(_NOTICED_S, lambda end=end: end.fail_if_in(self))  # type: ignore[misc]


class Work(groups.Work):
    """A collective in the queue of a rank's device."""

    def __init__(self, end: Nccl, written: Sequence[Tensor]) -> None:
        super().__init__(end.world, written)
        self._end, self._seen = end, False
        self.begun: Operation | None = None

    def is_completed(self) -> bool:
        """Whether it is over; what the communicator's failure overtakes has failed, whatever the device did."""
        if not self._seen and self._end.error:
            self._is_over, self.error = True, self.error or self._end.error
        self._seen = self._is_over
        return self._seen

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Without a time only the device waits; when a time is over, the communicator fails."""
        if timeout and not self._is_over:
            self._world.wait(self._waiters, timeout.total_seconds())
            if not self._is_over:
                self._end.error = LATE
        self.is_completed()
        if self.error:
            raise dist.DistBackendError(self.error)
        return True

    def revoke(self, rank: int) -> None:
        """It ends where it stands."""
        if not self._is_over:
            if self.begun is not None:
                self.begun.withdraw(rank)
                for tensor in self._written:
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
            self.end(FAILED)


class Nccl(Group):
    """One rank's communicator: torch's ``ProcessGroupNCCL2`` with ``enable_reconfigure``."""

    supports_reconfigure = True

    def __init__(self, network: Network, store: Any, place: int, size: int, options: Any) -> None:
        if not options.enable_reconfigure:
            raise network.world.broken("a communicator that cannot be formed again")
        own = network.number(("nccl", path_of(store), place))
        super().__init__(network, f"{path_of(store)}/{place}/{own}", place, size, 0.0, connects=False)
        self.world, self._network, self._store = network.world, network, path_of(store)
        self.error, self._uuid, self._is_formed, self._is_inside = "", -1, False, False
        self.options._timeout = options._timeout

    def get_reconfigure_handle(self) -> str:
        """By which others name it."""
        return f"nccl2:{self._place}:{self._uuid}:{self._store}"

    def reconfigure(self, options: Any) -> groups.Work:
        """Form it among those with these handles, in their order."""
        handles, own = [*options.handles], self.get_reconfigure_handle()
        if len({*handles}) < len(handles) or own not in handles:
            raise RuntimeError(f"Local nccl2 reconfigure handle {own} is not once in {handles}")
        if self._is_inside:
            raise self.world.broken("two threads form one communicator")
        self._is_inside = True
        try:
            self._form(options.uuid, handles, handles.index(own), options.timeout.total_seconds())
        finally:
            self._is_inside = False
        over = groups.Work(self.world, ())
        over.end("")
        return over

    def _form(self, uuid: int, handles: list[str], place: int, limit_s: float) -> None:
        self.world.switch()
        name = f"{self._store}/{uuid}"
        ring = self._network.meetings.setdefault(name, Ring(self._network, name, len(handles)))
        assert isinstance(ring, Ring)
        ring.handles = ring.handles or handles
        if ring.handles != handles or self._rank in ring.ranks:
            raise self.world.broken(f"{name} is formed among {ring.handles} and {handles}, or twice")
        self._revoke()
        self._place, self._is_formed, until = place, False, self.world.now + limit_s
        ring.ranks[self._rank] = place
        self.world.wake(ring.waiters)
        while len(ring.ranks) < ring.size and not ring.is_lost and self.world.now < until:
            self.world.wait(ring.waiters, until - self.world.now)
        if len(ring.ranks) < ring.size or ring.is_lost:
            raise RuntimeError("NCCL commInitRankConfig failed during reconfigure")
        self._meeting, self._number, self._uuid, self.error = ring, 0, uuid, ""
        ring.ends.append(self)
        self._is_formed = True

    def abort(self) -> None:
        """Revoke it."""
        self.world.switch()
        if self._is_inside:
            raise self.world.broken("a communicator is revoked while it is formed")
        self._revoke()
        self.error = FAILED

    def _revoke(self) -> None:
        for work in self._begun:
            work.revoke(self._rank)  # type: ignore[attr-defined]
        self._begun = []

    def fail_if_in(self, ring: Ring) -> None:
        """Its watchdog has seen that a peer of this communicator is gone."""
        if self._meeting is ring and not self.error:
            self._revoke()
            self.error = FAILED

    def shutdown(self) -> None:
        """What is on its way is waited for."""
        for work in self._begun:
            work.wait(timedelta(seconds=self._limit_s))
        self._is_formed = False

    def get_error(self) -> SimpleNamespace:
        """Whether it has failed."""
        return SimpleNamespace(name="COMM_ERROR" if self.error else "SUCCESS")

    def _begin(
        self,
        kind: Kind,
        given: Sequence[Tensor],
        written: Sequence[Tensor],
        after: Sequence[groups.Work] = (),  # noqa: ARG002
    ) -> groups.Work:
        if self._is_inside:
            raise self.world.broken("a collective is launched while its communicator is formed")
        if self.error or not self._is_formed:
            raise RuntimeError("NCCL communicator was aborted after a previous error, or is not formed")
        number, self._number = self._number, self._number + 1
        work, before = Work(self, written), self._not_over()
        self._begun = [*before, work]
        self.world.switch()

        def begin() -> None:
            if not work.error:
                work.begun = meeting.operation(number, kind.of)
                work.begun.begin(self._rank, kind, given, work)

        meeting = self._meeting
        groups.when_over(before[-1:], work, begin)
        return work

    def _not_over(self) -> list[groups.Work]:
        return [work for work in self._begun if not work._is_over]


def nccl_of(network: Network) -> Any:
    """What stands in the place of ``ProcessGroupNCCL2``."""

    class Nccl2(Nccl):
        Options = SimpleNamespace

        def __init__(self, store: Any, place: int, size: int, options: Any) -> None:
            super().__init__(network, store, place, size, options)

    return Nccl2
