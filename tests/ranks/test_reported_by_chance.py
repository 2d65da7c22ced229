"""What is merged is what the report says that each rank gave, whatever happened meanwhile: jobs drawn by chance.

As with `test_replay_by_chance.py`, STRAGGLE_JOBS says which.
"""

import itertools
import random
import time
from dataclasses import dataclass, field

import pytest
from by_chance import JOBS, draw_hits, made_to_be_hit, run_with_hits
from scales import DECAY, LAYERS, NUM_LAYERS, TOLERANCE, Expected, Scales, at_random, factor_of, gradients_of

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
