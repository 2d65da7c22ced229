"""Steps drawn by chance, in four worlds: what is merged is the mean over the passes that came, and the next is whole.

What is drawn is how the loop makes its passes, how many, where the last replica leaves one and why, what lies in
``p.grad`` before, what ranks weigh, and what stands for what is missing. A case follows from its number and world. With
``S`` the sum of the gradients of a replica's passes that came, ``s`` their share, ``w`` its weight, ``P`` what it had
put in place by hand, and an estimate ``E`` of weight ``e``:

    merged = kept + sum of w (S + s P + (1 - s) e E) / sum of w (s + (1 - s) e)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from ranks import digest, logged
from sharding import Blocks, batch
from torch import Tensor, nn
from worlds import REPLICAS, WORLDS, Here, Trial, World

from straggle import Abstain, LastMerged, LateHandling, Step, Zero
from straggle.backward import stages
from straggle.report import PHASES

pytestmark = pytest.mark.light

BUCKET_BYTES = stages.BUCKET_BYTES
DEPTH, LAST, NUM_STEPS = 4, REPLICAS - 1, 3
EXACT, PADDING = 2e-6, 0.01  # shards of a parameter are not all equally long
LATE, ERRORS = ("late", "swallowed"), ("error", "error, goes on")
CHOICES: dict[str, tuple[Any, ...]] = {
    "loop": ("block", "block", "passes in blocks", "calls", "calls, more announced", "calls, fewer announced"),
    "by_module": (False, True),
    "num_passes": (1, 2, 3),
    "cause": ("late", "late", "late", "swallowed", "error", "error, goes on", "not finite", None),
    "backward": (False, True, True),
    "at_block": tuple(range(DEPTH)),
    "weighs": (None, None, "before", "inside"),
    "puts": (None, None, "before", "inside", "between passes", "behind a forward pass"),
    "zeroes": ("none", "none", "in place", "never"),
    "estimator": ("abstain", "abstain", "zero", "last merged"),
    "at_step": (0, 1),
    "fails_again": (False, True),
    "reshard": (None, True, False),
}
ANNOUNCED = {"calls, more announced": 4, "calls, fewer announced": 1}


@dataclass(frozen=True)
class Case:
    """``place``: the pass that is left, as a share of them; ``fails_again``: so does the last one.

    ``is_whole``: all of a rank's step is merged, or nothing. ``in_buckets``: each parameter is a message of its own.
    """

    loop: str
    by_module: bool
    num_passes: int
    cause: str | None
    backward: bool
    at_block: int
    weighs: str | None
    puts: str | None
    zeroes: str
    estimator: str
    at_step: int
    fails_again: bool
    reshard: bool | None
    place: float
    is_whole: bool
    in_buckets: bool

    @property
    def at_pass(self) -> int:
        return int(self.place * self.num_passes)

    def is_left(self, micro: int) -> bool:
        """Whether the last replica leaves this pass, if it comes to it."""
        again = self.fails_again and self.cause == "error, goes on" and micro == self.num_passes - 1
        return micro == self.at_pass or again


def case_of(number: int, world: World) -> Case:
    chance = random.Random(number)
    drawn = {name: chance.choice(choices) for name, choices in CHOICES.items()} | {"place": chance.random()}
    drawn |= {"is_whole": chance.random() < 0.25 and world.shards == 1, "in_buckets": chance.random() < 0.5}
    if drawn["puts"] and drawn["cause"] in ERRORS:
        drawn["puts"] = chance.choice(("before", "inside"))
    if (
        drawn["puts"] == "behind a forward pass" and world.shards > 1
    ):  # parameters are whole there: FSDP would reduce it
        drawn["puts"] = "inside"
    if drawn["puts"] == "between passes":
        drawn["num_passes"] = max(2, drawn["num_passes"])
        if drawn["cause"] in LATE and drawn["zeroes"] == "never":  # it would be told that it lost what it had kept
            drawn["zeroes"] = "none"
    if drawn["puts"]:
        drawn["estimator"] = "abstain"
    if drawn["estimator"] == "last merged":
        drawn["at_step"] = 1
    if drawn["cause"] == "error" and drawn["loop"] in ANNOUNCED:  # it does not come to where it says how many there are
        drawn["loop"] = "calls"
    if drawn["puts"] or drawn["zeroes"] != "none":  # a pass that adds to what is there comes through the wrapped model
        drawn["by_module"] = False
    if world.shards > 1 and drawn["cause"] in LATE:  # one unit later it leaves, if there is one
        drawn["at_block"] = (max if drawn["backward"] else min)(1 + drawn["backward"], drawn["at_block"])
    return Case(**drawn)


class Failed(Exception):
    """An error of the user."""


# -- the loop


@contextmanager
def leaving(case: Case, trial: Trial, step: Step) -> Iterator[None]:
    """In this block the last rank hears that it is late, or the last replica fails, inside of a block of the model."""

    def act(*_args: object) -> None:
        if case.cause in ERRORS and trial.here.replica == LAST:
            raise Failed
        if case.cause in LATE and trial.here.is_last:
            step.stop()

    inner = trial.net.blocks[case.at_block].up  # type: ignore[union-attr, index]
    if case.backward:
        handle = inner.register_forward_hook(lambda _m, _a, output: output.register_hook(act) and None)
    else:
        handle = inner.register_forward_hook(act)
    try:
        yield
    finally:
        handle.remove()


def run_step(case: Case, trial: Trial, number: int, leaves: bool) -> None:
    num_passes, model = case.num_passes, trial.model
    step = model.step(ANNOUNCED.get(case.loop, num_passes))
    if case.weighs == "before":
        step.weight = weight_of(trial.here.rank)
    if "calls" in case.loop:
        run_passes(case, trial, step.begin(), number, leaves)
        assert model.open_step is step
        step.end()
    else:
        with step:
            run_passes(case, trial, step, number, leaves)
    assert model.open_step is None


def run_passes(case: Case, trial: Trial, step: Step, number: int, leaves: bool) -> None:
    if case.weighs == "inside":
        step.weight = weight_of(trial.here.rank)
    step.log(number=10.0 * number + trial.here.rank)
    if case.puts == "inside":
        put(trial)
    for micro in range(case.num_passes):
        if case.puts == "between passes" and micro == 1:
            put(trial)
        if case.loop in ANNOUNCED:
            step.num_microbatches = case.num_passes if micro == case.num_passes - 1 else max(4, micro + 2)
        is_left = leaves and case.is_left(micro)
        with nullcontext() if case.loop == "block" else step.microbatch():
            try:
                with leaving(case, trial, step) if is_left else nullcontext():
                    run_pass(case, trial, number, micro, is_left)
            except Failed:
                if case.cause == "error":
                    break
            except BaseException:
                if case.cause != "swallowed":
                    raise


def run_pass(case: Case, trial: Trial, number: int, micro: int, is_left: bool) -> None:
    net = trial.net if case.by_module else trial.model
    loss = loss_of(net, number, micro, trial.here.rank)
    if is_left and case.cause == "not finite" and trial.here.is_last:
        loss = loss * float("nan")
    if case.puts == "behind a forward pass" and micro == 0:
        put(trial)
    loss.backward()


def loss_of(net: nn.Module, number: int, micro: int, rank: int) -> Tensor:
    return net(batch(number, 10 * micro + rank)).square().mean()


def put(trial: Trial) -> None:
    """By hand, on top of what is there."""
    for own in trial.net.parameters():
        penalty = own.detach() * (1.0 + trial.here.replica)
        own.grad = penalty if own.grad is None else own.grad + penalty


def weight_of(rank: int) -> float:
    return 1.0 + 2.0 * rank


# -- what is expected


def passes_of(case: Case, world: World, replica: int, name: str, leaves: bool) -> list[int]:
    """The passes of this replica that gave a gradient to this parameter."""
    every = list(range(case.num_passes))
    if not leaves or replica != LAST or case.cause is None:
        return every
    if case.cause == "not finite" or (case.is_whole and (case.cause in LATE or case.backward)):
        return []
    if case.cause == "error, goes on":
        return [micro for micro in every if not case.is_left(micro) or came(case, world, name)]
    return every[: case.at_pass + came(case, world, name)]


def share_of(case: Case, replica: int, num_in: int, leaves: bool) -> float:
    """Of all passes, as they count. Nothing shows that a pass was to come which failed before its backward pass."""
    fails = leaves and replica == LAST and case.cause in ERRORS and not case.backward
    return 1.0 if fails and (num_in or has_put(case, replica, leaves)) else num_in / case.num_passes


def has_put(case: Case, replica: int, leaves: bool) -> bool:
    """Whether this replica came to the place where it puts gradients by hand."""
    if not leaves or replica != LAST or case.at_pass > 0:
        return case.puts is not None
    if case.puts == "behind a forward pass":
        return case.backward or case.cause in (None, "not finite")
    ends = case.cause == "error" or (case.cause == "late" and case.loop == "block")
    return case.puts is not None and not (case.puts == "between passes" and ends)


def came(case: Case, world: World, name: str) -> bool:
    """Whether the pass that is left gave a gradient to this parameter, before it was."""
    if not case.backward or name.startswith("first"):
        return False
    is_error = case.cause in ERRORS
    if world.shards > 1:  # whole units, and a late rank is heard of one unit later; the rest of the model is one, too
        return name.startswith("blocks") and int(name.split(".")[1]) >= case.at_block - 1 + 2 * is_error
    if name.startswith("last") or int(name.split(".")[1]) > case.at_block:
        return True
    own = f"blocks.{case.at_block}."
    return name == f"{own}down.weight" or (name == f"{own}up.bias" and not is_error)  # with which it is stopped


def expected(case: Case, trial: Trial, number: int, leaves: bool, last: list[Tensor]) -> list[Tensor]:
    """The merged gradients of a step; ``last``: those of the step before."""
    world, num_all = trial.here.world, case.num_passes
    passes = [
        [gradients_of(case, trial, number, micro, replica) for micro in range(num_all)] for replica in range(REPLICAS)
    ]
    merged = []
    for index, (name, own) in enumerate(trial.plain.named_parameters()):
        total, weights = torch.zeros_like(own), 0.0
        for replica in range(REPLICAS):
            numbers = passes_of(case, world, replica, name, leaves)
            weight = sum(map(weight_of, world.ranks_of(replica))) if case.weighs else 1.0
            share, fills = share_of(case, replica, len(numbers), leaves), float(case.estimator != "abstain")
            if case.cause == "not finite":  # what a rank gave is left out, and nothing stands for it
                fills = 0.0
            for number_in in numbers:
                total += weight * passes[replica][number_in][index]
            if has_put(case, replica, leaves):
                total += weight * share * own.detach() * (1.0 + replica)
            if case.estimator == "last merged" and share < 1:
                total += weight * (1 - share) * fills * last[index]
            weights += weight * (share + (1 - share) * fills)
        merged.append(total / weights)
    return merged


def gradients_of(case: Case, trial: Trial, number: int, micro: int, replica: int) -> list[Tensor]:
    """Of one pass: the mean over the ranks of a replica, by weight."""
    ranks = trial.here.world.ranks_of(replica)
    weights = [weight_of(rank) if case.weighs else 1.0 for rank in ranks]
    trial.plain.zero_grad()
    for rank, weight in zip(ranks, weights, strict=True):
        (loss_of(trial.plain, number, micro, rank) * weight / sum(weights)).backward()
    return [own.grad.clone() for own in trial.plain.parameters()]  # type: ignore[union-attr]


# -- the runs

ESTIMATORS: dict[str, Callable[[], Any]] = {
    "abstain": Abstain,
    "zero": Zero,
    "last merged": partial(LastMerged, weight=1.0),
}


def steps_of(number: int, here: Here) -> tuple[list[str], list[str]]:
    """Three steps of a case, of which the second one is left: what was wrong, and hashes of this rank's gradients."""
    case, wrong, hashes = case_of(number, here.world), list[str](), list[str]()
    last: list[Tensor] = []
    sharding, estimator = {"reshard_after_forward": case.reshard}, ESTIMATORS[case.estimator]()
    stages.BUCKET_BYTES = 1 if case.in_buckets else BUCKET_BYTES
    late_handling = LateHandling(granularity="step" if case.is_whole else "stage")
    with (
        logged("straggle") as said,
        here.wrapped(
            partial(Blocks, DEPTH), sharding=sharding, estimator=estimator, late_handling=late_handling
        ) as trial,
    ):
        for step in range(NUM_STEPS):
            kept = trial.gradients()
            if case.puts == "before":
                put(trial)
            run_step(case, trial, step, leaves := step == case.at_step)
            hashes.append(digest(trial.own_gradients()))
            merged = expected(case, trial, step, leaves, last)
            for name, found, before, own in zip(trial.names, trial.gradients(), kept, merged, strict=True):
                gap = (found - own - (0.0 if before is None else before)).abs().max().item()
                if not gap < EXACT:
                    wrong.append(f"step {step}: gradient of {name} is {gap} from what was expected")
            wrong += [f"step {step}: {words}" for words in told(case, trial, step, leaves)]
            last = merged
            if case.zeroes != "never":
                trial.model.zero_grad(set_to_none=case.zeroes == "none")
    if case.cause not in ERRORS and any("backward passes came" in words for words in said):
        wrong.append(f"passes are said to be missing: {said}")
    return wrong, hashes


def told(case: Case, trial: Trial, number: int, leaves: bool) -> Iterator[str]:
    """What is wrong in the report."""
    report, world = trial.model.last_report, trial.here.world
    is_late = leaves and case.cause in LATE
    is_bad = (
        case.cause == "not finite" and number == case.at_step + world.is_queued
    )  # what a device alone knows comes a step later
    numbers = [len(passes_of(case, world, LAST, name, leaves)) for name in trial.names]
    shares = [share_of(case, LAST, number, leaves) for number in numbers]
    if case.cause == "not finite":
        shares = [1.0] * len(shares)  # they came, and count as such
    reach = sum(share * numel for share, numel in zip(shares, trial.numel, strict=True)) / sum(trial.numel)
    mean = 10.0 * number + (world.num_ranks - 1) / 2
    own = report.ranks[LAST]
    for what, found, wanted in (
        ("late", report.late_ranks, (LAST,) if is_late else ()),
        (
            "cause",
            own.cause,
            cause_of(case, own.cause, max(numbers) > 0 or has_put(case, LAST, leaves)) if leaves else None,
        ),
        ("reach", (report.ranks[0].reach, own.reach), pytest.approx((1.0, reach), abs=PADDING)),
        ("not finite", own.nonfinite, len(trial.names) if is_bad else 0),
        ("dropped", report.dropped_share, pytest.approx((1 - reach) / 2, abs=PADDING) if not case.weighs else ANY),
        ("scalar", report.scalars["number"], pytest.approx(mean)),
    ):
        if found != wanted:
            yield f"{what} is {found} and not {wanted}"


def cause_of(case: Case, found: str | None, gave: bool) -> str | None:
    """That of the last replica, in the step that is left."""
    if case.cause in LATE:
        if case.by_module and not case.backward:
            return found if found in PHASES else "forward"  # nothing shows where that pass begins
        return "backward" if case.backward else "forward"
    if case.cause in ERRORS and case.backward:
        return "error"
    return "skipped" if case.cause in ERRORS and not gave else None


def all_cases(here: Here, numbers: range) -> dict[int, tuple[list[str], list[str]]]:
    found = {}
    for number in numbers:
        try:
            found[number] = steps_of(number, here)
        except BaseException as error:
            raise AssertionError(
                f"case {number}, {case_of(number, here.world)}: {type(error).__name__}: {error}"
            ) from error
    return found


def check(world: World, numbers: range) -> None:
    by_rank = world.run(all_cases, numbers)
    for number in numbers:
        for rank in range(world.num_ranks):
            wrong, hashes = by_rank[rank][number]
            assert not wrong, (number, case_of(number, world), rank, wrong)
            assert hashes == by_rank[rank % world.shards][number][1], (
                number,
                case_of(number, world),
                "replicas differ",
            )


# of sharded replicas, some seconds each; a case is not the same in all worlds
FEW = {"cpu": range(8), "queued": range(8, 16), "members": range(16, 24)}
MANY = {"cpu": range(24, 64), "queued": range(24, 44), "members": range(44, 64), "sharded": range(84, 90)}


@pytest.mark.parametrize("world", FEW)
def test_merged_gradient_is_the_mean_over_the_passes_that_came_and_the_next_step_is_whole(world: str) -> None:
    check(WORLDS[world], FEW[world])


@pytest.mark.parametrize("world", [pytest.param(w, marks=pytest.mark.slow) if w == "sharded" else w for w in MANY])
def test_it_is_so_in_each_world_in_each_of_many_cases(world: str) -> None:
    check(WORLDS[world], MANY[world])


def test_cases_have_each_choice_of_each_kind() -> None:
    drawn = [case_of(number, WORLDS[world]) for cases in (FEW, MANY) for world in cases for number in cases[world]]
    assert {field.name for field in fields(Case)} == {*CHOICES, "place", "is_whole", "in_buckets"}
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in drawn} == {*choices}, name
