"""Parameters that are replaced, added, tied or frozen after the model was wrapped (see test_freezing.py, too)."""

import pytest
import torch
from ranks import run_forked, staged
from torch import nn
from training import mlp

from straggle import Elastic, StagedBackward

pytestmark = pytest.mark.light


def replace(module):
    module[0].weight = nn.Parameter(torch.zeros_like(module[0].weight))


def append(module):
    module.append(nn.Linear(4, 4))


def tie(module):
    module[4].weight = module[2].weight


def weight_norm(module):
    nn.utils.parametrizations.weight_norm(module[2])


def remove(module):
    del module[4]


def unfreeze(module):
    module[0].weight.requires_grad_(True)


CHANGES = {
    replace: "(replaced: 0.weight)",
    append: "(added: 6.weight, 6.bias)",
    tie: "(replaced: 4.weight)",
    weight_norm: "(added: 2.parametrizations.weight.original0, 2.parametrizations.weight.original1; removed: 2.weight)",
    remove: "removed: 4.weight, 4.bias)",
}


def square():
    """As many outputs as features in each of its layers, so that any two can be tied."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def step_after(_rank, change, num_before):
    module = square()
    module[0].weight.requires_grad_(change is not unfreeze)
    with staged(module, members=Elastic()) as model:
        for number in range(num_before + 1):
            if number == num_before:
                change(module)
            with model.step():
                model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("change", [append, weight_norm, remove, unfreeze], ids=lambda change: change.__name__)
def test_other_parameters_are_refused_by_name_where_stages_cannot_be_planned_again(change, num_before):
    for rank, raised in enumerate(run_forked(step_after, 2, change, num_before, outcomes=True)):
        assert raised.kind == "RuntimeError"
        assert raised.message.startswith(f"rank {rank}, step {num_before}: parameters are not those that were wrapped")
        assert CHANGES.get(change, "(unfrozen: 0.weight)") in raised.message
        assert "with members= stages cannot be planned again" in raised.message
        assert "wrap the model again" in raised.message


def swap_an_activation(_rank):
    module = square()
    with staged(module) as model:
        for _ in range(3):
            with model.step():
                model(torch.ones(2, 4)).sum().backward()
            module[1] = nn.ReLU()
        return model.last_report.step


def test_module_without_parameters_may_be_replaced():
    assert run_forked(swap_an_activation, 2) == [2, 2]


def freeze_after_wrapping(rank):
    module = mlp()
    with staged(module, stages=3) as model:
        module[0].requires_grad_(False)
        for _ in range(3):
            with model.step():
                model(torch.full((2, 4), float(rank))).sum().backward()
        report = model.last_report
        stages = [(stage.name, stage.weight) for stage in report.stages]
        return [parameter.grad is not None for parameter in module.parameters()], stages, report.late_ranks


def test_layer_that_is_frozen_after_wrapping_has_no_gradient_and_the_others_are_merged():
    for gradients, stages, late in run_forked(freeze_after_wrapping, 2):
        assert gradients == [False, False, True, True, True, True]
        assert stages == [("4", 2.0), ("2", 2.0), ("0", 2.0)]
        assert late == ()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_staged_backward_plans_anew_for_the_parameters_that_there_are(change):
    module = square()
    staged_backward = StagedBackward(module)
    staged_backward.backward(module(torch.ones(2, 4)).sum())
    change(module)
    expected = dict(module.named_parameters())
    module.zero_grad()
    report = staged_backward.backward(module(torch.ones(2, 4)).sum()).report
    assert set(report.passes) == set(expected)
    assert sum(stage.numel for stage in report.stages) == sum(parameter.numel() for parameter in expected.values())
