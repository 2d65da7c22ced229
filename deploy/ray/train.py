"""Ray Train starts the workers, and straggle is what it is in any loop of yours: in place of DDP's wrapper.

python deploy/ray/train.py --workers 2 --storage runs/ray

On a cluster the storage is a folder or bucket that all nodes see. A worker that dies makes Ray start all of them again,
from the last checkpoint that was reported.
"""

import argparse
import json
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import straggle


def train(config):
    """What each worker runs: ray.train.torch.prepare_model would wrap the model in DDP, and is left out."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(get_device())
    rank = ray.train.get_context().get_world_rank()
    first = 0
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
        net.load_state_dict(saved["model"])
        first = saved["step"]
    model = straggle.StagedDataParallel(net, deadline=straggle.AutoDeadline())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1000 * rank + first)
    for step in range(first, config["steps"]):
        x = torch.randn(16, 32, generator=generator).to(get_device())
        with model.step() as this:
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            this.log(loss=loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["every"] == 0 or step + 1 == config["steps"]:
            report(model, net, step + 1, rank)
    model.close()


def report(model, net, step, rank):
    """The mean over the workers, to Ray, with the first worker's checkpoint: the parameters of all are equal."""
    numbers = {"step": step, "loss": model.last_report.scalars["loss"], "late": len(model.last_report.late_ranks)}
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save({"model": net.state_dict(), "step": step}, Path(folder, "model.pt"))
        ray.train.report(numbers, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"))
    given = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": given.steps, "every": given.every},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=RunConfig(storage_path=str(given.storage.absolute()), failure_config=FailureConfig(max_failures=3)),
    )
    print(json.dumps(trainer.fit().metrics))


if __name__ == "__main__":
    main()
