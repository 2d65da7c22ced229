"""Save and load what a run needs to go on: tensors as safetensors, numbers as JSON, no pickle.

Model, optimizer, history, the ranks' shares and the step number are the same on every rank and written by rank 0; each
rank writes what only it knows: its random state and its estimator's memory. `durable` says why a death at any moment
leaves a complete one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from straggle.commands import durable
from straggle.commands.agreement import Refused, of_ranks, on_all_ranks
from straggle.commands.durable import Seal, Snapshot
from straggle.lab.jobs import gather
from straggle.merge.saved_state import SavedState
from straggle.parallel import StagedDataParallel

_HISTORY = "history."  # begins the names of what is the same on all ranks
_COMMON = ("model.safetensors", "optimizer.safetensors", "history.safetensors")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_NOTHING: Mapping[str, Any] = {}
_log = logging.getLogger(__name__)


class Dealer(Protocol):
    """What says which samples come next; its state is plain values and tensors, by name."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on, the same on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class NotSaved(RuntimeError):
    """A checkpoint could not be written; says why, and which is the last complete one. The same on all ranks."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with one run's state; every rank calls the same method together.

    What goes wrong on one rank is raised on all, and names the rank.
    """

    directory: Path

    def save(
        self, step: int, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer] = _NOTHING
    ) -> None:
        """Write the state after ``step`` steps; the checkpoint before it stays complete until this one is.

        ``dealt``: what says which samples come next, by name; the same on all ranks.
        Raises `NotSaved` if it cannot be written, such as on a full disk.
        """
        try:
            on_all_ranks(lambda: durable.begin(self.directory) if dist.get_rank() == 0 else None)
            is_first = dist.get_rank() == 0
            states = {name: own.state_dict() for name, own in dealt.items()}
            sealed = on_all_ranks(
                lambda: self._write(model, optimizer, model.straggle_state(), states if is_first else None)
            )
            files = {name: seal for of_rank in sealed for name, seal in of_rank.items()}
            on_all_ranks(lambda: self._publish(step, model, optimizer, states, files) if is_first else None)
        except Refused as error:
            on_all_ranks(self._give_up)
            last = next(iter(durable.snapshots(self.directory)[0]), None)
            left = "there is no complete one" if last is None else f"the last complete one is that of step {last.step}"
            raise NotSaved(f"checkpoint {self.directory} of step {step} not saved: {error}; {left}") from None

    def save_alone(
        self, step: int, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer] = _NOTHING
    ) -> bool:
        """Write the state after ``step`` steps, on one rank of a job whose members come and go.

        What only the other ranks know is not in it: their random state, and their estimator's memory. False where the
        peers have merged more steps than this rank has applied, so that there is no state of one step to be had.
        Raises `NotSaved` if it cannot be written.
        """
        state = model.straggle_state(own=False)
        if int(state[_HISTORY + "num_steps"]) != step:
            return False
        try:
            durable.begin(self.directory)
            states = {name: own.state_dict() for name, own in dealt.items()}
            files = self._write(model, optimizer, state, states)
            self._publish(step, model, optimizer, states, files, alone=True)
        except (OSError, ValueError) as error:
            raise NotSaved(f"checkpoint {self.directory} of step {step} not saved: {error}") from None
        return True

    def exists(self) -> bool:
        """Whether this rank sees one, be it damaged."""
        return durable.exists(self.directory)

    def load(self, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer] = _NOTHING) -> int:
        """Load the saved state; returns after how many steps it was saved.

        Takes the latest that is complete on all ranks. Raises `Refused` if there is none, or if it is of another run.
        """
        found = self._choose()

        def restore() -> None:
            try:
                self._restore(found, model, optimizer, dealt)
            except (RuntimeError, LookupError, TypeError, AttributeError) as error:  # torch says it in several ways
                said = " ".join(str(error).split())
                raise ValueError(
                    f"{_named(found)} is of another model, optimizer or estimator than this run's: give the keys that "
                    f"it was made with, or another run_dir ({said[:300]})"
                ) from None

        on_all_ranks(restore)
        on_all_ranks(lambda: durable.adopt(found, self.directory) if dist.get_rank() == 0 else None)
        return found.step

    def set_aside(self) -> None:
        """Keep what there is under another name, for a run that does not go on from it; rank 0 alone calls it."""
        if kept := durable.set_aside(self.directory):
            _log.warning(
                "%s was there before this run, which starts from the beginning: kept as %s", self.directory, kept
            )

    # -- writing

    def _write(
        self, model: StagedDataParallel, optimizer: Optimizer, saved: SavedState, states: Mapping[str, Any] | None
    ) -> dict[str, Seal]:
        """Write this rank's files, and those that are common if it is the one that does, which has the ``states``."""
        new, rank = durable.being_written(self.directory), dist.get_rank()
        new.mkdir(parents=True, exist_ok=True)
        state = _separate(saved)
        history = {name.removeprefix(_HISTORY): state.pop(name) for name in list(state) if name.startswith(_HISTORY)}
        tensors = {_of_rank(rank): {"random": torch.get_rng_state(), **state}}
        if states is not None:
            history |= {f"{of}.{name}": value for of, own in states.items() for name, value in _tensors(own).items()}
            flat = get_optimizer_state_dict(model.module, optimizer, options=_FLAT)
            contents = (_separate(model.module.state_dict()), _separate(flat), history)
            tensors |= dict(zip(_COMMON, contents, strict=True))
        try:
            for name, content in tensors.items():
                save_file(content, new / name)
        except SafetensorError as error:  # the full disk, as it says it
            raise OSError(f"{new / name}: {error}") from None
        return {name: durable.seal(new / name) for name in tensors}

    def _publish(
        self,
        step: int,
        model: StagedDataParallel,
        optimizer: Optimizer,
        states: Mapping[str, Any],
        files: dict[str, Seal],
        *,
        alone: bool = False,
    ) -> None:
        flat = get_optimizer_state_dict(model.module, optimizer, options=_FLAT)
        numbers = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
        plain = {of: {k: v for k, v in own.items() if not isinstance(v, Tensor)} for of, own in states.items()}
        of = {name: value for name, value in model.straggle_state().items() if not isinstance(value, Tensor)}
        state = {"step": step, "ranks": dist.get_world_size(), "optimizer": numbers, "straggle": of, **plain}
        if alone:
            state["alone"] = True
        durable.publish(self.directory, state, files)

    def _give_up(self) -> None:
        """Remove what was written of an incomplete checkpoint, to make room."""
        new = durable.being_written(self.directory)
        if dist.get_rank() == 0 and not (new / durable.STATE).exists():
            with contextlib.suppress(OSError):  # why it could not be written is said already
                durable.remove(new)

    # -- reading

    def _choose(self) -> Snapshot:
        """The same on all ranks."""
        loadable, damaged = self._loadable()
        seen = gather(([_identity(snapshot) for snapshot in loadable], damaged))
        for snapshot in loadable:
            if all(_identity(snapshot) in identities for identities, _ in seen):
                if problems := of_ranks([problems for _, problems in seen]):
                    _log.log(_on_rank0(), "%s; going on from %s", problems, _named(snapshot))
                return snapshot
        if problems := of_ranks([problems for _, problems in seen]):
            raise Refused(f"{self.directory}: {problems}; or start from the beginning with resume=false")
        if not any(identities for identities, _ in seen):
            raise Refused(f"no checkpoint in {self.directory}: start without resume=true first")
        sees = of_ranks([[f"sees step {step} in {name}" for step, name, _ in ids] or ["sees none"] for ids, _ in seen])
        raise Refused(
            f"the ranks do not see the same checkpoint in {self.directory}: {sees}; run_dir must be on storage that "
            "all ranks see"
        )

    def _loadable(self) -> tuple[list[Snapshot], list[str]]:
        """The checkpoints whose files this rank could load, the latest first, and why not the others."""
        loadable, (found, damaged) = list[Snapshot](), durable.snapshots(self.directory)
        for snapshot in found:
            try:
                for name in (*_COMMON, _of_rank(dist.get_rank())):
                    if name in snapshot.state["files"] or (_of_as_many(snapshot) and "alone" not in snapshot.state):
                        snapshot.check(name)
                loadable.append(snapshot)
            except ValueError as error:
                damaged.append(str(error))
        return loadable, damaged

    def _restore(
        self, found: Snapshot, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer]
    ) -> None:
        of_model, of_optimizer, of_history = (load_file(found.directory / name) for name in _COMMON)
        model.module.load_state_dict(of_model)
        flat: dict[str, Any] = {**of_optimizer, **found.state["optimizer"]}
        set_optimizer_state_dict(model.module, optimizer, flat, options=_FLAT)
        as_many = _of_as_many(found)
        if not as_many:
            _log.log(
                _on_rank0(),
                "%s is of %d ranks, and this run has %d: shares, and random states of ranks that are new, begin again",
                _named(found),
                found.state["ranks"],
                dist.get_world_size(),
            )
        for name in dealt.keys() & found.state.keys():
            if name == "rebalance" and not as_many:
                continue
            tensors = {key: of_history.pop(key) for key in list(of_history) if key.startswith(f"{name}.")}
            own = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}
            dealt[name].load_state_dict({**found.state[name], **own})
        tensors = _load_own(found, dist.get_rank())
        if "random" in tensors:
            torch.set_rng_state(tensors.pop("random"))
        of = found.state.get("straggle")
        if of is None:  # of an older version, which named the tensors of an estimator by their parameters alone
            of, tensors = {}, {name if name == "reached" else f"estimator.{name}": t for name, t in tensors.items()}
        history = {_HISTORY + name: tensor for name, tensor in of_history.items()}
        model.load_straggle_state({**of, **history, **tensors})


def _of_as_many(snapshot: Snapshot) -> bool:
    """Whether it is of as many ranks as this run has."""
    return bool(snapshot.state["ranks"] == dist.get_world_size())


def _named(snapshot: Snapshot) -> str:
    return f"{snapshot.directory} of step {snapshot.step}"


def _identity(snapshot: Snapshot) -> tuple[int, str, str]:
    return snapshot.step, snapshot.directory.name, snapshot.sha256


def _on_rank0() -> int:
    return logging.WARNING if dist.get_rank() == 0 else logging.DEBUG


def _of_rank(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _load_own(found: Snapshot, rank: int) -> dict[str, Tensor]:
    """What a rank has of its own; where one rank saved alone, each has that one's, but for its random state."""
    files = found.state["files"]
    if (file := _of_rank(rank)) in files:
        return load_file(found.directory / file)
    saved = {}
    if "alone" in found.state:
        (file,) = files.keys() - set(_COMMON)
        saved = load_file(found.directory / file)
    return {name: tensor for name, tensor in saved.items() if name != "random"}


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _separate(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, each with its own memory, as safetensors needs them (tied weights share theirs)."""
    return {name: value.detach().cpu().clone() for name, value in tensors.items() if isinstance(value, Tensor)}
