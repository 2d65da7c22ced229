"""The channel of a job whose members come and go, and the thread that leads a rank from one view to the next.

Each view has process groups of its own, over a corner of the store. The old ones are dropped and never waited for.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from straggle.merge.channel import Channel, LongWait, PeerFailed
from straggle.merge.groups import GlooGroup, Groups, is_over
from straggle.merge.members.agents import Exited, exited
from straggle.merge.members.membership import MembersChanged, Membership, TooFewRanks
from straggle.merge.members.provenance import Provenance, provenance
from straggle.merge.members.view import Elastic, Leaving, MergeProgress, Repair, Silence, View, progress_length, repair
from straggle.merge.store import StoreUnreachable, check_answers, connect_all, default_store
from straggle.report import MembersReport

_SLICE_S = 0.02
_MERGE_SLICE_S = 0.1  # each slice that ends before a merge does costs 0.2 ms of CPU, for gloo's error that says so
_LOOK_S = 0.2  # between two looks at what there is to do
_FORM_S = 20.0  # for the members of a view to meet
_ASK_AGAIN_S = 2.0
_STUCK_S = 12.0  # in one request to the store; a connection is made, or not, in less
_ANSWERS, _TURNS = 0, 1  # what the store's silence is known by: its answers, and whether any request ends
_RETURN_S = 10.0  # for a rank that left to be let in again; then it is missed
_OLD_S = 600.0  # after which gloo itself ends what was launched
_num_models = 0  # that were wrapped so in this process: its models have their corners of the store in this order

_log = logging.getLogger(__name__)

Found = TypeVar("Found")


class ElasticChannel(Channel):
    """The channel of a model whose ranks may leave and come back; by gloo, of all ranks of the job.

    ``comes_late``: this rank comes to a job that has begun without it.
    """

    def __init__(self, elastic: Elastic, *, give_up_s: float) -> None:
        self._elastic = elastic
        self._formed: Groups | None = None
        self.generation = -1
        self.ended: BaseException | None = None  # what ended the job for this rank
        self.closing = False
        super().__init__(None, give_up_s=give_up_s)

    def _meet(self, parent: dist.ProcessGroup) -> str:  # noqa: ARG002
        global _num_models
        if self._queued:
            raise ValueError(
                "members=Elastic() needs a gloo process group: nccl's groups cannot be formed anew in a running job; "
                'write dist.init_process_group("gloo"), or leave members out'
            )
        corner, _num_models = f"straggle/elastic/{_num_models}", _num_models + 1
        store = default_store()
        check_answers(store, self.give_up_s)
        self.membership = Membership(
            self.rank,
            self.world_size,
            self._elastic,
            connect=partial(connect_all, store, corner),
            exited=_ended_start,
        )
        self.comes_late = self.membership.begin(self.give_up_s)
        if not self.comes_late:
            while not self.form(self.membership.view):
                raise PeerFailed(f"rank {self.rank}, before step 0: the ranks of the job do not meet")
        return corner

    @staticmethod
    def _connect(store: Any, corner: str) -> Any:
        return connect_all(store, corner)

    @property
    def formed(self) -> Groups | None:
        """The process groups of today's members."""
        return self._formed

    @property
    def awaited(self) -> Sequence[int]:
        """The members."""
        return self.membership.view.ranks

    def form(self, view: View, limit_s: float = _FORM_S) -> bool:
        """Meet the other members of a view; false where there is a newer one, or where they do not come."""
        place, size = view.ranks.index(self.rank), len(view.ranks)
        made: list[GlooGroup] = []

        def meet() -> None:
            try:
                for name in ("gradients", "control"):
                    with self.membership.connection(f"generation/{view.generation}/{name}") as store:
                        made.append(GlooGroup(store, place, size, limit_s, _OLD_S))
            except (RuntimeError, OSError) as error:
                _log.info("rank %d: generation %d was not formed: %s", self.rank, view.generation, error)

        # on a thread that is left to itself where a member dies meanwhile: nothing else ends this
        thread = self.membership.spawn(meet)
        while thread.is_alive():
            thread.join(_SLICE_S / 4)
            if self.membership.view.generation > view.generation or self.closing:
                return False
        if len(made) < 2:
            return False
        old, self._formed = self._formed, Groups(made[0], made[1], view.ranks)
        self.generation = view.generation
        if old is not None:
            for group in (old.gradients, old.control):
                group.drop()
        return True

    def exchange(self, tensor: Tensor, view: View) -> list[Tensor]:
        """Every member's ``tensor``. Raises `MembersChanged` where there is a newer view before that."""
        tensors = [torch.empty_like(tensor) for _ in view.ranks]
        self.wait_in(view, self.groups.control.all_gather(tensors, tensor))
        return tensors

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``; when members may leave, for an absent rank that of the lowest member."""
        if not self.membership.watches:
            return super().gather(value)
        membership = self.membership
        membership.publish(f"gathered/{self.rank}", json.dumps(value))

        def said() -> dict[int, str | None]:
            return {rank: membership.published(f"gathered/{rank}") for rank in membership.view.ranks}

        words = self._poll(lambda: None if None in (words := said()).values() else words, "the comparison of states")
        values = {rank: json.loads(word) for rank, word in words.items() if word is not None}
        return [values.get(rank, values[min(values)]) for rank in range(self.world_size)]

    def of_rank0(self, numbers: Tensor) -> Tensor:
        """What the stages are planned from: the lowest member's ``numbers``, for who comes later too."""
        membership = self.membership

        def published() -> str | None:
            if (word := membership.published("plan")) is None and self.rank == min(membership.view.ranks, default=-1):
                membership.publish("plan", json.dumps(numbers.tolist()))
            return word

        return torch.tensor(json.loads(self._poll(published, "the stages")), dtype=numbers.dtype)

    def plan(self) -> tuple[list[float], list[float]]:
        """What the stages were planned from, in a running job. Raises `PeerFailed` where it is not known in time."""
        order, seconds = json.loads(self._poll(lambda: self.membership.published("plan"), "the stages"))
        return order, seconds

    def publish_name(self, key: int, name: str) -> str:
        first = super().publish_name(key, name)
        self.membership.note(f"name/{key}", first)
        return first

    def published_name(self, key: int) -> str | None:
        if (name := super().published_name(key)) is not None:
            self.membership.note(f"name/{key}", name)
        return name

    def _poll(self, find: Callable[[], Found | None], what: str) -> Found:
        """What ``find()`` finds in the store; members may leave meanwhile. Raises `PeerFailed` after ``give_up_s``."""
        until = time.monotonic() + self.give_up_s
        while (found := find()) is None:
            if self.ended is not None:
                raise self.ended
            if time.monotonic() > until:
                raise PeerFailed(f"rank {self.rank}: {what} did not come within give_up_s={self.give_up_s:g}")
            time.sleep(0.01)
        return found

    def wait_in(self, view: View, work: dist.Work) -> None:
        """Wait for a collective among the members of a view, while it is the newest one."""
        while True:
            try:
                if is_over(work, _SLICE_S):
                    return
            except RuntimeError as error:
                self.membership.connection_broke()
                if not self.membership.wait_newer(view.generation, self.give_up_s):
                    raise PeerFailed(f"rank {self.rank}: {error}") from error
            if self.membership.view.generation > view.generation:
                raise MembersChanged

    def wait(self, work: dist.Work, step: int, what: str, give_up_s: float | None = None, epoch: int = 0) -> None:
        """Wait for a collective; raises `MembersChanged` when the members do, `PeerFailed` after ``give_up_s``."""
        until = time.monotonic() + (give_up_s or self.give_up_s)
        broke, long_wait = False, LongWait(self, step, what)
        while self.epoch == epoch:
            if self.ended is not None:
                raise self.ended
            try:
                if not broke and is_over(work, _MERGE_SLICE_S):
                    return
            except RuntimeError:
                broke = True
                self.membership.connection_broke()
            if broke:
                time.sleep(_SLICE_S)
            if self.generation == 0 and self.membership.view.generation > 0 and not self.membership.watches:
                raise PeerFailed(f"{what}: {_changes(self.membership.view)}, while the model was wrapped")
            if time.monotonic() > until:
                raise PeerFailed(self.explain(what))
            long_wait.look()
        raise MembersChanged

    def close(self) -> None:
        """Leave the job, when the others have come as far."""
        self.membership.leave_at_the_end()
        self.membership.close()
        super().close()


class Led(Protocol):
    """What a rank does as the members change; see `Member`."""

    def freeze(self) -> MergeProgress:
        """Launch nothing; how far it has come."""

    def telemetry_of(self, step: int) -> Tensor:
        """The telemetry of a merged step."""

    def regroup(self, groups: Groups, view: View, repair: Repair, telemetry: Tensor, provenance: Provenance) -> None:
        """Go on."""

    def put_out(self) -> None:
        """Take part in nothing."""

    def end(self, error: BaseException) -> None:
        """The job ends."""


class Regrouping:
    """The thread that leads a rank from view to view, from `start` to `close`.

    The gradients of a step are merged in at most ``max_buckets``, whatever the stages.
    A rank that was put out asks to be let in again as soon as its training thread is back.
    """

    def __init__(self, channel: ElasticChannel, led: Led, *, max_buckets: int) -> None:
        self._channel, self._membership, self._led = channel, channel.membership, led
        self._max_buckets = max_buckets
        self._closing = False
        self._newer_at = time.monotonic()  # when the members changed last
        self._asked_at: float | None = None
        self._silence = Silence(_LOOK_S)  # of the job's store
        self.on_joined: Callable[[View], None] | None = None  # this rank was let in
        self.leaves: Callable[[], None] | None = None  # it leaves where it has to
        self.is_back: Callable[[], bool] | None = None  # its training thread would take a state
        self.on_changed: Callable[[MembersReport], None] | None = None
        self._reported = self._membership.view  # up to which changes were reported
        self._thread = threading.Thread(target=self._run, name="straggle-regrouping", daemon=True)

    def start(self) -> None:
        """Start the thread: from now on the others go on where a member leaves."""
        self._membership.watches = True
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = self._channel.closing = True
        # a hook of this thread may hold the model last, and then it is this thread that closes it
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def ask(self) -> None:
        """Ask to be let in."""
        self._asked_at = time.monotonic()
        self._membership.request_join()

    def ask_anew(self) -> None:
        """The same for a rank that left with an error, and whose loop goes on all the same."""
        if self._membership.left_for_good:
            self._membership.left_for_good = False
            self.ask()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._check_store()
                try:
                    self._look()
                except (dist.DistStoreError, dist.DistNetworkError, OSError):
                    self._membership.forget_store()  # whose loss is known by its silence
                    time.sleep(_LOOK_S)
        except BaseException as error:
            if not self._closing:
                self._channel.ended = error
                self._led.end(error)
                if isinstance(error, TooFewRanks):
                    self._membership.end(str(error))

    def _look(self) -> None:
        """Do what is to be done now, or wait for a moment."""
        if self._membership.is_member and self.leaves is not None:
            self.leaves()
        if self._membership.wait_newer(self._channel.generation, _LOOK_S):
            self._newer_at = time.monotonic()
            self._follow()
        elif time.monotonic() - self._newer_at > _RETURN_S:
            self._check_number(self._membership.view, with_returning=False)
        if not self._membership.is_member:
            self._ask_if_ready()

    def _check_store(self) -> None:
        """Without its store no rank can leave or come back, so the job ends when that has been lost for too long."""
        membership = self._membership
        signs = {_ANSWERS: str(membership.num_beats), _TURNS: str(membership.num_turns)}
        self._silence.look(time.monotonic(), signs)
        if _TURNS in self._silence.longer_than(_STUCK_S):
            membership.beat_anew()
            self._silence.forget(_TURNS)
        if _ANSWERS in self._silence.longer_than(self._channel.give_up_s):
            raise StoreUnreachable(
                f"rank {self._channel.rank}, step {membership.step}: {self._channel.store.place} has not "
                f"answered for give_up_s={self._channel.give_up_s:g}, and without it members cannot change"
            )

    def _ask_if_ready(self) -> None:
        if self._asked_at is not None:
            self._membership.check_refused()
            if time.monotonic() - self._asked_at > _ASK_AGAIN_S:  # who heard it may be gone
                self.ask()
        elif not self._membership.left_for_good and self.is_back is not None and self.is_back():
            self.ask()

    def _follow(self) -> None:
        """Come to the newest view."""
        membership = self._membership
        if membership.held is not None:
            self._let_in(*membership.held)
        view = membership.view
        if view.generation <= self._channel.generation:
            return
        self._check_number(view, with_returning=True)
        if not membership.is_member:
            self._say_why(view)
            self._led.put_out()
            self._channel.generation = view.generation
            return
        began_at = time.monotonic()
        progress = self._led.freeze()
        joins = progress.step < 0
        if joins and self._channel.rank not in view.joined:  # it came too late to the view that let it in
            late = "returns: it was let in, and the members changed before it was ready"
            membership.leave(Leaving("returns", late), for_good=False)
            return
        try:
            if not self._channel.form(view):
                return
            if joins and self.on_joined is not None:
                self._asked_at = None
                self.on_joined(view)
            self._regroup(view, progress)
        except MembersChanged:
            return
        self._report(view, time.monotonic() - began_at)

    def _say_why(self, view: View) -> None:
        """A rank that others have put out knows of it here."""
        changes = view.changes_since(self._reported, dict(self._membership.changes))
        self._reported = view
        for change in changes:
            if change.rank == self._channel.rank and not change.joined and change.kind != "done":
                _log.warning(
                    "rank %d is no member from generation %d on: %s", change.rank, view.generation, change.reason
                )

    def _report(self, view: View, seconds: float) -> None:
        changes = view.changes_since(self._reported, dict(self._membership.changes))
        self._reported = view
        if self.on_changed is not None and changes:
            self.on_changed(
                MembersReport(
                    view.generation,
                    self._membership.step,
                    view.ranks,
                    self._membership.world_size,
                    left={change.rank: change.reason for change in changes if not change.joined},
                    joined={change.rank: change.reason for change in changes if change.joined},
                    seconds=seconds,
                    left_kinds={change.rank: change.kind for change in changes if not change.joined},
                )
            )

    def _check_number(self, view: View, *, with_returning: bool) -> None:
        membership = self._membership
        if view.shortfall(membership.least, membership.world_size, with_returning=with_returning):
            raise TooFewRanks(
                f"rank {self._channel.rank}, step {membership.step}: {len(view.members)} of {membership.world_size} "
                f"ranks are left ({_changes(view)}), and the job goes on with {membership.least} at least "
                "(Elastic.min_ranks)",
                view.ranks,
            )

    def _regroup(self, view: View, progress: MergeProgress) -> None:
        channel = self._channel
        # the stages may be planned on some members and not yet on others
        own = torch.tensor(progress.encode(self._max_buckets), dtype=torch.int64)
        assert len(own) == progress_length(self._max_buckets)
        gathered = channel.exchange(own, view)
        known = {
            rank: MergeProgress.decode(numbers.tolist()) for rank, numbers in zip(view.ranks, gathered, strict=True)
        }
        way = repair(known)
        if way.is_ahead_of(progress):
            late = "returns: it was a leaf, and later than the ring in the step in which the members changed"
            self._membership.leave(Leaving("returns", late), for_good=False)
            raise MembersChanged
        telemetry = torch.empty(0)
        if way.completed is not None:
            telemetry = self._led.telemetry_of(way.completed)
            channel.wait_in(view, channel.groups.control.broadcast(telemetry, view.ranks.index(way.giver)))
        self._led.regroup(channel.groups, view, way, telemetry, provenance(known, way))

    def _let_in(self, step: int, leads: bool) -> None:
        """The members wait for a view in which others come in."""
        self._membership.held = None
        until = time.monotonic() + 5.0
        if leads:
            self._membership.admit(step)
        while self._membership.view.generation <= self._channel.generation and time.monotonic() < until:
            time.sleep(0.002)
            self._membership.look()


def describe_for_newcomers(words: dict[str, Any]) -> str:
    """What a newcomer must have in common with the members."""
    return json.dumps(words, sort_keys=True)


def _changes(view: View) -> str:
    return "; ".join(f"rank {c.rank} {'came in' if c.joined else 'left'}: {c.reason}" for c in view.changes)


def _ended_start(store: Any, rank: int) -> Exited | None:
    """How the process of a rank ended, and which of its starts that was, where an agent has said so."""
    return exited(store, rank) if "STRAGGLE_ELASTIC" in os.environ else None
