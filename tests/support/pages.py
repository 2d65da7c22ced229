"""Runs whose numbers are known, as files, and what a page of one holds."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from straggle import RankReport, StageReport, StepReport
from straggle.observe.trace import TraceWriter

STAGES = tuple(StageReport(f"blocks.{number}..blocks.{number}.norm", 100 + number, 0.0, False) for number in range(5))


def a_rank(number: int, *, whole: int = len(STAGES), pace: float = 1.0, **rest: Any) -> RankReport:
    """A rank that finished this number of stages, each in a tenth of a second times ``pace``."""
    share = tuple(float(stage < whole) for stage in range(len(STAGES)))
    reach = sum(s * stage.numel for s, stage in zip(share, STAGES, strict=True)) / sum(s.numel for s in STAGES)
    stage_s = tuple(pace * 0.1 * (stage + 1) if stage < whole else math.nan for stage in range(len(STAGES)))
    times = {"outside_s": 0.01, "data_s": 0.02, "forward_s": 0.1, "backward_s": 0.1 * whole, "wait_s": 0.05}
    late = whole < len(STAGES) and not rest.get("idle")
    own = {"compute_s": pace * 0.1 * len(STAGES), "reach": reach, "stages": share, "stage_s": stage_s, "late": late}
    return RankReport(rank=number, **{**times, **own, "cause": "backward" if late else None, **rest})


def a_step(step: int, ranks: Iterable[RankReport], **rest: Any) -> StepReport:
    fields = {
        "seconds": 0.6 + 0.01 * (step % 7),
        "deadline_s": 0.5,
        "stages": STAGES,
        "scalars": {"loss": 3 / (1 + step)},
    }
    return StepReport(step=step, ranks=tuple(ranks), **{**fields, **rest})


def slow_run(num_steps: int = 40, num_ranks: int = 4) -> Iterator[StepReport]:
    """The last rank is always slow, and rank 1 is stuck in its data in steps 20 to 24."""
    chance = random.Random(0)
    for step in range(num_steps):
        ranks = [a_rank(number, pace=1 + chance.random() / 10) for number in range(num_ranks - 1)]
        ranks.append(a_rank(num_ranks - 1, whole=chance.randrange(1, 4), pace=2.0))
        if 20 <= step < 25:
            stuck = {"compute_s": math.nan, "stood_in": True, "cause": "data"}
            ranks[1] = dataclasses.replace(a_rank(1, whole=0), **stuck)
        yield a_step(step, ranks)


def write_run(folder: Path, reports: Iterable[StepReport], /, **summary: Any) -> Path:
    with TraceWriter(folder / "trace.jsonl") as trace:
        for report in reports:
            trace.write(report)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class Content(HTMLParser):
    """The numbers, sentences and headings of a page, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: dict[str, list[Any]] = {}
        self.addresses: list[str] = []
        self.scripts: dict[str, str] = {}
        self.text, self.charts = "", 0
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]
        self.charts += own.get("class") == "chart"
        self._script = (own.get("id") or "main") if tag == "script" else None
        if "data-key" in own:
            value = own["data-value"] or "null"
            self.values.setdefault(own["data-key"] or "", []).append(
                json.loads(value) if value[0] not in "i" else value
            )

    def handle_endtag(self, _tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        else:
            self.text += data


def content_of(path: Path) -> Content:
    return Content(path.read_text())


ODD = {
    "one rank": [a_step(step, [a_rank(0)]) for step in range(5)],
    "one step": [a_step(0, [a_rank(0), a_rank(1, whole=2)])],
    "no loss": [a_step(step, [a_rank(0)], scalars={}) for step in range(5)],
    "loss that is not finite": [a_step(step, [a_rank(0)], scalars={"loss": math.nan}) for step in range(5)],
    "no deadline": [a_step(step, [a_rank(0), a_rank(1)], deadline_s=math.inf) for step in range(5)],
    "no times": [
        a_step(
            step,
            [
                dataclasses.replace(
                    a_rank(rank, whole=rank),
                    **dict.fromkeys(
                        ("outside_s", "data_s", "forward_s", "backward_s", "wait_s", "compute_s"), math.nan
                    ),
                )
                for rank in range(3)
            ],
            seconds=math.nan,
        )
        for step in range(5)
    ],
    "everybody idle": [
        a_step(step, [a_rank(r, whole=0, idle=True, compute_s=math.nan) for r in (0, 1)]) for step in (0, 1)
    ],
    "nobody in time": [a_step(step, [a_rank(0, whole=1), a_rank(1, whole=2)]) for step in range(5)],
    "bad numbers": [a_step(step, [a_rank(0, nonfinite=3), a_rank(1)], skipped=step == 2) for step in range(5)],
    "more ranks after a resume": [a_step(step, [a_rank(rank) for rank in range(2 + (step > 2))]) for step in range(6)],
    "other stages later": [a_step(step, [a_rank(0)], stages=STAGES if step > 2 else STAGES[::-1]) for step in range(6)],
    "no stages": [
        a_step(step, [dataclasses.replace(a_rank(0), stages=(), stage_s=())], stages=()) for step in range(3)
    ],
    "late without a cause": [a_step(step, [a_rank(0), a_rank(1, whole=1, cause=None)]) for step in range(5)],
    "begins late": [a_step(step, [a_rank(0), a_rank(1)]) for step in range(700, 720)],
}


DREW = (9, 9, 9, 5)


def pulled_run(num_steps=20):
    """Rank 3 is slow; in step 10 it is stuck, gives three back, and loses one; in step 12 nothing is left for it."""
    for step in range(num_steps):
        ranks = [dataclasses.replace(a_rank(rank), parts=own, weight=float(own)) for rank, own in enumerate(DREW)]
        if step == 10:
            ranks[3] = dataclasses.replace(
                ranks[3], parts=1, weight=2.0, reach=0.5, put_back=3, late=True, cause="data"
            )
            ranks[0] = dataclasses.replace(ranks[0], parts=12, weight=12.0)
        if step == 12:
            left = zip(ranks, (11, 11, 10, 0), strict=True)
            ranks = [dataclasses.replace(own, parts=number, weight=float(number)) for own, number in left]
            ranks[3] = dataclasses.replace(ranks[3], idle=True, reach=0.0)
        yield a_step(step, ranks, pool_parts=32, pool_weight=32.0)
