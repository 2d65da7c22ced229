"""What is merged is what the report says that each rank gave, whatever happened meanwhile: jobs drawn by chance.

As with `test_replay_by_chance.py`, STRAGGLE_JOBS says which.
"""

import itertools
import math
import random
import time
from dataclasses import dataclass, field

import pytest
import torch
from by_chance import JOBS, at_random, draw_hits, made_to_be_hit, run_with_hits
from torch import nn

from straggle import (
    Abstain,
    AutoDeadline,
    Elastic,
    FirstK,
    LastMerged,
    LateHandling,
    Merge,
    MovingAverage,
    QuantileDeadline,
    StagedDataParallel,
    Zero,
)
from straggle.backward import stages

NUM_LAYERS = 9
LAYERS = [f"layers.{number}" for number in range(NUM_LAYERS)]
OF_MERGED = (LastMerged, MovingAverage)
DECAY = 0.5
TOLERANCE = 1e-4  # of sums in float32, relative


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, h, factor):
        return h + self.weight * factor


class Scales(nn.Module):
    """The gradient of each layer's weight is the factor that it was given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(NUM_LAYERS))

    def forward(self, factors):
        h = torch.zeros(())
        for layer, factor in zip(self.layers, factors, strict=True):
            h = layer(h, factor)
        return h


@dataclass(frozen=True)
class Plan:
    """One job; ``options`` are those of the model. A share of the gradients is NaN."""

    world_size: int
    has_members: bool
    options: dict = field(hash=False)
    hits: tuple  # kind, rank, and a number from 0 to 1
    num_parts: int = 0  # of each step's pool; 0: there is none
    num_microbatches: int = 1
    nan: float = 0.0
    stalls: float = 0.0
    weighs: bool = False
    in_buckets: bool = True  # a layer is a bucket of its own
    joins: bool = False  # ranks have not all as many batches

    @property
    def tolerance(self):
        return 0.02 if self.options["merge"].wire_dtype else TOLERANCE

    @property
    def estimator(self):
        return self.options["estimator"]


def draw(number):
    chance = random.Random(number)
    pick, world_size = chance.choice, chance.choice([3, 4])
    work = pick(["plain", "micro-batches", "pool"])
    granularity = pick(["stage", "stage", "microbatch" if work == "micro-batches" else "stage", "step"])
    estimator = pick([Abstain(), Abstain(), Zero(), LastMerged(0.5), MovingAverage(DECAY)])
    deadlines = [None, 0.05, 0.05, QuantileDeadline(0.6, slack=1.2), AutoDeadline(), FirstK(2)]
    has_members = chance.random() < 0.75
    return Plan(
        world_size,
        has_members,
        options={
            "deadline": pick(deadlines),
            "estimator": estimator,
            "late_handling": LateHandling(grace_s=pick([0.005, 0.02]), granularity=granularity),
            "merge": Merge(check_every=10, wire_dtype=pick([None, None, "bfloat16"])),
        },
        hits=draw_hits(chance, world_size, has_members=has_members),
        num_parts=pick([world_size, 5, 8]) if work == "pool" else 0,
        num_microbatches=pick([2, 3]) if work == "micro-batches" else 1,
        nan=pick([0.0, 0.0, 0.05]) if isinstance(estimator, Abstain) else 0.0,
        stalls=pick([0.0, 0.02, 0.05]),
        weighs=pick([False, True]),
        in_buckets=pick([False, True, True]),
        joins=pick([False, False, True]),
    )


def factor_of(plan, rank, step, part, layer):
    if at_random("NaN", rank, step, layer) < plan.nan:
        return math.nan
    own = 1 + int(8 * at_random(rank, step, layer))
    return own if plan.num_parts else own * (1 + part)  # who draws which part of a pool is not known


def own_gradient(plan, rank, step, layer, share=1.0):
    """The mean over the first micro-batches, this share of them."""
    done = 1 if plan.num_parts else round(share * plan.num_microbatches)
    return sum(factor_of(plan, rank, step, part, layer) for part in range(done)) / done


class Expected:
    """What a rank expects to be merged, from the reports alone."""

    def __init__(self, plan, *, was_away=False):
        self._plan = plan
        self._knows = not (was_away and isinstance(plan.estimator, MovingAverage))  # it has not seen what was averaged
        self._members, self._kept = set(), {}
        self.num_left = 0  # stages with something of a rank that left in their step

    def problems(self, report, gradients):
        """The stages whose gradient is another."""
        found = []
        for number, stage in enumerate(report.stages if self._knows else ()):
            merged = gradients[stage.name]
            no_data = report.skipped or all(own.idle for own in report.ranks if not own.absent)
            expected = [None] if no_data else self._merged(report, number, stage)
            if not any(merged == (own and pytest.approx(own, rel=self._plan.tolerance)) for own in expected):
                shares = {own.rank: (own.stages[number], own.weights[number], own.cause) for own in report.ranks}
                found.append(f"step {report.step}, {stage}: {merged} and not {expected}; {shares}")
        return found

    def note(self, report, gradients):
        """This is what was merged."""
        self._members = {own.rank for own in report.ranks if not own.absent}
        for name, own in gradients.items():
            if own is not None:
                before = self._kept.get(name, own) if isinstance(self._plan.estimator, MovingAverage) else own
                self._kept[name] = DECAY * before + (1 - DECAY) * own

    def _merged(self, report, number, stage):
        """What it may be: no row says whether what a rank gave that left was an estimate.

        Nor does one say whether that rank had given anything to any stage. If it had, what was not finite counts in no
        stage's weight.
        """
        given = [self._given_by(own, number, report.step, stage) for own in report.ranks]
        of_rows = sum(own.weights[number] for own in report.ranks)
        gone = {own.rank for own in report.ranks if own.absent} & self._members
        expected, lefts = [], {stage.weight - own for own in (of_rows, *[sum(own for own, _ in given)] * bool(gone))}
        for left in (own if own > TOLERANCE * stage.weight else 0.0 for own in lefts):
            of_left = {0.0}
            if left:
                (rank,) = gone
                of_left = {own_gradient(self._plan, rank, report.step, layer_of(stage)), self._estimate(stage)} - {None}
            if weight := left + sum(own for own, _ in given):
                expected += [(sum(own for _, own in given) + left * own) / weight for own in of_left]
            else:
                expected.append(self._estimate(stage) if isinstance(self._plan.estimator, OF_MERGED) else None)
        self.num_left += stage.weight - of_rows > TOLERANCE * stage.weight
        return expected

    def _estimate(self, stage):
        """What a rank puts in place of its own gradient; ``None``: nothing."""
        if isinstance(self._plan.estimator, Zero):
            return 0.0
        return self._kept.get(stage.name) if isinstance(self._plan.estimator, OF_MERGED) else None

    def _given_by(self, own, number, step, stage):
        """The weight of what a rank gave, and that times its gradient."""
        share, weight = own.stages[number], own.weights[number]
        filled_in = weight - own.weight * share
        gradient = own_gradient(self._plan, own.rank, step, layer_of(stage), share) if share else 0.0
        if math.isnan(gradient):
            return 0.0, 0.0
        of_estimate = self._kept.get(stage.name, 0.0) if isinstance(self._plan.estimator, OF_MERGED) else 0.0
        return weight, (weight - filled_in) * gradient + filled_in * of_estimate


def layer_of(stage):
    return LAYERS.index(stage.name)


def batches(plan, rank, model):
    """Without end."""
    for epoch in itertools.count():
        yield from model.join(range(2 + int(12 * at_random("batches", rank, epoch)))) if plan.joins else (None,)


def train(rank, board, folder, plan):
    """Stages whose merged gradient is not what it should be, and how many had something of a rank that left."""
    if plan.in_buckets:
        stages.BUCKET_BYTES = 1
    module, members = Scales(), Elastic(min_ranks=1) if plan.has_members else None
    stops = made_to_be_hit(module, folder, rank, plan.stalls)
    model = StagedDataParallel(module, stages=LAYERS, members=members, **plan.options)
    step, expected, next_step = model.register_state(), Expected(plan), 0
    problems, num_left = [], 0
    for _ in batches(plan, rank, model):
        if step >= board.end:
            break
        with model.step(plan.num_microbatches) as opened:
            stops.entered(opened)
            if plan.weighs and not plan.num_parts:
                opened.weight = 1 + int(3 * at_random("weight", rank, step))
            parts = opened.pull(range(plan.num_parts)) if plan.num_parts else range(plan.num_microbatches)
            for part in parts:
                factors = [factor_of(plan, rank, step, part, layer) for layer in range(NUM_LAYERS)]
                (model(factors) / plan.num_microbatches).backward()
        report, gradients = model.last_report, gradients_of(module)
        if not report.ranks[rank].absent:
            if report.step == next_step:
                problems += expected.problems(report, gradients)
            else:  # it was away, and has not seen all that was merged
                num_left += expected.num_left
                expected = Expected(plan, was_away=True)
            expected.note(report, gradients)
            next_step = report.step + 1
            time.sleep(0.01)
            board.note(rank, next_step)
        model.zero_grad()
        step = report.step + 1
        stops.left(report)
    return problems, num_left + expected.num_left


def gradients_of(module):
    layers = zip(LAYERS, module.layers, strict=True)
    return {name: None if layer.weight.grad is None else layer.weight.grad.item() for name, layer in layers}


@pytest.mark.slow
@pytest.mark.parametrize("number", JOBS)
def test_what_is_merged_is_what_the_report_says(tmp_path, number):
    plan = draw(number)
    for rank, (problems, _) in enumerate(run_with_hits(number, plan, train, tmp_path)):
        assert not problems, f"rank {rank}, {plan}: {problems}"


@pytest.mark.slow
def test_what_a_rank_gave_before_it_left_in_a_step_counts_in_its_stages(tmp_path):
    options = {"estimator": Abstain(), "merge": Merge()}
    plan = Plan(3, True, options, hits=(("kill in backward", 1, 0.0),))
    outcomes = run_with_hits(0, plan, train, tmp_path)
    assert all(problems == [] for problems, _ in outcomes)
    assert outcomes[0][1] == outcomes[2][1] > 0
