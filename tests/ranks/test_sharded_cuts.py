"""A replica of two ranks leaves a pass between two of its units, both ranks alike; the next pass is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from ranks import run_ranks, staged
from sharding import Blocks, Pair, batch, mesh_of, pair, shard
from torch import Tensor, nn

from straggle import StagedDataParallel, Step

DEPTH = 5
EXACT = 1e-6


@dataclass(frozen=True)
class Stop:
    """Where rank 3 wants to leave, or replica 1 fails: inside of a block, in a pass of a micro-batch."""

    block: int
    backward: bool
    micro: int = 0
    fails: bool = False


class Failed(Exception):
    """An error of the user."""


@contextmanager
def stopping(net: nn.Module, rank: int, stop: Stop, step: Step | None, micro: int) -> Iterator[None]:
    """In this block, the rank's step is stopped or fails at this place."""

    def act(*_args: object) -> None:
        if stop.fails and rank >= 2:
            raise Failed
        if rank == 3:
            step.stop()

    inner = net.blocks[stop.block].up  # type: ignore[union-attr, index]
    handles = []
    if micro == stop.micro and stop.backward:
        handles.append(inner.register_forward_hook(lambda _m, _a, output: output.register_hook(act) and None))
    elif micro == stop.micro:
        handles.append(inner.register_forward_hook(act))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients_of(both: Pair, step: int, micro: int, ranks: range) -> list[Tensor]:
    """Of the whole model: the mean over these ranks."""
    both.plain.zero_grad()
    both.plain(torch.cat([batch(step, 10 * micro + rank) for rank in ranks])).square().mean().backward()
    return [own.grad.clone() for own in both.plain.parameters()]  # type: ignore[union-attr]


def one_step(model: StagedDataParallel, both: Pair, rank: int, step: int, passes: int, stop: Stop | None) -> None:
    with model.step(num_microbatches=passes) as opened:
        for micro in range(passes):
            try:
                if stop is None:
                    model(batch(step, 10 * micro + rank)).square().mean().backward()
                    continue
                with stopping(both.net, rank, stop, opened, micro):
                    model(batch(step, 10 * micro + rank)).square().mean().backward()
            except Failed:
                break


def weights_of_replica1(both: Pair, step: int, passes: int) -> tuple[dict[str, float], float]:
    """For each module the weight of replica 1 that explains its gradient, and the largest difference that is left."""
    names = [name for name, _ in both.plain.named_parameters()]
    parts = [[gradients_of(both, step, micro, ranks) for micro in range(passes)] for ranks in (range(2), range(2, 4))]
    weights, gap = dict[str, float](), 0.0
    for index, (name, own) in enumerate(zip(names, both.net.parameters(), strict=True)):
        gradient = own.grad.full_tensor()  # type: ignore[union-attr]
        first = sum(micro[index] for micro in parts[0])
        differences = {}
        for num_in in range(passes + 1):
            second = sum((micro[index] for micro in parts[1][:num_in]), start=torch.zeros_like(first))
            merged = (first + second) / (1 + num_in / passes)
            differences[num_in / passes] = (gradient - merged).abs().max().item()
        weight = min(differences, key=lambda one: differences[one])
        weights.setdefault(".".join(name.split(".")[:2]) if "blocks" in name else name.split(".")[0], weight)
        gap = max(gap, differences[weight])
    return weights, gap


class BetweenBlocks(Blocks):
    """Calls ``act`` when a block's forward or backward pass is over, which is in no compiled code."""

    act: Callable[[], None] | None = None
    backward = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.act is not None and number == 2:
                x.register_hook(lambda _: self.act()) if self.backward else self.act()
        return self.last(x)


def compiled(net: nn.Module) -> None:
    for block in net.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")


def cut_compiled(rank: int, is_other: bool) -> list[tuple[set[float], float]]:
    """The second of three steps is left after the third block; of each what `weights_of_replica1` gives.

    Rank 3 is late in the forward pass, or replica 1 fails in the backward pass (``is_other``).
    """
    torch.manual_seed(0)
    net, mesh, results = BetweenBlocks(DEPTH), mesh_of(), []
    both = Pair(net, copy.deepcopy(net), mesh)
    compiled(net)
    shard(net, mesh["dp_shard"])
    net.backward = is_other
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        for number in range(3):
            with model.step() as step:
                net.act = partial(leave, step, rank, is_other) if number == 1 else None
                with suppress(Failed):
                    model(batch(number, rank)).square().mean().backward()
            weights, gap = weights_of_replica1(both, number, 1)
            results.append((set(weights.values()), gap))
            model.zero_grad()
    return results


def leave(step: Step, rank: int, fails: bool) -> None:
    if fails and rank >= 2:
        raise Failed
    if rank == 3 and not fails:
        step.stop()


def cut_twice(rank: int) -> list[list[tuple[set[float], float]]]:
    return [cut_compiled(rank, is_other) for is_other in (False, True)]  # each rank traces for 2 s of CPU in each


def test_cuts_and_errors_are_exact_with_compiled_blocks() -> None:
    for in_forward, in_backward in run_ranks(cut_twice, 4, timeout_s=180.0):
        assert max(gap for _, gap in (*in_forward, *in_backward)) < EXACT
        assert [weights for weights, _ in in_forward] == [{1.0}, {0.0}, {1.0}]
        assert [weights for weights, _ in in_backward] == [{1.0}, {0.0, 1.0}, {1.0}]


def kept_for_later(model: StagedDataParallel, both: Pair, rank: int) -> None:
    """FSDP keeps the gradients of the only pass of a block."""
    both.net.set_requires_gradient_sync(False)
    one_step(model, both, rank, 1, 1, None)


def kept_in_part(model: StagedDataParallel, both: Pair, rank: int) -> None:
    """One unit keeps those of the last pass."""
    both.net.blocks[1].set_requires_gradient_sync(False)  # type: ignore[union-attr, index]
    one_step(model, both, rank, 1, 1, None)


def caught_behind_a_pass(model: StagedDataParallel, both: Pair, rank: int) -> None:
    """The second of three passes that FSDP accumulates fails in backward, and the loop goes on with the third."""
    with model.step() as step:
        for micro in range(3):
            both.net.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
            with suppress(Failed), stopping(both.net, rank, Stop(2, True, 1, fails=True), step, micro):
                model(batch(1, rank)).square().mean().backward()


REFUSED: dict[Callable[[StagedDataParallel, Pair, int], None], str] = {
    kept_for_later: "set_requires_gradient_sync(False)), and the step ends: it can be merged only if the last backward",
    kept_in_part: "FSDP keeps the gradient of parameter blocks.1.up.weight for a later pass",
    caught_behind_a_pass: "an error was caught in a backward pass inside of `with model.step()` while FSDP keeps",
}


def refused(rank: int, way: int) -> str:
    both = pair()
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        one_step(model, both, rank, 0, 1, None)
        with pytest.raises(RuntimeError) as error:
            [*REFUSED][way](model, both, rank)
    return str(error.value)


@pytest.mark.parametrize("way", range(len(REFUSED)))
def test_gradients_inside_of_fsdp_that_no_step_can_merge_are_refused(way: int) -> None:
    for said in run_ranks(refused, 4, way):
        assert [*REFUSED.values()][way] in said


def setting_back(rank: int, place: Stop) -> list[tuple[set[float], float]]:
    """The second of three blocks lets FSDP keep the gradients of a first pass, and says when that is over.

    Replica 1 is cut in that pass. The others know nothing of such settings.
    """
    both, results = pair(partial(Blocks, DEPTH)), []
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        for number in range(3):
            if number != 1:
                one_step(model, both, rank, number, 1, None)
            else:
                with model.step() as step:
                    both.net.set_requires_gradient_sync(False)  # type: ignore[operator]
                    with stopping(both.net, rank, place, step, 0):
                        model(batch(number, rank)).square().mean().backward()
                    both.net.set_requires_gradient_sync(True)  # type: ignore[operator]
                    model(batch(number, 10 + rank)).square().mean().backward()
            weights, gap = weights_of_replica1(both, number, 1 + (number == 1))
            results.append((set(weights.values()), gap))
            model.zero_grad()
    return results


def failing_between_steps(rank: int) -> list[float]:
    """Replica 1 catches an error in the model's evaluation, before the first step and behind a step."""
    both, gaps = pair(), []
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        for number in range(3):
            for grad in (False, True):
                failing = stopping(both.net, rank, Stop(1, False, fails=True), None, 0)
                with suppress(Failed), torch.set_grad_enabled(grad), failing:
                    model(batch(7, rank))
            one_step(model, both, rank, number, 1, None)
            gaps.append(weights_of_replica1(both, number, 1)[1])
            model.zero_grad()
    return gaps


def test_step_that_is_cut_has_the_settings_of_fsdp_that_it_began_with() -> None:
    for results in run_ranks(setting_back, 4, Stop(1, False)):
        assert [weights for weights, _ in results] == [{1.0}, {0.0}, {1.0}]
        assert max(gap for _, gap in results) < EXACT


def test_pass_that_failed_between_two_steps_is_forgotten() -> None:
    assert max(max(gaps) for gaps in run_ranks(failing_between_steps, 4)) < EXACT


LATER = Stop(2, True, 1)


def later_passes(rank: int) -> tuple[list[int], float]:
    """Late in backward of the second of three micro-batches that FSDP accumulates, by ``model.module``.

    How many blocks have run in each, and the gap of the next step.
    """
    both, run = pair(partial(Blocks, DEPTH)), [0, 0, 0]
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        one_step(model, both, rank, 0, 1, None)
        model.zero_grad()
        with model.step() as step:
            for micro in range(3):
                both.net.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
                with step.microbatch(), counted(both.net, run, micro), stopping(both.net, rank, LATER, step, micro):
                    both.net(batch(1, rank)).square().mean().backward()
        model.zero_grad()
        one_step(model, both, rank, 2, 1, None)
    return run, weights_of_replica1(both, 2, 1)[1]


@contextmanager
def counted(net: nn.Module, run: list[int], micro: int) -> Iterator[None]:
    def count(*_args: object) -> None:
        run[micro] += 1

    handles = [block.up.register_forward_hook(count) for block in net.blocks]  # type: ignore[union-attr]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_micro_batches_behind_a_late_one_begin_no_unit_and_leave_nothing() -> None:
    for rank, (run, gap) in enumerate(run_ranks(later_passes, 4)):
        assert run == ([DEPTH] * 3 if rank < 2 else [DEPTH, DEPTH, 0])
        assert gap < EXACT
