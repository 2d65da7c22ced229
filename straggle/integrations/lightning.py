"""`StagedStrategy`: Lightning's DDP strategy, with straggle in place of DDP.

trainer = Trainer(strategy=StagedStrategy(deadline=straggle.AutoDeadline()))  # was: strategy="ddp"

Importing this module also registers ``strategy="straggle"``, which has an `AutoDeadline`. `WatchCallback` is for any
strategy.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from straggle.backward.hooks import put_gradients
from straggle.extras import needs_extra
from straggle.integrations.lightning_members import LightningMembers
from straggle.integrations.lightning_numbers import SameNumbers
from straggle.integrations.options import Accumulation, LastLoss, take_options, wrapped
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.telemetry import MAX_SCALARS
from straggle.observe.scalars import log_scalars
from straggle.observe.watch.watch import Watch, watch
from straggle.parallel import StagedDataParallel
from straggle.policies.auto_deadline import AutoDeadline
from straggle.step import Step

with needs_extra("lightning"):
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback  # the same code under another name, with classes of its own
        from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
        from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
        from pytorch_lightning.trainer.states import TrainerFn
        from pytorch_lightning.utilities.rank_zero import rank_zero_only
    else:
        from lightning.pytorch import Callback
        from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
        from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
        from lightning.pytorch.trainer.states import TrainerFn
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

Result = TypeVar("Result")
_LOGGED = "sync_dist/"  # begins the names of scalars that ride along for `self.log`
_DATA = "data"  # in the state that a checkpoint has
_LOGS = _ResultMetric.update.__code__


class StagedStrategy(DDPStrategy):
    """``DDPStrategy``; it also takes ``stages``, ``deadline``, ``estimator``, ``late_handling``, ``merge``, ``links``
    and ``members``.

    With automatic optimization, one optimizer step is one `Step` with all its micro-batches. A late rank's training
    step or backward pass ends early, and all hooks are called as usual, with merged gradients. The output of a training
    step that was left is the last loss of this rank, without what else such an output has.

    - A ``training_step`` that returns ``None`` on some ranks leaves these ranks out of the step's mean.
    - Loaders may have different lengths: a rank with no more batches takes part with weight 0 until all are done.
    - Validation and checkpoints belong to no step: no rank is late in them, and all ranks wait for each other at their
      end. Checkpoints have the states of policies and estimators that are equal on all ranks.
    - The loggers get the numbers of `StepScalars` every ``log_every_n_steps`` optimizer steps.
    - What ``self.log(..., sync_dist=True)`` logs of a training step waits for no rank: it is the mean over those that
      came to it, and is there when the step is merged. Numbers beyond 8 in a step, and sums, are reduced as in DDP. An
      epoch's are over all that came to them, also if a rank came to none.
    - Ranks do not ask rank 0 in every batch whether it got a SIGTERM: they would wait for rank 0.

    With ``members`` each sample comes once an epoch, to a rank that is there. Validation has all of its data on each
    rank, and needs no collective. The lowest rank that made the last step is the main process (``is_global_zero``),
    which alone logs and saves. A process that comes to a running job goes on where the others are when its training
    starts. Raises ``ValueError`` then for accumulation, manual optimization, ``limit_train_batches`` and
    ``overfit_batches``, callbacks that decide on each rank by itself, several training loaders, and other calls than
    ``fit``.

    With manual optimization ``self.trainer.model`` is the `StagedDataParallel`: write ``with
    self.trainer.model.step():`` around its forward pass and ``manual_backward``, and the optimizer's step after it.
    """

    model: Any  # the StagedDataParallel, from setup() on
    _members: LightningMembers | None

    def __init__(self, *positional: Any, **words: Any) -> None:
        self._staged_options = take_options(words)
        self._follows, self._members = "members" in self._staged_options, None
        self._accumulation, self._in_fit, self._validating = Accumulation(), _InFit(self), contextlib.ExitStack()
        self._logged, self._numbers = _Logged(), SameNumbers()
        self._last_loss = LastLoss()
        super().__init__(*positional, **words)
        if self._ddp_comm_hook is not None or self._ddp_comm_state is not None:
            raise ValueError("ddp_comm_hook and ddp_comm_state are DDP's: how contributions are merged is in merge=")

    # -- what Lightning calls

    def setup_environment(self) -> None:
        """As the base class; after it, and before `setup`, callbacks get their states from a checkpoint."""
        super().setup_environment()
        trainer = self.lightning_module.trainer
        if self._follows:
            self._follow(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._in_fit not in trainer.callbacks:
            trainer.callbacks.append(self._in_fit)
            if not self._follows:  # with members a rank reduces nothing out of a step
                trainer.callbacks.insert(0, self._numbers)

    def _setup_model(self, model: nn.Module) -> Any:
        return wrapped(model, {**self._staged_options, **self._ddp_kwargs})

    def _register_ddp_hooks(self) -> None:
        """Do nothing: there are no DDP hooks."""

    def setup(self, trainer: Any) -> None:
        """Wrap the module and set up the optimizers, as the base class does."""
        if self._members is not None:
            self._members.before_wrapping()
        super().setup(trainer)
        self._validating.pop_all()  # of a validation that failed in an earlier fit
        if isinstance(self.model, StagedDataParallel):
            _check_optimizers(self.optimizers)
            self._in_fit.wrapped(trainer, self.model, self._members)
            self._logged = _Logged()
            self.model.register_step_hook(self._logged.merged)
            self._numbers.begin(self.model)
            if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
                trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing

    def on_train_start(self) -> None:
        """Find out which ranks have fewer batches; also for a learning-rate finder, which calls no callback of ours."""
        if isinstance(self.model, StagedDataParallel):
            trainer = self.lightning_module.trainer
            _check_fetches_outside(trainer.fit_loop._data_fetcher)
            if self._members is None:
                self._in_fit.compare_lengths(trainer, self.root_device)
            else:
                self._members.begin()

    def on_validation_start(self) -> None:
        """Begin a pause: no rank is late in a validation."""
        if not self.lightning_module.trainer.sanity_checking:
            self._validating.enter_context(self._paused())

    def on_validation_end(self) -> None:
        """End the pause: all ranks wait for each other."""
        self._validating.close()

    def training_step(self, *positional: Any, **words: Any) -> Any:
        """The module's training step as one micro-batch; the rank's last loss if it is late or has no data."""
        model = self._automatic()
        self._logged.begin(is_last=not self.lightning_module.trainer.fit_loop._should_accumulate())
        if model is None:
            with self.precision_plugin.train_step_context():
                return self.lightning_module.training_step(*positional, **words)
        module, output = self.lightning_module, None
        forward = module.forward
        with self._microbatch(model, module.trainer):
            output = super().training_step(*positional, **words)
        module.forward = forward  # Lightning replaces it for the call, and a late rank does not get to restoring it
        if output is None:
            return self._last_loss.again(self.root_device)
        self._last_loss.note(output.get("loss") if isinstance(output, Mapping) else output)
        return output

    def _microbatch(self, model: StagedDataParallel, trainer: Any) -> contextlib.AbstractContextManager[Any]:
        """The micro-batch of a training step; the first of an accumulation begins a step."""
        loop, number = trainer.fit_loop, trainer.accumulate_grad_batches
        num_before = loop.batch_idx
        if num_before % number == 0:
            self._accumulation.give_up(model)  # Lightning zeroes the gradients of an accumulation left in the middle
        if loop._skip_backward:  # SWA computes BatchNorm's statistics for the averaged weights
            return _forward_only(model)
        num_left = int(min(number - num_before % number, trainer.num_training_batches - num_before))
        step = self._accumulation.step_of(model, num_left, is_last=not loop._should_accumulate())
        return step.microbatch()

    def backward(self, closure_loss: Tensor, optimizer: Any, *positional: Any, **words: Any) -> Tensor:
        """As the precision plugin; after the step's last micro-batch the gradients are merged."""
        model = self._automatic()
        if model is None or model.open_step is None:
            loss: Tensor = super().backward(closure_loss, optimizer, *positional, **words)
            return loss
        step, precision = model.open_step, self.precision_plugin
        closure_loss = precision.pre_backward(closure_loss, self.lightning_module)
        with step.microbatch():
            if closure_loss.requires_grad:
                precision.backward(closure_loss, self.lightning_module, optimizer, *positional, **words)
        if not self.lightning_module.trainer.fit_loop._should_accumulate():
            step.end()
        merged: Tensor = precision.post_backward(closure_loss, self.lightning_module)
        return merged

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Result], model: nn.Module | None = None, **words: Any
    ) -> Any:
        """Run the closure's passes before the optimizer's step, not inside of it."""
        if self._automatic() is None:
            return super().optimizer_step(optimizer, closure, model, **words)
        result = closure()
        return super().optimizer_step(optimizer, lambda: result, model, **words)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the base class; a mean that `self.log` asks for in an open step comes with the merge, into this tensor."""
        model = self.model
        step = model.open_step if isinstance(model, StagedDataParallel) else None
        can_ride = group is None and reduce_op in ("mean", "avg")
        if step is not None and can_ride and (caller := sys._getframe(1)).f_code is _LOGS:
            meta = caller.f_locals["self"].meta
            if self._logged.put_off(step, f"{meta.fx}.{meta.name}", tensor):
                return tensor
        return super().reduce(tensor, group, reduce_op) if self._is_shared else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As the base class; with ``members``, out of a step, this rank's alone, which has evaluated all data."""
        return super().all_gather(tensor, group, sync_grads) if self._is_shared else tensor.unsqueeze(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """As the base class; with ``members`` each rank decides alike, from what all of them have."""
        return decision if self._follows else bool(super().reduce_boolean_decision(decision, all))

    def broadcast(self, obj: Result, src: int = 0) -> Result:
        """As the base class; with ``members`` each rank has what it has."""
        return obj if self._follows else super().broadcast(obj, src)

    def barrier(self, *positional: Any, **words: Any) -> None:
        """As the base class; with ``members`` it waits for nobody, and ranks meet in their next step."""
        if not self._follows:
            super().barrier(*positional, **words)

    def process_dataloader(self, dataloader: object) -> object:
        """As the base class; with ``members`` the samples that are trained on are dealt to the ranks that are there."""
        return dataloader if self._members is None else self._members.process_dataloader(dataloader)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is to save and to log: with ``members`` the lowest that made the last step."""
        return bool(super().is_global_zero) if self._members is None else self._members.is_main

    def save_checkpoint(self, *positional: Any, **words: Any) -> None:
        """As the base class, in a pause: no rank is late in it."""
        with self._paused():
            super().save_checkpoint(*positional, **words)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks of an error, also of one between two micro-batches, such as a callback's."""
        if isinstance(self.model, StagedDataParallel) and (step := self.model.open_step) is not None:
            step.end(exception)

    def teardown(self) -> None:
        """Unwrap the module."""
        if isinstance(self.model, StagedDataParallel):
            self._in_fit.ended(self.model)
            self.model.close()
            self.model = self.model.module
        super().teardown()

    # -- helpers

    def _follow(self, trainer: Any) -> None:
        self._members = LightningMembers(trainer, self._set_main)
        trainer._data_connector.prepare_data = self._members.prepare_data

    def _set_main(self, main: bool) -> None:
        rank_zero_only.rank = 0 if main else max(1, self.global_rank)

    @property
    def _is_shared(self) -> bool:
        """Whether a collective is made by all ranks: with ``members`` only in a step."""
        return not self._follows or (isinstance(self.model, StagedDataParallel) and self.model.open_step is not None)

    def _automatic(self) -> StagedDataParallel | None:
        """The model, if Lightning itself calls backward and the optimizer's step; else ``None``."""
        staged = isinstance(self.model, StagedDataParallel) and self.lightning_module.automatic_optimization
        return self.model if staged else None

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        model = self.model
        if not isinstance(model, StagedDataParallel) or model.open_step is not None:
            yield
            return
        with model.pause():
            yield


class _Logged:
    """Numbers that a training step logs with ``sync_dist``: they ride along with the merge, and are means after it.

    On a device the mean of a later step: the last one in which the same was logged, as far as it is known.
    """

    def __init__(self) -> None:
        self._put_off: dict[str, Tensor] = {}  # of the last micro-batch of a step, by their names in the merge
        self._known: dict[str, float] = {}  # the last means, by the same names
        self._to_come: frozenset[str] = frozenset()  # those that a device has yet to tell
        self._is_last = True

    def begin(self, *, is_last: bool) -> None:
        """A micro-batch begins, the last of its step or not."""
        self._put_off, self._is_last = {}, is_last

    def put_off(self, step: Step, key: str, value: Tensor) -> bool:
        """Let it ride along, in its own memory; false if there is no room. Only the last micro-batch's is logged.

        ``key``: what Lightning calls it. Steps log different numbers, and a device tells them in a later one.
        """
        if not self._is_last:
            return True
        name = f"{_LOGGED}{key}"
        while name in self._put_off:  # logged again in this step
            name += "+"
        is_new = name not in step.scalars and name not in step.on_device
        if value.numel() != 1 or (is_new and len(step.scalars) + len(step.on_device) >= MAX_SCALARS):
            return False
        step.log(**{name: value})
        self._put_off[name] = value
        return True

    def merged(self, record: StepRecord) -> None:
        """The step is merged. What only a device knows comes in a later one, which may not log the same."""
        if not (self._put_off or self._to_come):
            return
        scalars, awaited = record.report.scalars, record.awaited
        arrived = {name: mean for name, mean in scalars.items() if name.startswith(_LOGGED) and name not in awaited}
        self._known |= arrived
        self._to_come = (self._to_come | (awaited & self._put_off.keys())) - arrived.keys()
        for name in self._put_off.keys() & self._known.keys() & (arrived.keys() | awaited):
            self._put_off[name].fill_(self._known[name])
        self._put_off = {}


class _InFit(Callback):
    """A callback for the strategy: follows a fit and its loggers, and keeps the state that is saved with it."""

    def __init__(self, strategy: StagedStrategy) -> None:
        self._strategy = strategy
        self._trainer: Any = None
        self._uneven = False
        self._loaded: Mapping[str, Any] | None = None
        self._known: dict[str, Any] = {}  # the state of the last fit's model
        self._to_log: list[tuple[Mapping[str, float], int]] = []  # numbers, and the step that Lightning counts

    def wrapped(self, trainer: Any, model: StagedDataParallel, members: LightningMembers | None) -> None:
        """A fit begins with this model: log its steps, and go on from a checkpoint."""
        self._trainer = trainer
        loaded, self._loaded = dict(self._loaded or {}), None
        of_data = loaded.pop(_DATA, None)
        if loaded:
            model.load_straggle_state(loaded)
        if members is not None:
            members.wrapped(model, of_data)
        # with members rank 0 may be away, and loggers write on the main process alone
        ranks = (0,) if members is None else tuple(range(model.world_size))
        log_scalars(model, self._log, every=max(1, trainer.log_every_n_steps), ranks=ranks)

    def compare_lengths(self, trainer: Any, device: torch.device) -> None:
        """Find out whether all ranks have as many batches."""
        lengths = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
        lengths[dist.get_rank()] = trainer.num_training_batches
        dist.all_reduce(lengths)
        known = {float(length) for length in lengths}
        self._uneven = len(known) > 1 or not math.isfinite(known.pop())

    def _log(self, scalars: Mapping[str, float], _step: int) -> None:
        own = {name: value for name, value in scalars.items() if not name.startswith(_LOGGED)}
        self._to_log.append((own, self._trainer.global_step))
        if self._strategy._members is None:
            self._give_to_loggers()

    def _give_to_loggers(self) -> None:
        for own, step in self._to_log:
            for logger in self._trainer.loggers:
                logger.log_metrics(own, step)
        self._to_log.clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """After its last batch, take part in the steps of ranks that have more."""
        self._give_to_loggers()  # those of a step that has changed who is the main process
        if not (self._uneven and trainer.is_last_batch and pl_module.automatic_optimization):
            return
        model = self._strategy.model
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        model.dealt(idle=True)
        try:
            while trainer.max_steps < 0 or trainer.global_step < trainer.max_steps:
                with model.step():
                    pass
                if all(rank.idle for rank in model.last_report.ranks):
                    return
                optimization._optimizer_step(trainer.fit_loop.epoch_loop.batch_idx, _nothing)
                pl_module.zero_grad()
                trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        finally:
            model.dealt(idle=False)

    def ended(self, model: StagedDataParallel) -> None:
        """A fit is over: keep its state for a checkpoint that may be saved later."""
        self._known = self._state_of(model)

    def state_dict(self) -> dict[str, Any]:
        """The state that is equal on all ranks: one of them saves it."""
        model = self._strategy.model
        return self._state_of(model) if isinstance(model, StagedDataParallel) else self._known

    def _state_of(self, model: StagedDataParallel) -> dict[str, Any]:
        members = self._strategy._members
        of_data = None if members is None else members.state_of_data()
        return {**model.straggle_state(own=False), **({} if of_data is None else {_DATA: of_data})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state for a model that is wrapped later; one wrapped now, in the middle of a fit, keeps its own."""
        if not isinstance(self._strategy.model, StagedDataParallel):
            self._loaded = dict(state_dict) or None


class WatchCallback(Callback):
    """`straggle.watch` of what a ``Trainer`` trains, as it is: ``Trainer(callbacks=[WatchCallback()])``.

    ``run_dir``: where to, or what gives that for a trainer when training starts; ``None``: nothing is watched, also not
    by the one that each ``Trainer`` has without being asked. ``max_steps``: how many batches of a fit are watched.
    """

    def __init__(
        self,
        run_dir: str | Path | Callable[[Any], Path | None] | None = "runs/watch",
        *,
        max_steps: int | None = None,
    ) -> None:
        self.run_dir, self._max_steps = run_dir, max_steps
        self._watch: Watch | None = None
        self._is_called = True  # the strategy calls a wrapper of the module, not its training_step
        self._num_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch what the strategy trains; another fit of the same trainer begins the file again."""
        self._close()
        folder = self.run_dir(trainer) if callable(self.run_dir) else self.run_dir
        if folder is not None:
            self._is_called, self._num_steps = trainer.strategy.model is not pl_module, 0
            self._watch = watch(trainer.strategy.model, folder)

    def on_train_batch_end(self, *_: Any) -> None:
        """One more batch; after the last that is watched, close the file."""
        self._num_steps += 1
        if self._num_steps == self._max_steps:
            self._close()

    def on_train_batch_start(self, *_: Any) -> None:
        """A forward pass begins, or an evaluation."""
        if self._watch is not None and not self._is_called:
            self._watch.forward_begins()

    on_validation_start = on_train_batch_start

    def on_before_backward(self, _trainer: Any, _pl_module: Any, loss: Tensor) -> None:
        """The forward pass gave this loss."""
        if self._watch is not None and not self._is_called:
            self._watch.forward_ends(loss)

    def on_train_end(self, *_: Any) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, *_: Any) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS calls its closure several times in a step, as often as each rank's own loss decides, so that ranks "
            "would be in different steps: use another optimizer"
        )


def _check_fetches_outside(fetcher: object) -> None:
    if type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise ValueError(
            "training_step(self, dataloader_iter) fetches its batch by itself; a late rank would not come to that, and "
            "have batches left in the end: write training_step(self, batch, batch_idx)"
        )


@contextlib.contextmanager
def _forward_only(model: StagedDataParallel) -> Iterator[None]:
    """A step without a backward pass: gradients stay unchanged."""
    gradients = [(parameter, parameter.grad) for parameter in model.module.parameters()]
    kept = [(parameter, None if gradient is None else gradient.clone()) for parameter, gradient in gradients]
    model.zero_grad()
    with model.step():
        yield
    put_gradients(kept)


def _nothing(*_: Any, **__: Any) -> None:
    """Takes the place of a call that is not needed."""


StrategyRegistry.register(
    "straggle",
    StagedStrategy,
    description="DDP that does not wait for its slowest rank",
    deadline=AutoDeadline(),
)
