"""Save and load what a run needs to go on: tensors as safetensors, numbers as JSON, no pickle.

Model, optimizer, history, the ranks' shares and the step number are the same on every rank and written by rank 0; each
rank writes what only it knows: its random state and its estimator's memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from straggle.estimators import Estimator
from straggle.history import History
from straggle.parallel import StagedDataParallel
from straggle.rebalance import Rebalance

_REACHED = "reached"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Checkpoint:
    """A directory with one run's state; every rank calls the same method together."""

    directory: Path

    def save(
        self, step: int, model: StagedDataParallel, optimizer: Optimizer, rebalance: Rebalance | None = None
    ) -> None:
        """Write the state after ``step`` steps; the checkpoint before it stays whole until this one is."""
        new = self.directory.with_suffix(".new")
        new.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank()
        save_file({"random": torch.get_rng_state(), **_memory(model)}, new / f"rank{rank}.safetensors")
        if rank == 0:
            flat = get_optimizer_state_dict(model.module, optimizer, options=_FLAT)
            numbers = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
            save_file(_separate(model.module.state_dict()), new / "model.safetensors")
            save_file(_separate(flat), new / "optimizer.safetensors")
            save_file(model.history.tensors(), new / "history.safetensors")
            shares = {} if rebalance is None else {"rebalance": rebalance.state_dict()}
            (new / "state.json").write_text(json.dumps({"step": step, "optimizer": numbers, **shares}, indent=1))
        dist.barrier()
        if rank == 0:
            _replace(self.directory, new)
        dist.barrier()

    def exists(self) -> bool:
        """Whether this rank sees one."""
        return (self.directory / "state.json").exists()

    def load(self, model: StagedDataParallel, optimizer: Optimizer, rebalance: Rebalance | None = None) -> int:
        """Put the saved state into place; gives the number of steps it was saved after.

        Raises ``ValueError`` where there is no checkpoint.
        """
        state = self._state()
        rank = dist.get_rank()
        model.module.load_state_dict(load_file(self.directory / "model.safetensors"))
        flat: dict[str, Any] = {**load_file(self.directory / "optimizer.safetensors"), **state["optimizer"]}
        set_optimizer_state_dict(model.module, optimizer, flat, options=_FLAT)
        history = load_file(self.directory / "history.safetensors")
        model.restore(History.from_tensors(history))
        if rebalance is not None and "rebalance" in state:
            rebalance.load_state_dict(state["rebalance"])
        own = self.directory / f"rank{rank}.safetensors"
        if own.exists():  # more ranks than before: the new ones begin without a memory
            tensors = load_file(own)
            torch.set_rng_state(tensors.pop("random"))
            if _REACHED in tensors:
                model.restore_reached(tensors.pop(_REACHED))
            parameters = dict(model.module.named_parameters())
            for depth, estimator in enumerate(_chain(model.estimator)):
                own_memory = {name[depth:]: tensor for name, tensor in tensors.items() if _depth(name) == depth}
                estimator.remember({parameters[name]: t.to(parameters[name].device) for name, t in own_memory.items()})
        return int(state["step"])

    def _state(self) -> dict[str, Any]:
        path = self.directory / "state.json"
        if not path.exists():
            raise ValueError(f"no checkpoint in {self.directory}: start without resume=true first")
        state: dict[str, Any] = json.loads(path.read_text())
        return state


def _memory(model: StagedDataParallel) -> dict[str, Tensor]:
    """What only this rank knows; the name of a tensor of an inner estimator begins with as many slashes."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    own = {
        "/" * depth + names[parameter]: tensor
        for depth, estimator in enumerate(_chain(model.estimator))
        for parameter, tensor in estimator.memory.items()
    }
    return _separate({**own, **({_REACHED: model.reached} if len(model.reached) else {})})


def _chain(estimator: Estimator) -> list[Estimator]:
    """The estimator, the one that it wraps, and so on."""
    return [estimator, *(_chain(estimator.inner) if estimator.inner is not None else [])]


def _depth(name: str) -> int:
    return len(name) - len(name.lstrip("/"))


def _separate(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own, as safetensors wants them (tied weights share theirs)."""
    return {name: value.detach().cpu().clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def _replace(directory: Path, new: Path) -> None:
    old = directory.with_suffix(".old")
    _remove(old)
    if directory.exists():
        os.replace(directory, old)
    os.replace(new, directory)
    _remove(old)


def _remove(directory: Path) -> None:
    if directory.exists():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
