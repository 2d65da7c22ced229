"""Loops drawn by a number: what a step is made of, and how ranks are cut in their last one; what is merged then.

A gradient of a pass, a penalty that the loop adds before the passes, and a gradient that it computes by itself after
them are known numbers, so what the merge gives is known for each parameter: the weighted mean over what each rank gave.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from ranks import staged
from torch import Tensor, nn

from straggle import Estimate, Estimator, LateHandling, Merge, world
from straggle.backward import stages

NUM_LAYERS = 5
STALL_S, DEADLINE_S = 2.0, 0.2
FILLED_IN, FILLED_IN_WEIGHT = 50.0, 0.5


class OwnError(Exception):
    """Of the loop's own code in a backward pass; the loop catches it."""


@dataclass(frozen=True)
class DrawnLoop:
    """One loop of a few steps. ``cut``: ranks that are cut in step `cut_in`, as ``how`` and ``at`` say.

    ``uses``: for each layer the backward passes in which it has a gradient. ``apart``: ranks, and layers that these do
    not use. ``penalized``: layers to whose gradient the loop adds before the passes. ``by_hand``: those whose gradient
    it computes after them. ``frozen``: from the second step on. ``bad``: ranks, and layers whose gradient is NaN in the
    step of the cut. ``num_calls``: of the model for one backward pass. ``looks``: before its passes, the loop goes
    through the model by ``torch.autograd.grad``. ``at``: "before a pass" and its number, "in a pass", its number and
    the number of gradients from there on with which it happens, or "after the passes".
    """

    ranks: int
    num_passes: int
    order: tuple[int, ...]  # in which the forward pass uses the layers; backward finishes the last one first
    uses: tuple[frozenset[int], ...]
    apart: frozenset[tuple[int, int]]
    by_hand: frozenset[int]
    penalized: frozenset[int]
    frozen: frozenset[int]
    bad: frozenset[tuple[int, int]]
    num_calls: int
    looks: bool
    weighs: bool
    keeps: bool  # gradients are zeroed in every other step only
    in_block: bool  # the optimizer steps there
    in_buckets: bool
    stages: int | None
    granularity: str
    estimates: bool
    cut: frozenset[int]
    how: str  # "stopped", "stuck", "error"
    at: tuple[Any, ...]

    @property
    def cut_in(self) -> int:
        return 3 if self.keeps else 2

    @property
    def num_steps(self) -> int:
        """A rank that was stuck may be late in the step after that, too."""
        return self.cut_in + (1 if self.how == "stuck" else 2)

    def uses_of(self, rank: int, layer: int) -> frozenset[int]:
        return frozenset() if (rank, layer) in self.apart else self.uses[layer]

    def weight_of(self, rank: int) -> float:
        return 1.0 + rank if self.weighs else 1.0


def draw(seed: int) -> DrawnLoop:
    """Loop number ``seed``."""
    chance = random.Random(seed)
    pick, layers = chance.choice, range(NUM_LAYERS)

    def some(of_all: float, *but: frozenset[int]) -> frozenset[int]:
        return frozenset(i for i in layers if not any(i in own for own in but) and chance.random() < of_all)

    ranks, num_passes, how = pick([2, 2, 3]), pick([1, 1, 2, 2, 3]), pick(["stopped", "stopped", "stuck", "error"])
    order, every = tuple(chance.sample(layers, NUM_LAYERS)), frozenset(range(num_passes))
    drawn = [pick([every, every, frozenset({chance.randrange(num_passes)}), frozenset()]) for _ in layers]
    uses = tuple(every if i in order[:2] else own for i, own in enumerate(drawn))  # of one, backward has all at once
    keeps, used = pick([False, False, True]), frozenset(i for i in layers if uses[i])
    by_hand = frozenset[int]() if keeps else some(0.6, used)
    first, of_pass = chance.randrange(num_passes), chance.randrange(1, NUM_LAYERS + 1)
    places: list[tuple[Any, ...]] = [("in a pass", first, of_pass)] * 3
    if how != "error":
        places += [("before a pass", first), ("after the passes",)]
    most = 1 if how == "stuck" else pick([1, 1, ranks])
    apart = {(rank, i) for rank in range(ranks) for i in order[2:] if uses[i] and chance.random() < 0.3}
    bad = {(rank, i) for rank in range(ranks) for i in used if chance.random() < pick([0.1, 0.1, 0.7])}
    in_block = pick([False, False, True])
    return DrawnLoop(
        ranks,
        num_passes,
        order,
        uses,
        frozenset(pick([apart, set(), set()])),
        by_hand,
        penalized=pick([some(0.3, by_hand if num_passes == 1 else frozenset()), frozenset()]),
        frozen=pick([some(0.3, by_hand, frozenset(order[:2])), frozenset(), frozenset()]),
        bad=frozenset(set() if in_block else pick([bad, set(), set(), set()])),
        num_calls=pick([1, 1, 2]),
        looks=pick([False, False, True]),
        weighs=pick([False, True]),
        keeps=keeps,
        in_block=in_block,
        in_buckets=pick([False, True]),
        stages=pick([None, NUM_LAYERS, 2]),
        granularity=pick(["stage", "stage", "stage", "step", "microbatch"]),
        estimates=pick([False, False, True]),
        cut=frozenset(chance.sample(range(ranks), pick([0, most, most, most]))),
        how=how,
        at=pick(places),
    )


# -- the loop


class Layer(nn.Module):
    """Adds the sum of its weight's elements times a number: that is the gradient of each."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, total: Tensor, factor: float) -> Tensor:
        return total + self.weight.sum() * factor


class Net(nn.Module):
    """Layers that are called in any order, and how often the model was called."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(1 + i) for i in range(NUM_LAYERS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @property
    def weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers]

    def forward(self, factors: list[tuple[int, float]]) -> Tensor:
        self.calls += 1
        total = torch.zeros(())
        for index, factor in factors:
            total = self.layers[index](total, factor)
        return total


class Constant(Estimator):
    """A number, of less weight."""

    def contribution(self, parameter: nn.Parameter) -> Estimate:
        return Estimate(torch.full_like(parameter, FILLED_IN), FILLED_IN_WEIGHT)


class Trigger:
    """Lets it happen with a gradient of the model: before the library takes it. Make it before the model is wrapped."""

    def __init__(self, net: Net, how: str) -> None:
        self._how, self._left = how, 0
        self.step: Any = None
        for weight in net.weights:
            weight.register_hook(self._computed)
            weight.register_post_accumulate_grad_hook(self._there)

    def arm(self, after: int) -> None:
        self._left = after

    def happen(self) -> None:
        if self._how == "stuck":
            world.pause(STALL_S)
        else:
            self.step.stop()

    def _computed(self, _gradient: Tensor) -> None:
        if self._how == "error":
            self._left -= 1
            if self._left == 0:
                raise OwnError

    def _there(self, _weight: Tensor) -> None:
        if self._how != "error":
            self._left -= 1
            if self._left == 0:
                self.happen()


@dataclass
class Merged:
    """What a rank had after a step: for each layer its gradient, and what the optimizer made of it."""

    gradients: list[float | None]
    before: list[float | None]  # the gradients that there were
    moved: list[float]
    calls: list[int]  # of the model, before the step and after it
    late: list[bool]


def train(rank: int, loop: DrawnLoop) -> list[Merged]:
    """One rank's loop: the step in which ranks are cut, and the one after it."""
    found = list[Merged]()
    if loop.in_buckets:
        stages.BUCKET_BYTES = 1
    net = Net()
    trigger, optimizer = Trigger(net, loop.how), torch.optim.SGD(net.parameters(), lr=1.0)
    options: dict[str, Any] = {"estimator": Constant()} if loop.estimates else {}
    handling = LateHandling(grace_s=0.01, max_lag=4, granularity=loop.granularity)  # type: ignore[arg-type]
    merge = Merge(nonfinite="keep" if loop.in_block else "drop")
    with staged(net, stages=loop.stages, deadline=DEADLINE_S, late_handling=handling, merge=merge, **options) as model:
        for number in range(loop.num_steps):
            if number == 1:
                for index in loop.frozen:
                    net.weights[index].requires_grad_(False)
            before, were, called = _gradients_of(net), [own.mean().item() for own in net.weights], net.calls.item()
            happens = number == loop.cut_in and rank in loop.cut
            with model.step(loop.num_passes, **{"optimizer": optimizer} if loop.in_block else {}) as trigger.step:
                if loop.weighs:
                    trigger.step.weight = loop.weight_of(rank)
                _passes(rank, number, loop, model, net, trigger if happens else None)
                trigger.arm(0)  # there were not so many gradients
                for index in loop.by_hand:
                    own = net.weights[index]
                    own.grad = torch.full_like(own, by_hand_of(rank, number))
            if not loop.in_block:
                optimizer.step()
            gradients = _gradients_of(net)
            moved = [then - own.mean().item() for then, own in zip(were, net.weights, strict=True)]
            if (number + 1) % (2 if loop.keeps else 1) == 0:
                net.zero_grad()
            assert model.last_report is not None
            late = [own.late for own in model.last_report.ranks]
            found.append(Merged(gradients, before, moved, [int(called), int(net.calls.item())], late))
    return found[loop.cut_in :]


def _passes(rank: int, number: int, loop: DrawnLoop, model: Any, net: Net, trigger: Trigger | None) -> None:
    place, *at = loop.at
    for index in loop.penalized:
        own = net.weights[index]
        if own.requires_grad:
            penalty = torch.full_like(own, penalty_of(rank, number))
            own.grad = penalty if own.grad is None else own.grad + penalty
    if loop.looks:
        torch.autograd.grad(model([(index, 1.0) for index in loop.order[:2]]), net.weights[loop.order[0]])
    for part in range(loop.num_passes):
        if trigger is not None and place == "before a pass" and at == [part]:
            trigger.happen()
        if trigger is not None and place == "in a pass" and at[0] == part:
            trigger.arm(at[1])
        used = [index for index in loop.order if part in loop.uses_of(rank, index)]
        factors = [(i, gradient_of(loop, rank, number, part, i) / loop.num_calls) for i in used]
        with contextlib.suppress(OwnError):
            sum(model(factors) for _ in range(loop.num_calls)).backward()
        if trigger is not None and loop.how == "error":  # it is of this pass alone
            trigger.arm(0)
    if trigger is not None and place == "after the passes":
        trigger.happen()
        if loop.how == "stopped":
            model([])


def _gradients_of(net: Net) -> list[float | None]:
    return [None if own.grad is None else own.grad.mean().item() for own in net.weights]


# -- what is merged


def gradient_of(loop: DrawnLoop, rank: int, step: int, part: int, layer: int) -> float:
    """That of one backward pass."""
    if (rank, layer) in loop.bad and step == loop.cut_in and part == min(loop.uses[layer]):
        return math.nan
    return (1 + (7 * rank + 5 * step + 3 * part + 11 * layer) % 13) / loop.num_passes


def penalty_of(rank: int, step: int) -> float:
    return 100.0 * (1 + rank) + step


def by_hand_of(rank: int, step: int) -> float:
    return 1000.0 * (1 + rank) + step


@dataclass
class Given:
    """What a rank gave in the step of the cut: of each layer the passes that are in, and whether what is by hand is.

    ``is_cut``: something is missing. ``estimates``: and filled in.
    """

    passes: list[set[int]]
    by_hand: bool
    is_cut: bool = False
    estimates: bool = False


def given_by(loop: DrawnLoop, rank: int) -> Given:
    """By the rules: a stopped rank gives what was finished, as does the stand-in of one that is stuck."""
    place, *at = loop.at
    wanted = [set[int]() if index in loop.frozen else {*loop.uses_of(rank, index)} for index in range(NUM_LAYERS)]
    whole, fills = Given(wanted, by_hand=True), loop.estimates and loop.how != "stuck"
    if rank not in loop.cut:
        return whole
    if place == "after the passes":
        return Given(wanted, by_hand=False, is_cut=bool(loop.by_hand), estimates=fills)
    first, with_gradient = at[0], 0
    sequence = [
        (part, index) for part in range(loop.num_passes) for index in reversed(loop.order) if part in wanted[index]
    ]
    there = [own for own in sequence if own[0] < first]
    if place == "in a pass":
        with_gradient = at[1]
        rest = sequence[len(there) :]
        if loop.how == "error":
            rest = [own for own in rest if own[0] == first]
        if len(rest) < with_gradient:
            return whole
        if loop.how == "error":  # the passes after it are made
            there += rest[: with_gradient - 1] + [own for own in sequence if own[0] > first]
        elif loop.how == "stopped" and loop.granularity == "microbatch":
            last = rest[with_gradient - 1][0]
            if last == loop.num_passes - 1:
                return whole
            there = [own for own in sequence if own[0] <= last]
        else:
            there += rest[: with_gradient - (loop.how == "stuck")]
    passes = [{part for part, index in there if index == own} for own in range(NUM_LAYERS)]
    by_penalty = loop.penalized - loop.frozen if loop.num_passes == 1 and loop.how == "stopped" else frozenset[int]()
    if passes == wanted and all(own or index in by_penalty for index, own in enumerate(wanted)):
        return whole
    # of several passes it is not known how many are in what the loop has computed
    return Given(passes, loop.how == "error" and loop.num_passes == 1, is_cut=True, estimates=fills)


UNKNOWN = object()


@dataclass
class Part:
    """What a rank gave of a layer: a ``gradient`` with a ``share`` of the rank's weight; ``None``: it is not known."""

    share: float | None
    gradient: float = 0.0


def part_of(loop: DrawnLoop, rank: int, layer: int, step: int) -> Part:
    """Of one rank in a step."""
    given, frozen = given_by(loop, rank), layer in loop.frozen
    if given.is_cut and loop.granularity == "step":
        return Part(0.0)
    penalty = penalty_of(rank, step) if layer in loop.penalized and not frozen else 0.0
    if layer in loop.by_hand:
        return Part(1.0, by_hand_of(rank, step) + penalty) if given.by_hand else Part(0.0)
    wanted = frozenset() if frozen else loop.uses_of(rank, layer)
    if not wanted and given.is_cut:
        return Part(0.0) if frozen else Part(None)  # whether a pass would have used it
    share = len(given.passes[layer]) / len(wanted) if wanted else 1.0
    gradients = [gradient_of(loop, rank, step, part, layer) for part in given.passes[layer]]
    return Part(share, sum(gradients) + share * penalty)


def changes_nothing(loop: DrawnLoop, step: int) -> bool:
    """Whether each rank has a gradient that is not finite, or gave nothing."""
    parts = [[part_of(loop, rank, layer, step) for layer in range(NUM_LAYERS)] for rank in range(loop.ranks)]
    bad = [any(math.isnan(own.gradient) for own in of_rank) for of_rank in parts]
    return any(bad) and all(
        is_bad or not any(own.share for own in of_rank) for is_bad, of_rank in zip(bad, parts, strict=True)
    )


def expected(loop: DrawnLoop, layer: int, step: int) -> Any:
    """The merged gradient of a layer without what was kept; ``None``: there is none."""
    total = weights = 0.0
    is_there = False
    for rank in range(loop.ranks):
        part, own_weight = part_of(loop, rank, layer, step), loop.weight_of(rank)
        if part.share is None:
            return UNKNOWN
        if math.isnan(part.gradient):  # with what was filled in for the rest of it
            continue
        total, weights = total + own_weight * part.gradient, weights + own_weight * part.share
        is_there |= part.gradient != 0
        if given_by(loop, rank).estimates and layer not in loop.frozen and part.share < 1:
            filled_in = own_weight * FILLED_IN_WEIGHT * (1 - part.share)
            total, weights, is_there = total + filled_in * FILLED_IN, weights + filled_in, True
    return total / weights if is_there else None


def gives_calls(loop: DrawnLoop, rank: int) -> bool:
    """Whether all of the rank's forward passes came to their end, and it could say so."""
    given, place = given_by(loop, rank), loop.at[0]
    if rank not in loop.cut or loop.how == "error" or (place == "in a pass" and not given.is_cut):
        return True
    if loop.how == "stuck" or place == "before a pass":
        return False
    in_last = any(loop.num_passes - 1 in own for own in given.passes)
    return place == "after the passes" or (in_last and loop.granularity != "microbatch")


def problems_of(loop: DrawnLoop, ranks: list[list[Merged]]) -> list[str]:
    """What is otherwise than it is to be."""
    found, uncut = list[str](), replace(loop, cut=frozenset(), bad=frozenset())
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        step = loop.cut_in + number
        found += [f"step {step}: {what}" for what in _problems_in(uncut if number else loop, step, of_ranks)]
    return found


def _problems_in(loop: DrawnLoop, step: int, ranks: Sequence[Merged]) -> Iterator[str]:
    first = ranks[0]
    if any(own.gradients != first.gradients or own.moved != first.moved for own in ranks):
        yield f"replicas differ: {[(own.gradients, own.moved) for own in ranks]}"
    calls = loop.num_passes * loop.num_calls + loop.looks
    calls *= any(gives_calls(loop, rank) for rank in range(loop.ranks))
    if [own.calls for own in ranks] != [[first.calls[0], first.calls[0] + calls]] * loop.ranks:
        yield f"the model was called {[own.calls for own in ranks]} times, and {calls} in this step"
    nothing = changes_nothing(loop, step)
    for layer, (gradient, before, moved) in enumerate(zip(first.gradients, first.before, first.moved, strict=True)):
        is_kept = loop.keeps and before is not None
        if abs(moved - (gradient or 0.0)) > 1e-3 * max(1.0, abs(moved)):
            yield f"layer {layer} has the gradient {gradient}, and was moved by {moved}"
        if is_kept and layer in loop.penalized:  # then it is the rank's own, with what was there
            continue
        own = None if nothing else expected(loop, layer, step)
        if own is UNKNOWN:
            continue
        wanted = own if not is_kept else (own or 0.0) + before
        if (gradient is None) != (wanted is None) or (gradient and abs(gradient - wanted) > 1e-4 * abs(wanted)):
            yield f"layer {layer} has the gradient {gradient}, and not {wanted}"
    if late := [rank for rank in range(loop.ranks) if rank not in loop.cut and first.late[rank]]:
        yield f"ranks {late} are late"
