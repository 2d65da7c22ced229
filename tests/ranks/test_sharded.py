"""A model that is sharded inside of each replica: nobody late is as FSDP2's own HSDP, and as the model as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ranks import run_ranks, staged
from sharding import Block, Blocks, batch, pair, shard, sum_only
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from straggle import Merge

NUM_STEPS, RANKS = 10, range(4)
CLIP_AT = 0.05


class CheckpointedBlock(Block):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class ReentrantBlock(CheckpointedBlock):
    use_reentrant = True


class Checkpointed(Blocks):
    """Computes each block again in its backward pass, inside of the unit."""

    kind = CheckpointedBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in self.blocks)


class Reentrant(Checkpointed):
    kind = ReentrantBlock


class CheckpointedUnits(Blocks):
    """Computes each unit again: FSDP's hooks are called once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Wrapped(Blocks):
    """The wrapper of ``torch.distributed``, around what ``fully_shard`` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))


class TwiceCalled(Blocks):
    """Calls its blocks twice, and one of them in no step."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks[1:], *self.blocks[2:]):
            x = block(x)
        return self.last(x)


class Tied(Blocks):
    """Two layers of one unit have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = (nn.Linear(8, 8) for _ in range(2))
            block.down.weight = block.up.weight


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Callable[[int], None],
    clips: bool,
    early: bool = False,
) -> None:
    """``steps(number)`` leaves gradients; ``early``: it makes the optimizer's step, too."""
    for number in range(NUM_STEPS):
        steps(number)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        if not early:
            optimizer.step()
        optimizer.zero_grad()


def train_ours(rank: int, model: nn.Module, passes: int, clips: bool, early: bool = False, **options: bool) -> None:
    def step(number: int) -> None:
        with model.step(num_microbatches=passes, optimizer=optimizer if early else None):
            for micro in range(passes):
                model(batch(number, 10 * micro + rank)).float().square().mean().backward()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    trained(model, optimizer, step, clips, early=early)


def against_whole(
    rank: int, make: Callable[[], nn.Module], passes: int, clips: bool, options: dict, early: bool = False
) -> float:
    """The largest difference to the whole model with the data of all ranks."""

    def whole_step(number: int) -> None:
        for micro in range(passes):
            everything = torch.cat([batch(number, 10 * micro + other) for other in RANKS])
            both.plain(everything).square().mean().backward()

    both = pair(make, **options)
    with staged(both.net, mesh=both.mesh["dp_replicate"], merge=Merge(nonfinite="keep")) as model:
        train_ours(rank, model, passes, clips, early, fused=not early)  # of shards, a quarter of a step's time less
    trained(both.plain, torch.optim.AdamW(both.plain.parameters(), lr=0.01), whole_step, clips)
    return both.gap()


def against_hsdp(rank: int, optimizer: dict) -> float:
    """The largest difference to FSDP2's own replicas, with bfloat16 for all that is computed."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    both = pair(mp_policy=low)
    theirs = sum_only(shard(both.plain, both.mesh, mp_policy=low))

    def native_step(number: int) -> None:
        output = theirs(batch(number, rank))
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()

    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        train_ours(rank, model, 1, True, **optimizer)
    trained(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, **optimizer), native_step, True)
    pairs = zip(both.net.parameters(), theirs.parameters(), strict=True)
    return max((own.full_tensor() - other.full_tensor()).abs().max().item() for own, other in pairs)


def by_chunks(rank: int) -> float:
    """A hook on the loss runs forward and back for each chunk, as cached losses do."""
    both = pair()

    def again(rows: Tensor, _: Tensor) -> None:
        with torch.enable_grad():
            for chunk in rows.chunk(3):
                model(chunk).square().mean().div(3).backward()

    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in (model, both.plain))
        for number in range(NUM_STEPS):
            loss = torch.ones((), requires_grad=True)
            loss.register_hook(partial(again, batch(number, rank)))
            with model.step():
                loss.backward()
            both.plain(torch.cat([batch(number, other) for other in RANKS])).square().mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    return both.gap()


CASES = {
    "chunks in a hook": (by_chunks,),
    "plain": (against_whole, Blocks, 1, False, {}),
    "optimizer stepped in the block": (against_whole, Blocks, 1, False, {}, True),
    "two passes, clipped, resharded": (against_whole, Blocks, 2, True, {"reshard_after_forward": True}),
    "three passes, not resharded": (against_whole, Blocks, 3, False, {"reshard_after_forward": False}),
    "checkpoints inside of units": (against_whole, Checkpointed, 1, True, {}),
    "reentrant checkpoints": (against_whole, Reentrant, 2, False, {}),
    "checkpoints around units": (against_whole, CheckpointedUnits, 1, False, {}),
    "checkpoint wrappers": (against_whole, Wrapped, 1, False, {}),
    "units called twice, or not at all": (against_whole, TwiceCalled, 2, True, {}),
    "tied weights in a unit": (against_whole, Tied, 1, True, {}),
    "bfloat16, foreach": (against_hsdp, {"foreach": True}),
    "bfloat16, fused": (against_hsdp, {"fused": True}),
}


def all_cases(rank: int) -> dict[str, float]:
    """One after another: processes and their groups cost more than the training."""
    return {name: case(rank, *args) for name, (case, *args) in CASES.items()}


@pytest.fixture(scope="module")
def gaps() -> list[dict[str, float]]:
    return run_ranks(all_cases, 4, timeout_s=240.0)


@pytest.mark.slow  # for the seconds of all cases, which come with the first
@pytest.mark.parametrize("case", CASES)
def test_nobody_late_is_as_the_whole_model_or_as_hsdp(gaps: list[dict[str, float]], case: str) -> None:
    assert max(of_rank[case] for of_rank in gaps) < 5e-7
