"""`StagedDataParallel`: data parallelism in which a late rank submits what it has and the group moves on."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from straggle.backward.clocks import FinishTimes, HostLimit
from straggle.backward.hooks import ParameterHooks, tensors_in
from straggle.backward.optimizer_hooks import around_steps, stepped_by_scaler
from straggle.backward.stages import BalancedByTime, PlanLearner, Registered, StagePlan, plan_stages, trainable
from straggle.backward.step_in_parts import check_steps_in_parts
from straggle.merge.alike import Wrapped, check_alike, check_same_state
from straggle.merge.channel import Channel
from straggle.merge.checks import (
    CLIP_AFTER_THE_BLOCK,
    CLIP_BEFORE_THE_STEP,
    EARLY_IS_TOO_EARLY,
    INSTEAD,
    STEPPED_ALREADY,
    check_kinds,
    check_module,
    check_num_microbatches,
    check_unwrapped,
    clips,
    fingerprint,
    kinds_of,
    left_out,
    refuse_words_of_ddp,
    too_few_passes,
)
from straggle.merge.coordinator import Coordinator
from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.elastic import ElasticChannel, Regrouping, describe_for_newcomers
from straggle.merge.healing import Healing
from straggle.merge.names import ScalarNames
from straggle.merge.options import Merge, ModuleBuffers
from straggle.merge.rank_state import Entry
from straggle.merge.recorded_groups import RecordedGroups
from straggle.merge.replay import Decision, Healed, RecordedMembers, Recorder, Recording
from straggle.merge.saved_state import RankState, SavedState, SharedMemory
from straggle.merge.telemetry import NO_FINGERPRINT, StepRecord
from straggle.merge.view import Elastic
from straggle.open_step import OpenStep
from straggle.policies.deadline import Deadline, LateHandling, WaitForAll, as_deadline
from straggle.policies.estimators import Abstain, Estimator
from straggle.policies.fill_in import FillIn
from straggle.policies.history import History
from straggle.pulling import Pulling
from straggle.report import HealingReport, MembersReport, StepReport
from straggle.step import Pause, Step
from straggle.version import __version__

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
_OF_A_REPLICA = ("rank", "world_size", "learned", "_coordinator", "_current_deadline", "_rank_state")


class StagedDataParallel(nn.Module):
    """Replaces ``DistributedDataParallel``; see the module `straggle` for the loop.

    ``stages``: how the gradients are divided (`plan_stages`). ``deadline``: a `Deadline`, a number of seconds, or
    ``None`` to wait for all ranks, as DDP does. ``estimator``: what fills in for missing gradients (default: nothing).
    ``late_handling``: how a late rank is treated. ``merge``: what becomes of buffers and of gradients that are not
    finite, what a gradient counts, and how often replicas are compared. ``members``: ranks may die, freeze and come
    back while the others go on (`Elastic`; default: the job ends with the first rank that does).
    Parameters and buffers are overwritten with rank 0's.

    Raises ``RuntimeError`` without a process group, and ``ValueError`` for modules that cannot be trained so: without
    trainable parameters, with sparse gradients, ``SyncBatchNorm`` or sharded parameters, wrapped already, or not the
    same, or not with the same options, on all ranks. The error for a word of DDP's says what to write instead.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        stages: int | Sequence[str] | BalancedByTime | None = None,
        deadline: Deadline | float | None = None,
        estimator: Estimator | None = None,
        late_handling: LateHandling | None = None,
        merge: Merge | None = None,
        members: Elastic | None = None,
        **words_of_ddp: NoReturn,
    ) -> None:
        super().__init__()
        refuse_words_of_ddp(words_of_ddp)
        self.module = module
        self.deadline = as_deadline(deadline)
        self.estimator = estimator or Abstain()
        self._late_handling = late_handling or LateHandling()
        self._merge = merge or Merge()
        self._members = members
        self._stages = stages
        self._own_group = process_group is not None and process_group is not dist.group.WORLD
        self._last_record: StepRecord | None = None
        self._step_hooks: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self._submit_hooks: OrderedDict[int, Callable[[int], object]] = OrderedDict()
        self._members_hooks: OrderedDict[int, Callable[[MembersReport], None]] = OrderedDict()
        self._last_members_report: MembersReport | None = None
        self._of_the_job: frozenset[str] = frozenset()  # attributes that no copy has; none yet
        self._join_job(process_group)

    def _join_job(self, process_group: dist.ProcessGroup | None) -> None:
        """Become a replica of the job: on all ranks alike, when the model is wrapped or a copy's first step begins."""
        own, module, stages, late_handling = set(self.__dict__), self.module, self._stages, self._late_handling
        wrapped = self._as_wrapped()
        self._named = trainable(module)
        self._parameters_list = [parameter for _, parameter in self._named]
        self._registered = Registered(module)
        self._kinds = kinds_of(self._parameters_list)
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._channel, elastic = self._new_channel(process_group)
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        if elastic is not None:
            elastic.membership.description = describe_for_newcomers({**asdict(wrapped), "straggle": __version__})
        self._comes_late = elastic is not None and elastic.comes_late
        if self._comes_late:
            if wrapped.refusal:
                raise ValueError(wrapped.refusal)
        else:
            check_alike(wrapped, self._channel)
            for tensor in (*module.parameters(), *module.buffers()):
                self._channel.broadcast(tensor.detach())
        module_buffers = ModuleBuffers(module, self._merge.buffers, self.rank)
        fill_in = FillIn(self.estimator, late_handling)
        self._coordinator = Coordinator(
            self._parameters_list,
            plan_stages(module, stages),
            self._channel,
            deadline=CurrentDeadline(self.deadline, late_handling, self.world_size),
            fill_in=fill_in,
            merge=self._merge,
            num_changes=module_buffers.numel,
            membership=None if elastic is None else elastic.membership,
        )
        self._coordinator.submit_hooks = self._submit_hooks
        self._joins = _Joins()
        self._regrouping = self._healing = None
        if elastic is not None:
            self._regrouping = Regrouping(elastic, self._coordinator.member, max_buckets=len(self._named))
            self._healing = Healing(elastic, self._coordinator, self._regrouping, module, module_buffers)
            memory = SharedMemory(self.estimator, module)
            self._healing.register({"straggle.joins": self._joins, "straggle.estimator": memory})
            self._regrouping.on_changed = partial(_members_changed, weakref.ref(self))
            if self._comes_late:
                self._coordinator.member.put_out()
        device = self._parameters_list[0].device
        self._learner = PlanLearner(stages, device)
        limited = device.type == "cuda" and not isinstance(self.deadline, WaitForAll)
        self._open = OpenStep(
            self._named,
            coordinator=self._coordinator,
            module_buffers=module_buffers,
            fill_in=fill_in,
            learner=self._learner,
            rank=self.rank,
            limit=HostLimit() if limited else None,
        )
        self.pulling = Pulling(self._open, self._coordinator, self._channel)
        if self._healing is not None:
            self._healing.register({"straggle.pulling": self.pulling})
        self._hooks = ParameterHooks(module, self._parameters_list, self._open)
        self._rank_state = RankState(
            self._coordinator, module, self.estimator, stages=stages, world_size=self.world_size
        )
        self._check_at_stages(self._coordinator.plan)
        self.idle = False  # this rank has no data for the steps from here on: it takes part with weight 0
        self.default_weight = 1.0  # of a step whose `Step.weight` the loop does not set
        self.learned: tuple[list[int], list[float]] = ([], [])  # what the stages were planned from
        self._last_decision: Decision | None = None
        self._replayed: Iterator[Decision] | None = None
        self._replayed_learned: tuple[list[int], list[float]] | None = None
        self._replayed_healed: Mapping[int, Healed] = {}
        self._num_healed = 0  # states that were taken before the step that is entered now
        self._names = ScalarNames(self._channel)
        self._num_stepped = 0  # steps of its optimizers since the last merge
        self._stepped: weakref.ref[Optimizer] | None = None  # the one that the last step has stepped itself
        self._warned: set[str] = set()
        self._optimizer_hooks = _watch_optimizers(self)
        self._finalizer = weakref.finalize(
            self, _close, self._coordinator, self._hooks, self._optimizer_hooks, self._regrouping
        )
        self._of_the_job = frozenset(self.__dict__) - own
        if self._regrouping is not None and not self._comes_late:
            self._regrouping.start()

    def _new_channel(self, process_group: dist.ProcessGroup | None) -> tuple[Channel, ElasticChannel | None]:
        give_up_s = self._late_handling.give_up_s
        if self._members is None:
            return Channel(process_group, give_up_s=give_up_s), None
        if self._own_group:
            raise ValueError("members=Elastic() is for all ranks of the job: leave process_group out")
        elastic = ElasticChannel(self._members, give_up_s=give_up_s)
        return elastic, elastic

    def _as_wrapped(self) -> Wrapped:
        """What is compared with the other ranks; a refusal too, which the others would wait for otherwise."""
        try:
            check_unwrapped(self.module, StagedDataParallel, OpenStep)
            check_module(self.module)
        except ValueError as refusal:
            return Wrapped(str(refusal))
        options = {
            "stages": self._stages,
            "deadline": self.deadline,
            "estimator": self.estimator,
            "late_handling": self._late_handling,
            "merge": self._merge,
            "members": self._members,
        }
        return Wrapped.of(self.module, options)

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the module and the options: it is in no step, and joins the job when its own first step begins."""
        state = {name: value for name, value in self.__dict__.items() if name not in self._of_the_job}
        return {**state, "_last_record": None, **_of_no_job(), "_of_the_job": frozenset()}

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"StagedDataParallel has no {name}: {INSTEAD[name]}")
        if name in _OF_A_REPLICA:
            raise RuntimeError(
                f"this model is a copy, which has no {name.lstrip('_')} before its first step: enter `step()` on all "
                "ranks, or use copy.module"
            )
        return super().__getattr__(name)

    def _join_first(self) -> None:
        """Of a copy, before its first step."""
        if self._of_the_job:
            return
        if self._own_group:
            raise RuntimeError(
                "this model is a copy of one with a process group of its own, which cannot be copied: write "
                "StagedDataParallel(copy.module, process_group=...)"
            )
        self._join_job(None)

    # -- what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass; inside of ``step()`` it ends with `DeadlineReached` when this rank is late."""
        if not self._of_the_job:  # a copy, such as an average of the weights
            return self.module(*args, **kwargs)
        opened = self._open
        if opened.step is None:  # an evaluation between two steps
            self._coordinator.stopwatch.enter("outside")
            return self.module(*args, **kwargs)
        if not opened.forward_begins():
            return self.module(*args, **kwargs)
        output = self.module(*args, **kwargs)
        opened.forward_over()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(opened.at_output, weakref.ref(tensor)))  # type: ignore[no-untyped-call]
        return output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters. Who goes through them inside of a step to clip gradients is warned once."""
        if self._of_the_job and clips(sys._getframe(1)):  # a generator's caller is who iterates over it
            if self._in_step():
                where = f"rank {self.rank}, step {self._coordinator.training.step}"
                self._warn_once("clip", f"{where}: {CLIP_AFTER_THE_BLOCK}")
            elif self._stepped is not None:
                raise RuntimeError(CLIP_BEFORE_THE_STEP)
        yield from super().parameters(recurse)

    def step(self, num_microbatches: int = 1, *, optimizer: Optimizer | None = None) -> Step:
        """One optimizer step, ``with model.step(): ...``; ``num_microbatches`` is how many backward passes it has.

        ``optimizer``: its step is made when the block ends, each part as soon as its gradients are merged; the loop has
        no ``optimizer.step()`` then. Raises ``ValueError`` for an optimizer or a model with which that is another step.
        """
        check_num_microbatches(num_microbatches)
        self._join_first()
        if optimizer is not None:
            self._check_stepped_early(optimizer)
        return Step(
            num_microbatches,
            self._coordinator,
            self._names,
            enter=self._enter,
            leave=self._leave,
            release=self._open.release,
            optimizer=optimizer,
            draw=self.pulling.numbers,
        )

    def _check_stepped_early(self, optimizer: Optimizer) -> None:
        if self._members is not None or self._merge.nonfinite == "drop":
            raise ValueError(EARLY_IS_TOO_EARLY)
        check_steps_in_parts(optimizer, self._parameters_list)

    @property
    def open_step(self) -> Step | None:
        """The step that is begun and not ended, for code between its passes; ``None`` between two steps."""
        return self._open.step if self._in_step() else None

    def register_state(self, **objects: Any) -> int:
        """Before the loop: what a rank that comes back needs beside the model, each with a ``state_dict``.

        ``model.register_state(optimizer=optimizer, scheduler=scheduler, sampler=sampler)``. The number of the step to
        begin with: 0 or, where this process was started again in a running job (`Elastic`), the one that the others
        are in. It then waits for their state, and all objects have it.
        Raises ``TypeError`` for an object without ``state_dict``, ``ValueError`` where the members do not let it in.
        """
        if self._in_step() or self._last_record is not None:
            raise RuntimeError("register_state() comes before the first step")
        self._join_first()
        if self._healing is not None:
            self._healing.register(objects)
            if self._comes_late:
                self._come_late()
                self._healing.take_first()
        return self._coordinator.training.step

    @property
    def comes_late(self) -> bool:
        """Whether the job runs already (`Elastic`), and `register_state` is still to get its state."""
        self._join_first()
        return self._comes_late

    def _come_late(self) -> None:
        """Ask the members of the running job to be let in."""
        assert isinstance(self._channel, ElasticChannel)
        assert self._regrouping is not None
        self._comes_late = False
        order, seconds = self._channel.plan()
        self._learner.skip()
        self._use_plan(list(map(int, order)), seconds)
        self._regrouping.start()
        self._regrouping.ask()

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``, for ranks that have not all as many: ``for x, y in model.join(loader)``.

        A rank that has no more goes on with its last batch, for which no step computes anything (its forward pass ends
        the block), and takes part in the merges of the others until all are done.
        A rank that comes back (`Elastic`) leaves it when the others have: each ``join`` is one with theirs, by number.
        Raises ``ValueError`` where there is not one batch.
        """
        joins, batch, empty = self._joins, None, True
        number, joins.begun = joins.begun, joins.begun + 1
        if joins.over > number:
            return
        for batch in loader:
            empty = False
            yield batch
            if joins.over > number:
                return
        if empty:
            raise ValueError(f"rank {self.rank}: the loader is empty; give every rank at least one batch")
        self.idle = True
        try:
            while True:
                yield cast(Batch, batch)
                if self._last_record is not None and self._last_record.table.all_idle():
                    joins.over = number + 1
                if joins.over > number:
                    return
        finally:
            self.idle = False

    @property
    def last_report(self) -> StepReport | None:
        """What happened in the last step, on all ranks; ``None`` before the first. Built when it is asked for."""
        return None if self._last_record is None else self._last_record.report

    def register_step_hook(self, hook: Callable[[StepRecord], None]) -> RemovableHandle:
        """Call ``hook(record)`` on the training thread at the end of each step; ``record.report`` is its report.

        The report is built when it is first asked for, on any thread: a hook that only keeps the record costs nothing.
        """
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def register_submit_hook(self, hook: Callable[[int], object]) -> RemovableHandle:
        """Call ``hook(step)`` on the training thread when it has submitted its part of a step, before it waits.

        For work that can be done while the gradients are on the way. Not called in a step that was submitted in this
        rank's place.
        """
        handle = RemovableHandle(self._submit_hooks)
        self._submit_hooks[handle.id] = hook
        return handle

    @property
    def last_members_report(self) -> MembersReport | None:
        """How the members changed last; ``None`` where they have not, or cannot (`Elastic`)."""
        return self._last_members_report

    def register_members_hook(self, hook: Callable[[MembersReport], None]) -> RemovableHandle:
        """Call ``hook(report)`` when members have left or come in, on a thread of the library's, on every member."""
        handle = RemovableHandle(self._members_hooks)
        self._members_hooks[handle.id] = hook
        return handle

    @property
    def member_ranks(self) -> tuple[int, ...]:
        """The ranks that are members now, as far as this rank knows; all of them where none can leave."""
        if self._regrouping is not None and isinstance(self._channel, ElasticChannel):
            return self._channel.membership.view.ranks
        return tuple(range(self.world_size))

    @property
    def healing_report(self) -> HealingReport:
        """What this rank has taken from its peers to take part again (`Elastic`)."""
        return HealingReport() if self._healing is None else self._healing.report

    @property
    def lag(self) -> int:
        """Merged steps that this rank has not yet applied; from any thread, also while the training thread is stuck."""
        return self._coordinator.lag

    @property
    def since_step_s(self) -> float:
        """Seconds since this rank last finished a step, or since the model was wrapped; from any thread."""
        return self._coordinator.training.since_step_s

    @property
    def store_reachable(self) -> bool:
        """Whether the job's store answers this rank; without it the rank cannot be late. From any thread."""
        return self._channel.store.reachable

    @property
    def predicted_drop(self) -> float:
        """The share of all gradients that the deadline policy expects to be dropped in the next step; NaN: no idea."""
        return self._coordinator.deadline.predicted_drop

    @property
    def history(self) -> History:
        """What the deadline policy has seen so far."""
        return self._coordinator.history

    def straggle_state(self, *, own: bool = True) -> SavedState:
        """What this rank must save beside the ``state_dict`` of module and optimizer, to go on as if it never stopped.

        A flat dict of tensors, numbers and strings. Every rank has its own: save them all, after the same step. With
        ``own=False`` it has only what is equal on all ranks: one rank saves it, and each may load it.
        """
        return self._rank_state.state_dict(own=own)

    def load_straggle_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `straggle_state` gave on this rank; before the first step, on all ranks.

        With another number of ranks each may load that of any: policies go on with the history of the ranks that there
        are, and the estimator begins anew.
        Raises ``ValueError`` for the state of other stages, another estimator or model.
        """
        if self._in_step() or self._last_record is not None:
            raise RuntimeError("load_straggle_state() comes before the first step")
        self._join_first()
        if self.rank == 0 and (ranks := state.get("ranks", self.world_size)) != self.world_size:
            _log.warning(
                "the saved state is of %s ranks, and this run has %d: policies go on with the history of those that "
                "there are, and estimators begin anew",
                ranks,
                self.world_size,
            )
        self._rank_state.load_state_dict(state)

    @property
    def last_decision(self) -> Decision | None:
        """What this rank decided in its last step: recorded for each step, it makes the run repeatable (`replay`)."""
        return self._last_decision

    def replay(self, recording: Recording) -> None:
        """Decide as in a recorded run instead of by the clock; before the first step, on all ranks alike.

        With the same model, data and number of ranks it gives the same parameters bit for bit. Each rank has its own
        recording. Steps beyond it wait for all ranks. Where members came and went in that run (`Elastic`), the model is
        wrapped without ``members``: all ranks stay, and who was absent then is given what the others merged.
        Raises ``ValueError`` for a recording that cannot be replayed so.
        """
        if self._in_step() or self._last_record is not None:
            raise RuntimeError("replay() comes before the first step")
        self._join_first()
        self._replayed = iter(recording.decisions)
        self._replayed_learned = (list(recording.order), list(recording.seconds)) if recording.order else None
        self._coordinator.deadline.wait_for_all()
        if recording.members is not None:
            self._replay_members(recording.members)

    def record(self, recorder: Recorder) -> None:
        """Tell ``recorder`` what a replay needs of a run whose members come and go; before `register_state`.

        `straggle.observe.members_recording.MembersRecorder` does so, and writes it.
        """
        if self._in_step() or self._last_record is not None:
            raise RuntimeError("record() comes before the first step")
        self._join_first()
        self._coordinator.member.record(recorder)

    def _replay_members(self, members: RecordedMembers) -> None:
        # all ranks refuse together: making the groups needs all of them
        if whys := sorted(filter(None, set(self._channel.gather(self._not_replayed(members))))):
            raise ValueError(f"a run whose members came and went cannot be replayed so: {'; '.join(whys)}")
        self._replayed_healed = members.healed
        groups = RecordedGroups(members, rank=self.rank, world_size=self.world_size)
        self._coordinator.member.replay(groups)

    def _not_replayed(self, members: RecordedMembers) -> str:
        if self._members is not None:
            return "wrap the model without members; in a replay no rank leaves"
        if self._own_group:
            return "leave process_group out; members are ranks of the job"
        if self._parameters_list[0].is_cuda:
            return "the random state of a device is not recorded; replay on the CPU"
        stayed = [step for step, healed in members.healed.items() if not healed.started]
        if stayed and FillIn(self.estimator, self._late_handling).finishes_late:
            return (
                f"rank {self.rank} took a peer's state before step {stayed[0]} in the same process, and what "
                f"{type(self.estimator).__name__} went on to compute until then is not recorded"
            )
        return ""

    def _begin_as(self, healed: Healed) -> None:
        """Go on as the recorded rank did that had just taken the state of a peer."""
        torch.set_rng_state(healed.random)
        if healed.started:
            self._coordinator.begin_anew()
            self.estimator.forget_own()

    def _record_healed(self, healing: Healing, number: int) -> None:
        num_healed, recorder = healing.report.num_states, self._coordinator.member.recorder
        if num_healed > self._num_healed and recorder is not None:
            recorder.healed(number, started=self._last_record is None)
        self._num_healed = num_healed

    def _next_replayed(self) -> Decision | None:
        """The recorded decision of the step that is entered now."""
        if self._replayed is None:
            return None
        step = self._coordinator.training.step
        return next(self._replayed, Decision(step, sys.maxsize, None, False))

    def pause(self) -> Pause:
        """Between two steps, on all ranks: what comes until `resume` belongs to no step, and no rank is late in it.

        For what takes long, on all ranks or on one, such as an evaluation, a checkpoint, or training another model:
        ``with model.pause(): ...``. At the end of the block all ranks wait for each other, at most ``give_up_s``. With
        `Elastic` members each goes on by itself, and is waited for in its next step.
        """
        if self._in_step():
            raise RuntimeError("pause() comes between two steps, not inside of one")
        self._coordinator.pause()
        return Pause(self._end_pause)

    def resume(self) -> None:
        """Go on after a `pause` that is no block: the next step's time begins now; best with a barrier after it."""
        self._coordinator.resume()

    def _end_pause(self) -> None:
        if self._regrouping is None:
            self._channel.barrier()
        self.resume()

    def close(self) -> None:
        """Remove all hooks and end the stand-in; the module stays usable by itself."""
        if self._of_the_job:
            self._finalizer()

    # -- entering and leaving a step

    def _enter(self, step: Step) -> None:
        if self._in_step():
            raise RuntimeError(
                f"step {self._coordinator.training.step} is still open: a step() cannot be nested in another"
            )
        if self._healing is not None:
            if self._comes_late:
                self._come_late()
            self._healing.before_step()
            self._record_healed(self._healing, self._coordinator.training.step)
        number = self._coordinator.training.step
        if (healed := self._replayed_healed.get(number)) is not None:
            self._begin_as(healed)
        self._refuse_other_parameters()
        if kinds_of(self._parameters_list) != self._kinds:
            check_kinds(self._named, self._kinds)
        checked = self._merge.checks(number)
        self._open.enter(
            step,
            self._next_replayed(),
            Entry(
                step.num_microbatches,
                idle=self.idle,
                fingerprint=fingerprint(self._parameters_list) if checked else NO_FINGERPRINT,
                stepped=math.nan if self._last_record is None else self._num_stepped,
            ),
        )
        if self.default_weight != 1.0:
            step.weight = self.default_weight
        self._num_stepped, self._stepped = 0, None

    def _refuse_other_parameters(self) -> None:
        """What is not among the parameters that were wrapped would not be merged."""
        if not self._registered.unchanged():
            if differences := self._registered.differences():
                raise RuntimeError(
                    f"rank {self.rank}, step {self._coordinator.training.step}: parameters are not those that were "
                    f"wrapped ({differences}), and would not be merged: change, tie or add parameters before "
                    "StagedDataParallel(model), or close() this one and wrap the model again with a new optimizer; to "
                    "change values only, write them in place (load_state_dict, or copy_ under torch.no_grad())"
                )
            self._registered = Registered(self.module)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the model was wrapped and is not now, so it would not be "
                    "merged: wrap the model first and freeze it then, or wrap it again"
                )

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        """Merge; true where the error was only the deadline."""
        merged = self._open.leave(error)
        if merged is None:
            return False
        if step.optimizer is not None:
            self._num_stepped, self._stepped = 1, weakref.ref(step.optimizer)
        self._last_decision = self._open.decision(merged)
        if self._open.passes_came_short(merged) and (
            words := too_few_passes(step.num_microbatches, self._open.num_over)
        ):
            self._warn_once("passes", f"rank {self.rank}, step {merged.step}: {words}")
        if self.rank == 0 and (nonfinite := merged.table.nonfinite_ranks()):
            self._warn_once("nonfinite", f"step {merged.step}: {left_out(nonfinite, merged.table.skipped())}")
        record = StepRecord(
            merged.step,
            merged.seconds,
            merged.deadline_s,
            merged.plan,
            merged.table,
            self._names,
            shadow_s=merged.shadow_s,
            rules=self._coordinator.deadline.rules,
            mean_cost=self._coordinator.deadline.mean_cost,
        )
        self._last_record = record
        self.pulling.merged(record)
        if (times := self._learner.step_complete()) is not None:
            self._learn(times)
        self._warn_of_different_replicas(record)
        for hook in tuple(self._step_hooks.values()):
            hook(record)
        return error is not None

    def _warn_once(self, what: str, words: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(words)

    def _warn_of_different_replicas(self, record: StepRecord) -> None:
        level = logging.WARNING if self.rank == 0 else logging.DEBUG
        if unlike := record.table.stepped_unlike():
            _log.log(
                logging.WARNING if self.rank in unlike else level,
                "step %d: the optimizers of ranks %s have not stepped as often as those of the others since step %d, "
                "and their parameters are others from here on: look for `continue`, `break` or `return` that skips "
                "optimizer.step() on some ranks only, and resume from a checkpoint",
                record.step,
                list(unlike),
                record.step - 1,
            )
        elif self._merge.checks(record.step) and (different := record.table.different_ranks()):
            _log.log(
                level,
                "step %d: the parameters of ranks %s are not those of the others; look for code that changes them on "
                "some ranks only, and resume from a checkpoint",
                record.step,
                list(different),
            )

    def _learn(self, times: FinishTimes) -> None:
        """Plan the stages as rank 0 finished the gradients; from here on they stay."""
        check_same_state(self._coordinator.history, replays=self._replayed is not None, channel=self._channel)
        number = len(self._parameters_list)
        own = self._replayed_learned or (times.order(number), times.seconds(number))
        order, seconds = self._channel.of_rank0(torch.tensor(own, dtype=torch.float64)).tolist()
        self._use_plan([int(index) for index in order], seconds)

    def _use_plan(self, order: list[int], seconds: list[float]) -> None:
        self.learned = order, seconds
        plan = plan_stages(self.module, self._stages, *self.learned, named=self._named)
        self._check_at_stages(plan)
        self._coordinator.learn(plan)
        self._open.groups.follow(plan)
        self._coordinator.start()

    def _check_at_stages(self, plan: StagePlan) -> None:
        if self._late_handling.granularity != "microbatch":
            self._hooks.check_at([stage.entry for stage in plan.stages])

    def _in_step(self) -> bool:
        return bool(self._of_the_job) and self._open.step is not None


class _Joins:
    """How many loops over `join` this process has begun, and how many are over for the job."""

    def __init__(self) -> None:
        self.begun = self.over = 0

    def state_dict(self) -> dict[str, int]:
        """What a rank that comes back must know."""
        return {"over": self.over}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Those that are over for the others are over here."""
        self.over = state["over"]


def _watch_optimizers(model: StagedDataParallel) -> list[RemovableHandle]:
    """Count optimizer steps, tell their time from data time, and refuse one that would find no gradients."""
    reference, stopwatch = weakref.ref(model), model._coordinator.stopwatch

    def before(optimizer: Optimizer) -> None:
        owner = reference()
        if owner is None or owner._open.optimizing:
            return
        if owner._stepped is not None and owner._stepped() is optimizer:
            raise RuntimeError(STEPPED_ALREADY)
        if owner._in_step():
            raise RuntimeError(
                "optimizer.step() inside of `with model.step()`: gradients are merged when it ends; step after it"
            )
        if owner._merge.nonfinite == "drop" and stepped_by_scaler():
            raise RuntimeError(
                'a GradScaler steps this optimizer, and Merge(nonfinite="drop") leaves out the infinite gradients that '
                'it looks for, so that its scale would only grow: write merge=straggle.Merge(nonfinite="keep")'
            )

    def after(_optimizer: Optimizer) -> None:
        owner = reference()
        if owner is not None and owner._open.optimizing:
            return  # a part of a step
        stopwatch.enter("data")
        if owner is not None:
            owner._num_stepped += 1

    return around_steps(model._parameters_list, before, after)


def _of_no_job() -> dict[str, Any]:
    hooks = {name: OrderedDict[int, Any]() for name in ("_step_hooks", "_submit_hooks", "_members_hooks")}
    return {**hooks, "_last_members_report": None}


def _members_changed(reference: weakref.ref[StagedDataParallel], report: MembersReport) -> None:
    if (owner := reference()) is not None:
        owner._last_members_report = report
        for hook in tuple(owner._members_hooks.values()):
            hook(report)


def _close(
    coordinator: Coordinator,
    hooks: ParameterHooks,
    optimizer_hooks: Sequence[RemovableHandle],
    regrouping: Regrouping | None,
) -> None:
    if regrouping is not None:
        regrouping.close()
    coordinator.close()
    hooks.close()
    for hook in optimizer_hooks:
        hook.remove()
