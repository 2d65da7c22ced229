"""Buffers of a device that the host does not wait for merge as those of the CPU do, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from telemetry_rows import row_of
from torch import nn

from straggle.backward.stages import plan_stages
from straggle.merge.round.buffers import Share, StageBuffers
from straggle.merge.round.queued_buffers import QueuedBuffers
from straggle.merge.rows.telemetry import COLUMN
from straggle.merge.wire.groups import ProcessGroups
from straggle.source.replicated import slots_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
NOTHING = Share(0.0, False)


ROW = {"computed": 1.0, "estimated": 0.0}


class Sent:
    """A rank's side of a group: keeps what it is given."""

    def __init__(self):
        self.tensors = []

    def all_reduce(self, tensor):
        self.tensors.append(tensor)
        return True


def module_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2)).to(dtype)


def gradients_of(module, num_ranks):
    torch.manual_seed(1)
    return [[torch.randn_like(parameter) for parameter in module.parameters()] for _ in range(num_ranks)]


def begun(kind, module, num_ranks, num_stages=3, **options):
    slots, plan = slots_of(module.named_parameters()), plan_stages(module, num_stages)
    return [kind(plan, slots, num_ranks, num_state=4, **options) for _ in range(num_ranks)]


def merge(ranks, gradients, shares=None, weights=None, num_stages=3):
    """A step of all ranks; what each has of shares, and the groups."""
    num_buckets = min(num_stages, len(plan_stages(module_of(), 3).buckets()))
    groups = [ProcessGroups(Sent(), Sent(), tuple(range(len(ranks)))) for _ in ranks]
    for rank, buffers in enumerate(ranks):
        weight, own = (weights or {}).get(rank, 1.0), (shares or {}).get(rank, {})
        buffers.begin()
        for index, gradient in enumerate(gradients[rank]):
            buffers.accumulate(index, gradient, add=False, weight=weight)
        buffers.write_state(torch.full((4,), rank + 0.5, dtype=torch.float64))
        row = row_of(
            **{name: (value,) * num_stages for name, value in ROW.items()}, stage_s=(rank + 0.25,) * num_stages
        )
        buffers.write_telemetry(rank, row.numbers())
        for bucket in range(num_buckets):
            buffers.all_reduce(bucket, own, groups[rank], weight)
        if buffers.is_queued:
            buffers.send_rows(groups[rank].control)
    for name in ("data", "control"):
        for tensors in zip(*(getattr(own, name).tensors for own in groups), strict=True):
            total = sum(tensors[1:], start=tensors[0].clone())
            for tensor in tensors:
                tensor.copy_(total)
    every = [buffers.normalize() for buffers in ranks]
    assert all(own == every[0] for own in every)
    return every[0], groups[0]


def read_counts(buffers):
    counts = buffers.counts()
    return counts.read(counts.numbers.tolist())


def assert_equal(ours, theirs):
    for one, other in zip([*ours.views, ours.state], [*theirs.views, theirs.state], strict=True):
        assert torch.equal(one, other)


CASES = {
    "nobody late": {},
    "one without the last layer": {"shares": {1: {4: NOTHING, 5: NOTHING}}},
    "weights": {"weights": {0: 3.0, 1: 1.0}},
    "weights, and one without half": {"weights": {0: 3.0}, "shares": {1: {0: NOTHING, 1: Share(0.5, True)}}},
}


@DTYPES
@pytest.mark.parametrize("drop", [True, False], ids=["drop", "keep"])
@pytest.mark.parametrize("case", CASES)
def test_merge_is_the_same_bit_for_bit_whether_the_host_or_the_device_normalizes(dtype, drop, case):
    module = module_of(dtype)
    gradients = gradients_of(module, 2)
    host, device = (begun(kind, module, 2, drop_nonfinite=drop) for kind in (StageBuffers, QueuedBuffers))
    for _ in range(2):  # the memory is used again
        shares, groups = merge(host, gradients, **CASES[case])
        queued_shares, queued = merge(device, gradients, **CASES[case])
        assert queued_shares == shares
        assert_equal(host[0], device[0])
    for buffers in (host[0], device[0]):
        buffers.rows[:, COLUMN["sent_bytes"]] = 0.0
    torch.testing.assert_close(host[0].rows.float(), device[0].rows, rtol=0.0, atol=0.0, equal_nan=True)
    assert not groups.control.tensors
    assert len(queued.control.tensors) == 1
    assert device[0].usable is None or device[0].usable


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bucket_with_a_bad_number_counts_only_for_the_other_rank(dtype, bad):
    module = module_of(dtype)
    gradients = gradients_of(module, 2)
    gradients[1][3][0] = bad
    ranks = begun(QueuedBuffers, module, 2, drop_nonfinite=True)
    shares, _ = merge(ranks, gradients)
    assert all(share == Share(2.0, True) for share in shares)  # as hosts know it
    for buffers in ranks:
        for view, own, other in zip(buffers.views, *gradients, strict=True):
            assert torch.equal(view, own) or torch.equal(view, own / 2 + other / 2)
        assert torch.equal(buffers.views[3], gradients[0][3])
        assert buffers.usable
    assert [read_counts(buffers) for buffers in ranks] == [(0, False), (6, False)]  # all are in one bucket


@pytest.mark.parametrize("nothing", [False, True], ids=["bad on all ranks", "bad on one, nothing on the other"])
def test_all_gradients_are_zeros_if_no_rank_had_any_that_could_be_applied(nothing):
    module = module_of()
    gradients = gradients_of(module, 2)
    gradients[0][0][0] = math.nan
    gradients[1][5][0] = math.nan
    ranks = begun(QueuedBuffers, module, 2, drop_nonfinite=True)
    merge(ranks, gradients, shares={1: dict.fromkeys(range(6), NOTHING)} if nothing else {})
    for buffers in ranks:
        assert read_counts(buffers) == (6 if buffers is ranks[0] or not nothing else 0, True)
        assert not buffers.usable
        assert not any(view.any() for view in buffers.views)
    shares, _ = merge(ranks, gradients_of(module, 2))  # the next step is as any other
    assert ranks[0].usable
    assert shares[0] == Share(2.0, True)
    assert all(view.any() for view in ranks[0].views)


def test_hosts_know_that_no_rank_gave_anything():
    module = module_of()
    ranks = begun(QueuedBuffers, module, 2, drop_nonfinite=True)
    nothing = dict.fromkeys(range(6), NOTHING)
    merge(ranks, gradients_of(module, 2))
    assert ranks[0].counts() is not None
    shares, _ = merge(ranks, gradients_of(module, 2), shares={0: nothing, 1: nothing})
    assert set(shares) == {Share(0.0, False)}
    assert ranks[0].counts() is None


def test_gradients_of_several_passes_come_together_by_few_kernels():
    module = module_of()
    (first,), (second,) = gradients_of(module, 1), gradients_of(module_of(), 1)
    for drop in (True, False):
        (buffers,) = begun(QueuedBuffers, module, 1, drop_nonfinite=drop)
        buffers.begin()
        buffers.accumulate_together(list(enumerate(first)), add=False, weight=0.5)
        buffers.accumulate_together(list(enumerate(second)), add=True, weight=0.5)
        for view, one, other in zip(buffers.views, first, second, strict=True):
            assert torch.equal(view, one / 2 + other / 2)
        assert torch.equal(buffers.read(2, weight=0.5), first[2] + second[2])


def test_gradients_that_are_rounded_on_the_wire_are_normalized_as_they_come_back():
    module = module_of()
    gradients = gradients_of(module, 2)
    host, device = (
        begun(kind, module, 2, drop_nonfinite=True, wire_dtype=torch.bfloat16) for kind in (StageBuffers, QueuedBuffers)
    )
    for ranks in (host, device):
        merge(ranks, gradients, shares={1: {4: NOTHING, 5: NOTHING}})
    assert_equal(host[0], device[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_number_does_not_travel_if_gradients_are_rounded_on_the_wire(bad):
    module = module_of()
    gradients = gradients_of(module, 2)
    gradients[1][3][0] = bad
    ranks = begun(QueuedBuffers, module, 2, drop_nonfinite=True, wire_dtype=torch.bfloat16)
    merge(ranks, gradients)
    for buffers in ranks:
        assert buffers.usable
        assert torch.equal(buffers.views[3], gradients[0][3].bfloat16().float())


@DTYPES
@pytest.mark.parametrize("kind", [StageBuffers, QueuedBuffers])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_parameter_without_elements_has_a_gradient_without_any_though_no_other_is_of_its_dtype(dtype, kind, wire):
    module = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3, dtype=torch.complex64))])
    module.append(nn.Parameter(torch.ones(0, dtype=dtype)))
    ranks = begun(kind, module, 2, num_stages=1, drop_nonfinite=True, wire_dtype=wire)
    gradients = [[torch.full_like(parameter, rank + 1) for parameter in module] for rank in range(2)]
    shares, _ = merge(ranks, gradients, num_stages=1)
    assert [share.weight for share in shares] == [2.0] * 3
    for buffers in ranks:
        assert torch.equal(buffers.views[0], torch.full((3,), 1.5))
        assert [len(view) for view in buffers.views[1:]] == [0, 0]


def test_counts_are_on_the_device_of_the_first_parameter_whose_marks_tell_when_they_are_there(monkeypatch):
    devices = ("meta", "cpu", "meta")
    module = nn.ParameterList([nn.Parameter(torch.ones(3, device=device)) for device in devices])
    (buffers,) = begun(QueuedBuffers, module, 1, num_stages=1, drop_nonfinite=True)
    buffers.usable = torch.tensor(True)
    monkeypatch.setattr(buffers, "_all_found", lambda: torch.zeros(2))  # nothing can be copied from the meta device
    assert buffers.counts().numbers.device.type == "meta"  # the numbers of the last buffer are on the CPU


def of_several_dtypes():
    """Its gradients lie in three flat buffers: the first and the last in one."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    return nn.ParameterList([nn.Parameter(torch.ones(2 + size, dtype=dtype)) for size, dtype in enumerate(dtypes)])


SAME_FLAT = {0: (0, 3), 1: (1,), 2: (2,), 3: (0, 3)}


@pytest.mark.parametrize("weights", [{}, {0: 3.0, 2: 2.0}], ids=["alike", "weighed"])
@pytest.mark.parametrize("late", [{}, {1: {2: NOTHING, 0: Share(0.5, True)}}], ids=["in time", "late"])
@pytest.mark.parametrize("bad", [{}, {0: 1}, {0: 1, 1: 1}, {0: 3, 1: 2}, {1: 0}], ids=str)
def test_each_flat_buffer_with_a_bad_number_is_left_out_by_itself(bad, late, weights):
    module = of_several_dtypes()
    gradients = [[torch.full_like(parameter, 2.0**rank) for parameter in module] for rank in range(3)]
    for rank, index in bad.items():
        gradients[rank][index][1] = math.nan
    shares = {rank: {index: replace(own, weight=weights.get(rank, 1.0) * own.weight) for index, own in each.items()}
              for rank, each in late.items()}  # fmt: skip
    ranks = begun(QueuedBuffers, module, 3, num_stages=1, drop_nonfinite=True)
    merge(ranks, gradients, shares, weights, num_stages=1)
    for index, parameter in enumerate(module):
        given = [rank for rank in range(3) if bad.get(rank) not in SAME_FLAT[index]]
        weight = {rank: shares.get(rank, {}).get(index, Share(weights.get(rank, 1.0), True)).weight for rank in given}
        there = [rank for rank in given if weight[rank]]
        expected = sum(weights.get(rank, 1.0) * 2.0**rank for rank in there) / sum(weight.values())
        for buffers in ranks:
            torch.testing.assert_close(buffers.views[index], torch.full_like(parameter, expected), rtol=0.01, atol=0.0)
            assert torch.equal(buffers.views[index], ranks[0].views[index])
    for rank, buffers in enumerate(ranks):
        left_out = rank in bad and shares.get(rank, {}).get(bad[rank]) != NOTHING
        assert read_counts(buffers) == (len(SAME_FLAT[bad[rank]]) if left_out else 0, False)


def test_step_is_skipped_though_ranks_have_their_bad_numbers_in_different_flat_buffers():
    module = of_several_dtypes()
    gradients = [[torch.ones_like(parameter) for parameter in module] for _ in range(2)]
    gradients[0][1][0] = gradients[1][2][0] = math.nan
    ranks = begun(QueuedBuffers, module, 2, num_stages=1, drop_nonfinite=True)
    merge(ranks, gradients, num_stages=1)
    assert [read_counts(buffers) for buffers in ranks] == [(1, True)] * 2
    assert not any(view.any() for view in ranks[0].views)


def test_size_of_the_message_of_rows_is_counted():
    (queued,), (plain,) = (begun(kind, module_of(), 1) for kind in (QueuedBuffers, StageBuffers))
    sent = []
    for buffers in (plain, queued):
        merge([buffers], gradients_of(module_of(), 1))
        sent.append(int(buffers.rows[0, COLUMN["sent_bytes"]]))
    assert sent[0] == sent[1]


def test_gradients_that_the_loop_keeps_stay_as_they_are_and_the_next_ones_lie_elsewhere():
    module = module_of()
    first, second = gradients_of(module, 2), [[2 * own for own in of_rank] for of_rank in gradients_of(module, 2)]
    ranks = begun(QueuedBuffers, module, 2, drop_nonfinite=True)
    merge(ranks, first)
    kept = [view.detach() for view in ranks[0].views]
    for _ in range(3):  # two take turns
        copies = [own.clone() for own in kept]
        for buffers in ranks:
            buffers.renew_held()
        merge(ranks, second)
        for index, view in enumerate(ranks[0].views):
            assert torch.equal(view, second[0][index] / 2 + second[1][index] / 2)
        assert all(map(torch.equal, kept, copies))
        assert all(buffers.usable for buffers in ranks)
        kept = [view.detach() for view in ranks[0].views]
