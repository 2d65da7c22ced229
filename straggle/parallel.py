"""`StagedDataParallel`: data parallelism in which a late rank hands in what it has and the group moves on."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.clocks import FinishTimes, HostLimit
from straggle.backward.hooks import DeadlineReached, ParameterHooks, release_graph, tensors_in
from straggle.backward.kept import NONE, UNDECIDED, KeptGradients
from straggle.backward.optimizer_hooks import around_steps, stepped_by_scaler
from straggle.backward.passes import Passes, in_backward
from straggle.backward.stages import BalancedByTime, Registered, StagePlan, learning_steps, plan_stages, trainable
from straggle.merge.alike import Wrapped, check_alike, check_same_state
from straggle.merge.channel import Channel
from straggle.merge.checks import (
    CLIP_AFTER_THE_BLOCK,
    INSTEAD,
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
from straggle.merge.current_deadline import DeadlineInForce
from straggle.merge.names import ScalarNames
from straggle.merge.options import Merge, ModuleBuffers
from straggle.merge.replay import Decision, Recording
from straggle.merge.round import MergedStep
from straggle.merge.telemetry import NO_FINGERPRINT, StepRecord
from straggle.policies.deadline import Deadline, Patience, WaitForAll, as_deadline
from straggle.policies.estimators import Abstain, Estimator
from straggle.policies.history import History
from straggle.report import StepReport
from straggle.step import Step

_log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
_OF_A_REPLICA = ("rank", "world_size", "learned", "_coordinator")


class StagedDataParallel(nn.Module):
    """Replaces ``DistributedDataParallel``; see the module `straggle` for the loop.

    ``stages``: how the gradients are divided (`plan_stages`). ``deadline``: a `Deadline`, a number of seconds, or
    ``None`` to wait for everyone, as DDP does. ``estimator``: what fills in for missing gradients (default: nothing).
    ``patience``: how a late rank is treated. ``merge``: what becomes of buffers and of gradients that are not finite,
    what a gradient counts, and how often replicas are compared.
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
        patience: Patience | None = None,
        merge: Merge | None = None,
        **words_of_ddp: NoReturn,
    ) -> None:
        super().__init__()
        refuse_words_of_ddp(words_of_ddp)
        self.module = module
        self.deadline = as_deadline(deadline)
        self.estimator = estimator or Abstain()
        self._patience = patience or Patience()
        self._merge = merge or Merge()
        self._stages = stages
        self._own_group = process_group is not None and process_group is not dist.group.WORLD
        self._step: Step | None = None
        self._last_record: StepRecord | None = None
        self._step_hooks: OrderedDict[int, Callable[[StepRecord], None]] = OrderedDict()
        self._of_the_job: frozenset[str] = frozenset()  # attributes that no copy has; none yet
        self._join_job(process_group)

    def _join_job(self, process_group: dist.ProcessGroup | None) -> None:
        """Become a replica of the job: on all ranks alike, when the model is wrapped or a copy's first step begins."""
        own, module, stages, patience = set(self.__dict__), self.module, self._stages, self._patience
        wrapped = self._as_wrapped()
        self._named = trainable(module)
        self._parameters_list = [parameter for _, parameter in self._named]
        self._registered = Registered(module)
        self._kinds = kinds_of(self._parameters_list)
        self._frozen = [
            (name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._channel = Channel(process_group, give_up_s=patience.give_up_s)
        self.rank, self.world_size = self._channel.rank, self._channel.world_size
        check_alike(wrapped, self._channel)
        for tensor in (*module.parameters(), *module.buffers()):
            self._channel.broadcast(tensor.detach())
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
        self._idle = False
        self._seen_whole = False  # a backward pass, in which no parameter was refused
        self._device = self._parameters_list[0].device
        self._finish_times: FinishTimes | None = FinishTimes(self._device)  # until the stages are planned for good
        self._num_watched = learning_steps(stages)
        self.learned: tuple[list[int], list[float]] = ([], [])  # what the stages were planned from
        self._last_decision: Decision | None = None
        self._replayed: Iterator[Decision] | None = None
        self._replayed_learned: tuple[list[int], list[float]] | None = None
        self._limit = HostLimit() if self._device.type == "cuda" and not isinstance(self.deadline, WaitForAll) else None
        self._names = ScalarNames(self._channel)
        self._num_stepped = 0  # steps of its optimizers since the last merge
        self._last_kept: tuple[int, tuple[int, ...]] = (NONE, ())  # as the peers, and as this rank, decided last
        self._warned: set[str] = set()
        self._optimizer_hooks = _watch_optimizers(self)
        self._finalizer = weakref.finalize(self, _close, self._coordinator, self._hooks, self._optimizer_hooks)
        self._of_the_job = frozenset(self.__dict__) - own

    def _as_wrapped(self) -> Wrapped:
        """What is compared with the other ranks; a refusal too, which the others would wait for otherwise."""
        try:
            check_unwrapped(self.module, StagedDataParallel)
            check_module(self.module)
        except ValueError as refusal:
            return Wrapped(str(refusal))
        options = {
            "stages": self._stages,
            "deadline": self.deadline,
            "estimator": self.estimator,
            "patience": self._patience,
            "merge": self._merge,
        }
        return Wrapped.of(self.module, options)

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the module and the options: it is in no step, and joins the job when its own first step begins."""
        state = {name: value for name, value in self.__dict__.items() if name not in self._of_the_job}
        return {**state, "_step": None, "_last_record": None, "_step_hooks": OrderedDict(), "_of_the_job": frozenset()}

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
        stopwatch, step = self._coordinator.stopwatch, self._step
        if step is None:  # an evaluation between two steps
            stopwatch.enter("outside")
            return self.module(*args, **kwargs)
        if in_backward():  # a checkpoint computes again
            self._pass_runs(step)
            return self.module(*args, **kwargs)
        step.passes.settle()
        stopwatch.enter("forward")
        if step.num_timed < step.passes.num_over:  # its first forward pass ends the micro-batch before it
            step.num_timed += 1
            self._coordinator.microbatch_finished()
        self.check()
        step.in_forward = True
        output = self.module(*args, **kwargs)
        step.in_forward = False
        step.num_forward += 1
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._at_output, weakref.ref(tensor)))  # type: ignore[no-untyped-call]
        return output

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters. Who goes through them inside of a step to clip gradients is warned once."""
        if self._step is not None and clips(sys._getframe(1)):  # a generator's caller is who iterates over it
            self._warn_once("clip", f"rank {self.rank}, step {self._coordinator.step}: {CLIP_AFTER_THE_BLOCK}")
        yield from super().parameters(recurse)

    def step(self, num_microbatches: int = 1) -> Step:
        """One optimizer step, ``with model.step(): ...``; ``num_microbatches`` is how many backward passes it has."""
        check_num_microbatches(num_microbatches)
        self._join_first()
        return Step(num_microbatches, self._coordinator, self._names, enter=self._enter, leave=self._leave)

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
    def store_reachable(self) -> bool:
        """Whether the job's store answers this rank; without it the rank cannot be late. From any thread."""
        return self._channel.store_reachable

    @property
    def history(self) -> History:
        """What the deadline policy has seen: save it with a checkpoint, so that a resumed run decides alike."""
        return self._coordinator.history

    def restore(self, history: History) -> None:
        """Go on from a saved history; before the first step, on all ranks alike."""
        if self._step is not None or self._last_record is not None:
            raise RuntimeError("restore() comes before the first step")
        self._join_first()
        self._coordinator.restore(history)

    @property
    def reached(self) -> Tensor:
        """The share of each stage that this rank handed in of late: save it too where ``Merge.weighting`` needs it."""
        return self._coordinator.reached

    def restore_reached(self, reached: Tensor) -> None:
        """Go on from what `reached` was on this rank; before the first step."""
        self._join_first()
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
        self._join_first()
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
        if self._of_the_job:
            self._finalizer()

    # -- what the hooks call

    def _at_output(self, output: weakref.ref[Tensor], _gradient: Tensor) -> None:
        """A backward pass has come to an output of the model."""
        if (step := self._step) is not None:
            self._pass_runs(step)
            step.outputs.append(output)

    def _pass_runs(self, step: Step) -> None:
        """A hook of a backward pass was called, before its first gradient."""
        if step.passes.begins():
            self._coordinator.stopwatch.enter("backward")
            self._coordinator.begin_pass()
            step.kept.set_aside()
            if self._finish_times is not None:
                self._finish_times.begin()

    def _pass_ended(self, number: int | None) -> None:
        """Backward pass ``number`` is over; ``None``: one ended that gave no gradient to any parameter."""
        if (step := self._step) is None:
            return
        if number is None:
            step.kept.put_back()
        else:
            self._seen_whole = True
            self._coordinator.end_pass(number)

    def finished(self, index: int, parameter: Tensor) -> None:
        """A parameter has its gradient: take it, hand it to the merge, and stop if this rank is late."""
        gradient = parameter.grad
        if gradient is None:
            return
        if self._idle:
            self.check()
        if (step := self._step) is None:
            parameter.grad = None
            raise RuntimeError(
                "backward outside of a step: write `with model.step():` around the forward and backward pass"
            )
        if not step.kept.decided:
            if not step.kept.decide(index):
                return
            self._coordinator.keep(step.kept.mark)
        parameter.grad = None  # the copy in the buffer is the one that counts; freeing this one at once is fastest
        if gradient.layout != torch.strided:
            raise ValueError(
                f"parameter {self._name(index)} has a gradient of layout {gradient.layout}: use dense gradients"
            )
        self._coordinator.stopwatch.gradient_finished()
        if self._finish_times is not None:
            self._finish_times.finished(index)
        self._pass_runs(step)
        number, replayed = step.passes.gradient(), step.replayed
        if replayed is None or step.num_gradients < replayed.num_gradients:
            stage_finished = self._coordinator.offer(index, gradient, number)
            step.num_gradients += 1
        else:  # it came too late in the run that is replayed
            self._coordinator.offer_late(index, gradient)
            stage_finished = False
        if stage_finished and self._limit is not None:
            self._limit.stage_finished()
        if step.num_gradients < step.num_microbatches * len(self._parameters_list):  # there is something left to save
            self.check()

    def check(self) -> None:
        """Leave the step if this rank is late in it, or has no data for it.

        Where the estimator finishes late, a backward pass goes on instead, and what the rank has is handed in.
        """
        if (step := self._step) is None or (self._whole_microbatches and in_backward()):
            return
        replayed = step.replayed
        stop = self._coordinator.stop_requested if replayed is None else step.num_checks == replayed.left_at
        if step.passes.nested and not self._seen_whole:
            stop = False  # under reentrant checkpointing only a whole pass tells that no weight is shared
        if not stop and not self._idle:
            step.num_checks += 1
            return
        step.goes_on = step.goes_on or self._hands_over(step)
        if not (step.goes_on and in_backward()):
            step.stopped = True
            raise DeadlineReached

    def _hands_over(self, step: Step) -> bool:
        """Whether a late rank finishes its backward pass; what it has is then handed in already."""
        if not self.estimator.finishes_late or self._idle or not in_backward():
            return False
        if step.replayed is not None and step.replayed.stood_in:
            return True
        return self._coordinator.hand_over(step.scalars, self._changes(step, truncated=True))

    def _changes(self, step: Step, *, truncated: bool) -> Tensor | None:
        """Of the module's buffers, where this rank has finished its forward passes."""
        num_passes = max(step.num_forward, step.passes.number + 1)
        finished = not step.in_forward and (num_passes >= step.num_microbatches or not truncated)
        return self._module_buffers.changes() if finished and step.num_forward > 0 else None

    # -- entering and leaving a step

    def _enter(self, step: Step) -> None:
        if self._step is not None:
            raise RuntimeError(f"step {self._coordinator.step} is still open: a step() cannot be nested in another")
        self._refuse_other_parameters()
        if kinds_of(self._parameters_list) != self._kinds:
            check_kinds(self._named, self._kinds)
        step.kept = KeptGradients(self._parameters_list)
        step.passes = Passes(self._pass_ended)
        step.replayed = self._next_replayed()
        self._step = step
        self._coordinator.stopwatch.enter("data")
        checked = self._merge.checks(self._coordinator.step)
        self._coordinator.enter(
            step.num_microbatches,
            idle=self._idle,
            fingerprint=fingerprint(self._parameters_list) if checked else NO_FINGERPRINT,
            stepped=math.nan if self._last_record is None else self._num_stepped,
            kept=step.kept.mark,
            max_over=None if step.replayed is None else step.replayed.num_over,
        )
        self._num_stepped = 0

    def _refuse_other_parameters(self) -> None:
        """What is not among the parameters that were wrapped would not be merged."""
        if not self._registered.unchanged():
            if differences := self._registered.differences():
                raise RuntimeError(
                    f"rank {self.rank}, step {self._coordinator.step}: parameters are not those that were wrapped "
                    f"({differences}), and would not be merged: change, tie or add parameters before "
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
        """Merge, and put the merged gradients in place; true where the error was only the deadline."""
        only_late = isinstance(error, DeadlineReached)
        # a loop that swallows even a BaseException comes here without one, and has not computed everything all the same
        truncated = only_late or step.stopped
        step.passes.settle()
        try:
            if error is not None and not only_late:
                self._coordinator.fail(error)
                return False
            merged = self._coordinator.finish(
                truncated=truncated,
                failed=step.passes.failed,
                scalars=step.scalars,
                changes=self._changes_or_fail(step, truncated=truncated),
                abstain=step.replayed is not None and step.replayed.stood_in,
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
            merged.num_over,
        )
        self._keep_as_peers_did(step, merged)
        self._put_in_place(merged, step.kept.gradients)
        if not truncated:
            self._warn_of_missing_passes(step, merged)
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
            rules=self._coordinator.rules,
        )
        self._last_record = record
        if self._finish_times is not None:
            self._learn(self._finish_times)
        self._warn_of_different_replicas(record)
        for hook in tuple(self._step_hooks.values()):
            hook(record)
        return only_late

    def _warn_of_missing_passes(self, step: Step, merged: MergedStep) -> None:
        """Where nobody stopped them: what a replay, a stand-in or missing data took is no mistake."""
        stopped = step.passes.failed or step.goes_on or merged.stood_in or self._idle or step.replayed is not None
        if not stopped and (words := too_few_passes(step.num_microbatches, step.passes.num_over)):
            self._warn_once("passes", f"rank {self.rank}, step {merged.step}: {words}")

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

    def _changes_or_fail(self, step: Step, *, truncated: bool) -> Tensor | None:
        try:
            return self._changes(step, truncated=truncated)
        except RuntimeError as error:
            self._coordinator.fail(error)
            raise

    def _keep_as_peers_did(self, step: Step, merged: MergedStep) -> None:
        """Where this rank was late before any backward pass, it keeps the gradients that its peers kept."""
        decision = merged.table.kept()
        decision = self._last_kept[0] if decision == UNDECIDED else decision
        if not step.kept.decided and not step.kept.follow(decision, self._last_kept[1]):
            _log.warning(
                "rank %d, step %d: this rank was late before its first backward pass, and its peers kept gradients of "
                "other parameters than it has: replicas may differ from here on; zero_grad() before the block",
                self.rank,
                merged.step,
            )
        self._last_kept = decision, tuple(step.kept.gradients)

    def _put_in_place(self, merged: MergedStep, kept: Mapping[int, Tensor]) -> None:
        """Give every parameter its merged gradient, and every buffer its merged value: the same on every rank."""
        if self._module_buffers.numel:
            self._module_buffers.apply(merged.buffers.changes)
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
        check_same_state(self._coordinator.history, replays=self._replayed is not None, channel=self._channel)
        number = len(self._parameters_list)
        own = self._replayed_learned or (times.order(number), times.seconds(number))
        order, seconds = self._channel.of_rank0(torch.tensor(own, dtype=torch.float64)).tolist()
        self.learned = [int(index) for index in order], seconds
        plan = plan_stages(self.module, self._stages, *self.learned, named=self._named)
        self._check_at_stages(plan)
        self._coordinator.learn(plan)
        self._coordinator.start()

    def _check_at_stages(self, plan: StagePlan) -> None:
        if not self._whole_microbatches:
            self._hooks.check_at([stage.entry for stage in plan.stages])

    def _name(self, index: int) -> str:
        return self._named[index][0]


def _watch_optimizers(model: StagedDataParallel) -> list[RemovableHandle]:
    """Count optimizer steps, tell their time from data time, and refuse one that would find no gradients."""
    reference, stopwatch = weakref.ref(model), model._coordinator.stopwatch

    def before() -> None:
        owner = reference()
        if owner is not None and owner._step is not None:
            raise RuntimeError(
                "optimizer.step() inside of `with model.step()`: gradients are merged when it ends; step after it"
            )
        if owner is not None and owner._merge.nonfinite == "drop" and stepped_by_scaler():
            raise RuntimeError(
                'a GradScaler steps this optimizer, and Merge(nonfinite="drop") leaves out the infinite gradients that '
                'it looks for, so that its scale would only grow: write merge=straggle.Merge(nonfinite="keep")'
            )

    def after() -> None:
        stopwatch.enter("data")
        if (owner := reference()) is not None:
            owner._num_stepped += 1

    return around_steps(model._parameters_list, before, after)


def _close(coordinator: Coordinator, hooks: ParameterHooks, optimizer_hooks: Sequence[RemovableHandle]) -> None:
    coordinator.close()
    hooks.close()
    for hook in optimizer_hooks:
        hook.remove()
