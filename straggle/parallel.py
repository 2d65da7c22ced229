"""`StagedDataParallel`: data parallelism in which a late rank submits what it has and the group moves on."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from straggle import world
from straggle.backward.loop_hooks import begin_scalers
from straggle.backward.stages import BalancedByTime
from straggle.backward.step_in_parts import check_steps_in_parts
from straggle.building import MembersHooks, build, check_mesh
from straggle.loop.model_parts import HookRegisters, Options, add_hook
from straggle.loop.uneven import own_passes
from straggle.merge.checks import (
    CLIP_AFTER_THE_BLOCK,
    CLIP_BEFORE_THE_STEP,
    INSTEAD,
    check_num_microbatches,
    clips,
    is_sharded,
    refuse_ddp_kwargs,
)
from straggle.merge.late.sides import Entry
from straggle.merge.options import Merge
from straggle.merge.round.round import Round
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.telemetry import NO_FINGERPRINT
from straggle.merge.saved_state import SavedState, SharedState
from straggle.policies.deadline import Deadline, LateHandling, as_deadline
from straggle.policies.estimators import Abstain, Estimator
from straggle.policies.history import History
from straggle.report import HealingReport, MembersReport, StepReport, StuckReport
from straggle.source.source import named_tensors
from straggle.step import Pause, Step

if TYPE_CHECKING:
    from straggle.members.views.view import Elastic
    from straggle.replay.wing import Decision, Recording

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
EARLY_STEP_UNSUPPORTED = (
    "step(optimizer=...) steps a parameter before the merge of the others is over, and cannot undo that: it goes "
    'with merge=straggle.Merge(nonfinite="keep"), because "drop" may skip the entire step, and without members=, '
    "because members may leave during the merge; or call optimizer.step() after the block"
)
_OF_A_REPLICA = ("rank", "world_size", "_planning", "_coordinator", "_current_deadline", "_resume_state")


@dataclass
class _LastStep:
    """The last merged step and its record, kept here because attributes of a module are slow to set."""

    record: StepRecord | None = None
    merged: Round | None = None

    def note(self, merged: Round) -> None:
        """The training thread has left this step."""
        self.merged, self.record = merged, merged.record


class StagedDataParallel(nn.Module):
    """Replaces ``DistributedDataParallel``; see the module `straggle` for the loop.

    ``stages``: how the gradients are divided (`plan_stages`). ``deadline``: a `Deadline`, a number of seconds, or
    ``None`` to wait for all ranks, as DDP does. ``estimator``: what fills in for missing gradients (default: nothing).
    ``mesh``: of the replicas, if each is sharded over several ranks (``fully_shard(..., mesh=mesh["dp_shard"])`` and
    ``mesh=mesh["dp_replicate"]`` here). ``late_handling``: how a late rank is treated. ``merge``: how buffers and
    non-finite gradients are merged, how gradients are weighted, and how often replicas are compared. ``members``: ranks
    may die, freeze and come back while the others go on (`Elastic`; default: the job ends with the first that does).
    ``links``: whether ranks measure the links between them by small pings, each on a port of its own (default: if there
    are ``members``). Parameters and buffers are overwritten with rank 0's.

    Raises ``RuntimeError`` without a process group, and ``ValueError`` for modules that cannot be trained like this:
    without trainable parameters, with sparse gradients, ``SyncBatchNorm`` or sharded parameters, wrapped already, or if
    module or options differ between ranks. The error for an argument of DDP's names the replacement.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        stages: int | Sequence[str] | BalancedByTime | None = None,
        deadline: Deadline | float | None = None,
        estimator: Estimator | None = None,
        late_handling: LateHandling | None = None,
        merge: Merge | None = None,
        members: Elastic | None = None,
        links: bool | None = None,
        **ddp_kwargs: NoReturn,
    ) -> None:
        super().__init__()
        refuse_ddp_kwargs(ddp_kwargs)
        self.module = module
        self.deadline = as_deadline(deadline)
        self.estimator = estimator or Abstain()
        self._options = Options(
            stages,
            self.deadline,
            self.estimator,
            late_handling or LateHandling(),
            merge or Merge(),
            {"members": members, "links": members is not None if links is None else links},
            own_group=mesh is not None or (process_group is not None and process_group is not dist.group.WORLD),
            sharded=mesh is not None or (members is not None and any(map(is_sharded, module.parameters()))),
        )
        check_mesh(mesh, process_group=process_group, members=members)
        self._elastic = members
        self._last = _LastStep()
        self._registers, self._members_hooks = HookRegisters(), MembersHooks()
        self._of_the_job: frozenset[str] = frozenset()  # attributes that no copy has; none yet
        self._join_job(process_group, mesh)

    def _join_job(self, process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None) -> None:
        """Become a replica of the job, on all ranks, when the model is wrapped or a copy's first step begins."""
        own = set(self.__dict__)
        built = build(
            self.module,
            self._options,
            process_group,
            mesh=mesh,
            members=self._elastic,
            wrapper=StagedDataParallel,
            registers=self._registers,
            members_hooks=self._members_hooks,
        )
        parts, wings = built.parts, built.wings
        self._channel, self._coordinator, self._open = parts.channel, parts.coordinator, parts.opened
        self._source, self._hooks, self._state = parts.source, parts.hooks, parts.state
        self._wings, self._phases = parts.wings, built.phases
        self._members, self._pings, self._replay, self.pulling = wings.members, wings.pings, wings.replay, wings.pulling
        self._joins, self._steps, self._warnings = built.joins, built.steps, built.warnings
        self._planning, self._replanning, self._resume_state = built.planning, built.replanning, built.resume_state
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        self.job_rank = self._channel.name  # `rank` is the replica's number, if it is several ranks
        self.idle = False  # this rank has no data for the steps from here on: it takes part with weight 0
        self.loads_missed = True  # a batch for each step that it has missed, if no loader says that it does not
        self.default_weight = 1.0  # weight of a step whose `Step.weight` the loop does not set
        self._finalizer = world.finalize(self, world.in_this_process(built.closing()))
        self._of_the_job = frozenset(self.__dict__) - own
        for phase in self._wings.built:
            phase()

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the module and the options: it is in no step, and joins the job when its own first step begins."""
        state = {name: value for name, value in self.__dict__.items() if name not in self._of_the_job}
        fresh = {"_registers": HookRegisters(), "_members_hooks": MembersHooks(), "_of_the_job": frozenset[str]()}
        return {**state, **fresh, "_last": _LastStep()}

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
        """Join the job, for a copy, before its first step."""
        if self._of_the_job:
            return
        if self._options.own_group:
            raise RuntimeError(
                "this model is a copy of one with a process group of its own, which cannot be copied: write "
                "StagedDataParallel(copy.module, process_group=...)"
            )
        self._join_job(None)

    def _before_first_step(self, method: str) -> None:
        if self._in_step() or self._last.record is not None:
            raise RuntimeError(f"{method}() comes before the first step")
        self._join_first()

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
        opened.forward_over(output)
        return output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters. Warns once if they are iterated over inside of a step to clip gradients."""
        if self._of_the_job and clips(sys._getframe(1)):  # a generator's caller is the code that iterates over it
            if self._in_step():
                where = f"rank {self.job_rank}, step {self._coordinator.training.step}"
                self._warnings.once("clip", f"{where}: {CLIP_AFTER_THE_BLOCK}")
            elif self._steps.stepped is not None:
                raise RuntimeError(CLIP_BEFORE_THE_STEP)
        yield from super().parameters(recurse)

    def step(self, num_microbatches: int = 1, *, optimizer: Optimizer | None = None) -> Step:
        """One optimizer step, ``with model.step(): ...``; ``num_microbatches`` is how many backward passes it has.

        ``optimizer``: its step is made when the block ends, each part as soon as its gradients are merged; the loop has
        no ``optimizer.step()`` then. Raises ``ValueError`` if the optimizer or the model would make that another step.
        """
        check_num_microbatches(num_microbatches)
        self._join_first()
        if optimizer is not None:
            self._check_stepped_early(optimizer)
        return Step(
            num_microbatches,
            self._coordinator,
            self._coordinator.names,
            enter=self._enter,
            leave=self._leave,
            release=self._open.release,
            optimizer=optimizer,
            draw=self.pulling.numbers,
            expect=self._open.expect,
            departure=self._wings.departure,
        )

    def _check_stepped_early(self, optimizer: Optimizer) -> None:
        if self._wings.completion is not None or self._options.merge.nonfinite == "drop":
            raise ValueError(EARLY_STEP_UNSUPPORTED)
        check_steps_in_parts(optimizer, self._source.all)

    @property
    def open_step(self) -> Step | None:
        """The step that has begun and not ended, for code between its passes; ``None`` between two steps."""
        return self._open.step if self._in_step() else None

    def register_state(self, **objects: Any) -> int:
        """Register, before the loop, objects with a ``state_dict`` that a returning rank needs beside the model.

        ``model.register_state(optimizer=optimizer, scheduler=scheduler, sampler=sampler)``. Returns the number of the
        step to begin with: 0 or, if this process was restarted in a running job (`Elastic`), the step that the others
        are in. In that case it waits for their state and loads it into all objects. Raises ``TypeError`` for an object
        without ``state_dict``, ``ValueError`` if the members do not let this rank in.

        Of several models in a loop, call it first for the one whose step comes first: a new process waits for the state
        of that alone, and those of the others come in the loop, before this rank gives anything in any of them.
        """
        self._before_first_step("register_state")
        begin_scalers(objects.values(), self._source.slots[0].device)
        if self._members is not None:
            self._members.register(objects)
        return self._coordinator.training.step

    @property
    def comes_late(self) -> bool:
        """Whether the job runs already (`Elastic`), and `register_state` has yet to get its state."""
        self._join_first()
        return self._members is not None and self._members.comes_late

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``, for ranks with different numbers of them: ``for x, y in model.join(loader)``.

        A rank that has no more goes on with its last batch, for which no step computes anything (its forward pass ends
        the block), and takes part in the others' merges until all are done: in as many steps as the longest loader has.
        Several batches may be drawn for a step (``num_microbatches``), before it or in its block; if they end within a
        step, those drawn count. To know which batch is the last, one is fetched ahead: put a loader that prefetches, or
        that reuses its memory, inside of ``join``. A rank that comes back (`Elastic`) leaves it when the others have:
        the ranks' calls of ``join`` are matched by number. The ranks of a sharded replica must have the same number.
        Raises ``ValueError`` if there is no batch and, in the step in which it is seen, if they have not.
        """
        return self._joins.batches(loader, self._coordinator.training, self.job_rank, self._open.out_of_data)

    @property
    def learned(self) -> tuple[list[int], list[float]]:
        """The order in which backward finished the parameters, and the seconds of each; stages follow from them."""
        return self._planning.learned

    @property
    def last_report(self) -> StepReport | None:
        """What happened in the last step, on all ranks; ``None`` before the first. Built when it is asked for."""
        return None if self._last.record is None else self._last.record.report

    @property
    def is_lowest(self) -> bool:
        """Whether this rank is the lowest member, which logs and saves: by the last step, so all ranks say the same.

        Before this process's first step it goes by the members that it knows of.
        """
        report = self.last_report
        return self.rank == (min(self.member_ranks, default=None) if report is None else report.lowest_rank)

    def work_is_dealt(self, *, evenly: bool = True, after: int = -1) -> None:
        """Declare, on all ranks, that each rank gets as much work as it has time for; `Rebalance` and pools do.

        Then ranks are late only because of stalls, and `AutoDeadline` drops gradients for nothing else; unless it is
        not done ``evenly``, because a rank is slow whatever it is given. All ranks say that ``after`` the same step.
        """
        self._coordinator.work_is_dealt(evenly=evenly, after=after)

    def dealt(self, *, idle: bool, weight: float | None = None) -> None:
        """What this rank has in the steps from here on: nothing that counts (``idle``), or data of this ``weight``.

        Whoever deals it says so: a loader, or a loop of a framework's. A weight that the loop sets itself wins.
        """
        self.idle = idle
        if weight is not None:
            self.default_weight = weight

    def loader_begins(self) -> None:
        """A loader loads nothing for steps that this rank has missed; until `loader_is_over`."""
        self.loads_missed = False

    def loader_is_over(self) -> None:
        """From here on this rank loads a batch for each step that it has missed, as a plain loader does."""
        self.loads_missed = True

    def register_step_hook(self, hook: Callable[[StepRecord], None]) -> RemovableHandle:
        """Call ``hook(record)`` on the training thread at the end of each step; ``record.report`` is its report.

        The report is built when it is first asked for, on any thread: a hook that only keeps the record costs nothing.
        """
        return add_hook(self._registers.step, hook)

    def register_submit_hook(self, hook: Callable[[int], object]) -> RemovableHandle:
        """Call ``hook(step)`` on the training thread when it has submitted its part of a step, before it waits.

        For work that can be done while the gradients are in flight. It is not called in a step that the stand-in
        submitted for this rank.
        """
        return add_hook(self._registers.submit, hook)

    def register_stuck_hook(self, hook: Callable[[StuckReport], object]) -> RemovableHandle:
        """Call ``hook(report)`` when this rank is stuck and waited for, or stood in for, and when a stuck one goes on.

        On a thread of the library's. The report has the line of code. A rank that cannot speak is reported by the
        lowest one that waits for it.
        """
        return add_hook(self._registers.stuck, hook)

    @property
    def last_members_report(self) -> MembersReport | None:
        """How the members last changed; ``None`` if they have not, or cannot (`Elastic`)."""
        return self._members_hooks.last_report

    def register_members_hook(self, hook: Callable[[MembersReport], None]) -> RemovableHandle:
        """Call ``hook(report)`` when members have left or come in, on a thread of the library's, on every member."""
        return add_hook(self._members_hooks.register, hook)

    @property
    def member_ranks(self) -> tuple[int, ...]:
        """The ranks that are members now, as far as this rank knows; all ranks if none can leave."""
        if self._members is not None:
            return self._members.ranks
        return tuple(range(self.world_size))

    @property
    def healing_report(self) -> HealingReport:
        """The states that this rank has taken from its peers to take part again (`Elastic`)."""
        return HealingReport() if self._members is None else self._members.report

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
        """The share of all gradients that the deadline policy expects to drop in the next step; NaN if unknown."""
        return self._coordinator.deadline.predicted_drop

    @property
    def history(self) -> History:
        """The steps that the deadline policy has seen so far."""
        return self._coordinator.history

    def straggle_state(self, *, own: bool = True) -> SavedState:
        """The state to save beside that of module and optimizer, to go on as if the run had never stopped.

        A flat dict of tensors, numbers and strings. Every rank has its own: save them all, after the same step. With
        ``own=False`` it has only the part that is equal on all ranks: one rank saves it, and each may load it.
        """
        return self._resume_state.state_dict(own=own)

    def load_straggle_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the `straggle_state` of this rank; before the first step, on all ranks.

        With another number of ranks, each may load the state of any rank: policies go on with the history of the ranks
        that exist, and the estimator begins again. Raises ``ValueError`` for the state of other stages, another
        estimator or model.
        """
        self._before_first_step("load_straggle_state")
        if self.rank == 0 and (ranks := state.get("ranks", self.world_size)) != self.world_size:
            _log.warning(
                "the saved state is of %s ranks, and this run has %d: policies go on with the history of those that "
                "there are, and estimators begin again",
                ranks,
                self.world_size,
            )
        self._resume_state.load_state_dict(state)

    @property
    def shared_state(self) -> SharedState:
        """The part of `straggle_state` that is equal on all ranks, for ``torch.distributed.checkpoint``.

        ``dcp.save({"model": ..., "optimizer": ..., "straggle": model.shared_state})``, and the same for ``dcp.load``.
        """
        self._join_first()
        return SharedState(self._resume_state)

    @property
    def last_decision(self) -> Decision | None:
        """This rank's decisions in its last step; recorded for each step, they make the run repeatable (`replay`)."""
        from straggle.replay.wing import decision_of

        return None if self._last.merged is None else decision_of(self._open, self._last.merged)

    def replay(self, recording: Recording) -> None:
        """Decide as in a recorded run instead of by the clock; before the first step, on all ranks alike.

        With the same model, data and number of ranks, it gives the same parameters bit for bit. Each rank has its own
        recording. Steps beyond it wait for all ranks.
        Raises ``ValueError`` for a recording with a step in which the members changed (`Elastic`), or a later one.
        """
        self._before_first_step("replay")
        self._replay.follow(recording)

    def pause(self) -> Pause:
        """Pause, between two steps and on all ranks: until `resume`, nothing belongs to a step, and no rank is late.

        For long work on all ranks or on one, such as an evaluation, a checkpoint, or training another model:
        ``with model.pause(): ...``. At the end of the block all ranks wait for each other, for as long as one pauses.
        With `Elastic` members each goes on by itself, and is waited for in its next step.
        """
        if self._in_step():
            raise RuntimeError("pause() comes between two steps, not inside of one")
        self._coordinator.pause()
        return Pause(self._end_pause)

    def resume(self) -> None:
        """Go on after a `pause` that is not a block: the next step's time begins now. Call a barrier after it."""
        self._coordinator.resume()

    def _end_pause(self) -> None:
        self._channel.end_pause()
        self.resume()

    @property
    def measures_links(self) -> bool:
        """Whether this rank measures its links (``links``)."""
        return bool(self._of_the_job) and self._pings is not None

    @property
    def ping_bytes(self) -> int:
        """Bytes that this rank has sent to measure its links; 0 if it does not (``links``)."""
        return self._pings.num_bytes if self._of_the_job and self._pings is not None else 0

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
        # first: they may wait, and take another rank's state, which is another step
        for phase in self._wings.enter:
            phase()
        # after the wings, which may have moved this rank to a later step
        number = self._coordinator.training.step
        frozen = self._source.frozen
        if changes := self._source.check():
            self._planning.check_at(self._replanning.replan(changes, number))
        elif frozen != self._source.frozen:
            self._state.look_again()
        # each step: hooks of the user's that came since go before ours, which take the gradient away
        self._hooks.keep_last()
        checked = self._options.merge.checks(number)
        # before the entry: a rank without data says so in it
        share = self._joins.share_of(number)
        entry = self._entry(step, share, checked=checked)
        for phase in self._wings.entry:
            entry = phase(entry)
        self._open.enter(step, entry, checked=checked)
        if 0 < share < 1:
            # after entering: only an open step has passes that can be taken away
            self._open.end_data(own_passes(step.num_microbatches, share))
        if self.default_weight != 1.0:
            # after entering, before the loop's own code: what the loop sets wins
            step.weigh_if_unset(self.default_weight)
        self._steps.entered()

    def _entry(self, step: Step, share: float, *, checked: bool) -> Entry:
        """``share``: of the batches that were drawn for the step, those that are this rank's own."""
        tensors = self._state.fingerprint(named_tensors(self._source.slots)) if checked else None
        return Entry(
            step.num_microbatches,
            idle=self.idle or not share,
            fingerprint=NO_FINGERPRINT if tensors is None else tensors.number,
            tensors=tensors,
            stepped=math.nan if self._last.record is None else self._steps.number,
            joins_over=self._coordinator.training.joins_over,
            frozen=self._source.frozen,
        )

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        """Merge; true if the error was only the deadline."""
        merged = self._open.leave(error)
        if merged is None:
            return False
        # before them, too: a phase may raise, and the optimizer has stepped all the same
        if step.optimizer is not None:
            self._steps.stepped_in_block(step.optimizer)
        # before the phases: hooks of the user's ask for the last report
        self._last.note(merged)
        all_phases, usual_phases = self._phases
        for phase in usual_phases if merged.table.is_usual else all_phases:
            phase(merged)
        return error is not None

    def _in_step(self) -> bool:
        return bool(self._of_the_job) and self._open.step is not None
