"""How parameters are divided into stages, and that all ranks divide them alike."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn
from training import mlp

from straggle.backward import stages
from straggle.backward.stages import complete_order, plan_stages, trainable
from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import Text

MODELS = {
    "mlp": mlp,
    "digits": Digits().model,
    "synthetic": Synthetic(width=16).model,
    "text": Text(__file__, context=8, width=16).model,
}


def parameters_of(plan):
    return list(chain.from_iterable(stage.parameters for stage in plan.stages))


def names_of(plan):
    return [stage.name for stage in plan.stages]


@pytest.mark.parametrize("division", [None, 1, 2, 3], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_is_in_one_stage_in_the_order_of_backward(model, division):
    module = MODELS[model]()
    named = trainable(module)
    plan = plan_stages(module, division)
    assert parameters_of(plan) == list(reversed(range(len(named))))
    assert plan.numel == sum(parameter.numel() for _, parameter in named)
    for stage in plan.stages:
        assert stage.numel == sum(named[index][1].numel() for index in stage.parameters)
        assert stage.nbytes == 4 * stage.numel


@pytest.mark.parametrize(("model", "expected"), [("mlp", 3), ("digits", 8), ("synthetic", 8), ("text", 8)])
def test_default_is_eight_stages_or_as_many_as_modules_with_parameters(model, expected):
    assert len(plan_stages(MODELS[model]()).stages) == expected


def test_large_model_has_stages_of_25_megabytes():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(40)))  # 16 MB each
    plan = plan_stages(module)
    assert len(plan.stages) == 26  # 640 MB / 25 MB, rounded up
    assert all(stage.nbytes <= 2 * stages.STAGE_BYTES for stage in plan.stages)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_number_of_stages_is_exact_and_of_about_equal_size(count):
    module = nn.Sequential(*(nn.Linear(10, 10) for _ in range(7)))
    sizes = [len(stage.parameters) // 2 for stage in plan_stages(module, count).stages]
    assert sum(sizes) == 7
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_named_modules_are_stages_and_the_rest_are_further_ones():
    module = MODELS["text"]()
    plan = plan_stages(module, ["blocks.0", "blocks.1"])
    named = trainable(module)
    content = [{named[index][0].split(".")[0] for index in stage.parameters} for stage in plan.stages]
    assert content == [{"head", "norm", "blocks"}, {"blocks"}, {"blocks"}, {"positions", "embedding"}]
    assert sorted(parameters_of(plan)) == list(range(len(named)))


def test_inner_name_takes_its_parameters_from_the_outer():
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    plan = plan_stages(module, ["0", "0.1", "1"])
    assert names_of(plan) == ["1", "0.1", "0"]
    assert [stage.entry for stage in plan.stages] == ["1", "0.1", "0"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["body"], r"stages not found in Sequential: \['body'\]; it has blocks, head"),
        (["blocks.9", "head"], r"\['blocks.9'\]; it has blocks, blocks.0, .*blocks.5, head"),
        (["pool"], r"\['pool'\]; it has blocks, head"),  # has no parameters
    ],
)
def test_wrong_name_is_refused_with_the_right_ones(names, words):
    with pytest.raises(ValueError, match=words):
        plan_stages(MODELS["digits"](), names)


def test_shared_parameter_is_in_one_stage_once_and_frozen_ones_in_none():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module[1].weight.requires_grad = False
    assert [name for name, _ in trainable(module)] == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert parameters_of(plan_stages(module)) == [3, 2, 1, 0]


def test_parameters_of_the_module_itself_are_a_stage_by_their_own_name():
    module = mlp()
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    plan = plan_stages(module, ["0", "2", "4"])
    assert "scale" in names_of(plan)
    assert next(stage.entry for stage in plan.stages if stage.name == "scale") == ""


def test_given_order_is_that_of_the_stages():
    plan = plan_stages(mlp(), 3, order=[2, 3, 0, 1, 4, 5])
    assert names_of(plan) == ["2", "0", "4"]
    assert parameters_of(plan) == [2, 3, 0, 1, 4, 5]


def test_named_stages_come_in_the_order_in_which_their_last_gradient_is_finished():
    plan = plan_stages(mlp(), ["0", "2", "4"], order=[0, 2, 3, 4, 1, 5])
    assert names_of(plan) == ["2", "0", "4"]


def plan_of(numels):
    """Of a stage for each of these numbers of elements."""
    module = nn.Module()
    for number, numel in enumerate(reversed(numels)):
        module.add_module(str(number), child := nn.Module())
        child.weight = nn.Parameter(torch.empty(numel, device="meta"))
    return plan_stages(module, len(numels))


@pytest.mark.parametrize(("numels", "expected"), [([1] * 5, [5]), ([2**18] * 3, [1, 1, 1]), ([1, 2**18, 1, 1], [2, 2])])
def test_consecutive_stages_below_a_megabyte_share_a_message(numels, expected):
    assert [len(bucket) for bucket in plan_of(numels).buckets()] == expected


MB = 2**18  # of elements


@pytest.mark.parametrize(
    "numels", [[1], [1] * 5, [25 * MB] * 20, [25 * MB, 1, 1, 90 * MB, 1, 1], [MB, 63 * MB, MB, MB, 1]]
)
def test_on_a_queue_stages_below_64_megabytes_share_a_message_but_not_the_first_and_the_last(numels):
    plan = plan_of(numels)
    few, many = replace(plan, is_queued=True).buckets(), plan.buckets()
    assert list(chain.from_iterable(few)) == list(plan.stages)
    assert few[0] == many[0]
    assert few[-1][-1:] == many[-1][-1:]
    nbytes = [[stage.nbytes for stage in bucket] for bucket in few]
    assert all(sum(own[:-1]) < 2**26 for own in nbytes)
    assert all(sum(own) >= 2**26 for own in nbytes[1:-2])  # the one before the last has what is left
    assert sum(nbytes[-1][:-1]) < 2**20


def test_gpt2_on_a_queue_has_8_messages_for_20_stages():
    assert [len(bucket) for bucket in replace(plan_of([25 * MB] * 20), is_queued=True).buckets()] == [1, *[3] * 6, 1]


def test_order_of_parameters_that_were_not_timed_follows_from_that_of_their_neighbours_in_the_module_tree():
    named = [("new first", 2), ("a", 1), ("b", 3), ("new between", 4), ("c", 2), ("new last", 6)]
    seconds = {"b": 6.0, "gone": 5.0, "c": 4.0, "a": 2.0}  # in the order in which backward finished them
    order, each_s = complete_order(named, seconds)
    assert [named[place][0] for place in order] == ["new last", "b", "c", "new between", "a", "new first"]
    assert each_s == [4.0, 2.0, 6.0, 8.0, 4.0, 12.0]  # 12 seconds for 6 elements


def test_order_is_the_module_tree_reversed_where_nothing_was_timed():
    assert complete_order([("a", 1), ("b", 1)], {}) == ([1, 0], [0.0, 0.0])
