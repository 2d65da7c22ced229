"""Train many logical ranks under partial gradients, and the same runs with no rank late.

python -m straggle learn ranks=30 lateness.late=27 batch_size=16 sorted_share=1.0
python -m straggle learn ranks=64 lateness=deadline deadline=auto merge.weighting=inverse_probability
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    import torch
    from hydra.utils import instantiate
    from omegaconf import DictConfig

    from straggle.commands.config import run_configured
    from straggle.commands.config_keys import ConfigurationError
    from straggle.lab.build import build_estimator
    from straggle.lab.learning.lateness import DropWhole, Nobody
    from straggle.lab.learning.learning import Learned, Setting, Treatment, learn, units_of
    from straggle.lab.learning.samples import samples_of
    from straggle.lab.learning.weighting import weighting_of
    from straggle.observe.console import print_table
    from straggle.observe.intervals import difference_interval, mean_interval

_NAMES = ("no rank late", "under the rule")
_KEYS = ("nobody_late", "under_the_rule")  # of learning.json


def _run(config: DictConfig) -> None:
    """Train, print, and write ``learning.json`` and ``learning.png``."""
    torch.set_num_threads(1)
    try:
        settings = [_setting(config, seed) for seed in range(config.seed, config.seed + config.seeds)]
        treatments = dict(zip(_NAMES, (Treatment(Nobody()), _treatment(config)), strict=True))
        _try_one(settings[0], treatments[_NAMES[1]])
    except (TypeError, ValueError) as error:  # what does not go together: the samples do not go round, say
        raise ConfigurationError(str(error)) from None
    runs = {name: [learn(setting, treatment) for setting in settings] for name, treatment in treatments.items()}
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    numbers = {key: _numbers(runs[name]) for key, name in zip(_KEYS, _NAMES, strict=True)}
    (run_dir / "learning.json").write_text(json.dumps(numbers, indent=2) + "\n")
    with needs_extra("plot"):
        _save_chart(runs, run_dir / "learning.png")
    title = f"{config.ranks} ranks, {config.steps} steps, {config.seeds} seeds"
    files = f"{run_dir / 'learning.json'}, learning.png"
    print_table(title, ("", *_NAMES, "difference"), _rows(runs), {"files": files, "intervals": "95 %"})


def _try_one(setting: Setting, treatment: Treatment) -> None:
    """Draw which ranks are late in one step, before any run."""
    ranks, units = len(setting.samples.indices(0)), len(units_of(setting, setting.workload.model()))
    next(treatment.lateness.steps(ranks, units, torch.Generator()))


def _setting(config: DictConfig, seed: int) -> Setting:
    workload = instantiate(config.workload)
    share = config.sorted_share
    samples = samples_of(workload, config.ranks, config.batch_size, seed=seed, sorted_share=share)
    make_optimizer = partial(instantiate, config.optimizer, _convert_="all")
    return Setting(workload, make_optimizer, samples, config.steps, seed, config.stages)


def _treatment(config: DictConfig) -> Treatment:
    lateness, merge = instantiate(config.lateness), instantiate(config.merge)
    return Treatment(
        DropWhole(lateness) if config.drop_whole else lateness,
        weighting_of(merge),
        partial(build_estimator, config),
    )


def _numbers(runs: Sequence[Learned]) -> dict[str, Any]:
    """The runs of one treatment as plain JSON values, a number or a list for each seed."""
    return {
        "scores": {name: [run.scores[name] for run in runs] for name in runs[0].scores},
        "training_loss": [list(run.losses) for run in runs],
        "dropped_by_unit": [(1 - run.reached.mean(0)).tolist() for run in runs],
        "dropped_by_rank": [(1 - run.reached.mean(1)).tolist() for run in runs],
        "seconds": [run.seconds for run in runs],
    }


def _rows(runs: Mapping[str, Sequence[Learned]]) -> list[tuple[str, ...]]:
    """The rows of the table: scores, and how far the ranks came."""
    rows = []
    for score in runs[_NAMES[0]][0].scores:
        values = [[run.scores[score] for run in runs[name]] for name in _NAMES]
        rows.append(
            (
                score,
                *(f"{mean_interval(each):.4f}" for each in values),
                f"{difference_interval(values[1], values[0]):.4f}",
            )
        )
    dropped = [[100 * float(1 - run.reached.mean()) for run in runs[name]] for name in _NAMES]
    rows.append(("units dropped", *(f"{sum(each) / len(each):.1f} %" for each in dropped), ""))
    first, last = ([100 * float(1 - run.reached[:, unit].mean()) for run in runs[_NAMES[1]]] for unit in (0, -1))
    rows.append(("of the first unit", "", f"{sum(first) / len(first):.1f} %", ""))
    rows.append(("of the last unit", "", f"{sum(last) / len(last):.1f} %", ""))
    return rows


def _save_chart(runs: Mapping[str, Sequence[Learned]], path: Path) -> None:
    """The training loss by step: the mean over seeds, and the range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    for name, learned in runs.items():
        losses = torch.tensor([run.losses for run in learned])
        (line,) = axis.plot(losses.mean(0), label=name)
        axis.fill_between(range(losses.shape[1]), losses.amin(0), losses.amax(0), alpha=0.2, color=line.get_color())
    axis.set(xlabel="step", ylabel="training loss, mean over ranks")
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command."""
    run_configured("learn", _run, __doc__ or "")
