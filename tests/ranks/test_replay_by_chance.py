"""Jobs drawn by chance, whose ranks are late and stopped, are recorded and repeated bit for bit.

Which job it is follows from its number; where a signal meets a rank does not. More of them, or the one that failed:

    STRAGGLE_JOBS=100:140 ./launch.sh test tests/ranks/test_replay_by_chance.py
"""

import itertools
import random
import time
from dataclasses import dataclass, field

import pytest
import torch
from by_chance import JOBS, draw_hits, made_to_be_hit, run_with_hits
from ranks import digest, run_forked
from recorded import Noisy
from scales import at_random
from torch import nn
from training import features

from straggle import (
    Abstain,
    AutoDeadline,
    Epochs,
    FirstK,
    LastMerged,
    LastOwn,
    LateHandling,
    Merge,
    MovingAverage,
    QuantileDeadline,
    StagedDataParallel,
    Zero,
)
from straggle.backward import stages
from straggle.observe.recording import DecisionWriter, file_of, read_recording


@dataclass(frozen=True)
class Plan:
    """One job; ``options`` are those of the model. A share of the losses is NaN, and of the micro-batches skipped."""

    number: int
    world_size: int
    num_parts: int  # of each step's pool; 0: there is none
    num_microbatches: int
    has_epochs: bool  # a data set is dealt to the ranks that are there
    options: dict = field(hash=False)
    hits: tuple  # kind, rank, and a number from 0 to 1
    nan: float
    skipped: float
    stalls: float
    weighs: bool
    costs: bool
    is_adam: bool
    in_buckets: bool  # a layer is a bucket of its own
    joins: bool  # ranks have not all as many batches

    @property
    def merges_buffers(self):
        return self.options["merge"].buffers != "local"


def draw(number):
    chance = random.Random(number)
    pick, world_size = chance.choice, chance.choice([3, 4])
    work = pick(["plain", "epochs", "micro-batches", "pool", "pool"])
    granularity = pick(["stage", "stage", "microbatch" if work == "micro-batches" else "stage", "step"])
    estimators = [Abstain(), Zero(), LastOwn(0.5), LastMerged(0.5), MovingAverage(0.5)]
    deadlines = [None, 0.05, 0.05, QuantileDeadline(0.6, slack=1.2), AutoDeadline(), FirstK(2)]
    return Plan(
        number,
        world_size,
        num_parts=pick([world_size, 5, 8]) if work == "pool" else 0,
        num_microbatches=pick([2, 3]) if work == "micro-batches" else 1,
        has_epochs=work == "epochs",
        options={
            "deadline": pick(deadlines),
            "estimator": pick(estimators),
            "late_handling": LateHandling(grace_s=pick([0.005, 0.02]), granularity=granularity),
            "merge": Merge(
                buffers=pick(["mean", "mean", "rank0", "local"]),
                nonfinite=pick(["drop", "drop", "keep"]),
                wire_dtype=pick([None, None, "bfloat16"]),
                check_every=10,
            ),
        },
        hits=draw_hits(chance, world_size, has_members=False),
        nan=pick([0.0, 0.0, 0.05]),
        skipped=pick([0.0, 0.0, 0.1]),
        stalls=pick([0.0, 0.02, 0.05]),
        weighs=pick([False, True]),
        costs=pick([False, True]),
        is_adam=pick([False, True]),
        in_buckets=pick([False, True, True]),
        joins=work != "epochs" and pick([False, True]),
    )


def batches(plan, rank, model):
    """Without end."""
    for epoch in itertools.count():
        yield from model.join(range(2 + int(12 * at_random("batches", rank, epoch)))) if plan.joins else (None,)


def micro_batches(plan, rank, step, opened, samples):
    if samples is not None:
        return [samples]
    if not plan.num_parts:
        return [rank + 10 * number for number in range(plan.num_microbatches)]
    return (part for part in opened.pull(range(plan.num_parts)) if at_random("skip", part, step) >= plan.skipped)


def batch_of(part, step):
    """``part``: the number of a micro-batch, or those of samples."""
    return features(part, step) if isinstance(part, int) else torch.cat([features(own, 0, rows=2) for own in part])


def train(rank, plan, module, model, end, made=lambda _: None, stops=None):
    """The state after each step; this rank's own at the end; and the loss of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    if plan.is_adam:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.003)
    states, losses, registered = {}, {}, {"optimizer": optimizer}
    if plan.has_epochs:
        registered["epochs"] = Epochs(model, num_samples=100, batch_size=4)
    step = model.register_state(**registered)
    for _ in batches(plan, rank, model):
        if step >= end():
            break
        samples = tuple(registered["epochs"].draw().tolist()) if plan.has_epochs else None
        with model.step(plan.num_microbatches) as opened:
            if stops is not None:
                stops.entered(opened)
            if plan.weighs and not plan.num_parts:
                opened.weight = 1 + int(3 * at_random("weight", rank, step))
            if plan.costs:
                opened.cost = 1 + at_random("cost", rank, step)
            for part in micro_batches(plan, rank, step, opened, samples):
                loss = model(batch_of(part, step)).square().mean() / plan.num_microbatches
                if at_random("NaN", part, step) < plan.nan:
                    loss = loss * float("nan")
                opened.log(loss=loss.item())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert not report.different_ranks
        dealt = registered["epochs"].state_dict() if plan.has_epochs else None
        states[report.step] = digest(state_of(plan, module, optimizer)), repr(dealt)
        losses[report.step] = repr(report.scalars.get("loss"))
        step = report.step + 1
        made(step)
        if stops is not None:
            stops.left(report)
    return states, digest([torch.get_rng_state(), *module.buffers()]), losses


def state_of(plan, module, optimizer):
    """All that is the same on all ranks."""
    own = [optimizer.state[parameter] for parameter in module.parameters()]
    memory = [value for state in own for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return [*module.parameters(), *memory, *(module.buffers() if plan.merges_buffers else ())]


def wrapped(rank, plan) -> tuple[nn.Module, StagedDataParallel]:
    if plan.in_buckets:
        stages.BUCKET_BYTES = 1
    torch.manual_seed(0)
    module = Noisy()
    torch.manual_seed(rank)
    return module, lambda: StagedDataParallel(module, **plan.options)


def record(rank, board, folder, plan):
    module, wrap = wrapped(rank, plan)
    stops = made_to_be_hit(module, folder, rank, plan.stalls)
    model = wrap()

    def made(step):
        time.sleep(0.01)
        board.note(rank, step)

    with DecisionWriter(file_of(folder, rank)) as writer:
        model.register_step_hook(lambda _: writer.write(model.last_decision, model.learned))
        return train(rank, plan, module, model, lambda: board.end, made, stops)


def repeat(rank, folder, plan, end):
    module, wrap = wrapped(rank, plan)
    model = wrap()
    model.replay(read_recording(file_of(folder, rank)))
    return train(rank, plan, module, model, lambda: end)


@pytest.mark.slow
@pytest.mark.parametrize("number", JOBS)
def test_job_drawn_by_chance_is_repeated_bit_for_bit(tmp_path, number):
    plan = draw(number)
    outcomes = run_with_hits(number, plan, record, tmp_path)
    end = 1 + max(max(states) for states, _, _ in outcomes)
    again = run_forked(repeat, plan.world_size, tmp_path, plan, end)
    for rank, (outcome, replayed) in enumerate(zip(outcomes, again, strict=True)):
        for which in (0, 2):  # states and losses
            differ = [step for step in range(end) if outcome[which][step] != replayed[which][step]]
            assert not differ, f"rank {rank} differs in its replay from step {differ[0]} on: {plan}"
        assert outcome[1] == replayed[1], plan
