"""The picture at a page's head: what each rank's time went to, a lane for each, and where the members changed.

A short run is drawn as it was, one part behind the other. In a longer one a column is some steps, and a part in it as
high as its share of their time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from straggle.observe.numbers.goodput import USES
from straggle.observe.numbers.run import Array, Run
from straggle.observe.page.points import MAX_ROWS
from straggle.observe.perfetto import slices_of
from straggle.report import PHASES, RankReport, StepReport, in_words

# from a lane's bottom to its top
PARTS: Mapping[str, str] = {
    "work": "work that counted",
    "dropped": "work that was dropped, or stuck",
    "again": "a step's attempts that were made again",
    "merge": "merge",
    "outside": "evaluation, logging, saving",
    "waiting": "waiting for others",
    "members": "no member, or members changed",
}
SHORT = 24  # steps that are drawn as they were
WIDTH = 1000  # of a lane that is drawn so, in its own unit
MAX_MARKS = 60
_MAX_CELLS = 6_000
_LOW, _HIGH, _ALL_LANES = 6, 36, 440  # pixels of a lane, and of all if there is room
_LABEL = 14  # and of its label
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 300
_LEAST_SHARE = 0.0005  # of all time, below which a part is not in the legend

_OTHERS = {
    "absent": "members",
    "wait": "waiting",
    "collective": "waiting",
    "outside": "outside",
    "loop_end": "outside",
}  # by what a slice is called; the merge is itself
_CHANGE = frozenset({"wait", "merge"})  # what the members are waited for in the step in which they change
_WORK = frozenset(PHASES) - _OTHERS.keys()

Bar: TypeAlias = tuple[float, float, float, float]  # left, right, top and bottom, in a lane's own unit


@dataclass(frozen=True)
class Lane:
    """One rank, or some neighbours: SVG paths by part, and each part's share of their time in words."""

    label: str
    paths: Mapping[str, str]
    words: str


@dataclass(frozen=True)
class Mark:
    """A place along the lanes, in percent from the left, and what is there."""

    at: float
    text: str


@dataclass(frozen=True)
class Picture:
    """``width`` and ``height``: a lane's own units; a lane is drawn ``height`` pixels high.

    ``labelled``: one lane of so many has a label.
    """

    lanes: Sequence[Lane]
    parts: Mapping[str, str]
    ticks: Sequence[Mark]
    changes: Sequence[Mark]
    width: int
    height: int
    labelled: int
    note: str


def is_short(run: Run) -> bool:
    """Whether the run is drawn as it was, from its steps' reports."""
    return run.num_steps <= SHORT and bool(np.isfinite(run.seconds).all()) and bool((run.seconds > 0).all())


def picture(run: Run, reports: Collection[StepReport] = ()) -> Picture | None:
    """That of a run, with the reports of all steps if it `is_short`; ``None`` if its trace has no times."""
    parts_s = _parts_in_short(run, reports) if is_short(run) else _parts_of(run)
    if not np.nansum(parts_s):
        return None
    size = math.ceil(run.num_ranks / MAX_ROWS)
    rows = [slice(at, min(at + size, run.num_ranks)) for at in range(0, run.num_ranks, size)]
    height = max(_LOW, min(_HIGH, _ALL_LANES // len(rows)))
    ends = np.cumsum(run.seconds) if is_short(run) else np.arange(1.0, run.num_steps + 1)
    columns = min(run.num_steps, max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _MAX_CELLS // len(rows))))
    steps = math.ceil(run.num_steps / columns)
    lanes = []
    for row in rows:
        of_row = parts_s[:, :, row]
        if is_short(run):
            bars = _in_order(reports, row, ends, height)
        else:
            bars = _in_columns(of_row, steps, height)
        lanes.append(Lane(str(row.start), _paths(bars), _words(run, row, of_row)))
    shares = np.nansum(parts_s, axis=(1, 2)) / np.nansum(parts_s)
    return Picture(
        lanes=lanes,
        parts={part: words for (part, words), share in zip(PARTS.items(), shares, strict=True) if share > _LEAST_SHARE},
        ticks=_ticks(run, ends),
        changes=_changes(run, ends),
        width=WIDTH if is_short(run) else math.ceil(run.num_steps / steps),
        height=height,
        labelled=max(1, math.ceil(_LABEL / height)),
        note=_note(run, size, steps),
    )


def _parts_of(run: Run) -> Array:
    """Seconds of each part, by step and rank."""
    uses = dict(zip(USES, run.uses, strict=True))
    absent = np.nan_to_num(run.ranks["absent"]) == 1
    changed = np.zeros(run.num_steps, dtype=bool)
    changed[1:] = (absent[1:] != absent[:-1]).any(axis=1)
    network_s = np.where(changed, 0.0, np.clip(np.nan_to_num(run.network_s), 0.0, None))
    merge_s = np.minimum(uses["useful"], network_s[:, None])
    own = {**uses, "work": uses["useful"] - merge_s, "merge": merge_s}
    return np.stack([own[part] for part in PARTS])


def _parts_in_short(run: Run, reports: Collection[StepReport]) -> Array:
    """The same of a short run, as it is drawn."""
    parts_s = np.zeros((len(PARTS), run.num_steps, run.num_ranks))
    number = {part: at for at, part in enumerate(PARTS)}
    for step, (report, changed) in enumerate(_with_changes(reports)):
        for rank in report.ranks:
            for part, seconds in _parts_in_order(rank, report, changed=changed):
                parts_s[number[part], step, rank.rank] += seconds
    return parts_s


def _in_columns(of_row: Array, steps: int, height: int) -> Iterator[tuple[str, Bar]]:
    """Parts one above the other, in columns of so many steps; their shares, to a pixel, fill the column."""
    for column, at in enumerate(range(0, of_row.shape[1], steps)):
        seconds = np.nansum(of_row[:, at : at + steps], axis=(1, 2))
        if total := seconds.sum():
            tops = np.round(height * (1 - np.cumsum(seconds) / total))
            for part, top, bottom in zip(PARTS, tops.tolist(), [height, *tops.tolist()[:-1]], strict=True):
                if top < bottom:
                    yield part, (column, column + 1, top, bottom)


def _in_order(reports: Collection[StepReport], row: slice, ends: Array, height: int) -> Iterator[tuple[str, Bar]]:
    """Parts one behind the other; ranks of one lane one above the other."""
    scale, each = WIDTH / ends[-1], height / (row.stop - row.start)
    for (report, changed), end in zip(_with_changes(reports), ends.tolist(), strict=True):
        for rank in report.ranks[row]:
            at, top = end - report.whole_s, each * (rank.rank - row.start)
            for part, seconds in _parts_in_order(rank, report, changed=changed):
                left, at = round(at * scale, 1), at + seconds
                if (right := round(at * scale, 1)) > left:
                    yield part, (left, right, top, top + each)


def _with_changes(reports: Collection[StepReport]) -> Iterator[tuple[StepReport, bool]]:
    """Each with whether other ranks were absent in the one before."""
    before = None
    for report in reports:
        yield report, before is not None and before != report.absent_ranks
        before = report.absent_ranks


def _parts_in_order(rank: RankReport, report: StepReport, *, changed: bool) -> Iterator[tuple[str, float]]:
    """Of its work, what a late rank did not bring to an end lies behind what it did. ``changed``: as in `uses_of`."""
    yield "members" if rank.absent else "again", report.again_s
    reach = 0.0 if report.skipped else 1.0 if math.isnan(rank.reach) else min(1.0, max(0.0, rank.reach))
    kept, lost = ("waiting", "waiting") if rank.idle else ("work", "dropped")
    slices = slices_of(rank, report.seconds)
    left_s = reach * sum(seconds for name, seconds in slices if name in _WORK)
    for name, seconds in slices:
        if name in _WORK:
            kept_s = min(seconds, left_s)
            left_s -= kept_s
            yield from ((kept, kept_s), (lost, seconds - kept_s))
        else:
            yield "members" if changed and name in _CHANGE else _OTHERS.get(name, name), seconds


def _paths(bars: Iterator[tuple[str, Bar]]) -> dict[str, str]:
    """Of each part; bars that meet at the same height are one."""
    open_bars, paths = dict[str, Bar](), dict[str, list[str]]()
    for part, bar in bars:
        before = open_bars.get(part)
        if before is not None and before[1] == bar[0] and before[2:] == bar[2:]:
            bar = (before[0], *bar[1:])
        elif before is not None:
            paths.setdefault(part, []).append(_path(before))
        open_bars[part] = bar
    for part, bar in open_bars.items():
        paths.setdefault(part, []).append(_path(bar))
    return {part: "".join(own) for part, own in paths.items()}


def _path(bar: Bar) -> str:
    left, right, top, bottom = bar
    return f"M{left:g} {top:g}H{right:g}V{bottom:g}H{left:g}z"


def _words(run: Run, row: slice, of_row: Array) -> str:
    who = run.replicas.from_to(row.start, row.stop - 1)
    seconds = np.nansum(of_row, axis=(1, 2))
    if not (total := seconds.sum()):
        return who
    shares = [(words, own / total) for words, own in zip(PARTS.values(), seconds.tolist(), strict=True)]
    return f"{who}: " + ", ".join(f"{words} {share:.1%}" for words, share in shares if share > _LEAST_SHARE)


def _ticks(run: Run, ends: Array) -> list[Mark]:
    """The numbers of some steps, where these begin."""
    chosen = np.unique(np.linspace(0, run.num_steps - 1, min(5, run.num_steps)).round().astype(int))
    begins = np.concatenate([[0.0], ends[:-1]])
    return [Mark(_percent(begins[at], ends), f"{int(run.step[at]):,}") for at in chosen.tolist()]


def _changes(run: Run, ends: Array) -> list[Mark]:
    """At most `MAX_MARKS` changes of members in these steps; without ``members.jsonl``, who was absent from when on."""
    begins = np.concatenate([[0.0], ends[:-1]])
    inside = [change for _, change in run.changes if run.step[0] <= change.step <= run.step[-1]]
    told = [(int(np.searchsorted(run.step, change.step)), change.what) for change in inside] or _seen_changes(run)
    kept = told[:: math.ceil(len(told) / MAX_MARKS)] if told else []
    return [Mark(_percent(begins[at], ends), f"step {run.step[at]:.0f}: {what}") for at, what in kept]


def _seen_changes(run: Run) -> list[tuple[int, str]]:
    absent = run.ranks["absent"]
    changes = []
    for at in range(1, run.num_steps):
        for now, what in ((1, "left"), (0, "came back")):
            ranks = np.flatnonzero((absent[at] == now) & (absent[at - 1] == 1 - now)).tolist()
            if ranks:
                changes.append((at, f"{in_words(ranks, run.replicas.row)} {what}"))
    return changes


def _percent(at: float, ends: Array) -> float:
    return round(100 * at / float(ends[-1]), 2)


def _note(run: Run, size: int, steps: int) -> str:
    row, rows = run.replicas.row, run.replicas.rows
    lanes = f"A lane for each {row}" if size == 1 else f"A lane for each {size} {rows}"
    if is_short(run):
        return f"{lanes}, from the run's beginning to its end; the numbers are those of steps."
    each = "a step" if steps == 1 else f"{steps} steps"
    return f"{lanes}; a column is {each}, and a colour as high as its share of their time."
