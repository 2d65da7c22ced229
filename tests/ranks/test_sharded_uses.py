"""What people do with sharded models: each trains as the whole model does, also after a replica was cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from loaded import ranks_with
from ranks import staged
from sharding import Blocks, Pair, batch, mesh_of, pair
from torch import nn
from torch.distributed.fsdp import fully_shard

from straggle import StagedDataParallel

NUM_STEPS, RANKS = 8, range(4)
GPT2, LLAMA = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama"))
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def mean_square(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, rank)).square().mean()


def next_token(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(100 * number + rank))
    return model(input_ids=tokens, labels=tokens).loss


def ordinary(model: StagedDataParallel, number: int, rank: int, loss: Loss) -> None:
    with model.step():
        loss(model, number, rank).backward()


def evaluating(model: StagedDataParallel, number: int, rank: int, loss: Loss) -> None:
    """Before the block and after it, also between the merge and the optimizer's step."""
    with torch.no_grad():
        loss(model, 7, rank)
    ordinary(model, number, rank, loss)
    with torch.no_grad():
        loss(model, 8, rank)


def accumulating(model: StagedDataParallel, number: int, rank: int, loss: Loss) -> None:
    """FSDP keeps the gradients of two passes, and reduces them with those of the third."""
    with model.step():
        for last in (False, False, True):
            model.module.set_requires_gradient_sync(last)
            (loss(model, number, rank) / 3).backward()


def stopping(model: StagedDataParallel, number: int, rank: int, loss: Loss) -> None:
    """One rank leaves the step; its gradients are not used, and nothing of them may be left."""
    with model.step() as step:
        if rank == 3:
            step.stop()
        loss(model, number, rank).backward()
    assert [one.late for one in model.last_report.ranks] == [False, True]
    model.zero_grad()


def unfreeze(both: Pair, rank: int) -> None:
    """Between two steps, on all ranks; what has changed on one replica meanwhile becomes as on the other."""
    frozen = [own for own in both.net.parameters() if not own.requires_grad]
    for one in (both.net, both.plain):
        one.requires_grad_(True)
    if rank > 1:
        with torch.no_grad():
            for own in frozen:
                own.add_(1.0)


def train(
    rank: int, both: Pair, step: Callable = ordinary, loss: Loss = mean_square, unfrozen_from: int = NUM_STEPS
) -> float:
    """The largest difference to the whole model that sees the data of all ranks, but for the step that was left."""
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-4, fused=True) for one in (model, both.plain)]
        for number in range(NUM_STEPS):
            if number == unfrozen_from:
                unfreeze(both, rank)
            if number == NUM_STEPS // 2:
                stopping(model, number, rank, loss)
            step(model, number, rank, loss)
            for other in RANKS:
                (loss(both.plain, number, other) / len(RANKS)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return both.gap()


def sharded_by(prepare: Callable[[nn.Module], object], net: nn.Module, root: bool = True) -> Pair:
    """``prepare(net)`` gives the units, inner ones first."""
    plain, mesh = copy.deepcopy(net), mesh_of()
    for unit in prepare(net):
        fully_shard(unit, mesh=mesh["dp_shard"])
    if root:
        fully_shard(net, mesh=mesh["dp_shard"])
    return Pair(net, plain, mesh)


def blocks(net: nn.Module) -> list[nn.Module]:
    return [*net.blocks]


def compiled(net: nn.Module) -> list[nn.Module]:
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, backend="eager")
    return [*net.blocks]


def compiled_in_place(net: nn.Module) -> list[nn.Module]:
    for block in net.blocks:
        block.compile(backend="eager")
    return [*net.blocks]


def with_ends(net: nn.Module) -> list[nn.Module]:
    return [*net.blocks, net.first, net.last]


def with_a_group(net: nn.Module) -> list:
    return [*net.blocks, [net.first, net.last]]


def partly_frozen() -> nn.Module:
    net = seeded(Blocks)
    for frozen in (net.blocks[0], net.blocks[2].up):
        frozen.requires_grad_(False)
    return net


def prefetching() -> Pair:
    both = pair()
    own = [*both.net.blocks]
    for before, after in pairwise(own):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return both


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    made = import_module(LLAMA)  # here: each test process collects this file
    return made.LlamaForCausalLM(made.LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))


def gpt2() -> nn.Module:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made = import_module(GPT2)
    return made.GPT2LMHeadModel(made.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2, **none))


CASES: dict[str, Callable[[int], float]] = {
    "evaluation between steps": lambda rank: train(rank, pair(), evaluating),
    "accumulation inside of FSDP": lambda rank: train(rank, pair(), accumulating),
    "prefetching": lambda rank: train(rank, prefetching()),
    "torch.compile(block)": lambda rank: train(rank, sharded_by(compiled, seeded(Blocks))),
    "block.compile()": lambda rank: train(rank, sharded_by(compiled_in_place, seeded(Blocks))),
    "units without a root": lambda rank: train(rank, sharded_by(with_ends, seeded(Blocks), root=False)),
    "a unit of two modules": lambda rank: train(rank, sharded_by(with_a_group, seeded(Blocks))),
    "frozen parameters": lambda rank: train(rank, sharded_by(blocks, partly_frozen())),
    "unfrozen parameters": lambda rank: train(rank, sharded_by(blocks, partly_frozen()), unfrozen_from=3),
    "a Llama": lambda rank: train(rank, sharded_by(lambda net: net.model.layers, seeded(llama)), loss=next_token),
    "a GPT-2": lambda rank: train(rank, sharded_by(lambda net: net.transformer.h, seeded(gpt2)), loss=next_token),
}


def all_cases(rank: int) -> dict[str, float]:
    return {name: case(rank) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def gaps() -> list[dict[str, float]]:
    with ranks_with(GPT2, LLAMA, "torch._inductor.compile_fx") as run_loaded:
        return run_loaded(all_cases, 4, timeout_s=180.0)


@pytest.mark.slow  # for the seconds of all cases, which come with the first
@pytest.mark.parametrize("case", CASES)
def test_sharded_model_trains_as_the_whole_one(gaps: list[dict[str, float]], case: str) -> None:
    assert max(of_rank[case] for of_rank in gaps) < 1e-5
