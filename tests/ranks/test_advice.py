"""Each refusal's advice can be followed: every error is made, its text is followed to the letter, and it trains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from advice import case, check, follow, plain, stepping, train, trains, wrapping
from ranks import run_forked, staged
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import mlp

import straggle
from straggle import LateHandling, Merge, StagedDataParallel
from straggle.merge.checks import INSTEAD

KEEP = Merge(nonfinite="keep")

# -- modules


class Tied(nn.Module):
    """One layer twice, once under a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.use_reentrant = nn.Linear(4, 4), nn.Linear(4, 4), use_reentrant

    def forward(self, x):
        x = checkpoint(self.layer, self.first(x), use_reentrant=self.use_reentrant)
        return self.layer(x)


class Words(nn.Module):
    """Looks up a table, by a module or by the function."""

    def __init__(self, sparse, by_function=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4, sparse=sparse and not by_function)
        self.sparse = sparse

    def forward(self, x):
        return nn.functional.embedding((x.abs() * 2).long().clamp(max=7), self.table.weight, sparse=self.sparse)


def frozen(number=6):
    """So many of its parameters are."""
    module = mlp()
    for parameter in list(module.parameters())[:number]:
        parameter.requires_grad = False
    return module


def normed(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))


class Has(nn.Module):
    """Has a tensor more: a parameter, or a buffer."""

    def __init__(self, more):
        super().__init__()
        self.body, self.other = mlp(), nn.Module()
        if isinstance(more, nn.Parameter):
            self.other.more = more
        else:
            self.other.register_buffer("more", more)

    def forward(self, x):
        more = self.other.more
        return self.body(x) + (more.sum().float() if more.requires_grad else 0)


def narrow(dtype, trainable=True):
    return Has(nn.Parameter(torch.ones(2).to(dtype), requires_grad=trainable))


def windows():
    """Of other elements on each rank; rank 1's share their memory."""
    elements = torch.arange(6.0) * (dist.get_rank() + 1)
    return elements.as_strided((2, 3), (1, 1)) if dist.get_rank() else elements.view(2, 3)


def lazy(initialized):
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(4))
    if initialized:
        module(torch.zeros(1, 4))
    return module


# -- what is wrapped


def wrap_a_wrapped_one(rank):
    with staged(mlp()) as model, staged(nn.Sequential(model)):
        pass


def wrap_the_module_in_it(rank):
    model = StagedDataParallel(mlp())
    model.close()
    with staged(model.module) as model:
        return train(model, rank)


def wrap_the_same_module(rank):
    module = mlp()
    with staged(module), staged(module):
        pass


def use_that(rank):
    module = mlp()
    with staged(module) as model:
        with pytest.raises(ValueError, match="is not closed"):
            StagedDataParallel(module)
        return train(model, rank)


def close_it_first(rank):
    module = mlp()
    StagedDataParallel(module).close()
    with staged(module) as model:
        return train(model, rank)


def differ(rank, **options):
    with staged(mlp(), **({} if rank else options)):
        pass


def module(says, refused, *followed):
    """Wrapping the module that the first makes is refused, and those that the others make train."""
    return case(says, wrapping(refused), *map(trains, followed))


ENTIRE = "{} a {}: wrap the entire plain module, once (its .module{})"
MODULES = {
    "none is trainable": module(
        "{} has no parameter with requires_grad=True: there is nothing to train or merge",
        frozen,
        lambda: frozen().requires_grad_(True),
    ),
    "lazy": module("run one forward pass of the lazy module first", lambda: lazy(False), lambda: lazy(True)),
    "synchronized": case(
        "use BatchNorm or GroupNorm",
        wrapping(lambda: normed(nn.SyncBatchNorm(4))),
        trains(lambda: normed(nn.GroupNorm(2, 4))),
        trains(lambda: normed(nn.BatchNorm1d(4)), within=0.5),  # each rank's own statistics
    ),
    "sparse": module("set sparse=False", lambda: nn.EmbeddingBag(8, 4, sparse=True), lambda: Words(sparse=False)),
    "narrow": case(
        "in which gradients cannot be summed: train it in bfloat16 or wider, or set requires_grad=False",
        wrapping(lambda: narrow(torch.float8_e4m3fn)),
        trains(lambda: narrow(torch.bfloat16), within=0.02),
        trains(lambda: narrow(torch.float8_e4m3fn, trainable=False)),
    ),
    "sparse buffer": module(
        "keep it as dense tensors (`dequantize()`, `to_dense()`)",
        lambda: Has(torch.eye(2).to_sparse()),
        lambda: Has(torch.eye(2).to_sparse().to_dense()),
    ),
    "overlapping buffer": module(
        "elements of this tensor share their memory and would have to differ: use .contiguous()",
        lambda: Has(windows()),
        lambda: Has(windows().contiguous()),
    ),
    "sparse by the function": case(
        "use dense gradients",
        stepping(plain, lambda: Words(sparse=True, by_function=True)),
        trains(lambda: Words(sparse=False, by_function=True)),
    ),
    "a wrapped one": case(ENTIRE, wrap_a_wrapped_one, wrap_the_module_in_it),
    "a DDP": module(ENTIRE, lambda: DistributedDataParallel(mlp()), lambda: DistributedDataParallel(mlp()).module),
    "the same module": case("use that, or close() it first", wrap_the_same_module, use_that, close_it_first),
    "no data parallelism of torch's": module(
        ENTIRE, lambda: nn.DataParallel(mlp()), lambda: nn.DataParallel(mlp()).module
    ),
    "shared under reentrant checkpoints": case(
        "use checkpoint(..., use_reentrant=False)",
        stepping(plain, lambda: Tied(use_reentrant=True)),
        trains(lambda: Tied(use_reentrant=False)),
    ),
    "options differ": case("give the same to all", lambda rank: differ(rank, deadline=1.0), trains(deadline=60.0)),
    "estimators differ": case(
        "give the same to all",
        lambda rank: differ(rank, estimator=straggle.LastMerged()),
        trains(estimator=straggle.LastMerged()),
    ),
    "names of stages": case("it has 0, 2, 4", wrapping(stages=["body"]), trains(stages=["0", "2", "4"])),
    "quorum": case(
        "quorum={}: there are only {} ranks",
        wrapping(late_handling=LateHandling(quorum=3)),
        trains(late_handling=LateHandling(quorum=2)),
    ),
}

# -- words of DDP


class Unused(nn.Sequential):
    """Its second layer is not used, or only in steps with an odd sum."""

    def forward(self, x):
        x = self[0](x)
        return self[1](x) if x.sum() > 0 else x


def unused():
    torch.manual_seed(0)
    return Unused(nn.Linear(4, 4), nn.Linear(4, 4))


def two_passes(model, optimizer, x, num=2):
    with model.step(num_microbatches=num):
        for _ in range(2):
            (model(x).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_autocast(model, optimizer, x):
    with model.step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def in_bfloat16(model, optimizer, x):
    plain(model, optimizer, x.bfloat16())


def in_a_group(rank, by_mesh):
    group = init_device_mesh("cpu", (2,)).get_group() if by_mesh else dist.new_group([0, 1])
    return trains(process_group=group)(rank)


BUFFERS = tuple(
    trains(lambda: normed(nn.BatchNorm1d(4)), within=0.5, merge=Merge(buffers=choice))
    for choice in ("mean", "rank0", "local")
)
STAGES = trains(stages=2)
OTHER_MERGE = (
    trains(estimator=straggle.LastMerged()),
    trains(merge=Merge(wire_dtype=torch.bfloat16), within=1e-2),
)
AS_DDP = {
    "device_ids": (trains(lambda: mlp().to("cpu")),),
    "broadcast_buffers": BUFFERS,
    "forward_sync_buffers": BUFFERS,
    "bucket_cap_mb": (STAGES,),
    "bucket_cap_mb_list": (STAGES,),
    "delay_all_reduce_named_params": (STAGES,),
    "param_to_hook_all_reduce": (STAGES,),
    "find_unused_parameters": (trains(unused),),
    "static_graph": (trains(unused),),
    "skip_all_reduce_unused_params": (trains(unused),),
    "mixed_precision": (
        trains(step=in_autocast, within=2e-2),
        trains(lambda: mlp().bfloat16(), in_bfloat16, within=5e-2),
    ),
    "device_mesh": (lambda rank: in_a_group(rank, by_mesh=True),),
    "no_sync": (trains(step=two_passes),),
    "require_backward_grad_sync": (trains(step=two_passes),),
    "register_comm_hook": OTHER_MERGE,
    "register_builtin_comm_hook": OTHER_MERGE,
}


def asking(word):
    """The word as an argument, and as an attribute."""

    def refused(rank):
        with staged(mlp()) as model:
            with pytest.raises(AttributeError) as missing:
                getattr(model, word)
            with pytest.raises(TypeError) as refused:
                StagedDataParallel(mlp(), **{word: 1})
        return f"{missing.value} {refused.value}"

    return refused


DDP = {word: case(instead, asking(word), *AS_DDP.get(word, (trains(),))) for word, instead in INSTEAD.items()}


def run_cases(rank, name):
    return follow(rank, globals()[name])


@pytest.mark.parametrize("name", ["MODULES", pytest.param("DDP", marks=pytest.mark.slow)])
def test_advice_on_what_is_wrapped_can_be_followed(name):
    check(*run_forked(run_cases, 2, name))


def test_word_of_ddp_without_a_way_of_its_own_is_left_out():
    assert all(INSTEAD[word].startswith("leave it out;") for word in INSTEAD.keys() - AS_DDP.keys())
