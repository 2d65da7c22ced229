"""What is recorded of a run whose members come and go, a file for each rank, and what follows from all of them.

A process may be killed at any moment, and its last steps are then not in its file. What a killed rank gave to a merged
bucket is known all the same: it was all of its part, or a line says what it was, which was written before that part was
submitted. Among whom a bucket was merged is in the lines of the others.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from straggle.merge.members.provenance import MergedAmong
from straggle.merge.replay import Decision, Healed, RecordedMembers, RecordedStep, Recording, no_leaves
from straggle.merge.step_record import StepRecord
from straggle.observe.lines import LineWriter, is_cut
from straggle.observe.recording import file_of
from straggle.parallel import StagedDataParallel


class MembersRecorder:
    """Writes what a replay needs of this rank, from the first step on; to be made before ``model.register_state``.

    >>> with MembersRecorder(model, folder):
    ...     first = model.register_state(optimizer=optimizer)
    ...     ...  # the loop

    A rank that comes to a running job goes on with its file. ``first_step`` > 0: the run goes on from a checkpoint, and
    cannot be replayed.
    """

    def __init__(self, model: StagedDataParallel, folder: Path, *, first_step: int = 0) -> None:
        path = file_of(folder, model.rank)
        self._model = model
        self._lock = threading.Lock()
        self._file = LineWriter(path, keep_bytes=_complete_bytes(path) if model.comes_late else 0)
        self._planned = False
        self._drew: tuple[int, Sequence[int]] = (-1, ())  # as it was written last
        if first_step:
            self._write({"resumed": first_step})
        elif not model.comes_late:
            self._write({"ranks": model.world_size})
        model.record(self)
        self._hook: RemovableHandle = model.register_step_hook(self._step)

    def partial(self, decision: Decision) -> None:
        """As `Recorder` has it."""
        self._write({"submitted": decision.step, **_plain(decision)})

    def drew(self, step: int, numbers: Sequence[int]) -> None:
        """As `Recorder` has it."""
        if (step, numbers) != self._drew:
            self._drew = (step, numbers)
            self._write({"drew": step, "numbers": list(numbers)})

    def regrouped(self, generation: int, ranks: Sequence[int]) -> None:
        """As `Recorder` has it."""
        self._write({"generation": generation, "members": list(ranks)})

    def healed(self, step: int, *, started: bool, giver: int) -> None:
        """As `Recorder` has it."""
        random = bytes(torch.get_rng_state().tolist()).hex()
        self._write({"healed": step, "started": started, "giver": giver, "random": random})

    def _step(self, record: StepRecord) -> None:
        if not self._planned:
            order, seconds = self._model.learned
            self._write({"order": list(order), "seconds": list(seconds)})
            self._planned = True
        decision = self._model.last_decision
        assert decision is not None
        self._write({"step": record.step, **_plain(decision)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:  # the stand-in and the thread that follows the members write too
            self._file.write(json.dumps(line))

    def close(self) -> None:
        """Close the file."""
        self._hook.remove()
        with self._lock:
            self._file.close()

    def __enter__(self) -> MembersRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(decision: Decision) -> dict[str, Any]:
    plain = asdict(decision)
    del plain["step"]
    return plain


def _complete_bytes(path: Path) -> int:
    """Up to the end of the last complete line: its process was killed in the next."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def read_members_recording(folder: Path, rank: int, world_size: int) -> Recording:
    """The recording of one rank, from the files of all. Raises ``ValueError`` where the run cannot be replayed."""
    files = [_read(file_of(folder, other), world_size) for other in range(world_size)]
    generations = {0: tuple(range(world_size))}
    for file in files:
        for generation, ranks in file.generations.items():
            if generations.setdefault(generation, ranks) != ranks:
                raise ValueError(
                    f"{folder}: the members of generation {generation} are {generations[generation]} in one file and "
                    f"{ranks} in another, as where the job's store was lost: whose gradients were merged is not known"
                )
    leaf = next((left for file in files for _, left in sorted(file.left.items()) if left.leaves), None)
    if leaf is not None:
        raise ValueError(f"{folder}: {no_leaves(leaf)}")
    _leave_out_steps_of_old_members(files, generations)
    steps = _steps(files, generations, folder)
    _check_draws(files, steps, folder)
    own = files[rank]
    order, seconds = next((file.plan for file in files if file.plan is not None), ((), ()))
    decisions = tuple(_decision(own, rank, step, recorded) for step, recorded in enumerate(steps))
    return Recording(tuple(order), tuple(seconds), decisions, RecordedMembers(steps, own.healed, _givers(files)))


def _givers(files: Sequence[_File]) -> dict[int, dict[int, int]]:
    """By step and rank, whose state it took."""
    found: dict[int, dict[int, int]] = {}
    for rank, file in enumerate(files):
        for step, healed in file.healed.items():
            if healed.giver is not None:
                found.setdefault(step, {})[rank] = healed.giver
    return found


@dataclass
class _File:
    """What one rank wrote: by step, what it drew, what it submitted where that was not all, and how it left."""

    drew: dict[int, tuple[int, ...]] = field(default_factory=dict)
    submitted: dict[int, Decision] = field(default_factory=dict)
    left: dict[int, Decision] = field(default_factory=dict)
    healed: dict[int, Healed] = field(default_factory=dict)
    generations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    plan: tuple[Sequence[int], Sequence[float]] | None = None

    def add(self, line: dict[str, Any], world_size: int) -> None:
        """Take a line. Raises ``ValueError`` for one after which no replay is possible."""
        if "resumed" in line:
            raise ValueError(
                f"the run went on from a checkpoint of step {line['resumed']}, in which the ranks' random states are "
                "not: a run with members is replayed from its beginning only"
            )
        if line.get("ranks", world_size) != world_size:
            raise ValueError(f"recorded on {line['ranks']} ranks, and this run has {world_size}: start as many")
        if "drew" in line:
            self.drew[line["drew"]] = tuple(line["numbers"])
        elif "submitted" in line:
            self.submitted[line["submitted"]] = _as_decision(line, line["submitted"])
        elif "step" in line:
            self.left[line["step"]] = _as_decision(line, line["step"])
        elif "healed" in line:
            if (giver := line.get("giver")) is not None and giver not in range(world_size):
                raise ValueError(f"step {line['healed']} has the state of {giver!r}, which is no rank of {world_size}")
            self.healed[line["healed"]] = Healed(_random(line["random"]), line["started"], giver)
        elif "generation" in line:
            self.generations[line["generation"]] = tuple(line["members"])
        elif line.get("order"):
            self.plan = line["order"], line["seconds"]


def _as_decision(line: Mapping[str, Any], step: int) -> Decision:
    among = line["among"]
    if among is not None:
        lost = {int(rank): tuple(buckets) for rank, buckets in among["lost"].items()}
        among = MergedAmong(tuple(among["generations"]), lost)
    taken, state = (line["num_gradients"], line["left_at"], line["stood_in"], line["num_over"]), line["idle"]
    drawn = None if line.get("drawn") is None else tuple(line["drawn"])
    leaves = tuple(line.get("leaves", ()))
    return Decision(
        step,
        *taken,
        state,
        line["entered"],
        among,
        drawn,
        leaves,
        line.get("had_work"),
        line.get("num_drawn"),
        line.get("joins_over"),
    )


def _random(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _read(path: Path, world_size: int) -> _File:
    if not path.exists():
        raise ValueError(f"no recording at {path}: start as many ranks as the recorded run had")
    file = _File()
    with path.open(errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n") or is_cut(line):
                continue  # its process was killed in it
            try:
                file.add(json.loads(line), world_size)
            except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
                raise ValueError(f"{path}: not a recording of a run with members ({error!r})") from None
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    return file


def _leave_out_steps_of_old_members(files: Sequence[_File], generations: Mapping[int, tuple[int, ...]]) -> None:
    """A rank that was stopped may end a step that its peers have begun anew without it, and learn of that later.

    gloo's threads of theirs still give it what it lacks: a group cannot be ended while a collective is on its way. What
    it made of the step counts for nothing, as its state is replaced.
    """
    latest: dict[int, int] = {}
    for file in files:
        for step, decision in file.left.items():
            if decision.among is not None:
                latest[step] = max(latest.get(step, 0), decision.among.generations[-1])
    for rank, file in enumerate(files):
        for step, decision in file.left.items():
            is_old = decision.among is not None and decision.among.generations[-1] < latest[step]
            if is_old and rank not in generations.get(latest[step], (rank,)):
                file.left[step] = replace(decision, among=None)


def _steps(
    files: Sequence[_File], generations: Mapping[int, tuple[int, ...]], folder: Path
) -> tuple[RecordedStep, ...]:
    """Among whom each step was merged, from those who applied it."""
    known: dict[int, list[MergedAmong]] = {}
    for file in files:
        for step, decision in file.left.items():
            if decision.among is not None:
                known.setdefault(step, []).append(decision.among)
    found = []
    for step in range(max(known, default=-1) + 1):
        if step not in known:
            raise ValueError(
                f"{folder}: no rank has recorded step {step}, though there are later ones; it could not be written, as "
                "on a full disk"
            )
        found.append(_step(step, known[step], generations, folder))
    told = [0, *(known[step][0].generations[-1] for step in range(len(found)))]
    # the members changed in a step whose telemetry is of other members than that of the step before
    return tuple(replace(step, apart=own != before) for step, (before, own) in zip(found, pairwise(told), strict=True))


def _step(
    step: int, words: Sequence[MergedAmong], generations: Mapping[int, tuple[int, ...]], folder: Path
) -> RecordedStep:
    if len({word.generations for word in words}) > 1:
        raise ValueError(f"{folder}: the ranks have not recorded the same of step {step}: their files are of two runs")
    if unknown := set(words[0].generations) - generations.keys():
        raise ValueError(
            f"{folder}: who was a member in generation {min(unknown)}, in which gradients of step {step} were merged, "
            "is in no file"
        )
    *buckets, telemetry = (generations[generation] for generation in words[0].generations)
    lost: dict[int, tuple[int, ...]] = {}
    for word in words:  # who came in later does not know of all
        for rank, own in word.lost.items():
            lost[rank] = tuple(sorted({*lost.get(rank, ()), *own}))
    return RecordedStep(tuple(buckets), telemetry, lost)


def _check_draws(files: Sequence[_File], steps: Sequence[RecordedStep], folder: Path) -> None:
    """Raises ``ValueError``, on all ranks, where one gave something of a pool and what it had drawn is in no file."""
    for step in {step for file in files for step, decision in file.left.items() if decision.drawn is not None}:
        for rank, file in enumerate(files):
            decision = _decision(file, rank, step, steps[step])
            if decision.num_gradients and decision.drawn is None:
                raise ValueError(
                    f"{folder}: what rank {rank} had drawn in step {step} is not recorded; it could not be written, as "
                    "on a full disk, or an older version of straggle recorded the run"
                )


def _decision(file: _File, rank: int, step: int, recorded: RecordedStep) -> Decision:
    """What a rank did in a step, also where it was killed before it could say so, or was put out."""
    left, submitted = file.left.get(step), file.submitted.get(step)
    if left is not None and left.among is not None:
        return left
    left_at = None if left is None else left.left_at
    if submitted is not None:
        if submitted.left_at is None and left_at is not None:
            return replace(submitted, left_at=left_at)
        return submitted
    gave = any(rank in ranks for ranks in (*recorded.buckets, recorded.telemetry))
    if left is None and not gave:
        return Decision(step, 0, 0, True, 0, True)
    # what it launched was complete; of what it had not launched nothing was merged, nor shown to its estimator
    taken, over, drawn = sys.maxsize, None, file.drew.get(step)
    if left is not None and (left.num_gradients or not gave):
        taken, over, drawn = left.num_gradients, left.num_over, left.drawn
    idle = left_at is not None or not taken
    return Decision(step, taken, left_at, False, over, idle, drawn=drawn, had_work=False)
