"""`StagedDataParallel`: data parallelism in which a late rank hands in what it has and the group moves on."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.backward import DeadlineReached, ParameterHooks, release_graph, tensors_in
from straggle.channel import Channel
from straggle.checks import check_module, check_same_on_all_ranks, fingerprint
from straggle.clocks import FinishTimes, HostLimit
from straggle.coordinator import Coordinator
from straggle.deadline import Deadline, Patience, as_deadline
from straggle.estimators import Abstain, Estimator
from straggle.history import History
from straggle.in_force import DeadlineInForce
from straggle.merge import Merge, ModuleBuffers
from straggle.optimizers import around_steps
from straggle.replay import Decision, Recording
from straggle.report import StepReport
from straggle.rounds import MergedStep
from straggle.stages import BalancedByTime, StagePlan, learning_steps, plan_stages, trainable
from straggle.step import Step
from straggle.telemetry import NO_FINGERPRINT, StepRecord

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class StagedDataParallel(nn.Module):
    """Replaces ``DistributedDataParallel``; see the module `straggle` for the loop.

    ``stages``: how the gradients are divided (`plan_stages`). ``deadline``: a `Deadline`, a number of seconds, or
    ``None`` to wait for everyone, as DDP does. ``estimator``: what fills in for missing gradients (default: nothing).
    ``patience``: how a late rank is treated. ``merge``: what becomes of buffers and of gradients that are not finite,
    what a gradient counts, and how often replicas are compared.
    Parameters and buffers are overwritten with rank 0's.

    Raises ``RuntimeError`` without a process group, and ``ValueError`` for modules that cannot be trained so: without
    trainable parameters, with sparse gradients, ``SyncBatchNorm`` or sharded parameters, or not the same on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        stages: int | Sequence[str] | BalancedByTime | None = None,
        deadline: Deadline | float | None = None,
        estimator: Estimator | None = None,
        patience: Patience | None = None,
        merge: Merge | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        patience = patience or Patience()
        self.module = module
        self.deadline = as_deadline(deadline)
        self.estimator = estimator or Abstain()
        self._last_record: StepRecord | None = None
        self._step_hooks: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self._stages = stages
        self._parameters_list = [parameter for _, parameter in trainable(module)]
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._channel = Channel(process_group, give_up_s=patience.give_up_s)
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        check_same_on_all_ranks(module, self._channel)
        for tensor in (*module.parameters(), *module.buffers()):
            self._channel.broadcast(tensor.detach())
        self._merge = merge or Merge()
        self._module_buffers = ModuleBuffers(module, self._merge.buffers, self.rank)
        self._coordinator = Coordinator(
            self._parameters_list,
            plan_stages(module, stages),
            self._channel,
            deadline=DeadlineInForce(self.deadline, patience, self.world_size),
            estimator=self.estimator,
            merge=self._merge,
            num_changes=self._module_buffers.numel,
        )
        self._hooks = ParameterHooks(module, self._parameters_list, self)
        self._whole_microbatches = patience.granularity == "microbatch"
        self._check_at_stages(self._coordinator.plan)
        self._step: Step | None = None
        self._idle = False
        self._device = self._parameters_list[0].device
        self._finish_times: FinishTimes | None = FinishTimes(self._device)  # until the stages are planned for good
        self._num_watched = learning_steps(stages)
        self.learned: tuple[list[int], list[float]] = ([], [])  # what the stages were planned from
        self._last_decision: Decision | None = None
        self._replayed: Iterator[Decision] | None = None
        self._replayed_learned: tuple[list[int], list[float]] | None = None
        self._limit = HostLimit() if self._device.type == "cuda" and deadline is not None else None
        self._scalar_names: set[str] = set()
        self._optimizer_hooks = _watch_optimizers(self)
        self._finalizer = weakref.finalize(self, _close, self._coordinator, self._hooks, self._optimizer_hooks)

    # -- what users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass; inside of ``step()`` it ends with `DeadlineReached` when this rank is late."""
        stopwatch = self._coordinator.stopwatch
        if self._step is None:  # an evaluation between two steps
            stopwatch.enter("outside")
            return self.module(*args, **kwargs)
        stopwatch.enter("forward")
        if self._step.num_forward > 0:  # its first forward pass ends the micro-batch before it
            self._coordinator.microbatch_finished()
        self.check()
        output = self.module(*args, **kwargs)
        self._step.num_forward += 1
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward_begins, weakref.ref(tensor)))  # type: ignore[no-untyped-call]
        return output

    def step(self, num_microbatches: int = 1) -> Step:
        """One optimizer step, ``with model.step(): ...``; ``num_microbatches`` is how many backward passes it has."""
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches}: a step has at least one backward pass")
        return Step(num_microbatches, self._coordinator, enter=self._enter, leave=self._leave)

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``, for ranks that have not all as many: ``for x, y in model.join(loader)``.

        A rank that has no more goes on with its last batch, for which no step computes anything (its forward pass ends
        the block), and takes part in the merges of the others until all are done.
        Raises ``ValueError`` where there is not one batch.
        """
        batch, empty = None, True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError(f"rank {self.rank}: the loader is empty; give every rank at least one batch")
        self._idle = True
        try:
            while True:
                yield cast(Batch, batch)
                if self._last_record is not None and self._last_record.table.all_idle():
                    return
        finally:
            self._idle = False

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

    @property
    def lag(self) -> int:
        """Merged steps that this rank has not yet applied; from any thread, also while the training thread is stuck."""
        return self._coordinator.lag

    @property
    def since_step_s(self) -> float:
        """Seconds since this rank last finished a step, or since the model was wrapped; from any thread."""
        return self._coordinator.since_step_s

    @property
    def history(self) -> History:
        """What the deadline policy has seen: save it with a checkpoint, so that a resumed run decides alike."""
        return self._coordinator.history

    def restore(self, history: History) -> None:
        """Go on from a saved history; before the first step, on all ranks alike."""
        if self._step is not None or self._last_record is not None:
            raise RuntimeError("restore() comes before the first step")
        self._coordinator.restore(history)

    @property
    def reached(self) -> Tensor:
        """The share of each stage that this rank handed in of late: save it too where ``Merge.weighting`` needs it."""
        return self._coordinator.reached

    def restore_reached(self, reached: Tensor) -> None:
        """Go on from what `reached` was on this rank; before the first step."""
        self._coordinator.restore_reached(reached)

    @property
    def last_decision(self) -> Decision | None:
        """What this rank decided in its last step: recorded for each step, it makes the run repeatable (`replay`)."""
        return self._last_decision

    def replay(self, recording: Recording) -> None:
        """Decide as in a recorded run instead of by the clock; before the first step, on all ranks alike.

        With the same model, data and number of ranks it gives the same parameters bit for bit. Each rank has its own
        recording. Steps beyond it wait for everyone.
        """
        if self._step is not None or self._last_record is not None:
            raise RuntimeError("replay() comes before the first step")
        self._replayed = iter(recording.decisions)
        self._replayed_learned = (list(recording.order), list(recording.seconds)) if recording.order else None
        self._coordinator.wait_for_all()

    def _next_replayed(self) -> Decision | None:
        """The recorded decision of the step that is entered now."""
        if self._replayed is None:
            return None
        step = self._coordinator.step
        return next(self._replayed, Decision(step, sys.maxsize, None, False))

    def pause(self) -> None:
        """Between two steps, on all ranks: what comes until `resume` belongs to no step, and nobody is late in it.

        For what all ranks do together and may take long, such as an evaluation, or training another model.
        """
        if self._step is not None:
            raise RuntimeError("pause() comes between two steps, not inside of one")
        self._coordinator.pause()

    def resume(self) -> None:
        """Go on after `pause`: the time of the next step begins now; best with a barrier after it."""
        self._coordinator.resume()

    def close(self) -> None:
        """Remove all hooks and end the stand-in; the module stays usable by itself."""
        self._finalizer()

    # -- what the hooks call

    def _backward_begins(self, output: weakref.ref[Tensor], _gradient: Tensor) -> None:
        self._coordinator.stopwatch.enter("backward")
        if self._step is not None:
            self._step.outputs.append(output)
        if self._finish_times is not None:
            self._finish_times.begin()

    def finished(self, index: int, parameter: Tensor) -> None:
        """A parameter has its gradient: take it, hand it to the merge, and stop if this rank is late."""
        gradient = parameter.grad
        if gradient is None:
            return
        if self._idle:
            self.check()
        parameter.grad = None  # the copy in the buffer is the one that counts; freeing this one at once is fastest
        if self._step is None:
            raise RuntimeError(
                "backward outside of a step: write `with model.step():` around the forward and backward pass"
            )
        if gradient.layout != torch.strided:
            raise ValueError(
                f"parameter {self._name(index)} has a gradient of layout {gradient.layout}: use dense gradients"
            )
        self._coordinator.stopwatch.gradient_finished()
        if self._finish_times is not None:
            self._finish_times.finished(index)
        replayed = self._step.replayed
        if replayed is None or self._step.num_gradients < replayed.num_gradients:
            stage_finished = self._coordinator.offer(index, gradient)
            self._step.num_gradients += 1
        else:  # it came too late in the run that is replayed
            self._coordinator.offer_late(index, gradient)
            stage_finished = False
        if stage_finished and self._limit is not None:
            self._limit.stage_finished()
        if not self._whole_microbatches:
            self.check()

    def check(self) -> None:
        """Leave the step if this rank is late in it, or has no data for it.

        Where the estimator finishes late, a backward pass goes on instead, and what the rank has is handed in.
        """
        if (step := self._step) is None:
            return
        replayed = step.replayed
        stop = self._coordinator.stop_requested if replayed is None else step.num_checks == replayed.left_at
        if not stop and not self._idle:
            step.num_checks += 1
            return
        step.goes_on = step.goes_on or self._hands_over(step)
        if not step.goes_on or self._coordinator.stopwatch.phase != "backward":
            step.stopped = True
            raise DeadlineReached

    def _hands_over(self, step: Step) -> bool:
        """Whether a late rank finishes its backward pass; what it has is then handed in already."""
        if not self.estimator.finishes_late or self._idle or self._coordinator.stopwatch.phase != "backward":
            return False
        if step.replayed is not None and step.replayed.stood_in:
            return True
        return self._coordinator.hand_over(step.scalars, self._changes(step))

    def _changes(self, step: Step) -> Tensor | None:
        """Of the module's buffers, where this rank has finished its forward passes."""
        return self._module_buffers.changes() if step.num_forward >= step.num_microbatches else None

    # -- entering and leaving a step

    def _enter(self, step: Step) -> None:
        if self._step is not None:
            raise RuntimeError(f"step {self._coordinator.step} is still open: a step() cannot be nested in another")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the model was wrapped and is not now, so it would not be "
                    "merged: wrap the model first and freeze it then, or wrap it again"
                )
        # gradients that the user kept are added to the merged ones, as with DDP; the buffers they lie in are used again
        step.kept = {i: p.grad.clone() for i, p in enumerate(self._parameters_list) if p.grad is not None}
        for index in step.kept:
            self._parameters_list[index].grad = None
        step.replayed = self._next_replayed()
        self._step = step
        self._coordinator.stopwatch.enter("data")
        checked = self._merge.checks(self._coordinator.step)
        self._coordinator.enter(
            step.num_microbatches,
            idle=self._idle,
            fingerprint=fingerprint(self._parameters_list) if checked else NO_FINGERPRINT,
        )

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        """Merge, and put the merged gradients in place; true where the error was only the deadline."""
        only_late = isinstance(error, DeadlineReached)
        # a loop that swallows even a BaseException comes here without one, and has not computed everything all the same
        truncated = only_late or step.stopped
        try:
            if error is not None and not only_late:
                self._coordinator.fail(error)
                return False
            changes = self._changes(step)
            abstain = step.replayed is not None and step.replayed.stood_in
            merged = self._coordinator.finish(
                truncated=truncated, scalars=step.scalars, changes=changes, abstain=abstain
            )
        finally:
            self._step = None
            if isinstance(error, DeadlineReached):
                release_graph(error, step.outputs)
        self._last_decision = Decision(
            merged.step,
            merged.num_gradients,
            step.num_checks if step.stopped or step.goes_on else None,
            merged.stood_in,
        )
        self._put_in_place(merged, step.kept)
        self._scalar_names |= step.scalars.keys()
        names = frozenset(self._scalar_names)
        record = StepRecord(
            merged.step,
            merged.seconds,
            merged.deadline_s,
            merged.plan,
            merged.table,
            names,
            shadow_s=merged.shadow_s,
            rules=self._coordinator.rules,
        )
        self._last_record = record
        if self._finish_times is not None:
            self._learn(self._finish_times)
        if self._merge.checks(record.step):
            self._warn_of_different_replicas(record)
        for hook in tuple(self._step_hooks.values()):
            hook(record)
        return only_late

    def _warn_of_different_replicas(self, record: StepRecord) -> None:
        if different := record.table.different_ranks():
            _log.log(
                logging.WARNING if self.rank == 0 else logging.DEBUG,
                "step %d: the parameters of ranks %s are not those of the others; look for code that changes them on "
                "some ranks only, and resume from a checkpoint",
                record.step,
                list(different),
            )

    def _put_in_place(self, merged: MergedStep, kept: Mapping[int, Tensor]) -> None:
        """Give every parameter its merged gradient, and every buffer its merged value: the same on every rank."""
        if self._module_buffers.numel:
            self._module_buffers.apply(merged.buffers.changes[:-1], float(merged.buffers.changes[-1]))
        if merged.table.nothing_to_apply():
            for index, parameter in enumerate(self._parameters_list):
                parameter.grad = kept.get(index)
            return
        for index, share in enumerate(merged.buffers.settle()):
            parameter, gradient = self._parameters_list[index], merged.buffers.views[index]
            if share.weight > 0:
                parameter.grad = gradient if share.present else None
            else:  # nobody has anything
                substitute = self.estimator.substitute(parameter)
                parameter.grad = gradient.copy_(substitute) if substitute is not None else None
            if share.weight > 0 and share.present:
                self.estimator.observe(parameter, gradient, merged=True)
            if index in kept:
                parameter.grad = kept[index] if parameter.grad is None else parameter.grad.add_(kept[index])

    def _learn(self, times: FinishTimes) -> None:
        """After the first steps, plan the stages anew, as rank 0 finished the gradients of the last of these."""
        self._num_watched -= 1
        if self._num_watched > 0:
            self._finish_times = FinishTimes(self._device)
            return
        self._finish_times = None
        number = len(self._parameters_list)
        own = self._replayed_learned or (times.order(number), times.seconds(number))
        order, seconds = self._channel.of_rank0(torch.tensor(own, dtype=torch.float64)).tolist()
        self.learned = [int(index) for index in order], seconds
        plan = plan_stages(self.module, self._stages, *self.learned)
        self._check_at_stages(plan)
        self._coordinator.learn(plan)
        self._coordinator.start()

    def _check_at_stages(self, plan: StagePlan) -> None:
        if not self._whole_microbatches:
            self._hooks.check_at([stage.entry for stage in plan.stages])

    def _name(self, index: int) -> str:
        return trainable(self.module)[index][0]


def _watch_optimizers(model: StagedDataParallel) -> list[RemovableHandle]:
    """Tell optimizer time from data time, and refuse an optimizer step that would find no gradients."""
    reference, stopwatch = weakref.ref(model), model._coordinator.stopwatch

    def before() -> None:
        if (owner := reference()) is not None and owner._step is not None:
            raise RuntimeError(
                "optimizer.step() inside of `with model.step()`: gradients are merged when it ends; step after it"
            )

    return around_steps(model._parameters_list, before, partial(stopwatch.enter, "data"))


def _close(coordinator: Coordinator, hooks: ParameterHooks, optimizer_hooks: Sequence[RemovableHandle]) -> None:
    coordinator.close()
    hooks.close()
    for hook in optimizer_hooks:
        hook.remove()
