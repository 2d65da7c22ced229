"""Replicas are compared while they are trained: one that differs is named, one that is only behind is not."""

import logging

import pytest
import torch
from ranks import run_ranks, staged
from torch import nn
from training import Signals, features, mlp

from straggle import FixedDeadline, Merge, Patience
from straggle.merge.checks import fingerprint
from straggle.merge.telemetry import Row, Table
from straggle.report import PHASES


def table(*fingerprints):
    times = dict.fromkeys(PHASES, 0.0)
    rows = [Row(times, compute_s=0.0, busy_s=0.0, fingerprint=own).encode() for own in fingerprints]
    return Table(torch.stack(rows), 0)


@pytest.mark.parametrize(
    ("fingerprints", "different"),
    [
        ([5, 5, 5, 5], ()),
        ([5, 5, 6, 5], (2,)),
        ([6, 5, 5, 5], (0,)),
        ([5, 6], (1,)),
        ([5, 5 + 2**24, 5], (1,)),
        ([2**48 - 1, 2**48 - 1, 2**48 - 2], (2,)),
        ([5, -1, 5, 6], (3,)),
        ([5, -1, -1], None),
        ([-1, -1], None),
    ],
)
def test_ranks_that_differ_from_most_are_named(fingerprints, different):
    assert table(*fingerprints).different_ranks() == different


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (2, 3, 5, 7)])
def test_fingerprint_sees_the_smallest_change_of_any_element(dtype, shape):
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype), torch.randn(3).to(dtype)]
    before = fingerprint(tensors)
    assert before == fingerprint([tensor.clone() for tensor in tensors])
    assert 0 <= before < 2**48
    for index in range(tensors[0].numel()):
        for bit in (0, 4, 7):
            changed = tensors[0].clone()
            changed.view(-1).view(torch.uint8)[(index + 1) * dtype.itemsize - 1] ^= 1 << bit
            assert fingerprint([changed, tensors[1]]) != before
    assert fingerprint(tensors[::-1]) != before or shape == (3,)


def test_fingerprint_is_that_of_the_values_wherever_they_lie():
    torch.manual_seed(0)
    values = torch.randn(2, 4, 3, 3)
    shifted = torch.zeros(values.numel() + 1)
    shifted[1:] = values.flatten()
    as_it_was = shifted.clone()
    others = [values.to(memory_format=torch.channels_last), shifted[1:].view(values.shape)]
    assert [fingerprint([other]) for other in others] == [fingerprint([values])] * 2
    assert torch.equal(shifted, as_it_was)


def drift(rank, at_step, num_steps, check_every):
    """Rank 1 changes one of its parameters by hand before ``at_step``."""
    module = mlp(seed=rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("straggle.parallel").addHandler(handler)
    reports = []
    with staged(module, merge=Merge(check_every=check_every)) as model:
        for number in range(num_steps):
            if number == at_step and rank == 1:
                with torch.no_grad():
                    module[0].weight[0, 0] += 1e-6
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report.different_ranks)
            optimizer.step()
            optimizer.zero_grad()
    return reports, warnings


def test_parameter_changed_by_hand_is_found_on_all_ranks_and_rank_0_warns():
    results = run_ranks(drift, 3, 4, 8, 3)
    expected = [None, None, None, (), None, None, (1,), None]
    assert [reports for reports, _ in results] == [expected] * 3
    assert [len(warnings) for _, warnings in results] == [1, 0, 0]
    assert "step 6: the parameters of ranks [1]" in results[0][1][0]


def test_replicas_are_not_compared_where_that_is_off():
    for reports, warnings in run_ranks(drift, 2, 1, 4, 0):
        assert reports == [None] * 4
        assert warnings == []


def fall_behind(rank, place):
    """Rank 2 is stuck from step 3 until step 6 is merged, while every step compares parameters."""
    module = mlp(seed=rank)
    signals = Signals()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stuck = [rank == 2]

    def hang(*_):
        if stuck[0] and model._coordinator.training.step == 3:
            stuck[0] = False
            signals.wait("merged 6")

    module[2].register_forward_pre_hook(hang if place == "forward" else lambda *_: None)
    reports = []
    options = {"deadline": FixedDeadline(0.2), "patience": Patience(grace_s=0.0), "merge": Merge(check_every=1)}
    with staged(module, **options) as model:
        for number in range(10):
            if place == "data":
                hang()
            with model.step():
                model(features(rank, number)).square().mean().backward()
            reports.append(model.last_report)
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
    return [(report.different_ranks, report.ranks[2].stood_in) for report in reports]


@pytest.mark.parametrize("place", ["data", "forward"])
def test_rank_that_is_behind_does_not_count_as_different(place):
    results = run_ranks(fall_behind, 3, place)
    assert {tuple(reports) for reports in results} == {tuple(results[0])}
    assert [different for different, _ in results[0]] == [None] + [()] * 9
    assert all(stood_in for _, stood_in in results[0][3:7])


def test_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="check_every=-1"):
        Merge(check_every=-1)


def test_parameters_of_any_module_have_a_fingerprint():
    assert fingerprint(nn.Linear(3, 3).parameters()) >= 0
