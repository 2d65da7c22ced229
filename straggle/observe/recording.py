"""A rank's decisions as a file, with a line for each step, so that `train` can repeat the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from straggle.observe.lines import LineWriter, bytes_before, is_cut
from straggle.replay.wing import Decision, Recording


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank{rank}.jsonl"


class DecisionWriter:
    """Appends a rank's decisions to a file, a line of JSON each; the first line holds what the stages come from.

    ``first_step`` > 0 goes on with a file that was begun before. A step that cannot be written, as on a full disk, is
    left out, with one warning; `read_recording` then refuses the file.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        kept = bytes_before(path, first_step) if first_step else 0
        self._file = LineWriter(path, keep_bytes=kept)
        self._begun = kept > 0

    def write(self, decision: Decision, learned: tuple[Sequence[int], Sequence[float]]) -> None:
        """Add a step; ``learned`` is what the stages are planned from, as `StagedDataParallel.learned` has it."""
        if not self._begun:
            order, seconds = learned
            self._begun = self._file.write(json.dumps({"order": list(order), "seconds": list(seconds)}))
        if self._begun:
            self._file.write(json.dumps(asdict(decision)))

    def __enter__(self) -> DecisionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _decision(record: dict[str, Any]) -> Decision:
    parts = record.pop("parts", None)
    return Decision(**record, parts=None if parts is None else tuple(parts))


def read_recording(path: Path) -> Recording:
    """A rank's recording. Raises ``ValueError`` if there is none, or if it lacks a step from 0 on."""
    if not path.exists():
        raise ValueError(f"no recording at {path}")
    with path.open(errors="replace") as file:
        lines = [line for line in file if line.endswith("\n") and not is_cut(line)]  # the job ended in the last one
    try:
        first, *rest = (json.loads(line) for line in lines)
        decisions = tuple(map(_decision, rest))
        order, seconds = tuple(first["order"]), tuple(first["seconds"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a recording of straggle train ({error!r})") from None
    lacking = next((step for step, decision in enumerate(decisions) if decision.step != step), None)
    if lacking is not None:
        raise ValueError(
            f"{path}: a recording has every step from 0 on; this one lacks step {lacking}: it was begun at a later "
            "step, or could not be written, as on a full disk"
        )
    return Recording(order, seconds, decisions)
