"""A run's numbers, each declared once: its name in files and on the page, its unit, its words, and what it comes from.

``summary.json``, the page, the table at a run's end and a comparison ask this registry; sentences about a run write
their numbers by its units, too (`shown`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np

from straggle.observe.numbers.goodput import Goodput
from straggle.observe.numbers.run import Run, run_of
from straggle.observe.numbers.run_numbers import RankInRun, RunNumbers, has_data_of, numbers_of
from straggle.report import StepReport, finite_or_none, told_apart
from straggle.schema import described

Unit: TypeAlias = Literal["seconds", "share", "index", "loss", "count", ""]


def seconds_shown(seconds: float) -> str:
    """As in "412 ms", "1.25 s", "14.2 s" and "3 min 4 s"."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_SHOWN: Mapping[Unit, Callable[[float], str]] = {
    "seconds": seconds_shown,
    "share": "{:.1%}".format,
    "index": "{:.2f}".format,
    "loss": "{:.4g}".format,
    "count": "{:,}".format,
}


def shown(value: float, unit: Unit) -> str:
    """A number for people, wherever it stands: in a terminal, on the page, in a sentence."""
    return "not known" if math.isnan(value) else _SHOWN[unit](value)


@dataclass(frozen=True)
class Number:
    """``text``: what it is in ``summary.json``; empty: it is not there. ``label``: its row in a table,
    where ``{row}`` is what the run's rows are of (`Replicas.row`).

    ``of`` makes it of a run; ``None``: only the job itself knows it, and its ``summary.json``. A number without a unit
    is a list, or a mapping.
    """

    name: str
    text: str = ""
    of: Callable[[Run, RunNumbers], Any] | None = None
    unit: Unit = ""
    label: str = ""
    stable: bool = False

    def shown(self, value: float | None) -> str:
        """For people; ``None``: not known, as in a file."""
        return shown(math.nan if value is None else value, self.unit)

    def called(self, row: str = "rank") -> str:
        """Its row in a table."""
        return self.label.format(row=row)

    def field(self, text: str = "", *, stable: bool | None = None) -> Mapping[str, Any]:
        """As a field of a file, with another ``text`` if it is of other steps there."""
        return described(text or self.text, stable=self.stable if stable is None else stable)


def fields_of(numbers: Iterable[Number]) -> dict[str, Mapping[str, Any]]:
    """Those that ``summary.json`` has."""
    return {one.name: one.field() for one in numbers if one.text}


def _of_ranks(of: Callable[[RankInRun], float]) -> Callable[[Run, RunNumbers], list[float]]:
    return lambda _, numbers: [of(rank) for rank in numbers.ranks]


def _of_pool(of: Callable[[RankInRun], float]) -> Callable[[Run, RunNumbers], list[float] | None]:
    return lambda _, numbers: [of(rank) for rank in numbers.ranks] if numbers.pool_parts else None


def _dropped_of_stages(run: Run, numbers: RunNumbers) -> dict[str, float]:
    names = told_apart(stage.name for stage in run.stages)
    stages = zip(names, numbers.stage_share, strict=True)
    return {name: 1 - share for name, share in stages} if run.num_steps > 1 else {}  # planned after the first


def _mean_weights(run: Run) -> list[float]:
    """A rank without data, or that was absent, had no weight in that step, whatever its row says."""
    weight = np.where(has_data_of(run), run.ranks["weight"], 0.0)
    steps = has_data_of(run).sum(axis=0)
    return [float(own) for own in np.divide(np.nansum(weight, axis=0), np.where(steps, steps, np.nan))]


_ALL = (
    Number(
        "steps",
        "steps trained, including those before a `resume`",
        lambda run, _: int(run.step[-1]) + 1,
        "count",
        stable=True,
    ),
    Number(
        "step_seconds_median",
        "of a step; without the first tenth of the steps, at most ten",
        lambda _, numbers: numbers.own.median_s,
        "seconds",
        "step time, median",
        stable=True,
    ),
    Number(
        "step_seconds_mean",
        "the same, the mean",
        lambda _, numbers: numbers.own.mean_s,
        "seconds",
        "step time, mean",
        stable=True,
    ),
    Number(
        "ddp_seconds_median",
        "predicted from the telemetry: the same steps under DDP, with an equal share of the samples for each rank",
        lambda _, numbers: numbers.ddp.median_s,
        "seconds",
        "under DDP, median",
        stable=True,
    ),
    Number(
        "ddp_seconds_mean", "the same, the mean", lambda _, numbers: numbers.ddp.mean_s, "seconds", "under DDP, mean"
    ),
    Number("saved_share", "", lambda _, numbers: numbers.saved_share, "share", "less time than under DDP"),
    Number("step_seconds_p95", "", lambda _, numbers: numbers.own.p95_s, "seconds", "step time, 95 of 100 below"),
    Number("step_seconds_max", "", lambda _, numbers: numbers.own.max_s, "seconds", "slowest step"),
    Number(
        "dropped_share",
        "share of all gradient elements, over ranks, that no backward pass delivered in time",
        lambda _, numbers: numbers.dropped_share,
        "share",
        "gradients dropped",
        stable=True,
    ),
    Number(
        "goodput",
        "the useful part of all time, from the first step's beginning to the last one's end, restarts included, of all "
        "ranks that the job was started with",
        lambda run, _: run.goodput.share,
        "share",
        "goodput",
    ),
    Number(
        "goodput_seconds",
        "the mean rank's seconds, `useful` or by what they were lost to; they add up to all time",
        lambda run, _: dict(run.goodput.seconds),
    ),
    Number("dropped_share_per_rank", "the same for each rank", _of_ranks(lambda rank: 1 - rank.reach), stable=True),
    Number("dropped_share_per_stage", "the same for each stage", _dropped_of_stages),
    Number(
        "dropped_samples_per_rank",
        "the rank's samples times the share of its gradients that was dropped, over all steps",
    ),
    Number(
        "weight_per_rank",
        "mean weight of the rank's steps; with `rebalance=by_speed` its samples, or micro-batches",
        lambda run, _: _mean_weights(run),
    ),
    Number(
        "depth_bias",
        "share of the gradients that came in for the first stage of backward, minus that of the last stage",
        lambda _, numbers: numbers.fairness.depth_bias,
        "share",
        "depth bias",
    ),
    Number(
        "fairness",
        "Jain's index of the ranks' contributions to the model",
        lambda _, numbers: numbers.fairness.index,
        "index",
        "fairness over {row}s",
    ),
    Number(
        "fairness_input_stage",
        "the same of the stage at the input",
        lambda _, numbers: numbers.fairness.input_index,
        "index",
        "fairness in the stage at the input",
    ),
    Number(
        "least_contribution",
        "contribution of the rank that gave least, divided by the mean over ranks",
        lambda _, numbers: numbers.fairness.least,
    ),
    Number(
        "least_contribution_input_stage",
        "the same of the stage at the input",
        lambda _, numbers: numbers.fairness.input_least,
    ),
    Number(
        "shadow_dropped_share",
        "with `deadline=shadow`, without the same first steps: the share that would have been dropped; null otherwise",
        None,
        "share",
    ),
    Number("shadow_step_seconds_mean", "the mean step then", None, "seconds"),
    Number(
        "made_late_by",
        "for each replica the ranks that made it late, and in how many steps; null if each rank has a copy of the "
        "model",
        lambda run, _: [dict(ranks) for ranks in run.replicas.made_late] or None,
    ),
    Number("late", "", lambda _, numbers: numbers.late, "count", "times that a {row} was late"),
    Number("stood_in", "", lambda _, numbers: numbers.stood_in, "count", "times that a {row} was stood in for"),
    Number("steps_per_rank", "steps in which the rank was a member and had data", _of_ranks(lambda rank: rank.steps)),
    Number("late_steps_per_rank", "of these, late ones", _of_ranks(lambda rank: rank.late), stable=True),
    Number(
        "stood_in_steps_per_rank",
        "of these, those that the stand-in submitted",
        _of_ranks(lambda rank: rank.stood_in),
    ),
    Number(
        "nonfinite_steps_per_rank",
        "steps in which it had gradients that were not finite: they were left out, and are in no `dropped_share`",
        _of_ranks(lambda rank: rank.nonfinite_steps),
    ),
    Number(
        "absent_steps_per_rank",
        "steps in which the rank was no member; they are in no other field",
        _of_ranks(lambda rank: rank.absent),
    ),
    Number(
        "drawn_per_rank",
        "with `work=pulled`: micro-batches of a step's pool that the rank computed, on average; null otherwise",
        _of_pool(lambda rank: rank.drawn),
    ),
    Number("put_back_per_rank", "how many of them it gave back in all", _of_pool(lambda rank: rank.put_back)),
    Number(
        "not_computed", "", lambda _, numbers: numbers.not_computed, "count", "micro-batches not computed, of all pools"
    ),
    Number(
        "skipped",
        "steps in which no rank had finite gradients, and nothing was applied",
        lambda _, numbers: numbers.skipped,
        "count",
        "steps skipped",
    ),
    Number(
        "loss",
        "mean over ranks and the last 20 steps; null: one was not finite",
        lambda _, numbers: numbers.loss,
        "loss",
        "training loss, last 20 steps",
        stable=True,
    ),
    Number("validation_loss", "after the last step", None, "loss", "validation loss", stable=True),
    Number(
        "validation_accuracy",
        "the same; only if the workload has one",
        None,
        "share",
        "validation accuracy",
        stable=True,
    ),
    Number(
        "parameters_sha256",
        "of each rank's parameters: equal hashes, equal bit for bit",
        label="parameters on all ranks",
        stable=True,
    ),
)
NUMBERS: Mapping[str, Number] = {one.name: one for one in _ALL}


# -- summary.json: the numbers of the run's page, and what only the run itself knows

FIELDS = fields_of(NUMBERS.values())


def summarize(
    reports: Sequence[StepReport],
    scores: Mapping[str, float],
    hashes: Sequence[str],
    samples_per_step: int,
    goodput: Goodput | None = None,
) -> dict[str, Any]:
    """The run in numbers, as plain JSON values: `FIELDS`; what is not known is ``None``.

    ``scores`` are those on held-out data, ``hashes`` each rank's parameters. ``samples_per_step``: the number of a
    rank's samples in a step of weight 1. ``goodput``: of all the run, if ``reports`` are those since a `resume`.
    """
    run = run_of(reports)
    run = run if goodput is None else replace(run, goodput=goodput)
    numbers = numbers_of(run)
    weight = np.where(has_data_of(run), run.ranks["weight"], 0.0)
    dropped = (1 - run.ranks["reach"]) * weight * samples_per_step
    of_job = {
        "dropped_samples_per_rank": [round(samples) for samples in np.nansum(dropped, axis=0).tolist()],
        **_shadow(reports[run.warmup :]),
        **{f"validation_{name}": scores[name] for name in ("loss", "accuracy") if name in scores},
        "parameters_sha256": list(hashes),
    }
    known = {
        name: of_job[name] if one.of is None else one.of(run, numbers)
        for name, one in NUMBERS.items()
        if one.of is not None or name in of_job
    }
    plain: dict[str, Any] = finite_or_none({name: known[name] for name in FIELDS if name in known})
    return plain


def _shadow(reports: Sequence[StepReport]) -> dict[str, float | None]:
    """What a policy that stopped no rank would have made of these steps."""
    shadows = [report.shadow for report in reports if report.shadow is not None]
    return {
        "shadow_dropped_share": fmean(shadow.dropped_share for shadow in shadows) if shadows else None,
        "shadow_step_seconds_mean": fmean(shadow.seconds for shadow in shadows) if shadows else None,
    }
