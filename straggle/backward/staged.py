"""`StagedBackward`: the backward pass of any model in stages, on one process: inspect, time and stop it by stage.

This needs no ``torch.distributed``; `StagedDataParallel` does the same on every rank and merges finished gradients.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from straggle import world
from straggle.backward.clocks import HostLimit, Timeline
from straggle.backward.device import device_of
from straggle.backward.hooks import (
    DeadlineReached,
    HasGradient,
    ModuleHook,
    ParameterHooks,
    release_graph,
    tensors_in,
)
from straggle.backward.passes import TWICE_IN_ONE_PASS, PassWatcher, SeenGradients
from straggle.backward.stages import BalancedByTime, PlanLearner, Registered, Stage, plan_stages, trainable
from straggle.policies.deadline import Granularity, check_granularity
from straggle.policies.estimators import Abstain, Estimator
from straggle.report import BackwardReport, StageTime


@dataclass(frozen=True)
class FinishedStage:
    """A stage whose gradients a backward pass has just finished, before the stages below have run.

    ``parameters`` maps names to parameters with their gradient in ``p.grad``; only those that the pass uses.
    ``output_gradients`` are the gradients with respect to the output of the stage's last module, one for each of its
    calls, the last call first (empty if the module's output does not require grad).
    """

    name: str
    parameters: Mapping[str, nn.Parameter]
    output_gradients: tuple[Tensor, ...]
    stop: Callable[[], None]  # end the backward pass here

    def norm(self) -> Tensor:
        """Euclidean norm of the stage's gradients, a scalar tensor."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])


class StagedBackward:
    """Runs the backward passes of ``module`` in stages; the model is used as it is, whatever its graph.

    ``stages`` as for `StagedDataParallel`: planned by size, a number, module names or `BalancedByTime`. Unless named,
    they are planned again after the first complete step, in the order in which it finished the gradients.
    ``on_stage`` is called with each `FinishedStage`. ``estimator``: it fills gradients that `DeadlineReached` leaves
    missing (its weight has no effect without other ranks). ``granularity="microbatch"`` stops only between the backward
    passes of a step, so that each pass that was begun is complete.

    >>> staged = StagedBackward(model, on_stage=lambda stage: print(stage.name, stage.norm()))
    >>> print(staged.backward(criterion(model(x), y), budget_s=0.1).report)

    Gradients are in ``p.grad`` as after ``loss.backward()``, bit for bit; those of the stages that were not reached are
    as they were before. Frozen parameters belong to no stage, and may change from step to step.
    Raises ``ValueError`` for a module without trainable parameters and for stages that it does not have.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stages: int | Sequence[str] | BalancedByTime | None = None,
        on_stage: Callable[[FinishedStage], None] | None = None,
        estimator: Estimator | None = None,
        granularity: Granularity = "stage",
        clock: Callable[[], float] = world.clock,
    ) -> None:
        check_granularity(granularity, ("stage", "microbatch"))
        self.module = module
        self.estimator = estimator or Abstain()
        self._on_stage = on_stage
        self._wanted = stages
        self._complete_microbatches = granularity == "microbatch"
        self._clock = clock
        self._step: BackwardStep | None = None
        self._seen_complete = False  # `PassWatcher.seen_complete` of any step
        self._hook()

    # -- what users call

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order in which backward finishes them."""
        return self._plan.stages

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        gradient: Tensor | Sequence[Tensor | None] | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        budget_s: float | None = None,
    ) -> BackwardStep:
        """``torch.autograd.backward(tensors, gradient)`` in stages, stopped after ``budget_s`` seconds.

        It is a step of its own, whose ``report`` has what was computed; inside of a `step` it is one of its passes, and
        leaves the block when it is stopped. Raises ``ValueError`` for a tensor that is no scalar without a gradient.
        """
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if gradient is None:
            gradients: list[Tensor | None] = [None] * len(roots)
        else:
            gradients = [gradient] if isinstance(gradient, Tensor) else list(gradient)
        if len(gradients) != len(roots):
            raise ValueError(f"got {len(roots)} tensors and {len(gradients)} gradients: give one for each, or None")
        for root, given in zip(roots, gradients, strict=True):
            if given is None and root.numel() != 1:
                raise ValueError(
                    f"backward from a tensor of shape {tuple(root.shape)} needs gradient=, of the same shape "
                    "(or reduce it to a scalar first, such as loss.mean())"
                )
        if self._step is None:
            with self.step(budget_s) as step:
                self._run(step, roots, gradients, retain_graph, create_graph)
            return step
        if budget_s is not None:
            raise ValueError("budget_s is the step's: write `with staged.step(budget_s)`")
        self._run(self._step, roots, gradients, retain_graph, create_graph)
        return self._step

    def step(self, budget_s: float | None = None) -> BackwardStep:
        """One optimizer step, ``with staged.step(0.1) as step: ...``, with any number of forward and backward passes.

        After ``budget_s`` seconds, or when it is stopped, `DeadlineReached` leaves the block, which swallows it. Its
        report is ``step.report``.
        """
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s={budget_s}: must be a positive number of seconds (or None)")
        return BackwardStep(self, budget_s)

    def stop(self) -> None:
        """End the running step at its next gradient or stage; from any thread."""
        if (step := self._step) is not None:
            step.stop()

    def close(self) -> None:
        """Remove all hooks; the module stays usable by itself."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._hooks is not None:
            self._hooks.close()

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy is in no step and has its own hooks on the copied module; a copy of a closed one has none."""
        closed = not self._handles
        return {**self.__dict__, "_step": None, "_handles": [], "_hooks": None, "_closed": closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        closed = state.pop("_closed")
        self.__dict__.update(state)
        if not closed:
            self._hook()

    # -- planning

    def _hook(self) -> None:
        self._handles = [
            self.module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            self.module.register_forward_hook(ModuleHook(self._after_forward)),
        ]
        self._hooks: ParameterHooks | None = None
        self._watch()

    def _watch(self) -> None:
        """Plan the stages of the parameters that are trainable now, and register hooks on them."""
        named = trainable(self.module)
        if not named:
            kind = type(self.module).__name__
            raise ValueError(f"{kind} has no parameter with requires_grad=True: there is nothing to compute")
        if self._hooks is not None:
            self._hooks.close()
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._all = list(self.module.parameters())
        self._registered = Registered(self.module)
        self._trainable = [parameter.requires_grad for parameter in self._all]
        self._learner = PlanLearner(self._wanted, self.parameters[0].device, self._clock)
        self._hooks = ParameterHooks(self.module, self.parameters, self)
        self._use_plan(order=None, seconds=None)

    def _watch_if_changed(self) -> None:
        """Plan again if parameters were frozen, unfrozen, replaced, added or tied since."""
        frozen_alike = [parameter.requires_grad for parameter in self._all] == self._trainable
        if not frozen_alike or not self._registered.unchanged():
            self._watch()

    def _use_plan(self, order: Sequence[int] | None, seconds: Sequence[float] | None) -> None:
        self._plan = plan_stages(self.module, self._wanted, order, seconds)
        stage_of = {index: number for number, stage in enumerate(self.stages) for index in stage.parameters}
        self.stage_of = [stage_of[index] for index in range(len(stage_of))]
        assert self._hooks is not None
        root = ""
        self._hooks.check_at([root] if self._complete_microbatches else [stage.entry for stage in self.stages])
        for handle in self._handles[2:]:
            handle.remove()
        del self._handles[2:]
        if self._on_stage is not None:
            modules = dict(self.module.named_modules())
            self._handles += [
                modules[name].register_forward_hook(ModuleHook(self._keep_output_gradient(name)))
                for name in dict.fromkeys(stage.exit for stage in self.stages)
            ]

    # -- what the hooks call

    def gradient_ready(self, index: int, parameter: HasGradient) -> None:
        """A parameter has its gradient of the running pass."""
        if self._step is not None:
            self._step._gradient_ready(index, parameter)

    def check(self, at: int = 0) -> None:  # noqa: ARG002
        """Leave the step if it is stopped or its budget is spent."""
        if self._step is not None:
            self._step._settle_outside()
            if not (self._complete_microbatches and self._step.in_pass):  # not within a checkpoint's recomputation
                self._step._check()

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._step is not None:
            self._step._settle_outside()
            return
        if any(parameter.requires_grad for parameter in self._all):  # otherwise this is only an evaluation
            self._watch_if_changed()

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._arrived, weakref.ref(tensor)))  # type: ignore[no-untyped-call]

    def _arrived(self, output: weakref.ref[Tensor], _gradient: Tensor) -> None:
        if self._step is not None:
            self._step._joins_if_new()
            self._step._outputs.append(output)

    def _keep_output_gradient(self, module: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(gradient: Tensor) -> None:
            if (step := self._step) is not None:
                step._joins_if_new()
                for number, stage in enumerate(step.stages):  # the plan may have changed since forward
                    if stage.exit == module:
                        step._output_gradients.setdefault(number, []).append(gradient)

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            tensor = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
            if tensor is not None:
                tensor.register_hook(keep)  # type: ignore[no-untyped-call]

        return after_forward

    def saw_complete_pass(self) -> None:
        """A pass came to its end, and no parameter in it was refused; steps after this one need not look again."""
        self._seen_complete = True

    # -- running

    def _run(
        self,
        step: BackwardStep,
        roots: list[Tensor],
        gradients: list[Tensor | None],
        retain_graph: bool | None,
        create_graph: bool,
    ) -> None:
        step.settle()
        step._check()
        step.announce()
        torch.autograd.backward(roots, gradients, retain_graph, create_graph)
        step.returned()

    def _enter(self, step: BackwardStep) -> None:
        if self._step is not None:
            raise RuntimeError("a step() cannot be nested in another of the same model")
        self._watch_if_changed()
        self._step = step

    def _leave(self, step: BackwardStep, error: BaseException | None) -> None:
        self._step = None
        if isinstance(error, DeadlineReached):
            release_graph(error, step._outputs)
        complete = error is None and not step._num_failed and step._finished_in
        if complete and (times := self._learner.step_complete()) is not None:
            number = len(self.parameters)
            self._use_plan(times.order(number), times.seconds(number))


class BackwardStep(PassWatcher):
    """One step of `StagedBackward`, as a context manager."""

    functions_give_parts = False  # shared weights under reentrant checkpoints are refused

    def __init__(self, owner: StagedBackward, budget_s: float | None) -> None:
        self._owner = owner
        self._budget_s = math.inf if budget_s is None else budget_s

    def __enter__(self) -> BackwardStep:
        owner = self._owner
        owner._enter(self)
        self.stages = owner.stages
        device = owner.parameters[0].device
        self._watch_step()
        self.seen_complete = owner._seen_complete
        self._stop_at = owner._clock() + self._budget_s
        self._stopped = self._truncated = False
        self._failed_pass: tuple[list[int], SeenGradients] | None = None  # what it left in p.grad
        self._num_failed = 0  # passes that failed, and whose gradients are still in p.grad
        self._timeline = Timeline(device, owner._clock)
        owner._learner.step_begins()
        queue = device_of(device)
        self._limit = HostLimit(queue) if queue.is_queued and self._budget_s < math.inf else None
        # for each backward pass, the parameters in the order in which they were finished
        self._finished_in: list[list[int]] = []
        self._stage_passes = [0] * len(self.stages)
        self._outputs: list[weakref.ref[Tensor]] = []
        self._output_gradients: dict[int, list[Tensor]] = {}
        self._before = self._seen_now()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self._truncated = isinstance(error, DeadlineReached)
        stopped_in_pass = self._truncated and bool(self._runs)
        if error is None:
            self._settle_outside()
        self._count_failed()
        self._before = SeenGradients()
        self._output_gradients.clear()
        if stopped_in_pass:
            self._refuse_repeated()
        self._owner._leave(self, error)
        if error is None or self._truncated:
            self._estimate()
        return self._truncated

    def stop(self) -> None:
        """End the step at its next gradient or stage; from any thread."""
        self._stopped = True

    # -- passes

    def _settle_outside(self) -> None:
        """Call `settle`, unless this is within a pass, such as a checkpoint's recomputation."""
        if not self.in_pass:
            self.settle()

    def _pass_begins(self, first: int) -> None:
        self._count_failed()
        self._missing = [len(stage.parameters) for stage in self.stages]
        self._log: list[int] = []
        self._finished_in.append(self._log)
        self._output_gradients.clear()
        # an undefined gradient changes nothing: remember the present one, to tell it from a new one
        self._before = self._seen_now().but(first, self._before)
        self._timeline.begin()
        if (times := self._owner._learner.times) is not None:
            times.begin()

    def _pass_over(self, number: int | None) -> None:
        """Finish the pass's stages; a stage that the pass uses only in part is finished with that part."""
        self._before = self._seen_now()
        self._outputs.clear()  # so that a later pass that is stopped does not release their graph
        if number is None:  # torch.autograd.grad went through the model
            del self._finished_in[-1]
            return
        for index in self._held:
            self._finished(index)
        self._holds = False
        self._refuse_repeated()
        self._owner.saw_complete_pass()
        self._timeline.mark(self._owner.stage_of[self._log[-1]])
        for stage, missing in enumerate(self._missing):
            if 0 < missing < len(self.stages[stage].parameters):
                self._stage_finished(stage)

    def _pass_failed(self) -> None:
        """Keep what the pass has left: its error was caught."""
        self._outputs.clear()
        log = self._finished_in.pop()
        self._failed_pass = log, SeenGradients((index, self._owner.parameters[index].grad) for index in log)

    def _seen_now(self) -> SeenGradients:
        return SeenGradients((index, parameter.grad) for index, parameter in enumerate(self._owner.parameters))

    def _count_failed(self) -> None:
        """Count a failed pass as one of the step's if its gradients are still there; the loop may have zeroed them."""
        failed, self._failed_pass = self._failed_pass, None
        if failed is None:
            return
        log, left = failed
        if left.any_is_as_it_was(self._owner.parameters):
            self._finished_in.append(log)
            self._num_failed += 1

    def _gradient_ready(self, index: int, parameter: HasGradient) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self._joins_if_new(index)
        if self._before and self._before.is_as_it_was(index, gradient):
            return
        if self._gives_parts:
            self._hold(index, parameter)
            return
        self._num_in_pass += 1
        self._finished(index)
        if (self._stopped or self._stop_at < math.inf) and not self._owner._complete_microbatches:
            self._check()

    def _finished(self, index: int) -> None:
        self._log.append(index)
        if (times := self._owner._learner.times) is not None:
            times.finished(index)
        stage = self._owner.stage_of[index]
        self._missing[stage] -= 1
        if self._missing[stage] <= 0:
            self._stage_finished(stage)

    def _stage_finished(self, number: int) -> None:
        self._stage_passes[number] += 1
        self._timeline.mark(number)
        if self._limit is not None:
            self._limit.stage_finished()
        if (on_stage := self._owner._on_stage) is None:
            return
        finished = [index for index in self._log if self._owner.stage_of[index] == number]
        own = {self._owner.names[index]: self._owner.parameters[index] for index in finished}
        gradients = tuple(self._output_gradients.pop(number, ()))
        on_stage(FinishedStage(self.stages[number].name, own, gradients, self.stop))

    def _refuse_repeated(self) -> None:
        if len(self._log) > len(set(self._log)):
            twice = next(index for index in self._log if self._log.count(index) > 1)
            raise RuntimeError(f"parameter {self._owner.names[twice]} {TWICE_IN_ONE_PASS}")

    def _check(self) -> None:
        if self.may_stop and not self._holds and (self._stopped or self._owner._clock() >= self._stop_at):
            raise DeadlineReached

    # -- afterwards

    def _estimate(self) -> None:
        """Show the computed gradients to the estimator, and let it fill the missing ones."""
        estimator = self._owner.estimator
        if isinstance(estimator, Abstain):
            return
        for parameter, passes in zip(self._owner.parameters, self._count(), strict=True):
            if passes and parameter.grad is not None:
                if estimator.watches_own:
                    estimator.observe(parameter, parameter.grad, merged=False)
                estimator.observe(parameter, parameter.grad, merged=True)
            elif self._truncated and not passes and (estimate := estimator.contribution(parameter)) is not None:
                own = estimate.gradient.clone()
                parameter.grad = own if parameter.grad is None else own.add_(parameter.grad)

    def _count(self) -> list[int]:
        """For each parameter, the backward passes whose gradient it holds."""
        counts = Counter(index for log in self._finished_in for index in log)
        return [counts[index] for index in range(len(self._owner.parameters))]

    @property
    def report(self) -> BackwardReport:
        """A report of what was computed so far; waits for a CUDA device."""
        seconds = self._timeline.seconds(len(self.stages))
        times = tuple(
            StageTime(stage.name, stage.numel, stage.nbytes, seconds[number], self._stage_passes[number])
            for number, stage in enumerate(self.stages)
        )
        passes = dict(zip(self._owner.names, self._count(), strict=True))
        expected = max(1, len(self._finished_in))
        cut = self._truncated or self._num_failed > 0
        missing = tuple(name for name, count in passes.items() if count < expected) if cut else ()
        return BackwardReport(times, passes, self._truncated, missing)
