"""The same job under several methods, in turns in one process group: same seed, same data, same faults.

torchrun --nproc-per-node 4 -m straggle compare                        # or ./launch.sh compare: DDP and straggle
torchrun --nproc-per-node 2 -m straggle compare faults=none deadline=fixed deadline.budget_s=1000 workload=synthetic
torchrun --nproc-per-node 6 -m straggle compare methods=[ddp,backup_workers,local_sgd,straggle] scenarios=[none,stall]
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from statistics import median

from straggle.extras import needs_extra, remedy

with needs_extra("train"):
    import torch
    import torch.distributed as dist
    from hydra.utils import instantiate
    from omegaconf import DictConfig
    from rich.console import Console

    from straggle.commands.configuration.checks import of_method, of_scenario, slows_ranks
    from straggle.commands.configuration.config import run_configured
    from straggle.commands.launching.workers_signs import first_step_is_made
    from straggle.lab.comparison import REFERENCE, TRAIN_ON, Comparison, MethodResult, draw, print_summary
    from straggle.lab.interleaved import TimedJob, seconds_to
    from straggle.lab.jobs import StagedJob
    from straggle.lab.process_group import gather, process_group
    from straggle.lab.workloads.workload import Workload

_log = logging.getLogger(__name__)


def compare(config: DictConfig) -> None:
    """All scenarios, on one rank."""
    with process_group() as device:
        workload = instantiate(config.workload)
        names = config.scenarios or []
        runs = {name: of_scenario(config, name) for name in names} if names else {"": config}
        done = {name: _scenario(name, run, workload, device) for name, run in runs.items()}
        if dist.get_rank() == 0:
            _finish(config, done)
        dist.barrier()


def _scenario(name: str, config: DictConfig, workload: Workload, device: torch.device) -> Comparison:
    """All methods under the same faults."""
    methods = {method: _timed(config, str(method), workload, device) for method in config.methods}
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True)
    for turn, first in enumerate(range(0, config.steps, config.block)):
        steps = min(config.block, config.steps - first)
        for method in in_turn(list(methods), turn):
            methods[method].turn(first, steps)
            first_step_is_made()
        times = "  ".join(f"{method} {1e3 * median(timed.step_s[-steps:]):.0f}" for method, timed in methods.items())
        console.print(f"{name} step {first + steps}/{config.steps}, ms: {times}".lstrip(), highlight=False)
    turns = len(methods[REFERENCE].turn_s)
    train_on(methods, config.block)
    results = {method: MethodResult(timed, gather(timed.job.parameters_sha256())) for method, timed in methods.items()}
    for timed in methods.values():
        timed.job.close()
    done = Comparison(results, config.steps, turns, faults=slows_ranks(config))
    if dist.get_rank() == 0:
        _write(config, done, name)
    return done


def _timed(config: DictConfig, method: str, workload: Workload, device: torch.device) -> TimedJob:
    job = config.methods[method].get("job")
    build = StagedJob if job is None else instantiate(job, _partial_=True)
    return TimedJob(build(of_method(config, method), workload, device))


def in_turn(methods: list[str], turn: int) -> list[str]:
    """The methods' order changes from turn to turn, so that a drift of the machine's speed affects all of them."""
    first = turn % len(methods)
    order = methods[first:] + methods[:first]
    return order[::-1] if turn // len(methods) % 2 else order


def train_on(methods: dict[str, TimedJob], block: int) -> None:
    """Let each method reach DDP's final validation loss, or use up a quarter more than DDP's seconds."""
    reference = methods[REFERENCE]

    def waits(timed: TimedJob) -> bool:
        too_high = seconds_to(timed.losses, timed.end_s, reference.losses[-1]) is None
        return too_high and sum(timed.turn_s) < TRAIN_ON * sum(reference.turn_s)

    left = [timed for timed in methods.values() if timed is not reference]
    while left:
        go_on = gather([waits(timed) for timed in left])[0]  # rank 0's clock, for all
        left = [timed for timed, on in zip(left, go_on, strict=True) if on]
        for timed in left:
            timed.turn(len(timed.step_s), block)


def _write(config: DictConfig, comparison: Comparison, scenario: str) -> None:
    """A scenario's file and table."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "compare.json").write_text(json.dumps(comparison.results(), indent=2) + "\n")
    of = f"{scenario}: " if scenario else ""
    title = f"{of}{config.steps} steps of each method on {dist.get_world_size()} ranks, in turns of {config.block}"
    reference = {REFERENCE: "FSDP2's own replicas, as the model is sharded"} if config.get("parallel") else {}
    comparison.print(title, {**reference, "files": run_dir / "compare.json"})


def _finish(config: DictConfig, scenarios: dict[str, Comparison]) -> None:
    """What is about all scenarios: the summary, if there are several, and the picture."""
    picture = Path(config.run_dir) / "compare.png"
    try:
        draw(scenarios, picture)
    except ImportError as error:
        _log.warning("no picture: %s", remedy(error, "plot"))
    if len(scenarios) > 1:
        print_summary(scenarios, {"picture": picture})


def main() -> None:
    """The command."""
    run_configured("compare", compare, __doc__ or "")
