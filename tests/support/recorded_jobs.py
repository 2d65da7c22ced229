"""Jobs that `benchmarks/outcomes.py` has recorded: what was watched of each, and what came of each method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUTCOMES = Path(__file__).parents[1] / "unit" / "advise" / "outcomes"
JOBS = sorted(path.stem for path in OUTCOMES.glob("*.json"))
_S = 1e-4  # of a number in a file


class Came(NamedTuple):
    """What came of a method: the share of DDP's mean step that it saved, and the share of gradients it dropped."""

    saved: float
    dropped: float


def write_watched(name: str, folder: Path) -> Path:
    """What was watched of this job, as files."""
    (folder / "watch").mkdir(parents=True, exist_ok=True)
    for rank, own in enumerate(_content(name)["ranks"]):
        columns = {column: _seconds_of(values) for column, values in own["columns"].items()}
        lines = [
            {"step": step, **{column: values[step] for column, values in columns.items()}, "pauses": {}}
            for step in range(len(columns["seconds"]))
        ]
        text = "".join(json.dumps(line) + "\n" for line in [own["head"], *lines])
        (folder / "watch" / f"rank{rank}.jsonl").write_text(text)
    return folder


def what_came(name: str) -> dict[str, Came]:
    """By method, beside DDP's mean step in the run before them all and the one after."""
    outcomes = _content(name)["outcomes"]
    ddp_s = (outcomes["DDP"]["step_s"] + outcomes["DDP again"]["step_s"]) / 2
    return {method: Came(1 - own["step_s"] / ddp_s, own["dropped"]) for method, own in outcomes.items()}


def _content(name: str) -> Any:
    return json.loads((OUTCOMES / f"{name}.json").read_text())


def _seconds_of(values: list[Any]) -> list[Any]:
    return [_seconds_of(one) if isinstance(one, list) else _S * one for one in values]
