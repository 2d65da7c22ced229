"""The channel of a job whose members come and go; `regrouping.py` leads it from one view to the next.

Each view has process groups of its own, under a prefix of the store. Old groups are dropped and never waited for.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.backward.device import device_of
from straggle.members.agents import Exited, exited
from straggle.members.regrouped.formed_again import Communicator
from straggle.members.views.in_replica import ALONE, InReplica
from straggle.members.views.membership import Membership, new_incarnation
from straggle.members.views.view import Elastic, View
from straggle.merge.wire.channel import Channel, GroupsChanged, PeerFailed
from straggle.merge.wire.groups import (
    GlooGroup,
    ProcessGroups,
    is_of_peer,
    is_over,
    is_part_of_job,
    job_rank,
    job_size,
    let_go,
)
from straggle.merge.wire.long_wait import LongWait
from straggle.merge.wire.store import check_answers, connect_all, default_store
from straggle.waits import end_of, until

_SLICE_S = 0.02
_MERGE_SLICE_S = 0.1  # each slice that ends before the merge costs 0.2 ms of CPU, for gloo's timeout error
_FORM_S = 20.0  # for the members of a view to meet
_NCCL_S = 10.0  # then for each of the four things by which nccl forms its communicator again
OLD_S = 600.0  # after which gloo itself ends launched collectives: those of a group that is not used any more, too
_OLD_LOOK_S = 0.1  # between two checks whether they have ended
_models = world.OfProcess(count)  # numbers the prefixes of elastic models in the store

_log = logging.getLogger(__name__)

Found = TypeVar("Found")


class MetAnew(Exception):
    """A rank was restarted while the model was wrapped: all ranks meet again and wrap it once more."""


class ElasticChannel(Channel):
    """The channel of a model whose ranks may leave and come back; it uses all ranks of the job.

    Gradients go over gloo, or over nccl if the job's process group is one of nccl and has no gloo for ``kind``, the
    type of device that they are on; all else goes over gloo.

    ``number``: that of the model among those of its process, the same on all ranks.
    ``comes_late``: the job has begun without this rank. ``of_replica``: the ranks that are a member together, if that
    is not one rank; then this is the channel of those that have the same shard of all members.
    """

    groups_change = True

    def __init__(
        self, elastic: Elastic, *, give_up_s: float, of_replica: Channel | None = None, kind: str = "cpu"
    ) -> None:
        self._elastic, self._of_replica, self._kind = elastic, of_replica, kind
        self._formed: ProcessGroups | None = None
        self._made: Sequence[GlooGroup] = ()  # those groups of `formed` that are gloo's
        self._communicator: Communicator | None = None  # for gradients, over nccl
        self._waits_for_old = world.Lock()
        self.generation = -1
        self.ended: BaseException | None = None  # what ended the job for this rank
        self.closing = False
        super().__init__(None, give_up_s=give_up_s)

    def _time_limit_of(self, parent: dist.ProcessGroup) -> float:
        """That of this rank's replica, if it has others: the group of all ranks is not used then."""
        return super()._time_limit_of(parent) if self._of_replica is None else self._of_replica.patience.group_s

    def _meet(self, parent: dist.ProcessGroup) -> str:
        config = str(world.dist.get_backend_config(parent))
        over_nccl = self._queued and f"{self._kind}:gloo" not in config.split(",")
        self._queued = False  # the host waits for each merge: all members must have it
        if over_nccl and (self._of_replica is not None or "nccl" not in config):
            raise ValueError(
                "members=Elastic() needs a gloo process group, or one of nccl if a rank alone has a copy of the model: "
                'write dist.init_process_group("gloo"), or leave members out'
            )
        self.number = next(_models.here)
        corner = f"straggle/elastic/{self.number}"
        inside, incarnation = self._take_place()
        store = default_store()
        check_answers(store, self.give_up_s)
        if over_nccl:
            has_cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
            connect = partial(connect_all, store, f"{corner}/nccl")
            self._communicator = Communicator(connect, self.rank, self.world_size, device_of(device))
        self.membership = Membership(
            self.rank,
            self.world_size,
            self._elastic,
            connect=partial(connect_all, store, corner),
            exited=_ended_start,
            inside=inside,
            incarnation=incarnation,
        )
        self._until = world.monotonic() + self.patience.outside_s  # for the first view
        self.meet_members()
        return f"{corner}/shard{inside.shard}" if inside.size > 1 else corner

    def _take_place(self) -> tuple[InReplica, str]:
        """This process inside of its member, and the name that all processes of the member have."""
        self.rank, self.world_size = job_rank(), job_size()
        replica, beside = self._of_replica, world.dist.get_world_size()
        if is_part_of_job() and (replica is None or replica.world_size != beside):
            raise ValueError(
                f"members=Elastic() after init_replica(), which began a replica of {beside} ranks, and the model is "
                f"sharded over {1 if replica is None else replica.world_size}: call fully_shard() over all {beside}"
            )
        if replica is None:
            return ALONE, new_incarnation()
        inside = InReplica(replica.rank, replica.world_size)
        self.rank, self.world_size = self.rank // inside.size, self.world_size // inside.size
        self.names = [inside.rank(member) for member in range(self.world_size)]
        return inside, replica.gather(new_incarnation(), "incarnations")[0]

    def meet_members(self) -> None:
        """Meet the ranks of the job, or find that it has begun. A first view that is not formed is given up.

        Raises `PeerFailed` if the ranks have not met within the time limit of the process group.
        """
        membership, limit = self.membership, self.patience.words("outside")
        try:
            while not (late := membership.begin(left_s := max(0.0, self._until - world.monotonic()), limit)):
                if membership.is_under_way or self.form(membership.view):
                    break
                if not left_s:
                    raise PeerFailed(
                        f"rank {self.name}, before step 0: the ranks of the job have not met within {limit}"
                    )
                membership.annul(membership.view)
        except BaseException:
            self.part()
            raise
        self.comes_late = late

    def part(self) -> None:
        """Follow the members no longer, and free nccl's communicator: at the end, or if the model was not wrapped."""
        self.membership.close()
        if self._communicator is not None:
            self._communicator.close()

    @staticmethod
    def _connect(store: Any, corner: str) -> Any:
        return connect_all(store, corner)

    @property
    def formed(self) -> ProcessGroups | None:
        """The process groups of the current members."""
        return self._formed

    def merged(self, step: int) -> None:
        super().merged(step)
        for group in self._made:
            group.forget_ended()

    @property
    def awaited(self) -> Sequence[int]:
        """The members."""
        return self.membership.view.ranks

    def form(self, view: View, limit_s: float = _FORM_S) -> bool:
        """Meet the other members of a view; false if there is a newer view, or if a member does not come."""
        turn = self.revoke()
        place, size = view.ranks.index(self.rank), len(view.ranks)
        made: dict[str, Any] = {}
        given_up, has_ended = world.Event(), world.Event()
        corner = f"generation/{view.job}/{view.generation}"

        def meet() -> None:
            try:
                # gloo's own wait for a missing member cannot be interrupted; this one can
                if not self._come_to(corner, place, size, given_up, limit_s):
                    return
                if self._communicator is None:
                    # in parallel: each group asks the store for one rank after the other
                    control = self.membership.spawn(make, "control")
                    make("data")
                    end_of([control])
                    return
                make("control")
                if "control" in made:
                    # refused if this thread is late, and a newer view has its turn
                    made["data"] = self._communicator.form(made["control"], size, _NCCL_S, turn)
            except (RuntimeError, OSError) as error:
                self._note_unformed(view, error)
            finally:
                has_ended.set()

        def make(name: str) -> None:
            try:
                with self.membership.connection(f"{corner}/{name}") as store:
                    made[name] = GlooGroup(store, place, size, limit_s, OLD_S)
            except (RuntimeError, OSError) as error:
                self._note_unformed(view, error)

        # on a thread that is abandoned if a member dies meanwhile: nothing else ends this call
        self.membership.spawn(meet)
        # gloo needs no limit, and would be tried again under the same keys while that thread is still there
        until(
            lambda: has_ended.is_set() or self._is_past(view),
            every_s=_SLICE_S / 4,
            limit_s=math.inf if self._communicator is None else 2 * limit_s + 4 * _NCCL_S,
            pause=has_ended.wait,
        )
        given_up.set()
        if not has_ended.is_set() or len(made) < 2:
            if self._communicator is not None and "control" in made and not self._is_past(view):
                # others may have formed theirs, and wait for this rank
                self.membership.detector.connection_broke(generation=view.generation)
            return False
        # the groups before their number: who reads the number of a view finds its groups
        self._formed = ProcessGroups(made["data"], made["control"], view.ranks)
        self.generation = view.generation
        self._keep_groups(tuple(group for group in made.values() if isinstance(group, GlooGroup)))
        return True

    def revoke(self) -> int:
        """The members change: end what is on its way over nccl. What gloo has on its way ends by itself.

        Returns the turn in which nccl's communicator may be formed again, until the next call.
        """
        return 0 if self._communicator is None else self._communicator.revoke()

    def _come_to(self, corner: str, place: int, size: int, given_up: world.Event, limit_s: float) -> bool:
        """Say that this member is there, and wait for the others; false if it is given up, or takes too long."""
        with self.membership.connection(corner) as store:
            store.set(f"here/{place}", "")
            all_here = [f"here/{other}" for other in range(size)]
            until(lambda: given_up.is_set() or store.check(all_here), every_s=_SLICE_S / 4, limit_s=limit_s)
            return not given_up.is_set() and bool(store.check(all_here))

    def _is_past(self, view: View) -> bool:
        """Whether nothing is to be merged in this view any more."""
        return self.membership.view.generation > view.generation or self.closing or self._is_annulled(view)

    def leave_groups(self, view: View) -> None:
        """This rank is no member in ``view``. While it kept its groups, its peers would have to keep theirs with it."""
        self._formed = None
        self._keep_groups(())
        self.pass_over(view)

    def pass_over(self, view: View) -> None:
        """This rank does not go on in ``view``, and waits for a newer one."""
        self.generation = view.generation

    def end(self, error: BaseException) -> None:
        """The job ends here for this rank: whoever waits for the members raises this."""
        self.ended = error

    def close_soon(self) -> None:
        """The model is being closed: nothing that the members merge is waited for."""
        self.closing = True

    def _keep_groups(self, made: Sequence[GlooGroup]) -> None:
        old, self._made = self._made, made
        if old:
            self.drop(old)

    def _note_unformed(self, view: View, error: Exception) -> None:
        _log.info("rank %d: generation %d was not formed: %s", self.name, view.generation, error)

    def drop(self, groups: Sequence[GlooGroup]) -> None:
        """Free groups on a thread of its own: that takes long, and the members wait for whoever forms the next view."""
        self.membership.spawn(self._drop, groups)

    def _drop(self, groups: Sequence[GlooGroup]) -> None:
        for group in groups:
            group.drop()

        def is_done() -> bool:
            # the lock first: another thread that drops a group now either sees it free, or this one sees that group
            self._waits_for_old.release()
            return let_go() or self.closing or not self._waits_for_old.acquire(blocking=False)

        # a frozen rank's old group ends with it, and many views may come meanwhile: one thread waits for all
        if not let_go() and self._waits_for_old.acquire(blocking=False):
            until(is_done, every_s=_OLD_LOOK_S)

    def _is_annulled(self, view: View) -> bool:
        return not view.has_begun and self.membership.chain.annulled == view.job

    def exchange(self, tensor: Tensor, view: View) -> list[Tensor]:
        """Every member's ``tensor``. Raises `GroupsChanged` if a newer view comes first."""
        tensors = [torch.empty_like(tensor) for _ in view.ranks]
        self.wait_in(view, self.groups.control.all_gather(tensors, tensor))
        return tensors

    def gather(self, value: Any, of: str) -> list[Any]:
        """Every rank's ``value``; for an absent rank, that of the lowest member. ``of`` is used once in a job."""
        if not self.membership.detector.is_on:
            return super().gather(value, of)
        membership = self.membership
        membership.publish(f"gathered/{of}/{self.rank}", json.dumps(value))

        def said() -> dict[int, str | None]:
            return {rank: membership.published(f"gathered/{of}/{rank}") for rank in membership.view.ranks}

        # none are left once all others have ended their loops: then the poll says so
        words = self._poll(
            lambda: None if None in (words := said()).values() else words or None, "the comparison of states"
        )
        values = {rank: json.loads(word) for rank, word in words.items() if word is not None}
        return [values.get(rank, values[min(values)]) for rank in range(self.world_size)]

    def _gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's ``tensor``, while the model is wrapped; for one that never came, that of the lowest member."""
        ranks = self.groups.ranks
        tensors = [torch.empty_like(tensor) for _ in ranks]
        self._between_steps(what, partial(self.groups.control.all_gather, tensors, tensor))
        of_members = dict(zip(ranks, tensors, strict=True))
        return [of_members.get(rank, tensors[0]) for rank in range(self.world_size)]

    def broadcast(self, tensor: Tensor, source: int = 0, name: str = "tensor") -> None:
        """As the base class; if ``source`` never came, from the lowest member."""
        ranks = self.groups.ranks
        super().broadcast(tensor, ranks.index(source) if source in ranks else 0, name)

    def end_pause(self) -> None:
        """Nothing to do: each member goes on by itself, and is waited for in its next step."""

    def of_rank0(self, numbers: Tensor) -> Tensor:
        """The lowest member's ``numbers``, from which the stages are planned; kept for ranks that come later."""
        membership = self.membership

        def published() -> str | None:
            if (word := membership.published("plan")) is None and self.rank == min(membership.view.ranks, default=-1):
                membership.publish("plan", json.dumps(numbers.tolist()))
            return word

        return torch.tensor(json.loads(self._poll(published, "the stages")), dtype=numbers.dtype)

    def plan(self) -> tuple[list[float], list[float]]:
        """What a running job's stages were planned from. Raises `PeerFailed` if no answer comes."""
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
        """Call ``find()`` until it finds something; members may change. Raises `PeerFailed` if that takes too long."""

        def look() -> Found | None:
            if (found := find()) is None:
                self._check_goes_on()
            return found

        if (found := until(look, every_s=0.01, limit_s=self.patience.outside_s)) is None:
            raise PeerFailed(f"rank {self.name}: {what} did not come within {self.patience.words('outside')}")
        return found

    def _check_goes_on(self) -> None:
        """Raise what ended the job for this rank, if anything has."""
        if self.ended is not None:
            raise self.ended
        self.membership.check_done()

    def wait_in(self, view: View, work: dist.Work) -> None:
        """Wait for a collective among the members of a view, while it is the newest one."""
        while True:
            try:
                if is_over(work, _SLICE_S):
                    return
            except RuntimeError as error:
                self.membership.detector.connection_broke()
                if not self.membership.chain.wait_newer(view.generation, self.give_up_s):
                    raise PeerFailed(f"rank {self.name}: {error}") from error
            if self.membership.view.generation > view.generation:
                raise GroupsChanged

    def wait(
        self,
        work: dist.Work,
        step: int,
        what: str,
        give_up_s: float | None = None,
        epoch: int = 0,
        key: str = "",
    ) -> None:
        """Wait for a collective as the base class does. Raises `GroupsChanged` if the members change."""
        ends_at = math.inf if give_up_s is None else world.monotonic() + give_up_s
        broke, long_wait = False, LongWait(self, key or str(step), what)
        while self.epoch == epoch:
            if self.ended is not None:
                raise self.ended
            if self.closing:  # only the stand-in is left to see it, and no member comes to a step after the last one
                raise PeerFailed(f"{what}: the model is closed")
            try:
                if not broke and is_over(work, _MERGE_SLICE_S):
                    return
            except RuntimeError as error:
                if not is_of_peer(error):
                    raise self._failed(what, error) from error
                broke = True
                self.membership.detector.connection_broke(generation=self.generation)
            if broke:  # no member is asked: the members change, or this rank gives up
                until(lambda: self.epoch != epoch, every_s=_SLICE_S, limit_s=_SLICE_S)
            if self._is_annulled(self.membership.view):
                raise MetAnew
            if self.generation == 0 and self.membership.view.generation > 0 and not self.membership.detector.is_on:
                raise PeerFailed(
                    f"{what}: {self.membership.view.said(self.membership.inside.kind)}, while the model was wrapped"
                )
            if world.monotonic() > ends_at:
                raise PeerFailed(self.explain(what))
            if why := long_wait.look():
                raise PeerFailed(self.explain(what, why=why))
        raise GroupsChanged

    @property
    def uncaught(self) -> BaseException | None:
        """The exception that ends this process, if one does."""
        return self._progress.uncaught

    def close(self) -> None:
        """Leave the job: with the error that ended it, or, after the loop, when the other members have come as far."""
        error = self.uncaught
        if error is None or isinstance(error, PeerFailed) or self.membership.left_for_good:
            self.membership.leave_at_the_end()
        else:
            self.membership.leave_with_an_error(self._progress.raised(self.name, error))
        self.part()
        super().close()


def _ended_start(store: Any, rank: int) -> Exited | None:
    """How the last process of a rank ended, and its start number, if an agent has reported it."""
    return exited(store, rank) if "STRAGGLE_ELASTIC" in os.environ else None
