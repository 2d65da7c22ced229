"""Tensor parallelism inside of a replica: the same votes and cuts; its ranks' copies of a layer stay equal."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from ranks import digest, run_ranks, staged
from sharding import Blocks, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Signals

from straggle import FixedDeadline, LateHandling, Merge, StagedDataParallel
from straggle.merge.late.replica import Agreed, UnitVote

NUM_STEPS = 12
AGREE = UnitVote.agree


def split(net: nn.Module) -> tuple[nn.Module, object]:
    """Blocks are split over two ranks; layers around them are copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, mesh["dp_replicate"]


def both_models() -> tuple[nn.Module, nn.Module, object]:
    torch.manual_seed(0)
    plain = Blocks()
    return *split(copy.deepcopy(plain)), plain


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gap(net: nn.Module, plain: nn.Module) -> float:
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return max((whole(own.detach()) - other.detach()).abs().max().item() for own, other in pairs)


def train_both(rank: int, early: bool) -> float:
    """Replicas see data of their own; in one step a rank leaves, which is not used."""
    net, mesh, plain = both_models()
    with staged(net, mesh=mesh, merge=Merge(nonfinite="keep")) as model:
        ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01, foreach=False) for one in (model, plain))
        for number in range(NUM_STEPS):
            if number == 5:
                leave(model, rank)
            with model.step(num_microbatches=2, optimizer=ours if early else None):
                for micro in range(2):
                    model(batch(number, 10 * micro + rank // 2)).square().mean().backward()
            for micro in range(2):
                everything = torch.cat([batch(number, 10 * micro + other) for other in range(2)])
                plain(everything).square().mean().backward()
            for optimizer in (theirs,) if early else (ours, theirs):
                optimizer.step()
            ours.zero_grad()
            theirs.zero_grad()
    return gap(net, plain)


def leave(model: StagedDataParallel, rank: int) -> None:
    with model.step() as step:
        if rank == 3:
            step.stop()
        model(batch(99, rank // 2)).square().mean().backward()
    assert [one.late for one in model.last_report.ranks] == [False, True]
    model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_replicas_of_split_layers_train_as_one_model(early: bool) -> None:
    assert max(run_ranks(train_both, 4, early)) < 1e-5


def train_stuck(rank: int) -> tuple[str, str, int]:
    """Rank 3 is stuck until rank 0 has merged three more steps, with a gradient of a copy that rank 2 has given."""
    net, mesh, _ = both_models()
    signals, stuck = Signals(), {"at": 4}

    def reach(_parameter: Tensor) -> None:
        if rank == 3 and stuck["at"] == model.open_step_number:
            stuck["at"] = -1
            signals.wait("merged 7")

    net.last.weight.register_post_accumulate_grad_hook(reach)
    late = {"deadline": FixedDeadline(1.0), "late_handling": LateHandling(grace_s=0.0)}
    num_late = 0
    with staged(net, mesh=mesh, **late) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for number in range(NUM_STEPS):
            model.open_step_number = number
            with model.step():
                model(batch(number, rank // 2)).square().mean().backward()
            num_late += model.last_report.ranks[1].late
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
    parameters = dict(net.named_parameters())
    copies = [own for own in parameters.values() if not hasattr(own, "full_tensor")]
    return digest(copies), digest(whole(own.detach()) for own in parameters.values()), num_late


def test_copies_in_a_replica_stay_equal_if_one_of_its_ranks_is_stuck() -> None:
    copies, everything, num_late = zip(*run_ranks(train_stuck, 4), strict=True)
    assert min(num_late) > 0
    assert len(set(copies)) == 1
    assert len(set(everything)) == 1


class WithoutEnds(Blocks):
    """Does not call the layers of which the ranks of a replica have copies."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def unlike(vote: UnitVote, *said: object) -> Agreed:
    """As if one of the ranks had been stood in for, and its merge had others' gradients in it."""
    return replace(AGREE(vote, *said), alike=False)


def train_without_ends(rank: int) -> tuple[list[bool], float]:
    UnitVote.agree = unlike  # type: ignore[assignment, method-assign]
    torch.manual_seed(0)
    plain = WithoutEnds()
    net, mesh = split(copy.deepcopy(plain))
    with staged(net, mesh=mesh) as model:
        with model.step():
            model(batch(0, rank // 2).repeat(1, 2)).square().mean().backward()
        plain(torch.cat([batch(0, other) for other in range(2)]).repeat(1, 2)).square().mean().backward()
        for one in (net, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    return [own.grad is None for own in (net.first.weight, net.last.bias)], gap(net, plain)


def test_copies_that_no_graph_has_used_have_no_gradient_also_if_the_merges_of_a_replica_differ() -> None:
    for are_none, difference in run_ranks(train_without_ends, 4):
        assert are_none == [True, True]
        assert difference < 1e-6
