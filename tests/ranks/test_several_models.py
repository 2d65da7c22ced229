"""Several models with members in one loop, such as a GAN's: a new process that comes back is in none before all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding import Blocks, batch, shard
from torch.distributed.device_mesh import DeviceMesh

from straggle import AutoDeadline, Elastic, StagedDataParallel
from straggle.lab.world.faults import Freeze, Kill
from straggle.lab.world.run import Fault, Rank, Run, parameters_of, run_world

ITERATIONS = 30
LAYER_S = 0.01


class Job:
    """One process's models, each of which is trained towards what the others say.

    ``wraps_late``: a model is registered before the next one is wrapped.
    """

    def __init__(self, rank: Rank, names: str, *, wraps_late: bool, **options: Any) -> None:
        self.rank, self.models, self.first = rank, dict[str, StagedDataParallel](), dict[str, int]()
        self._optimizers = dict[str, torch.optim.Optimizer]()
        self._saw = defaultdict[str, list[str]](list)  # what the other models had in the passes of each
        for name in names:
            self._wrap(name, options)
            if wraps_late:
                self._register(name)
        for name in names if not wraps_late else "":
            self._register(name)

    def _wrap(self, name: str, options: dict[str, Any]) -> None:
        layer = torch.nn.Linear(4, 4)  # with a process's own numbers, until it has those of the others
        layer.register_forward_hook(lambda *_: self.rank.work(LAYER_S))
        self.models[name] = StagedDataParallel(layer, members=Elastic(min_ranks=1), **options)
        self._optimizers[name] = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.5)

    def _register(self, name: str) -> None:
        self.first[name] = self.models[name].register_state(optimizer=self._optimizers[name])

    def step(self, *names: str) -> None:
        """One step of these models, together."""
        with ExitStack() as blocks:
            for name in names:
                blocks.enter_context(self.models[name].step())
            for name in names:
                self._passes(name)
        for name in names:
            report = self.models[name].last_report
            assert report is not None
            if not report.ranks[self.rank.number].absent:
                weights = [sum(own.weights) for own in report.ranks]
                has = parameters_of(self.models[name].module)
                self.rank.note(model=name, step=report.step, has=has, weights=weights, saw=self._saw[name])
            self._optimizers[name].step()
            self._optimizers[name].zero_grad()

    def _passes(self, name: str) -> None:
        others = [model.module for other, model in self.models.items() if other != name]
        self._saw[name] = list(map(parameters_of, others))
        x = torch.full((2, 4), self.rank.number + 1.0)
        target = torch.stack([other(x).detach() for other in others]).sum(0)
        (self.models[name](x) - target).square().mean().backward()


def each(job: Job) -> None:
    for _ in range(job.first["g"], ITERATIONS):
        for name in job.models:
            job.step(name)


def more_of_the_second(job: Job) -> None:
    for _ in range(job.first["g"], ITERATIONS):
        job.step("g")
        for _ in range(3):
            job.step("d")


def more_of_the_first(job: Job) -> None:
    """It begins in the middle of an iteration, where the others are."""
    for number in range(job.first["g"], 3 * ITERATIONS):
        job.step("g")
        if number % 3 == 2:
            job.step("d")


def together(job: Job) -> None:
    for _ in range(job.first["g"], ITERATIONS):
        job.step("g", "d")


def run(
    loop: Callable[[Job], None], *faults: Fault, names: str = "gd", ranks: int = 3, seed: int, **options: Any
) -> Run:
    def process(rank: Rank) -> dict[str, int]:
        loop(job := Job(rank, names, **options))
        for model in job.models.values():
            model.close()
        return job.first

    return run_world(process, ranks=ranks, seed=seed, faults=faults, longest_s=60.0)


def check(done: Run) -> None:
    """All have the same after each step; and who gives gradients has computed them with the same of other models."""
    has, saw = defaultdict[Any, set[str]](set), defaultdict[Any, set[str]](set)
    for rank, notes in done.notes.items():
        for note in notes:
            step = note["model"], note["step"]
            has[step].add(note["has"])
            if note["weights"][rank]:
                saw[step].add(str(note["saw"]))
    assert {len(own) for own in (*has.values(), *saw.values())} == {1}


def given(done: Run, name: str) -> list[int]:
    """The steps to which rank 1 gave gradients."""
    steps = {note["step"]: note["weights"] for note in done.notes[0] if note["model"] == name}
    return [step for step, weights in sorted(steps.items()) if weights[1]]


def check_back(done: Run, names: str = "gd") -> None:
    """Rank 1 gave nothing for some steps, and does to the end."""
    for name in names:
        steps, last = given(done, name), max(note["step"] for note in done.notes[0] if note["model"] == name)
        assert steps[-1] >= last - 1
        assert len(steps) < last


LOOPS = (each, more_of_the_second, more_of_the_first, together)


@pytest.mark.parametrize("wraps_late", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("deadline", [None, AutoDeadline()], ids=["none", "auto"])
def test_new_process_is_in_all_of_a_loops_models_and_holds_up_none(loop, deadline, wraps_late):
    seed = 2 * wraps_late + (deadline is None)
    fault = Kill(1, 0.2 + 0.05 * seed, 0.3, turns=11 * seed)
    done = run(loop, fault, ranks=2 + seed % 2, seed=seed, wraps_late=wraps_late, deadline=deadline)
    firsts = [own["g"] for own in done.results]
    assert firsts[1] > 0 == firsts[0]
    check(done)
    check_back(done)


@pytest.mark.parametrize("loop", LOOPS)
def test_rank_that_was_out_in_its_own_process_is_back_in_all_of_a_loops_models(loop):
    seed = LOOPS.index(loop)
    done = run(loop, Freeze(1, 0.2 + 0.03 * seed, 2.3), ranks=2 + seed % 2, seed=seed, wraps_late=False, deadline=None)
    check(done)
    check_back(done)


@pytest.mark.parametrize("seed", range(4))
def test_three_models_whose_process_ends_twice(seed):
    faults = Kill(1, 0.3, 0.2, turns=9 * seed), Kill(1, 1.2 + 0.05 * seed, 0.2)
    done = run(each, *faults, names="gde", ranks=2 + seed % 2, seed=seed, wraps_late=False, deadline=None)
    check(done)
    check_back(done, "gde")


@pytest.mark.parametrize("seed", range(3))
def test_new_process_whose_peer_is_lost_before_it_has_all_states(seed):
    faults = Kill(1, 0.3, 0.2), Kill(2, 0.9 + 0.04 * seed, 0.3), Freeze(1, 1.0 + 0.03 * seed, 0.3)
    done = run(each, *faults, ranks=3, seed=seed, wraps_late=False, deadline=None)
    check(done)
    check_back(done)


@pytest.mark.slow
def test_replicas_of_several_ranks_come_back_to_both_models():
    def process(rank: Rank) -> None:
        first = rank.number // 2 * 2
        models = list[StagedDataParallel]()
        for _ in range(2):
            group = dist.new_group([first, first + 1], use_local_synchronization=True)
            net = shard(Blocks(2), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
            for block in net.blocks:
                block.up.register_forward_hook(lambda *_: rank.work(LAYER_S))
            models.append(StagedDataParallel(net, deadline=None, members=Elastic(1), links=False))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        begun = [model.register_state(optimizer=own) for model, own in zip(models, optimizers, strict=True)]
        for number in range(begun[0], ITERATIONS):
            for name, model, optimizer in zip("gd", models, optimizers, strict=True):
                with model.step():
                    model(batch(number, rank.number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                report = model.last_report
                if not report.ranks[rank.number // 2].absent:
                    has = [str(own.to_local().tolist()) for own in model.module.parameters()]
                    weights = [sum(own.weights) for own in report.ranks]
                    rank.note(model=name, step=report.step, shard=rank.number % 2, has=has, weights=weights)
        for model in models:
            model.close()

    done = run_world(process, ranks=4, seed=1, faults=[Kill(2, 0.3, 0.3), Kill(3, 0.3, 0.3)], longest_s=60.0)
    has = defaultdict[Any, set[str]](set)
    for notes in done.notes.values():
        for note in notes:
            has[note["model"], note["step"], note["shard"]].add(str(note["has"]))
    assert {len(own) for own in has.values()} == {1}
    check_back(done)


def test_loop_that_begins_with_another_model_than_was_registered_first_is_refused_in_the_new_process():
    def backwards(job: Job) -> None:
        for _ in range(job.first["g"], ITERATIONS):
            for name in "dg":
                job.step(name)

    with pytest.raises(ValueError, match=r"call register_state\(\) first for the model whose step comes first"):
        raise run(backwards, Kill(1, 0.25, 0.3), seed=1, wraps_late=False, deadline=None).results[1]
