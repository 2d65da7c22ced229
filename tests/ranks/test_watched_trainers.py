"""`straggle.watch` in the trainers of others, as they are: each names the rank that sleeps, and its phase."""

import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import as_launched
from loaded import ranks_with
from ranks import run_forked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import straggle
from straggle.advise.answer import answer

pytestmark = pytest.mark.slow  # frameworks take their seconds to load
NUM_RANKS, SLOW, STEPS = 2, 1, 14
SLEEP_S = 0.15  # of a step of about 20 ms: a machine that is busy holds up no rank so long in each step


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    """Sleeps in one of its passes."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x, labels=None):
        time.sleep(self.forward_s)
        y = self.last(Sleep.apply(torch.tanh(self.first(x)), self.backward_s))
        return y if labels is None else {"loss": nn.functional.mse_loss(y, labels)}


class Rows(TensorDataset):
    """In each of them loading sleeps."""

    def __init__(self, seconds):
        x = torch.randn(8 * NUM_RANKS * STEPS, 6, generator=torch.Generator().manual_seed(1))
        super().__init__(x, x[:, :3])
        self.seconds = seconds

    def __getitem__(self, number):
        time.sleep(self.seconds / 8)  # a batch has eight
        x, y = super().__getitem__(number)
        return {"x": x, "labels": y}


def slow_in(rank, phase):
    seconds = {name: SLEEP_S * (rank == SLOW and name == phase) for name in ("data", "forward", "backward")}
    return Net(seconds["forward"], seconds["backward"]), Rows(seconds["data"])


def accelerate(rank, folder, phase):
    from accelerate import Accelerator

    net, rows = slow_in(rank, phase)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows, batch_size=8))
    straggle.watch(model, folder)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def transformers(rank, folder, phase):
    from transformers import Trainer, TrainingArguments

    from straggle.integrations.transformers import WatchCallback

    net, rows = slow_in(rank, phase)
    plain = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    words = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=STEPS, label_names=["labels"], **plain
    )
    Trainer(net, words, train_dataset=rows, callbacks=[WatchCallback(folder)]).train()


def lightning(rank, folder, phase, strategy="ddp"):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from straggle.integrations.lightning import WatchCallback

    warnings.simplefilter("ignore")  # of Lightning: few workers, a small log interval
    net, rows = slow_in(rank, phase)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _number):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, _number):
            self.net(**batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS if strategy == "ddp" else 1,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if strategy == "ddp" else [],
        default_root_dir=folder,
        callbacks=[WatchCallback(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    loader = DataLoader(rows, batch_size=8)
    trainer.fit(Module(), loader, DataLoader(rows, batch_size=64))


TRAINERS = {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}
LOADED = {"accelerate": "accelerate", "transformers": "transformers.trainer", "lightning": "lightning.pytorch"}


def in_each_phase(rank, trainer, folder):
    as_launched(rank)
    for phase in ("data", "forward", "backward"):
        TRAINERS[trainer](rank, Path(folder, phase), phase)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_name_the_rank_that_sleeps_and_its_phase(trainer, tmp_path):
    if find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    with ranks_with(LOADED[trainer]) as run_loaded:
        run_loaded(in_each_phase, NUM_RANKS, trainer, str(tmp_path), timeout_s=240)
    for phase in ("data", "forward", "backward"):
        (one,) = answer(tmp_path / phase).slowness.ranks
        assert (one.rank, one.named[0]) == (SLOW, phase)


def alone(_rank, folder):
    """A module whose `training_step` Lightning calls by itself, with a sleep in its backward pass."""
    lightning(SLOW, folder, "backward", "auto")


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_one_process_of_lightning_is_told_where_its_time_goes(tmp_path):
    run_forked(alone, 1, tmp_path, timeout_s=240)
    given = answer(tmp_path)
    assert given.timings.num_steps > STEPS
    assert given.timings.phases["backward"].min() > SLEEP_S
    assert "which waits for no other" in str(given)
