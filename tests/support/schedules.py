"""Schedules of a simulated world: jobs and faults drawn by a number, and what must hold of each.

``python tests/support/schedules.py [seeds=N | minutes=M] [first=SEED] [most=FAILURES] [shorten=yes]`` runs them one
after another; ``these=SEED,SEED`` come first, then, with ``directed=yes``, those written by hand, and
``kind=members`` leaves out others. What fails is printed as a line
of a test, as short as it can be made.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sharded_schedules
import torch
from always import chained, members_of, notes_of, problems_in, unharmed
from directed import DIRECTED
from scales import at_random
from schedule_loop import Loop, OwnError

from straggle import (
    Abstain,
    AutoDeadline,
    DropBudget,
    Elastic,
    FirstK,
    FixedDeadline,
    JobDone,
    LastMerged,
    LastOwn,
    LateHandling,
    Merge,
    MovingAverage,
    OptimizerMomentum,
    PeerFailed,
    QuantileDeadline,
    Shadow,
    Zero,
)
from straggle.backward import stages
from straggle.lab.world.faults import Clock, Cut, Freeze, Kill, Notice, Stall, StoreAway
from straggle.lab.world.run import Broken, Fault, Run, run_world
from straggle.members.views.membership import TooFewRanks

LONGEST_S = 400.0
DECAY = 0.5
WRAPPED_S = 0.1  # all ranks have wrapped the model by then


@dataclass(frozen=True)
class Schedule:
    """One job, and what happens to it. Its ``repr`` makes it again.

    Options are words here, for which `options_of` has the objects: these have a memory, which no two runs may share.
    """

    seed: int
    ranks: int = 3
    steps: int = 12
    members: bool = False
    deadline: str = "0.15"
    estimator: str = "Abstain"
    granularity: str = "stage"
    quorum: float | None = None
    max_lag: int | None = 8
    wire_dtype: str | None = None
    check_every: int = 10
    num_microbatches: int = 1
    num_parts: int = 0
    weighs: bool = False
    joins: bool = False
    in_buckets: bool = True
    nan: float = 0.0
    slow: tuple[float, ...] = ()  # how many times as long each rank's layers take
    away: tuple[tuple[int, int, float], ...] = ()  # a rank, a step, and seconds before it that are no step's
    raises: tuple[int, int] | None = None  # a rank, and the step in which its code does
    leaves: tuple[tuple[int, int], ...] = ()  # ranks, and steps whose block they leave before a pass
    collectives_every: int = 0  # steps until the loop calls collectives of its own
    zero_every: int = 1  # steps until the loop zeros gradients
    buffers: str = "none"  # the layers have some, which are merged so
    grace_s: float | None = 0.02
    suspect_s: float = 2.0
    absence_gain: float = 1.1
    give_up_s: float = 300.0
    backend: str = "gloo"
    faults: tuple[Fault, ...] = ()

    def options(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For the model."""
        deadlines = {
            "None": None,
            "Quantile": QuantileDeadline(0.6, slack=1.2),
            "Auto": AutoDeadline(),
            "FirstK": FirstK(2),
            "Shadow": Shadow(QuantileDeadline(0.6, slack=1.2, warmup_steps=2)),
            "DropBudget": DropBudget(FixedDeadline(0.08), 0.1, window=20),
        }
        estimators = {
            "Abstain": Abstain(),
            "Zero": Zero(),
            "LastMerged": LastMerged(0.5),
            "MovingAverage": MovingAverage(DECAY),
            "LastOwn": LastOwn(0.5),
        }
        late = {"max_lag": self.max_lag, "granularity": self.granularity}
        merge = {"check_every": self.check_every, "wire_dtype": self.wire_dtype}
        if self.quorum is not None:
            late["quorum"] = self.quorum
        deadline = deadlines[self.deadline] if self.deadline in deadlines else FixedDeadline(float(self.deadline))
        return {
            "deadline": deadline,
            "estimator": estimators.get(self.estimator) or OptimizerMomentum(optimizer, 0.5),
            "late_handling": LateHandling(grace_s=self.grace_s, give_up_s=self.give_up_s, **late),
            "merge": Merge("mean" if self.buffers == "none" else self.buffers, **merge),
            "members": Elastic(1, self.suspect_s, self.absence_gain) if self.members else None,
            "links": False,
        }


def directed(number: int) -> Schedule:
    """One that is written by hand, and not drawn: -1 is the first."""
    return Schedule(number, **DIRECTED[-number - 1])


def draw(seed: int) -> Schedule:
    """Schedule number ``seed``: few ranks and faults at first, and now and then more."""
    chance = random.Random(seed)
    pick, ranks = chance.choice, chance.choice([2, 3, 3, 3, 4, 4, 6])
    members = chance.random() < 0.5
    work = pick(["plain", "plain", "micro-batches", "pool"])
    granularities = ["stage", "stage", "step"] + ["microbatch"] * (work == "micro-batches")
    steps = pick([6, 12, 12, 25])
    estimator = pick(["Abstain", "Abstain", "Zero", "LastMerged", "MovingAverage"])
    schedule = Schedule(
        seed,
        ranks,
        steps,
        members,
        pick(["None", "0.05", "0.05", "0.12", "0.15", "Quantile", "Auto", "FirstK"]),
        estimator,
        pick(granularities),
        wire_dtype=pick([None, None, None, "bfloat16"]),
        check_every=pick([1, 3, 10]),
        max_lag=pick([1, 2, 8, 8]),
        num_parts=pick([ranks, 5, 8]) if work == "pool" else 0,
        num_microbatches=pick([2, 3]) if work == "micro-batches" else 1,
        weighs=pick([False, True]),
        joins=pick([False, False, True]),
        in_buckets=pick([False, True]),
        nan=pick([0.0, 0.0, 0.05]) if estimator == "Abstain" else 0.0,
        slow=tuple(pick([1.0, 1.0, 1.0, 1.5, 4.0]) for _ in range(ranks)),
        away=tuple(
            (chance.randrange(ranks), chance.randrange(steps), pick([0.1, 0.5, 3.0, 20.0]))
            for _ in range(pick([0, 0, 1, 2]))
        ),
    )
    if chance.random() < 0.15:
        schedule = replace(schedule, raises=(chance.randrange(ranks - 1), chance.randrange(steps)))
    length_s = steps * 0.1 * schedule.num_microbatches * max(1, schedule.num_parts / ranks)
    faults = tuple(_fault(chance, schedule, length_s) for _ in range(pick([0, 1, 1, 2, 2, 3, 5])))
    if not members and any(isinstance(fault, Kill) for fault in faults):
        # who is killed before it has wrapped the model is waited for as long as the process group's limit, 30 minutes
        faults = tuple(replace(fault, at_s=max(fault.at_s, WRAPPED_S)) for fault in faults)
    return _with_more(random.Random(f"more {seed}"), replace(schedule, faults=faults), length_s)


def _with_more(chance: random.Random, schedule: Schedule, length_s: float) -> Schedule:
    """What fewer schedules have: each of it in a few of them."""

    def now_and_then(of_all: float, **given: Any) -> None:
        nonlocal schedule
        if chance.random() < of_all:
            schedule = replace(schedule, **given)

    pick, ranks = chance.choice, schedule.ranks
    turns = tuple(
        replace(fault, turns=chance.randrange(1, 200)) if hasattr(fault, "turns") and chance.random() < 0.5 else fault
        for fault in schedule.faults
    )
    now_and_then(0.9, faults=turns)
    now_and_then(0.25, buffers=pick(["mean", "mean", "rank0"]))
    now_and_then(0.3, zero_every=pick([2, 3]))
    now_and_then(0.15, quorum=pick([1, ranks - 1, ranks]))
    now_and_then(0.05, max_lag=0)
    now_and_then(0.15, deadline=pick(["Shadow", "DropBudget", "Auto", "FirstK"]))
    now_and_then(0.1, estimator=pick(["LastOwn", "OptimizerMomentum"]), nan=pick([0.0, 0.05]))
    now_and_then(0.15, grace_s=pick([None, 0.0, 0.1]))
    now_and_then(0.15, suspect_s=pick([0.5, 1.0, 5.0]))
    now_and_then(0.3, absence_gain=math.inf)
    now_and_then(0.2, give_up_s=18.0)  # shorter than one may be away between two steps, and longer than in one
    if not schedule.num_parts:
        leaves = tuple((chance.randrange(ranks), chance.randrange(schedule.steps)) for _ in range(pick([1, 2, 4])))
        now_and_then(0.15, leaves=leaves)
    clocks = tuple(
        Clock(rank, round(chance.uniform(0, 1e5), 3), 1 + chance.uniform(-1e-4, 1e-4)) for rank in range(ranks)
    )
    now_and_then(0.25, faults=schedule.faults + clocks)
    at_s = round(chance.uniform(0.0, length_s), 3)
    if schedule.members:
        now_and_then(0.15, faults=(*schedule.faults, Notice(chance.randrange(ranks - 1), at_s)))
        if all(step for _, step, _ in schedule.away):  # or its members may not know yet that all have wrapped the model
            now_and_then(0.1, faults=(*schedule.faults, StoreAway(at_s + 1, pick([0.05, 1.0, 4.0]), empties=True)))
    now_and_then(0.02, steps=pick([60, 100, 150]))
    if schedule.members:
        now_and_then(0.25, collectives_every=pick([1, 1, 3]))
        now_and_then(0.3, backend="cuda:nccl2")
    return schedule


def _fault(chance: random.Random, schedule: Schedule, length_s: float) -> Fault:
    """The last rank is never killed, and never frozen for so long that it is put out."""
    pick, at_s = chance.choice, round(chance.uniform(0.0, length_s), 3)
    any_rank, not_last = chance.randrange(schedule.ranks), chance.randrange(schedule.ranks - 1)
    for_s = round(pick([0.02, 0.1, 0.3, 1.0]) * chance.uniform(0.5, 2), 3)
    kinds: list[Any] = [
        lambda: Stall(any_rank, at_s, pick([for_s, 3.0, 15.0])),
        lambda: Freeze(any_rank, at_s, for_s),
        lambda: StoreAway(at_s, pick([for_s, 4.0, 12.0])),
    ]
    if schedule.members:
        kinds += 2 * [
            lambda: Kill(not_last, at_s, pick([0.01, 0.5, 2.0, 6.0])),
            lambda: Freeze(not_last, at_s, pick([1.9, 2.2, 5.0])),
        ]
        kinds.append(lambda: Cut(not_last, at_s, pick([for_s, 3.0, 8.0])))
    else:
        kinds.append(lambda: Cut(any_rank, at_s, for_s))
        if chance.random() < 0.2:
            kinds.append(lambda: Kill(any_rank, at_s))
    return pick(kinds)()


def run(schedule: Schedule) -> Run:
    """Run it. Raises `Broken`."""
    before = stages.BUCKET_BYTES
    if schedule.in_buckets:
        stages.BUCKET_BYTES = 1
    try:
        return run_world(
            lambda rank: Loop(rank, schedule).run(),
            ranks=schedule.ranks,
            seed=schedule.seed,
            faults=schedule.faults,
            longest_s=LONGEST_S,
            end_s=20.0,
            backend=schedule.backend,
        )
    finally:
        stages.BUCKET_BYTES = before


def problems_of(schedule: Schedule) -> list[str]:
    """What did not hold; nothing if all did."""
    try:
        done = run(schedule)
    except Broken as error:
        return [str(error)]
    found = []
    killed = {fault.rank for fault in schedule.faults if isinstance(fault, Kill) and fault.back_s is None}
    fails = (killed or schedule.raises is not None) and not schedule.members
    state_is_lost = schedule.members and members_of(done) <= _may_end(schedule)
    state_is_lost |= schedule.members and _ended_unheard(schedule, done)
    fails = fails or (state_is_lost and any(isinstance(result, TooFewRanks) for result in done.results))
    for rank, result in enumerate(done.results):
        if isinstance(result, list):
            found += [f"rank {rank}: {problem}" for problem in result]
        elif result is None and rank in killed:
            continue
        elif isinstance(result, JobDone) and schedule.members:
            continue  # it came back too late
        elif not ((fails and isinstance(result, PeerFailed)) or isinstance(result, OwnError)):
            found.append(f"rank {rank}: {result!r} at {_place_of(result)}")
    parameters, told = dict[int, set[str]](), dict[tuple[int, int], set[str]]()
    for notes in done.notes.values():
        for note, following in chained(notes):
            # also of a rank that is cut off in it: it has the step only if all have its gradients
            is_last = note["step"] == schedule.steps - 1
            if is_last or (following and following["step"] == note["step"] + 1):
                parameters.setdefault(note["step"], set()).add(note["parameters"])
                for number, words in enumerate(note["told"]):
                    told.setdefault((note["step"], number), set()).add(words)
    found += [f"step {step}: replicas differ" for step, own in sorted(parameters.items()) if len(own) > 1]
    found += [f"step {step}: reports differ: {own}" for (step, _), own in sorted(told.items()) if len(own) > 1]
    lost = {rank for _, note in notes_of(done) for rank in note["absent"]}
    found += [f"rank {rank} was lost, to which nothing happened" for rank in sorted(lost & unharmed(schedule))]
    if not fails:
        most = max((note["step"] for _, note in notes_of(done)), default=-1)
        found += [f"the job ended after step {most} of {schedule.steps}"] * (most != schedule.steps - 1)
    return found + problems_in(schedule, done)


def _ended_unheard(schedule: Schedule, done: Run) -> bool:
    """Whether the store came back empty after some last step: nobody tells who was out then that all ended."""
    ends = [note["seen"].left_at for _, note in notes_of(done) if note["step"] == schedule.steps - 1]
    emptied = [own.at_s + own.for_s for own in schedule.faults if isinstance(own, StoreAway) and own.empties]
    return bool(ends and emptied) and max(emptied) > min(ends)


def _may_end(schedule: Schedule) -> set[int]:
    """Ranks whose processes may end before the job does."""
    ends = {fault.rank for fault in schedule.faults if isinstance(fault, Kill | Notice)}
    return ends | ({schedule.raises[0]} if schedule.raises else set())


def _has_turns(fault: Any) -> bool:
    return getattr(fault, "turns", 0) > 0


def _with_fault(schedule: Schedule, number: int, fault: Any) -> Schedule:
    return replace(schedule, faults=(*schedule.faults[:number], fault, *schedule.faults[number + 1 :]))


def _place_of(error: object) -> str:
    """Where it was raised, innermost first."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))[:-6:-1]
    return " < ".join(f"{at.name} ({Path(at.filename).name}:{at.lineno})" for at in frames)


def shortened(schedule: Schedule, limit_s: float = 120.0) -> Schedule:
    """The same failure with as few faults and options as can be found."""
    until, plain = time.monotonic() + limit_s, Schedule(schedule.seed)

    def shorter(own: Schedule) -> list[Schedule]:
        fewer = [replace(own, faults=own.faults[:n] + own.faults[n + 1 :]) for n in range(len(own.faults))]
        fewer += [replace(own, away=own.away[:n] + own.away[n + 1 :]) for n in range(len(own.away))]
        names = ("estimator", "granularity", "wire_dtype", "num_microbatches", "num_parts", "weighs", "joins", "nan")
        names += (
            "slow",
            "in_buckets",
            "check_every",
            "max_lag",
            "deadline",
            "raises",
            "leaves",
            "zero_every",
            "collectives_every",
        )
        names += ("buffers", "grace_s", "suspect_s", "absence_gain", "quorum", "give_up_s", "backend")
        fewer += [
            _with_fault(own, n, replace(fault, turns=0)) for n, fault in enumerate(own.faults) if _has_turns(fault)
        ]
        fewer += [replace(own, **{n: getattr(plain, n)}) for n in names if getattr(own, n) != getattr(plain, n)]
        if own.steps > 3:
            fewer.append(replace(own, steps=own.steps // 2))
        return fewer

    found = True
    while found and time.monotonic() < until:
        found = False
        for other in shorter(schedule):
            if time.monotonic() < until and problems_of(other):
                schedule, found = other, True
                break
    return schedule


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


KINDS: dict[str, Callable[[Schedule], object]] = {
    "": lambda _: True,
    "members": lambda schedule: schedule.members and schedule.faults,
    "pool": lambda schedule: schedule.num_parts,
    "collectives": lambda schedule: schedule.collectives_every,
    "join": lambda schedule: schedule.joins,
    "nccl": lambda schedule: schedule.backend != "gloo",
    "sharded": lambda _: True,
}
_SHARDED_EVERY = 10  # of the seeds, if no kind is given


@dataclass(frozen=True)
class _Given:
    """What the command was given."""

    seeds: Iterable[int]
    limit_s: float
    most: float
    shortens: bool
    kind: str


def _given(words: list[str]) -> _Given:
    """What the words say. Raises ``ValueError`` for another word."""
    given: dict[str, Any] = {"most": 1.0}
    for word in words:
        key, _, value = word.partition("=")
        try:
            given[key] = _WORDS[key](value)
        except (KeyError, ValueError):
            raise ValueError(word) from None
    these, first = given.get("these", []), given.get("first", random.SystemRandom().randrange(10**9))
    kind = KINDS[given.get("kind", "")]
    if "directed" in given:
        by_hand = range(-1, -1 - len(DIRECTED), -1)
        these = [*these, *(number for number in by_hand if number not in these and kind(directed(number)))]
    drawn = (seed for seed in itertools.count(first) if seed not in these and kind(draw(seed)))
    seeds = itertools.islice(itertools.chain(these, drawn), given.get("seeds", 10**9))
    limit_s = 60 * given.get("minutes", math.inf if "seeds" in given else 1)
    return _Given(seeds, limit_s, given["most"], "shorten" in given, given.get("kind", ""))


def _one_of(words: Iterable[str]) -> Callable[[str], str]:
    def chosen(word: str) -> str:
        if word not in words:
            raise ValueError(word)
        return word

    return chosen


_WORDS: dict[str, Callable[[str], Any]] = {
    "seeds": int,
    "minutes": float,
    "first": int,
    "most": float,
    "shorten": _one_of(["yes"]),
    "these": lambda value: list(map(int, value.split(","))),
    "kind": _one_of(KINDS),
    "directed": _one_of(["yes"]),
}


def _drawn(seed: int, kind: str) -> tuple[Any, Callable[[Any], list[str]]]:
    """The schedule of this seed, and what says what does not hold of it; some are of sharded replicas."""
    if seed < 0:
        return directed(seed), problems_of
    if kind == "sharded" or (not kind and seed % _SHARDED_EVERY == 0):
        return sharded_schedules.draw(seed), sharded_schedules.problems_of
    return draw(seed), problems_of


def main(words: list[str]) -> int:
    """The command."""
    try:
        given = _given(words)
    except ValueError as error:
        _say(
            f"{error}: give seeds=N, minutes=M, first=SEED, these=SEED,SEED, directed=yes, "
            f"kind={'|'.join(filter(None, KINDS))}, most=FAILURES or shorten=yes"
        )
        return 2
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded lives for ever: a collection need not walk through it
    began, faults, failed, seeds = time.monotonic(), Counter[str](), 0, list[int]()
    for seed in given.seeds:
        if time.monotonic() - began >= given.limit_s or failed >= given.most:
            break
        seeds.append(seed)
        schedule, find = _drawn(seed, given.kind)
        faults.update(type(fault).__name__ for fault in schedule.faults)
        found = find(schedule)
        at_random.cache_clear()
        if len(seeds) % 20 == 0:
            gc.collect()
        if found:
            failed += 1
            _say(f"seed {seed}: {found[0][:1500]}\n  {schedule!r}")
            if given.shortens and isinstance(schedule, Schedule):
                _say(f"  shorter: {shortened(schedule)!r}")
    took, first = time.monotonic() - began, next(iter(seeds), None)
    _say(f"{len(seeds)} schedules from seed {first} in {took:.0f} s, {failed} failed; faults: {dict(faults)}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
