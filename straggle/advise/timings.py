"""A run's times as arrays: from `straggle.watch`, with a file for each rank, or from a trace, with all ranks in a line.

What a late rank did not do is put back as it would have been (`untruncated_stages`), so that a rank is as slow in
these arrays as it is, whatever became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from straggle.backward.stages import shares_of
from straggle.observe.numbers.link_spells import LinkSpell, link_spells
from straggle.observe.numbers.reader import Trace, Watched, files_of, num_warmup_steps
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.numbers.run import Array
from straggle.observe.watch.file import FOLDER
from straggle.observe.watch.job import DATA_PARALLEL
from straggle.policies.network.rank_links import links_of
from straggle.policies.what_if.untruncated import untruncated_stages
from straggle.report import PHASES, StepReport

LEAST_STEPS = 10
OWN: tuple[str, ...] = tuple(phase for phase in PHASES if phase != "collective")  # phases of a rank's own work
_OF_STEPS = ("step", "seconds", "network_s", "collective_s", "late", "entered_s", "unit_s")


@dataclass(frozen=True)
class Timings:
    """Seconds of each step and rank, without the first steps: caches warm up in these.

    ``step``, ``seconds`` and ``network_s`` have the shape (steps,): the number, the entire step, and what was left of
    it after the slowest rank's own work. ``phases`` of shape (steps, ranks) sum up to a rank's own work between two
    merges; ``pauses`` are not in the other phases. ``collective_s``, (steps, ranks), is beside them: waiting in
    collectives of the loop's own. ``late``, of the same shape: whether the rank was late. ``entered_s`` is when in that
    time it entered the step.
    ``unit_s``, of shape (steps, ranks, units), is when each unit of its gradients was done, from then on.
    ``unit_share``, of the same shape, is the unit's share of the gradients. Stages are the last units; ``stage_share``
    is each stage's share of the model. ``slow_links`` are those of the entire run, if it ``knows_links``. ``pulled``:
    the ranks drew the micro-batches of these steps from pools. If a model is sharded, the ranks here are ``replicas``,
    but not if it was watched: ``job`` is then its kind (`Job.kind`), ``replica_ranks`` how many ranks have one copy of
    the model, and ``unknown`` what the files do not tell.
    """

    source: Path
    watched: bool
    step: Array
    seconds: Array
    network_s: Array
    phases: Mapping[str, Array]
    collective_s: Array
    entered_s: Array
    unit_s: Array
    unit_share: Array
    stage_share: Array
    late: NDArray[np.bool_]
    slow_links: tuple[LinkSpell, ...] = ()
    knows_links: bool = False
    pulled: bool = False
    replicas: Replicas = field(default_factory=Replicas)
    job: str = "DDP"
    replica_ranks: int = 1
    unknown: tuple[str, ...] = ()

    @property
    def knows_loader(self) -> bool:
        """Whether loading is told from the rest of what the loop does after the optimizer's step."""
        return bool(self.phases["loop_end"].any())

    @property
    def is_predictable(self) -> bool:
        """Whether each rank works by itself until the merge, so that a step with a policy can be predicted."""
        return self.job in DATA_PARALLEL

    @property
    def num_steps(self) -> int:
        """Steps that are looked at."""
        return len(self.step)

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return int(self.entered_s.shape[1])

    @property
    def num_microbatches(self) -> int:
        """The largest number in a step; the last micro-batch comes in stages."""
        return int(self.unit_s.shape[-1]) - len(self.stage_share) + 1

    @property
    def own_s(self) -> Array:
        """Each rank's own work in each step, shape (steps, ranks)."""
        return np.asarray(sum(self.phases.values()))

    def select(self, steps: Array | slice) -> Timings:
        """Some of the steps, by position or as flags."""
        rows = {name: getattr(self, name)[steps] for name in _OF_STEPS}
        phases = {name: seconds[steps] for name, seconds in self.phases.items()}
        return replace(self, phases=phases, unit_share=self.unit_share[steps], **rows)


def read_timings(path: Path) -> Timings:
    """From a trace, or the folder of a run that has one or was watched; raises ``ValueError`` if there is none."""
    if path.is_dir():
        if (files := files_of(path)) is None:
            raise ValueError(
                f"{path}: neither trace.jsonl nor {FOLDER}/rank*.jsonl in it; give the run_dir of straggle train or "
                "straggle.watch, or a trace.jsonl"
            )
        return _without_warmup(_from_trace(files) if isinstance(files, Trace) else _from_watch(files))
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a trace.jsonl or a run_dir")
    if path.parent.name == FOLDER or path.name.startswith("rank"):
        raise ValueError(f"{path}: one rank's times say nothing about the others; give the folder, {path.parent}")
    return _without_warmup(_from_trace(Trace(path)))


def _without_warmup(timings: Timings) -> Timings:
    if timings.num_steps < LEAST_STEPS:
        raise ValueError(f"{timings.source}: {timings.num_steps} steps are too few; {LEAST_STEPS} are needed at least")
    if timings.num_ranks < 2 and not timings.watched:
        raise ValueError(f"{timings.source}: one rank waits for no other; at least two are needed")
    return timings.select(slice(num_warmup_steps(timings.num_steps), None))


# -- straggle.watch


def _from_watch(files: Watched) -> Timings:
    try:
        _refuse_parts(files)
        return _of_watched(files)
    except KeyError as error:
        raise ValueError(f"{files.folder}: not written by straggle.watch: {error!r}") from None


def _refuse_parts(files: Watched) -> None:
    """Raises ``ValueError`` unless there is one file of each rank of one run."""
    ranks = [head["rank"] for head in files.heads]
    world_size = files.heads[0]["world_size"]
    if missing := sorted(set(range(world_size)) - set(ranks)):
        raise ValueError(
            f"{files.folder}: {len(ranks)} of {world_size} ranks are there, rank {missing[0]} is missing: copy the "
            "files of all machines to one folder, or, if it ran on this one, call straggle.watch(model) in the script"
        )
    if any(head["world_size"] != world_size for head in files.heads) or len(ranks) != world_size:
        raise ValueError(f"{files.folder}: the files are of runs of different sizes; remove those of the older one")


def _of_watched(files: Watched) -> Timings:
    heads, lines = files.heads, tuple(zip(*files.lines(), strict=True))
    steps = len(lines[0])
    column = {
        name: np.array([[line[name] for line in own] for own in lines], dtype=float).T
        for name in ("seconds", "wait_s", "compute_s")
    }
    times: dict[str, Array] = {
        phase: np.array([[line.get(f"{phase}_s", 0.0) for line in own] for own in lines], dtype=float).T
        for phase in PHASES
    }
    phases: dict[str, Array] = {phase: times[phase] for phase in OWN}
    pauses = np.zeros_like(column["seconds"])
    for phase in phases:
        paused = [[sum(line["pauses"].get(phase, {}).values()) for line in own] for own in lines]
        within = np.minimum(np.array(paused, dtype=float).T, phases[phase])
        phases[phase], pauses = phases[phase] - within, pauses + within
    phases["pauses"] = pauses
    own_s, seconds = np.asarray(sum(phases.values())), np.median(column["seconds"], axis=1)
    stages = heads[0]["stages"]
    if any(head["stages"] != stages for head in heads):  # ranks finish their gradients in different orders
        stages = [{"name": "all", "numel": 1}]
    unit_s, unit_share, stage_share = _units(lines, steps, stages)
    return Timings(
        source=files.folder,
        watched=True,
        step=np.array([line["step"] for line in lines[0]], dtype=float),
        seconds=seconds,
        network_s=np.maximum(0.0, seconds - own_s.max(axis=1)),
        phases=phases,
        collective_s=times["collective"],
        late=np.zeros(own_s.shape, dtype=bool),
        entered_s=np.maximum(0.0, own_s - column["compute_s"]),
        unit_s=unit_s,
        unit_share=unit_share,
        stage_share=stage_share,
        job=heads[0].get("job", "DDP"),
        replica_ranks=heads[0].get("replica_ranks", 1),
        unknown=tuple(heads[0].get("unknown", ())),
    )


def _units(lines: tuple[Any, ...], steps: int, stages: list[dict[str, Any]]) -> tuple[Array, Array, Array]:
    """Micro-batches but the last, which comes in stages."""
    stage_share = np.array(shares_of([stage["numel"] for stage in stages]))
    most = max(len(line["microbatch_s"]) for own in lines for line in own) - 1
    unit_s = np.zeros((steps, len(lines), most + len(stages)))
    unit_share = np.zeros_like(unit_s)
    for rank, own in enumerate(lines):
        for step, line in enumerate(own):
            earlier = line["microbatch_s"][:-1]
            in_stages = line["stage_s"] if len(stages) == len(line["stage_s"]) else line["stage_s"][-1:]
            begin = earlier[-1] if earlier else 0.0
            unit_s[step, rank, :most] = [*earlier, *[begin] * (most - len(earlier))]
            unit_s[step, rank, most:] = np.maximum(in_stages, begin)
            unit_s[step, rank, -1] = max(line["compute_s"], unit_s[step, rank, -1])
            unit_share[step, rank, : len(earlier)] = 1 / (len(earlier) + 1)
            unit_share[step, rank, most:] = stage_share / (len(earlier) + 1)
    return unit_s, unit_share, stage_share


# -- traces


def _from_trace(trace: Trace) -> Timings:
    path, reports = trace.path, list(trace.reports())
    if not reports:
        raise ValueError(f"{path}: there is no complete step in it yet")
    plan, ranks = [(s.name, s.numel) for s in reports[-1].stages], len(reports[-1].ranks)
    # the first step has other stages; one for which a rank had no data, or was absent, shows nothing of its speed
    kept = [
        report
        for report in reports
        if [(s.name, s.numel) for s in report.stages] == plan
        and len(report.ranks) == ranks
        and not any(rank.idle or rank.absent for rank in report.ranks)
    ]
    if not kept:
        raise ValueError(f"{path}: there is no step in which all ranks had data")
    return _of_reports(path, kept)


def _of_reports(path: Path, reports: list[StepReport]) -> Timings:
    stages = reports[-1].stages
    stage_share = np.array(shares_of([stage.numel for stage in stages]) if stages else [1.0])
    of = {
        name: np.array([[getattr(rank, name) for rank in report.ranks] for report in reports], dtype=float)
        for name in (*(f"{phase}_s" for phase in PHASES), "wait_s", "compute_s", "late", "stood_in")
    }
    if stages:
        stage_s = np.array([[rank.stage_s for rank in report.ranks] for report in reports], dtype=float)
    else:  # the whole is the only one
        stage_s = np.where(of["late"] == 0, of["compute_s"], np.nan)[..., np.newaxis]
    unit_share = np.broadcast_to(stage_share, stage_s.shape).copy()
    unit_s = _untruncated(stage_s, of["compute_s"], stage_share)
    finished = of["late"] == 0
    last = np.where(finished, np.maximum(unit_s[..., -1], np.nan_to_num(of["compute_s"])), unit_s[..., -1])
    unit_s[..., -1] = last
    seconds = np.array([report.seconds for report in reports])
    phases, network_s = _whole_phases(of, last, seconds, reports)
    own_s = np.asarray(sum(phases.values()))
    entered_s = np.maximum(0.0, own_s - last)
    cost = np.array([[rank.cost for rank in report.ranks] for report in reports], dtype=float)
    if (cost != 1).any():  # a long batch is expected to take longer: all as in steps of the mean cost
        phases, unit_s = _of_mean_cost(phases, cost), unit_s / cost[..., np.newaxis]
        seconds = seconds - own_s.max(axis=1) + np.asarray(sum(phases.values())).max(axis=1)
    return Timings(
        source=path,
        watched=False,
        step=np.array([report.step for report in reports], dtype=float),
        seconds=seconds,
        network_s=network_s,
        phases=phases,
        collective_s=np.nan_to_num(of["collective_s"]),
        late=of["late"] == 1,
        entered_s=entered_s,
        unit_s=unit_s,
        unit_share=unit_share,
        stage_share=stage_share,
        slow_links=link_spells(
            ((report.step, links_of(report), report.seconds) for report in reports),
            num_bytes=4 * sum(stage.numel for stage in stages),
        ),
        knows_links=any(link.is_known for link in links_of(reports[-1])),
        pulled=any(report.pool_parts for report in reports),
        replicas=Replicas.of(reports),
    )


def _untruncated(stage_s: Array, compute_s: Array, stage_share: Array) -> Array:
    """When each stage would have been finished on a rank that was not stopped."""
    known = untruncated_stages(*map(torch.from_numpy, (stage_s, compute_s, stage_share))).numpy()
    typical = np.nanmedian(known, axis=1, keepdims=True)
    filled = np.where(np.isnan(known), typical, known)  # a rank that never entered did its peers' work, once it came
    return np.asarray(np.maximum.accumulate(filled, axis=-1))


def _of_mean_cost(phases: Mapping[str, Array], cost: Array) -> dict[str, Array]:
    computes = ("forward", "backward")
    return {name: values / cost if name in computes else values for name, values in phases.items()}


def _whole_phases(
    of: Mapping[str, Array], whole_s: Array, seconds: Array, reports: list[StepReport]
) -> tuple[dict[str, Array], Array]:
    """The phases with what a late rank left undone, and the step's seconds beside the slowest rank's work.

    A rank that was stood in for in several steps was stuck in one piece, which counts where it began, in what the rank
    was doing.
    """
    phases: dict[str, Array] = {name: np.nan_to_num(of[f"{name}_s"]) for name in OWN}
    busy_s = np.asarray(sum(phases.values()))
    network_s = np.maximum(0.0, seconds - busy_s.max(axis=1))
    typical = {name: np.median(values, axis=1) for name, values in phases.items()}
    for rank in range(busy_s.shape[1]):
        stuck_since: int | None = None
        for step in np.flatnonzero(of["late"][:, rank] == 1):
            cause = reports[step].ranks[rank].cause
            cause = cause if cause in phases else "backward"
            if of["stood_in"][step, rank] == 1 and stuck_since is not None and of["stood_in"][step - 1, rank] == 1:
                phases[cause][stuck_since, rank] += busy_s[step, rank]
                for name in OWN:
                    phases[name][step, rank] = typical[name][step]
                continue
            stuck_since = int(step) if of["stood_in"][step, rank] == 1 else None
            left_s = whole_s[step, rank] - np.nan_to_num(of["compute_s"][step, rank])
            slowness = whole_s[step, rank] / max(1e-9, float(np.median(whole_s[step])))
            if cause == "forward":  # the forward pass was cut short, and there was no backward pass at all
                to_forward = max(0.0, typical["forward"][step] * slowness - phases["forward"][step, rank])
                phases["forward"][step, rank] += min(left_s, to_forward)
                left_s -= min(left_s, to_forward)
            phases["backward"][step, rank] += max(0.0, left_s)
    return {**phases, "pauses": np.zeros_like(busy_s)}, network_s
