"""Communication of one model's ranks: process groups and a part of the job's store that belong to straggle alone.

Nothing here interleaves with the collectives of the user's own process groups.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from straggle import world
from straggle.merge.wire.arrivals import why_not_all
from straggle.merge.wire.contents import bytes_of, set_bytes
from straggle.merge.wire.groups import (
    OWN_GROUP,
    GlooCollectives,
    Group,
    JobGroup,
    Polled,
    ProcessGroups,
    QueuedGroup,
    backend_of,
    gloo_group,
    is_of_peer,
    is_over,
    job_group,
    messages_at_a_time,
    ranks_of_job,
    succeeds,
    time_limit_of,
)
from straggle.merge.wire.last_words import (
    ENDED,
    TROUBLE,
    End,
    Progress,
    abandon,
    absent,
    leave_groups,
    leave_word,
    report_end,
    words_under,
)
from straggle.merge.wire.long_wait import LongWait
from straggle.merge.wire.patience import Awaited, Heard, Patience, PlaceFor, Sign
from straggle.merge.wire.store import JobStore, StoreUnreachable, check_answers, connect, default_store, peek, place_of
from straggle.policies.network.merge_time import MESSAGES_AT_A_TIME
from straggle.waits import until

_SLICE_S = 0.5
_KEPT_STEPS = 32  # whose words in the store are not removed yet
_SHORT_S = 0.1  # each wait that ends before its collective costs 0.2 ms of CPU
MORE_S = 60.0  # by which gloo's own time limit is longer than that of any wait, which has words
_NEVER_S = 3.2e7  # a year
_SIGN = "sign"

_log = logging.getLogger(__name__)


class PeerFailed(RuntimeError):
    """A rank ended in an error or could not be reached; the text names the rank, step and stage."""


class ToRepeat(RuntimeError):
    """A call of the loop's own is to be repeated, and nothing is broken: uncaught, it ends a step's block early."""


def comes_of_peer(error: BaseException | None) -> bool:
    """Whether a peer that is gone, or the way to it, is the reason of an error: of itself, or of what it followed."""
    while error is not None:
        if isinstance(error, PeerFailed) or (isinstance(error, RuntimeError) and is_of_peer(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class GroupsChanged(Exception):
    """A collective was launched in groups that are no longer used."""


class Channel:
    """Two process groups (data; control, always on the CPU by gloo) and a store, for one wrapped model.

    ``groups_change``: whether other groups may take their place in a running job.

    While the store does not answer this rank, the rank cannot be late.
    ``rank`` is a place in ``process_group``; in messages ranks have their ``names``, which are those places if none are
    given.

    Raises ``RuntimeError`` if there is no process group, if the job's store does not answer within ``give_up_s``, or if
    not all ranks come within the time limit of ``process_group``.
    """

    groups_change = False
    _groups: ProcessGroups

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, give_up_s: float, names: Sequence[int] | None = None
    ) -> None:
        if not world.dist.is_available() or not world.dist.is_initialized():
            raise RuntimeError(
                "straggle needs a process group: launch with torchrun and call torch.distributed.init_process_group() "
                "before StagedDataParallel(model)"
            )
        parent: dist.ProcessGroup = job_group(process_group or world.dist.group.WORLD)
        self.give_up_s, self.patience = give_up_s, Patience(give_up_s, self._time_limit_of(parent))
        self.rank, self.world_size = parent.rank(), parent.size()
        self.names = names or range(self.world_size)
        # compared by whoever publishes a merged step, with the lock of the merge
        self.epoch = 0  # number of the groups, which never change here
        self._progress = Progress(in_flight_s=self.patience.outside_s + MORE_S)
        self._num_between = 0  # collectives that were no step's
        self._counted: deque[int] = deque()  # steps whose counter this rank began; written by the store's thread
        self._noted: deque[int] = deque()  # those with collectives of the loop's own; as above
        self._queued = backend_of(parent) != "gloo"  # collectives run on the device's own queue, not on the host
        self._own_failure: Callable[[], str | None] = _none
        self._gloo_groups: list[Any] = []
        self._job_groups: list[JobGroup] = []  # that torch.distributed knows
        self._can_widen = False  # whether a group could have more messages on their way than the one for gradients
        self._corner = corner = self._meet(parent)
        store = default_store()
        self.store = JobStore(
            partial(self._connect, store, corner),  # a connection of its own to this model's part of the store
            place_of(store),
            who=f"rank {self.name}",
            without="this rank is not late, however slow, and learns of no peer's failure but by its connections",
            watched=(TROUBLE, ENDED),
            sign=partial(_sign, self._progress, self.rank, count()),
        )
        leave = partial(leave_groups, self._gloo_groups, self._job_groups, self._progress)
        end = world.in_this_process(report_end)
        self._finalizer = world.finalize(self, end, self.store, self.rank, self.name, self._progress, leave)

    @staticmethod  # a bound method would keep this object alive as long as the store's thread
    def _connect(store: Any, corner: str) -> Any:
        return connect(store, corner)

    def _time_limit_of(self, parent: dist.ProcessGroup) -> float:
        return time_limit_of(parent)

    def _meet(self, parent: dist.ProcessGroup) -> str:
        """Form the groups; returns the prefix in the store for these ranks' messages."""
        ranks = world.dist.get_process_group_ranks(parent)
        names = ranks_of_job(ranks)
        check_answers(default_store(), self.give_up_s)
        limit = f"within {self.patience.words('outside')}"
        try:
            if not (why := why_not_all(names, names[self.rank], self.patience.outside_s)):
                return self._form(ranks, backend_of(parent))
        except RuntimeError as error:
            raise self._without_groups(names) from error
        raise PeerFailed(
            f"rank {self.name}, before step 0: {why}; each of ranks {names} has to wrap the model, {limit}"
        )

    def widen(self) -> None:
        """Form the group that takes over when a link becomes slow (`ProcessGroups.wide`); all ranks together."""
        if not self._can_widen:
            return
        try:
            wide = self._gloo_group(f"{self._corner}/wide", MESSAGES_AT_A_TIME)
        except RuntimeError as error:
            raise self._without_groups(self.names) from error
        self._groups = replace(self._groups, wide=wide)

    def _without_groups(self, ranks: Iterable[int]) -> PeerFailed:
        return PeerFailed(
            f"rank {self.name}, before step 0: no process groups of ranks {[*ranks]} within "
            f"{self.patience.words('inside')}: one has ended, hangs, or cannot be reached, or is in another number "
            "of process groups than its peers, by which torch names new ones"
        )

    def _form(self, ranks: Sequence[int], backend: str) -> str:
        limit_s = self.patience.outside_s
        timeout = timedelta(seconds=self.give_up_s)  # all ranks are there
        control = world.dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True, group_desc=OWN_GROUP)
        corner = f"straggle/{control.group_name}"
        if backend == "gloo":
            number = messages_at_a_time(JobGroup(control), self.world_size)
            data: Group = self._gloo_group(f"{corner}/data", number)
            self._can_widen = number < MESSAGES_AT_A_TIME
        else:
            data = QueuedGroup.formed(ranks, limit_s, backend)
            self._job_groups.append(data)
        self._job_groups.append(of_hosts := JobGroup(control))
        of_hosts.limit(limit_s + MORE_S)
        self._groups = ProcessGroups(data, of_hosts, tuple(range(self.world_size)))
        return corner

    def _gloo_group(self, corner: str, number: int) -> Group:
        """A gloo group with so many messages in flight at a time."""
        server = default_store()
        limit = server.timeout
        try:
            store = world.dist.PrefixStore(corner, server)  # type: ignore[attr-defined]
            group = gloo_group(store, self.rank, self.world_size, self.give_up_s, at_a_time=number)
            group._set_default_timeout(timedelta(seconds=self.patience.outside_s + MORE_S))
            self._gloo_groups.append(group)
            return GlooCollectives(group)
        finally:
            server.set_timeout(limit)

    @property
    def name(self) -> int:
        """This rank in messages."""
        return self.names[self.rank]

    def named(self, ranks: Iterable[int]) -> list[int]:
        """These ranks in messages."""
        return [self.names[rank] for rank in ranks]

    @property
    def formed(self) -> ProcessGroups | None:
        """The process groups of the ranks that take part; ``None`` if this rank does not."""
        return self._groups

    @property
    def groups(self) -> ProcessGroups:
        """The process groups; this rank must take part."""
        assert self.formed is not None
        return self.formed

    def close(self) -> None:
        """Report that this rank takes no further part, unless its peers know; do not use the channel after that."""
        self._finalizer()

    def merged(self, step: int) -> None:
        """This rank has merged ``step``: its peers need it in later steps only."""
        self._progress.merge(step)

    # -- all ranks together

    def gather(self, value: Any, of: str) -> list[Any]:
        """Every rank's ``value``, which JSON can hold; ``of`` is its name.

        Raises `PeerFailed` if a rank ended instead.

        torch's own collectives for objects need numpy, and unpickle what the others send.
        """
        what = f"the comparison of the ranks' {of}"
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(own)]), what)]
        gathered = self._gather(pad(own, (0, max(sizes) - len(own))), what)
        return [json.loads(bytes(other[:size].tolist())) for other, size in zip(gathered, sizes, strict=True)]

    def _gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._between_steps(what, partial(self.groups.control.all_gather, tensors, tensor))
        return tensors

    def end_pause(self) -> None:
        """Wait for all ranks. Raises `PeerFailed` if one ended instead, or is given up and not in its pause."""
        usual_s = self._progress.limit_flight(math.inf)
        self._limit_control(_NEVER_S)
        try:
            self._gather(torch.zeros(1), "the end of the pause, where ranks wait for each other")
        finally:
            self._limit_control(usual_s)
        self._progress.limit_flight(usual_s)

    def _limit_control(self, seconds: float) -> None:
        if isinstance(control := self.groups.control, JobGroup):
            control.limit(seconds)

    def tell(self, place: Callable[[], PlaceFor]) -> None:
        """Let peers know where this rank is, by ``place()``, which is asked on another thread now and then."""
        self._progress.tell(place)

    def begin_epoch(self) -> None:
        """The groups are others from here on: what was launched in the old ones is not to be published."""
        self.epoch += 1

    def device_is_watched(self, own_failure: Callable[[], str | None]) -> None:
        """``own_failure()``: why peers may have given up this rank, if its device hangs."""
        self._own_failure = own_failure

    def broadcast(self, tensor: Tensor, source: int = 0, name: str = "tensor") -> None:
        """Overwrite ``tensor``, of any dtype and strides, with that of rank ``source``; ``name`` is for errors.

        Raises `PeerFailed` if a rank ended instead, ``RuntimeError`` if torch cannot send or write the tensor.
        """
        what = f"rank {self.names[source]}'s {name}"
        with self._own_error(what):
            given = bytes_of(tensor)
        self._between_steps(what, partial(self.groups.data.broadcast, given, source), queued=self._queued)
        with self._own_error(what):
            set_bytes(tensor, given)

    def of_rank0(self, numbers: Tensor) -> Tensor:
        """Rank 0's ``numbers``, on the CPU; overwrites this rank's. Raises `PeerFailed` if a rank ended instead."""
        self._between_steps("rank 0's stages", partial(self.groups.control.broadcast, numbers, 0))
        return numbers

    def _between_steps(self, what: str, collective: Callable[[], dist.Work], *, queued: bool = False) -> None:
        """Launch a collective and wait for it; ``queued``: it runs on the device's own queue."""
        with self._own_error(what):
            work = collective()
        waited: Any = Polled(work) if queued else work
        self._num_between += 1
        key, step = f"before {self._num_between}", self._progress.merged + 1
        self.wait(waited, step, self._before_step(what), key=key)

    def _before_step(self, what: str) -> str:
        return f"rank {self.name}, before step {self._progress.merged + 1}, {what}"

    @contextlib.contextmanager
    def _own_error(self, what: str) -> Iterator[None]:
        """Report an error in this block to the peers: it is torch's on this rank, and no peer caused it."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            raise self._failed(self._before_step(what), error) from error

    def _failed(self, what: str, error: Exception) -> RuntimeError:
        """The exception for a collective's error: a peer is gone, or torch failed on this rank."""
        if is_of_peer(error):
            return self._lost(what)
        self.post_failure(f"{what}: {error}")
        return RuntimeError(f"{what}: {error}")

    def _lost(self, what: str, why: str = "") -> PeerFailed:
        """The exception for a collective that a peer does not take part in, as none will from here on."""
        # before the abort: peers that see a broken connection look for the reason
        words = self.explain(what, why=why)
        self.abort()
        return PeerFailed(words)

    def abort(self) -> None:
        """This rank ends: let nothing of it wait for a peer, neither its device nor whoever destroys a group."""
        abandon(self._job_groups, self._progress.in_flight_s)

    # -- evidence that peers wait

    def post_finished(self, step: int, num_collectives: int = 0) -> None:
        """Count this rank among those that have finished their own work for ``step``; from any thread, without waiting.

        ``num_collectives``: those of the loop's own in it. The rank that began a step's counter removes it when it
        begins one that is at least 32 steps later.
        """
        # before the count: who sees a quorum reads what it has begun
        if num_collectives:
            self.store.post(partial(_note_collectives, self._noted, step, num_collectives))
        self.store.post(partial(_count, self._counted, step))

    def num_finished(self, step: int) -> int:
        """How many ranks have finished their own work for ``step``; 0 if the store does not answer."""
        try:
            return self.store.ask(lambda store: int(store.add(f"finished/{step}", 0)))
        except StoreUnreachable:
            return 0

    def num_collectives(self, step: int) -> int | None:
        """The most collectives of the loop's own among ranks that have finished ``step``; ``None`` if not known."""
        try:
            return self.store.ask(lambda store: int(peek(store, f"collectives/{step}") or 0))
        except StoreUnreachable:
            return None

    # -- names

    def publish_name(self, key: int, name: str) -> str:
        """Publish a name under this key, unless there is one; returns the name that was published first.

        Raises `StoreUnreachable` if the store does not answer.
        """
        return self.store.ask(lambda store: str(store.compare_set(f"name/{key}", "", name).decode()))

    def published_name(self, key: int) -> str | None:
        """The name under this key, if there is one. Raises `StoreUnreachable` if the store does not answer."""
        return self.store.ask(lambda store: words_under(store, "name", [key])).get(key)

    # -- failures

    def post_doing(self, words: str) -> None:
        """Report what this rank has been doing for so long; empty if it is no longer stuck."""
        key = f"doing/{self.rank}"
        self.store.post(lambda store: store.set(key, words))

    def post_failure(self, message: str) -> None:
        """Report this rank's failure to its peers."""
        self._progress.explain()
        try:
            self.store.ask(partial(leave_word, f"failure/{self.rank}", message, TROUBLE))
        except StoreUnreachable as error:
            _log.warning("%s; the peers cannot learn more than that it failed: %s", message, error)

    def wait(
        self,
        work: dist.Work,
        step: int,
        what: str,
        give_up_s: float | None = None,
        epoch: int = 0,  # noqa: ARG002
        key: str = "",
    ) -> None:
        """Wait for a collective of gloo in ``step``; raises `PeerFailed` if one failed or is given up (`Patience`).

        ``epoch``: the value of `epoch` when the collective was launched. ``give_up_s``: wait no longer, for whomever.
        ``key``: the name of this wait among the ranks, if it is not that for the step.

        A long wait is logged now and then, with the awaited ranks and what they are doing. The store is asked only for
        that and whether a peer has ended, for at most half a second.
        """
        # a long wait is rare, so that nothing of it is made before the first slice is over
        until, long_wait = math.inf if give_up_s is None else world.monotonic() + give_up_s, None
        while not self._ended(work, what, max(0.0, min(_SLICE_S, self.give_up_s / 2, until - world.monotonic()))):
            long_wait = long_wait or LongWait(self, key or str(step), what)
            # asked between slices, not by a thread of its own: who waits is who has to know
            if world.monotonic() >= until or self._is_in_vain(step):
                raise self._lost(what)
            # does not wait: its result is read in the next turn
            self.store.look()
            if why := long_wait.look():
                raise self._lost(what, why)

    def come_after(self, work: dist.Work, step: int, what: str) -> None:
        """Order what the calling thread queues on its device after a collective; the host waits only for gloo's."""
        if self._queued:
            self._order_after(work, what)
        else:
            self.wait(work, step, what)

    def _order_after(self, work: dist.Work, what: str) -> None:
        """Make the calling thread's queue wait; raises the collective's error, if it has one by now."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def ends_soon(self, work: dist.Work) -> bool:
        """Wait for a moment; returns whether the collective is then over without an error.

        Always false if collectives are queued on a device: the host does not wait for them.
        """
        return not self._queued and succeeds(work, _SHORT_S)

    @property
    def has_trouble(self) -> bool:
        """Whether a rank is known to have failed, or to have given up."""
        return TROUBLE in self.store.seen

    @property
    def has_failed(self) -> bool:
        """Whether this rank ends in a failure that peers know of."""
        return self._progress.explained

    def _is_in_vain(self, step: int) -> bool:
        """Whether a peer is known to have failed, or to have ended before ``step``."""
        if self.has_trouble:
            return True
        if ENDED not in self.store.seen:
            return False
        with contextlib.suppress(StoreUnreachable):
            return any(end.merged < step for end in self.store.ask(self._ends, _SLICE_S))
        return False

    def _ended(self, work: dist.Work, what: str, seconds: float) -> bool:
        """Wait for a collective of gloo to end, for at most this long."""
        try:
            return is_over(work, seconds)
        except RuntimeError as error:
            raise self._failed(what, error) from error

    @property
    def awaited(self) -> Sequence[int]:
        """The ranks that a merge needs."""
        return range(self.world_size)

    def note_waiting(self, key: str) -> int:
        """Note that this rank waits there; returns how many ranks have noted that, this one included."""

        def note(store: Any) -> int:
            store.set(f"waiting/{key}/{self.rank}", "")
            return int(store.add(f"waiting/{key}", 1))

        return self.store.ask(note, _SLICE_S)

    def not_waiting(self, key: str, among: Sequence[int] | None) -> list[int]:
        """Those ranks ``among`` these, or of all that are needed, that have not noted that."""
        ranks = self.awaited if among is None else among
        return self.store.ask(lambda store: absent(store, f"waiting/{key}", ranks), _SLICE_S)

    def places(self, ranks: Sequence[int], heard: Heard) -> list[Awaited]:
        """Where these ranks are, by their last signs."""
        words = self.store.ask(lambda store: words_under(store, _SIGN, ranks), _SLICE_S)
        return [heard.of(rank, self.names[rank], words.get(rank, "")) for rank in ranks]

    def waited_for(self, awaited: Sequence[Awaited]) -> str:
        """These ranks, what they report to be doing, and where they are."""
        if not awaited:
            return "the network: all ranks have submitted"
        ranks = [rank for rank, name in enumerate(self.names) if name in {rank.name for rank in awaited}]
        places = "".join(f"; {rank.words(self.patience)}" for rank in awaited)
        return f"ranks {self.named(ranks)}{self._doing(ranks, _SLICE_S)}{places}"

    def _doing(self, ranks: Sequence[int], limit_s: float) -> str:
        words = self.store.ask(lambda store: words_under(store, "doing", ranks), limit_s)
        return "".join(f"; {word}" for word in words.values() if word)

    def explain(self, what: str, wait_s: float = 1.7, why: str = "") -> str:
        """Why ``what`` failed: the failures that ranks have reported, or else the ranks that no longer answer.

        ``why``: this rank has given one up. Returns within ``wait_s``; if the store does not answer by then, it reports
        that.
        """
        if (own := self._own_failure()) is not None:
            self.post_failure(own)
        self._progress.explain()  # this rank ends because of others
        try:
            return f"{what}: {self._reason(wait_s, why)}"
        except StoreUnreachable as error:
            return f"{what}: no answer from peers, and {error}{why and f' ({why})'}"

    def _reason(self, wait_s: float, why: str) -> str:
        ends_at = world.monotonic() + wait_s

        def ask(request: Callable[[Any], Any]) -> Any:
            return self.store.ask(request, max(ends_at - world.monotonic(), _SLICE_S))

        # for ranks that wait for this one, and not for the one that is gone
        ask(partial(leave_word, f"survivor/{self.rank}", "", TROUBLE))
        reasons, missing = list[str](), list[int]()

        def is_known() -> bool:
            reasons[:] = ask(self._reasons)
            missing[:] = [] if reasons else ask(lambda store: absent(store, "survivor", range(self.world_size)))
            return not missing

        until(is_known, every_s=0.05, limit_s=ends_at - world.monotonic())
        return "; ".join(reasons) or self._first_given_up(missing, why)

    def _first_given_up(self, missing: Sequence[int], why: str) -> str:
        """The report of the rank that gave up first: by now the lost ranks may be back, and end as well."""
        gone = (
            f"no answer from ranks {self.named(missing)}{self._doing(missing, _SLICE_S)}"
            if missing
            else "connection lost"
        )
        gone += why and f"; {why}"
        first: bytes = self.store.ask(lambda store: store.compare_set("given up", "", gone), _SLICE_S)
        return first.decode()

    def _reasons(self, store: Any) -> list[str]:
        """What ranks have reported: failures, or else that they ended."""
        failures = words_under(store, "failure", range(self.world_size))
        return list(failures.values()) or [end.words for end in self._ends(store)]

    def _ends(self, store: Any) -> list[End]:
        return [End.read(word) for word in words_under(store, "ended", range(self.world_size)).values()]


def _none() -> None:
    """Nothing."""


def _sign(progress: Progress, rank: int, numbers: Iterator[int]) -> tuple[str, str]:
    return f"{_SIGN}/{rank}", Sign(next(numbers), *progress.place()).word()


def _count(counted: deque[int], step: int, store: Any) -> None:
    # one request, which counts and asks in one: two ranks cannot both be the first
    if store.add(f"finished/{step}", 1) > 1:
        return
    counted.append(step)  # whoever counts first cleans up, when no rank asks for a step that far back
    while counted[0] <= step - _KEPT_STEPS:
        store.delete_key(f"finished/{counted.popleft()}")


def _note_collectives(noted: deque[int], step: int, number: int, store: Any) -> None:
    """Before the rank is counted; ranks of one program have all as many, so it matters little that two may write."""
    if int(peek(store, f"collectives/{step}") or 0) >= number:
        return
    store.set(f"collectives/{step}", str(number))
    noted.append(step)
    while noted[0] <= step - _KEPT_STEPS:
        store.delete_key(f"collectives/{noted.popleft()}")
