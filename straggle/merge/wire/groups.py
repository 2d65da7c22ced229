"""Process groups as the merge needs them: three collectives, launched and waited for later."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.policies.network.merge_time import MESSAGES_AT_A_TIME, QUICK_AT_A_TIME, QUICK_S
from straggle.waits import end_of, until

Launched = TypeVar("Launched", bound="Launches")

OWN_GROUP = "straggle"  # the description of its groups, in torch's records of collectives
# of which some is in each error of gloo's transport, and of torch's about a peer that is gone or too slow
_WORDS_OF_TRANSPORT = ("gloo/transport", "connect", "socket", "closure", "closed", "timed out", "timeout")
_WATCHDOG_S = 60.0  # beyond twice the time that ranks wait for each other
_POLL_S, _LONGEST_POLL_S = 50e-6, 500e-6
_parts = world.OfProcess(weakref.WeakKeyDictionary[Any, tuple[int, int]])  # by default groups (`begin_as_part`)
_SMALL_MESSAGES = 4  # of which the quickest says what a small one takes: the first ones connect, and machines are busy


class Group(Protocol):
    """Some ranks that call the same collectives in the same order. ``source`` is a place among them."""

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Sum over the ranks, in place."""

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        """Every rank's ``tensor``, in order of the ranks."""

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        """Overwrite ``tensor`` with that of the rank at ``source``."""

    def barrier(self) -> dist.Work:
        """Ends when all that was launched in this group before is over, on all of its ranks."""

    def drop(self) -> None:
        """Use it no more."""


class Launches(Protocol):
    """What was launched in a group at once."""

    @property
    def works(self) -> Sequence[dist.Work]:
        """Each of it."""


def job_group(group: dist.ProcessGroup | None) -> Any:
    """The group that a job began with, in place of a default group whose ranks change."""
    return getattr(group, "of_job", group)


def job_rank() -> int:
    """This process's rank among all that the job began with, whoever is there now."""
    return ranks_of_job([int(job_group(world.dist.group.WORLD).rank())])[0]


def job_size() -> int:
    """How many ranks the job began with."""
    own = job_group(world.dist.group.WORLD)
    return int(own.size()) if (part := _parts.here.get(own)) is None else part[1]


def ranks_of_job(ranks: Iterable[int]) -> list[int]:
    """Which of all that the job began with are these ranks of the default group."""
    first, _ = _parts.here.get(job_group(world.dist.group.WORLD), (0, 0))
    return [first + rank for rank in ranks]


def is_part_of_job() -> bool:
    """Whether the default group has the ranks of this rank's replica alone (`begin_as_part`)."""
    return world.dist.group.WORLD in _parts.here


def begin_as_part(first: int, num_ranks: int) -> None:
    """The default group, which was just made, has some of the job's ``num_ranks`` ranks: those from ``first`` on."""
    _parts.here[world.dist.group.WORLD] = first, num_ranks


class JobGroup:
    """A group of all ranks of the job, made by ``torch.distributed``: gloo or nccl."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        return self._group.allreduce([tensor])  # what torch does around it costs as much as the launch

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        return _begun(world.dist.all_gather(list(tensors), tensor, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        return _begun(world.dist.broadcast(tensor, group=self._group, group_src=source, async_op=True))

    def barrier(self) -> dist.Work:
        return _begun(world.dist.barrier(self._group, async_op=True))

    def drop(self) -> None:
        world.dist.destroy_process_group(self._group)

    def limit(self, seconds: float) -> None:
        """End collectives that are launched from now on after so long."""
        set_time_limit(self._group, seconds)

    def set_aside(self, limit_s: float) -> None:
        """Do not free it before what may be on its way has ended, after ``limit_s`` at most."""
        set_aside(self._group, limit_s)


class QueuedGroup(JobGroup):
    """The same of a backend that queues collectives on a device, as nccl does: nothing but its abort ends them."""

    @classmethod
    def formed(cls, ranks: Sequence[int], limit_s: float, backend: str) -> QueuedGroup:
        """Meet these ranks within ``limit_s``.

        The backend's own watchdog, which ends the process without a word of ours, gives up long after ranks do.
        """
        group = world.dist.new_group(
            list(ranks), timedelta(seconds=limit_s), backend, use_local_synchronization=True, group_desc=OWN_GROUP
        )
        set_time_limit(group, 2 * limit_s + _WATCHDOG_S)
        return cls(group)

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._is_aborted = False

    def abort(self, wait_s: float = 0.0) -> None:
        """End what is on its way, on a thread of its own; the group is not used any more. Waits ``wait_s`` at most.

        nccl's abort waits until the device is free, for ever if it is stuck, and so would the group's destructor.
        """
        if self._is_aborted:
            return
        # before the thread starts: whoever asks again is not to abort a second time
        self._is_aborted = True
        self.set_aside(math.inf)
        thread = world.Thread(target=_abort, args=(self._group,), name="straggle-abort", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and starts no thread
            thread.start()
            end_of([thread], wait_s)


class GlooCollectives:
    """The three collectives of a gloo process group that ``torch.distributed`` does not know of."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        return self._launched(self._group.allreduce([tensor]))

    def all_gather(self, tensors: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        return self._launched(self._group.allgather([list(tensors)], [tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        options = world.dist.BroadcastOptions()
        options.rootRank = source
        return self._launched(self._group.broadcast([tensor], options))

    def barrier(self) -> dist.Work:
        # gloo's own thread first waits for all that it has to do before: no thread of ours has to wake in between
        return self._launched(self._group.barrier())

    def drop(self) -> None:
        self._group = None

    def _launched(self, work: dist.Work) -> dist.Work:
        return work


class GlooGroup(GlooCollectives):
    """A gloo group of ranks that meet in a corner of the store. Raises ``RuntimeError`` if one is missing.

    gloo cannot abort a collective: `drop` lets go of the group when those that were launched have ended, which a
    connection that is lost, or the group's time limit, brings about. So it holds them; call `forget_ended` each step.
    A process that ends meanwhile does not wait for them.
    """

    def __init__(self, store: Any, place: int, size: int, form_s: float, limit_s: float) -> None:
        super().__init__(gloo_group(store, place, size, form_s))
        self._group._set_default_timeout(timedelta(seconds=limit_s))
        self._works: set[dist.Work] = set()  # any thread may launch one
        self._finalizer = world.finalize(self, world.in_this_process(_set_aside), self._group, self._works)

    def drop(self) -> None:
        """Use it no more."""
        self._group = None
        self._finalizer()

    def forget_ended(self) -> None:
        """Hold no collective any longer that is over.

        Each has some memory of its own, and lies among that of gradients and of the optimizer. Where those of many
        steps are held, what is free between them goes back to the system, and each step asks for it again.
        """
        # over a copy: the stand-in may launch one meanwhile
        self._works.difference_update([work for work in tuple(self._works) if work.is_completed()])

    def launch(self, begin: Callable[[Any], Launched]) -> Launched:
        """Launch other collectives than the three: ``begin(group)`` says which were."""
        begun = begin(self._group)
        self._works.update(begun.works)
        return begun

    def _launched(self, work: dist.Work) -> dist.Work:
        # held until it is over, as the group must be: gloo works on it whether or not anybody waits
        self._works.add(work)
        return work


class Polled:
    """A collective that is queued on a device, waited for as gloo's are: nccl aborts at the end of a short wait."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Wait for so long. Raises ``RuntimeError`` if it is not over then, or failed."""
        limit_s = timeout.total_seconds()
        if not until(self._work.is_completed, every_s=_POLL_S, most_s=_LONGEST_POLL_S, limit_s=limit_s):
            raise RuntimeError("not yet")
        return bool(self._work.wait())  # makes this thread's queue wait, and raises the collective's error


class Kept(Polled):
    """One whose tensor's content from before is ``kept``, for the case that it is made again among other ranks."""

    def __init__(self, work: dist.Work, kept: Tensor | None) -> None:
        super().__init__(work)
        self.kept = kept


def kept_by(works: Sequence[dist.Work]) -> list[Tensor]:
    """What each of these had in its tensor before; nothing if one does not keep it, as gloo's do not."""
    kept = [work.kept for work in works if isinstance(work, Kept) and work.kept is not None]
    return kept if len(kept) == len(works) else []


def messages_at_a_time(group: Group, size: int, clock: Callable[[], float] = world.clock) -> int:
    """How many messages should be on their way at a time between these ranks, by what a small one takes in ``group``.

    All of its ``size`` ranks ask, and get the same answer.
    """
    number, took_s = torch.zeros(1), list[float]()
    for _ in range(_SMALL_MESSAGES):
        began = clock()
        group.all_reduce(number).wait()
        took_s.append(clock() - began)
    of_each = [torch.zeros(1) for _ in range(size)]
    group.all_gather(of_each, torch.tensor([min(took_s)])).wait()
    return QUICK_AT_A_TIME if max(map(float, of_each)) <= QUICK_S else MESSAGES_AT_A_TIME


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """The backend of a group; if it has one for each kind of device, that of all of them, if it is the same.

    ``init_process_group()`` chooses it by itself, and calls it "undefined" then.
    """
    each = {kind.partition(":")[2] for kind in str(world.dist.get_backend_config(group)).split(",")}
    return each.pop() if len(each) == 1 else str(world.dist.get_backend(group))


def time_limit_of(group: dist.ProcessGroup) -> float:
    """Seconds after which collectives of a group of the user's end by themselves: ``init_process_group(timeout=...)``.

    The shortest, if it has a backend for each kind of device.
    """
    limits = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # none for this device, or one without options
            limits.append(group._get_backend(device).options._timeout.total_seconds())
    if limits:
        return float(min(limits))
    return world.dist.distributed_c10d._get_default_timeout(world.dist.Backend(backend_of(group))).total_seconds()


def set_time_limit(group: dist.ProcessGroup, seconds: float) -> None:
    """End its collectives that are launched from now on after so long. torch has a public name for it since 2.14."""
    public = getattr(world.dist, "set_timeout", None)
    (public or world.dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds), group)


def gloo_group(store: Any, place: int, size: int, form_s: float, *, at_a_time: int = MESSAGES_AT_A_TIME) -> Any:
    """A gloo process group by itself, with ``at_a_time`` collectives on their way at a time.

    All connections are made at once, whatever TORCH_GLOO_LAZY_INIT says: a rank that is missing is to be seen here.
    Raises ``RuntimeError`` if not all come within ``form_s``.
    """
    kind: Any = world.dist.ProcessGroupGloo
    options = kind._Options()
    options._devices, options._timeout = _devices(kind), timedelta(seconds=form_s)
    options._threads = at_a_time
    store.set_timeout(timedelta(seconds=form_s))
    return kind(store, place, size, options)


def _devices(kind: Any) -> list[Any]:
    """Where torch has them: on the interfaces in GLOO_SOCKET_IFNAME, or where the host's name leads to."""
    if not (names := os.environ.get("GLOO_SOCKET_IFNAME")):
        return [kind.create_default_device(lazy_init=False)]
    return [kind.create_device(interface=name, lazy_init=False) for name in names.split(",")]


@dataclass(frozen=True)
class ProcessGroups:
    """``data``: for gradients, on their device; ``control``: for what ranks decide by, always on the CPU.

    ``ranks``: in order of their places in both. ``wide``: for gradients, if links have become slow, a group with
    more messages on their way at a time; ``None`` if the other one has as many.
    """

    data: Group
    control: Group
    ranks: tuple[int, ...]
    wide: Group | None = None


def is_over(work: dist.Work, seconds: float) -> bool:
    """Whether a gloo collective is over within this time. Raises ``RuntimeError`` if it failed."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))  # 0 is no time limit
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it failed, or it ended just when the time was over
    return True


def succeeded(work: dist.Work) -> bool:
    """Whether a gloo collective is over by now, and did not fail."""
    return work.is_completed() and succeeds(work, 0.001)


def succeeds(work: dist.Work, seconds: float) -> bool:
    """Whether a gloo collective is over within this time, and did not fail."""
    try:
        return is_over(work, seconds)
    except RuntimeError:
        return False


def is_of_peer(error: BaseException) -> bool:
    """Whether a collective's error is that of a peer, or of the way to it; another is torch's, on this rank."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _WORDS_OF_TRANSPORT)


def _abort(group: dist.ProcessGroup) -> None:
    # the user may have destroyed it, or destroy it meanwhile; and nccl raises if that takes long
    with contextlib.suppress(RuntimeError, ValueError, LookupError, AssertionError):
        world.dist.distributed_c10d._abort_process_group(group)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


@dataclass(frozen=True)
class _Limit:
    """By then the collectives of a group have ended, or run into its time limit."""

    until: float

    def is_completed(self) -> bool:
        return world.monotonic() >= self.until


# groups that are not used any more, and what was launched in them; a deque, as a finalizer may come at any time
_dropped = world.OfProcess(deque[tuple[Any, set[Any]]])


def set_aside(group: Any, limit_s: float) -> None:
    """Keep a group in which something may be on its way, nobody knows what: for its time limit ``limit_s``."""
    _set_aside(group, {_Limit(world.monotonic() + limit_s)})


def _set_aside(group: Any, works: set[Any]) -> None:
    """Keep a group until nothing is on its way in it.

    Freeing it before that waits for it, and so would Python as it ends: that never frees what has one reference more.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _dropped.here.append((group, works))
    let_go()


def let_go() -> bool:
    """Free the groups that were dropped and in which nothing is on its way any more; whether these are all of them.

    gloo closes the connections of a group one after another, 10 ms each. Each collective has a part in them: while one
    is held, peers whose collectives need this rank are not told that it is gone.
    """
    dropped = _dropped.here
    for _ in range(len(dropped)):
        try:
            group, works = dropped.popleft()
        except IndexError:  # another thread has it
            break
        if all(work.is_completed() for work in works):
            works.clear()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        else:
            dropped.append((group, works))
    return not dropped
