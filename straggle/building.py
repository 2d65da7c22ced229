"""Builds a wrapped model: the core, and the optional parts that its arguments ask for. The core knows none of these.

A part is loaded when a model that has it is built: `import straggle` costs a job nothing for what it does not use.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from straggle import world
from straggle.backward.loop_hooks import CallBracket
from straggle.loop.drops import DropLog, Names
from straggle.loop.model_parts import HookRegisters, ModelParts, Options, make_alike, model_parts, rank_parts
from straggle.loop.open_step import KeptState
from straggle.loop.optimizer_steps import OptimizerSteps
from straggle.loop.plans import Planning, Replanning
from straggle.loop.step_warnings import StepWarnings
from straggle.loop.uneven import Joins
from straggle.merge.alike import Wrapped
from straggle.merge.late.replica import Replica
from straggle.merge.round.buffers import bytes_on_wire
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.telemetry import Columns
from straggle.merge.saved_state import ResumeState, SharedMemory
from straggle.merge.state.module_state import ModuleState
from straggle.merge.wing import Wings
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import OWN_GROUP, is_part_of_job, ranks_of_job
from straggle.report import MembersReport
from straggle.source.replicated import ReplicatedSource

if TYPE_CHECKING:
    from straggle.links.job_pings import JobPings
    from straggle.members.views.view import Elastic
    from straggle.members.wing import Members
    from straggle.pools.pulling import Pulling
    from straggle.replay.wing import Replay
    from straggle.stuck.wing import StuckWatch

_OPTIONAL = (
    "backward.device_clock",
    "links.job_pings",
    "members.regrouped.meeting",
    "members.wing",
    "merge.late.device_watch",
    "merge.round.queued_buffers",
    "merge.state.queued_averages",
    "pools.pulling",
    "replay.wing",
    "stuck.wing",
)


Phase = Callable[[Round], object]


def load_optional_parts() -> None:
    """Load all of them now: in a process that workers are forked from, or in which ranks are threads."""
    for name in _OPTIONAL:
        import_module(f"straggle.{name}")


class MembersHooks:
    """What a user has registered for changes of one model's members; a copy of it has none.

    ``last_report``: what the hooks were called with last.
    """

    def __init__(self) -> None:
        self.register: OrderedDict[int, Callable[[MembersReport], None]] = OrderedDict()
        self.last_report: MembersReport | None = None

    def changed(self, report: MembersReport) -> None:
        """Call the hooks: members have left or joined. Runs on the thread that follows the members."""
        self.last_report = report
        for hook in tuple(self.register.values()):
            hook(report)


@dataclass(frozen=True)
class OptionalParts:
    """The wings of a model; ``None``: ``pings`` if links are not measured, ``members`` if ranks cannot leave."""

    replay: Replay
    pulling: Pulling
    pings: JobPings | None
    stuck: StuckWatch
    members: Members | None

    def all_of_them(self) -> Wings:
        """As the core has them: in each phase they come in this order."""
        asked_for = [wing for wing in (self.pings, self.members) if wing is not None]
        return Wings(self.replay, self.pulling, *asked_for, self.stuck)


@dataclass(frozen=True)
class Built:
    """A model's parts.

    ``drops``: on ranks that may have to say them. ``phases``: what the training thread goes through when it has left a
    step, whose gradients are in place; and when that was a usual one.
    """

    parts: ModelParts
    wings: OptionalParts
    steps: OptimizerSteps
    warnings: StepWarnings
    replanning: Replanning
    planning: Planning
    joins: Joins
    drops: DropLog | None
    resume_state: ResumeState
    phases: tuple[tuple[Phase, ...], tuple[Phase, ...]]

    def closing(self) -> Callable[[], None]:
        """What ends the threads of the model, and removes its hooks."""
        return partial(_close, self.parts, self.steps.handles, self.drops)


def check_mesh(mesh: object, **others: object) -> None:
    """Raise ``ValueError`` for arguments that cannot be given together with ``mesh``."""
    if mesh is not None and (given := [f"{name}=" for name, value in others.items() if value is not None]):
        why, left_out = {
            "process_group=": ("the mesh has the group over which replicas are merged", "process_group="),
            "members=": (
                "a mesh of several replicas cannot be made again for one that comes back, so write "
                "fully_shard(..., mesh=straggle.replica_mesh())",
                "mesh=",
            ),
        }[given[0]]
        raise ValueError(f"mesh= and {given[0]}: {why}; leave {left_out} out")


def build(
    module: nn.Module,
    options: Options,
    process_group: dist.ProcessGroup | None,
    *,
    mesh: DeviceMesh | None,
    members: Elastic | None,
    wrapper: type[nn.Module],
    registers: HookRegisters,
    members_hooks: MembersHooks,
) -> Built:
    """Meet the other ranks, and build what the model needs; parameters and buffers are rank 0's from here on.

    Raises ``ValueError`` on all ranks for a module or options that cannot be, ``RuntimeError`` without a process group.
    """
    from straggle.pools.pulling import Pulling
    from straggle.replay.wing import Replay
    from straggle.stuck.wing import StuckWatch

    columns = all_columns()
    if members is not None and options.own_group:
        raise ValueError("members=Elastic() is for all ranks of the job: leave process_group out")
    if members is None and is_part_of_job():
        raise ValueError(
            "after init_replica() the process group has the ranks of one replica, and each replica would train by "
            "itself: write members=Elastic() in StagedDataParallel(...)"
        )
    wrapped = options.wrapped(module, wrapper, columns)
    if mesh is not None or options.sharded:
        source, channel, replica = _meet_replica(module, wrapped, options, mesh, members)
    else:
        source, channel = ReplicatedSource(module), _meet(module, wrapped, options, process_group, members)
        replica = Replica.of_one_rank(channel)
    # before the rounds are built: they take the groups as they are then; all ranks together
    if measures := bool(options.of_wings["links"]) and channel.world_size > 1 and world.has_sockets:
        channel.widen()
    state = ModuleState(module, options.merge.buffers, channel.rank, source.slots[0].device)
    # after all ranks have the same parameters: from here on nothing is compared
    rank = rank_parts(module, options, source, channel, replica, state, columns)
    member = None if members is None else _members(rank)
    stuck = StuckWatch(rank, registers, options.late_handling.stuck_after_s)
    pings = None
    if measures:
        pings = _pings(rank, member, merged_bytes=bytes_on_wire(source.slots, options.merge.dtype_on_wire))
    wings = OptionalParts(Replay(rank, channel), Pulling(rank), pings, stuck, member)
    parts = model_parts(options, source, rank, state, wings.all_of_them(), registers)
    # the wing is older than the step: phases of it are called by the coordinator, which the step needs
    wings.pulling.attach(parts.opened)
    drops = _drop_log(module, rank, options, may_be_lowest=member is not None or rank.replica.place == 0)
    built = _with_the_loop(module, parts, wings, registers, drops)
    if member is not None:
        _attach(member, module, built, members_hooks)
    return built


def all_columns() -> Columns:
    """Where rows have their numbers: those of the wings, too.

    Also of those that this model has not: rows go with the last bucket, whose length decides in which order gloo adds.
    So a run whose members change is replayed exactly by ranks that do not.
    """
    from straggle.members import rows as of_members
    from straggle.pools import rows as of_pools

    return Columns((*of_pools.COLUMNS, *of_members.COLUMNS))


def _members(rank: RankParts) -> Members:
    from straggle.members.regrouped.elastic import ElasticChannel
    from straggle.members.wing import Members

    assert isinstance(rank.channel, ElasticChannel)
    return Members(rank, rank.channel)


def _pings(rank: RankParts, members: Members | None, *, merged_bytes: int) -> JobPings:
    from straggle.links.job_pings import JobPings

    return JobPings(
        rank,
        merged_bytes=merged_bytes,
        begins=members is not None and members.comes_late,
        out=frozenset if members is None else members.put_out_ranks,
        on_long=None if members is None else members.member.judge_long_merge,
    )


def _drop_log(module: nn.Module, rank: RankParts, options: Options, *, may_be_lowest: bool) -> DropLog | None:
    """What says what is dropped, on a rank that may have to."""
    every_s, replica = options.merge.log_every_s, rank.replica
    if every_s == math.inf or not (replica.is_first and may_be_lowest):
        return None
    names, max_lag = Names.of(module, rank.channel, replica), options.late_handling.max_lag
    return DropLog(names, replica.place, every_s, max_lag=max_lag)


def _with_the_loop(
    module: nn.Module, parts: ModelParts, wings: OptionalParts, registers: HookRegisters, drops: DropLog | None
) -> Built:
    """What the loop around a step needs beside it."""
    from straggle.stuck.collectives import called_in

    options, channel, coordinator = parts.options, parts.channel, parts.coordinator
    drops_nonfinite = options.merge.nonfinite == "drop"
    steps = OptimizerSteps(parts.source.all, parts.opened, drops_nonfinite=drops_nonfinite)
    warnings = StepWarnings(channel, options.merge, parts.opened, coordinator, called_in)
    parts.opened.follow_loops(joins := Joins(parts.replica.ranks))
    resume_state = ResumeState(
        coordinator,
        module,
        options.estimator,
        stages=options.stages,
        world_size=channel.world_size,
        parts={"pool": wings.pulling},
        sharded=options.sharded,
    )
    replanning = Replanning(module, parts, steps, resume_state)
    planning = Planning(module, parts, replanning)
    counts, says = ((), ()) if drops is None else ((drops.drops.add,), (drops.merged,))
    phases: tuple[Phase, ...] = (
        warnings.merged,  # what the loop seems to do wrong, before anything of the step may raise
        *counts,  # what ranks did not give, on the rank that says it
        *says,  # in the log
        joins.merged,  # ends loops over `join`, if no rank has data any more
        *parts.wings.left,  # what they learn from the step
        replanning.merged,  # raises on all ranks alike, before they plan together
        planning.merged,  # all ranks together, before code of the user's may raise on one of them
        warnings.of_different_replicas,  # in words
        registers.merged,  # the user's hooks
        *parts.wings.last,  # whether this rank's loop goes on, which may take long
    )
    # of a usual step, in which replicas are the same (`Table.is_usual`)
    unusual = (replanning.merged, warnings.of_different_replicas, *says)
    usual_phases = tuple(phase for phase in phases if phase not in unusual)
    both = phases, usual_phases
    return Built(parts, wings, steps, warnings, replanning, planning, joins, drops, resume_state, both)


def _attach(members: Members, module: nn.Module, built: Built, hooks: MembersHooks) -> None:
    parts = built.parts
    members.attach(
        parts.coordinator,
        parts.state,
        max_buckets=len(parts.source.slots),
        on_changed=partial(_members_changed, weakref.ref(hooks), built.wings.stuck),
        begin_with_plan=built.planning.begin_with,
        shared={
            "straggle.joins": built.joins,
            "straggle.kept": KeptState(parts.opened),
            "straggle.estimator": SharedMemory(parts.options.estimator, module),
            "straggle.pulling": built.wings.pulling,
            "straggle.state": parts.state,
        },
        source=parts.source,
    )


def _meet(
    module: nn.Module,
    wrapped: Wrapped,
    options: Options,
    process_group: dist.ProcessGroup | None,
    members: Elastic | None,
) -> Channel:
    """The channel to the other ranks, which have the same module and options."""
    give_up_s = options.late_handling.give_up_s
    if members is None:
        channel = Channel(process_group, give_up_s=give_up_s)
        make_alike(module, wrapped, channel)
        return channel
    from straggle.members.regrouped.meeting import meet_members

    kind = next((own.device.type for own in module.parameters()), "cpu")
    return meet_members(members, wrapped, partial(make_alike, module, wrapped), give_up_s=give_up_s, kind=kind)


def _meet_replica(
    module: nn.Module, wrapped: Wrapped, options: Options, mesh: DeviceMesh | None, members: Elastic | None
) -> tuple[ReplicatedSource, Channel, Replica]:
    """The same for a model that is sharded over the ranks of each replica, over which ``mesh`` goes.

    Without a mesh replicas are ``members``, and the ranks of one are all that this rank can meet by itself.
    """
    from straggle.source.replica_ranks import copied_inside, name_of_place, ranks_in_a_row, ranks_of_replica
    from straggle.source.sharded import ShardedSource  # imports DTensor, which takes most of a second

    if wrapped.refusal:  # all ranks have the same module
        raise ValueError(wrapped.refusal)
    ranks = ranks_in_a_row(module) if mesh is None else ranks_of_replica(module, mesh)
    give_up_s = options.late_handling.give_up_s
    inside = Channel(
        world.dist.new_group(ranks, use_local_synchronization=True, group_desc=OWN_GROUP),
        give_up_s=give_up_s,
        names=ranks_of_job(ranks),
    )
    for name, tensor in copied_inside(module, len(ranks)):
        inside.broadcast(tensor, name=name)
    channel: Channel
    if mesh is not None:
        copies = mesh.get_group()
        channel = Channel(copies, give_up_s=give_up_s, names=world.dist.get_process_group_ranks(copies))
        make_alike(module, wrapped, channel)
    else:
        from straggle.members.regrouped.meeting import meet_members

        assert members is not None
        alike = partial(make_alike, module, wrapped)
        kind = next(module.parameters()).device.type
        channel = meet_members(members, wrapped, alike, give_up_s=give_up_s, of_replica=inside, kind=kind)
    source = ShardedSource(module, len(ranks), channel.world_size)
    replica = Replica.of_ranks(channel, inside, source.inside, partial(name_of_place, module), source.own_data)
    return source, channel, replica


def _members_changed(reference: weakref.ref[MembersHooks], stuck: StuckWatch, report: MembersReport) -> None:
    stuck.members_changed(report)
    if (hooks := reference()) is not None:
        hooks.changed(report)


def _close(parts: ModelParts, handles: Sequence[RemovableHandle | CallBracket], drops: DropLog | None) -> None:
    if drops is not None:
        drops.close()
    # wings before the coordinator: their threads ask it, and its channel
    for phase in parts.wings.close:
        phase()
    # before the vote: the stand-in may be in one, and ends here
    parts.coordinator.close()
    if parts.replica.vote is not None:
        parts.replica.vote.close()
    # after the threads: none of them may see a model that is half taken apart
    parts.hooks.close()
    parts.state.close()
    for handle in handles:
        handle.remove()
