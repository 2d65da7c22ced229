"""The whole answer, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from straggle.advise.bootstrap import LEVEL, Interval
from straggle.advise.gain import Gain, best, gains
from straggle.advise.slow import MATTERS, UNUSUAL, Slowness, SlowRank, find_slow_ranks
from straggle.advise.timings import Timings, dumps, read_timings
from straggle.deadline import Patience
from straggle.report import text_table
from straggle.report.advice import PLACES, ms
from straggle.report.advice import advise as sentences_of_run
from straggle.report.numbers import numbers_of
from straggle.report.run import read_run

_PLACES: Mapping[str, str] = {
    **PLACES,
    "outside": "outside of data, passes and the optimizer (evaluation, checkpoints, clipping)",
    "optimizer": "in the optimizer",
    "pauses": "in pauses of its process (garbage collection, or stopped from outside)",
}
_STEADY = 0.5  # of its steps: a rank is slow as such, not now and then
_NETWORK = 0.1  # of a step, from which on it is worth a sentence


@dataclass(frozen=True)
class Answer:
    """``sentences`` are those of the run's report, where there is a trace of straggle."""

    timings: Timings
    slowness: Slowness
    gains: tuple[Gain, ...]
    best: Gain | None
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        parts = [_headline(self.timings, self.slowness), *(_about(rank, self.timings) for rank in self.slowness.ranks)]
        parts += [*_summed_up(self.slowness), _table(self.gains), *_to_paste(self.best, self.slowness)]
        if self.sentences:
            parts += ["As the run was:", *(f"- {sentence}" for sentence in self.sentences)]
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> str:
        """All of it for programs; times in seconds."""
        timings = self.timings
        return dumps(
            {
                "source": str(timings.source),
                "steps": timings.num_steps,
                "first_step": int(timings.step[0]),
                "ranks": timings.num_ranks,
                **asdict(self.slowness),
                "slow_ranks": [asdict(rank) for rank in self.slowness.ranks],
                "policies": [asdict(gain) for gain in self.gains],
                "best": None if self.best is None else asdict(self.best),
                "sentences": self.sentences,
            }
        )


def answer(path: Path) -> Answer:
    """Read and judge a run; raises ``ValueError`` where there is none."""
    timings = read_timings(path)
    run_dir = timings.source.parent
    found = tuple(gains(timings, None if timings.watched else _patience(run_dir)))
    sentences = tuple[str, ...]()
    if not timings.watched and timings.source.name == "trace.jsonl":
        run = read_run(run_dir)
        sentences = tuple(sentences_of_run(run, numbers_of(run)))
    return Answer(timings, find_slow_ranks(timings), found, best(list(found)), sentences)


def _patience(run_dir: Path) -> Patience | None:
    """As the run was configured, where that is known; its trace has the times of stages, so these are the units."""
    path = run_dir / "config.yaml"
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        patience = config.get("patience") if isinstance(config, dict) else None
        own = {key: value for key, value in (patience or {}).items() if key != "_target_"}
        if own.get("granularity") == "microbatch":
            own["granularity"] = "stage"
        return Patience(**own) if own else None
    except (TypeError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None


def _headline(timings: Timings, slowness: Slowness) -> str:
    steps = f"{timings.num_steps} steps of {timings.num_ranks} ranks, from step {int(timings.step[0])} on"
    lost = slowness.lost_s / slowness.step_s
    return (
        f"{timings.source}: {steps}. A step took {ms(slowness.step_s)} in the mean; the slowest rank was "
        f"{ms(slowness.lost_s)} behind the middle of the others ({lost:.0%} of a step)."
    )


def _about(rank: SlowRank, timings: Timings) -> str:
    manner = "slow" if rank.steady >= _STEADY else "slow now and then"
    when = "from the first step on" if rank.since is None else f"since step {rank.since}"
    if rank.until is not None:
        begin = int(timings.step[0]) if rank.since is None else rank.since
        when = f"from step {begin} to step {rank.until - 1}"
    where = ", ".join(f"{min(1.0, rank.phases[phase]):.0%} {_PLACES[phase]}" for phase in rank.named)
    return (
        f"Rank {rank.rank} is {manner}, {when}, in {rank.steady:.0%} of these steps: then it takes {rank.times:.2f} "
        f"times as long as the others, {ms(rank.excess_s)} more. Of that, {where}. The job takes "
        f"{_between(rank.slowdown)} times as long because of it."
    )


def _summed_up(slowness: Slowness) -> Iterator[str]:
    if slowness.ranks:
        yield (
            f"That explains {slowness.attributed:.0%} of what the job loses to the slowest rank of each step; the rest "
            "is the ordinary difference between ranks."
        )
    else:
        yield (
            f"No rank is slow: none costs {MATTERS:.0%} of a step or more and is behind {UNUSUAL:g} times as much as "
            "the others. What is lost is the ordinary difference between ranks."
        )
    if slowness.network_s >= _NETWORK * slowness.step_s:
        yield (
            f"{slowness.network_s / slowness.step_s:.0%} of a step ({ms(slowness.network_s)}) is the network: it comes "
            "after the slowest rank's own work, and no deadline changes it."
        )


def _table(found: tuple[Gain, ...]) -> str:
    rows = [("if the same steps were run with", "mean step", "time saved", "dropped", "gradients per second")]
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
    return f"{text_table(rows)}\nIn brackets: {LEVEL:.0%} intervals over the steps of this run."


def _to_paste(one: Gain | None, slowness: Slowness) -> Iterator[str]:
    if one is None:
        yield "None of these is sure to be worth it here: wait for everyone, as DDP does."
        return
    yield (
        "To paste:\n"
        f"  model = straggle.StagedDataParallel(model, deadline={one.code})\n"
        f"  ./launch.sh {one.keys}\n"
        "Before that, to see on the real cluster what it would do without doing it:\n"
        f"  model = straggle.StagedDataParallel(model, deadline=straggle.Shadow({one.code}))"
    )
    if steady := [rank for rank in slowness.ranks if rank.steady >= _STEADY and rank.until is None]:
        yield (
            f"Rank {steady[0].rank} is slow as such, so it is its gradients that are dropped, step after step, and its "
            "data count less. Look at its machine first, or give it less to do."
        )


def _between(interval: Interval) -> str:
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _percent(interval: Interval) -> str:
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"
