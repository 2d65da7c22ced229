"""Runs whose slow ranks are known, as files: of `watch`, and traces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from straggle import RankReport, StageReport, StepReport
from straggle.observe.trace import TraceWriter

NUM_STAGES, NETWORK_S = 8, 0.01
USUAL = {"outside": 0.001, "optimizer": 0.004, "loop_end": 1e-9, "data": 0.005, "forward": 0.03, "backward": 0.06}


def write_watch(
    folder: Path,
    steps: int = 120,
    ranks: int = 4,
    extra: Callable[[int, int], dict[str, float]] = lambda _rank, _step: {},
    pauses: Callable[[int, int], dict[str, float]] = lambda _rank, _step: {},
    noise: float = 0.02,
) -> Path:
    """Files as `straggle.watch` writes them, of ranks that wait for one another; ``extra`` seconds in phases."""
    chance = random.Random(0)
    lines = [[] for _ in range(ranks)]
    stages = [{"name": f"blocks.{number}", "numel": 100} for number in range(NUM_STAGES)]
    for step in range(steps):
        phases = [
            {name: s * (1 + noise * chance.random()) + extra(rank, step).get(name, 0.0) for name, s in USUAL.items()}
            for rank in range(ranks)
        ]
        end = max(sum(own.values()) for own in phases) + NETWORK_S
        for rank, own in enumerate(phases):
            wait_s, compute_s = end - sum(own.values()), own["forward"] + own["backward"]
            stage_s = [own["forward"] + own["backward"] * (stage + 1) / NUM_STAGES for stage in range(NUM_STAGES)]
            lines[rank].append(
                {"step": step, "seconds": end, **{f"{name}_s": s for name, s in own.items()}, "wait_s": wait_s}
                | {"compute_s": compute_s, "merge_s": wait_s, "microbatch_s": [compute_s], "stage_s": stage_s}
                | {"pauses": {name: {"gc_s": s} for name, s in pauses(rank, step).items()}}
            )
    (folder / "watch").mkdir(parents=True, exist_ok=True)
    for rank, own in enumerate(lines):
        head = {"watch": 1, "rank": rank, "world_size": ranks, "stages": stages}
        (folder / "watch" / f"rank{rank}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [head, *own]))
    return folder


def when(rank: int, steps: range, **seconds: float) -> Callable[[int, int], dict[str, float]]:
    return lambda other, step: seconds if other == rank and step in steps else {}


STAGES = tuple(StageReport(f"blocks.{number}", 100, 4.0, False) for number in range(NUM_STAGES))


def a_rank(rank: int, pace: float, stop_s: float) -> RankReport:
    """A rank that takes ``pace`` times 0.8 s for its stages, and is stopped after ``stop_s``."""
    stage_s = [pace * 0.1 * (stage + 1) for stage in range(NUM_STAGES)]
    late = stage_s[-1] > stop_s
    done = tuple(float(at <= stop_s) for at in stage_s)
    compute_s = min(stage_s[-1], stop_s)
    whole = tuple(at if at <= stop_s else float("nan") for at in stage_s)
    return RankReport(
        rank=rank,
        outside_s=0.0,
        data_s=0.0,
        forward_s=0.0,
        backward_s=compute_s,
        wait_s=0.0,
        compute_s=compute_s,
        reach=sum(done) / NUM_STAGES,
        stages=done,
        stage_s=whole,
        late=late,
        cause="backward" if late else None,
    )


def write_trace(folder: Path, stop_s: float, ranks: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    with TraceWriter(folder / "trace.jsonl") as trace:
        for step in range(60):
            paces = [1.0, 1.01, 2.0, 1.02][:ranks]
            rows = tuple(a_rank(rank, pace, stop_s) for rank, pace in enumerate(paces))
            seconds = max(row.compute_s for row in rows) + NETWORK_S
            trace.write(StepReport(step, seconds, stop_s, rows, STAGES))
    return folder
