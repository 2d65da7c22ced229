"""Numbers of the steps, as a logger gets them: TensorBoard's own writer, and any function of a dict and a step."""

import math
from pathlib import Path

import pytest
from ranks import run_forked, run_ranks, staged
from training import Stopper, features, mlp

from straggle.observe.scalars import StepScalars, log_scalars


def logged(rank, folder):
    """Six steps, in the second of which rank 1 is stopped before it does anything."""
    from torch.utils.tensorboard import SummaryWriter

    module, given = mlp(), []
    stopper = Stopper(module)
    with staged(module) as model:
        writer = SummaryWriter(folder) if rank == 0 else None
        if writer is not None:
            log_scalars(model, writer, every=2)
        log_scalars(model, lambda scalars, step: given.append((step, scalars)), every=3, ranks=(0, 1))
        for number in range(6):
            with model.step() as step:
                stopper.arm(step, 0 if rank and number == 1 else None)
                step.log(loss=number)
                model(features(rank, number)).square().mean().backward()
    if writer is not None:
        writer.close()
    return given


def test_loggers_get_means_since_the_last_time(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = run_forked(logged, 2, str(tmp_path))
    assert [step for step, _ in first] == [2, 5]
    for (_, own), (_, theirs) in zip(first, second, strict=True):
        own, theirs = (  # seconds are each rank's own
            {name: value for name, value in one.items() if name not in ("straggle/step_s", "straggle/saved_s")}
            for one in (own, theirs)
        )
        assert own == theirs
    assert first[0][1]["straggle/late_ranks"] == pytest.approx(1 / 3)
    assert first[0][1]["straggle/dropped"] == pytest.approx(1 / 6)
    assert [scalars["loss"] for _, scalars in first] == [1, 4]
    assert first[1][1]["straggle/late_ranks"] == first[1][1]["straggle/dropped"] == 0

    events = EventAccumulator(str(Path(tmp_path)))
    events.Reload()
    assert {"straggle/late_ranks", "straggle/waited_s", "straggle/saved_s", "loss"} <= set(events.Tags()["scalars"])
    late = events.Scalars("straggle/late_ranks")
    assert [(event.step, event.value) for event in late] == [(1, 0.5), (3, 0.0), (5, 0.0)]


def loss_of_one_rank_is_bad(rank):
    given = []
    with staged(mlp()) as model:
        log_scalars(model, lambda scalars, _: given.append(scalars["loss"]), every=2, ranks=(0, 1))
        for number in range(6):
            with model.step() as step:
                step.log(loss=math.nan if rank and number == 3 else number)
                model(features(rank, number)).square().mean().backward()
    return given


def test_a_loss_that_is_not_finite_reaches_the_logger():
    for given in run_ranks(loss_of_one_rank_is_bad, 2):
        assert given == pytest.approx([0.5, math.nan, 4.5], nan_ok=True)


def six_steps(model, rank, after_step):
    for number in range(6):
        with model.step() as step:
            step.log(loss=number)
            model(features(rank, number)).square().mean().backward()
        after_step()


def with_wandb(rank, folder):
    """A loop that logs twice in an iteration: W&B counts ahead of the steps, and would leave out what names them."""
    import wandb

    with staged(mlp()) as model:
        if rank:
            return six_steps(model, rank, lambda: None)
        with wandb.init(project="straggle", dir=folder, mode="offline") as run:
            log_scalars(model, lambda scalars, step: run.log({**scalars, "step": step}), every=3)
            six_steps(model, rank, lambda: [run.log({"rate": 0.1}), run.log({"memory": 1.0})])
            summary = dict(run.summary)
        wandb.teardown()  # of the process that it has started
        return summary


@pytest.mark.slow
def test_wandb_has_the_numbers_though_it_counts_steps_by_itself(tmp_path):
    pytest.importorskip("wandb")
    summary, _ = run_forked(with_wandb, 2, str(tmp_path), timeout_s=200)
    assert (summary["step"], summary["loss"], summary["straggle/late_ranks"]) == (5, 4, 0)


def with_mlflow(rank, folder):
    import mlflow

    with staged(mlp()) as model:
        if rank:
            return six_steps(model, rank, lambda: None)
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")  # a newer one refuses a folder of files
        with mlflow.start_run() as run:
            log_scalars(model, mlflow.log_metrics, every=3)
            six_steps(model, rank, lambda: None)
        kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        return [(metric.step, metric.value) for metric in kept], sorted(mlflow.get_run(run.info.run_id).data.metrics)


@pytest.mark.slow
def test_mlflow_has_the_numbers(tmp_path):
    pytest.importorskip("mlflow")
    (losses, names), _ = run_forked(with_mlflow, 2, str(tmp_path), timeout_s=200)
    assert losses == [(2, 1), (5, 4)]
    assert {"straggle/late_ranks", "straggle/waited_s"} <= set(names)


def test_what_is_no_logger_is_refused():
    class Model:
        rank = 0

    with pytest.raises(TypeError, match="add_scalar"):
        log_scalars(Model(), "runs/tensorboard")
    with pytest.raises(ValueError, match="at least one step"):
        log_scalars(Model(), print, every=0)


def test_nothing_to_take_is_nothing():
    scalars = StepScalars()
    assert scalars.take() == {}
    assert not any(math.isnan(value) for value in scalars.take().values())
