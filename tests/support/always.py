"""What must hold of every schedule that was run: of each rank's reports, beside what it has seen, and of all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from scales import NUM_LAYERS, own_gradient
from schedule_loop import Plan, Seen, num_batches, plan_of

from straggle import Abstain
from straggle.lab.world.faults import Cut, Freeze, Kill, Stall, StoreAway
from straggle.lab.world.run import Run

SLACK_S = 0.15  # of messages, of asking whether a quorum waits, and of looking at the answer
CLOCK_S = 0.004  # between the loop's look at the clock and the library's
SHARE = 1e-6


def notes_of(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each rank's notes of its steps."""
    for rank, notes in run.notes.items():
        yield from ((rank, note) for note in notes if "step" in note)


def problems_in(schedule: Any, run: Run) -> list[str]:
    """What does not hold."""
    plan = plan_of(schedule, Abstain())
    found = []
    late = dict[int, Any]()  # what each rank has seen in its last step, if another thread has submitted that for it
    for rank, note in notes_of(run):
        words = f"rank {rank}, step {note['step']}: "
        own = [*of_all_rows(note["report"]), *of_own_row(schedule, plan, rank, note, late.get(rank))]
        found += [words + problem for problem in own]
        late[rank] = note["seen"] if note["report"].ranks[rank].stood_in else None
    found += of_views(schedule, run)
    found += of_pools(schedule, run)
    found += of_joins(schedule, run)
    found += of_bounds(schedule, run)
    found += of_lateness(schedule, run)
    found += of_the_store(schedule, run)
    found += of_overruns(schedule, run)
    found += of_deadlines(schedule, run)
    found += of_collectives(schedule, run)
    return found


def of_all_rows(report: Any) -> Iterator[str]:
    """What is missing has a cause, and what a step has in it adds up."""
    for own in report.ranks:
        if own.absent:
            if any(own.weights) or any(own.stages) or own.late or own.cause:
                yield f"rank {own.rank} is absent, and {own}"
            continue
        lacks = not own.idle and min(own.stages) < 1 - SHARE
        if lacks and own.cause is None:
            yield f"rank {own.rank} lacks gradients without a cause: {own.stages}"
        if not lacks and own.late:
            yield f"rank {own.rank} is late and lacks nothing"
        if report.deadline_s == math.inf and own.late and not (own.stood_in or own.idle or report.pool_parts):
            yield f"rank {own.rank} is late without a deadline"
        if own.reach > 1 + SHARE or max(own.stages) > 1 + SHARE:
            yield f"rank {own.rank} has computed more than all: {own.reach}, {own.stages}"
    if report.different_ranks or report.different_tensors:
        yield f"ranks {report.different_ranks} differ in {report.different_tensors}"


def of_own_row(schedule: Any, plan: Plan, rank: int, note: dict[str, Any], before: Any) -> Iterator[str]:
    """What the rank's row says, by what the rank has seen; ``before``: that of the step before, if it was late then."""
    own, report, seen = note["report"].ranks[rank], note["report"], note["seen"]
    if note["counted"] != report.step + 1:
        yield f"the loop's own state has counted {note['counted']} steps"
    if own.stood_in or own.idle:
        return
    if own.weight != seen.weight and not schedule.num_parts and not schedule.joins:
        yield f"weight {own.weight} and not {seen.weight}"
    if seen.work_over_at is None:
        if not own.late and own.cause is None:
            yield "it was stopped, and is not late"
        return
    if seen.left_early:
        return
    if own.late or (own.cause not in (None, "members")) or (own.cause is None and min(own.stages) < 1 - SHARE):
        yield f"it has done all its work, and its row says late={own.late}, {own.cause}, {own.stages}"
    if schedule.num_parts and own.parts != len(seen.done):
        yield f"{own.parts} parts and not {seen.done}"
    if own.cause is None and seen.done and schedule.estimator == "Abstain":
        nonfinite = sum(math.isnan(own_gradient(plan, rank, report.step, layer)) for layer in range(NUM_LAYERS))
        if own.nonfinite != nonfinite:
            yield f"{own.nonfinite} gradients are not finite, and not {nonfinite}"
    if not _stands_still(schedule, rank):
        compute_s = seen.work_over_at - seen.entered_at
        # what it did of the step before when that was already submitted for it is in this row
        within = 0.05 + (before.forward_s + before.backward_s if before is not None else 0.0)
        if not _near(own.forward_s, seen.forward_s, within) or not _near(own.backward_s, seen.backward_s, within):
            yield f"forward {own.forward_s}, backward {own.backward_s}, not {seen.forward_s}, {seen.backward_s}"
        between = own.data_s + own.outside_s + own.optimizer_s + own.loop_end_s + own.collective_s
        if not math.isnan(between) and between < seen.away_s - CLOCK_S:
            yield f"{between} s between steps, and not {seen.away_s}"
        if not math.isnan(own.compute_s) and abs(own.compute_s - compute_s) > CLOCK_S + 1e-3 * compute_s:
            yield f"compute_s={own.compute_s} and not {compute_s}"


def _near(told: float, seen: float, within: float = CLOCK_S) -> bool:
    return math.isnan(told) or abs(told - seen) < within + 1e-3 * seen


def _stands_still(schedule: Any, rank: int) -> bool:
    """Whether its clock may go on between the loop's look at it and the library's."""
    return any(getattr(fault, "rank", rank) == rank for fault in schedule.faults)


def of_views(schedule: Any, run: Run) -> list[str]:
    """There is one chain of views, and nobody is called silent who was not."""
    views, found = dict[int, set[tuple[int, ...]]](), list[str]()
    disturbed = any(isinstance(fault, StoreAway) for fault in schedule.faults)
    may_be_silent = {fault.rank for fault in schedule.faults if isinstance(fault, Cut | Freeze | Kill)}
    may_be_silent |= {schedule.raises[0]} if schedule.raises else set()
    for notes in run.notes.values():
        for note in notes:
            if "generation" not in note:
                continue
            views.setdefault(note["generation"], set()).add(tuple(note["members"]))
            silent = {rank for rank, kind in note["kinds"].items() if kind in ("silent", "ended")}
            if not disturbed and (wrong := silent - may_be_silent):
                found.append(f"ranks {wrong}, which were there, left as {note['kinds']}")
    return found + [f"view {number} is {members}" for number, members in views.items() if len(members) > 1]


def by_step(run: Run) -> dict[int, dict[int, dict[str, Any]]]:
    """By step and rank, the last note of each."""
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, note in notes_of(run):
        steps.setdefault(note["step"], {})[rank] = note
    return steps


def of_pools(schedule: Any, run: Run) -> list[str]:
    """Each part of a pool is computed once, and all of them if nobody was late or left."""
    without_store = any(isinstance(fault, StoreAway | Cut) for fault in schedule.faults)
    if not schedule.num_parts or schedule.joins or without_store:  # who has no more data leaves its sure share
        return []
    found, members = list[str](), set(range(schedule.ranks))
    for step, notes in sorted(by_step(run).items()):
        report = next(iter(notes.values()))["report"]
        present = {own.rank for own in report.ranks if not own.absent}
        gone, members = members - present, present
        if report.pool_parts != schedule.num_parts:
            found.append(f"step {step}: a pool of {report.pool_parts}")
        if gone or any(own.late or own.stood_in or own.cause for own in report.ranks) or present - notes.keys():
            continue
        done = sorted(part for rank in present for part in notes[rank]["seen"].done)
        if done != list(range(schedule.num_parts)) and schedule.leaves == () and not schedule.raises:
            found.append(f"step {step}: parts {done} were computed")
        if sum(own.parts for own in report.ranks if not own.absent) != schedule.num_parts:
            found.append(f"step {step}: {[own.parts for own in report.ranks]} parts in the rows")
    return found


def of_joins(schedule: Any, run: Run) -> list[str]:
    """A loop over `join` is not over before each rank has had its batches."""
    quiet = not schedule.members and schedule.raises is None
    if not quiet or not schedule.joins:
        return []
    return [
        f"rank {rank} has {note['batches_left']} of {num_batches(rank, note['epoch'])} batches left"
        for rank, notes in run.notes.items()
        for note in notes
        if "batches_left" in note
    ]


def of_bounds(schedule: Any, run: Run) -> list[str]:
    """P2: a step ends with the quorum's work, the deadlines of those who lack, and the grace."""
    found = list[str]()
    if (
        schedule.collectives_every
        or schedule.deadline in ("None", "Auto", "Shadow")
        or schedule.num_parts
        or schedule.joins
        or schedule.max_lag == 0
    ):
        return found
    steps = by_step(run)
    for step, notes in sorted(steps.items()):
        before = steps.get(step - 1, {})
        report = next(iter(notes.values()))["report"]
        present = [own.rank for own in report.ranks if not own.absent]
        if report.deadline_s == math.inf or not set(present) <= before.keys() & notes.keys():
            continue
        if present != [own.rank for own in next(iter(before.values()))["report"].ranks if not own.absent]:
            continue  # members changed in it, which takes them as long as they suspect one another
        found += _of_bound(schedule, step, {rank: notes[rank]["seen"] for rank in present}, steps, report)
    return found


def _of_bound(
    schedule: Any, step: int, seen: dict[int, Seen], steps: dict[int, dict[int, dict[str, Any]]], report: Any
) -> list[str]:
    done = sorted(own.work_over_at for own in seen.values() if own.work_over_at is not None and not own.left_early)
    quorum = _quorum(schedule, len(seen))
    if len(done) < quorum:
        return []
    merged_at = sorted(steps[step - 1][rank]["seen"].left_at for rank in seen)
    # the peers' merge before was over when the first of them left it, or a delay later
    base = merged_at[0] + SLACK_S
    late_at = [base + report.deadline_s]
    late_at += [
        own.entered_at + report.deadline_s
        for rank, own in seen.items()
        if own.entered_at <= base + report.deadline_s and not _came_late(steps[step - 1][rank]["report"], rank)
    ]
    until = max([done[quorum - 1], *late_at]) + (0.05 if schedule.grace_s is None else schedule.grace_s) + SLACK_S
    ends = {rank: own for rank, own in seen.items() if own.work_over_at in done and not _disturbed(schedule, rank)}
    if _holds_up(schedule, min(merged_at), max(own.left_at for own in seen.values())):
        return []
    if schedule.max_lag <= step and _lags(steps, step - schedule.max_lag, seen, until - SLACK_S):
        return []
    late = [
        (rank, own.left_at) for rank, own in ends.items() if own.left_at > max(until, own.work_over_at or 0.0) + SLACK_S
    ]
    words = f"merged before at {merged_at}, work over at {done}, late at {late_at}"
    return [f"step {step} ended on ranks and at {late}, and not by {until:.3f} s; {words}"] * bool(late)


def _came_late(report: Any, rank: int) -> bool:
    """Whether its clock began with its peers', as it was stood in for."""
    return bool(report.ranks[rank].stood_in)


def _quorum(schedule: Any, members: int) -> int:
    wanted = 2 if schedule.deadline == "FirstK" else schedule.quorum
    return max(1, members // 2) if wanted is None else min(wanted, members)


def _disturbed(schedule: Any, rank: int) -> bool:
    """Whether something happens to the rank itself, after which its own work is over later."""
    return any(isinstance(own, Stall | Freeze | Cut | Kill) and own.rank == rank for own in schedule.faults)


def _lags(steps: dict[int, dict[int, dict[str, Any]]], step: int, ranks: Iterable[int], until: float) -> bool:
    """Whether some rank has not taken this step by then, so its peers wait for it."""
    there = steps.get(step, {})
    return any(rank in there and there[rank]["seen"].left_at > until for rank in ranks)


def _holds_up(schedule: Any, since: float, until: float) -> bool:
    """Whether something happens between these times that costs the peers more than the deadline."""
    return any(first - 0.5 <= until and last + 4.0 >= since for first, last in _spans(schedule))


def _spans(schedule: Any) -> Iterator[tuple[float, float]]:
    """From when to when members, links or the store are not as usual."""
    for fault in schedule.faults:
        if isinstance(fault, Kill):
            yield fault.at_s, fault.at_s + schedule.suspect_s + 0.02 * fault.turns
            if fault.back_s is not None:
                back_at = fault.at_s + fault.back_s
                yield back_at, back_at + schedule.suspect_s + 0.02 * fault.turns
        elif isinstance(fault, Freeze | Cut):
            yield fault.at_s, fault.at_s + fault.for_s + schedule.suspect_s + 0.02 * fault.turns
        elif isinstance(fault, StoreAway):
            yield fault.at_s, fault.at_s + fault.for_s


def of_lateness(schedule: Any, run: Run) -> list[str]:
    """Nobody is stopped while nobody waits, nor before the deadline; and so many merged steps wait as may."""
    found, steps = list[str](), by_step(run)
    for step, notes in sorted(steps.items()):
        report = next(iter(notes.values()))["report"]
        present = [own for own in report.ranks if not own.absent]
        in_time = sum(not own.late for own in present)
        were = {own.rank for note in steps.get(step - 1, {}).values() for own in note["report"].ranks if not own.absent}
        is_usual = were == {own.rank for own in present}
        if (
            is_usual
            and any(own.late and not own.stood_in for own in present)
            and in_time < _quorum(schedule, len(present))
        ):
            found.append(f"step {step}: ranks {report.late_ranks} are late, and {in_time} are in time")
        if report.step and not any(own.stood_in for own in present) and present and not report.skipped:
            mean = sum(own.rank + 1 for own in present) / len(present)
            if not _near(report.scalars.get("own", math.nan), mean):
                found.append(f"step {step}: the mean of a scalar is {report.scalars}, and not {mean}")
        found += _stopped_early(schedule, step, notes, steps.get(step - 1, {}), report)
        if not schedule.members and 0 < schedule.max_lag <= step:
            first = min(note["seen"].left_at for note in notes.values())
            taken = steps.get(step - schedule.max_lag, {})
            slow = {rank for rank, note in taken.items() if note["seen"].left_at > first + CLOCK_S}
            slow -= {
                fault.rank for fault in schedule.faults if getattr(fault, "turns", 0)
            }  # it may stand between the two
            found += [f"step {step} was merged when ranks {slow} had not taken that {schedule.max_lag} before"] * bool(
                slow
            )
    return found


def _turns(schedule: Any) -> bool:
    return any(getattr(fault, "turns", 0) for fault in schedule.faults)


def _stopped_early(schedule: Any, step: int, notes: Any, before: Any, report: Any) -> Iterator[str]:
    if report.deadline_s == math.inf or schedule.num_parts or schedule.deadline == "Shadow":
        return
    grace_s = schedule.grace_s or 0.0
    for own in report.ranks:
        if own.absent or not own.late or math.isnan(own.compute_s) or not {own.rank} <= before.keys() & notes.keys():
            continue
        last = before[own.rank]["report"].ranks[own.rank]
        if last.late or last.stood_in or last.absent or before[own.rank]["seen"].work_over_at is None:
            continue
        if own.compute_s < report.deadline_s + grace_s * own.stood_in - CLOCK_S:
            yield f"step {step}: rank {own.rank} had {own.compute_s} s, and not {report.deadline_s}, of grace {grace_s}"


def of_the_store(schedule: Any, run: Run) -> list[str]:
    """Who has it is not told to lack it."""
    away = [(fault.at_s, fault.at_s + fault.for_s) for fault in schedule.faults if isinstance(fault, StoreAway | Cut)]
    away += [(fault.at_s, fault.at_s + fault.for_s) for fault in schedule.faults if isinstance(fault, Freeze)]
    if _turns(schedule) or schedule.members:
        return []
    return [
        f"rank {rank}, step {note['step']}: ranks {note['report'].ranks_without_store} are without the store"
        for rank, note in notes_of(run)
        if rank in note["report"].ranks_without_store
        and not note["report"].ranks[rank].stood_in
        and not any(first <= note["at"] and note["seen"].entered_at <= last + 15.0 for first, last in away)
    ]


def of_overruns(schedule: Any, run: Run) -> list[str]:
    """A rank is behind by no more than it took from the end of its last step to the end of one that went without it."""
    told, took = dict[int, float](), dict[int, float]()
    if schedule.members:  # not all of its steps are noted
        return []
    for rank, notes in run.notes.items():
        # it may stand still after the library's end of its step, and before the loop's
        frozen_s = sum(own.for_s for own in schedule.faults if isinstance(own, Freeze | Stall) and own.rank == rank)
        told[rank], took[rank], left_at = 0.0, 0.05 + frozen_s, 0.0
        for note in notes:
            if "step" not in note:
                continue
            own, before = note["report"].ranks[rank], left_at
            left_at = note["seen"].left_at
            told[rank] += own.overrun_s
            took[rank] += own.stood_in * (left_at - before)
    return [f"rank {rank} overran by {told[rank]} s, of {took[rank]}" for rank in told if told[rank] > took[rank]]


def of_deadlines(schedule: Any, run: Run) -> list[str]:
    """A fixed one is that of each step but the first."""
    try:
        fixed = float(schedule.deadline)
    except ValueError:
        fixed = math.inf
    if schedule.deadline not in ("None", "Shadow") and fixed == math.inf:
        return []
    return [
        f"rank {rank}, step {note['step']}: a deadline of {note['report'].deadline_s} s"
        for rank, note in notes_of(run)
        if note["report"].deadline_s != (fixed if note["step"] else math.inf)
    ]


def of_collectives(schedule: Any, run: Run) -> list[str]:
    """Those of the loop's own have the same among the same ranks; nobody to whom nothing happens makes them alone."""
    found, by_step = list[str](), dict[int, list[tuple[int, dict[str, Any]]]]()
    for rank, notes in run.notes.items():
        for note in (note for note in notes if "own_after" in note):
            by_step.setdefault(note["own_after"], []).append((rank, note))
    for step, noted in sorted(by_step.items()):
        alone = [rank for rank, note in noted if {own for own, _ in note["each"]} == {rank} and len(note["each"]) > 1]
        lists = [{own for own, _ in note["each"]} for rank, note in noted if rank not in alone]
        # who was put out before the others had it over has what none of them has
        lost = {rank for rank, _ in noted if any(rank not in ranks for ranks in lists)}
        together = [(rank, note) for rank, note in noted if rank not in lost and rank not in alone]
        for rank, note in together:
            ranks = [own for own, _ in note["each"]]
            if {at for _, at in note["each"]} != {step} or ranks != sorted(set(ranks)) or rank not in ranks:
                found.append(f"rank {rank}, after step {step}: {note['each']} came")
            if note["summed_by"] == len(ranks) and note["total"] != sum(own + 1 for own in ranks):
                found.append(f"rank {rank}, after step {step}: a sum of {note['total']}, of ranks {ranks}")
        same = {(note["total"], note["summed_by"], str(note["each"]), note["repeats"]) for _, note in together}
        if len(same) > 1:
            found.append(f"after step {step} ranks {[rank for rank, _ in together]} have {same}")
        if wrong := (set(alone) | lost) & unharmed(schedule):
            found.append(f"after step {step} ranks {wrong} were alone")
    return found


def unharmed(schedule: Any) -> set[int]:
    """Ranks that are as quick as others, and to which nothing happens."""
    harmed = {getattr(fault, "rank", -1) for fault in schedule.faults} | {rank for rank, _, _ in schedule.away}
    harmed |= {rank for rank, slow in enumerate(schedule.slow) if slow > 1} | {(schedule.raises or (-1, 0))[0]}
    return set(range(schedule.ranks)) - harmed


def members_of(run: Run) -> set[int]:
    """The last view that was seen."""
    views = [note for notes in run.notes.values() for note in notes if "generation" in note]
    return set(max(views, key=lambda note: note["generation"])["members"]) if views else set(range(len(run.results)))


def chained(notes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each note of a step, and the one that follows."""
    steps = [note for note in notes if "step" in note]
    yield from itertools.zip_longest(steps, steps[1:])
