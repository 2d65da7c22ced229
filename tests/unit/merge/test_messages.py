"""What a carrier decides: in which messages weights and rows travel, and over which group."""

import pytest
import torch
from telemetry_rows import row_of
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.merge.buffers import NOTHING, StageBuffers
from straggle.merge.groups import ProcessGroups
from straggle.merge.messages import Message, Placed, RowsWithData
from straggle.merge.telemetry import COLUMN
from straggle.source.replicated import slots_of


class RowsOverControl:
    """Weights, rows and state lie by themselves, and travel over control."""

    def place(self, numel, num_numbers, dtype, device):
        gradients, numbers = torch.zeros(numel, dtype=dtype, device=device), torch.zeros(num_numbers)
        return Placed(gradients, numbers, (Message(gradients), Message(numbers, is_control=True)), None, gradients)

    def place_state(self, state, device):  # noqa: ARG002
        return Message(state, is_control=True)


class Sent:
    """A rank's side of a group: keeps what it is given."""

    def __init__(self):
        self.tensors = []

    def all_reduce(self, tensor):
        self.tensors.append(tensor)

    @property
    def numel(self):
        return sum(tensor.numel() for tensor in self.tensors)


def merged(dtype, carrier):
    """What two ranks have after a merge in which the second has no gradient of the last layer; and what went how."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)).to(dtype)
    parameters = list(module.parameters())
    plan, ranks, groups = plan_stages(module, 3), [], []
    for rank in range(2):
        buffers = StageBuffers(plan, slots_of(module.named_parameters()), 2, num_state=4, carrier=carrier)
        for index, parameter in enumerate(parameters):
            buffers.accumulate(index, torch.randn_like(parameter), add=False)
        buffers.write_state(torch.full((4,), rank + 0.5, dtype=torch.float64))
        buffers.write_telemetry(
            rank, row_of(computed=(1.0,) * 3, estimated=(0.0,) * 3, stage_s=(rank + 0.25,) * 3).numbers()
        )
        groups.append(ProcessGroups(Sent(), Sent(), (0, 1)))
        for bucket in range(len(plan.buckets())):
            buffers.all_reduce(bucket, {4: NOTHING, 5: NOTHING} if rank else {}, groups[-1])
        ranks.append(buffers)
    for name in ("data", "control"):
        for mine, theirs in zip(*(getattr(own, name).tensors for own in groups), strict=True):
            mine += theirs
            theirs.copy_(mine)
    shares = ranks[0].normalize()
    assert ranks[1].normalize() == shares
    return [*ranks[0].views, ranks[0].state], shares, ranks[0].rows, groups[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_merge_is_the_same_bit_for_bit_if_weights_and_rows_travel_over_control(dtype):
    views, shares, rows, groups = merged(dtype, RowsWithData(2))
    apart_views, apart_shares, apart_rows, apart = merged(dtype, RowsOverControl())
    assert all(map(torch.equal, views, apart_views))
    assert shares == apart_shares
    assert [share.weight for share in shares] == [2.0] * 4 + [1.0] * 2
    for own in (rows, apart_rows):
        own[:, COLUMN["sent_bytes"]] = 0.0  # of numbers in float64, which are larger
    torch.testing.assert_close(rows.float(), apart_rows, rtol=0.0, atol=0.0, equal_nan=True)
    assert groups.control.numel == 0
    assert apart.data.numel + apart.control.numel == groups.data.numel
    assert {tensor.dtype for tensor in apart.data.tensors} == {dtype}
