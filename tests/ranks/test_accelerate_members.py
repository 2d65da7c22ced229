"""`StagedAccelerator(members=Elastic())` under `straggle launch`: a rank is lost in the second epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from loaded import Launch, launch_with
from told import LOSS, ends_of, go_on, lose_a_rank, merged, samples_of

pytestmark = [
    pytest.mark.slow,  # accelerate takes its seconds to load
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
EPOCHS, SAMPLES, BATCH, KILLED_IN = 3, 150, 4, 5  # the number of a step of the second epoch
SAVED_AFTER = 16  # step: the fourth of that epoch

# a usual script; `tell` leaves what it has done
SCRIPT = f"""\
import hashlib, json, os, signal, sys, time
from pathlib import Path
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import straggle
from straggle.integrations.accelerate import StagedAccelerator

{LOSS}accelerator = StagedAccelerator(cpu=True, members=straggle.Elastic(), deadline=straggle.FixedDeadline(60.0))
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = open(f"told.{{rank}}.{{start}}", "w", buffering=1)
tell = lambda *what: print(json.dumps(what), file=told)
set_seed(5)
model = nn.Linear(6, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=200)
x = torch.randn({SAMPLES}, 6, generator=torch.Generator().manual_seed(1))
train = DataLoader(TensorDataset(torch.arange({SAMPLES}), x, x[:, :3]), batch_size={BATCH}, shuffle=True)
held_out = DataLoader(TensorDataset(x[:50], x[:50, :3]), batch_size={BATCH})
model, optimizer, train, scheduler, held_out = accelerator.prepare(model, optimizer, train, scheduler, held_out)
if resume:
    accelerator.load_state(resume)
for epoch in range({EPOCHS}):
    for number, (ids, a, b) in enumerate(train):
        if (rank, start, epoch, number) == (victim, 0, 1, {KILLED_IN}):
            lose()
        if model.last_report is not None and any(own.absent for own in model.last_report.ranks):
            while number == {KILLED_IN} + 3 and not is_back():
                time.sleep(0.05)
            time.sleep(0.4)  # the others give it time to come back
        with accelerator.accumulate(model):
            tell("has", ids.tolist())
            accelerator.backward(nn.functional.mse_loss(model(a), b))
            time.sleep(0.02)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report = model.last_report
        gave = [own.rank for own in report.ranks if own.reach == 1 and not own.absent and not own.idle]
        tell("step", report.step, epoch, gave, accelerator.num_processes, accelerator.is_main_process)
        if report.step == {SAVED_AFTER} and not resume:
            accelerator.save_state("middle")
    with torch.no_grad():
        loss = torch.cat([accelerator.gather_for_metrics(model.module(a) - b) for a, b in held_out])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        tell("evaluated", epoch, len(loss))
        accelerator.save_state(f"checkpoint{{epoch}}")
parameters = [own.detach().numpy().tobytes() for own in accelerator.unwrap_model(model).parameters()]
tell("end", hashlib.sha256(b"".join(parameters)).hexdigest(), scheduler.get_last_lr())
"""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    with launch_with("accelerate", "straggle.integrations.accelerate") as own:
        yield own


@pytest.mark.parametrize(("victim", "how"), [(0, "killed"), (1, "killed"), (0, "frozen")])
def test_rank_that_is_lost_comes_back_and_each_sample_counts_once_an_epoch(
    victim: int, how: str, tmp_path: Path, launch: Launch
) -> None:
    told = lose_a_rank(launch, tmp_path, SCRIPT, victim, how)
    assert len({json.dumps(end) for end in ends_of(told)}) == 1  # parameters and learning rate at the end
    steps = merged(told)
    for epoch in range(EPOCHS):
        assert samples_of(steps, epoch) == Counter(range(SAMPLES))
    lines = [line for own in told.values() for line in own]
    assert sorted(line[1:] for line in lines if line[0] == "evaluated") == [[epoch, 50] for epoch in range(EPOCHS)]
    assert {line[4] for line in lines if line[0] == "step"} == {2, 3}  # as many processes as there are
    for step in steps:
        assert sum(line[5] for line in lines if line[:2] == ["step", step]) == 1  # one of them is the main one

    # and a run of two ranks goes on from the middle of the second epoch
    resumed = merged(go_on(launch, tmp_path / "again", SCRIPT, tmp_path / "middle"))
    before = samples_of({step: steps[step] for step in steps if step <= SAVED_AFTER}, 1)
    assert 0 < before.total() < SAMPLES
    assert before + samples_of(resumed, 1) == Counter(range(SAMPLES))
    assert samples_of(resumed, 0) == Counter()
    assert samples_of(resumed, 2) == Counter(range(SAMPLES))
