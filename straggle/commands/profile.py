"""Print and draw how long each stage of a workload's backward pass takes, on one process.

python -m straggle profile workload=text
python -m straggle profile workload=synthetic batch_size=64 stages=12 run_dir=runs/profile
"""

from __future__ import annotations

from pathlib import Path

from straggle.extras import needs_extra

with needs_extra("train"):
    import torch
    from hydra.utils import instantiate
    from omegaconf import DictConfig
    from rich.console import Console

    from straggle.backward.stage_profile import measure_stages
    from straggle.commands.config import run_configured
    from straggle.lab.build import stages_of


def _run(config: DictConfig) -> None:
    """Measure the workload's stages; the chart is ``run_dir/stages.png``."""
    torch.manual_seed(config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = instantiate(config.workload)
    model = workload.model().to(device)
    x, y = workload.batch(torch.arange(config.batch_size))
    batch = x.to(device), y.to(device)
    profile = measure_stages(
        model, lambda: workload.loss(model, batch), stages=stages_of(config.stages), num_steps=config.steps
    )
    chart = Path(config.run_dir) / "stages.png"
    chart.parent.mkdir(parents=True, exist_ok=True)
    with needs_extra("plot"):
        profile.save_chart(chart)
    console = Console(soft_wrap=True, highlight=False)
    console.print(str(profile))
    whole_s = profile.forward_s + profile.backward.seconds
    for part in (0.5, 0.75):
        reach = profile.reach(part * whole_s)
        budget = f"{1000 * part * whole_s:.1f} ms ({part:.0%} of a step)"
        console.print(f"reach in {budget}: {reach.num_stages} stages, {reach.share:.0%} of the gradient elements")
    console.print(f"chart: {chart}")


def main() -> None:
    """The command."""
    run_configured("profile", _run, __doc__ or "")
