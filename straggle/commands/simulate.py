"""Simulate many ranks under a deadline, without a cluster.

python -m straggle simulate ranks=1000 steps=500 deadline=auto delays=dropcompute
python -m straggle simulate ranks=64 delays=replay delays.trace=runs/latest deadline=quantile deadline.slack=1.3
python -m straggle simulate ranks=64 pulled=true work.num_microbatches=8 deadline=none delays=slow_ranks
"""

from __future__ import annotations

import json
from pathlib import Path

from straggle.extras import needs_extra

with needs_extra("train"):
    import torch
    from hydra.utils import instantiate
    from omegaconf import DictConfig

    from straggle.commands.configuration.config import run_configured
    from straggle.commands.configuration.schema import ConfigurationError
    from straggle.lab.simulate.pulled import simulate_pulled
    from straggle.lab.simulate.ranks import Simulation, simulate
    from straggle.lab.simulate.summary import numbers_of, rows_of, save_chart
    from straggle.observe.console import print_table
    from straggle.policies.deadline import Deadline


def _run(config: DictConfig) -> None:
    """Simulate, print, and write ``simulation.json`` and ``simulation.png``."""
    torch.set_num_threads(1)  # its tensors are too small to be worth several
    deadline = instantiate(config.deadline)
    try:
        simulation = _simulated(config, deadline)
    except ValueError as error:  # what does not go together
        raise ConfigurationError(str(error)) from None
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    numbers = numbers_of(simulation)
    (run_dir / "simulation.json").write_text(json.dumps(numbers, indent=2) + "\n")
    title = f"{config.steps:,} steps of {config.ranks:,} ranks, {type(deadline).__name__}"
    title += ", drawn from a pool" if config.pulled else ""
    with needs_extra("plot"):
        save_chart(simulation, run_dir / "simulation.png", title)
    notes = {"files": f"{run_dir / 'simulation.json'}, simulation.png"}
    if not deadline.enforced:
        notes["note"] = "this deadline stops no rank; simulate the one that it goes around"
    print_table(
        title, ("", "waiting for all", "pulled" if config.pulled else "deadline", "ratio"), rows_of(numbers), notes
    )


def _simulated(config: DictConfig, deadline: Deadline) -> Simulation:
    parts = instantiate(config.work), instantiate(config.delays), deadline
    late_handling, network = instantiate(config.late_handling), instantiate(config.network)
    if config.pulled:
        return simulate_pulled(
            config.steps, config.ranks, *parts, late_handling=late_handling, network=network, seed=config.seed
        )
    return simulate(
        config.steps,
        config.ranks,
        *parts,
        late_handling=late_handling,
        network=network,
        seed=config.seed,
        history_ranks=config.history_ranks,
    )


def main() -> None:
    """The command."""
    run_configured("simulate", _run, __doc__ or "")
