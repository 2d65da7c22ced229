"""A run's files as arrays: what happened in each step and to each rank. Read line by line: traces are long."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from straggle.observe.members import read_members
from straggle.observe.numbers.fairness import Fairness, fairness_of
from straggle.observe.numbers.goodput import USES, Goodput, Uses
from straggle.observe.numbers.link_spells import LinkSpell, link_spells
from straggle.observe.numbers.reader import NO_TRACE, TRACE, files_of, num_warmup_steps
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.stuck import read_stuck
from straggle.policies.network.rank_links import RankLink
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import CAUSES, MembersReport, RankReport, StageReport, StepReport, StuckReport
from straggle.schema import numbers_of

Array: TypeAlias = NDArray[np.float64]
_LINK = ("latency_s", "up_bytes_per_s", "down_bytes_per_s")
_FIELDS = (*(own.name for own in numbers_of(RankReport) if own.name != "rank"), "cause")


_ELEMENT_BYTES = 4  # what a gradient's elements are is not in a trace


@dataclass(frozen=True)
class Run:
    """Arrays over steps have shape (steps,), those over steps and ranks (steps, ranks); NaN: not known, or no such
    rank.

    ``ranks`` has the numbers of `RankReport`, flags as 0 and 1 and ``cause`` as an index into `CAUSES`.
    ``ddp_s`` is predicted (`DdpPrediction`). ``stages`` are those of the last step. ``stage_share``,
    shape (stages, ranks), is the mean share of each stage that each rank computed, over the ``num_stage_steps`` last
    steps, which have this plan; ``stage_came``, shape (stages,), is that over all ranks, in the mean step. ``part``,
    shape (steps, ranks), is what each rank had of a step, over an equal part: 1 but in a step with a pool, and 0 if it
    was absent or had no data. ``seconds`` have those of discarded attempts at a step: with the last one it had
    ``pool_attempts``. ``pool_parts``: the micro-batches in each step's pool; 0: the ranks did not draw.
    ``dropped``: the share of each step's gradients that did not come in. ``changes`` of the members, and when they
    were in seconds since 1970, are those of ``members.jsonl``; ``stuck`` is what ``stuck.jsonl`` has. If a model is
    sharded, the ranks here are ``replicas``. ``uses``, shape (uses, steps, ranks): seconds of each of `USES`, NaN for a
    rank that is not in the trace then. ``different``: steps in which ranks had other parameters than most, these ranks,
    and the names of what differed. ``without_store``: by rank, the steps in which the store did not answer it.
    ``bad_loss``, shape (steps,): whether a loss was logged that is not finite, as far as it is known.
    """

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: Array
    seconds: Array
    network_s: Array
    ddp_s: Array
    deadline_s: Array
    loss: Array
    skipped: Array
    pool_parts: Array
    pool_attempts: Array
    dropped: Array
    ranks: Mapping[str, Array]
    stages: tuple[StageReport, ...]
    stage_share: Array
    stage_came: Array
    part: Array
    num_stage_steps: int
    fairness: Fairness
    goodput: Goodput
    uses: Array
    changes: tuple[tuple[float, MembersReport], ...] = ()
    replicas: Replicas = field(default_factory=Replicas)
    stuck: tuple[StuckReport, ...] = ()
    different: tuple[tuple[int, tuple[int, ...], tuple[str, ...]], ...] = ()
    without_store: Mapping[int, int] = field(default_factory=dict)
    bad_loss: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def num_steps(self) -> int:
        """Steps in the trace."""
        return len(self.step)

    @property
    def num_ranks(self) -> int:
        """Ranks in the trace."""
        return int(self.ranks["late"].shape[1])

    @property
    def knows_links(self) -> bool:
        """Whether the ranks measured their links."""
        return bool(np.isfinite(self.ranks["latency_s"]).any())

    @property
    def slow_links(self) -> tuple[LinkSpell, ...]:
        """Whose link was slow, and when."""
        of = [self.ranks[name].tolist() for name in _LINK]
        steps = (
            (int(step), [RankLink(*own) for own in zip(*links, strict=True)], seconds)
            for step, seconds, *links in zip(self.step.tolist(), self.seconds.tolist(), *of, strict=True)
        )
        return link_spells(steps, num_bytes=_ELEMENT_BYTES * sum(stage.numel for stage in self.stages))

    @property
    def warmup(self) -> int:
        """First steps that step times leave out."""
        return num_warmup_steps(self.num_steps)


def read_run(run_dir: Path, *, name: str | None = None) -> Run:
    """Read ``trace.jsonl``, or what `straggle.watch` wrote, and if they exist ``config.yaml`` and ``summary.json``.

    Raises ``ValueError`` if there is no trace, or no step in it.
    """
    path = run_dir / TRACE
    if (files := files_of(run_dir)) is None:
        raise ValueError(NO_TRACE.format(path))
    columns = _Columns()
    for report, ended_at in files.timed():
        columns.add(report, ended_at)
    if not columns.steps:
        raise ValueError(f"{path}: there is no complete step in it yet")
    config = _config(run_dir / "config.yaml")
    summary = _summary(run_dir / "summary.json", last_step=int(columns.steps[-1][0]))
    run = columns.run(name or run_dir.resolve().name, run_dir, config, summary)
    stuck = tuple(report for _, report in read_stuck(run_dir))
    return replace(run, changes=tuple(read_members(run_dir)), stuck=stuck)


def run_of(reports: Iterable[StepReport]) -> Run:
    """The run of these steps, without its configuration and its summary."""
    columns = _Columns()
    for report in reports:
        columns.add(report)
    return columns.run("", Path(), {}, {})


def read_steps(run: Run, positions: Collection[int]) -> dict[int, StepReport]:
    """The full reports of some steps, by their position in the run; other lines of a trace are not parsed again."""
    files = files_of(run.run_dir)
    return {} if files is None else files.some(positions)


class _Columns:
    """Gathers a run step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []
        self._ranks: list[Array] = []
        self._prediction = DdpPrediction()
        self._plan: tuple[StageReport, ...] = ()
        self._sum: Array = np.zeros((0, 0))
        self._count: Array = np.zeros((0, 0))
        self._came: Array = np.zeros((0, 2))
        self._parts: list[Array] = []  # of each step
        self._num_stage_steps = 0
        self._replicas = Replicas()
        self._different: list[tuple[int, tuple[int, ...], tuple[str, ...]]] = []
        self._without_store: Counter[int] = Counter()
        self._tells_later = False  # a device what the loop logged: until then it is NaN
        self._bad_loss: list[bool] = []
        self._uses = Uses()
        self._used: list[Array] = []  # of each step

    def add(self, report: StepReport, ended_at: float = math.nan) -> None:
        """One more step, which ended ``ended_at``."""
        self._used.append(_of_uses(self._uses.add(report, ended_at)))
        loss = report.scalars.get("loss", math.nan)
        ddp_s = self._prediction.add(report).seconds
        times = (report.whole_s, report.network_s, ddp_s, report.deadline_s)
        row = (report.step, *times, loss, report.skipped, report.pool_parts, report.pool_attempts, report.dropped_share)
        self._ranks.append(np.array([list(_values(rank)) for rank in report.ranks], dtype=float).T)
        self._parts.append(np.array(report.parts))
        self._add_stages(report)
        self._replicas.add(report)
        if report.different_ranks:
            self._different.append((report.step, report.different_ranks, report.different_tensors))
        self._without_store.update(report.ranks_without_store)
        self._tells_later |= report.counts_behind > 0
        self._bad_loss.append("loss" in report.scalars and not math.isfinite(loss))
        self.steps.append(tuple(map(float, row)))

    def _add_stages(self, report: StepReport) -> None:
        names = [(stage.name, stage.numel) for stage in report.stages]
        shape = (len(names), len(report.ranks))
        planned = [(stage.name, stage.numel) for stage in self._plan]
        if len(self.steps) == 1 or names != planned or shape != self._sum.shape:  # stages are planned after the first
            self._plan, self._sum, self._count = report.stages, np.zeros(shape), np.zeros(shape)
            self._came, self._num_stage_steps = np.zeros((len(names), 2)), 0
        self._num_stage_steps += 1
        unknown = (math.nan,) * len(names)
        given = [rank.stages if len(rank.stages) == len(names) else unknown for rank in report.ranks]
        shares = np.array(given, dtype=float).reshape(shape[::-1]).T
        part = self._parts[-1] * np.isfinite(shares)
        self._sum += part * np.nan_to_num(shares)
        self._count += part
        came, there = (part * np.nan_to_num(shares)).sum(axis=1), part.sum(axis=1)
        if report.pool_weight:  # what is lost of a pool, no rank may have
            there = there.clip(min=_num_with_data(report))
        known = there > 0
        self._came[known] += np.stack([came[known] / there[known], np.ones(known.sum())], axis=1)

    def run(self, name: str, run_dir: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Run:
        """The complete run."""
        columns = np.array(self.steps, dtype=float).T
        num_ranks = max(values.shape[1] for values in self._ranks)
        ranks = np.full((len(_FIELDS), len(self.steps), num_ranks), np.nan)
        for number, values in enumerate(self._ranks):
            ranks[:, number, : values.shape[1]] = values
        uses = np.full((len(USES), len(self.steps), num_ranks), np.nan, dtype=np.float32)
        for number, values in enumerate(self._used):
            uses[:, number, : values.shape[1]] = values
        share = _quotient(self._sum, self._count)
        part = np.zeros((len(self.steps), num_ranks))
        for number, own in enumerate(self._parts):
            part[number, : len(own)] = own
        step, seconds, network_s, ddp_s, deadline_s, loss, skipped, pool_parts, pool_attempts, dropped = columns
        of = dict(zip(_FIELDS, ranks, strict=True))
        has_part = (of["idle"] == 0) & (of["absent"] == 0) & np.isfinite(of["reach"])
        return Run(
            name=name,
            run_dir=run_dir,
            config=config,
            summary=summary,
            step=step,
            seconds=seconds,
            network_s=network_s,
            ddp_s=ddp_s,
            deadline_s=deadline_s,
            loss=loss,
            skipped=skipped,
            pool_parts=pool_parts,
            pool_attempts=pool_attempts,
            dropped=dropped,
            ranks=of,
            stages=self._plan,
            stage_share=share,
            stage_came=_quotient(*self._came.T),
            part=part,
            num_stage_steps=self._num_stage_steps,
            fairness=fairness_of(np.where(has_part, of["weight"], 0.0), of["reach"], share),
            goodput=self._uses.goodput(),
            uses=uses,
            replicas=self._replicas,
            different=tuple(self._different),
            without_store=dict(self._without_store),
            bad_loss=np.array(self._bad_loss) & (not self._tells_later),
        )


def _num_with_data(report: StepReport) -> int:
    return sum(not (rank.idle or rank.absent) for rank in report.ranks)


def _quotient(total: Array, count: Array) -> Array:
    """NaN for what there is none of."""
    return np.asarray(np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))


def _of_uses(of_ranks: Sequence[Mapping[str, float]]) -> Array:
    """Seconds by use and rank."""
    return np.array([[own.get(use, 0.0) for own in of_ranks] for use in USES], dtype=np.float32)


def _values(rank: RankReport) -> Iterator[float]:
    for name in _FIELDS:
        value = getattr(rank, name)
        yield math.nan if value is None else float(CAUSES.index(value) if name == "cause" else value)


def _config(path: Path) -> Mapping[str, Any]:
    """The run's configuration; empty if there is none."""
    if not path.is_file():
        return {}
    container = OmegaConf.to_container(OmegaConf.load(path))
    return {str(key): value for key, value in container.items()} if isinstance(container, dict) else {}


def _summary(path: Path, *, last_step: int) -> Mapping[str, Any]:
    """The run's summary; empty if there is none, or if it is older than the trace."""
    if not path.is_file():
        return {}
    summary: Mapping[str, Any] = json.loads(path.read_text())
    return summary if summary.get("steps") == last_step + 1 else {}
