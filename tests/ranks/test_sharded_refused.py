"""Which sharded models and meshes are refused, with which words; and what the words say to do trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Raised, run_forked, run_ranks, staged
from sharding import WIDTH, Blocks, batch, mesh_of, pair, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from straggle import Elastic, LateHandling, StagedDataParallel


def without_mesh() -> None:
    StagedDataParallel(pair().net)


def not_sharded() -> None:
    StagedDataParallel(Blocks(), mesh=mesh_of()["dp_replicate"])


def over_both() -> None:
    mesh = mesh_of()
    StagedDataParallel(shard(Blocks(), mesh), mesh=mesh["dp_replicate"])


def two_dimensions() -> None:
    both = pair()
    StagedDataParallel(both.net, mesh=both.mesh)


def other_dimension() -> None:
    both = pair()
    StagedDataParallel(both.net, mesh=both.mesh["dp_shard"])


def with_stages_of_a_pipeline() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "pp", "dp_shard"))
    StagedDataParallel(shard(Blocks(), mesh["dp_shard"]), mesh=mesh["dp_replicate"])


def in_part() -> None:
    mesh, net = mesh_of(), Blocks()
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp_shard"])
    StagedDataParallel(net, mesh=mesh["dp_replicate"])


def split_twice() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    net = Blocks()
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (net.first, net.last):
        parallelize_module(layer, mesh["tp"], SequenceParallel())
    StagedDataParallel(shard(net, mesh["dp_shard"]), mesh=mesh["dp_replicate"])


def offloaded() -> None:
    both = pair(offload_policy=CPUOffloadPolicy(pin_memory=False))
    StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"])


def with_a_hook_on_the_sum() -> None:
    both = pair()
    both.net.set_all_reduce_hook(lambda _gradients: None)
    StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"])


def divided_by_hand_on_one_rank() -> None:
    both = pair(replicas=4, shards=1)
    both.net.set_gradient_divide_factor(1.0)
    StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"])


def of_the_first_kind() -> None:
    with torch.device("cpu"):
        StagedDataParallel(FullyShardedDataParallel(Blocks(), device_id=torch.device("cpu")))


def with_a_group() -> None:
    both = pair()
    StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"], process_group=both.mesh.get_group("dp_replicate"))


def with_members() -> None:
    both = pair()
    StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"], members=Elastic())


def of_an_old_torch() -> None:
    both, there = pair(), FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        StagedDataParallel(both.net, mesh=both.mesh["dp_replicate"])
    finally:
        FSDPModule.reset_iter_state = there


CASES: dict[Callable[[], None], str] = {
    without_mesh: 'write StagedDataParallel(model, mesh=mesh["dp_replicate"])',
    not_sharded: "write process_group=mesh.get_group(), or leave it out",
    over_both: "is sharded over ranks [0, 1, 2, 3], and mesh= has ranks [0, 2]: they must have this rank in common",
    two_dimensions: "mesh= has the dimensions ('dp_replicate', 'dp_shard'): give the one over which",
    other_dimension: "is sharded over ranks [0, 1], and mesh= has ranks [0, 1]: they must have this rank in common",
    with_stages_of_a_pipeline: "mesh= has 2 replicas of 1 ranks, and the job has 4 ranks, not 2",
    in_part: "parameter first.weight is in no unit of fully_shard()",
    split_twice: "is not sharded over all ranks of a replica",
    offloaded: "leave offload_policy out",
    with_a_hook_on_the_sum: "change a gradient by parameter.register_post_accumulate_grad_hook(...)",
    divided_by_hand_on_one_rank: "set_gradient_divide_factor(1.0) with replicas of one rank",
    of_the_first_kind: "shard the model by fully_shard()",
    with_a_group: "mesh= and process_group=: the mesh has the group over which replicas are merged",
    with_members: "so write fully_shard(..., mesh=straggle.replica_mesh()); leave mesh= out",
    of_an_old_torch: "has no FSDPModule.reset_iter_state",
}


def refused(rank: int) -> list[str]:
    """What each of them raises on this rank."""
    words = []
    for wraps in CASES:
        with pytest.raises(ValueError, match=r".") as error:
            wraps()
        words.append(str(error.value))
    return words


def test_sharded_model_that_cannot_be_merged_is_refused_with_what_to_write() -> None:
    first = run_ranks(refused, 4)[0]
    for (wraps, words), said in zip(CASES.items(), first, strict=True):
        assert words in said, wraps


def instead(rank: int) -> list[float]:
    """What the words say to write: a mesh for each of two dimensions, a group for copies, and passes of all ranks."""
    both, copies = pair(), mesh_of()
    gaps = []
    for net, plain, options, ranks in (
        (both.net, both.plain, {"mesh": both.mesh["dp_replicate"]}, range(4)),
        (seeded(), seeded(), {"process_group": copies.get_group("dp_replicate")}, (rank % 2, rank % 2 + 2)),
    ):
        with staged(net, **options) as model:
            for own in (model, plain):
                own.zero_grad()
            with model.step(num_microbatches=2):
                for micro in range(2):
                    model(batch(micro, rank)).square().mean().backward()
            for micro in range(2):
                plain(torch.cat([batch(micro, other) for other in ranks])).square().mean().backward()
            pairs = zip(net.parameters(), plain.parameters(), strict=True)
            gaps.append(max((whole(own.grad) - other.grad).abs().max().item() for own, other in pairs))
    return gaps


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def test_what_the_refusals_of_sharded_models_say_to_write_trains() -> None:
    assert max(max(gaps) for gaps in run_ranks(instead, 4)) < 1e-6


class ByRank(Blocks):
    """Runs its blocks in another order on rank 1; the third may be wider than the others."""

    order: Callable[[int], list[int]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order():
            x = self.blocks[number](x)
        return self.last(x)


def of_two_widths() -> nn.Module:
    net = ByRank()
    net.blocks[2].up, net.blocks[2].down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)
    return net


def out_of_order(rank: int, from_step: int, make: Callable[[], nn.Module] = ByRank) -> None:
    both = pair(make)
    options = {"late_handling": LateHandling(give_up_s=5.0)}
    with staged(both.net, mesh=both.mesh["dp_replicate"], **options) as model:
        for number in range(from_step + 1):
            both.net.order = lambda now=number: [0, 2, 1, 3] if rank == 1 and now == from_step else [0, 1, 2, 3]
            with model.step():
                model(batch(number, rank)).square().mean().backward()


@pytest.mark.parametrize("from_step", [0, 10])
def test_ranks_of_a_replica_that_run_units_in_different_orders_are_refused_and_named(from_step: int) -> None:
    ends = run_ranks(out_of_order, 4, from_step, outcomes=True)
    assert all(isinstance(end, Raised) for end in ends)
    at = ["before the forward pass of blocks.1", "before the forward pass of blocks.2"]
    for rank, other in ((0, 1), (1, 0)):
        assert (
            f"rank {rank}, step {from_step}, {at[rank]}, the vote of its replica: rank {other} is {at[other]}. All"
            in (ends[rank].message)
        )
    for rank in (2, 3):
        assert "the vote of its replica" in ends[rank].message


def test_units_of_different_sizes_in_different_orders_end_all_ranks() -> None:
    ends = run_forked(out_of_order, 4, 10, of_two_widths, outcomes=True)  # gloo ends a process that gets too much
    assert all(isinstance(end, Raised) for end in ends)
