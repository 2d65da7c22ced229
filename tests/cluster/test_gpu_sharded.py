"""On a GPU: replicas that FSDP2 shards, four ranks on one device over gloo: exact, and equal if one of them is late."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import digest, run_forked, staged
from sharding import Blocks, batch, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="needs torch 2.13"),
]


def sharded_on_one_device(rank: int, cut: bool) -> tuple[float, str, list[tuple[int, ...]]]:
    """The largest gap to the whole model, this rank's shards, and which replicas were late in each step."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    net = Blocks().cuda()
    plain = copy.deepcopy(net)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    shard(net, mesh["dp_shard"])
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (net, plain)]
    late = []
    with staged(net, mesh=mesh["dp_replicate"], deadline=60.0) as model:
        for number in range(6):
            with model.step() as step:
                loss = model(batch(number, rank).cuda()).square().mean()
                if cut and rank == 3 and number % 2:
                    step.stop()
                loss.backward()
            losses = [plain(batch(number, own).cuda()).square().mean() for own in range(4)]
            (sum(losses) / 4).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert model.last_report is not None
            late.append(model.last_report.late_ranks)
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    gap = max((own.full_tensor() - other).abs().max().item() for own, other in pairs)  # type: ignore[attr-defined]
    shards = [nn.Parameter(own.to_local().detach().cpu()) for own in net.parameters()]  # type: ignore[attr-defined]
    return gap, digest(shards), late


def test_replicas_of_two_shards_are_exact_on_one_device() -> None:
    for gap, _, late in run_forked(sharded_on_one_device, 4, False):
        assert gap < 2e-5
        assert not any(late)


def test_replicas_are_the_same_bit_for_bit_if_a_rank_of_one_is_late() -> None:
    first, second, third, fourth = run_forked(sharded_on_one_device, 4, True)
    assert (first[1], second[1]) == (third[1], fourth[1])
    assert all(own[2] == first[2] for own in (second, third, fourth))
    assert any(first[2])
