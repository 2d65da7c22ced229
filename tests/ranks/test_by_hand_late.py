"""Gradients that a loop puts into ``p.grad`` before a pass that is cut: they count as much as the passes that are in.

Rank 1 leaves in a pass. Of a parameter it has the share ``s`` of its passes, and gives ``s`` of its penalty with it:
merged = (p0 + g0 + s (p1 + g1)) / (1 + s).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks, staged
from sharding import Blocks, batch, mesh_of, shard
from torch import Tensor, nn
from training import Chain, Stopper

import straggle

LAYERS = 3
BEFORE, INSIDE, BETWEEN, FORWARD = "before the block", "in the block", "between passes", "between forward and backward"


class Case(NamedTuple):
    """``num_passes`` of the step; ``cut``: the pass in which rank 1 is late, after how many gradients of it.

    ``known``: a step before has shown that passes give the gradients; ``kept``: that step's are not zeroed.
    """

    num_passes: int
    cut: tuple[int, int]
    put: str
    known: bool
    kept: bool


def all_cases() -> Iterator[Case]:
    places = (BEFORE, INSIDE, BETWEEN, FORWARD)
    for number, put, (known, kept) in product((1, 2, 3), places, ((False, False), (True, False), (True, True))):
        for cut in product(range(number), range(LAYERS)):
            if put != BETWEEN or number > 1:
                yield Case(number, cut, put, known, kept)


def put(module: nn.Module, rank: int) -> None:
    for own in module.parameters():
        penalty = torch.full_like(own, 10.0 * (1 + rank))
        own.grad = penalty if own.grad is None else own.grad + penalty


def run_passes(case: Case, rank: int, model: nn.Module, module: nn.Module, step: Any, stopper: Stopper) -> None:
    for number in range(case.num_passes):
        if (case.put, number) in ((INSIDE, 0), (BETWEEN, 1)):
            put(module, rank)
        stops = rank == 1 and number == case.cut[0]
        if stops:
            stopper.arm(step, case.cut[1])
        loss = model(1.0 + rank) / case.num_passes
        if (case.put, number) == (FORWARD, 0):
            put(module, rank)
        loss.backward()


def cut_step(rank: int, case: Case) -> list[list[float]]:
    module = Chain(LAYERS)
    stopper = Stopper(module)
    with staged(module) as model:
        if case.known:
            with model.step(case.num_passes):
                for _ in range(case.num_passes):
                    (model(1.0 + rank) / case.num_passes).backward()
            if not case.kept:
                module.zero_grad()
        if case.put == BEFORE:
            put(module, rank)
        with model.step(case.num_passes) as step:
            run_passes(case, rank, model, module, step, stopper)
        assert [own.late for own in model.last_report.ranks] == [False, True]
        return [layer.weight.grad.unique().tolist() for layer in module.layers]


def expected(case: Case) -> list[float]:
    """For each layer; what was kept of the step before, the mean over both ranks, is in all of it."""
    found = []
    for number in range(LAYERS):
        reached = LAYERS - number <= case.cut[1]
        share = (case.cut[0] + reached) / case.num_passes
        was_put = case.put != BETWEEN or case.cut[0] > 0
        first, second = 10.0 + (number + 1), 20.0 * was_put + 2.0 * (number + 1)
        kept = 1.5 * (number + 1) if case.kept else 0.0
        found.append((first + share * second) / (1 + share) + kept)
    return found


def run_cases(rank: int, cases: list[Case]) -> list[list[list[float]]]:
    return [cut_step(rank, case) for case in cases]


def check(cases: list[Case]) -> None:
    for found in run_ranks(run_cases, 2, cases):
        for case, layers in zip(cases, found, strict=True):
            wanted = expected(case)
            assert [len(values) for values in layers] == [1] * LAYERS, case
            assert [values[0] for values in layers] == pytest.approx(wanted, rel=1e-5), case


def test_penalty_that_is_put_before_a_cut_pass_counts_as_the_passes_do() -> None:
    check([case for case in all_cases() if case.num_passes < 3 and case.put == INSIDE])


@pytest.mark.slow
@pytest.mark.parametrize("place", [BEFORE, INSIDE, BETWEEN, FORWARD])
def test_penalty_counts_as_the_passes_do_wherever_it_is_put_and_the_pass_is_cut(place: str) -> None:
    check([case for case in all_cases() if case.put == place])


# -- who is not late, but cut by an error; who is stood in for; who has no data; pools; shards


def with_an_error(rank: int) -> list[float]:
    """Rank 1 catches an error of its backward pass, which comes before the first layer's gradient."""
    module = Chain(LAYERS)

    def fail(_gradient: Tensor) -> None:
        if rank == 1 and armed:
            raise ValueError("of the loop's own")

    armed = False
    module.layers[0].weight.register_hook(fail)
    with staged(module) as model:
        with model.step():
            model(1.0 + rank).backward()
        module.zero_grad()
        armed = True
        with model.step():
            put(module, rank)
            with contextlib.suppress(ValueError):
                model(1.0 + rank).backward()
        return [layer.weight.grad.unique().item() for layer in module.layers]


def test_penalty_beside_a_pass_that_failed_does_not_count() -> None:
    for found in run_ranks(with_an_error, 2):
        assert found == [11.0, 18.0, 19.5]


def of_an_unused_one(rank: int) -> list[Any]:
    """Passes use one of two heads, and the other one has a penalty alone: that is its gradient, of a late rank too."""
    module = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "other": nn.Linear(1, 1, bias=False)})
    module.forward = lambda x: module["used"](x).sum()
    stopper = Stopper(module["used"])
    with staged(module) as model:
        found = []
        for number in range(2):
            with model.step(2) as step:
                put(module["other"], rank)
                for part in range(2):
                    if (number, rank, part) == (1, 1, 1):
                        stopper.arm(step, 0)
                    model(torch.ones(1, 1)).backward()
            found.append([own.grad.item() for own in module.parameters()])
            module.zero_grad()
        return found


def test_penalty_of_a_parameter_that_passes_do_not_use_is_its_gradient() -> None:
    for first, second in run_ranks(of_an_unused_one, 2):
        assert first == [2.0, 15.0]
        assert second == pytest.approx([2.0, (10.0 + 0.5 * 20.0) / 1.5])


def in_a_pool(rank: int) -> None:
    module = Chain(LAYERS)
    with staged(module) as model, model.step() as step:
        for part in step.pull([1.0, 2.0]):
            put(module, rank)
            model(part).backward()


def test_penalty_in_a_pool_is_refused() -> None:
    for end in run_ranks(in_a_pool, 2, outcomes=True):
        assert "gradients were put into p.grad by hand in a step with step.pull()" in end.message


def put_sharded(net: nn.Module, rank: int) -> None:
    for own in net.parameters():
        own.grad = own.detach() * (1.0 + rank // 2)


def sharded(rank: int, num_passes: int, cut: int, put_before: bool) -> list[float]:
    """The gap of each parameter to what the share of its passes makes of it; replicas are two ranks each."""
    torch.manual_seed(0)
    plain, mesh = Blocks(), mesh_of()
    net = shard(Blocks(), mesh["dp_shard"])
    with torch.no_grad():
        for own, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            local = torch.distributed.tensor.distribute_tensor(theirs.detach(), own.device_mesh, own.placements)
            own.copy_(local)
    gaps = []
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        for late in (False, True):
            model.zero_grad()
            if put_before:
                put_sharded(net, rank)
            with model.step(num_passes) as step:
                if not put_before:
                    put_sharded(net, rank)
                for number in range(num_passes):
                    loss = model(batch(number, rank)).square().mean() / num_passes
                    if late and rank == 3 and number == cut:
                        step.stop()
                    loss.backward()
            for unit in (*net.blocks, net):
                unit.reshard()
            gaps.append(gap(net, plain, num_passes, late))
    return gaps


def gap(net: nn.Module, plain: nn.Module, num_passes: int, late: bool) -> float:
    """To the nearest of what 0 to all passes of the second replica make of each parameter."""
    by_replica = []
    for replica in range(2):
        sums = [[torch.zeros_like(own) for own in plain.parameters()]]
        for number in range(num_passes):
            plain.zero_grad()
            for rank in (2 * replica, 2 * replica + 1):
                (plain(batch(number, rank)).square().mean() / num_passes / 2).backward()
            sums.append([before + own.grad for before, own in zip(sums[-1], plain.parameters(), strict=True)])
        by_replica.append(sums)
    found = []
    for index, (own, theirs) in enumerate(zip(net.parameters(), plain.parameters(), strict=True)):
        first, gaps = by_replica[0][-1][index] + theirs, []
        for number in range(num_passes + 1) if late else [num_passes]:
            share = number / num_passes
            second = by_replica[1][number][index] + share * 2 * theirs
            gaps.append((own.grad.full_tensor() - (first + second) / (1 + share)).abs().max().item())
        found.append(min(gaps))
    return max(found)


def sharded_cases(rank: int) -> list[list[float]]:
    cases = ((1, 0, False), (1, 0, True), (2, 0, True), (2, 1, False))
    return [sharded(rank, *case) for case in cases]


@pytest.mark.slow
def test_penalty_of_a_replica_that_is_cut_counts_as_its_passes_do() -> None:
    for found in run_ranks(sharded_cases, 4):
        assert max(map(max, found)) < 1e-5


def seen_by(rank: int) -> list[float]:
    """What an estimator is shown of a rank's own gradient of two passes, with its penalty."""
    module, estimator = Chain(1), straggle.LastOwn()
    with staged(module, estimator=estimator) as model:
        with model.step(2):
            put(module, rank)
            for _ in range(2):
                (model(1.0 + rank) / 2).backward()
        return [estimator.memory[own].unique().item() for own in module.parameters()]


def test_estimator_sees_the_penalty_with_the_passes() -> None:
    assert run_ranks(seen_by, 2) == [[11.0], [22.0]]
