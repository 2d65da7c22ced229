"""`StagedTrainer`: the Trainer of Hugging Face's transformers, with straggle in place of DDP; and `WatchCallback`.

trainer = StagedTrainer(model, args, train_dataset=data, deadline=straggle.AutoDeadline())  # was: Trainer(...)
trainer.train()
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from straggle.backward.hooks import ModuleHook
from straggle.extras import needs_extra
from straggle.integrations.options import Accumulation, LastLoss, take_options, wrapped
from straggle.integrations.trainer_members import TrainerMembers
from straggle.merge.rows.step_record import StepRecord
from straggle.observe.scalars import StepScalars
from straggle.observe.watch.watch import Watch, watch
from straggle.parallel import StagedDataParallel
from straggle.step import Step

with needs_extra("transformers"):
    from accelerate.utils import send_to_device
    from transformers import Trainer, TrainerCallback
    from transformers.training_args import ParallelMode

_LOSS = "weighted_loss", "weight"  # scalars of a rank's step; the ratio of their means is logged
_NORM = "grad_norm_before"  # a scalar, too: that of the step before, if its device has yet to tell it
_NO_TOKENS = 1e-6  # tokens of a rank whose labels are all masked: its gradients are zero


class StagedTrainerMixin:
    """Makes a class derived from ``Trainer`` train with `StagedDataParallel`: ``class My(StagedTrainerMixin, Base)``.

    It takes ``stages``, ``deadline``, ``estimator``, ``late_handling``, ``merge``, ``links`` and ``members`` as
    `StagedDataParallel` does. With one process, or without a process group, it behaves like the base class.

    What differs from the base class on several processes:

    - One optimizer step is one `Step`, with all its micro-batches. Clipping, schedulers and callbacks see the merged
      gradients.
    - The deadline leaves ``compute_loss`` and ``accelerator.backward``, whichever class defines them, and nothing else:
      the code of a ``training_step`` around them, ``_prepare_inputs`` and ``on_substep_end`` run as often on all ranks.
      There a late rank has for a loss the last one that it computed. A ``training_step`` that calls the model itself,
      or takes outputs from ``compute_loss``, is left from there on.
    - ``average_tokens_across_devices`` is done by the merge, which weights each rank by its tokens, without a
      collective. A late rank counts with the gradients that it computed.
    - The logged loss is the mean over the ranks that finished a micro-batch, weighted in the same way. The numbers of
      `StepScalars` are logged with it: ranks late, gradients dropped, seconds waited and saved. On a GPU it is that of
      the step before; before one is known it is the rank's own, and in the run's mean the last known one stands for
      the last step's. Three of the eight names of ``step.log`` are taken.
    - Evaluation and saving belong to no step: no rank is late in them, and all ranks wait for each other at their end.
    - A checkpoint has ``straggle_RANK.pt`` of each rank; without it a resumed run begins with an empty history.
    - With ``members`` a run has as many steps as without, and each sample comes once an epoch of the data, which takes
      more steps while a rank is away. Each rank evaluates all data, and the lowest that is there saves. A process that
      comes late goes on in the step that the others are in.

    Raises ``ValueError`` for options that would wait for a stuck rank or merge in another way: DeepSpeed, FSDP,
    ``include_num_input_tokens_seen``, ``dispatch_batches``, ``auto_find_batch_size``.
    """

    args: Any
    accelerator: Any
    state: Any
    control: Any
    model: nn.Module
    model_wrapped: nn.Module
    _globalstep_last_logged: int
    _total_loss_scalar: float
    _tr_loss: Tensor

    def __init__(self, *positional: Any, **words: Any) -> None:
        # all names are ours: the class behind has private ones, too
        self._staged_options = take_options(words)
        self._staged_members: TrainerMembers | None = None
        self._staged: StagedDataParallel | None = None
        self._staged_accumulation, self._staged_scalars = Accumulation(), StepScalars()
        self._staged_merged_loss: float | None = None  # mean of the last step of which it is known, over ranks
        self._staged_own_loss: float | Tensor = 0.0  # this rank's in the last step of which no other is known
        self._staged_unknown = self._staged_owed = 0  # such steps since the last log, and all that are in no sum
        self._staged_loss: float | Tensor = 0.0  # sum over the open step's micro-batches, weighted
        self._staged_sums_on_host = False  # the base class's sum of losses is there
        self._staged_norm: Tensor | None = None  # of the last step's gradients, if only their device has it
        self._staged_known_norm: float | None = None  # of the last step of which it has told
        self._staged_num_finished = 0
        self._staged_micro_batch: _MicroBatch | None = None  # whose training_step runs
        self._staged_last_loss, self._staged_gives_more = LastLoss(), False  # compute_loss gives more than a loss
        self._staged_tokens: float | None = None  # of this rank in the next step
        self._staged_draws = False  # batches to train on, and not to evaluate
        self._staged_full: float | None = None  # tokens of a full step, which has weight 1
        super().__init__(*positional, **words)
        self._staged_averages_tokens = self._staged_takes_part() and bool(self.args.average_tokens_across_devices)
        if self._staged_takes_part():
            self._staged_check_arguments()
            self.args.average_tokens_across_devices = False  # the merge does it
            if "members" in self._staged_options:
                self._staged_members, self._staged_averages_tokens = TrainerMembers(self), False

    def _staged_takes_part(self) -> bool:
        return bool(self.args.parallel_mode == ParallelMode.DISTRIBUTED)

    def _staged_check_arguments(self) -> None:
        kind = str(self.accelerator.distributed_type).rpartition(".")[2]
        if not kind.startswith("MULTI_"):
            raise ValueError(f"StagedTrainer takes the place of DDP, and this job is of kind {kind}: use Trainer")
        if self.args.include_num_input_tokens_seen not in (False, "no"):
            raise ValueError(
                "include_num_input_tokens_seen gathers from all ranks in every micro-batch, and would wait for a stuck "
                "one: leave it out, and count tokens in your data_collator"
            )
        if self.args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size catches errors on one rank only: set per_device_train_batch_size")

    # -- what Trainer calls

    def create_accelerator_and_postprocess(self) -> None:
        """As the base class; its accelerator then unwraps `StagedDataParallel`, and a late rank leaves ``backward``."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        unwrap = self.accelerator.unwrap_model

        def unwrap_model(model: nn.Module, *args: Any, **words: Any) -> Any:
            return unwrap(model.module if isinstance(model, StagedDataParallel) else model, *args, **words)

        self.accelerator.unwrap_model = unwrap_model
        self.accelerator.backward = partial(self._staged_backward, self.accelerator.backward)

    def get_train_dataloader(self) -> Any:
        """As the base class; refuses a loader that reads on one rank for all, because all would wait for it."""
        members = self._staged_members
        with contextlib.nullcontext() if members is None else members.training_loader():
            loader = super().get_train_dataloader()  # type: ignore[misc]
        if not self._staged_takes_part():
            return loader
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise ValueError(
                "this loader reads on one rank and sends to the others, which would wait for it in every batch: set "
                'accelerator_config={"dispatch_batches": False}; each rank then reads all of the stream, as it is, and '
                "keeps its own batches"
            )
        if members is None and hasattr(loader, "device"):
            loader.device = None  # it would wait for each copy: `get_batch_samples` copies
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """As the base class; tokens are counted before the batches are copied to the device, which nobody waits for."""
        self._staged_draws = True
        try:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        finally:
            self._staged_draws = False
        if self._staged_takes_part():
            batches = [send_to_device(batch, device, non_blocking=True) for batch in batches]
        return batches, num_items

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training or not self._staged_takes_part():
            bare = model.module if isinstance(model, StagedDataParallel) else model
            return super()._wrap_model(bare, training, dataloader)  # type: ignore[misc]
        if not isinstance(model, StagedDataParallel):  # autocast and torch.compile, as under DDP
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        self._staged = wrapped(model, self._staged_options)
        self._staged.register_step_hook(self._staged_merged)
        self._staged_merged_loss = self._staged_norm = self._staged_known_norm = None
        self._staged_unknown = self._staged_owed = 0
        self._staged.register_forward_pre_hook(ModuleHook(self._staged_before_forward))
        return self._staged

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)  # type: ignore[misc]
        if self._staged_members is not None and self._staged is not None:
            self._staged_members.begin(self._staged, resume_from_checkpoint)
        return prepared

    def _run_epoch(self, **words: Any) -> None:
        """As the base class; a process that comes late, or goes on from a checkpoint, is in the middle of one."""
        if self._staged_takes_part():
            # merged losses are on the host, and it looks at each whether it is a number
            self._tr_loss, self._staged_sums_on_host = self._tr_loss.cpu(), True
        if (members := self._staged_members) is not None:
            per_epoch = words["num_update_steps_per_epoch"]
            if not (left := members.steps_left(words["epoch"], per_epoch)):
                return
            words |= {"num_update_steps_per_epoch": left, "steps_trained_in_current_epoch": 0}
        super()._run_epoch(**words)  # type: ignore[misc]

    def _save_checkpoint(self, *positional: Any, **words: Any) -> None:
        if self._staged_members is None or self.args.should_save:
            super()._save_checkpoint(*positional, **words)  # type: ignore[misc]

    def store_flos(self) -> None:
        """As the base class; with ``members`` those of this rank, without a collective."""
        if self._staged_members is None:
            super().store_flos()  # type: ignore[misc]
            return
        self.state.total_flos += self.current_flos  # type: ignore[has-type]
        self.current_flos = 0

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The number of items of this rank alone, which is its weight in the merge."""
        if not self._staged_takes_part():
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if not (self._staged_averages_tokens and self._staged_draws) and _on_device(batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        num_items = super()._get_num_items_in_batch(batch_samples, torch.device("cpu"))  # type: ignore[misc]
        self._staged_tokens = None
        if num_items is not None and self._staged_averages_tokens:
            self._staged_tokens = float(num_items) or _NO_TOKENS
            num_items = max(num_items, 1)  # the divisor of an empty loss
        if not isinstance(num_items, Tensor):
            return num_items
        return torch.full((), num_items.item(), dtype=num_items.dtype, device=device)  # no copy, which would wait

    def train(self, *positional: Any, **words: Any) -> Any:
        """Train as the base class does, with ``training_step`` and ``compute_loss`` as parts of a step."""
        with (
            _goes_through(self, "training_step", self._staged_training_step),
            _goes_through(self, "compute_loss", self._staged_compute_loss),
        ):
            return super().train(*positional, **words)  # type: ignore[misc]

    # -- one micro-batch

    def _staged_training_step(
        self, base: Callable[..., Tensor], model: nn.Module, *inputs: Any, **words: Any
    ) -> Tensor:
        """Run one micro-batch of a step; returns the step's loss after the last one, and zero before."""
        if not isinstance(model, StagedDataParallel):
            return base(model, *inputs, **words)
        is_last, loss = self.accelerator.sync_gradients, None
        self._staged_micro_batch = micro_batch = _MicroBatch(partial(self._staged_step_of, model, is_last=is_last))
        try:
            with micro_batch:
                loss = base(model, *inputs, **words)
        finally:
            self._staged_micro_batch = None
        step = micro_batch.step  # it begins here if nothing was computed
        if loss is not None and not step.late:
            self._staged_loss = self._staged_loss + loss.detach().to(torch.float64)
            self._staged_num_finished += 1
        if not is_last:
            return self._staged_number(0.0)
        mean: float | Tensor = 0.0
        if self._staged_num_finished:  # missing micro-batches are assumed to be like the others
            mean = torch.as_tensor(self._staged_loss * step.num_microbatches / self._staged_num_finished)
            weight = torch.full_like(mean, step.weight)  # a tensor as the loss is: a device tells both at once
            step.log(**dict(zip(_LOSS, (mean * weight, weight), strict=True)))
        step.end()
        if self._staged_merged_loss is None:  # a device tells it a step later
            self._staged_own_loss = mean
            self._staged_unknown, self._staged_owed = self._staged_unknown + 1, self._staged_owed + 1
            return self._staged_number(0.0)
        return self._staged_number(self._staged_merged_loss)

    def _staged_number(self, loss: float) -> Tensor:
        """It as the base class adds it up."""
        return torch.tensor(loss) if self._staged_sums_on_host else torch.full((), loss, device=self.args.device)

    def _staged_compute_loss(self, base: Callable[..., Any], model: nn.Module, *inputs: Any, **words: Any) -> Any:
        """The base class's, which a late rank leaves; it then has its last loss, which leads to no parameter."""
        micro_batch = self._staged_micro_batch
        if micro_batch is None or micro_batch.computes or not torch.is_grad_enabled():
            return base(model, *inputs, **words)
        if self._staged_gives_more or words.get("return_outputs") or inputs[1:2] == (True,):
            micro_batch.compute_to_end()  # a late rank has no outputs that the caller could go on with
            return base(model, *inputs, **words)
        with micro_batch.computing():
            computed = base(model, *inputs, **words)
            # known after the first step, in which no rank is late
            self._staged_gives_more = not isinstance(computed, Tensor)
            self._staged_last_loss.note(computed)
            return computed
        return self._staged_last_loss.again(self.args.device)

    def _staged_backward(self, base: Callable[..., None], loss: Tensor, **words: Any) -> None:
        """The accelerator's; a late rank leaves it, or has nothing to compute in it."""
        micro_batch = self._staged_micro_batch
        if micro_batch is None or micro_batch.computes:
            base(loss, **words)
            return
        with micro_batch.computing() as step:
            base(loss.detach().requires_grad_() if step.late else loss, **words)

    def _staged_before_forward(self, *_: Any) -> None:
        """The model is called; if that is by a training step itself, its rest is what computes."""
        micro_batch = self._staged_micro_batch
        if micro_batch is not None and not micro_batch.computes and torch.is_grad_enabled():
            micro_batch.compute_to_end()

    def _staged_step_of(self, model: StagedDataParallel, *, is_last: bool) -> Step:
        begins, num_expected = model.open_step is None, self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        # asked before the step begins: ranks meet there, and in a step that would be a collective of the loop's own
        weight = None if self._staged_tokens is None or not begins else self._staged_weight(self._staged_tokens)
        step = self._staged_accumulation.step_of(model, num_expected, is_last=is_last)
        if begins:
            self._staged_loss, self._staged_num_finished = 0.0, 0
            if self._staged_norm is not None and step.leaves_on_device(self._staged_norm):
                step.log(**{_NORM: self._staged_norm})
        if weight is not None:
            step.weight = weight
        return step

    def _staged_merged(self, record: StepRecord) -> None:
        scalars, awaited = record.report.scalars, record.awaited
        self._staged_scalars.add(record.report, awaited)
        weighted, weight = (scalars.get(name, math.nan) for name in _LOSS)
        if weight > 0:
            self._staged_merged_loss = weighted / weight
        if _NORM in scalars.keys() - awaited:
            self._staged_known_norm = scalars[_NORM]

    def _staged_weight(self, tokens: float) -> float:
        """They over rank 0's in the first step: a rank with as many has weight 1, as with DDP, bit for bit."""
        if self._staged_full is None:
            full = torch.tensor([max(tokens, 1.0)], dtype=torch.float64, device=self.args.device)
            dist.broadcast(full, 0)
            self._staged_full = float(full)
        return tokens / self._staged_full

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **words: Any) -> None:
        staged = self._staged
        if staged is None:
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **words)  # type: ignore[misc]
            return
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._staged_log_merged(tr_loss, grad_norm, words.get("learning_rate"), args[4] if len(args) > 4 else None)
        if self.control.should_training_stop and self._staged_merged_loss is not None:
            # what the last steps' devices have yet to tell stands in for it: the sum has a loss of each step, and is
            # the same on all ranks
            self._total_loss_scalar += self._staged_owed * self._staged_merged_loss
            self._staged_owed = 0
        self._staged_norm = grad_norm if isinstance(grad_norm, Tensor) else None
        if not (self.control.should_evaluate or self.control.should_save):
            return
        with staged.pause() if staged.open_step is None else contextlib.nullcontext():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **words)  # type: ignore[misc]

    def _staged_log_merged(self, tr_loss: Tensor, grad_norm: Any, learning_rate: float | None, start_time: Any) -> None:
        """Log what the base class logs, which is equal on all ranks already, and the step's scalars."""
        total, tr_loss[...] = float(tr_loss), 0.0
        num_known = self.state.global_step - self._globalstep_last_logged - self._staged_unknown
        loss = total / num_known if num_known > 0 else float(self._staged_own_loss)
        self._staged_unknown = 0
        rate = self._get_learning_rate() if learning_rate is None else learning_rate  # type: ignore[attr-defined]
        scalars = {name: value for name, value in self._staged_scalars.take().items() if name not in (*_LOSS, _NORM)}
        logs = {"loss": loss, "learning_rate": rate, **scalars}
        if grad_norm is not None:
            logs["grad_norm"] = float(grad_norm) if self._staged_known_norm is None else self._staged_known_norm
        self._total_loss_scalar += total
        self._globalstep_last_logged = self.state.global_step
        self.log(logs, start_time)  # type: ignore[attr-defined]

    # -- checkpoints

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self._staged is not None:
            members = self._staged_members
            torch.save(self._staged.straggle_state(own=members is None), self._staged_state_file(output_dir))
            if members is not None:
                members.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self._staged is None or checkpoint is None or not (path := self._staged_state_file(checkpoint)).exists():
            return
        self._staged.load_straggle_state(torch.load(path, weights_only=True))

    def _staged_state_file(self, folder: str) -> Path:
        own = self.args.process_index if self._staged_members is None else 0
        return Path(folder) / f"straggle_{own}.pt"


def _on_device(batches: list[Any]) -> bool:
    """Whether labels are there already, as with ``members`` and in an evaluation: the host would wait for a count."""
    labels = [batch["labels"] for batch in batches if "labels" in batch]
    return any(isinstance(own, Tensor) and own.device.type != "cpu" for own in labels)


class _MicroBatch:
    """One call of ``training_step``, as a context manager, and which of its code the deadline leaves.

    The step begins when something is computed first, so that what comes before takes none of the deadline.
    """

    def __init__(self, begun: Callable[[], Step]) -> None:
        self._begun = begun
        self._step: Step | None = None
        self._rest = contextlib.ExitStack()
        self.computes = False  # the deadline leaves the code that runs

    def __enter__(self) -> None:
        """Nothing is left yet."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self._rest.__exit__(kind, error, traceback):
            return True
        if error is not None:
            self.step.end(error)  # does nothing if it was raised by what computes
        return False

    @property
    def step(self) -> Step:
        """The step that this is a micro-batch of; begins it."""
        if self._step is None:
            self._step = self._begun()
        return self._step

    @contextlib.contextmanager
    def computing(self) -> Iterator[Step]:
        """The deadline leaves the block, and the code after it goes on."""
        self.computes = True
        try:
            with self.step.microbatch() as step:
                yield step
        finally:
            self.computes = False

    def compute_to_end(self) -> None:
        """The deadline leaves all that comes from here on."""
        self._rest.enter_context(self.computing())


@contextlib.contextmanager
def _goes_through(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Make calls of a method ``around(method, ...)``, whichever class defines it, until the block ends."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, partial(around, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)


class StagedTrainer(StagedTrainerMixin, Trainer):
    """``transformers.Trainer`` with `StagedDataParallel`; see `StagedTrainerMixin`."""


class WatchCallback(TrainerCallback):
    """`straggle.watch` of what a ``Trainer`` trains, as it is: ``Trainer(..., callbacks=[WatchCallback()])``."""

    def __init__(self, run_dir: str | Path = "runs/watch") -> None:
        self._run_dir = run_dir
        self._watch: Watch | None = None

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Watch it; another run of the same trainer begins the file again."""
        self.on_train_end()
        self._watch = watch(model, self._run_dir)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the file."""
        if self._watch is not None:
            self._watch.close()
