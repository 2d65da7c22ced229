"""Every ``set_*`` of FSDP2: before and after wrapping, each gives FSDP's own gradients of all replicas, or is refused.

A replica that is late, in the second step, leaves the mean of the other one's, scaled as that of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Raised, run_ranks, staged
from sharding import Blocks, batch, mesh_of, shard, sum_only
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from straggle import Step

pytestmark = pytest.mark.slow  # FSDP2 on four ranks, many times

SHARDS, RANKS = 2, 4
PAGE = Path(__file__).parents[2] / "docs" / "sharded.md"


def each(name: str, *values: Any) -> Callable[[nn.Module], None]:
    """Call this setter of all units."""

    def apply(net: nn.Module) -> None:
        for unit in net.modules():
            if isinstance(unit, FSDPModule):
                getattr(unit, name)(*values)

    return apply


def of_the_root(name: str, *values: Any) -> Callable[[nn.Module], None]:
    return lambda net: getattr(net, name)(*values)


def all_of(*settings: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def apply(net: nn.Module) -> None:
        for setting in settings:
            setting(net)

    return apply


def by_unit(net: nn.Module) -> None:
    """One factor for the rest of the model, another one for a block, and none for the others."""
    net.set_gradient_divide_factor(2.0)
    net.blocks[1].set_gradient_divide_factor(0.5)


def prefetching(net: nn.Module) -> None:
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    net.blocks[2].set_modules_to_backward_prefetch([net.blocks[1], net.blocks[0]])


def first_stays_sharded(net: nn.Module) -> None:
    """Backward does not need the weight of the layer that the data come to."""
    net.first.set_unshard_in_backward(False)


class Negates(DefaultReduceScatter):
    """It negates what it reduces, so that it can be seen in the gradients that it was used."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        input_tensor.neg_()
        return super().__call__(output_tensor, input_tensor, *args, **options)


@dataclass
class Case:
    """A setting; before each of the passes of a step ``before_pass(net, is_last)`` is called.

    ``announced``: the step is told how many passes it has. ``weighed``: ranks set `Step.weight`.
    """

    apply: Callable[[nn.Module], None]
    num_passes: int = 1
    before_pass: Callable[[nn.Module, bool], None] = lambda _net, _is_last: None
    announced: bool = True
    weighed: bool = False


def accumulated(name: str, apply: Callable[[nn.Module], None] = lambda _net: None, *, announced: bool = True) -> Case:
    return Case(apply, 3, lambda net, is_last: getattr(net, name)(is_last), announced)


SUM = each("set_gradient_divide_factor", 1.0)
OWN_REDUCTION = each("set_custom_reduce_scatter", Negates())
FOLLOWED = {
    "a sum": Case(SUM),
    "a sum, by weight": Case(SUM, weighed=True),
    "divided by 3": Case(each("set_gradient_divide_factor", 3.0)),
    "divided by the old name": Case(each("set_reduce_scatter_divide_factor", 3.0)),
    "some units divided": Case(by_unit),
    "a sum, accumulated in FSDP": accumulated("set_requires_gradient_sync", SUM, announced=False),
    "a sum, of announced passes": accumulated("set_requires_all_reduce", SUM),
    "own reduction": Case(OWN_REDUCTION),
    "own reduction, by weight": Case(OWN_REDUCTION, weighed=True),
    "own reduction, a sum": Case(all_of(OWN_REDUCTION, SUM)),
    "own gathering": Case(each("set_custom_all_gather", DefaultAllGather())),
    "memory of the group": Case(all_of(each("set_allocate_memory_from_process_group_for_comm", True), SUM)),
    "a group to reduce": Case(all_of(of_the_root("set_separate_reduce_scatter_group", True), SUM), weighed=True),
    "sums only": Case(each("set_force_sum_reduction_for_comms", True)),
    "accumulated in FSDP": accumulated("set_requires_gradient_sync", announced=False),
    "announced passes": accumulated("set_requires_all_reduce"),
    "last backward": accumulated("set_is_last_backward"),
    "whole between passes": accumulated("set_reshard_after_backward"),
    "whole after backward": Case(of_the_root("set_reshard_after_backward", False)),
    "whole after forward": Case(of_the_root("set_reshard_after_forward", False)),
    "sharded after forward": Case(of_the_root("set_reshard_after_forward", True)),
    "sharded in backward": Case(first_stays_sharded),
    "prefetching": Case(prefetching),
    "after an event": Case(lambda net: net.set_post_optim_event(torch.Event("cpu"))),
    "unused parameters": Case(of_the_root("set_reduce_scatter_unused_params", True)),
    "more buffers": Case(of_the_root("set_reduce_scatter_max_input_buffers", 3)),
}


def loss_of(model: nn.Module, step: int, rank: int, micro: int, num_passes: int) -> Tensor:
    """A mean over rows of this rank's own number."""
    return model(batch(100 * micro + step, rank, rows=4 + rank)).square().mean() / num_passes


def run_passes(case: Case, model: nn.Module, net: nn.Module, step: int, rank: int) -> None:
    for micro in range(case.num_passes):
        case.before_pass(net, micro == case.num_passes - 1)
        loss_of(model, step, rank, micro, case.num_passes).backward()


def gradients_of(net: nn.Module) -> list[Tensor]:
    for unit in net.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return [own.grad.full_tensor() for own in net.parameters()]  # type: ignore[union-attr]


def weights_of(case: Case, replica: int) -> list[float]:
    return [1.0 + rank if case.weighed else 1.0 for rank in range(SHARDS * replica, SHARDS * (replica + 1))]


def of_replica(plain: nn.Module, case: Case, step: int, replica: int, num_passes: int) -> list[Tensor]:
    """The weighted mean of its ranks' gradients of their first passes, of an unsharded model."""
    plain.zero_grad(set_to_none=False)
    weights = weights_of(case, replica)
    for place, weight in enumerate(weights):
        for micro in range(num_passes):
            loss = loss_of(plain, step, SHARDS * replica + place, micro, case.num_passes)
            (loss * weight / sum(weights)).backward()
    return [torch.zeros_like(own) if own.grad is None else own.grad.clone() for own in plain.parameters()]


def merged(plain: nn.Module, case: Case, step: int, num_in: int) -> list[Tensor]:
    """The mean of both replicas', by weight, if so many of the second one's passes are in it."""
    first, second = (sum(weights_of(case, replica)) for replica in range(2))
    second *= (share := num_in / case.num_passes)
    parts = zip(
        of_replica(plain, case, step, 0, case.num_passes), of_replica(plain, case, step, 1, num_in), strict=True
    )
    total = first + second
    return [(first * one + second / (share or 1.0) * other) / total for one, other in parts]


def scales(native: Sequence[Tensor], mean: Sequence[Tensor]) -> list[float]:
    """What FSDP makes of the mean over all ranks, for each parameter."""
    return [((a * b).sum() / (b * b).sum()).item() for a, b in zip(native, mean, strict=True)]


def gap(found: Sequence[Tensor], *expected: Sequence[Tensor]) -> float:
    """The largest of any parameter to the nearest of what is expected of it."""
    return max(
        min((own - other).abs().max().item() for other in others) for own, *others in zip(found, *expected, strict=True)
    )


def stop_late(net: nn.Module, step: Step) -> None:
    """This rank hears that it is late in its next backward pass, behind the second of four blocks."""

    def stop(*_: Any) -> None:
        step.stop()
        handle.remove()

    handle = net.blocks[2].register_full_backward_hook(stop)


def gaps_of(case: Case, rank: int, *, after: bool) -> list[float]:
    """In three steps, in the second of which one replica is late, the gap to what FSDP makes of the merged mean."""
    torch.manual_seed(0)
    net, mesh = Blocks(), mesh_of()
    plain, theirs = copy.deepcopy(net), copy.deepcopy(net)
    for one, over in ((net, mesh["dp_shard"]), (theirs, mesh)):
        fully_shard(one.first, mesh=over)
        sum_only(shard(one, over))
    case.apply(theirs)
    if not after:
        case.apply(net)
    gaps = []
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        if after:
            with model.step():
                loss_of(model, 9, rank, 0, 1).backward()
            case.apply(net)
        for step, late in enumerate((False, True, False)):
            model.zero_grad()
            with model.step(case.num_passes if case.announced else 1) as own:
                if case.weighed:
                    own.weight = 1.0 + rank
                if late and rank == RANKS - 1:
                    stop_late(net, own)
                run_passes(case, model, net, step, rank)
            if not step:  # how FSDP scales the mean of all ranks, which is the same in each step
                run_passes(case, theirs, theirs, step, rank)
                native, mean = gradients_of(theirs), merged(plain, replace(case, weighed=False), 0, case.num_passes)
                scale = scales(native, mean)
                gaps.append(gap(native, [own * by for own, by in zip(mean, scale, strict=True)]))
            numbers = range(case.num_passes + 1) if late else [case.num_passes]
            means = [merged(plain, case, step, number) for number in numbers]
            scaled = [[mean * by for mean, by in zip(each, scale, strict=True)] for each in means]
            found = gradients_of(net)
            gaps.append(gap(found, *scaled))
            assert late == (gap(found, scaled[-1]) > 1e-4)
    return gaps


def all_followed(rank: int, names: Sequence[str], when: Sequence[bool]) -> dict[str, float]:
    """The largest gap of each."""
    cases = [(name, after) for name in names for after in when]
    return {f"{name}, {after=}": max(gaps_of(FOLLOWED[name], rank, after=after)) for name, after in cases}


def test_gradients_that_fsdp_sums_are_summed_over_replicas_too_also_by_weight() -> None:
    for found in run_ranks(all_followed, RANKS, ["a sum, by weight"], [True]):
        assert max(found.values()) < 1e-5


@pytest.mark.parametrize("part", range(13))
def test_settings_of_fsdp_give_what_its_own_replicas_have_before_and_after_wrapping(part: int) -> None:
    for found in run_ranks(all_followed, RANKS, sorted(FOLLOWED)[part::13], [False, True]):
        assert {name: gap for name, gap in found.items() if gap > 1e-5} == {}


# -- what is refused


def hook(net: nn.Module) -> None:
    net.blocks[1].set_all_reduce_hook(lambda _gradients: None)


def hooked_later(rank: int, inside: bool) -> None:
    torch.manual_seed(0)
    net, mesh = Blocks(), mesh_of()
    shard(net, mesh["dp_shard"])
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        for step in range(2):
            if step and not inside:
                hook(net)
            with model.step():
                if step and inside:
                    hook(net)
                loss_of(model, step, rank, 0, 1).backward()


@pytest.mark.parametrize("inside", [False, True])
def test_hook_on_the_sum_over_replicas_that_is_set_later_is_refused(inside: bool) -> None:
    for end in run_ranks(hooked_later, RANKS, inside, outcomes=True):
        assert isinstance(end, Raised)
        assert end.kind == "ValueError"
        assert "set_all_reduce_hook(...): FSDP would call it with the gradients of one replica" in end.message


def instead(rank: int) -> list[float]:
    """The gaps of gradients that a hook doubles, and of a sum over ranks that each have the whole model."""
    case, gaps = Case(SUM), []
    torch.manual_seed(0)
    whole = Blocks()
    net, plain, mesh = copy.deepcopy(whole), copy.deepcopy(whole), mesh_of()
    shard(net, mesh["dp_shard"])
    for own in net.parameters():
        own.register_post_accumulate_grad_hook(lambda own: own.grad.mul_(2))
    mean = merged(plain, case, 0, 1)
    for one, options, times in ((net, {"mesh": mesh["dp_replicate"]}, 2), (whole, {}, RANKS)):
        with staged(one, **options) as model:
            with model.step():
                (loss_of(model, 0, rank, 0, 1) * (RANKS if one is whole else 1)).backward()
            found = gradients_of(one) if one is net else [own.grad for own in one.parameters()]
            gaps.append(gap(found, [times * own for own in mean]))
    return gaps


def test_what_is_said_instead_of_refused_settings_gives_the_gradients() -> None:
    assert max(max(gaps) for gaps in run_ranks(instead, RANKS)) < 1e-5


def test_table_of_settings_has_each_that_this_torch_has() -> None:
    text = PAGE.read_text()
    assert [name for name in dir(FSDPModule) if name.startswith("set_") and f"`{name}`" not in text] == []
