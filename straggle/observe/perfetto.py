"""A run in the Trace Event Format, which Perfetto opens: ranks as tracks, phases, waits and merges as slices.

Source: "Trace Event Format" (Google, 2016), the events X (a slice), i (an instant), C (a counter) and M (a name). Times
are whole microseconds from the run's beginning. A track of the job has its steps, another the changes of its members.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from straggle.observe.members import read_members
from straggle.observe.numbers.reader import NO_TRACE, TRACE, files_of
from straggle.observe.stuck import read_stuck
from straggle.report import PHASES, MembersReport, RankReport, StepReport, StuckReport, finite_or_none

Event: TypeAlias = dict[str, Any]
JOB, RANKS = 1, 2  # processes; Perfetto has a meaning of its own for 0
_STEPS, _MEMBERS = 1, 2  # tracks of the job
_LISTS = ("stages", "stage_s", "weights")


def write_perfetto(run_dir: Path, path: Path) -> Path:
    """Write a run's steps to ``path``, and return that; a name that ends in ``.gz`` is compressed.

    Raises ``ValueError`` if the run has no trace, or no step.
    """
    if (files := files_of(run_dir)) is None:
        raise ValueError(NO_TRACE.format(run_dir / TRACE))
    events = run_events(files.timed(), read_members(run_dir), read_stuck(run_dir))
    first = next(events, None)
    if first is None:
        raise ValueError(f"{run_dir}: there is no complete step in it yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")  # whoever opens it never has half a trace
    try:
        with gzip.open(half, "wt") if path.suffix == ".gz" else half.open("w") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n' + json.dumps(first))
            file.writelines(f",\n{json.dumps(event, separators=(',', ':'))}" for event in events)
            file.write("\n]}\n")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path


def run_events(
    steps: Iterable[tuple[StepReport, float]],
    changes: Sequence[tuple[float, MembersReport]] = (),
    stuck: Sequence[tuple[float, StuckReport]] = (),
) -> Iterator[Event]:
    """The events of these steps, each with when it ended in seconds since 1970 (NaN: not known); none without a step.

    A step begins where the one before ended, or later, if its own end says so: ranks were started again. What happened
    to members is where its time says, or, if the steps' times are not known, at the beginning of its step.
    """
    origin = math.nan
    end_s, num_ranks, begins = 0.0, 0, dict[int, float]()
    noted = {change.step for _, change in changes} | {one.step for _, one in stuck}
    noun = next((change.of for _, change in changes), "rank")
    for report, ended_at in steps:
        if num_ranks == 0:
            yield from _names(JOB, "job", {_STEPS: "steps", _MEMBERS: "members"})
        if len(report.ranks) > num_ranks:  # more after a resume
            noun = "replica" if report.slowest_ranks else noun
            tracks = {rank + 1: f"{noun} {rank}" for rank in range(num_ranks, len(report.ranks))}
            yield from _names(RANKS, f"{noun}s", tracks)
            num_ranks = len(report.ranks)
        seconds = report.seconds if math.isfinite(report.seconds) else 0.0
        origin = ended_at - seconds - report.again_s if math.isnan(origin) else origin
        known_s = ended_at - origin - seconds
        begin_s = end_s + report.again_s if math.isnan(known_s) else max(end_s, known_s)
        if again_s := min(report.again_s, begin_s - end_s):
            yield _slice(JOB, _STEPS, f"step {report.step}, made again", begin_s - again_s, again_s)
        end_s = begin_s + seconds
        if report.step in noted:
            begins.setdefault(report.step, begin_s)
        yield from step_events(report, begin_s)

    def at(when: float, step: int) -> float:
        known = when - origin if math.isfinite(origin) else begins.get(step, end_s)
        return min(max(0.0, known), end_s) if num_ranks else 0.0

    if num_ranks:
        yield from _member_events([(at(when, own.step), own) for when, own in changes])
        for when, one in stuck:
            name = f"{one.where}; goes on" if one.over else f"stuck: {one.where}" if not one.stood_in else one.where
            yield _instant(RANKS, one.rank + 1, name, at(when, one.step), one.as_dict())


def step_events(report: StepReport, begin_s: float) -> Iterator[Event]:
    """A step that began then, and what each rank did: its phases, its wait, and the merge until the step's end."""
    seconds = report.seconds if math.isfinite(report.seconds) else 0.0
    of_step = {"dropped_share": report.dropped_share, "network_s": report.network_s, "deadline_s": report.deadline_s}
    own = {**of_step, "skipped": report.skipped, **report.scalars}
    yield _slice(JOB, _STEPS, f"step {report.step}", begin_s, seconds, own)
    if math.isfinite(report.dropped_share):
        yield _counter("gradients dropped", begin_s, "%", 100 * report.dropped_share)
    if math.isfinite(report.deadline_s):
        yield _counter("deadline", begin_s, "ms", 1e3 * report.deadline_s)
    for rank in report.ranks:
        yield from _rank_events(rank, report.step, begin_s, seconds)


def slices_of(rank: RankReport, seconds: float) -> list[tuple[str, float]]:
    """What a rank did in a step of this length, in order, each with its seconds: together they are no longer than it.

    What is left after the phases and the wait is the merge. A rank that was absent did nothing.
    """
    if rank.absent:
        return [("absent", seconds)]
    left_s, parts = seconds, list[tuple[str, float]]()
    for name in (*PHASES, "wait"):
        own_s = getattr(rank, f"{name}_s")
        own_s = min(left_s, max(0.0, own_s)) if math.isfinite(own_s) else 0.0
        left_s -= own_s
        parts.append((name, own_s))
    return [(name, own_s) for name, own_s in (*parts, ("merge", left_s)) if own_s > 0]


def _rank_events(rank: RankReport, step: int, begin_s: float, seconds: float) -> Iterator[Event]:
    track, at_s, end_s = rank.rank + 1, begin_s, begin_s + seconds
    row = {name: value for name, value in asdict(rank).items() if name not in _LISTS}
    state = "no data" if rank.idle else f"late in {rank.cause}" if rank.late else ""
    yield _slice(RANKS, track, f"step {step}" + (f", {state}" if state else ""), begin_s, seconds, row)
    worked_s = begin_s
    for name, own_s in slices_of(rank, seconds):
        own_s = min(own_s, end_s - at_s)  # sums are rounded: none leaves its step
        yield _slice(RANKS, track, name, at_s, own_s)
        at_s += own_s
        worked_s = at_s if name in PHASES else worked_s
    if rank.late:
        what = "stood in for" if rank.stood_in else "cut"
        yield _instant(RANKS, track, f"{what} in {rank.cause}", worked_s, {"reach": rank.reach})
    if rank.nonfinite:
        yield _instant(RANKS, track, "gradients not finite", at_s, {"parameters": rank.nonfinite})


def _member_events(changes: Sequence[tuple[float, MembersReport]]) -> Iterator[Event]:
    """Each view, in the time in which the others had no members to merge with, and marks on the ranks' own tracks."""
    end_s = 0.0
    for at_s, change in changes:
        at_s = max(end_s, at_s)  # slices of one track lie one behind the other
        begin_s = max(end_s, at_s - change.seconds)
        of = {"members": len(change.ranks), "of": change.world_size, "step": change.step}
        yield _slice(JOB, _MEMBERS, f"view {change.generation}: {change.what}", begin_s, at_s - begin_s, of)
        end_s = at_s
        for what, ranks in (("left", change.left), ("joined", change.joined)):
            for rank, why in ranks.items():
                yield _instant(RANKS, int(rank) + 1, f"{what}: {why}", at_s)


def _names(process: int, name: str, tracks: dict[int, str]) -> Iterator[Event]:
    yield _name(process, 0, "process_name", {"name": name})
    yield _name(process, 0, "process_sort_index", {"sort_index": process})
    for track, own in tracks.items():
        yield _name(process, track, "thread_name", {"name": own})
        yield _name(process, track, "thread_sort_index", {"sort_index": track})


def _name(process: int, track: int, what: str, args: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": args}


def _slice(process: int, track: int, name: str, begin_s: float, seconds: float, args: Any = None) -> Event:
    begin, end = _us(begin_s), _us(begin_s + seconds)  # neighbours meet, and none leaves its step
    own = {} if args is None else {"args": finite_or_none(args)}
    place = {"pid": process, "tid": track, "ts": begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": "straggle", **place, **own}


def _instant(process: int, track: int, name: str, at_s: float, args: Any = None) -> Event:
    own = {} if args is None else {"args": finite_or_none(args)}
    return {"ph": "i", "s": "t", "name": name, "cat": "straggle", "pid": process, "tid": track, "ts": _us(at_s), **own}


def _counter(name: str, at_s: float, unit: str, value: float) -> Event:
    return {"ph": "C", "pid": JOB, "tid": _STEPS, "name": f"{name} ({unit})", "ts": _us(at_s), "args": {unit: value}}


def _us(seconds: float) -> int:
    """Whole ones: viewers add lengths to beginnings, and a sum that is rounded would put neighbours in each other."""
    return round(1e6 * seconds)
