"""The answer as text: what to do, why, and the table; every sentence is of the one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill

from straggle.advise.gain import Gain
from straggle.advise.other_shares import KEYS, BySpeed
from straggle.advise.pulled import KEYS as PULLED
from straggle.advise.pulled import Pulled
from straggle.advise.slow import HELD_UP, MATTERS, UNUSUAL, Slowness, SlowRank
from straggle.advise.timings import Timings
from straggle.advise.verdict import Choice, Verdict
from straggle.observe.findings import PLACES
from straggle.observe.numbers.intervals import LEVEL, Interval
from straggle.observe.numbers.registry import seconds_shown as shown
from straggle.observe.numbers.replicas import Replicas
from straggle.report import in_words, text_table

WIDTH = 90  # of a line
_NAME = 28  # of a row's name; a longer one has a line of its own
_NAMED = 0.005  # of a step, from which on a phase of it is named
_PART = 0.1  # of a step, from which on the network, or collectives of the loop's own, are worth a sentence
_PLACES: Mapping[str, str] = {
    **PLACES,
    "pauses": "in pauses of its process (garbage collection, or stopped from outside)",
}
_GAP = "between the optimizer's step and the next pass (loading, by what is no DataLoader, or the loop's end)"
_IN_PARTS = {2: "half", 4: "a quarter", 8: "an eighth", 16: "a sixteenth"}
_LOOP = """\
  import straggle
  model = straggle.StagedDataParallel(model)
  with model.step() as step:
      for x, y in step.pull(parts):  # the micro-batches of all ranks, the same on each
          criterion(model(x), y).backward()"""


def text_of(
    timings: Timings,
    slowness: Slowness,
    judged: Verdict,
    *,
    by_speed: BySpeed | None,
    pulled: Pulled | None,
    best: Gain | None,
    first: int,
    sentences: tuple[str, ...],
    of_train: bool,
) -> str:
    """``first``: the position of the first step of the predictions; ``of_train``: keys are told in place of code."""
    if timings.num_ranks == 1:
        return _filled(_of_one(timings)) + "\n"
    does = _Does(timings, slowness, judged, by_speed, pulled, best, of_train)
    parts = [*does.first(), *(_about(rank, timings, judged) for rank in slowness.ranks), *_summed_up(slowness, timings)]
    if timings.is_predictable:
        parts += [_table(judged, timings, first), *does.otherwise()]
    if timings.unknown:
        parts.append("\n".join(("What these files do not tell:", *(f"- {one}" for one in timings.unknown))))
    if sentences:
        parts.append("\n".join(("As the run was:", *(f"- {one}" for one in sentences))))
    return "\n\n".join(map(_filled, parts)) + "\n"


def _filled(text: str) -> str:
    """With lines that are not too long; lines that are indented stay as they are."""
    return "\n".join(
        line if line.startswith(" ") or len(line) <= WIDTH else fill(line, WIDTH, break_long_words=False)
        for line in text.split("\n")
    )


class _Does:
    """What to do, in words."""

    def __init__(
        self,
        timings: Timings,
        slowness: Slowness,
        judged: Verdict,
        by_speed: BySpeed | None,
        pulled: Pulled | None,
        best: Gain | None,
        of_train: bool,
    ) -> None:
        self._timings, self._slowness, self._judged = timings, slowness, judged
        self._by_speed, self._pulled, self._best, self._of_train = by_speed, pulled, best, of_train

    def first(self) -> Iterator[str]:
        """The verdict, how it is done, and what the run was."""
        if not self._timings.is_predictable:
            yield f"Do this: {_of_sharded(self._slowness, self._timings)}"
        elif (chosen := self._judged.chosen) is None:
            yield f"Do this: {self._nothing()}"
        else:
            yield f"Do this: {self._do(chosen)}. {_brings(chosen.gain, self._timings.replicas)}"
            yield self._how(chosen)
        yield f"Why: {_headline(self._timings, self._slowness)}"

    def otherwise(self) -> Iterator[str]:
        """What else there is to do."""
        chosen = self._judged.chosen
        if chosen is not None and chosen.kind != "deadline" and self._best is not None:
            yield f"Or with a deadline, which drops gradients. {self._with_deadline(self._best)}"
        if self._pulled is None or not self._pulled.is_worth_it or (chosen is not None and chosen.kind == "pull"):
            return
        number = self._pulled.num_microbatches
        if self._pulled.accumulates:
            yield (
                f"Or let the ranks draw the {number} micro-batches of a step from one pool: "
                f"{self._drawn(self._pulled)}. To do that (docs/rebalance.md):\n{self._pull(number)}"
            )
        else:
            yield (
                "Or by drawing: a step has one micro-batch on each rank, so there is nothing to draw. With "
                f"{number} in a step, each {_IN_PARTS[number]} as large, ranks could draw them from one pool. Then "
                f"{self._drawn(self._pulled)}, as far as a pass takes time by its samples. To use it, with smaller "
                f"batches (docs/rebalance.md):\n{self._pull(number)}"
            )

    def _nothing(self) -> str:
        of = self._timings.replicas
        if self._judged.kind == "keep":
            return "go on as in this run: nothing here is sure to bring clearly more than it did."
        if self._judged.always:
            whom = of.all_of([rank.rank for rank in self._judged.always])
            return f"look at the machine of {whom}, and change nothing else: {_why_nothing(self._slowness, of)}."
        return f"change nothing, and wait for all {of.rows}, as DDP does: {_why_nothing(self._slowness, of)}."

    def _do(self, chosen: Choice) -> str:
        if chosen.kind == "without":
            return f"start the job without {in_words(chosen.ranks)}, and give the samples to the others"
        if chosen.kind == "deal":
            assert self._by_speed is not None
            rank = self._judged.always[0].rank
            share = f"rank {rank} then has {self._by_speed.shares[rank]:.0%} of an equal share"
            return f"deal the samples out by speed ({share})"
        if chosen.kind == "pull":
            assert self._pulled is not None
            return f"let the ranks draw the {self._pulled.num_microbatches} micro-batches of a step from one pool"
        return f"train with {_name(chosen.gain).replace(', LateLoader', ', and load by LateLoader')}"

    def _how(self, chosen: Choice) -> str:
        if chosen.kind == "without":
            left = self._timings.num_ranks - len(chosen.ranks)
            return (
                f"To do that, leave out its process or its node, and multiply the others' batch size by "
                f"{self._timings.num_ranks}/{left}. Look at that machine first, and at what it does there."
            )
        if chosen.kind == "deal":
            written = KEYS if self._of_train else f"loader = {chosen.gain.code}"
            return f"To do that (docs/rebalance.md):\n  {written}"
        if chosen.kind == "pull":
            assert self._pulled is not None
            return f"Then {self._drawn(self._pulled)}. To do that:\n{self._pull(self._pulled.num_microbatches)}"
        return self._with_deadline(chosen.gain)

    def _drawn(self, pulled: Pulled) -> str:
        fewest = min(range(len(pulled.drawn)), key=pulled.drawn.__getitem__)
        return (
            f"rank {fewest} would compute {pulled.drawn[fewest]:.1f} micro-batches in a step, others up to "
            f"{max(pulled.drawn):.1f}: steps of {shown(pulled.gain.step_s)}, and nothing is dropped"
        )

    def _pull(self, number: int) -> str:
        return f"  {PULLED} num_microbatches={number}" if self._of_train else _LOOP

    def _with_deadline(self, gain: Gain) -> str:
        if self._of_train:
            return f"To use it, beside the keys that the run was started with:\n  {gain.keys}"
        return _to_paste(gain, self._timings)


def _brings(gain: Gain, of: Replicas) -> str:
    share = f"{_percent(gain.dropped)} of the gradients are dropped"
    dropped = share if gain.dropped.value > 0 else "no gradient is dropped"
    return (
        f"It brings {_between(gain.speedup)} times as many gradients per second: a step takes {shown(gain.step_s)}, "
        f"{_percent(gain.saved)} less than when all {of.rows} are waited for, and {dropped}."
    )


def _to_paste(one: Gain, timings: Timings) -> str:
    """The code to paste into a program of the user's own."""
    microbatches = timings.num_microbatches
    code, _, loader = one.code.partition(", LateLoader") if one.code.endswith(", LateLoader") else (one.code, "", None)
    wrapper = "DistributedDataParallel(model)" if timings.job == "DDP" else "what merges the gradients now"
    step = f"model.step(num_microbatches={microbatches})" if microbatches > 1 else "model.step()"
    late = "" if loader is None else "\n  loader = straggle.LateLoader(model, loader)"
    return (
        f"To use it, in place of {wrapper}, and `with {step}:` around the passes of each step:\n"
        f"  import straggle\n  deadline = {code}\n"
        f"  model = straggle.StagedDataParallel(model, deadline=deadline){late}\n"
        "To see before that, on the real cluster, what it would do without doing it:\n"
        f"  import straggle\n  deadline = {code}\n"
        "  model = straggle.StagedDataParallel(model, deadline=straggle.Shadow(deadline))"
    )


def _headline(timings: Timings, slowness: Slowness) -> str:
    lost, of = slowness.lost_s / slowness.step_s, timings.replicas
    return (
        f"in {timings.num_steps} steps of {timings.num_ranks} {of.rows}, from step {int(timings.step[0])} on, a step "
        f"took {shown(slowness.step_s)} on average, and its slowest {of.row} was {shown(slowness.lost_s)} behind the "
        f"middle of the others ({lost:.0%} of a step). From {timings.source}."
    )


def _about(rank: SlowRank, timings: Timings, judged: Verdict) -> str:
    since = "from the first step on" if rank.since is None else f"since step {rank.since}"
    begin = int(timings.step[0]) if rank.since is None else rank.since
    manner = (
        f"was slow from step {begin} to step {rank.until - 1}"
        if rank.until is not None
        else f"is always slow, {since}"
        if rank.is_always
        else f"is slow at times, {since}"
    )
    where = ", ".join(f"{min(1.0, rank.phases[phase]):.0%} {_place(phase, timings)}" for phase in rank.named)
    who = timings.replicas.who(rank.rank)
    fixed = " That does not go by the samples, so to have fewer of them is no help." if rank in judged.fixed else ""
    return (
        f"{who[:1].upper()}{who[1:]} {manner}, in {rank.steady:.0%} of these steps: then it takes {rank.times:.2f} "
        f"times as long as the others, {shown(rank.excess_s)} more. Of that, {where}.{fixed} The job takes "
        f"{_between(rank.slowdown)} times as long because of it."
    )


def _place(phase: str, timings: Timings) -> str:
    """The phase in words."""
    return _GAP if phase == "data" and not timings.knows_loader else _PLACES[phase]


def _of_one(timings: Timings) -> str:
    """Where the time of a job of one process goes."""
    own_s, step_s = timings.own_s.mean(), timings.seconds.mean()
    shares = sorted(((float(values.mean() / step_s), phase) for phase, values in timings.phases.items()), reverse=True)
    where = ", ".join(f"{share:.0%} {_place(phase, timings)}" for share, phase in shares if share >= _NAMED)
    return (
        f"{timings.source}: {timings.num_steps} steps of one rank, which waits for no other, from step "
        f"{int(timings.step[0])} on. A step took {shown(step_s)} on average and {shown(timings.seconds.max())} at "
        f"most, of which {shown(own_s)} are its own work: {where}."
    )


def _of_sharded(slowness: Slowness, timings: Timings) -> str:
    """What to do, as far as that is known, if ranks wait for one another inside of their passes."""
    if not (slow := [one.rank for one in slowness.ranks if one.until is None]):
        return "change nothing: no rank is slow."
    look = f"look at the machine of {in_words(slow)}."
    if not 1 < timings.replica_ranks < timings.num_ranks:
        return look
    return (
        f"{look} {timings.replica_ranks} ranks have one copy of the model, and are late together. To let the other "
        'copies go on without them: straggle.StagedDataParallel(model, mesh=mesh["dp_replicate"], '
        "deadline=straggle.AutoDeadline()) (docs/sharded.md)."
    )


def _whose_link(of: Replicas) -> str:
    whose = f"one {of.row}'s link"
    return f" Whether it is {whose}, straggle.StagedDataParallel(model, links=True) measures, waiting for all."


def _summed_up(slowness: Slowness, timings: Timings) -> Iterator[str]:
    of = timings.replicas
    if slowness.ranks:
        yield (
            f"That explains {slowness.attributed:.0%} of what the job loses to the slowest {of.row} of each step; the "
            f"rest is the ordinary difference between {of.rows}."
        )
    else:
        yield (
            f"No {of.row} is slow: none costs {MATTERS:.0%} of a step or more and is behind {UNUSUAL:g} times as much "
            f"as the others. {_held_up(slowness, of)}"
        )
    if (waited_s := float(timings.collective_s.max(axis=1).mean())) >= _PART * slowness.step_s:
        yield (
            f"In {waited_s / slowness.step_s:.0%} of a step ({shown(waited_s)}) {of.rows} wait in collectives of the "
            "loop's own, where a deadline does not help: take them out of the steps (docs/loop.md), or what is "
            "predicted for deadlines does not come."
        )
    if slowness.network_s >= _PART * slowness.step_s:
        share = f"{slowness.network_s / slowness.step_s:.0%} of a step ({shown(slowness.network_s)}) is"
        yield (
            f"{share} the network: it comes after the slowest {of.row}'s own work, and no deadline changes it."
            f"{_whose_link(of) * (timings.num_ranks > 2 and not timings.knows_links)}"
            if timings.is_predictable
            else f"{share} not the slowest {of.row}'s own work: the network, and its own waits for others."
        )
    yield from (f"{spell.words(of.row)}." for spell in timings.slow_links)


def _held_up(slowness: Slowness, of: Replicas) -> str:
    if not slowness.somebody_is_waited_for:
        return f"What is lost is the ordinary difference between {of.rows}."
    return (
        f"But now one and now another takes {HELD_UP:g} times as long as the others or more: such steps cost "
        f"{slowness.held_up_s / slowness.step_s:.0%} of a step on average."
    )


def _why_nothing(slowness: Slowness, of: Replicas) -> str:
    if slowness.somebody_is_waited_for:
        return "nothing in the table is sure to be worth it, as far as this number of steps shows"
    return (
        f"what is lost is the ordinary difference between {of.rows}, and stopping a {of.row} that is nearly done saves "
        "nothing"
    )


def _name(gain: Gain) -> str:
    return gain.code.replace("straggle.", "")


def _table(judged: Verdict, timings: Timings, first: int) -> str:
    """The chosen row is the first one. A name that is too long has a line of its own."""
    which = f"steps from {int(timings.step[first])} on, run with" if first else "the same steps, run with"
    now = (shown(timings.seconds[first:].mean()), "", "", "")
    named = [(_name(one.gain), _numbers(one.gain)) for one in judged.choices]
    named.append(("as in this run", now) if judged.kind == "keep" else ("waiting for all, as now", now))
    head = (which, "step", "time saved", "dropped", "gradients/s")
    rows = [head, *(("..." if len(name) > _NAME else name, *numbers) for name, numbers in named)]
    top, *lines = text_table(rows).splitlines()
    for (name, _), line in zip(named, lines, strict=True):
        top += f"\n{name}" * (len(name) > _NAME) + f"\n{line}"
    return (
        f"{top}\nIn brackets: where {LEVEL:.0%} of comparisons are expected, of two runs with as many "
        "steps and as much noise as these."
    )


def _numbers(gain: Gain) -> tuple[str, ...]:
    return (
        shown(gain.step_s),
        _short(gain.saved, 100, "%"),
        _short(gain.dropped, 100, "%") if gain.dropped.value > 0 else "none",
        f"x {gain.speedup.value:.2f} ({gain.speedup.low:.2f}-{gain.speedup.high:.2f})",
    )


def _short(interval: Interval, times: float, unit: str) -> str:
    value, low, high = (f"{times * own:.0f}" for own in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low}-{high})" if not low.startswith("-") else f"{value}{unit} ({low} to {high})"


def _between(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _percent(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"
