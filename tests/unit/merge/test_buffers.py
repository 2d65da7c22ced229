"""Gradients that are not finite, large ones that are looked at as they are copied and small ones that are not."""

import math

import pytest
import torch
from telemetry_rows import row_of
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.rows.telemetry import COLUMN
from straggle.source.replicated import slots_of

SMALL, LARGE = 8, 2**16  # elements; the second has 256 KiB


class Alone:
    """The group of one rank, by which both data and control go: what it sums is what it has."""

    def __init__(self):
        self.data = self.control = self

    def all_reduce(self, tensor):
        return tensor


def layer(num_elements):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(num_elements))
    return module


def merged(writes, stages=1):
    """For each of four parameters whether a gradient is left, after these writes: index, bad, add, complete."""
    parameters = [layer(size).weight for size in (SMALL, LARGE, SMALL, LARGE)]
    module = nn.ParameterList(parameters)
    buffers = StageBuffers(plan_stages(module, stages), slots_of(module.named_parameters()), 1, drop_nonfinite=True)
    buffers.begin()
    for index, bad, add, complete in writes:
        gradient = torch.ones_like(parameters[index])
        gradient[3] = bad or 1.0
        buffers.accumulate(index, gradient, add=add, complete=complete)
    buffers.all_reduce(0, {}, Alone())
    weights = [share.weight for share in buffers.normalize()]
    assert all(torch.isfinite(view).all() for view in buffers.views)
    return [weight == 1.0 for weight in weights]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("complete", [True, False], ids=["summed as it is copied", "summed at the end"])
def test_one_bad_gradient_is_left_out_and_no_other(bad, index, complete):
    writes = [(i, bad if i == index else None, False, complete) for i in range(4)]
    assert merged(writes) == [i != index for i in range(4)]


@pytest.mark.parametrize("index", range(4))
def test_what_is_added_to_a_gradient_that_was_finite_is_seen(index):
    writes = [(i, None, False, True) for i in range(4)]
    assert merged([*writes, (index, math.nan, True, False)]) == [i != index for i in range(4)]
    assert merged([*writes, (index, None, True, False)]) == [True] * 4


@pytest.mark.filterwarnings("error")  # torch warns where the imaginary part is lost
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("bad", [None, complex(math.nan, 0.0), complex(0.0, math.nan)], ids=str)
def test_complex_gradients_travel_as_real_numbers_and_are_looked_at_in_both_parts(size, bad):
    sent = []

    class Group(Alone):
        def all_reduce(self, tensor):
            sent.append(tensor.dtype)
            return super().all_reduce(tensor)

    parameter = nn.Parameter(torch.zeros(size, dtype=torch.complex64))
    module = nn.ParameterList([parameter])
    buffers = StageBuffers(plan_stages(module, 1), slots_of(module.named_parameters()), 1, drop_nonfinite=True)
    buffers.begin()
    gradient = torch.full((size,), 1 + 2j)
    buffers.accumulate(0, gradient, add=False, complete=True)
    if bad is not None:
        buffers.accumulate(0, torch.zeros(size, dtype=torch.complex64).index_fill_(0, torch.tensor(3), bad), add=True)
    buffers.all_reduce(0, {}, Group())
    (share,) = buffers.normalize()
    assert set(sent) == {torch.float32}
    assert share.weight == (bad is None)
    assert torch.equal(buffers.views[0], gradient * share.weight)


class Counting:
    """A group that counts the bytes it is given."""

    def __init__(self):
        self.num_bytes = 0
        self.data = self.control = self

    def all_reduce(self, tensor):
        self.num_bytes += tensor.nbytes
        return tensor


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["exact", "rounded"])
@pytest.mark.parametrize("num_state", [0, 5])
def test_row_tells_the_bytes_that_its_rank_hands_to_collectives(wire_dtype, num_state):
    module = nn.ModuleList([layer(SMALL), layer(LARGE)])
    plan, group = plan_stages(module, 2), Counting()
    slots = slots_of(module.named_parameters())
    buffers = StageBuffers(plan, slots, 2, num_state=num_state, wire_dtype=wire_dtype)
    of_stages = {"computed": (1.0,) * len(plan.stages), "estimated": (0.0,) * len(plan.stages), "stage_s": (0.1,) * 2}
    row = row_of(**of_stages).numbers()

    def told():
        buffers.write_telemetry(1, row)
        return buffers.rows[1, COLUMN["sent_bytes"]].item()

    for _ in range(2):  # steps
        buffers.begin()
        group.num_bytes = 0
        first = told()
        for bucket in range(len(plan.buckets())):
            buffers.all_reduce(bucket, {}, group)
        assert group.num_bytes == first > 4 * SMALL
    # the members have changed: a bucket goes again, and the telemetry in a message of its own
    buffers.resend(0, group)
    buffers.use_telemetry(torch.zeros_like(buffers.telemetry))
    last = told()
    buffers.merge_telemetry(group)
    assert group.num_bytes == last > first
