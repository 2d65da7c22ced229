"""On a GPU: a model that is compiled as a whole, or replayed as CUDA graphs, merges what an eager one does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, staged
from torch import Tensor, nn
from training import Stopper, grads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
WAYS = ("eager", "compiled", "cudagraph trees", "graphed")


@pytest.fixture
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def batch(number: int, rank: int = 0) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * number + rank)).cuda()


def prepared(module: nn.Module, way: str) -> nn.Module:
    importlib.import_module("torch._inductor.config").compile_threads = 1  # processes cost more than small kernels
    if way == "graphed":
        return torch.cuda.make_graphed_callables(module, (batch(0),))
    compiled = torch.compile(module, mode="reduce-overhead" if way == "cudagraph trees" else None)
    return module if way == "eager" else compiled


def merged(rank: int, way: str) -> list[list[Tensor]]:
    """The gradients of some steps of three micro-batches; in two of them the last rank ends after the second."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    stopper, steps = Stopper(module), list[list[Tensor]]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(prepared(module, way), deadline=60.0) as model:
        for number in range(5):
            with model.step(num_microbatches=3) as step:
                for microbatch in range(3):
                    if number in (2, 3) and rank == dist.get_world_size() - 1:
                        if way == "eager" and microbatch == 2:
                            stopper.arm(step, 0)  # before its forward pass
                        elif way != "eager" and microbatch == 1:
                            stopper.arm(step, 1)  # at a gradient, with which all of the pass are there
                    model(batch(number * 3 + microbatch, rank)).square().mean().div(3).backward()
            steps.append([gradient.cpu() for gradient in grads(module) if gradient is not None])
            optimizer.step()
            optimizer.zero_grad()
    return steps


def test_one_rank_over_nccl_has_the_gradients_of_an_eager_model(nccl: None) -> None:
    eager, *others = [merged(0, way) for way in WAYS]
    for way, steps in zip(WAYS[1:], others, strict=True):
        torch.testing.assert_close(steps, eager, rtol=1e-3, atol=1e-5, msg=lambda words, way=way: f"{way}: {words}")


def merged_by_all(rank: int) -> list[list[list[Tensor]]]:
    return [merged(rank, way) for way in WAYS]


def test_a_late_rank_of_two_on_one_device_merges_as_an_eager_one_and_replicas_are_equal() -> None:
    first, second = run_forked(merged_by_all, 2, timeout_s=120.0)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for way, steps in zip(WAYS[1:], first[1:], strict=True):
        torch.testing.assert_close(steps, first[0], rtol=1e-3, atol=1e-5, msg=lambda words, way=way: f"{way}: {words}")
