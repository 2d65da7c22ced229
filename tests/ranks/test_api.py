"""What users rely on: names, arguments, arbitrary models and outputs, evaluation, and the house's import direction."""

import inspect
import json
from dataclasses import dataclass

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import Tensor, nn
from training import Chain, Stopper, features, grads, mlp

import straggle
from straggle import FixedDeadline, StagedDataParallel


def test_public_names_are_pinned():
    assert sorted(straggle.__all__) == [
        "Abstain",
        "AutoDeadline",
        "BackwardStep",
        "BalancedByTime",
        "CollectGarbage",
        "Deadline",
        "DeadlineReached",
        "DealtLoader",
        "DropBudget",
        "Elastic",
        "Epochs",
        "Estimate",
        "Estimator",
        "FinishedStage",
        "FirstK",
        "FixedDeadline",
        "History",
        "JobDone",
        "LastMerged",
        "LastOwn",
        "LateHandling",
        "LateLoader",
        "MembersChanged",
        "MembersReport",
        "Merge",
        "MicroBatches",
        "MovingAverage",
        "NextDeadline",
        "OptimizerMomentum",
        "PeerFailed",
        "Progress",
        "QuantileDeadline",
        "RankReport",
        "Reach",
        "Rebalance",
        "ReplicaPlace",
        "Shadow",
        "StageProfile",
        "StageReport",
        "StagedBackward",
        "StagedDataParallel",
        "Step",
        "StepReport",
        "WaitForAll",
        "Watch",
        "Zero",
        "init_replica",
        "measure_stages",
        "replica_mesh",
        "watch",
    ]
    assert all(hasattr(straggle, name) for name in straggle.__all__)


@pytest.mark.parametrize(
    ("owner", "arguments"),
    [
        (
            StagedDataParallel,
            "module *process_group *mesh *stages *deadline *estimator *late_handling *merge *members *links ddp_kwargs",
        ),
        (StagedDataParallel.step, "self num_microbatches *optimizer"),
        (straggle.StagedBackward, "module *stages *on_stage *estimator *granularity *clock"),
        (straggle.StagedBackward.backward, "self tensors gradient *retain_graph *create_graph *budget_s"),
        (straggle.StagedBackward.step, "self budget_s"),
        (straggle.Rebalance, "model *total *min_share *multiple_of *window *least_gain"),
        (straggle.CollectGarbage, "model *every"),
        (straggle.Epochs, "model *num_samples *batch_size *seed *shuffle *repeat_up_to *rebalance *costs"),
        (straggle.DealtLoader, "model loader *num_microbatches *min_share *seed *repeat_up_to *cost"),
        (straggle.FixedDeadline, "budget_s *warmup_steps"),
        (straggle.QuantileDeadline, "q slack *window *warmup_steps"),
        (straggle.LastOwn, "weight"),
        (straggle.LastMerged, "weight"),
        (straggle.MovingAverage, "decay weight"),
        (straggle.OptimizerMomentum, "optimizer weight"),
        (straggle.LateHandling, "quorum grace_s max_lag give_up_s granularity late_by stuck_after_s"),
    ],
)
def test_arguments_are_pinned(owner, arguments):
    parameters = inspect.signature(owner).parameters.values()
    assert " ".join("*" * (p.kind is p.KEYWORD_ONLY) + p.name for p in parameters) == arguments


@dataclass
class Output:
    loss: Tensor
    extra: int


class Arbitrary(nn.Module):
    """Gives its output in the shape that is asked for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, shape="tensor", scale=1.0):
        loss = self.layer(x).square().mean() * scale
        return {"tensor": loss, "tuple": (None, [loss]), "dict": {"loss": loss}, "dataclass": Output(loss, 3)}[shape]


def use_output(rank, shape):
    loss_of = {
        "tensor": lambda output: output,
        "tuple": lambda output: output[1][0],
        "dict": lambda output: output["loss"],
        "dataclass": lambda output: output.loss,
    }[shape]
    with staged(Arbitrary()) as model:
        with model.step():
            output = model(features(0, 0), shape=shape, scale=2.0)
            loss_of(output).backward()
        merged = grads(model)
        report = model.last_report.ranks[rank]
    reference = Arbitrary()
    reference.load_state_dict(model.module.state_dict())
    reference(features(0, 0), scale=2.0).backward()
    return type(output).__name__, digest(merged) == digest(grads(reference)), report.backward_s > 0


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict", "dataclass"])
def test_forward_passes_keywords_and_any_output(shape):
    name = {"tensor": "Tensor", "dataclass": "Output"}.get(shape, shape)
    assert run_ranks(use_output, 2, shape) == [(name, True, True)] * 2


def train_and_evaluate(rank, evaluate):
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters())
    with staged(module, deadline=FixedDeadline(60.0)) as model:
        for number in range(4):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluate and rank == 0:  # on one rank only
                model.eval()
                with torch.no_grad():
                    model(features(9, number))
                model.train()
    return digest(module.parameters())


def test_evaluation_between_steps_changes_nothing():
    plain, evaluated = (run_ranks(train_and_evaluate, 2, evaluate) for evaluate in (False, True))
    assert plain == evaluated


def catch_everything(rank):
    """A loop that skips bad batches must not skip the end of a step."""
    caught = []
    with staged(Chain()) as model:
        with model.step() as step:
            step.stop()
            try:
                model(1.0).backward()
            except Exception as error:
                caught.append(error)
            caught.append("after")
        return caught, model.last_report.late_ranks, not issubclass(straggle.DeadlineReached, Exception)


def test_deadline_passes_through_except_exception():
    assert run_ranks(catch_everything, 1) == [([], (0,), True)]


def close_early(rank):
    module = mlp()
    model = StagedDataParallel(module)
    with model.step():
        model(features(rank, 0)).sum().backward()
    model.close()
    model.close()
    module.zero_grad()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(features(rank, 0)).sum().backward()
    plain = grads(module)
    optimizer.step()
    return plain


def test_closed_model_leaves_the_plain_module():
    first, second = run_ranks(close_early, 2)
    for rank, gradients in enumerate((first, second)):
        module = mlp()
        module(features(rank, 0)).sum().backward()
        torch.testing.assert_close(gradients, grads(module))


def wrap_two(rank):
    """Two models are trained in turn, each with its own step; one is frozen in the other's loss."""
    first, second = mlp(seed=1), mlp(seed=2)
    with staged(first) as one, staged(second) as other:
        for number in range(3):
            for model in (one, other):
                with model.step():
                    model(features(rank, number)).square().mean().backward()
        return digest(grads(first)), digest(grads(second)), one.last_report.step


def test_two_models_train_side_by_side():
    results = run_ranks(wrap_two, 2)
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def report_as_json(rank):
    module = Chain()
    stopper = Stopper(module)
    with staged(module) as model:
        with model.step() as step:
            stopper.arm(step, 2)
            step.log(loss=torch.tensor(0.5))
            model(1.0).backward()
        return json.dumps(model.last_report.as_dict(), allow_nan=False)


def test_report_is_plain_json():
    plain = json.loads(run_ranks(report_as_json, 1)[0])
    assert plain["step"] == 0
    assert plain["deadline_s"] is None
    assert plain["scalars"] == {"loss": 0.5}
    assert plain["ranks"][0]["late"] is True


def resume(rank):
    """The steps and the history of a run that is saved and gone on with in a new model."""
    module = mlp()
    with staged(module, deadline=FixedDeadline(60.0)) as model:
        for number in range(3):
            with model.step():
                model(features(rank, number)).sum().backward()
        saved = model.straggle_state()
    with staged(module, deadline=FixedDeadline(60.0)) as model:
        model.load_straggle_state(saved)
        for number in range(3, 5):
            with model.step():
                model(features(rank, number)).sum().backward()
        try:
            model.load_straggle_state(saved)
        except RuntimeError as error:
            refusal = str(error)
        return model.last_report.step, model.history.num_steps, model.last_report.deadline_s, refusal


def test_restored_model_counts_its_steps_on():
    assert run_ranks(resume, 2) == [(4, 5, 60.0, "load_straggle_state() comes before the first step")] * 2
