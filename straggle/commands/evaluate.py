"""Compare what stands in for missing gradients: with true gradients, and by how training ends.

python -m straggle evaluate                      # about ten minutes on two cores
python -m straggle evaluate quick=true           # within one minute
python -m straggle evaluate 'late=[0.2]' tasks.digits.seeds=10 '~tasks.text'
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    import torch
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from rich.console import Console

    from straggle.commands.config import run_configured
    from straggle.commands.config_checks import check_at_least, complaint
    from straggle.commands.config_keys import ConfigurationError
    from straggle.lab.estimators.result import BASELINE, DATA, Found, run_rows, save_picture, truth_rows, verdict_rows
    from straggle.lab.estimators.runs import WAIT, RunScore, train_once
    from straggle.lab.estimators.task import Case, Task
    from straggle.lab.estimators.truth import Judgement, judge
    from straggle.lab.learning.learning import units_of
    from straggle.observe.console import print_table

Work = tuple[Callable[..., Any], tuple[Any, ...]]
_QUICK_STEPS = 24
_QUICK_SEEDS = 2


def _run(config: DictConfig) -> None:
    """Measure everything, print the tables, and write ``run_dir/estimators.json`` and ``estimators.png``."""
    began = time.perf_counter()
    check(config)
    found = evaluate(config)
    run_dir = Path(config.run_dir)
    found.write(run_dir / "estimators.json")
    with needs_extra("plot"):
        save_picture(found, run_dir / "estimators.png")
    _print(found, run_dir, time.perf_counter() - began)


def check(config: DictConfig) -> None:
    """Build once what each process will build; raises `ConfigurationError` for what cannot be built."""
    check_at_least("num_ranks", config.num_ranks, 2)
    check_at_least("num_stages", config.num_stages, 1)
    if config.workers is not None:
        check_at_least("workers", config.workers, 1)
    if config.quick not in (True, False):
        raise ConfigurationError(f"quick={config.quick}: choose one of true, false")
    if not isinstance(config.late, ListConfig) or not config.late:
        raise ConfigurationError(f"late={config.late}: give a list of shares of the ranks, such as [0.1,0.3]")
    for share in _late(config):
        if not isinstance(share, float) or not 1 <= round(share * config.num_ranks) < config.num_ranks:
            raise ConfigurationError(f"late={share}: must be a share of {config.num_ranks} ranks, not none and not all")
    if not config.tasks or not config.judged:
        raise ConfigurationError("there is nothing to judge: leave at least one of the tasks and one of the judged")
    for name in config.tasks:
        for key in ("steps", "seeds"):
            check_at_least(f"tasks.{name}.{key}", config.tasks[name][key], 1)
        try:
            _build(_task(str(name), config))
        except Exception as error:  # the constructor's own complaint, whatever it is
            raise ConfigurationError(f"tasks.{name}: {complaint(error)}") from None


def _build(task: Task) -> None:
    for own_data in DATA:
        setting = task.setting(own_data, 0)
        model = setting.workload.model()
        units_of(setting, model)
        for method in task.methods:
            treatment = task.treatment(method, Case(0.0, own_data))
            treatment.make_weighting()
            treatment.make_estimator(setting.make_optimizer(model.parameters()))


def _late(config: DictConfig) -> list[Any]:
    return [config.late[len(config.late) // 2]] if config.quick else list(config.late)


def evaluate(config: DictConfig) -> Found:
    """All that the configuration asks for, on several processes."""
    work = list(_work(config))
    console = Console(stderr=True, highlight=False)
    judgements, scores = list[Judgement](), list[RunScore]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.workers or os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
        futures: list[Future[Any]] = [pool.submit(function, *arguments) for function, arguments in work]
        for number, future in enumerate(as_completed(futures), 1):
            if number % max(1, len(futures) // 10) == 0:
                console.print(f"{number} of {len(futures)} runs")
            future.result()  # the first error ends the command
        for result in (future.result() for future in futures):
            if isinstance(result, RunScore):
                scores.append(result)
            else:
                judgements += result
    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    return Found({str(key): value for key, value in settings.items()}, tuple(judgements), tuple(scores))


def _work(config: DictConfig) -> Iterator[Work]:
    """The work of all processes, the longest first."""
    late = _late(config)
    tasks = {name: _task(str(name), config) for name in config.tasks}
    for task in tasks.values():
        for share in late:
            yield judge, (task, [share], 0)
    for name, task in tasks.items():
        for seed in range(min(config.tasks[name].seeds, _QUICK_SEEDS) if config.quick else config.tasks[name].seeds):
            for own_data in DATA:
                yield train_once, (task, WAIT, Case(0.0, own_data), seed)
                for method in config.judged:
                    for share in late:
                        yield train_once, (task, str(method), Case(share, own_data), seed)


def _task(name: str, config: DictConfig) -> Task:
    own = config.tasks[name]
    parts = {part: OmegaConf.to_container(value, resolve=True) for part, value in own.items() if part in _PARTS}
    judged = OmegaConf.to_container(config.judged, resolve=True)
    assert isinstance(judged, dict)
    return Task(
        name=name,
        methods={str(method): value for method, value in judged.items()},
        ranks=config.num_ranks,
        batch_size=config.batch_size,
        steps=min(own.steps, _QUICK_STEPS) if config.quick else own.steps,
        num_stages=config.num_stages,
        **parts,  # type: ignore[arg-type]
    )


_PARTS = ("workload", "optimizer")


def _print(found: Found, run_dir: Path, seconds: float) -> None:
    shares = [f"{late:.0%}" for late in found.late_shares]
    for task in found.tasks:
        heads = [f"{late} {what}" for late in shares for what in ("cosine", "error", "error, 10 steps")]
        title = f"{task}: the merged gradient against the true one, by share of late ranks"
        print_table(title, ("", *heads), truth_rows(found, task))
        for own_data, circumstances in DATA.items():
            loss = found.of_runs("validation_loss", task=task, method=WAIT, own_data=own_data).value
            accuracy = found.of_runs("accuracy", task=task, method=WAIT, own_data=own_data).value
            heads = [f"{late} {what}" for late in shares for what in ("loss", "accuracy")]
            title = f"{task}, {circumstances}: validation loss above waiting for all ({loss:.3f}, {accuracy:.1%})"
            print_table(title, ("", *heads), run_rows(found, task, own_data))
    if BASELINE in found.methods:
        heads = [f"{task}, {'own data' if own_data else 'shuffled'}" for task in found.tasks for own_data in DATA]
        print_table(f"validation loss relative to {BASELINE}'s, all shares", ("", *heads), verdict_rows(found))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"± is a 95 % interval over seeds; {len(found.scores)} runs took {seconds:.0f} s")
    console.print(f"files: {run_dir / 'estimators.json'}, {run_dir / 'estimators.png'}")


def main() -> None:
    """The command."""
    run_configured("evaluate", _run, __doc__ or "")
