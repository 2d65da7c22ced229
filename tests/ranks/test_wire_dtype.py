"""Gradients that travel as bfloat16: what DDP's hook makes of them, exact weights, and replicas that are the same."""

import pytest
import torch
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from training import features, grads, mlp

from straggle import Merge, StagedDataParallel

BF16_UNIT = 2.0**-8  # of one rounding, half of that is its error at most


def merged(rank, world_size, weight=1.0):
    torch.manual_seed(0)
    module = mlp()
    model = StagedDataParallel(module, merge=Merge(wire_dtype=torch.bfloat16))
    with model.step() as step:
        if rank == 0:
            step.weight = weight
        model(features(rank, 0)).square().mean().backward()
    return grads(module), [stage.weight for stage in model.last_report.stages]


def hook(state, bucket):
    return bf16_compress_hook(state, bucket)  # by its own name, DDP has it for nccl only


def by_ddp(rank):
    torch.manual_seed(0)
    module = mlp()
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, hook)
    model(features(rank, 0)).square().mean().backward()
    return grads(module)


def both(rank, world_size):
    return merged(rank, world_size)[0], by_ddp(rank)


def exact(world_size, weights):
    own = []
    for rank in range(world_size):
        torch.manual_seed(0)
        module = mlp()
        module(features(rank, 0)).square().mean().backward()
        own.append(grads(module))
    return [sum(w * g for w, g in zip(weights, of, strict=True)) / sum(weights) for of in zip(*own, strict=True)]


def test_gradients_are_those_of_ddps_hook_bit_for_bit_at_two_ranks():
    for ours, theirs in run_ranks(both, 2, 2):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_weights_are_exact_and_replicas_the_same():
    weight = 257.0  # which bfloat16 does not have
    results = run_ranks(merged, 3, 3, weight)
    gradients, weights = results[0]
    assert set(weights) == {weight + 2}
    for others, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    expected = exact(3, [weight, 1.0, 1.0])
    for ours, mean in zip(gradients, expected, strict=True):
        # three roundings of the ranks' own, and two of sums, none of which is larger than the largest part
        assert (ours - mean).abs().max() <= 5 * BF16_UNIT * mean.abs().max()
    assert any(not torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, "float8_e5m2", 16])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="choose bfloat16"):
        Merge(wire_dtype=dtype)


def test_dtype_may_be_given_by_its_name():
    assert Merge(wire_dtype="bfloat16") == Merge(wire_dtype=torch.bfloat16)
    assert Merge().dtype_on_wire is None
