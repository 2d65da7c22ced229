"""Which outputs come from a graph that gives all gradients at once."""

import pytest
import torch
from torch import nn

from straggle.backward.compiled import come_at_once


class Whole(torch.autograd.Function):
    """One node for a product of two parameters, as a compiled model has one for all."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        return x * first * second

    @staticmethod
    def backward(ctx, gradient):
        x, first, second = ctx.saved_tensors
        return gradient * first * second, gradient * x * second, gradient * x * first


FIRST, SECOND = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("output", "at_once"),
    [
        (Whole.apply(ONES, FIRST, SECOND), True),
        (Whole.apply(ONES, FIRST, SECOND).view(1, 2)[:, :1], True),
        (ONES * FIRST * SECOND, False),
        (Whole.apply(ONES * FIRST, FIRST, SECOND), False),  # computed before it
        (Whole.apply(ONES, FIRST, SECOND) * SECOND, False),  # and behind it
        (ONES, False),
    ],
    ids=["one node", "seen through views", "eager", "with a layer before", "with a layer behind", "not trained"],
)
def test_gradients_come_at_once_if_one_node_has_nothing_but_parameters_behind_it(output, at_once):
    assert come_at_once([output]) == at_once


def test_gradients_come_at_once_only_if_those_of_each_output_do():
    whole, eager = Whole.apply(ONES, FIRST, SECOND), ONES * FIRST * SECOND
    assert come_at_once([whole, whole])
    assert not come_at_once([whole, eager])
    assert not come_at_once([])
