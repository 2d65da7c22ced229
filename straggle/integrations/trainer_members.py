"""What a `StagedTrainer` does for ranks that leave and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from straggle.integrations.accelerate_members import as_if_alone, know_members
from straggle.integrations.member_data import MemberLoader, There
from straggle.merge.rows.step_record import StepRecord
from straggle.parallel import StagedDataParallel

_STATE = "straggle_data.pt"
_OF_THE_RUN = ("global_step", "epoch", "total_flos", "log_history", "best_metric", "best_global_step")


class TrainerMembers:
    """A trainer's members: its data follow them, and its state goes to a process that comes late.

    Raises ``ValueError`` for arguments that would wait for an absent rank, or count batches.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: MemberLoader | None = None
        self._there = There()
        self._makes_training_loader = False
        self._check(trainer.args)
        trainer.args.average_tokens_across_devices = False  # each sample counts the same
        accelerator = trainer.accelerator
        accelerator.prepare = partial(self._prepare, accelerator.prepare)
        trainer.gather_function = accelerator.gather_for_metrics = _as_it_is  # each rank evaluates all of the data
        accelerator.pad_across_processes = _as_it_is

    def _check(self, args: Any) -> None:
        if args.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, and members=: samples are dealt from "
                "step to step, in one batch each; leave it out, and set a larger per_device_train_batch_size"
            )
        if args.load_best_model_at_end or args.metric_for_best_model or args.push_to_hub:
            raise ValueError(
                "load_best_model_at_end, metric_for_best_model and push_to_hub wait for all processes when one saves, "
                "also for those that are gone: leave them out, or members="
            )

    @contextmanager
    def training_loader(self) -> Iterator[None]:
        """In the block the loader that is prepared is the one that is trained on."""
        self._makes_training_loader = True
        try:
            yield
        finally:
            self._makes_training_loader = False

    def _prepare(self, base: Callable[..., Any], *objects: Any, **words: Any) -> Any:
        if len(objects) != 1 or not isinstance(objects[0], DataLoader):
            return base(*objects, **words)
        if not self._makes_training_loader:
            with as_if_alone():
                return base(*objects, **words)
        device = self._trainer.args.device
        self._loader = MemberLoader(objects[0], seed=self._trainer.args.seed, place=_place(device), endless=True)
        return self._loader

    def begin(self, model: StagedDataParallel, checkpoint: str | None) -> None:
        """The model is wrapped and all else is made: go on from the others' state, or from a checkpoint."""
        trainer, loader = self._trainer, self._loader
        assert loader is not None
        loader.begin(model)
        model.register_step_hook(self._merged)
        if checkpoint is not None and (path := Path(checkpoint) / _STATE).exists():
            loader.load_state_dict(torch.load(path, weights_only=True))
        own = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        model.register_state(**own, loader=loader, there=self._there, run=self)

    def _merged(self, record: StepRecord) -> None:
        trainer = self._trainer
        know_members(self._there.merged(record.report), trainer._staged.rank)
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()

    def save(self, folder: str) -> None:
        """Beside a checkpoint."""
        if self._loader is not None:
            torch.save(self._loader.state_dict(), Path(folder) / _STATE)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is."""
        return {name: getattr(self._trainer.state, name) for name in _OF_THE_RUN}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        for name, value in state.items():
            setattr(self._trainer.state, name, value)

    def steps_left(self, epoch: int, per_epoch: int) -> int:
        """Of this epoch, as the trainer counts them."""
        return min(per_epoch, max(0, (epoch + 1) * per_epoch - int(self._trainer.state.global_step)))


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _place(device: torch.device) -> Callable[[Any], Any]:
    from accelerate.utils import send_to_device

    return partial(send_to_device, device=device)
