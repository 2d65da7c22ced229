"""The complete answer, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from straggle.advise.by_speed import KEYS, BySpeed, by_speed
from straggle.advise.gain import Gain, best, gains
from straggle.advise.pulled import KEYS as PULLED
from straggle.advise.pulled import Pulled, best_pulled
from straggle.advise.slow import HELD_UP, MATTERS, UNUSUAL, Slowness, SlowRank, find_slow_ranks
from straggle.advise.timings import LEAST_STEPS, Timings, read_timings
from straggle.observe.findings import PLACES, ms
from straggle.observe.findings import advise as sentences_of_run
from straggle.observe.intervals import LEVEL, Interval
from straggle.observe.run import read_run
from straggle.observe.run_numbers import numbers_of
from straggle.policies.deadline import LateHandling
from straggle.report import finite_or_none, text_table

_PLACES: Mapping[str, str] = {
    **PLACES,
    "pauses": "in pauses of its process (garbage collection, or stopped from outside)",
}
_GAP = "between the optimizer's step and the next pass (loading, by what is no DataLoader, or the loop's end)"
_STEADY = 0.5  # of its steps: a rank is persistently slow, not just sometimes
_CONFIG = "config.yaml"  # that `straggle train` leaves
_NAMED = 0.005  # of a step, from which on a phase of it is named
_NETWORK = 0.1  # of a step, from which on it is worth a sentence


@dataclass(frozen=True)
class Answer:
    """``sentences`` are those of the run's report, if straggle wrote a trace.

    ``by_speed``: what dealing out by speed is worth, if a rank is always slow and that was not done. ``pulled``:
    what drawing micro-batches is worth, if ranks are waited for and did not draw.
    """

    timings: Timings
    slowness: Slowness
    gains: tuple[Gain, ...]
    best: Gain | None
    by_speed: BySpeed | None
    pulled: Pulled | None
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        if self.timings.num_ranks == 1:
            return _of_one(self.timings)
        parts = [_headline(self.timings, self.slowness), *(_about(rank, self.timings) for rank in self.slowness.ranks)]
        parts += _summed_up(self.slowness, self.timings)
        parts = [self.timings.replicas.words(part) for part in parts]
        parts += self._what_helps() if self.timings.is_predictable else _of_sharded(self.slowness, self.timings)
        if self.timings.unknown:
            parts.append("\n".join(("What these files do not tell:", *(f"- {one}" for one in self.timings.unknown))))
        if self.sentences:
            parts += ["As the run was:", *(f"- {sentence}" for sentence in self.sentences)]
        return "\n\n".join(parts) + "\n"

    def _what_helps(self) -> list[str]:
        return [
            _table(self._listed, self.timings, self.slowness),
            *_to_draw(self.pulled, self.timings),
            *_what_to_do(self.best, self.slowness, self.timings, draws=self._is_pulling_worth_it),
            *_always_slow(self.slowness, self.by_speed, self.timings),
        ]

    @property
    def _is_pulling_worth_it(self) -> bool:
        return self.pulled is not None and self.pulled.is_worth_it

    @property
    def _listed(self) -> tuple[Gain, ...]:
        return (self.pulled.gain, *self.gains) if self.pulled is not None else self.gains

    def as_json(self) -> str:
        """The complete answer for programs; times in seconds."""
        timings = self.timings
        return json.dumps(
            finite_or_none(
                {
                    "source": str(timings.source),
                    "steps": timings.num_steps,
                    "first_step": int(timings.step[0]),
                    "ranks": timings.num_ranks,
                    "job": timings.job,
                    "unknown": timings.unknown,
                    **asdict(self.slowness),
                    "slow_ranks": [asdict(rank) for rank in self.slowness.ranks],
                    "policies": [asdict(gain) for gain in self.gains],
                    "best": None if self.best is None else asdict(self.best),
                    "by_speed": None if self.by_speed is None else asdict(self.by_speed),
                    "slow_links": [asdict(spell) for spell in timings.slow_links],
                    "pulled": None if self.pulled is None else asdict(self.pulled),
                    "sentences": self.sentences,
                }
            ),
            indent=2,
        )


def answer(path: Path) -> Answer:
    """Read and judge a run; raises ``ValueError`` if there is none."""
    timings = read_timings(path)
    run_dir = timings.source.parent
    slowness = find_slow_ranks(timings)
    if not timings.is_predictable or timings.num_ranks == 1:
        return Answer(timings, slowness, (), None, None, None, ())
    late_handling = None if timings.watched else configured_late_handling(run_dir)
    first = _present(timings, slowness)
    found = tuple(gains(timings, late_handling, first))
    config = {} if timings.watched else _config(run_dir)
    # what a rank has does not follow its speed, and could
    as_they_come = not (config.get("rebalance") or timings.pulled or timings.replicas.slowest)
    deal = bool(_steady(slowness)) and as_they_come
    sentences = tuple[str, ...]()
    if not timings.watched and timings.source.name == "trace.jsonl":
        run = read_run(run_dir)
        sentences = tuple(sentences_of_run(run, numbers_of(run)))
    chosen = best(list(found)) if slowness.somebody_is_waited_for else None
    dealt = by_speed(timings, late_handling, first) if deal else None
    drawn = None
    if slowness.somebody_is_waited_for and as_they_come:
        each = timings.num_microbatches if timings.watched else int(config.get("num_microbatches", 1))
        drawn = best_pulled(timings, each, late_handling, first)
    return Answer(timings, slowness, found, chosen, dealt, drawn, sentences)


def _steady(slowness: Slowness) -> list[SlowRank]:
    """The ranks that are slow in most steps, and still are."""
    return [rank for rank in slowness.ranks if rank.steady >= _STEADY and rank.until is None]


def _config(run_dir: Path) -> Mapping[Any, Any]:
    """The run's configuration; empty if there is none."""
    path = run_dir / _CONFIG
    config: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
    return config if isinstance(config, dict) else {}


def _present(timings: Timings, slowness: Slowness) -> int:
    """The position from which on ranks are as they are now, if these steps are enough for an answer; otherwise 0."""
    if slowness.last_change is None:
        return 0
    first = int(np.searchsorted(timings.step, slowness.last_change))
    return first if timings.num_steps - first >= LEAST_STEPS else 0


def configured_late_handling(run_dir: Path) -> LateHandling | None:
    """As the run was configured, if that is known; its trace has the times of stages, so stages are the units."""
    try:
        # what is written as ${...} is left out: only that run knew what it stood for
        known = (_config(run_dir).get("late_handling") or {}).items()
        own = {key: value for key, value in known if key != "_target_" and "${" not in str(value)}
        if own.get("granularity") == "microbatch":
            own["granularity"] = "stage"
        return LateHandling(**own) if own else None
    except (TypeError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{run_dir / _CONFIG}: {str(error).splitlines()[0]}") from None


def _headline(timings: Timings, slowness: Slowness) -> str:
    steps = f"{timings.num_steps} steps of {timings.num_ranks} ranks, from step {int(timings.step[0])} on"
    lost = slowness.lost_s / slowness.step_s
    return (
        f"{timings.source}: {steps}. A step took {ms(slowness.step_s)} on average; the slowest rank was "
        f"{ms(slowness.lost_s)} behind the middle of the others ({lost:.0%} of a step)."
    )


def _about(rank: SlowRank, timings: Timings) -> str:
    manner = "slow" if rank.steady >= _STEADY else "sometimes slow"
    when = "from the first step on" if rank.since is None else f"since step {rank.since}"
    if rank.until is not None:
        begin = int(timings.step[0]) if rank.since is None else rank.since
        when = f"from step {begin} to step {rank.until - 1}"
    where = ", ".join(f"{min(1.0, rank.phases[phase]):.0%} {_place(phase, timings)}" for phase in rank.named)
    return (
        f"Rank {rank.rank} is {manner}, {when}, in {rank.steady:.0%} of these steps: then it takes {rank.times:.2f} "
        f"times as long as the others, {ms(rank.excess_s)} more. Of that, {where}. The job takes "
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
        f"{int(timings.step[0])} on. A step took {ms(step_s)} on average and {ms(timings.seconds.max())} at most, of "
        f"which {ms(own_s)} are its own work: {where}.\n"
    )


def _of_sharded(slowness: Slowness, timings: Timings) -> Iterator[str]:
    """What to do, as far as that is known, if ranks wait for one another inside of their passes."""
    for one in slowness.ranks:
        if one.until is None:
            yield f"Look at the machine of rank {one.rank}."
    if slowness.ranks and 1 < timings.replica_ranks < timings.num_ranks:
        yield (
            f"{timings.replica_ranks} ranks have one copy of the model, and are late together. To let the other copies "
            'go on without them: straggle.StagedDataParallel(model, mesh=mesh["dp_replicate"], '
            "deadline=straggle.AutoDeadline()) (docs/sharded.md)."
        )


def _summed_up(slowness: Slowness, timings: Timings) -> Iterator[str]:
    if slowness.ranks:
        yield (
            f"That explains {slowness.attributed:.0%} of what the job loses to the slowest rank of each step; the rest "
            "is the ordinary difference between ranks."
        )
    else:
        yield (
            f"No rank is slow: none costs {MATTERS:.0%} of a step or more and is behind {UNUSUAL:g} times as much as "
            f"the others. {_held_up(slowness)}"
        )
    if slowness.network_s >= _NETWORK * slowness.step_s:
        share = f"{slowness.network_s / slowness.step_s:.0%} of a step ({ms(slowness.network_s)}) is"
        yield (
            f"{share} the network: it comes after the slowest rank's own work, and no deadline changes it."
            if timings.is_predictable
            else f"{share} not the slowest rank's own work: the network, and its own waits for others."
        )
    yield from (f"{spell.words}." for spell in timings.slow_links)


def _held_up(slowness: Slowness) -> str:
    if not slowness.somebody_is_waited_for:
        return "What is lost is the ordinary difference between ranks."
    return (
        f"But now one and now another takes {HELD_UP:g} times as long as the others or more: such steps cost "
        f"{slowness.held_up_s / slowness.step_s:.0%} of a step on average."
    )


def _table(found: tuple[Gain, ...], timings: Timings, slowness: Slowness) -> str:
    first = _present(timings, slowness)
    which = f"the steps from {int(timings.step[first])} on" if first else "the same steps"
    rows = [(f"if {which} were run with", "mean step", "time saved", "dropped", "gradients per second")]
    rows += [
        (
            gain.code.replace("straggle.", ""),
            ms(gain.step_s),
            _percent(gain.saved),
            _percent(gain.dropped),
            f"x {_between(gain.speedup)}",
        )
        for gain in found
    ]
    return (
        f"{text_table(rows)}\nIn brackets: where {LEVEL:.0%} of comparisons are expected, of two runs with as many "
        "steps and as much noise as these."
    )


_IN_PARTS = {2: "half", 4: "a quarter", 8: "an eighth", 16: "a sixteenth"}
_LOOP = """\
  import straggle
  model = straggle.StagedDataParallel(model)
  with model.step() as step:
      for x, y in step.pull(parts):  # the micro-batches of all ranks, the same on each
          criterion(model(x), y).backward()"""


def _to_draw(drawn: Pulled | None, timings: Timings) -> Iterator[str]:
    """The first advice if a step has several micro-batches; if not, how many it would need."""
    if drawn is None or not drawn.is_worth_it:
        return
    number, gain = drawn.num_microbatches, drawn.gain
    fewest = min(range(len(drawn.drawn)), key=drawn.drawn.__getitem__)
    worth = (
        f"steps of {ms(gain.step_s)}, {_percent(gain.saved)} less than waiting for all ranks, and nothing is dropped: "
        f"rank {fewest} would compute {drawn.drawn[fewest]:.1f} micro-batches in a step, others up to "
        f"{max(drawn.drawn):.1f}. Gradients per second: x {_between(gain.speedup)}."
    )
    how = f"  {PULLED} num_microbatches={number}" if _is_of_train(timings) else _LOOP
    if drawn.accumulates:
        yield (
            f"A step has {number} micro-batches on each rank: let the ranks draw them from one pool. Pulling would "
            f"give {worth} To use it (docs/rebalance.md):\n{how}"
        )
        return
    yield (
        f"A step has one micro-batch on each rank, so there is nothing to draw. With {number} in a step, each "
        f"{_IN_PARTS[number]} as large, ranks could draw them from one pool. Pulling would then give {worth} That is "
        f"as far as a pass takes time by its samples. To use it, with smaller batches (docs/rebalance.md):\n{how}"
    )


def _what_to_do(one: Gain | None, slowness: Slowness, timings: Timings, *, draws: bool) -> Iterator[str]:
    """With a deadline; ``draws``: something else was advised before."""
    if one is None and draws:
        return
    if one is None:
        yield f"Change nothing: {_why_nothing(slowness)}. Wait for all ranks, as DDP does."
        return
    text = _to_add(one) if _is_of_train(timings) else _to_paste(one, timings)
    yield f"Or with a deadline, which drops gradients. {text}" if draws else text


def _is_of_train(timings: Timings) -> bool:
    return not timings.watched and (timings.source.parent / _CONFIG).is_file()


def _always_slow(slowness: Slowness, dealt: BySpeed | None, timings: Timings) -> Iterator[str]:
    """What to do about a rank that is slow in most steps."""
    if not (steady := _steady(slowness)):
        return
    rank = steady[0].rank
    said = timings.replicas.words(
        f"Rank {rank} is persistently slow: with a deadline it is its gradients that are dropped, step after step."
    )
    if dealt is None:
        yield f"{said} Look at its machine."
        return
    saved, share = dealt.gain.saved, dealt.shares[rank]
    if saved.low <= 0:
        # A rank that costs less than one that stalls is not the one that a deadline stops.
        if steady[0] is slowness.ranks[0]:
            yield f"{said} Look at its machine: fewer samples for it are not sure to be worth it."
        return
    written = KEYS if _is_of_train(timings) else f"loader = {dealt.gain.code}"
    yield (
        f"{said} Look at its machine first. Or deal the samples out by speed: it then has {share:.0%} of an equal "
        f"share, a step takes {ms(dealt.gain.step_s)}, {_percent(saved)} less than waiting for it, and nothing is "
        "dropped, as far as a pass takes time by its samples. Gradients per second: "
        f"x {_between(dealt.gain.speedup)}. Write {written}; a deadline beside it is for what remains."
    )


def _why_nothing(slowness: Slowness) -> str:
    if slowness.somebody_is_waited_for:
        return "none of these is sure to be worth it here, as far as this number of steps shows"
    return (
        "what is lost is the ordinary difference between ranks, and stopping a rank that is nearly done saves nothing"
    )


def _to_paste(one: Gain, timings: Timings) -> str:
    """The code to paste into a program of the user's own."""
    microbatches = timings.num_microbatches
    wrapper = "DistributedDataParallel(model)" if timings.job == "DDP" else "what merges the gradients now"
    step = f"model.step(num_microbatches={microbatches})" if microbatches > 1 else "model.step()"
    return (
        f"To use it, in place of {wrapper}, and `with {step}:` around the passes of each step:\n"
        "  import straggle\n"
        f"  model = straggle.StagedDataParallel(model, deadline={one.code})\n"
        "To see before that, on the real cluster, what it would do without doing it:\n"
        "  import straggle\n"
        f"  model = straggle.StagedDataParallel(model, deadline=straggle.Shadow({one.code}))"
    )


def _to_add(one: Gain) -> str:
    """The keys to add for a run of ``straggle train``."""
    return f"To use it, beside the keys that the run was started with:\n  {one.keys}"


def _between(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _percent(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"
