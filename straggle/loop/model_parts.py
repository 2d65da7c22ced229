"""The parts that a wrapped model is made of; `building.py` puts them together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.stages import BalancedByTime, PlanLearner, plan_stages
from straggle.loop.open_step import OpenStep
from straggle.merge.alike import Wrapped, check_alike
from straggle.merge.checks import check_module, check_unwrapped, own_part
from straggle.merge.late.current_deadline import CurrentDeadline
from straggle.merge.late.replica import Replica
from straggle.merge.options import Merge
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.telemetry import Columns
from straggle.merge.state.module_state import ModuleState
from straggle.merge.wing import Wings
from straggle.merge.wire.channel import Channel
from straggle.policies.deadline import Deadline, LateHandling
from straggle.policies.estimators import Estimator, FillIn
from straggle.report import StuckReport
from straggle.source.source import Attached, GradientSource, named_tensors
from straggle.version import __version__

Hook = TypeVar("Hook")


class HookRegisters:
    """What a user has registered, one register for each kind of hook; a copy of the model has empty ones."""

    def __init__(self) -> None:
        self.step: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self.submit: OrderedDict[int, Callable[[int], object]] = OrderedDict()
        self.stuck: OrderedDict[int, Callable[[StuckReport], object]] = OrderedDict()

    def merged(self, current: Round) -> None:
        """The training thread has left a step."""
        for hook in tuple(self.step.values()):
            hook(current.record)


def add_hook(register: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    """Add ``hook``; with what comes back it is removed."""
    handle = RemovableHandle(register)
    register[handle.id] = hook
    return handle


@dataclass(frozen=True)
class Options:
    """What a model is wrapped with, the same on all ranks.

    ``of_wings``: arguments of optional parts. ``own_group``: a process group that is not the job's. ``sharded``: a
    replica is several ranks.
    """

    stages: int | Sequence[str] | BalancedByTime | None
    deadline: Deadline
    estimator: Estimator
    late_handling: LateHandling
    merge: Merge
    of_wings: Mapping[str, object]
    own_group: bool
    sharded: bool = False

    def wrapped(self, module: nn.Module, wrapper: type[nn.Module], columns: Columns) -> Wrapped:
        """What is compared with the other ranks; a refusal too, which the others would wait for otherwise."""
        try:
            check_unwrapped(module, wrapper, OpenStep)
            check_module(module, sharded=self.sharded)
        except ValueError as refusal:
            return Wrapped(str(refusal))
        names = ("stages", "deadline", "estimator", "late_handling", "merge")
        build = {"straggle": f"{__version__} with rows of {columns}"}
        return Wrapped.of(module, {**build, **{name: getattr(self, name) for name in names}, **self.of_wings})


@dataclass(frozen=True)
class ModelParts:
    """Those of one model."""

    options: Options
    source: GradientSource
    channel: Channel
    replica: Replica
    wings: Wings
    coordinator: Coordinator
    learner: PlanLearner
    opened: OpenStep
    hooks: Attached
    state: ModuleState


def rank_parts(
    module: nn.Module,
    options: Options,
    source: GradientSource,
    channel: Channel,
    replica: Replica,
    state: ModuleState,
    columns: Columns,
) -> RankParts:
    """What merges for this rank. ``columns``: where rows have their numbers, those of optional parts too."""
    return RankParts.build(
        source.slots,
        plan_stages(module, options.stages, named=[*named_tensors(source.slots)]),
        channel,
        replica,
        CurrentDeadline(options.deadline, options.late_handling, replica.count),
        options.merge,
        num_state=state.numel,
        columns=columns,
    )


def model_parts(
    options: Options,
    source: GradientSource,
    rank: RankParts,
    state: ModuleState,
    wings: Wings,
    registers: HookRegisters,
) -> ModelParts:
    """What the training thread calls."""
    fill_in, device = FillIn(options.estimator), source.slots[0].device
    coordinator = Coordinator(
        rank, source.slots, fill_in=fill_in, merge=options.merge, wings=wings, submit_hooks=registers.submit
    )
    opened = OpenStep(
        source,
        coordinator=coordinator,
        state=state,
        fill_in=fill_in,
        learner=(learner := PlanLearner(options.stages, device)),
        rank=rank,
        fills=options.merge.nonfinite == "keep",  # as it is for a `GradScaler`
    )
    hooks, channel, replica = source.attach(opened), rank.channel, rank.replica
    return ModelParts(options, source, channel, replica, wings, coordinator, learner, opened, hooks, state)


def make_alike(module: nn.Module, wrapped: Wrapped, channel: Channel) -> None:
    """Compare the ranks' models, and give all of them rank 0's parameters and buffers.

    Raises ``ValueError``, on all ranks, for a module or options that cannot be, or are not the same.
    """
    check_alike(wrapped, channel)
    for name, parameter in module.named_parameters():
        channel.broadcast(own_part(parameter), name=f"parameter {name}")
    for name, buffer in module.named_buffers():
        channel.broadcast(buffer, name=f"buffer {name}")
