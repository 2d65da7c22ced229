"""What one rank decided in each step, so that a run in which ranks were late can be repeated bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Decision:
    """One rank's part in one step: what of it went into the merge, and where its pass ended.

    ``num_gradients``: how many finished gradients (of parameters, over all micro-batches) were merged; autograd
    finishes them in the same order again. ``left_at``: how often the pass had asked whether to go on before it was told
    to leave; ``None``: it was not. ``stood_in``: the rest was handed in by the stand-in, without estimates.
    """

    step: int
    num_gradients: int
    left_at: int | None
    stood_in: bool


@dataclass(frozen=True)
class Recording:
    """A rank's decisions from step 0 on, and what its stages were planned from (see `plan_stages`)."""

    order: tuple[int, ...]
    seconds: tuple[float, ...]
    decisions: tuple[Decision, ...]


class DecisionWriter:
    """Appends a rank's decisions to a file, a line of JSON each; the first line holds what the stages come from.

    ``first_step`` > 0 goes on with a file that was begun before.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines()[: first_step + 1] if first_step and path.exists() else []
        self._file = path.open("w", buffering=1)
        for line in lines:
            self._file.write(line + "\n")
        self._begun = bool(lines)

    def write(self, decision: Decision, learned: tuple[Sequence[int], Sequence[float]]) -> None:
        """Add a step; ``learned`` is what the stages are planned from, as `StagedDataParallel.learned` tells it."""
        if not self._begun:
            order, seconds = learned
            self._file.write(json.dumps({"order": list(order), "seconds": list(seconds)}) + "\n")
            self._begun = True
        self._file.write(json.dumps(asdict(decision)) + "\n")

    def __enter__(self) -> DecisionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_recording(path: Path) -> Recording:
    """A rank's recording. Raises ``ValueError`` where there is none from step 0 on."""
    if not path.exists():
        raise ValueError(f"no recording at {path}")
    first, *rest = (json.loads(line) for line in path.read_text().splitlines())
    decisions = tuple(Decision(**record) for record in rest)
    if [decision.step for decision in decisions] != list(range(len(decisions))):
        raise ValueError(f"{path}: a recording has every step from 0 on; this one was begun at a later step")
    return Recording(tuple(first["order"]), tuple(first["seconds"]), decisions)
