"""The same job under DDP and under straggle, in turns in one process group: same seed, same data, same faults.

torchrun --nproc-per-node 4 -m straggle.compare                        # or ./launch.sh compare
torchrun --nproc-per-node 2 -m straggle.compare faults=none deadline=fixed deadline.budget_s=1000 workload=synthetic
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

import hydra
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from straggle.configuration import complain_and_exit, config_dir
from straggle.jobs import DdpJob, Job, StagedJob, gather, process_group
from straggle.view import print_table

_SMOOTH = 20  # steps in a running mean of the loss


class Timed:
    """A job and the clock of its own steps: the other job's turns do not count."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step_s: list[float] = []
        self.end_s: list[float] = []  # of each step, on this job's own clock
        self.elapsed_s = 0.0

    def turn(self, first: int, steps: int) -> None:
        """Train some steps; whatever a rank still has to catch up with at the end of the turn counts too."""
        dist.barrier()
        begin = before = time.perf_counter()
        for number in range(first, first + steps):
            self.job.step(number)
            now = time.perf_counter()
            self.step_s.append(now - before)
            self.end_s.append(self.elapsed_s + now - begin)
            before = now
        dist.barrier()
        self.elapsed_s += time.perf_counter() - begin
        self.end_s[-1] = self.elapsed_s

    def summary(self, steps: int) -> dict[str, float]:
        """Times of the first ``steps``; medians leave out the first tenth, in which caches and deadlines warm up."""
        whole = self.step_s[:steps]
        steady = whole[min(len(whole) // 10, 10) :]
        return {
            "step_seconds_median": median(steady),
            "step_seconds_mean": self.end_s[steps - 1] / steps,
            "step_seconds_p95": quantiles(steady, n=20)[-1] if len(steady) > 1 else steady[0],
            "step_seconds_stdev": pstdev(steady),
            "seconds": self.end_s[steps - 1],
        }

    def smooth_losses(self) -> list[float]:
        """Running mean over steps of the mean loss over ranks; collective."""
        ranks = gather(self.job.losses)
        means = [
            fmean(known) if (known := [x for x in column if not math.isnan(x)]) else math.nan
            for column in zip(*ranks, strict=True)
        ]
        return [fmean(means[max(0, end - _SMOOTH) : end]) for end in range(1, len(means) + 1)]

    def seconds_to(self, losses: list[float], target: float) -> float | None:
        """Seconds of this job's clock until the running mean of the loss first came to ``target``."""
        whole = range(min(_SMOOTH, len(losses)) - 1, len(losses))
        return next((self.end_s[step] for step in whole if losses[step] <= target), None)


def compare(config: DictConfig) -> None:
    """Both jobs, on one rank."""
    with process_group() as device:
        workload = instantiate(config.workload)
        methods = {
            "ddp": Timed(DdpJob(config, workload, device)),
            "straggle": Timed(StagedJob(config, workload, device)),
        }
        console = Console(quiet=dist.get_rank() != 0)
        for first in range(0, config.steps, config.block):
            steps = min(config.block, config.steps - first)
            # who begins changes from turn to turn, so that a drift of the machine's speed meets both
            for name in sorted(methods, reverse=bool(first // config.block % 2)):
                methods[name].turn(first, steps)
            times = "  ".join(f"{name} {1e3 * median(timed.step_s[-steps:]):.0f} ms" for name, timed in methods.items())
            console.print(f"step {first + steps}/{config.steps}  {times}", highlight=False)
        scores = {name: timed.job.evaluate() for name, timed in methods.items()}
        losses = _train_on(methods, config.block)
        hashes = {name: gather(timed.job.parameters_sha256()) for name, timed in methods.items()}
        if dist.get_rank() == 0:
            _finish(config, methods, scores, losses, hashes)
        dist.barrier()
        for timed in methods.values():
            timed.job.close()


def _train_on(methods: dict[str, Timed], block: int) -> dict[str, list[float]]:
    """Let straggle use up DDP's seconds, or come to DDP's final loss; gives the running means of all losses."""
    ddp, ours = methods["ddp"], methods["straggle"]
    reference, losses = ddp.smooth_losses(), ours.smooth_losses()
    while gather(ours.seconds_to(losses, reference[-1]) is None and ours.elapsed_s < ddp.elapsed_s)[0]:
        ours.turn(len(ours.step_s), block)
        losses = ours.smooth_losses()
    return {"ddp": reference, "straggle": losses}


def _finish(
    config: DictConfig,
    methods: dict[str, Timed],
    scores: dict[str, dict[str, float]],
    losses: dict[str, list[float]],
    hashes: dict[str, list[str]],
) -> None:
    target = losses["ddp"][-1]
    results: dict[str, dict[str, Any]] = {}
    for name, timed in methods.items():
        seconds_to_loss = timed.seconds_to(losses[name], target)
        results[name] = {
            **timed.summary(config.steps),
            "validation_loss": scores[name]["loss"],
            **({"validation_accuracy": scores[name]["accuracy"]} if "accuracy" in scores[name] else {}),
            "loss": losses[name][config.steps - 1],
            "target_loss": target,
            "seconds_to_loss": seconds_to_loss,
            "parameters_sha256": hashes[name],
            "replicas_identical": len(set(hashes[name])) == 1,
        }
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "compare.json").write_text(json.dumps(results, indent=2) + "\n")
    _print(results, config, run_dir)


def _print(results: dict[str, dict[str, Any]], config: DictConfig, run_dir: Path) -> None:
    ddp, ours = results["ddp"], results["straggle"]
    rows = []
    for label, key, scale, unit in (
        ("step time, median", "step_seconds_median", 1e3, " ms"),
        ("step time, mean", "step_seconds_mean", 1e3, " ms"),
        ("step time, p95", "step_seconds_p95", 1e3, " ms"),
        ("time to DDP's final loss", "seconds_to_loss", 1.0, " s"),
        ("training loss", "loss", 1.0, ""),
        ("validation loss", "validation_loss", 1.0, ""),
    ):
        values = [ddp[key], ours[key]]
        texts = ["never" if value is None else f"{scale * value:.4g}{unit}" for value in values]
        ratio = f"{ours[key] / ddp[key]:.3f}" if None not in values else ""
        rows.append((label, *texts, ratio))
    replicas = ["identical" if results[name]["replicas_identical"] else "DIFFERENT" for name in ("ddp", "straggle")]
    rows.append(("parameters on all ranks", *replicas, ""))
    title = f"{config.steps} steps of each method on {dist.get_world_size()} ranks, in turns of {config.block}"
    print_table(title, ("", "DDP", "straggle", "ratio"), rows, {"files": run_dir / "compare.json"})


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="compare")
def _hydra(config: DictConfig) -> None:
    compare(config)


def main() -> None:
    """The command."""
    complain_and_exit("compare", sys.argv[1:])
    _hydra()


if __name__ == "__main__":
    main()
