"""Sharded models that are cut at places drawn by chance: each step, and each one after it, against the whole model.

What is drawn is how the loop calls the model, where a pass is left and why, how gradients are accumulated, and how FSDP
works. A case follows from its number.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import digest, run_ranks, staged
from sharding import mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from straggle import StagedDataParallel

pytestmark = pytest.mark.slow  # FSDP2 on four ranks, many times

WIDTH, EXACT, NUM_STEPS, NUM_CASES = 6, 1e-5, 4, 39
LATE_RANK, REPLICAS = 3, (range(2), range(2, 4))


@dataclass(frozen=True)
class Case:
    entry: str
    has_root: bool
    twice: bool
    cause: str
    backward: bool
    place: float  # of the places of a step, as a share of them
    accumulation: str
    reshard: bool | None
    prefetch: str
    second: str
    set_to_none: bool
    cut_steps: tuple[int, ...]
    reduce_dtype: torch.dtype | None
    in_blocks: bool  # each pass is in a `Step.microbatch` block
    looks: bool  # the loop calls the model behind the last pass, without gradients


CHOICES: dict[str, tuple[Any, ...]] = {
    "entry": ("model", "module", "methods", "parts", "methods of parts", "functional"),
    "has_root": (True, True, False),
    "twice": (False, False, True),
    "cause": ("late", "late", "error", "retry"),
    "backward": (False, True),
    "accumulation": ("none", "inside", "microbatches", "blocks"),
    "reshard": (None, True, False),
    "prefetch": ("none", "forward", "backward"),
    "second": ("none", "none", "frozen", "frozen and sharded", "staged"),
    "set_to_none": (True, True, False),
    "cut_steps": ((0, 2), (1, 2), (2,)),
    "reduce_dtype": (None, None, torch.float64),
    "in_blocks": (False, True),
    "looks": (False, True),
}
NUM_PASSES = {"none": 1, "inside": 3, "microbatches": 2, "blocks": 1}


def case_of(number: int) -> Case:
    chance = random.Random(number)
    drawn = {name: chance.choice(choices) for name, choices in CHOICES.items()} | {"place": chance.random()}
    if drawn["entry"] == "methods":
        drawn["has_root"] = True
    if drawn["cause"] == "retry":  # of a backward pass, gradients are counted already
        drawn["backward"] = False
    if drawn["cause"] == "error" and drawn["accumulation"] == "inside":
        drawn["second"] = "none"
    return Case(**drawn)


class Failed(Exception):
    """An error of the user."""


class Cut:
    """Acts at one of the places that a step comes through.

    ``micro``: in which of its passes that was, after the last one their number; ``in_backward``: where in that pass.
    """

    def __init__(self, at: int, backward: bool = False, only_units: bool = False) -> None:
        self._left, self._backward, self._only_units = at, backward, only_units
        self.act: Callable[[], None] = lambda: None
        self.micro, self.in_backward, self.running, self.count = -1, False, -1, 0

    def come(self, value: Tensor | None, in_unit: bool) -> None:
        if self._only_units and not in_unit:
            return
        self.count += 1
        self._left -= 1
        if self._left != -1:
            return
        if self._backward and value is not None and value.requires_grad:
            value.register_hook(lambda _: self._acts(in_backward=True))
        else:
            self._acts(in_backward=False)

    def _acts(self, in_backward: bool) -> None:
        self.micro, self.in_backward = self.running, in_backward
        self.act()


class _OfRank(threading.local):
    cut = Cut(-1)


_here = _OfRank()


@contextmanager
def cut_by(cut: Cut) -> Iterator[None]:
    before, _here.cut = _here.cut, cut
    try:
        yield
    finally:
        _here.cut = before


def place(value: Tensor | None, in_unit: bool = False) -> None:
    """Between two operations of a model, or two statements of a loop."""
    _here.cut.come(value, in_unit)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        place(hidden, in_unit=True)
        return x + self.down(hidden)


class Part(nn.Module):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.order = (0, 1, 0) if twice else (0, 1)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
            place(x)
        return x * self.gain

    def run(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Net(nn.Module):
    """Two parts; with a root, that has a parameter that both halves of a pass use."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.enc, self.dec = Part(case.twice), Part(False)
        self.register_buffer("shift", torch.zeros(WIDTH))
        if case.has_root:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        self.has_root = case.has_root

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale if self.has_root else x

    def encode(self, x: Tensor) -> Tensor:
        return self._scaled(self.enc(x + self.shift))

    def decode(self, z: Tensor) -> Tensor:
        return self._scaled(self.dec(z))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        place(z)
        return self.decode(z)


def call(case: Case, net: nn.Module, x: Tensor) -> Tensor:
    """The output, by the case's entry; ``net`` is the wrapped model or the whole one."""
    inner: Any = net.module if isinstance(net, StagedDataParallel) else net
    if case.entry == "model":
        return net(x)
    if case.entry == "functional":
        name = "shift" if inner is net else "module.shift"
        return torch.func.functional_call(net, {name: torch.full((WIDTH,), 0.1)}, (x,))
    first, second = {
        "module": (inner, nn.Identity()),
        "methods": (inner.encode, inner.decode),
        "parts": (inner.enc, inner.dec),
        "methods of parts": (inner.enc.run, inner.dec.run),
    }[case.entry]
    z = first(x)
    place(z)
    return second(z)


def shard(case: Case, net: Net, mesh: DeviceMesh) -> Net:
    policy = MixedPrecisionPolicy(reduce_dtype=case.reduce_dtype)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard, "mp_policy": policy}
    parts = (net.enc, net.dec)
    blocks: list[Any] = [fully_shard(block, **options) for part in parts for block in part.blocks]
    for part in parts:
        fully_shard(part, **options)
        register_fsdp_forward_method(part, "run")
    if case.has_root:
        fully_shard(net, **options)
        register_fsdp_forward_method(net, "encode")
        register_fsdp_forward_method(net, "decode")
    pairs = [
        pair for first in (0, 2) for pair in pairwise(blocks[first : first + 2])
    ]  # a part may be a root of its own
    for before, after in pairs:
        if case.prefetch == "forward":
            before.set_modules_to_forward_prefetch([after])
        elif case.prefetch == "backward":
            after.set_modules_to_backward_prefetch([before])
    return net


def batch(step: int, rank: int, micro: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


@dataclass
class Job:
    """The models of a case on one rank, as they are trained and whole."""

    case: Case
    rank: int
    models: list[StagedDataParallel]
    plain: list[Net]
    judge: list[nn.Module]  # sharded as the models are, and whole; or no module

    @property
    def num_passes(self) -> int:
        return NUM_PASSES[self.case.accumulation]

    def loss(self, nets: list[Any], judge: nn.Module, step: int, rank: int, micro: int) -> Tensor:
        x = batch(step, rank, micro)
        outputs = [call(self.case, nets[0], x), *(net(x) for net in nets[1:])]
        place(outputs[0])
        return (judge(sum(outputs)).square().mean()) / self.num_passes


@contextmanager
def job_of(case: Case, rank: int, mesh: DeviceMesh) -> Iterator[Job]:
    torch.manual_seed(0)
    nets = [Net(case) for _ in range(1 + (case.second == "staged"))]
    plain = copy.deepcopy(nets)
    judge: nn.Module = nn.Identity() if "frozen" not in case.second else Part(False).requires_grad_(False)
    whole = copy.deepcopy(judge)
    if case.second == "frozen and sharded":
        for block in judge.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(judge, mesh=mesh["dp_shard"])
    with ExitStack() as stack:
        sharded = [shard(case, net, mesh["dp_shard"]) for net in nets]
        models = [stack.enter_context(staged(net, mesh=mesh["dp_replicate"])) for net in sharded]
        yield Job(case, rank, models, plain, [judge, whole])


def run_step(job: Job, number: int, cut: Cut) -> None:
    case, last = job.case, job.num_passes - 1
    num_microbatches = job.num_passes if case.accumulation == "microbatches" else 1
    with ExitStack() as stack, cut_by(cut):
        steps = [stack.enter_context(model.step(num_microbatches)) for model in job.models]
        cut.act = acts(case, job.rank, steps[0].stop)
        for cut.running in range(job.num_passes):
            for unit in (unit for model in job.models for unit in outermost(model.module, case)):
                unit.set_requires_gradient_sync(case.accumulation != "inside" or cut.running == last)
            with steps[0].microbatch() if case.in_blocks and len(steps) == 1 else nullcontext():
                if not run_pass(job, number, cut.running):
                    return
        cut.running = job.num_passes
        with suppress(Failed):
            place(None)
        if case.looks and not steps[0].late:
            with torch.no_grad():
                job.loss(job.models, job.judge[0], number, job.rank, 0)


def run_pass(job: Job, number: int, micro: int) -> bool:
    """One pass, and again if it failed and the loop does that; false if the loop ends with it."""
    for _ in range(2):
        try:
            place(None)
            job.loss(job.models, job.judge[0], number, job.rank, micro).backward()
        except Failed:
            if job.case.cause != "retry":
                return False
        else:
            break
    return True


def acts(case: Case, rank: int, stop: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        if case.cause == "late" and rank == LATE_RANK:
            stop()
        if case.cause != "late" and rank in REPLICAS[1]:
            raise Failed

    return act


def outermost(net: Any, case: Case) -> list[Any]:
    return [net] if case.has_root else [net.enc, net.dec]


def num_places(job: Job) -> int:
    """In a step, with those between its passes and behind the last one."""
    counting = Cut(-1, only_units=only_units(job.case))
    with cut_by(counting):
        job.loss([*job.plain], job.judge[1], 0, 0, 0)
    return job.num_passes * (counting.count + 1) + 1 if not only_units(job.case) else job.num_passes * counting.count


def only_units(case: Case) -> bool:
    """Between units nobody sees a caught error; a step that keeps gradients inside of FSDP is refused then."""
    return case.cause == "error" and case.accumulation == "inside"


Gradients = list[Tensor | None]


def whole_gradients(job: Job, net: Net, number: int, ranks: range) -> list[Gradients]:
    """Of one whole model, for each pass the mean over these ranks."""
    found = []
    for micro in range(job.num_passes):
        for plain in job.plain:
            plain.zero_grad()
        for rank in ranks:
            (job.loss([*job.plain], job.judge[1], number, rank, micro) / len(ranks)).backward()
        found.append([None if own.grad is None else own.grad.clone() for own in net.parameters()])
    return found


def given(job: Job, net: Net, gradients: Gradients, number: int) -> list[set[int]]:
    """For each parameter, of how many of the first passes replica 1 may have given the gradient; empty: it is wrong.

    Below 0: they count as if all had come, as a warning says when a loop has fewer passes and nothing stopped it.
    """
    firsts, seconds = (whole_gradients(job, net, number, ranks) for ranks in REPLICAS)
    if job.case.accumulation == "inside":
        firsts, seconds = ([[added(parts) for parts in zip(*passes, strict=True)]] for passes in (firsts, seconds))
    answers = []
    for index, gradient in enumerate(gradients):
        first, passes = added([one[index] for one in firsts]), [one[index] for one in seconds]
        if first is None:
            nothing = gradient is None or not gradient.any()
            answers.append({*range(-len(passes), len(passes) + 1)} if nothing else set())
            continue
        num_all, found = len(passes), set()
        for num in range(num_all + 1):
            for weight, answer in ((num / num_all, num), (1.0, -num)):
                merged = (first + sum(passes[:num])) / (1 + weight)
                if gradient is not None and torch.allclose(gradient, merged, atol=EXACT):
                    found.add(answer)
        answers.append(found)
    return answers


def added(parts: Any) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return sum(there) if there else None


def allowed(job: Job, cut: Cut) -> set[int]:
    """Of how many passes replica 1 may have given a gradient in a step that was left so."""
    case, num_all = job.case, 1 if job.case.accumulation == "inside" else job.num_passes
    if cut.micro in (-1, job.num_passes) or case.cause == "retry":
        return {num_all}
    if case.accumulation == "inside":
        return {0} if cut.micro < job.num_passes - 1 else {0, 1}
    if case.cause == "error" and not cut.in_backward:
        return {-cut.micro}
    return {cut.micro, cut.micro + 1} | ({-cut.micro} if case.cause == "error" else set())


def train(case: Case, rank: int, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    """What was wrong, as replica 0 sees it, and a hash of this rank's gradients after each step."""
    wrong, hashes, judges = list[str](), list[str](), rank in REPLICAS[0]
    with job_of(case, rank, mesh) as job:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in job.models]
        at = int(case.place * num_places(job))
        for number in range(NUM_STEPS):
            kept = [shards_of(model) for model in job.models] if judges else []
            cut = Cut(at if number in case.cut_steps else -1, case.backward, only_units(case))
            run_step(job, number, cut)
            sharded = [model.module for model in job.models]
            if case.second == "frozen and sharded" and not case.looks:
                sharded.append(job.judge[0])
            for net in sharded:
                if whole := [name for name, own in net.named_parameters() if not isinstance(own, DTensor)]:
                    return [*wrong, f"step {number}: {whole} are whole"], hashes
            for model in job.models:
                hashes.append(digest([None if g is None else g.to_local() for g in gradients_of(model)]))
            if judges:
                wrong += [f"step {number}: {one}" for one in differing(job, number, kept, cut)]
            if case.accumulation != "blocks" or number % 2 == 0:
                end_of_step(job, optimizers, judges)
    return wrong, hashes


def differing(job: Job, number: int, kept: list[Gradients], cut: Cut) -> list[str]:
    """Parameters of which replica 1 has given other gradients than it may have in this step."""
    wrong, may = [], allowed(job, cut)
    for model, net, before in zip(job.models, job.plain, kept, strict=True):
        merged = [difference(now, was) for now, was in zip(shards_of(model), before, strict=True)]
        if job.rank != min(REPLICAS[0]):  # the whole model's gradients are the same wherever they are computed
            continue
        names = [name for name, _ in net.named_parameters()]
        for name, found in zip(names, given(job, net, merged, number), strict=True):
            if not found & may:
                wrong.append(f"{name} of model {job.models.index(model)} has {found} passes and not {may}")
    return wrong


def gradients_of(model: StagedDataParallel) -> list[Any]:
    return [own.grad for own in model.module.parameters()]


def shards_of(model: StagedDataParallel) -> Gradients:
    """Its gradients, of all shards."""
    return [None if own is None else own.full_tensor().clone() for own in gradients_of(model)]


def difference(now: Tensor | None, was: Tensor | None) -> Tensor | None:
    return now if was is None or now is None else now - was


def end_of_step(job: Job, optimizers: list[torch.optim.Optimizer], judges: bool) -> None:
    for model, net, optimizer in zip(job.models, job.plain, optimizers, strict=True):
        optimizer.step()
        optimizer.zero_grad(set_to_none=job.case.set_to_none)
        if not judges:
            continue
        with torch.no_grad():
            for own, whole in zip(model.module.parameters(), net.parameters(), strict=True):
                whole.copy_(own.full_tensor())  # type: ignore[attr-defined]


def all_cases(rank: int, numbers: tuple[int, ...]) -> dict[int, tuple[list[str], list[str]]]:
    mesh, found = mesh_of(), {}
    for number in numbers:
        try:
            found[number] = train(case_of(number), rank, mesh)
        except BaseException as error:
            raise AssertionError(f"case {number}, {case_of(number)}: {type(error).__name__}: {error}") from error
    return found


def check(numbers: tuple[int, ...]) -> None:
    by_rank = run_ranks(all_cases, 4, numbers)
    for number in numbers:
        for rank in range(4):
            wrong, hashes = by_rank[rank][number]
            assert not wrong, (number, case_of(number), rank, wrong)
            assert hashes == by_rank[rank % 2][number][1], (number, case_of(number), "replicas differ")


@pytest.mark.parametrize("first", range(0, NUM_CASES, 3))
def test_model_that_is_cut_anywhere_is_exact_in_that_step_and_the_next(first: int) -> None:
    check((*range(first, first + 3),))


def test_cases_have_each_choice_of_each_kind() -> None:
    drawn = [case_of(number) for number in range(NUM_CASES)]
    for name, choices in CHOICES.items():
        assert {getattr(case, name) for case in drawn} == {*choices}
    assert {field.name for field in fields(Case)} == {*CHOICES, "place"}
