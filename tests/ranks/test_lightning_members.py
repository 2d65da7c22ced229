"""`StagedStrategy(members=Elastic())` under `straggle launch`: a rank is lost in the second epoch."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from loaded import Launch, launch_with
from told import LOSS, ends_of, go_on, lose_a_rank, merged, samples_of

pytestmark = [
    pytest.mark.slow,  # Lightning takes its seconds to load
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
EPOCHS, SAMPLES, BATCH, KILLED_IN = 3, 90, 3, 3  # the number of a step of the second epoch
SAVED_EVERY = 4  # steps

SCRIPT = f"""\
import hashlib, json, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from lightning.pytorch.plugins.io import TorchCheckpointIO
import straggle
from straggle.integrations.lightning import StagedStrategy

{LOSS}rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = open(f"told.{{rank}}.{{start}}", "w", buffering=1)
tell = lambda *what: print(json.dumps(what), file=told)
x = torch.randn({SAMPLES}, 6, generator=torch.Generator().manual_seed(1))

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.num_validated = nn.Linear(6, 3), 0
        self.count = SumMetric()
    def prepare_data(self):
        tell("prepared")
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange({SAMPLES}), x, x[:, :3]), batch_size={BATCH}, shuffle=True)
    def val_dataloader(self):
        return DataLoader(TensorDataset(x[:50], x[:50, :3]), batch_size={BATCH})
    def training_step(self, batch, number):
        if (rank, start, self.current_epoch, number) == (victim, 0, 1, {KILLED_IN}):
            lose()
        model = self.trainer.model
        tell("has", batch[0].tolist())
        time.sleep(0.02)
        loss = nn.functional.mse_loss(self.layer(batch[1]), batch[2])
        self.log("loss", loss, sync_dist=True)
        return loss
    def on_train_batch_start(self, batch, number):
        report = self.trainer.model.last_report
        if report is not None and any(own.absent for own in report.ranks):  # the others give it time to come back
            while number == {KILLED_IN} + 3 and not is_back():
                time.sleep(0.05)
            time.sleep(0.4)
    def on_train_batch_end(self, outputs, batch, number):
        report = self.trainer.model.last_report
        gave = [own.rank for own in report.ranks if own.reach == 1 and not own.absent and not own.idle]
        tell("step", report.step, self.current_epoch, gave, number, self.global_step, self.trainer.is_global_zero)
    def validation_step(self, batch, number):
        self.num_validated += len(batch[0])
        self.log("val", nn.functional.mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)
        self.count.update(len(batch[0]))
        self.log("count", self.count)
    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            tell("evaluated", self.current_epoch, self.num_validated)
        self.num_validated = 0
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=200)
        scheduled = {{"scheduler": scheduler, "interval": "step", "frequency": 2}}
        return {{"optimizer": optimizer, "lr_scheduler": scheduled}}

class Saving(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, **words):
        with open("saved", "a") as saved:
            print(path, file=saved)
        super().save_checkpoint(checkpoint, path, **words)

every = pl.callbacks.ModelCheckpoint(every_n_train_steps={SAVED_EVERY}, save_top_k=-1, filename="{{step}}")
best = pl.callbacks.ModelCheckpoint(monitor="val", filename="best-{{epoch}}")
trainer = pl.Trainer(
    accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs={EPOCHS}, callbacks=[every, best],
    strategy=StagedStrategy(members=straggle.Elastic(), deadline=straggle.FixedDeadline(60.0)),
    logger=pl.loggers.CSVLogger("logs"), log_every_n_steps=1, enable_progress_bar=False, plugins=[Saving()],
)
module = Net()
trainer.fit(module, ckpt_path=resume)
parameters = b"".join(own.detach().numpy().tobytes() for own in module.parameters())
rates = [own.scheduler.get_last_lr() for own in trainer.lr_scheduler_configs]
tell("end", hashlib.sha256(parameters).hexdigest(), trainer.global_step, trainer.current_epoch, rates,
     best.best_model_path, float(best.best_model_score))
"""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    with launch_with("lightning.pytorch", "torchmetrics", "straggle.integrations.lightning") as own:
        yield own


@pytest.mark.parametrize(("victim", "how"), [(0, "killed"), (1, "killed"), (0, "frozen")])
def test_rank_that_is_lost_goes_on_in_the_others_step_and_no_sample_is_lost(
    victim: int, how: str, tmp_path: Path, launch: Launch
) -> None:
    told = lose_a_rank(launch, tmp_path, SCRIPT, victim, how)
    ends = ends_of(told)
    assert len({json.dumps(end) for end in ends}) == 1  # parameters, steps, rates, and the best checkpoint
    steps = merged(told)
    for epoch in range(EPOCHS):
        assert samples_of(steps, epoch) == Counter(range(SAMPLES))
    lines = [line for own in told.values() for line in own]
    assert lines.count(["prepared"]) == 1
    assert sorted(line[1:] for line in lines if line[0] == "evaluated") == [[epoch, 50] for epoch in range(EPOCHS)]
    made = [line for line in lines if line[0] == "step"]
    for step in steps:
        of_step = [line for line in made if line[1] == step]
        assert sum(line[6] for line in of_step) == 1  # one of them is the main process
        # epoch, batch and step are the same on all that were in it
        assert len({json.dumps(line[:6]) for line in of_step if line[3]}) == 1
    last = ends[0][2]
    saved_paths = (tmp_path / "saved").read_text().splitlines()
    assert len(saved_paths) == len(set(saved_paths)) == last // SAVED_EVERY + EPOCHS  # each once
    checkpoints = [*tmp_path.glob("**/step=*.ckpt")]
    assert sorted(path.stem for path in checkpoints) == sorted(
        f"step={step}" for step in range(SAVED_EVERY, last + 1, SAVED_EVERY)
    )
    assert len([*tmp_path.glob("**/best-*.ckpt")]) == 1  # the main process deletes what another one saved
    texts = [path.read_text() for path in tmp_path.glob("logs/**/metrics.csv")]
    rows = [row for text in texts for row in csv.DictReader(text.splitlines())]
    assert [float(row["count"]) for row in rows if row.get("val")] == [50.0] * EPOCHS  # each sample once
    # the numbers of each step, also of those in which rank 0 was away
    assert sorted(int(row["step"]) for row in rows if row.get("straggle/step_s")) == list(range(last))

    # and a run of two ranks goes on from the middle of the second epoch
    saved = min(step for step in steps if steps[step][0] == 1) + 1 + KILLED_IN
    saved += -saved % SAVED_EVERY
    checkpoint = next(path for path in checkpoints if path.stem == f"step={saved}")
    resumed = merged(go_on(launch, tmp_path / "again", SCRIPT, checkpoint))
    before = samples_of({step: own for step, own in steps.items() if step < saved}, 1)
    assert 0 < before.total() < SAMPLES
    assert before + samples_of(resumed, 1) == Counter(range(SAMPLES))
    assert samples_of(resumed, 0) == Counter()
    assert samples_of(resumed, 2) == Counter(range(SAMPLES))
