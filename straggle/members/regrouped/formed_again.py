"""Gradients over nccl among members that change: one communicator, revoked and formed again for each view.

The regrouping thread revokes it as soon as it sees a view, with no lock, as a thread that launches may hold that of
the merge. Threads that may be abandoned form it again. What was on its way is merged again from what each tensor held
before its launch, a copy on its device. A communicator in which a thread hangs is not used again: the next attempt
has a new one.

Read in torch 2.14.1; nothing of this was run on GPUs. In its wheel (NCCL 2.30.7): ``_C/_distributed_c10d.pyi`` and
``distributed/distributed_c10d.py`` for the names; ``nccl2/ProcessGroupNCCL.hpp`` and ``WorkNCCL.hpp``; the bindings
in ``libtorch_python.so``, which let go of Python's lock in ``reconfigure``. In sources that fit the strings of its
library, ``torch/csrc/distributed/c10d/nccl2/``:

- ``ReconfigureNCCL.cpp``: ``reconfigure`` returns when it is done. Who is to be at place 0 claims the uuid in the
  store and leaves NCCL's id there, for which the others wait; the old communicator is revoked and aborted; the new
  one is made. Each takes ``timeout`` at most. If that fails, the handle has the new place and the old uuid, and may
  be another rank's, too.
- ``ProcessGroupNCCL.cpp``: with ``enable_reconfigure``, ``abort`` is ``ncclCommRevoke``, and ends no process.
- ``WorkNCCL.cpp``: after it a work has failed, unless it was seen to be over before. ``wait(timeout)`` ends the
  communicator when the time is over, so works are polled; ``wait()`` makes a stream wait, and not the host.
- ``ProcessGroupNCCLBackend.cpp``: a collective is refused before the first ``reconfigure``, whose thread has the
  device.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.backward.device import Device
from straggle.merge.wire.groups import GlooCollectives, Group, Kept, is_over, set_aside
from straggle.waits import end_of, until

_WORD_BYTES = 256
_REVOKE_S = 2.0  # for a revoke, and for whoever launches to come out of it; then the communicator is given up
_LIMIT_S = 600.0  # of a collective, as gloo's
_CHANGED = "the members changed while nccl formed its groups"


class Failed:
    """A collective that was launched when its communicator had failed or was revoked."""

    def __init__(self, why: str) -> None:
        self._why = why

    def is_completed(self) -> bool:
        """It is over."""
        return True

    def wait(self) -> bool:
        """Raises ``DistBackendError``, as another one does that was on its way then."""
        raise dist.DistBackendError(self._why)


class NcclGroup(GlooCollectives):
    """The group of one view; launches nothing more once it is over."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator)
        self._launching = world.Lock()  # a leaf: held while a collective is launched
        self._is_over = False

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        return self._launch(partial(super().all_reduce, tensor), tensor)

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        return self._launch(partial(super().all_gather, tensors, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        return self._launch(partial(super().broadcast, tensor, source), tensor)

    def barrier(self) -> dist.Work:
        return self._launch(super().barrier)

    def drop(self) -> None:
        self._is_over = True

    def comes_to_rest(self) -> bool:
        """Wait for a moment until no thread is inside of it; whether none is."""
        rests = until(lambda: self._launching.acquire(blocking=False), every_s=1e-3, limit_s=_REVOKE_S)
        if rests:
            self._launching.release()
        return rests

    def _launch(self, begin: Callable[[], dist.Work], written: Tensor | None = None) -> dist.Work:
        kept = None if written is None else written.clone()
        with self._launching:
            work: Any = Failed("its communicator was revoked, as the members change") if self._is_over else None
            try:
                return Kept(work or begin(), kept)  # type: ignore[return-value]
            except RuntimeError as error:
                if self._group.get_error().name == "SUCCESS":  # it is the caller's: a tensor that nccl cannot send
                    raise
                return Kept(Failed(f"nccl: {error}"), kept)  # type: ignore[arg-type,return-value]


class Communicator:
    """This rank's communicator. ``connect()``: a new connection to this model's part of the store.

    ``rank``: among the ``size`` ranks of the job. Raises ``ValueError`` if torch or its NCCL cannot form one again.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, size: int, device: Device) -> None:
        self._connect, self._rank, self._size, self._device = connect, rank, size, device
        self._lock = world.Lock()  # a leaf
        self._turn = 0  # of whoever may put one in its place
        self._group: NcclGroup | None = None  # of the last view
        self._idle: Any = self._new()  # the communicator, while no thread forms it again

    def _new(self) -> Any:
        if (kind := getattr(world.dist, "ProcessGroupNCCL2", None)) is None:
            raise ValueError(_refusal(f"torch {torch.__version__}"))
        options = kind.Options()
        options._timeout, options.enable_reconfigure = timedelta(seconds=_LIMIT_S), True
        made = kind(self._connect(), self._rank, self._size, options)
        if not made.supports_reconfigure:
            raise ValueError(_refusal(f"torch {torch.__version__} with NCCL {torch.cuda.nccl.version()}"))  # type: ignore[no-untyped-call]
        return made

    def revoke(self) -> int:
        """End what is on its way here, from any thread, within seconds; the last group is not used any more.

        Returns the turn of whoever forms one now (`form`).
        """
        with self._lock:
            turn = self._turn = self._turn + 1  # who forms one meanwhile does it in vain
            group, self._group = self._group, None
            revoked = self._idle
        if group is None:
            return turn
        group.drop()
        if revoked is None:  # given up
            return turn
        # a late revoke, or a launch, would meet the communicator of the next view
        if not (_ends_soon(revoked.abort) and group.comes_to_rest()):
            with self._lock:
                self._idle = None
            set_aside(revoked, math.inf)
        return turn

    def form(self, control: Group, size: int, limit_s: float, turn: int) -> NcclGroup:
        """Form it again, among the ``size`` members whose group ``control`` is, in their order there.

        ``turn``: of the last `revoke`. Raises ``RuntimeError`` if there was another one since, if it fails, or if it
        takes much longer than ``limit_s``.
        """
        with self._lock:
            if self._turn != turn:  # the communicator is another view's, which may have it in use
                raise RuntimeError(_CHANGED)
            used, self._idle = self._idle, None
        used = used or self._new()
        try:
            group = self._formed(used, control, size, limit_s)
        except BaseException:
            set_aside(used, math.inf)
            raise
        with self._lock:
            if self._turn == turn:
                self._idle, self._group = used, group
                return group
        group.drop()
        set_aside(used, math.inf)
        raise RuntimeError(_CHANGED)

    def _formed(self, used: Any, control: Group, size: int, limit_s: float) -> NcclGroup:
        uuid, handles = self._exchange(used, control, size, limit_s)
        options: Any = world.dist.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.handles, options.timeout = uuid, handles, timedelta(seconds=limit_s)
        with self._device.own_queue():
            used.reconfigure(options).wait()
            self._device.wait_for_all()  # what was revoked writes no more
            group = NcclGroup(used)
            if not is_over(group.barrier(), limit_s):  # NCCL connects by its first collective
                raise RuntimeError(f"nccl's first barrier among {size} members was not over within {limit_s:g} s")
        return group

    def _exchange(self, used: Any, control: Group, size: int, limit_s: float) -> tuple[int, list[str]]:
        """The number of this attempt, and the members' handles in their order."""
        word = f"{secrets.randbits(62)} {used.get_reconfigure_handle()}".encode().ljust(_WORD_BYTES)
        own = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in range(size)]
        if not is_over(control.all_gather(gathered, own), limit_s):
            raise RuntimeError("the members' handles for nccl did not come")
        words = [bytes(given.tolist()).decode().split() for given in gathered]
        return int(words[0][0]), [handle for _, handle in words]

    def close(self) -> None:
        """Free it if all is well, and else leave it as it is, which nothing waits for."""
        with self._lock:
            self._turn += 1
            group, self._group = self._group, None
            used, self._idle = self._idle, None
        if group is not None:
            group.drop()
        if used is not None and not _ends_soon(used.shutdown):
            set_aside(used, math.inf)


def _ends_soon(call: Callable[[], None]) -> bool:
    """Call it on a thread of its own, as it may hang with the device; whether it is over within seconds."""

    def called() -> None:
        with contextlib.suppress(RuntimeError):  # of what had failed before
            call()

    thread = world.Thread(target=called, name="straggle-nccl", daemon=True)
    thread.start()
    return end_of([thread], _REVOKE_S)


def _refusal(found: str) -> str:
    return (
        f"members=Elastic() over nccl needs torch 2.14 or newer, with NCCL 2.28 or newer: its groups can be formed "
        f'again in a running job. This is {found}: update torch, or write dist.init_process_group("gloo")'
    )
