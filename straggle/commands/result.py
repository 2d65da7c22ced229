"""What a run of `train` leaves and shows: its configuration, its metrics, ``summary.json``, the table and the page."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from straggle.commands.saved import durable
from straggle.extras import remedy
from straggle.lab.jobs import StagedJob
from straggle.observe.console import print_table
from straggle.observe.numbers.goodput import Goodput, goodput_of
from straggle.observe.numbers.registry import NUMBERS, summarize
from straggle.observe.numbers.replicas import Replicas
from straggle.report import StepReport

_LESS = 0.85  # of an equal share, or below: that is no noise
_NAMED = 3  # ranks
_OF_RUN = (
    *(f"{of}_seconds_{which}" for of in ("step", "ddp") for which in ("median", "mean")),
    *("goodput", "dropped_share", "fairness", "fairness_input_stage", "depth_bias", "loss", "validation_loss"),
)
_log = logging.getLogger(__name__)


def write_config(config: DictConfig) -> None:
    """Write the configuration as it was given: a name that stands for a secret in the environment stays that name."""
    durable.write_text(Path(config.run_dir) / "config.yaml", OmegaConf.to_yaml(config))


def metrics_of(job: StagedJob, config: DictConfig) -> AbstractContextManager[object]:
    """The exporter of this rank's metrics, if there is one."""
    if not config.get("metrics"):
        return nullcontext()
    exporter: AbstractContextManager[object] = instantiate(
        config.metrics, job.model, samples_per_step=job.samples_per_step, _convert_="all"
    )
    return exporter


def finish(
    job: StagedJob,
    run_dir: Path,
    reports: Sequence[StepReport],
    scores: Mapping[str, float],
    hashes: Sequence[str],
) -> None:
    """Write ``summary.json`` and print the table; ``scores`` are those on held-out data."""
    if not reports:
        sys.stdout.write("nothing left to train: the checkpoint has all steps already\n")
        return
    goodput = goodput_of(run_dir)
    summary = summarize(reports, scores, hashes, job.samples_per_step * job.ranks_per_replica, goodput)
    try:
        durable.write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        _log.warning("%s cannot be written: %s", run_dir / "summary.json", error)
    shares = () if job.rebalance is None else mean_shares(job.rebalance.schedule, reports[-1].step + 1)
    _print(summary, run_dir, Replicas.of(reports), shares, len(reports))


def say_stopped(config: DictConfig, done: int) -> None:
    """Say that a run was ended early, after ``done`` steps, and what can be had of it."""
    sys.stdout.write(
        f"stopped after step {done} of {config.steps}; resume=true goes on from there, and "
        f"`python -m straggle report {config.run_dir}` makes a page of it\n"
    )


def write_page(run_dir: Path) -> None:
    """Write the run as a page; what goes wrong with it does not change the run's result."""
    try:
        from straggle.observe.page.page import write_report

        sys.stdout.write(f"report: {write_report(run_dir)}\n")
    except ImportError as error:
        _log.warning("no report: %s", remedy(error, "report"))
    except Exception as error:
        _log.warning("no report: %r; try again with: python -m straggle report %s", error, run_dir)


def _print(
    summary: dict[str, Any], run_dir: Path, replicas: Replicas, shares: Sequence[MeanShare], num_steps: int
) -> None:
    """``num_steps``: of which the numbers are; a run that was resumed had others before them."""
    shown = {name: NUMBERS[name].shown(summary[name]) for name in _OF_RUN}
    of = replicas.row
    label = {name: own.called(of) for name, own in NUMBERS.items()}
    same = len(set(summary["parameters_sha256"])) == 1
    under = "under DDP, with equal shares:"
    rows = [
        *(
            (label[f"step_seconds_{which}"], shown[f"step_seconds_{which}"], f"{under} {shown[f'ddp_seconds_{which}']}")
            for which in ("median", "mean")
        ),
        (label["goodput"], shown["goodput"], _lost(summary)),
        (label["dropped_share"], shown["dropped_share"], _shares(summary["dropped_share_per_rank"], replicas)),
        (label["late"], _late(summary), _counts(summary, replicas)),
        (f"{label['fairness']} (1: all the same)", shown["fairness"], _least(summary, "", of)),
        ("in the stage at the input", shown["fairness_input_stage"], _least(summary, "_input_stage", of)),
        (
            label["depth_bias"],
            shown["depth_bias"],
            "so much more came in of the stage at the output than of that at the input",
        ),
        ("training loss", shown["loss"], "mean of the last 20 steps"),
        (label["validation_loss"], shown["validation_loss"], _accuracy(summary)),
    ]
    of_parameters = (label["parameters_sha256"], "identical" if same else "DIFFERENT")
    if (drawn := summary["drawn_per_rank"]) is not None:
        of_ranks = ", ".join(f"{of} {rank}: {own:.1f}" for rank, own in enumerate(drawn) if own is not None)
        put_back = sum(summary["put_back_per_rank"])
        rows.insert(3, ("micro-batches drawn, mean", of_ranks, f"put back: {put_back}" if put_back else ""))
    if any(absent := summary["absent_steps_per_rank"]):
        away = ", ".join(f"{replicas.who(rank)}: {steps}" for rank, steps in enumerate(absent) if steps)
        rows.insert(4, (f"steps without a {of}", f"{sum(absent)} of {num_steps * len(absent)}", away))
    if summary["shadow_dropped_share"] is not None:
        rows.insert(3, ("with the deadline enforced", *_would(summary)))
    for sentence in (outcome(summary, replicas, num_steps), *deeds(summary, shares, replicas)):
        sys.stdout.write(sentence + "\n")
    rows.append((*of_parameters, summary["parameters_sha256"][0][:12]))
    since = "" if num_steps == summary["steps"] else f", and the numbers of the last {num_steps}"
    print_table(f"{summary['steps']} steps{since}", ("", "", ""), rows)
    dropped = NUMBERS["dropped_share"].shown
    stages = [(name, dropped(share)) for name, share in summary["dropped_share_per_stage"].items()]
    print_table("dropped per stage, in the order of backward", ("stage", "dropped"), stages, {"files": run_dir})


def _lost(summary: Mapping[str, Any]) -> str:
    lost = Goodput(summary["goodput_seconds"]).lost()
    return f"lost to: {lost}" if lost else ""


def outcome(summary: Mapping[str, Any], of: Replicas, num_steps: int) -> str:
    """What the run gained over DDP, what was paid for it, and whose gradients are missing otherwise, in one line."""
    own_s, ddp_s = (summary[f"{which}_seconds_mean"] or 0.0 for which in ("step", "ddp"))
    if ddp_s > 0:
        share = f"{own_s / ddp_s:.2f} of its time under DDP"
        gained = f"A step took {share} ({1e3 * own_s:.0f} of {1e3 * ddp_s:.0f} ms, means)"
    else:
        gained = f"A step took {1e3 * own_s:.0f} ms in the mean, and no rank had data"
    missing = list(_missing(summary, of, num_steps))
    if summary["dropped_share"]:
        paid = f"{summary['dropped_share']:.1%} of the gradients were dropped"
        first = f"{gained}; for that {paid} ({_shares(summary['dropped_share_per_rank'], of)})"
    else:
        first = f"{gained}, and no gradient was dropped" + (" of ranks that were there" if missing else "")
    return "; ".join([first, *missing]) + "."


def _missing(summary: Mapping[str, Any], of: Replicas, num_steps: int) -> Iterator[str]:
    """What was not merged and is no drop: of ranks that were absent, and gradients that were not finite."""
    own = _ranks_with(summary["absent_steps_per_rank"])
    for rank, often in own[:_NAMED]:
        yield f"{of.who(rank)} was absent in {often} of {num_steps} steps"
    if len(own) > _NAMED:
        yield f"{len(own) - _NAMED} more {of.rows} were absent in some"
    own = _ranks_with(summary["nonfinite_steps_per_rank"])
    for rank, often in own[:_NAMED]:
        steps = summary["steps_per_rank"][rank]
        yield f"gradients of {of.who(rank)} were not finite in {often} of its {steps} steps, and left out"
    if len(own) > _NAMED:
        yield f"so were those of {len(own) - _NAMED} more {of.rows}"
    if summary["skipped"]:
        yield f"{summary['skipped']} of {num_steps} steps changed nothing, as no {of.row} had finite gradients"


def _ranks_with(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(rank, count) for rank, count in enumerate(counts) if count]


@dataclass(frozen=True)
class MeanShare:
    """A rank's mean ``share`` of a step's samples or micro-batches, and an ``equal`` one, of the steps in which it was
    there.
    """

    share: float
    equal: float
    total: int


def mean_shares(schedule: Sequence[tuple[int, Sequence[int]]], steps: int) -> list[MeanShare]:
    """Those of each rank over all ``steps`` of a job; a rank that is absent has none."""
    ends = [step for step, _ in schedule[1:]] + [steps]
    spans = [(end - begin, shares) for (begin, shares), end in zip(schedule, ends, strict=True)]
    found = []
    for rank in range(len(schedule[0][1])):
        own = [(length, shares) for length, shares in spans if shares[rank]]
        there = max(1, sum(length for length, _ in own))
        share = sum(length * shares[rank] for length, shares in own) / there
        equal = sum(length * sum(shares) / sum(map(bool, shares)) for length, shares in own) / there
        found.append(MeanShare(share, equal, sum(schedule[0][1])))
    return found


def deeds(summary: Mapping[str, Any], shares: Sequence[MeanShare], of: Replicas) -> Iterator[str]:
    """What was done about which rank: that it was given less to do (``shares`` are its samples), or was cut off."""
    for rank, own in enumerate(shares):
        if 0 < own.share <= _LESS * own.equal:
            yield (
                f"Dealt less: {of.who(rank)} is slow in most steps, so it had {own.share:.1f} of {own.total} that "
                f"are dealt out for a step, and not {own.equal:g}: nothing is dropped of what others have in its place."
            )
    counts = zip(summary["late_steps_per_rank"], summary["stood_in_steps_per_rank"], strict=True)
    late = sorted(((late, stood_in, rank) for rank, (late, stood_in) in enumerate(counts) if late), reverse=True)
    for steps, stood_in, rank in late[:_NAMED]:
        by_itself = (
            f"it stopped its own pass in {steps - stood_in} of these" if steps > stood_in else "it was stuck there"
        )
        kept = 1 - (summary["dropped_share_per_rank"][rank] or 0.0)
        yield (
            f"Cut: {of.who(rank)} was late in {steps} of {summary['steps_per_rank'][rank]} steps; {by_itself}. "
            f"Of all its gradients {kept:.1%} came in."
        )


def _would(summary: dict[str, Any]) -> tuple[str, str]:
    """What a policy that stopped no rank would have done."""
    dropped, seconds = summary["shadow_dropped_share"], summary["shadow_step_seconds_mean"]
    saved = 1 - seconds / summary["step_seconds_mean"]
    return f"would have dropped {dropped:.1%}", f"and saved {saved:.1%} of the mean step: {1e3 * seconds:.0f} ms"


def _shares(shares: Sequence[float | None], of: Replicas) -> str:
    own = [(rank, share) for rank, share in enumerate(shares) if share]
    return ", ".join(f"{of.who(rank)}: {share:.1%}" for rank, share in own) or "nothing"


def _late(summary: dict[str, Any]) -> str:
    late = summary["late_steps_per_rank"]
    return f"{sum(late)} of {sum(summary['steps_per_rank'])}"


def _counts(summary: dict[str, Any], of: Replicas) -> str:
    counts = zip(summary["late_steps_per_rank"], summary["stood_in_steps_per_rank"], strict=True)
    late = [f"{of.who(rank)}: {late} ({stood_in} stood in for)" for rank, (late, stood_in) in enumerate(counts) if late]
    return ", ".join(late) or f"no {of.row}"


def _least(summary: dict[str, Any], where: str, row: str) -> str:
    least = summary[f"least_contribution{where}"]
    return "" if least is None else f"least from one {row}: {least:.0%} of the mean"


def _accuracy(summary: dict[str, Any]) -> str:
    return f"accuracy {summary['validation_accuracy']:.1%}" if "validation_accuracy" in summary else ""
