"""Loops drawn by a number: what a step is made of, and how ranks are cut in their last one; what is merged then.

A gradient of a pass, a penalty that the loop adds before the passes, and a gradient that it computes by itself after
them are known numbers, so what the merge gives is known for each parameter: the weighted mean over what each rank gave.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
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
    """One loop of a few steps. ``cut``: ranks that are cut in the last one, as ``how`` and ``at`` say.

    ``uses``: for each layer the backward passes in which it has a gradient. ``penalized``: layers to whose gradient the
    loop adds before the passes. ``by_hand``: those whose gradient it computes after them. ``frozen``: from the second
    step on. ``num_calls``: of the model for one backward pass. ``at``: "before a pass" and its number, "in a pass", its
    number and the number of gradients from there on with which it happens, or "after the passes".
    """

    ranks: int
    num_passes: int
    order: tuple[int, ...]  # in which the forward pass uses the layers; backward finishes the last one first
    uses: tuple[frozenset[int], ...]
    by_hand: frozenset[int]
    penalized: frozenset[int]
    frozen: frozenset[int]
    num_calls: int
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
    def num_steps(self) -> int:
        return 4 if self.keeps else 3

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
    return DrawnLoop(
        ranks,
        num_passes,
        order,
        uses,
        by_hand,
        penalized=pick([some(0.3, by_hand if num_passes == 1 else frozenset()), frozenset()]),
        frozen=pick([some(0.3, by_hand, frozenset(order[:2])), frozenset(), frozenset()]),
        num_calls=pick([1, 1, 2]),
        weighs=pick([False, True]),
        keeps=keeps,
        in_block=pick([False, False, True]),
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
    """What a rank had after the last step: for each layer its gradient, and what the optimizer made of it."""

    gradients: list[float | None]
    before: list[float | None]  # the gradients that there were
    moved: list[float]
    calls: list[int]  # of the model, before the step and after it
    late: list[bool]


def train(rank: int, loop: DrawnLoop) -> Merged:
    """One rank's loop."""
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
            happens = number == loop.num_steps - 1 and rank in loop.cut
            with model.step(loop.num_passes, **{"optimizer": optimizer} if loop.in_block else {}) as trigger.step:
                if loop.weighs:
                    trigger.step.weight = loop.weight_of(rank)
                _passes(rank, number, loop, model, net, trigger if happens else None)
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
    return Merged(gradients, before, moved, [int(called), int(net.calls.item())], late)


def _passes(rank: int, number: int, loop: DrawnLoop, model: Any, net: Net, trigger: Trigger | None) -> None:
    place, *at = loop.at
    for index in loop.penalized:
        own = net.weights[index]
        if own.requires_grad:
            penalty = torch.full_like(own, penalty_of(rank, number))
            own.grad = penalty if own.grad is None else own.grad + penalty
    for part in range(loop.num_passes):
        if trigger is not None and place == "before a pass" and at == [part]:
            trigger.happen()
        if trigger is not None and place == "in a pass" and at[0] == part:
            trigger.arm(at[1])
        used = [index for index in loop.order if part in loop.uses[index]]
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
    return (1 + (7 * rank + 5 * step + 3 * part + 11 * layer) % 13) / loop.num_passes


def penalty_of(rank: int, step: int) -> float:
    return 100.0 * (1 + rank) + step


def by_hand_of(rank: int, step: int) -> float:
    return 1000.0 * (1 + rank) + step


@dataclass
class Given:
    """What a rank gave in the last step: of each layer the passes that are in, and whether what the loop computes is.

    ``is_cut``: something is missing. ``estimates``: and filled in.
    """

    passes: list[set[int]]
    by_hand: bool
    is_cut: bool = False
    estimates: bool = False


def given_by(loop: DrawnLoop, rank: int) -> Given:
    """By the rules: a stopped rank gives what was finished, as does the stand-in of one that is stuck."""
    place, *at = loop.at
    wanted = [set[int]() if index in loop.frozen else {*own} for index, own in enumerate(loop.uses)]
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
        # who has all of its gradients is not stopped any more
        if loop.how == "stopped" and len(there) == loop.num_passes * NUM_LAYERS:
            return whole
    passes = [{part for part, index in there if index == own} for own in range(NUM_LAYERS)]
    # of several passes it is not known how many are in what the loop has computed
    return Given(passes, loop.how == "error" and loop.num_passes == 1, is_cut=True, estimates=fills)


UNKNOWN = object()


def expected(loop: DrawnLoop, layer: int) -> Any:
    """The merged gradient of a layer without what was kept; ``None``: there is none."""
    total = weights = 0.0
    step, is_there, frozen = loop.num_steps - 1, False, layer in loop.frozen
    for rank in range(loop.ranks):
        given, own_weight = given_by(loop, rank), loop.weight_of(rank)
        share, gradient = 1.0, 0.0
        if given.is_cut and loop.granularity == "step":
            share = 0.0
        elif layer in loop.by_hand:
            share = float(given.by_hand)
        elif wanted := set() if frozen else loop.uses[layer]:
            share = len(given.passes[layer]) / len(wanted)
        elif given.is_cut and not frozen:
            return UNKNOWN  # whether a pass would have used it
        if share and layer in loop.by_hand:
            gradient = by_hand_of(rank, step) + penalty_of(rank, step) * (layer in loop.penalized)
        elif share:
            gradient = sum(gradient_of(loop, rank, step, part, layer) for part in given.passes[layer])
            gradient += share * penalty_of(rank, step) * (layer in loop.penalized and not frozen)
        is_there |= gradient != 0
        total, weights = total + own_weight * gradient, weights + own_weight * share
        if given.estimates and not frozen and share < 1:
            filled_in = own_weight * FILLED_IN_WEIGHT * (1 - share)
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


def problems_of(loop: DrawnLoop, ranks: list[Merged]) -> list[str]:
    """What is otherwise than it is to be."""
    found, first = [], ranks[0]
    if any(own.gradients != first.gradients or own.moved != first.moved for own in ranks):
        found.append(f"replicas differ: {[(own.gradients, own.moved) for own in ranks]}")
    calls = loop.num_passes * loop.num_calls * any(gives_calls(loop, rank) for rank in range(loop.ranks))
    if [own.calls for own in ranks] != [[first.calls[0], first.calls[0] + calls]] * loop.ranks:
        found.append(f"the model was called {[own.calls for own in ranks]} times, and {calls} in this step")
    for layer, (gradient, before, moved) in enumerate(zip(first.gradients, first.before, first.moved, strict=True)):
        is_kept = loop.keeps and before is not None
        if abs(moved - (gradient or 0.0)) > 1e-3 * max(1.0, abs(moved)):
            found.append(f"layer {layer} has the gradient {gradient}, and was moved by {moved}")
        if is_kept and layer in loop.penalized:  # then it is the rank's own, with what was there
            continue
        own = expected(loop, layer)
        if own is UNKNOWN:
            continue
        wanted = own if not is_kept else (own or 0.0) + before
        if (gradient is None) != (wanted is None) or (gradient and abs(gradient - wanted) > 1e-4 * abs(wanted)):
            found.append(f"layer {layer} has the gradient {gradient}, and not {wanted}")
    whole = [rank for rank in range(loop.ranks) if rank not in loop.cut]
    if late := [rank for rank in whole if first.late[rank]]:
        found.append(f"ranks {late} are late")
    return found
