"""The complete answer: what a run shows, what everything would be worth in it, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from straggle.advise.gain import Gain, best, gains
from straggle.advise.other_shares import BySpeed, all_without, by_speed
from straggle.advise.pulled import Pulled, best_pulled
from straggle.advise.slow import Slowness, find_slow_ranks
from straggle.advise.timings import LEAST_STEPS, Timings, read_timings
from straggle.advise.verdict import Choice, Verdict, goes_by_samples, verdict
from straggle.advise.words import text_of
from straggle.observe.findings import LITTLE
from straggle.observe.findings import facts as sentences_of_run
from straggle.observe.numbers.run import read_run
from straggle.observe.numbers.run_numbers import RunNumbers, numbers_of
from straggle.policies.deadline import LateHandling
from straggle.report import finite_or_none

_CONFIG = "config.yaml"  # that `straggle train` leaves


@dataclass(frozen=True)
class Answer:
    """``sentences`` are facts of the run's report, if straggle wrote a trace.

    ``by_speed``: what dealing out by speed is worth, if a rank is always slow and that was not done. ``pulled``:
    what drawing micro-batches is worth, if ranks are waited for and did not draw. ``best``: of the deadlines.
    """

    timings: Timings
    slowness: Slowness
    verdict: Verdict
    gains: tuple[Gain, ...] = ()
    best: Gain | None = None
    by_speed: BySpeed | None = None
    pulled: Pulled | None = None
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        """At most 90 characters in a line, but for code and paths."""
        return text_of(
            self.timings,
            self.slowness,
            self.verdict,
            by_speed=self.by_speed,
            pulled=self.pulled,
            best=self.best,
            first=_present(self.timings, self.slowness),
            sentences=self.sentences,
            of_train=not self.timings.watched and (self.timings.source.parent / _CONFIG).is_file(),
        )

    def as_json(self) -> str:
        """The complete answer for programs; times in seconds."""
        timings, chosen = self.timings, self.verdict.chosen
        return json.dumps(
            finite_or_none(
                {
                    "source": str(timings.source),
                    "steps": timings.num_steps,
                    "first_step": int(timings.step[0]),
                    "ranks": timings.num_ranks,
                    "job": timings.job,
                    "unknown": timings.unknown,
                    "verdict": {"kind": self.verdict.kind, "chosen": None if chosen is None else asdict(chosen)},
                    **asdict(self.slowness),
                    "slow_ranks": [asdict(rank) for rank in self.slowness.ranks],
                    "policies": [asdict(gain) for gain in self.gains],
                    "best": None if self.best is None else asdict(self.best),
                    "by_speed": None if self.by_speed is None else asdict(self.by_speed),
                    "without": [asdict(one) for one in self.verdict.choices if one.kind == "without"],
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
        return Answer(timings, slowness, verdict(slowness, ()))
    late_handling = None if timings.watched else configured_late_handling(run_dir)
    first = _present(timings, slowness)
    always = [rank for rank in slowness.ranks if rank.is_always]
    loads_slowly = any("data" in rank.named for rank in always)
    found = tuple(gains(timings, late_handling, first, loads_slowly=loads_slowly))
    config = {} if timings.watched else _config(run_dir)
    # what a rank has does not follow its speed, and could
    as_they_come = not (config.get("rebalance") or timings.pulled or timings.replicas.slowest)
    dealt = by_speed(timings, late_handling, first) if always and as_they_come else None
    drawn = None
    divides = not always or any(map(goes_by_samples, always))  # what is slow
    if slowness.somebody_is_waited_for and as_they_come and divides:
        each = timings.num_microbatches if timings.watched else int(config.get("num_microbatches", 1))
        drawn = best_pulled(timings, each, late_handling, first)
    choices = [Choice("deadline", gain) for gain in found]
    if dealt is not None and divides:
        choices.append(Choice("deal", dealt.gain))
    if drawn is not None and drawn.accumulates:
        choices.append(Choice("pull", drawn.gain))
    if not timings.replicas.slowest:
        left_out = all_without(timings, [rank.rank for rank in always], late_handling, first)
        choices += [Choice("without", gain, ranks) for ranks, gain in left_out]
    numbers, sentences = None, tuple[str, ...]()
    if not timings.watched and timings.source.name == "trace.jsonl":
        run = read_run(run_dir)
        sentences = tuple(sentences_of_run(run, numbers := numbers_of(run)))
    judged = verdict(slowness, choices, 0.0 if numbers is None else _as_run(numbers))
    chosen = best(list(found)) if slowness.somebody_is_waited_for else None
    return Answer(timings, slowness, judged, found, chosen, dealt, drawn, sentences)


def _as_run(numbers: RunNumbers) -> float:
    """Gradients per second of a run that dropped some and saved time by it, over those of DDP; 0 for any other."""
    if not (numbers.late and numbers.saved_share >= LITTLE):
        return 0.0
    return (1 - numbers.dropped_share) / (1 - numbers.saved_share)


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
