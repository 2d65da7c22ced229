"""A rank that stalls now and then, in a framework's own trainer: DDP and straggle in turns, in one job.

python benchmarks/integrations.py transformers --runs 5
python benchmarks/integrations.py accelerate --runs 5
python benchmarks/integrations.py lightning --runs 5

Four ranks train the same small model. A forward pass sleeps 40 ms; in every tenth step that of the last rank sleeps
0.5 s more. The loss at the end is that of data that no rank trains on.
"""

import argparse
import contextlib
import io
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import straggle

NUM_RANKS, STEPS, SLEEP_S, STALL_S, EVERY = 4, 60, 0.04, 0.5, 10


class Numbers(Dataset):
    """Points, and a function of them that a network has to find."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 8, generator=draw)
        self.y = torch.sin(self.x[:, :2]) * self.x[:, 2:4]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return {"x": self.x[number], "labels": self.y[number]}


class Net(nn.Module):
    """Sleeps in its forward pass, as the rank's share of the work, while it is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.num_passes = 0

    def forward(self, x, labels):
        if self.training:
            self.num_passes += 1
            stalls = dist.get_rank() == NUM_RANKS - 1 and self.num_passes % EVERY == 0
            time.sleep(SLEEP_S + STALL_S * stalls)
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def train_transformers(kind, folder):
    from transformers import Trainer, TrainingArguments

    from straggle.integrations.transformers import StagedTrainer

    words = {"lr_scheduler_type": "constant", "learning_rate": 0.01, "report_to": [], "disable_tqdm": True}
    given = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8, max_steps=STEPS, save_strategy="no", use_cpu=True, **words
    )
    net = Net()
    staged = kind == "straggle"
    options = {"deadline": straggle.AutoDeadline()} if staged else {}
    trainer = (StagedTrainer if staged else Trainer)(net, given, train_dataset=Numbers(8192, 1), **options)
    start = time.monotonic()
    trainer.train()
    return net, time.monotonic() - start


def train_accelerate(kind, _folder):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from straggle.integrations.accelerate import StagedAccelerator

    set_seed(1)
    staged = kind == "straggle"
    accelerator = StagedAccelerator(cpu=True, deadline=straggle.AutoDeadline()) if staged else Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(Numbers(8192, 1), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    start = time.monotonic()
    for number, batch in enumerate(loader):
        if number == STEPS:
            break
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return net, time.monotonic() - start


def train_lightning(kind, folder):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from straggle.integrations.lightning import StagedStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _number):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy = StagedStrategy(deadline=straggle.AutoDeadline()) if kind == "straggle" else DDPStrategy()
    words = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=strategy, plugins=[TorchElasticEnvironment()], max_steps=STEPS,
        enable_checkpointing=False, default_root_dir=folder, barebones=False, **words,
    )  # fmt: skip
    module = Module()
    start = time.monotonic()
    trainer.fit(module, DataLoader(Numbers(8192, 1), batch_size=8, shuffle=True))
    return module.net, time.monotonic() - start


def run(framework, runs):
    """On each rank; the first prints the table."""
    for name in ("transformers", "accelerate", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    train = {"transformers": train_transformers, "accelerate": train_accelerate, "lightning": train_lightning}
    held_out = Numbers(512, 2)
    seconds, losses = {"ddp": [], "straggle": []}, {"ddp": [], "straggle": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs + 1):  # the first is not counted: everything is loaded in it
            for kind in seconds:
                with contextlib.redirect_stdout(io.StringIO()):
                    net, took = train[framework](kind, folder)
                net.eval()
                if number:
                    seconds[kind].append(1e3 * took / STEPS)
                    losses[kind].append(float(net(held_out.x, held_out.y)["loss"]))
    if dist.get_rank() == 0:
        rows = {kind: (statistics.median(seconds[kind]), statistics.median(losses[kind])) for kind in seconds}
        ratios = sorted(own / theirs for own, theirs in zip(seconds["straggle"], seconds["ddp"], strict=True))
        middle = statistics.median(ratios)
        print(
            f"| {framework} | {rows['ddp'][0]:.1f} ms | {rows['straggle'][0]:.1f} ms | {middle:.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}) | {rows['ddp'][1]:.4f} | {rows['straggle'][1]:.4f} |"
        )
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("transformers", "accelerate", "lightning"))
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        run(given.framework, given.runs)
        return 0
    print("| framework | step under DDP | under straggle | ratio | loss under DDP | under straggle |", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    return subprocess.run([*command, __file__, given.framework, "--runs", str(given.runs)], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
