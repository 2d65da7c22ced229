"""A large bucket goes in several messages: what is merged is what one message merges."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from ranks import run_ranks, staged
from torch import Tensor, nn
from training import Stopper, features, grads, mlp, random_stops

from straggle import Merge
from straggle.backward.stages import plan_stages
from straggle.merge.round.buffers import StageBuffers
from straggle.policies.network import merge_time
from straggle.source.replicated import slots_of

LARGE = 2**20


def gradients_of_steps(rank: int, segment_bytes: int, wire_dtype: torch.dtype | None) -> list[Tensor | None]:
    merge_time.SEGMENT_BYTES = segment_bytes
    module = mlp(width=40)
    stopper, found = Stopper(module), list[list[Tensor | None]]()
    with staged(module, merge=Merge(wire_dtype=wire_dtype)) as model:
        for number, stop in enumerate([None, *random_stops(rank, 5, 6)]):
            with model.step() as step:
                stopper.arm(step, stop)
                model(features(rank, number)).square().mean().backward()
            found.append(grads(module))
            module.zero_grad()
    return list(chain.from_iterable(found))


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=str)
def test_cut_messages_give_the_same_gradients_bit_for_bit_at_two_ranks(wire_dtype: torch.dtype | None) -> None:
    (one, other), (uncut, _) = (run_ranks(gradients_of_steps, 2, size, wire_dtype) for size in (64, LARGE))
    for mine, theirs, whole in zip(one, other, uncut, strict=True):
        assert (mine is None) == (theirs is None) == (whole is None)
        if mine is not None:
            assert torch.equal(mine, theirs)
            assert torch.equal(mine, whole)


@pytest.mark.parametrize(
    ("megabytes", "world_size", "count"),
    [(1, 2, 1), (3.9, 2, 1), (4.1, 2, 2), (9, 2, 3), (5.1, 4, 1), (9, 4, 2), (9, 8, 1)],
)
def test_no_message_is_larger_than_one_that_pays_few_latencies(megabytes: float, world_size: int, count: int) -> None:
    module = nn.Linear(int(megabytes * 2**18), 1, bias=False)
    buffers = StageBuffers(plan_stages(module), slots_of(module.named_parameters()), world_size)
    assert buffers.num_messages(0) == count
