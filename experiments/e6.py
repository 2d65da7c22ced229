"""E6: no rank is delayed, and still the group does not wait for all: what does dropping the last of six cost?

Six ranks wait for all; wait with a deadline that no rank passes; merge the first five of six, where the sixth is always
the same, another in each step, or another for each stage. Real ranks show that the deadline alone changes nothing;
logical ranks, which merge as real ones do, show the rest over many seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn

from experiments._intervals import difference_interval, mean_interval
from experiments._logical import (
    Lateness,
    Learned,
    Samples,
    Setting,
    Treatment,
    from_one_pool,
    learn,
    nobody,
    of_their_own,
    same_ranks,
)
from experiments._models import WithModel, digits_mlp
from experiments.result import Line, Result
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.delays import NoDelay
from straggle.lab.simulate.ranks import Cluster
from straggle.lab.simulate.units import Work
from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.text import Text
from straggle.lab.workloads.workload import Workload
from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import FixedDeadline, LateHandling

RANKS, BATCH = 6, 8
REAL_STEPS = 30
ALL, DEADLINE = "wait for all", "deadline only"


def by_deadline(num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
    """The ranks that a deadline makes late which no rank passes."""
    units = Work(1.0, num_stages=num_units).units("stage")
    cluster = Cluster(num_ranks, units, FixedDeadline(1.2), LateHandling(), Constant(), num_ranks)
    for unit_s in NoDelay().steps(units.base_s, num_ranks, generator):
        yield cluster.step(unit_s.cumsum(1)) >= 1


def half(late: int, num_units: int, _generator: Generator) -> Tensor:
    """A late rank stops half way."""
    return torch.full((late,), num_units // 2)


def other_ranks(late: int) -> Lateness:
    """In each step other ranks are late, and finish nothing."""

    def steps(num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
        while True:
            finished = torch.ones(num_ranks, num_units, dtype=torch.bool)
            finished[torch.randperm(num_ranks, generator=generator)[:late]] = False
            yield finished

    return steps


def other_ranks_per_unit(late: int) -> Lateness:
    """Of each unit the part of ``late`` ranks is missing, drawn for each unit: the first N - ``late`` packets."""

    def steps(num_ranks: int, num_units: int, generator: Generator) -> Iterator[Tensor]:
        while True:
            drawn = torch.rand(num_ranks, num_units, generator=generator)
            yield drawn.argsort(dim=0).argsort(dim=0) >= late

    return steps


TREATMENTS = {
    ALL: Treatment(nobody),
    DEADLINE: Treatment(by_deadline),
    "5 of 6, the same rank late": Treatment(same_ranks(1)),
    "the same rank late, stops half way": Treatment(same_ranks(1, half)),
    "5 of 6, another rank in each step": Treatment(other_ranks(1)),
    "5 of 6, another rank for each stage": Treatment(other_ranks_per_unit(1)),
    "3 of 6, others in each step": Treatment(other_ranks(3)),
    "3 of 6, others for each stage": Treatment(other_ranks_per_unit(3)),
}


@dataclass(frozen=True)
class Task:
    """One workload with its samples; ``score`` is higher where the model is better, and printed with ``digits``."""

    name: str
    workload: Callable[[int], Workload]
    samples: Callable[[Workload, int], Samples]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    steps: int
    seeds: int
    num_stages: int
    unit: str
    score: Callable[[Learned], float]
    digits: int = 2


def run(quick: bool) -> Result:
    """20 seeds on digits and 4 on text; quick: 3 on digits, with fewer steps."""
    torch.set_num_threads(1)
    lines = [_real_line()]
    found = {task.name: _runs(task) for task in _tasks(quick)}
    for task in _tasks(quick):
        lines += _lines(task, found[task.name])
    return Result(f"{RANKS} ranks, no rank delayed", tuple(lines), _notes(quick))


# -- real ranks


def _real_line() -> Line:
    """Real ranks with and without a deadline: the same parameters, bit for bit."""
    ranks = run_on_ranks(_train_both, RANKS)
    late = sum(count for _, _, count in ranks)
    same = len({digest for plain, under, _ in ranks for digest in (plain, under)}) == 1
    measured = f"{'equal' if same else 'DIFFERENT'}, {late} late"
    what = f"{RANKS} real ranks, {REAL_STEPS} steps: parameters under a deadline and without"
    return Line(what, "equal bit for bit, 0 late", measured, same and late == 0)


def _train_both(rank: int) -> tuple[str, str, int]:
    """Train without a deadline and with one that no rank passes: the parameters' hashes, and how often it was late."""
    return _train(rank, None)[0], *_train(rank, 60.0)


def _train(rank: int, budget_s: float | None) -> tuple[str, int]:
    """Train on a real rank: a hash of the parameters, and how often it was late."""
    torch.manual_seed(0)
    workload = Digits(channels=8, depth=3)
    module = workload.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    samples = from_one_pool(workload, RANKS, BATCH, 0)
    model = StagedDataParallel(module, deadline=None if budget_s is None else FixedDeadline(budget_s))
    late = 0
    for step in range(REAL_STEPS):
        with model.step():
            workload.loss(model, workload.batch(samples(step)[rank])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        late += model.last_report is not None and rank in model.last_report.late_ranks
    model.close()
    return _digest(module), late


def _digest(module: nn.Module) -> str:
    content = hashlib.sha256()
    for parameter in module.parameters():
        content.update(parameter.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


# -- logical ranks


def _tasks(quick: bool) -> list[Task]:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    adam = partial(torch.optim.AdamW, lr=0.003)
    steps, seeds = (60, 3) if quick else (150, 20)

    def mlp(seed: int) -> Workload:
        return WithModel(Digits(seed=seed), digits_mlp)

    def text(_seed: int) -> Workload:
        return Text(context=32, width=32, depth=2, heads=2)

    def accuracy(learned: Learned) -> float:
        return 100 * learned.scores["accuracy"]

    def loss(learned: Learned) -> float:
        return -learned.scores["loss"]

    tasks = [
        Task("digits, samples alike", mlp, _pool, sgd, steps, seeds, 3, "accuracy (%)", accuracy),
        Task("digits, own classes", mlp, _own, sgd, steps, seeds, 3, "accuracy (%)", accuracy),
        Task("text, own parts of it", text, _own, adam, steps, 4, 8, "minus validation loss", loss, 4),
    ]
    return tasks[:2] if quick else tasks


def _pool(workload: Workload, seed: int) -> Samples:
    return from_one_pool(workload, RANKS, BATCH, seed)


def _own(workload: Workload, seed: int) -> Samples:
    return of_their_own(workload, RANKS, BATCH, seed, by_class=True)


def _runs(task: Task) -> dict[str, tuple[Learned, ...]]:
    """Each treatment's runs, one for each seed."""
    found: dict[str, list[Learned]] = {}
    for seed in range(task.seeds):
        workload = task.workload(seed)
        setting = Setting(
            workload, task.make_optimizer, task.samples(workload, seed), task.steps, seed, task.num_stages
        )
        for name, treatment in TREATMENTS.items():
            if seed == 0 or name != DEADLINE:  # equal bit for bit: once is enough
                found.setdefault(name, []).append(learn(setting, treatment))
    return {name: tuple(runs) for name, runs in found.items()}


def _lines(task: Task, found: dict[str, tuple[Learned, ...]]) -> list[Line]:
    scores = {name: [task.score(run) for run in runs] for name, runs in found.items()}
    reference = scores[ALL]
    lines = [Line(f"{task.name}: {ALL}, {task.unit}", "", f"{mean_interval(reference):.{task.digits}f}")]
    same = _digest(found[ALL][0].model) == _digest(found[DEADLINE][0].model)
    lines.append(Line(f"{task.name}: {DEADLINE}", "equal bit for bit", "equal" if same else "DIFFERENT", same))
    for name, values in scores.items():
        if name not in (ALL, DEADLINE):
            gap = difference_interval(values, reference)
            lines.append(Line(f"{task.name}: {name}", "an open question", f"{gap:+.{task.digits}f}"))
    return lines


def _notes(quick: bool) -> tuple[str, ...]:
    counts = ", ".join(f"{task.seeds} seeds of {task.steps} steps for {task.name}" for task in _tasks(quick))
    return (
        f"{counts}.",
        "Differences from waiting for all are between runs of the same seed, with 95 % intervals.",
    )
