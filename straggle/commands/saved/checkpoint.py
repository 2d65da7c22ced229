"""Save and load what a run needs to go on.

Model, optimizer, history and the ranks' shares are the same on every rank and written by rank 0; each rank writes what
only it knows: its random state, its estimator's memory and, of a sharded model, its shards. Files are loaded with
``weights_only``, so that they run no code, but for what torch keeps about shards. `durable` explains why a death at any
moment leaves a complete checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from straggle.commands.saved import durable
from straggle.commands.saved.agreement import ALL, Ranks, RefusedByAll, Result, of_ranks, on_all_ranks
from straggle.commands.saved.durable import FileSeal, Snapshot
from straggle.lab.sharding import is_sharded
from straggle.merge.saved_state import SavedState
from straggle.merge.wire.groups import job_rank, job_size
from straggle.parallel import StagedDataParallel

_HISTORY = "history."  # begins the names of what is the same on all ranks
_COMMON = "common.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_NOTHING: Mapping[str, Any] = {}
_log = logging.getLogger(__name__)


class Dealer(Protocol):
    """What determines the next samples; its state is plain values and tensors, by name."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on, the same on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class NotSaved(RuntimeError):
    """A checkpoint could not be written: why, and which is the last complete one. The same on all ranks."""


class BehindPeers(NotSaved):
    """The peers have merged more steps than these ranks have applied, so that there is no state of one step to save."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with one run's state; ``ranks``, all of the job if not given, call the same method together.

    What goes wrong on one rank is raised on all, and names the rank.
    """

    directory: Path
    ranks: Ranks = ALL

    def save(
        self, step: int, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer] = _NOTHING
    ) -> None:
        """Write the state after ``step`` steps; the checkpoint before it stays complete until this one is.

        ``dealt``: what determines the next samples, by name; the same on all ranks. If these are not all ranks of the
        job, what only the others know is not in it: their random state, and their estimator's memory. Raises `NotSaved`
        if it cannot be written, such as on a full disk, and `BehindPeers` if a rank lacks steps that are merged.
        """
        ranks, state = self.ranks, model.straggle_state(own=self.ranks.are_all)
        merged = int(state[_HISTORY + "num_steps"])
        if not ranks.are_all and set(seen := ranks.gather((step, merged))) != {(step, step)}:
            most = max(number for _, number in seen)
            raise BehindPeers(self._not_saved(step, f"its peers have merged {most} steps, which it has yet to apply"))
        try:
            name = self._on_all(lambda: durable.begin(self.directory, step).name if ranks.leads else "")[0]
            new = self.directory / name
            sealed = self._on_all(lambda: _write(new, model, optimizer, state, dealt, common=ranks.leads))
            if is_sharded(model.module):
                sealed += self._on_all(lambda: _sealed(new, _save_shards(new, model.module, optimizer, ranks.group)))
            files = {name: seal for of_rank in sealed for name, seal in of_rank.items()}
            about = _about(step, model) | ({} if ranks.are_all else {"alone": True})
            self._on_all(lambda: durable.publish(new, about, files) if ranks.leads else None)
        except RefusedByAll as error:
            self._on_all(self._give_up)
            raise NotSaved(self._not_saved(step, error)) from None

    def exists(self) -> bool:
        """Whether this rank sees one, be it damaged."""
        return durable.exists(self.directory)

    def load(self, model: StagedDataParallel, optimizer: Optimizer, dealt: Mapping[str, Dealer] = _NOTHING) -> int:
        """Load the saved state; returns after how many steps it was saved.

        Takes the latest that is complete on all ranks. Raises `RefusedByAll` if there is none, or one of another run.
        """
        found = self._choose()
        read = dict[str, Any](), dict[str, Any]()

        def each() -> None:
            with _named_as_of_another_run(found):
                _read(found, model, *read)

        def restore() -> None:
            with _named_as_of_another_run(found):
                self._restore(found, read, model, optimizer, dealt)

        self._on_all(each)  # none begins to load its shards, together with others, before all have read theirs
        self._on_all(restore)
        self._on_all(lambda: durable.keep_only(found.directory) if self.ranks.leads else None)
        return found.step

    def set_aside(self) -> None:
        """Keep what there is under another name, for a run that does not go on from it; one rank alone calls it."""
        if kept := durable.set_aside(self.directory):
            _log.warning(
                "%s was there before this run, which starts from the beginning: kept as %s", self.directory, kept
            )

    def _not_saved(self, step: int, why: object) -> str:
        last = next(iter(durable.snapshots(self.directory)[0]), None)
        left = "there is no complete one" if last is None else f"the last complete one is that of step {last.step}"
        return f"checkpoint {self.directory} of step {step} not saved: {why}; {left}"

    def _give_up(self) -> None:
        """Remove what was written of an incomplete checkpoint, to make room; on each rank, as each may have a disk."""
        with contextlib.suppress(OSError):  # why it could not be written is reported already, or a peer has removed it
            durable.remove_unfinished(self.directory)

    def _on_all(self, work: Callable[[], Result]) -> list[Result]:
        return on_all_ranks(work, self.ranks)

    # -- reading

    def _choose(self) -> Snapshot:
        """The same on all ranks."""
        loadable, damaged = self._loadable()
        seen = self.ranks.gather(([_identity(snapshot) for snapshot in loadable], damaged))
        for snapshot in loadable:
            if all(_identity(snapshot) in identities for identities, _ in seen):
                if problems := of_ranks([problems for _, problems in seen]):
                    _log.log(_on_rank0(), "%s; going on from %s", problems, _named(snapshot))
                return snapshot
        if problems := of_ranks([problems for _, problems in seen]):
            raise RefusedByAll(f"{self.directory}: {problems}; or start from the beginning with resume=false")
        if not any(identities for identities, _ in seen):
            raise RefusedByAll(f"no checkpoint in {self.directory}: start without resume=true first")
        sees = of_ranks([[f"sees step {step} in {name}" for step, name, _ in ids] or ["sees none"] for ids, _ in seen])
        raise RefusedByAll(
            f"the ranks do not see the same checkpoint in {self.directory}: {sees}; run_dir must be on storage that "
            "all ranks see"
        )

    def _loadable(self) -> tuple[list[Snapshot], list[str]]:
        """The checkpoints whose files this rank could load, the latest first, and why not the others."""
        loadable, (found, damaged) = list[Snapshot](), durable.snapshots(self.directory)
        for snapshot in found:
            try:
                snapshot.check(_COMMON)
                own = _of_rank(job_rank())
                if own in snapshot.state["files"] or (_of_as_many(snapshot) and "alone" not in snapshot.state):
                    snapshot.check(own)
                for name in _shards_of_this_rank(snapshot.state["files"]):
                    snapshot.check(name)
                loadable.append(snapshot)
            except ValueError as error:
                damaged.append(str(error))
        return loadable, damaged

    def _restore(
        self,
        found: Snapshot,
        read: tuple[dict[str, Any], dict[str, Any]],
        model: StagedDataParallel,
        optimizer: Optimizer,
        dealt: Mapping[str, Dealer],
    ) -> None:
        common, own = read
        if is_sharded(model.module):
            _load_shards(found.directory, model.module, optimizer, self.ranks.group)
        else:
            model.module.load_state_dict(common["model"])
            set_optimizer_state_dict(model.module, optimizer, common["optimizer"], options=_FLAT)
        as_many = _of_as_many(found)
        if not as_many or _shape(found.state) != _shape(_about(found.step, model)):
            _log.log(
                _on_rank0(),
                "%s is of %s, and this run has %s: shares, the estimator's memory, and random states of ranks that are "
                "new, begin again",
                _named(found),
                _shape(found.state),
                _shape(_about(found.step, model)),
            )
            own = {name: value for name, value in own.items() if name == "random"}
        for name in dealt.keys() & common["dealt"].keys():
            if name != "rebalance" or as_many:
                dealt[name].load_state_dict(common["dealt"][name])
        if "random" in own:
            torch.set_rng_state(own.pop("random"))
        model.load_straggle_state({**common["straggle"], **own})


def _about(step: int, model: StagedDataParallel) -> dict[str, Any]:
    shards = {"shards": job_size() // model.world_size} if is_sharded(model.module) else {}
    return {"step": step, "ranks": job_size(), **shards}


def _shape(state: Mapping[str, Any]) -> str:
    ranks, shards = state["ranks"], state.get("shards")
    return f"{ranks} ranks" if shards is None else f"{ranks // shards} replicas of {shards} ranks"


def _write(
    new: Path,
    model: StagedDataParallel,
    optimizer: Optimizer,
    state: SavedState,
    dealt: Mapping[str, Dealer],
    *,
    common: bool,
) -> dict[str, FileSeal]:
    """Write this rank's file into ``new`` and, if ``common``, that of what is the same on all ranks."""
    new.mkdir(parents=True, exist_ok=True)
    equal = {name: value for name, value in state.items() if _is_common(name, value)}
    own = {name: value for name, value in state.items() if name not in equal}
    contents: dict[str, Any] = {_of_rank(job_rank()): {"random": torch.get_rng_state(), **own}}
    if common:
        contents[_COMMON] = {
            "straggle": equal,
            "dealt": {name: dealer.state_dict() for name, dealer in dealt.items()},
        }
        if not is_sharded(model.module):
            contents[_COMMON] |= {
                "model": model.module.state_dict(),
                "optimizer": get_optimizer_state_dict(model.module, optimizer, options=_FLAT),
            }
    for name, content in contents.items():
        _save(content, new / name)
    return _sealed(new, contents)


def _sealed(new: Path, names: Iterable[str]) -> dict[str, FileSeal]:
    return {name: durable.seal(new / name) for name in names}


def _is_common(name: str, value: Tensor | int | str) -> bool:
    return name.startswith(_HISTORY) or not isinstance(value, Tensor)


def _of_as_many(snapshot: Snapshot) -> bool:
    """Whether it is of as many ranks as this run has."""
    return bool(snapshot.state["ranks"] == job_size())


def _named(snapshot: Snapshot) -> str:
    return f"{snapshot.directory} of step {snapshot.step}"


def _identity(snapshot: Snapshot) -> list[int | str]:
    return [snapshot.step, snapshot.directory.name, snapshot.sha256]


def _on_rank0() -> int:
    return logging.WARNING if job_rank() == 0 else logging.DEBUG


def _of_rank(rank: int) -> str:
    return f"rank{rank}.pt"


@contextlib.contextmanager
def _named_as_of_another_run(found: Snapshot) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{_named(found)} is of another model, optimizer or estimator than this run's: give the keys that "
            f"it was made with, or another run_dir ({said[:300]})"
        ) from None


def _read(found: Snapshot, model: StagedDataParallel, common: dict[str, Any], own: dict[str, Any]) -> None:
    """Fill ``common`` and ``own``. Raises ``ValueError`` if it is of the other kind of model."""
    kinds = {False: "that each rank has a copy of", True: "that is sharded over several ranks"}
    sharded, saved_sharded = is_sharded(model.module), "shards" in found.state
    if sharded != saved_sharded:
        raise ValueError(
            f"{_named(found)} is of a model {kinds[saved_sharded]}, and this run's is one {kinds[sharded]}: give the "
            "parallel= that it was made with, or another run_dir"
        )
    common |= _load(found.directory / _COMMON)
    own |= _load_own(found, job_rank())


def _load_own(found: Snapshot, rank: int) -> dict[str, Any]:
    """What a rank has of its own; if not all have saved, each other has one's of these, but for its random state."""
    files = found.state["files"]
    if (file := _of_rank(rank)) in files:
        return _load(found.directory / file)
    if "alone" not in found.state:
        return {}
    file = min(name for name in files if name.startswith("rank"))
    return {name: value for name, value in _load(found.directory / file).items() if name != "random"}


def _save(content: Any, path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:  # torch's own, after that of the full disk
        raise OSError(f"{path}: {error.__context__ or error}") from None


def _load(path: Path) -> dict[str, Any]:
    """The content of a file, on the CPU; no code of its own runs."""
    return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


# -- a sharded model and its optimizer, by torch.distributed.checkpoint: a mesh of another shape can read them

_FOLDER = "shards"
_Group = dist.ProcessGroup | None


def _save_shards(new: Path, module: nn.Module, optimizer: Optimizer, group: _Group = None) -> list[str]:
    """Write this rank's shards below ``new``; returns the names of the files that it answers for.

    Collective over ``group``, or all ranks. Raises ``OSError``, on all of them, if they cannot be written.
    """
    parts, place = _parts(module, optimizer), dist.get_rank(group)
    _together(lambda: state_dict_saver.save(parts, checkpoint_id=new / _FOLDER, process_group=group), OSError)
    own = sorted(path.name for path in (new / _FOLDER).glob(f"__{place}_*"))
    about_all = [".metadata"] if place == 0 else []
    return [f"{_FOLDER}/{name}" for name in (*own, *about_all)]


def _load_shards(found: Path, module: nn.Module, optimizer: Optimizer, group: _Group = None) -> None:
    """Read what is this rank's of it. Collective; raises ``RuntimeError``, on all ranks, for another model's."""
    parts = _parts(module, optimizer)
    _together(lambda: state_dict_loader.load(parts, checkpoint_id=found / _FOLDER, process_group=group), RuntimeError)
    set_state_dict(module, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def _shards_of_this_rank(files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files with shards that this rank checks, so that each is read by one rank."""
    shards = sorted(name for name in files if name.startswith(f"{_FOLDER}/"))
    return shards[job_rank() :: job_size()]


def _parts(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model, of_optimizer = get_state_dict(module, optimizer)
    return {"model": model, "optimizer": of_optimizer}


def _together(work: Callable[[], object], kind: type[Exception]) -> None:
    """Raise the ranks' own errors, of this kind: torch's is no ``Exception``, and has a traceback of each rank."""
    try:
        work()
    except CheckpointException as error:
        raise kind("; ".join(f"rank {rank}: {own}" for rank, (own, _) in sorted(error.failures.items()))) from None
