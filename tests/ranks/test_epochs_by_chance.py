"""Each sample of an epoch is in one merged step, whatever happened to the ranks meanwhile: jobs drawn by chance.

As with `test_replay_by_chance.py`, STRAGGLE_JOBS says which.
"""

import json
import os
import random
import time
from dataclasses import dataclass, field

import pytest
import torch
from by_chance import JOBS, draw_hits, made_to_be_hit, run_with_hits
from torch import nn
from torch.utils.data import DataLoader

from straggle import (
    AutoDeadline,
    Elastic,
    Epochs,
    FirstK,
    LateHandling,
    Merge,
    QuantileDeadline,
    Rebalance,
    StagedDataParallel,
)
from straggle.backward import stages

NUM_SAMPLES, BATCH_SIZE = 50, 2
LAYERS = [f"layers.{number}" for number in range(9)]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, h, samples):
        return h + self.weight[samples].sum()


class Samples(nn.Module):
    """The gradient of each layer's weight has an element for each sample: that of the mean over a batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in LAYERS)

    def forward(self, samples):
        h = torch.zeros(())
        for layer in self.layers:
            h = layer(h, samples)
        return h / len(samples)


@dataclass(frozen=True)
class Plan:
    world_size: int
    has_members: bool
    rebalances: bool
    draws: bool
    options: dict = field(hash=False)
    hits: tuple
    stalls: float
    in_buckets: bool


def draw(number):
    chance = random.Random(number)
    pick, world_size = chance.choice, chance.choice([3, 4])
    has_members = chance.random() < 0.75
    return Plan(
        world_size,
        has_members,
        rebalances=pick([False, False, True]),
        draws=pick([False, True]),
        options={
            "deadline": pick([None, 0.05, 0.05, QuantileDeadline(0.6, slack=1.2), AutoDeadline(), FirstK(2)]),
            "late_handling": LateHandling(grace_s=pick([0.005, 0.02]), granularity=pick(["stage", "stage", "step"])),
            "merge": Merge(check_every=10),
        },
        hits=draw_hits(chance, world_size, has_members=has_members),
        stalls=pick([0.0, 0.02, 0.05]),
        in_buckets=pick([False, True]),
    )


def batches(plan, epochs):
    """Without end."""
    if plan.draws:
        while True:
            yield epochs.draw()
    loader = DataLoader(torch.arange(NUM_SAMPLES), batch_sampler=epochs.sampler)
    while True:
        yield from epochs.batches(loader)


def train(rank, board, folder, plan):
    """Write of each step the epoch of the next one, which samples were merged, how many are lost, and who is absent.

    To a file for each process: one that is killed has nothing to return.
    """
    if plan.in_buckets:
        stages.BUCKET_BYTES = 1
    module, members = Samples(), Elastic(min_ranks=1) if plan.has_members else None
    stops = made_to_be_hit(module, folder, rank, plan.stalls)
    model = StagedDataParallel(module, stages=LAYERS, members=members, **plan.options)
    registered, written = {}, (folder / f"steps{rank}.{os.getpid()}").open("w")
    if plan.rebalances:
        registered["rebalance"] = Rebalance(model, total=BATCH_SIZE * model.world_size, window=4)
    epochs = Epochs(model, num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE, rebalance=registered.get("rebalance"))
    model.register_state(**registered, epochs=epochs)
    for samples in batches(plan, epochs):
        with model.step() as opened:
            stops.entered(opened)
            model(samples).backward()
        report = model.last_report
        if not report.ranks[rank].absent:
            own = report.step, epochs.number, counts(module, report), epochs.num_lost, report.absent_ranks
            print(json.dumps(own), file=written, flush=True)
            time.sleep(0.01)
            board.note(rank, report.step + 1)
        model.zero_grad()
        stops.left(report)
        if report.step + 1 >= board.end:
            break
    return "done"


def counts(module, report):
    """By sample that is in some merged gradient of a step: how often. A merged gradient is a mean over samples."""
    found = torch.zeros(NUM_SAMPLES)
    for stage in report.stages:
        if (gradient := module.layers[LAYERS.index(stage.name)].weight.grad) is not None:
            found = found.maximum(gradient * stage.weight * BATCH_SIZE)
    return {sample: count for sample, count in enumerate(found.round().int().tolist()) if count}


def read(path):
    """The steps that a process wrote; it may have been killed while it wrote one."""
    lines = path.read_text().split("\n")[:-1]
    return {step: own for step, *own in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("number", JOBS)
def test_each_sample_of_an_epoch_is_merged_once(tmp_path, number):
    plan = draw(number)
    run_with_hits(number, plan, train, tmp_path)
    processes = {path.name: read(path) for path in sorted(tmp_path.glob("steps*"))}
    steps = {}
    for name, own in processes.items():
        # what a stopped rank makes of the step in which its peers put it out is no step of the job
        for step in (step for step in own if step + 1 in own):
            assert own[step] == steps.setdefault(step, own[step]), f"{plan}: {name}, step {step}"
    assert sorted(steps) == list(range(len(steps)))
    check_epochs(plan, steps)


def check_epochs(plan, steps):
    num_epochs, lost_before, absent_before = steps[len(steps) - 1][0], 0, []
    assert num_epochs > 2
    for epoch in range(num_epochs):
        merged_in, left_in = {}, set()
        for step in (step for step in sorted(steps) if (steps[step - 1][0] if step else 0) == epoch):
            _, found, lost, absent = steps[step]
            assert set(found.values()) <= {1}, f"{plan}: step {step}"
            for sample in found:
                merged_in.setdefault(sample, []).append(step)
            if set(absent) - set(absent_before):
                left_in.add(step)
            absent_before = absent
        assert NUM_SAMPLES - len(merged_in) == lost - lost_before, f"{plan}: epoch {epoch}"
        lost_before = lost
        # what a rank gave in the step in which it left may be merged, and comes again all the same
        twice = {sample: own for sample, own in merged_in.items() if len(own) > 1 and not set(own[:-1]) <= left_in}
        assert not twice, f"{plan}: epoch {epoch}"
