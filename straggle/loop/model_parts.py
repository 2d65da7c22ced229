"""The parts that a wrapped model is made of, put together on all ranks alike."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.clocks import HostLimit
from straggle.backward.hooks import ParameterHooks
from straggle.backward.stages import BalancedByTime, PlanLearner, plan_stages
from straggle.loop.hook_registers import HookRegisters
from straggle.loop.open_step import OpenStep
from straggle.loop.parameters import WrappedParameters
from straggle.loop.pulling import Pulling
from straggle.loop.uneven import Joins
from straggle.merge.alike import Wrapped, check_alike
from straggle.merge.channel import Channel
from straggle.merge.checks import check_module, check_unwrapped
from straggle.merge.coordinator import Coordinator
from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.links.job_pings import JobPings
from straggle.merge.members.elastic import ElasticChannel, MetAnew
from straggle.merge.members.healing import Healing
from straggle.merge.members.regrouping import Regrouping
from straggle.merge.members.view import Elastic
from straggle.merge.options import Merge
from straggle.merge.saved_state import RankState, SharedMemory
from straggle.merge.state.module_state import ModuleState
from straggle.policies.deadline import Deadline, LateHandling, WaitForAll
from straggle.policies.estimators import Estimator
from straggle.policies.fill_in import FillIn
from straggle.report import MembersReport
from straggle.version import __version__


@dataclass(frozen=True)
class Options:
    """What a model is wrapped with, the same on all ranks; ``own_group``: a process group that is not the job's."""

    stages: int | Sequence[str] | BalancedByTime | None
    deadline: Deadline
    estimator: Estimator
    late_handling: LateHandling
    merge: Merge
    members: Elastic | None
    own_group: bool

    def wrapped(self, module: nn.Module, wrapper: type[nn.Module]) -> Wrapped:
        """What is compared with the other ranks; a refusal too, which the others would wait for otherwise."""
        try:
            check_unwrapped(module, wrapper, OpenStep)
            check_module(module)
        except ValueError as refusal:
            return Wrapped(str(refusal))
        names = ("stages", "deadline", "estimator", "late_handling", "merge", "members")
        return Wrapped.of(module, {name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class MembersParts:
    """What follows the members of a job, where they may leave and come back."""

    channel: ElasticChannel
    regrouping: Regrouping
    healing: Healing


@dataclass(frozen=True)
class ModelParts:
    """Those of one model; ``members``: ``None`` where ranks cannot leave."""

    parameters: WrappedParameters
    channel: Channel
    coordinator: Coordinator
    members: MembersParts | None
    joins: Joins
    learner: PlanLearner
    opened: OpenStep
    pulling: Pulling
    hooks: ParameterHooks
    state: ModuleState
    rank_state: RankState


def build_parts(
    module: nn.Module,
    options: Options,
    process_group: dist.ProcessGroup | None,
    *,
    wrapper: type[nn.Module],
    registers: HookRegisters,
) -> ModelParts:
    """Meet the other ranks, and build what the model needs; parameters and buffers are rank 0's from here on.

    Raises ``ValueError`` on all ranks for a module or options that cannot be, ``RuntimeError`` without a process group.
    """
    wrapped, joins = options.wrapped(module, wrapper), Joins()
    parameters = WrappedParameters(module)
    channel = _meet(module, wrapped, options, process_group)
    state = ModuleState(module, options.merge.buffers, channel.rank, parameters.all[0].device)
    fill_in = FillIn(options.estimator)
    coordinator = Coordinator(
        parameters.all,
        plan_stages(module, options.stages),
        channel,
        deadline=CurrentDeadline(options.deadline, options.late_handling, channel.world_size),
        fill_in=fill_in,
        merge=options.merge,
        num_state=state.numel,
        membership=channel.membership if isinstance(channel, ElasticChannel) else None,
    )
    coordinator.submit_hooks = registers.submit
    device = parameters.all[0].device
    limited = device.type == "cuda" and not isinstance(options.deadline, WaitForAll)
    opened = OpenStep(
        parameters,
        coordinator=coordinator,
        state=state,
        fill_in=fill_in,
        learner=(learner := PlanLearner(options.stages, device)),
        rank=channel.rank,
        limit=HostLimit() if limited else None,
    )
    pulling = Pulling(opened, coordinator, channel)
    members = None
    if isinstance(channel, ElasticChannel):
        members = _members_parts(channel, coordinator, module, state, max_buckets=len(parameters.all))
        members.regrouping.on_changed = partial(_members_changed, weakref.ref(registers))
        memory = SharedMemory(options.estimator, module)
        members.healing.register(
            {
                "straggle.joins": joins,
                "straggle.estimator": memory,
                "straggle.pulling": pulling,
                "straggle.state": state,
            }
        )
    rank_state = RankState(
        coordinator, module, options.estimator, stages=options.stages, world_size=channel.world_size, pool=pulling
    )
    hooks = ParameterHooks(module, parameters.all, opened)
    return ModelParts(
        parameters, channel, coordinator, members, joins, learner, opened, pulling, hooks, state, rank_state
    )


def _members_parts(
    channel: ElasticChannel,
    coordinator: Coordinator,
    module: nn.Module,
    state: ModuleState,
    *,
    max_buckets: int,
) -> MembersParts:
    """What follows the members; a process that comes late is none at first."""
    regrouping = Regrouping(channel, coordinator.member, max_buckets=max_buckets)
    healing = Healing(channel, coordinator, regrouping, module, state)
    assert coordinator.member.links is not None
    healing.register({"straggle.links": coordinator.member.links})
    if channel.comes_late:
        coordinator.member.put_out()
    return MembersParts(channel, regrouping, healing)


def _meet(module: nn.Module, wrapped: Wrapped, options: Options, process_group: dist.ProcessGroup | None) -> Channel:
    """The channel to the other ranks, which have the same module and options; a late comer asks nothing yet."""
    give_up_s = options.late_handling.give_up_s
    if options.members is None:
        channel = Channel(process_group, give_up_s=give_up_s)
    elif options.own_group:
        raise ValueError("members=Elastic() is for all ranks of the job: leave process_group out")
    else:
        elastic = ElasticChannel(options.members, give_up_s=give_up_s)
        in_common = {**asdict(wrapped), "straggle": __version__}
        elastic.membership.joins.description = json.dumps(in_common, sort_keys=True)
        try:
            while not elastic.comes_late and not _become_alike(module, wrapped, elastic):
                elastic.meet_members()
            if elastic.comes_late and wrapped.refusal:
                raise ValueError(wrapped.refusal)
        except BaseException:
            elastic.membership.close()
            raise
        return elastic
    _make_alike(module, wrapped, channel)
    return channel


def _make_alike(module: nn.Module, wrapped: Wrapped, channel: Channel) -> None:
    check_alike(wrapped, channel)
    for name, parameter in module.named_parameters():
        channel.broadcast(parameter, name=f"parameter {name}")
    for name, buffer in module.named_buffers():
        channel.broadcast(buffer, name=f"buffer {name}")


def _become_alike(module: nn.Module, wrapped: Wrapped, channel: ElasticChannel) -> bool:
    """The same among ranks that may be started again meanwhile; false where the ranks have to meet again for it."""
    try:
        _make_alike(module, wrapped, channel)
        return channel.membership.has_wrapped(channel.give_up_s)
    except MetAnew:
        return False


def _members_changed(reference: weakref.ref[HookRegisters], report: MembersReport) -> None:
    if (registers := reference()) is not None:
        registers.members_changed(report)


def close_parts(
    coordinator: Coordinator,
    hooks: ParameterHooks,
    state: ModuleState,
    optimizer_hooks: Sequence[RemovableHandle],
    regrouping: Regrouping | None,
    pings: JobPings,
) -> None:
    """End the threads of a model, and remove its hooks."""
    pings.close()
    if regrouping is not None:
        regrouping.close()
    coordinator.close()
    hooks.close()
    state.close()
    for hook in optimizer_hooks:
        hook.remove()
