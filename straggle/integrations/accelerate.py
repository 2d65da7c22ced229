"""`StagedAccelerator`: Hugging Face's Accelerator, with straggle in place of DDP.

accelerator = StagedAccelerator(gradient_accumulation_steps=4, deadline=straggle.AutoDeadline())  # was: Accelerator
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(criterion(model(x), y))
    optimizer.step()  # these lines were in the block
    optimizer.zero_grad()
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from straggle.extras import needs_extra
from straggle.integrations.accelerate_members import as_if_alone, know_members
from straggle.integrations.member_data import MemberLoader, There
from straggle.integrations.options import Accumulation, take_options, wrapped
from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel

with needs_extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, send_to_device

_DDP_KINDS = ("MULTI_CPU", "MULTI_GPU")


class StagedAccelerator(Accelerator):
    """``accelerate.Accelerator``; it also takes ``stages``, ``deadline``, ``estimator``, ``late_handling``, ``merge``,
    ``links`` and ``members``.

    A model that is prepared for training on several processes is a `StagedDataParallel`; on one process nothing
    changes.

    ``accumulate`` is one micro-batch of a step. The last one is that in which Accelerate synchronizes, so that a step
    may go on in the next epoch. If this rank is late, the rest of its block is skipped, and the gradients are merged at
    its end: clipping, the optimizer's step and ``zero_grad`` come after the block. In the block they raise, or do
    nothing. Accelerate's optimizers step with the last micro-batch only, so that these lines need no condition.

    With ``members`` the first loader that is prepared is the one that is trained on: each sample comes once an epoch,
    to a rank that is there. Any other loader has all of its data on each rank, and `gather_for_metrics` gives back what
    it is given. ``num_processes`` and ``process_index`` are of those that are in the others' step, so
    ``is_main_process`` is true for the lowest of them, which alone saves. A process that comes to a running job has its
    state from the others when ``prepare`` returns; its loop has no batches in the epochs that were complete before, in
    which no process of it is the main one. `wait_for_everyone` waits for nobody: ranks meet in their next step.

    ``save_state`` writes ``straggle_MODEL_RANK.pt`` of each rank beside the other files, and ``load_state`` reads it if
    called before the first step. Raises ``ValueError`` for DeepSpeed, FSDP and other kinds that do not use DDP, and
    with ``members`` for ``gradient_accumulation_steps`` and a loader whose samples cannot be dealt.
    """

    def __init__(self, *positional: Any, **words: Any) -> None:
        self._staged_options = take_options(words)
        self._follows = "members" in self._staged_options
        self._trained_on: MemberLoader | None = None
        self._there = There()
        self._came_late = False
        self._staged: list[StagedDataParallel] = []
        self._accumulation, self._fed = Accumulation(), _Fed()
        super().__init__(*positional, **words)
        if self.use_distributed and self._kind not in _DDP_KINDS:
            raise ValueError(
                f"StagedAccelerator takes the place of DDP, and this job is of kind {self._kind}: use Accelerator"
            )
        self._follows &= self.use_distributed
        if self._follows and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, and members=: samples are dealt from "
                "step to step, in one batch each; leave it out, and give the loader a larger batch_size"
            )
        self.register_save_state_pre_hook(self._save_staged)
        self.register_load_state_pre_hook(self._load_staged)

    @property
    def _kind(self) -> str:
        return str(DistributedType(self.distributed_type).name)

    def prepare(self, *objects: Any, **words: Any) -> Any:
        """Prepare as the base class does. With ``members`` a process that comes late waits here for its state."""
        num_before = len(self._staged)
        prepared = super().prepare(*objects, **words)
        if self._follows and len(self._staged) > num_before:
            self._begin(self._staged[-1])
        return prepared

    def _begin(self, model: StagedDataParallel) -> None:
        """Of this model's members, which registers all that was prepared."""
        if len(self._staged) > 1:
            raise ValueError("members= is for one model: prepare the others with evaluation_mode=True")
        if self._trained_on is None:
            raise ValueError(
                "members= needs the loader that is trained on, in the same call: prepare(model, ..., loader)"
            )
        self._trained_on.begin(model)
        model.register_step_hook(self._count_members)
        named = {f"optimizer{number}": own for number, own in enumerate(self._optimizers)}
        named |= {f"scheduler{number}": own for number, own in enumerate(self._schedulers)}
        self._came_late = bool(model.register_state(**named, loader=self._trained_on, there=self._there))
        self.register_for_checkpointing(self._trained_on)

    def _count_members(self, record: StepRecord) -> None:
        know_members(self._there.merged(record.report), self._staged[0].rank)

    def prepare_data_loader(self, data_loader: Any, *positional: Any, **words: Any) -> Any:
        """Prepare as the base class does, or as this class says for ``members``."""
        if not self._follows or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *positional, **words)
        if self._trained_on is None:
            self._trained_on = MemberLoader(data_loader, place=lambda batch: send_to_device(batch, self.device))
            return self._trained_on
        with as_if_alone():
            return super().prepare_data_loader(data_loader, *positional, **words)

    @property
    def is_main_process(self) -> bool:
        """Whether this process is to save and to print: with ``members`` the lowest in the others' step."""
        skips = self._trained_on is not None and self._trained_on.catches_up
        return bool(super().is_main_process) and not skips

    def wait_for_everyone(self) -> None:
        """As the base class; with ``members`` it waits for nobody, and ranks meet in their next step."""
        if not self._follows:
            super().wait_for_everyone()

    def gather_for_metrics(self, input_data: Any, *positional: Any, **words: Any) -> Any:
        """As the base class; with ``members`` this rank has evaluated all of the data, and has all of it already."""
        return input_data if self._follows else super().gather_for_metrics(input_data, *positional, **words)

    def save_state(self, *positional: Any, **words: Any) -> Any:
        """As the base class; with ``members`` the main process alone saves, and the others wait in their next step."""
        if not self._follows:
            return super().save_state(*positional, **words)
        if not self.is_main_process:
            return None
        with self._staged[0].pause() if self._staged else nullcontext():
            return super().save_state(*positional, **words)

    def load_state(self, *positional: Any, **words: Any) -> Any:
        """As the base class; a process that has come to a running job has the newer state of the others already."""
        return None if self._came_late else super().load_state(*positional, **words)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare as the base class does, with `StagedDataParallel` in place of DDP."""
        if evaluation_mode or not self.use_distributed or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not any(parameter.requires_grad for parameter in prepared.parameters()):
            return prepared
        staged = wrapped(prepared, self._staged_options)
        staged.__dict__["_is_accelerate_prepared"] = True
        self._staged.append(staged)
        return staged

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. The first of a step begins it, and the last merges when the block is left."""
        staged = [model for model in models if isinstance(model, StagedDataParallel)]
        if not staged:
            with super().accumulate(*models):
                yield
            return
        if len(staged) > 1:
            raise ValueError("accumulate() of several models: write `with model.step(num_microbatches=...)` for each")
        self._do_sync()
        is_last: bool = self.sync_gradients
        step = self._accumulation.step_of(staged[0], self._num_left(), is_last=is_last)
        with step.microbatch():
            yield
        if is_last:
            step.end()

    def _num_left(self) -> int:
        """The expected number of micro-batches of a step that begins; an epoch's last step has those that are left."""
        state = self.gradient_state
        left = self._fed.num_left(state.dataloader_references)
        num_left: int = state.num_steps - (self.step - 1) % state.num_steps
        return int(min(num_left, left)) if state.sync_with_dataloader and left > 0 else num_left

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As the base class; raises ``ValueError`` if its way of joining would be needed."""
        even = self.even_batches if even_batches is None else even_batches
        if not even and any(isinstance(joinable, StagedDataParallel) for joinable in joinables):
            raise ValueError(
                "join_uneven_inputs() cannot join a StagedDataParallel: leave even_batches=True, or give the loop "
                "`for x, y in model.join(loader)` of a loader that is not prepared"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def unwrap_model(self, model: nn.Module, *positional: Any, **words: Any) -> Any:
        """The module itself."""
        bare = model.module if isinstance(model, StagedDataParallel) else model
        return super().unwrap_model(bare, *positional, **words)

    def get_state_dict(self, model: nn.Module, *positional: Any, **words: Any) -> Any:
        """The module's state, without a prefix: it can be loaded without straggle."""
        bare = model.module if isinstance(model, StagedDataParallel) else model
        return super().get_state_dict(bare, *positional, **words)

    def free_memory(self, *objects: Any) -> Any:
        """As the base class; also forget the models prepared before."""
        self._staged.clear()
        return super().free_memory(*objects)

    # -- additions to save_state and load_state

    def _save_staged(self, _models: list[nn.Module], _weights: list[Any], folder: str) -> None:
        for number, staged in enumerate(self._staged):
            torch.save(staged.straggle_state(own=not self._follows), self._state_file(folder, number))

    def _load_staged(self, _models: list[nn.Module], folder: str) -> None:
        for number, staged in enumerate(self._staged):
            path = self._state_file(folder, number)
            if path.exists() and staged.last_report is None and staged.open_step is None:
                staged.load_straggle_state(torch.load(path, weights_only=True))

    def _state_file(self, folder: str, number: int) -> Path:
        """The state file of one rank and one of its models."""
        return Path(folder) / f"straggle_{number}_{0 if self._follows else self.process_index}.pt"


class _Fed:
    """The loader that feeds the loop; that of an evaluation may be active beside it, or may have been left early."""

    def __init__(self) -> None:
        self._loader: weakref.ref[Any] | None = None
        self._num_open = 0  # running iterations over it
        self._num_batches = 0  # batches that the loop had before

    def num_left(self, loaders: list[Any]) -> float:
        """Batches left, with this one; ``loaders`` are being iterated over, the latest last. Infinite: unknown."""
        loader = None if self._loader is None else self._loader()
        if loader is None or loaders.count(loader) != self._num_open:
            loader = loaders[-1]
            self._loader = None if loader is None else weakref.ref(loader)
            self._num_open, self._num_batches = loaders.count(loader), 0
        before, self._num_batches = self._num_batches, self._num_batches + 1
        if getattr(loader, "end_of_dataloader", False):
            self._loader = None  # so that a new iteration over it is counted from 0
        try:
            return len(loader) - before
        except TypeError:  # there is none, or it is a stream of unknown length
            return math.inf
