"""`StagedTrainer(members=Elastic())` under `straggle launch`: a rank is lost in the second epoch."""

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
    pytest.mark.slow,  # transformers takes its seconds to load
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
SAMPLES, BATCH, STEPS, KILLED_IN, SAVED_EVERY, EVALUATED_EVERY = 60, 2, 30, 13, 5, 10

SCRIPT = f"""\
import hashlib, json, os, signal, sys, time
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
import straggle
from straggle.integrations.transformers import StagedTrainer

class Data(torch.utils.data.Dataset):
    def __init__(self, number):
        self.x = torch.randn(number, 6, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, number):
        return {{"x": self.x[number], "labels": self.x[number][:3], "number": number}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
    def forward(self, x, labels=None, number=None):
        if self.training:
            tell("has", number.tolist())
            time.sleep(0.03)
        out = self.layer(x)
        return {{"loss": nn.functional.mse_loss(out, labels), "logits": out}}

class Tell(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if (rank, start, state.global_step) == (victim, 0, {KILLED_IN}):
            lose()
        report = trainer._staged.last_report
        if report is not None and any(own.absent for own in report.ranks):  # the others give it time to come back
            while state.global_step == {KILLED_IN} + 3 and not is_back():
                time.sleep(0.05)
            time.sleep(0.4)
    def on_step_end(self, args, state, control, **_):
        report = trainer._staged.last_report
        gave = [own.rank for own in report.ranks if own.reach == 1 and not own.absent and not own.idle]
        tell("step", report.step, epoch_of[0], gave, state.global_step, args.should_save)
        epoch_of[0] = trainer._staged_members._loader.epochs.number
    def on_evaluate(self, args, state, control, metrics, **_):
        if state.is_world_process_zero:
            tell("evaluated", state.global_step, metrics["eval_count"])
    def on_save(self, args, state, control, **_):
        if args.should_save:
            tell("saved", state.global_step)
    def on_train_begin(self, args, state, control, **_):
        epoch_of.append(trainer._staged_members._loader.epochs.number)

{LOSS}epoch_of = []
arguments = TrainingArguments(
    "saved", per_device_train_batch_size={BATCH}, num_train_epochs=3, use_cpu=True, ddp_backend="gloo",
    eval_strategy="steps", eval_steps={EVALUATED_EVERY}, save_strategy="steps", save_steps={SAVED_EVERY},
    logging_steps=5, report_to="none", disable_tqdm=True, learning_rate=0.01, dataloader_pin_memory=False,
    remove_unused_columns=False,
)
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = open(f"told.{{rank}}.{{start}}", "w", buffering=1)
tell = lambda *what: print(json.dumps(what), file=told)
trainer = StagedTrainer(
    model=Net(), args=arguments, train_dataset=Data({SAMPLES}), eval_dataset=Data(20), callbacks=[Tell()],
    members=straggle.Elastic(), deadline=straggle.FixedDeadline(60.0),
    compute_metrics=lambda prediction: {{"count": len(prediction.predictions)}},
)
trainer.train(resume_from_checkpoint=resume)
parameters = b"".join(own.detach().numpy().tobytes() for own in trainer.model.parameters())
tell("end", hashlib.sha256(parameters).hexdigest(), trainer.state.global_step, trainer.lr_scheduler.get_last_lr())
trainer._staged.close()
"""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    with launch_with("transformers.trainer", "straggle.integrations.transformers") as own:
        yield own


@pytest.mark.parametrize(("victim", "how"), [(0, "killed"), (1, "killed"), (0, "frozen")])
def test_rank_that_is_lost_goes_on_in_the_others_step_and_no_sample_is_lost(
    victim: int, how: str, tmp_path: Path, launch: Launch
) -> None:
    told = lose_a_rank(launch, tmp_path, SCRIPT, victim, how)
    ends = ends_of(told)
    assert len({json.dumps(end) for end in ends}) == 1  # parameters, steps and learning rate
    assert ends[0][2] == STEPS
    steps = merged(told)
    for epoch in range(2):
        assert samples_of(steps, epoch) == Counter(range(SAMPLES))
    last = samples_of(steps, 2)  # of which steps without the rank have left some
    assert set(last.values()) == {1}
    lines = [line for own in told.values() for line in own]
    evaluated = sorted(line[1:] for line in lines if line[0] == "evaluated")
    assert evaluated == [[step, 20] for step in range(EVALUATED_EVERY, STEPS + 1, EVALUATED_EVERY)]
    assert sorted(line[1] for line in lines if line[0] == "saved") == [*range(SAVED_EVERY, STEPS + 1, SAVED_EVERY)]

    # and a run of two ranks goes on from the middle of the second epoch
    saved = 15
    told = go_on(launch, tmp_path / "again", SCRIPT, tmp_path / "saved" / f"checkpoint-{saved}")
    assert len({json.dumps(end) for end in ends_of(told)}) == 1
    before = samples_of({step: own for step, own in steps.items() if step < saved}, 1)
    assert 0 < before.total() < SAMPLES
    resumed = merged(told)
    assert before + samples_of(resumed, 1) == Counter(range(SAMPLES))
