"""Schedules of sharded replicas in a simulated world: drawn by a number, and what must hold of each.

The parameters stay what they are, so what each rank computes in a step is known beforehand. Whose gradients a merge
has, and with which weight, is in the reports; each rank's shard is compared with that mean.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from always import chained, notes_of
from sharding import Blocks, batch, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from whole_steps import Counter

from straggle import Elastic, FixedDeadline, JobDone, LateHandling, Merge, PeerFailed, StagedDataParallel
from straggle.lab.world.faults import Cut, Freeze, Kill, Stall, StoreAway
from straggle.lab.world.run import Broken, Fault, Rank, run_world
from straggle.report import StepReport

LAYER_S = 0.005
LONGEST_S = 400.0
TOLERANCE = 1e-4
DEPTH = 2


@dataclass(frozen=True)
class ShardedSchedule:
    """One job of replicas of two ranks each, and what happens to it. Its ``repr`` makes it again."""

    seed: int
    replicas: int = 2
    shards: int = 2
    steps: int = 8
    members: bool = False
    deadline: str = "0.1"
    granularity: str = "stage"
    max_lag: int | None = 8
    num_microbatches: int = 1
    reshard: bool = True
    weighs: bool = False
    slow: tuple[float, ...] = ()
    zero_every: int = 1  # steps until the loop zeros gradients
    pull: str = ""  # "plain" or "seed": replicas draw the micro-batches of a step from one pool
    batches: tuple[int, ...] = ()  # of each replica, in a loop over `join`; the last one has one for each step
    faults: tuple[Fault, ...] = ()

    @property
    def ranks(self) -> int:
        """All ranks; a replica's are neighbours."""
        return self.replicas * self.shards

    @property
    def parts(self) -> int:
        """Micro-batches in a pool."""
        return 2 * self.replicas * self.num_microbatches


def draw(seed: int) -> ShardedSchedule:
    """Schedule number ``seed``."""
    chance = random.Random(f"sharded {seed}")
    pick, replicas = chance.choice, chance.choice([2, 2, 3])
    schedule = ShardedSchedule(
        seed,
        replicas,
        steps=pick([4, 8, 12]),
        members=chance.random() < 0.5,
        deadline=pick(["None", "0.08", "0.1", "0.15"]),
        granularity=pick(["stage", "stage", "step"]),
        max_lag=pick([1, 8, 8]),
        num_microbatches=pick([1, 1, 2]),
        reshard=pick([True, False]),
        weighs=pick([False, True]),
        slow=tuple(pick([1.0, 1.0, 1.0, 2.0, 4.0]) for _ in range(2 * replicas)),
    )
    length_s = schedule.steps * 0.08 * schedule.num_microbatches
    faults = tuple(_fault(chance, schedule, length_s) for _ in range(pick([0, 1, 1, 2, 3])))
    zero_every = random.Random(f"more sharded {seed}").choice([1, 1, 2, 3])
    schedule = replace(schedule, faults=faults, zero_every=zero_every)
    work = random.Random(f"work of sharded {seed}")
    match work.choice(["", "", "join", "plain", "seed", "seed"]):
        case "":
            return schedule
        case "join":
            others = tuple(work.randint(1, schedule.steps) for _ in range(replicas - 1))
            return replace(schedule, batches=(*others, schedule.steps), num_microbatches=1)
        case pull:
            return replace(schedule, pull=pull, weighs=False)


def _fault(chance: random.Random, schedule: ShardedSchedule, length_s: float) -> Fault:
    """The last replica is never killed, nor frozen for so long that it is put out."""
    pick, at_s = chance.choice, round(chance.uniform(0.06, length_s), 3)  # wrapped by then: a job waits long for that
    any_rank, not_last = chance.randrange(schedule.ranks), chance.randrange(schedule.ranks - schedule.shards)
    for_s = round(pick([0.02, 0.1, 0.3]) * chance.uniform(0.5, 2), 3)
    turns = pick([0, 0, chance.randrange(1, 100)])
    kinds: list[Any] = [
        lambda: Stall(any_rank, at_s, pick([for_s, 3.0]), turns=turns),
        lambda: Freeze(any_rank, at_s, for_s),
        lambda: StoreAway(at_s, pick([for_s, 4.0])),
    ]
    if schedule.members:
        kinds += 2 * [lambda: Kill(not_last, at_s), lambda: Freeze(not_last, at_s, pick([1.9, 2.2, 5.0]))]
        kinds.append(lambda: Cut(not_last, at_s, pick([for_s, 3.0])))
    elif chance.random() < 0.2:
        kinds.append(lambda: Kill(any_rank, at_s))
    return pick(kinds)()


@cache
def own_gradients(rank: int, step: int, num_microbatches: int) -> tuple[Tensor, ...]:
    """Those of one rank in a step, for the whole model: the mean over its micro-batches."""
    net = whole()
    for part in range(num_microbatches):
        (net(batch(step, rank + 50 * part)).square().mean() / num_microbatches).backward()
    return tuple(parameter.grad for parameter in net.parameters() if parameter.grad is not None)


@cache
def pool_gradients(step: int, num_parts: int, shards: int) -> tuple[Tensor, ...]:
    """Those of a step from a pool: the mean over all of its micro-batches, of which each shard has a part."""
    of_all = [own_gradients(_part(number, shard), step, 1) for number in range(num_parts) for shard in range(shards)]
    return tuple(torch.stack(of_one).mean(0) for of_one in zip(*of_all, strict=True))


def _part(number: int, shard: int) -> int:
    """In place of a rank: whose samples a shard has of a micro-batch."""
    return 1000 + 10 * number + shard


def whole() -> nn.Module:
    """The model, the same on each rank; its random numbers are nobody's else."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Blocks(DEPTH)


class Loop:
    """What a rank does."""

    def __init__(self, rank: Rank, schedule: ShardedSchedule) -> None:
        self._rank, self._schedule = rank, schedule
        self._layer_s = LAYER_S * dict(enumerate(schedule.slow)).get(rank.number, 1.0)
        self._problems: list[str] = []
        self._before: list[Tensor | None] = []
        self._counter = Counter()

    def run(self) -> list[str]:
        """Train; what did not hold on this rank."""
        schedule, net = self._schedule, whole()
        names = [name for name, _ in net.named_parameters()]
        options: dict[str, Any] = {}
        if schedule.members:
            first = self._rank.number // schedule.shards * schedule.shards
            group = torch.distributed.new_group(
                list(range(first, first + schedule.shards)), use_local_synchronization=True
            )
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
            options["members"] = Elastic(1)
        else:
            both = init_device_mesh(
                "cpu", (schedule.replicas, schedule.shards), mesh_dim_names=("dp_replicate", "dp_shard")
            )
            mesh, options["mesh"] = both["dp_shard"], both["dp_replicate"]
        shard(net, mesh, reshard_after_forward=schedule.reshard)
        for block in net.blocks:  # type: ignore[union-attr]
            block.up.register_forward_hook(lambda *_: self._rank.work(self._layer_s))
            block.up.weight.register_hook(lambda _: self._rank.work(self._layer_s))
        deadline = None if schedule.deadline == "None" else FixedDeadline(float(schedule.deadline))
        late = LateHandling(grace_s=0.02, max_lag=schedule.max_lag, granularity=schedule.granularity)  # type: ignore[arg-type]
        model = StagedDataParallel(
            net, deadline=deadline, late_handling=late, merge=Merge(check_every=3), links=False, **options
        )
        counter = self._counter
        counter.steps = model.register_state(counter=counter)
        for _ in self._batches(model):
            self._train(model, counter.steps)
            assert model.last_report is not None
            self._look(net, names, model.last_report)
            # with a seed a report's step counts attempts
            counter.steps = counter.steps + 1 if schedule.pull == "seed" else model.last_report.step + 1
            if counter.steps % schedule.zero_every == 0:
                net.zero_grad()
        model.close()
        return self._problems

    def _batches(self, model: StagedDataParallel) -> Iterator[object]:
        """One thing for each step of the loop."""
        schedule = self._schedule
        if schedule.batches:
            yield from model.join(range(schedule.batches[self._rank.number // schedule.shards]))
            return
        while self._counter.steps < schedule.steps:
            yield None

    def _train(self, model: StagedDataParallel, step: int) -> None:
        schedule = self._schedule
        if schedule.pull:
            own = [_part(number, self._rank.number % schedule.shards) for number in range(schedule.parts)]
            with model.step() as opened:
                self._before = shards_of(model.module)
                for number in opened.pull(own, seed=step if schedule.pull == "seed" else None):
                    model(batch(step, number)).square().mean().backward()
            return
        with model.step(num_microbatches=schedule.num_microbatches) as opened:
            self._before = shards_of(model.module)  # a rank that comes back has those of its peers by now
            if schedule.weighs:
                opened.weight = 1.0 + self._rank.number // schedule.shards
            for part in range(schedule.num_microbatches):
                loss = model(batch(step, self._rank.number + 50 * part)).square().mean()
                (loss / schedule.num_microbatches).backward()

    def _look(self, net: nn.Module, names: list[str], report: StepReport) -> None:
        place = self._rank.number % self._schedule.shards
        own = shards_of(net)
        self._rank.note(
            step=self._counter.steps,
            shard=place,
            absent=report.ranks[self._rank.number // self._schedule.shards].absent,
            gradients=[None if grad is None else grad.tolist() for grad in own],
            told=[repr((report.step, of.late, of.absent, of.weights, of.stages)) for of in report.ranks],
        )
        if self._schedule.num_microbatches > 1 and any(0 < share < 1 for of in report.ranks for share in of.stages):
            return  # which micro-batches are whose part of a mean is the other sweep's
        absent, is_whole = report.ranks[self._rank.number // self._schedule.shards].absent, report.dropped_share < 1e-6
        if self._schedule.pull == "seed" and not (absent or is_whole):
            self._problems.append(f"step {self._counter.steps}: {report.dropped_share} of it is dropped")
        if self._schedule.pull and (absent or not is_whole):
            return  # which of its micro-batches are lost is not known
        merged = self._expected(report, names, place)
        for name, got, before, new in zip(names, own, self._before, merged, strict=True):
            if new is None:
                continue
            expected = new if before is None else new + before
            if got is None or not torch.allclose(got, expected, rtol=TOLERANCE, atol=1e-6):
                shares = {of.rank: (of.weights, of.stages, of.cause) for of in report.ranks}
                self._problems.append(f"step {report.step}, {name}: {got} and not {expected}; {shares}")

    def _expected(self, report: StepReport, names: list[str], place: int) -> list[Tensor | None]:
        """This rank's shards of the mean over the replicas that gave something, as the report has their weights."""
        schedule, found = self._schedule, list[Tensor | None]()
        if schedule.pull:
            return [
                self._own(total, place)
                for total in pool_gradients(self._counter.steps, schedule.parts, schedule.shards)
            ]
        stage_of = {
            name: number for number, stage in enumerate(report.stages) for name in stage_parameters(stage.name, names)
        }
        for number, name in enumerate(names):
            stage = stage_of.get(name)
            if stage is None or report.skipped:
                found.append(None)
                continue
            weights = [of.weights[stage] for of in report.ranks]
            if sum(weights) <= 0 or abs(report.stages[stage].weight - sum(weights)) > 1e-6:
                found.append(None)  # nothing, or something of a rank that has left
                continue
            total: Tensor = torch.zeros(())
            for of, weight in zip(report.ranks, weights, strict=True):
                if weight:
                    ranks = range(of.rank * schedule.shards, (of.rank + 1) * schedule.shards)
                    grads = [own_gradients(rank, report.step, schedule.num_microbatches)[number] for rank in ranks]
                    total = total + weight / sum(weights) * sum(grads) / schedule.shards
            found.append(self._own(total, place))
        return found

    def _own(self, total: Tensor, place: int) -> Tensor:
        chunks = torch.chunk(total, self._schedule.shards)
        return chunks[place] if place < len(chunks) else total[:0]


def shards_of(net: nn.Module) -> list[Tensor | None]:
    """This rank's shards of the gradients that are there."""
    return [None if own.grad is None else own.grad.to_local().detach().clone() for own in net.parameters()]


def stage_parameters(stage: str, names: list[str]) -> list[str]:
    """The names of the parameters of a stage: those of a unit, or what is in none."""
    inside = [name for name in names if name.startswith(f"{stage}.")]
    return inside or [name for name in names if not name.startswith("blocks.")]


def problems_of(schedule: ShardedSchedule) -> list[str]:
    """What did not hold; nothing if all did."""
    try:
        done = run_world(
            lambda rank: Loop(rank, schedule).run(),
            ranks=schedule.ranks,
            seed=schedule.seed,
            faults=schedule.faults,
            longest_s=LONGEST_S,
            end_s=20.0,
        )
    except Broken as error:
        return [str(error)]
    gone = {fault.rank // schedule.shards for fault in schedule.faults if isinstance(fault, Kill)}
    harmed = {getattr(fault, "rank", 0) // schedule.shards for fault in schedule.faults}
    found = []
    for rank, result in enumerate(done.results):
        if isinstance(result, list):
            found += [f"rank {rank}: {problem}" for problem in result]
        elif not _may_end_so(
            schedule,
            result,
            is_gone=rank // schedule.shards in gone,
            is_harmed=rank // schedule.shards in harmed,
            any_gone=gone,
        ):
            found.append(f"rank {rank}: {result!r}")
    # a replica that leaves may be in the last merge of one shard, and not in that of another
    told, grads = dict[tuple[int, int, int], set[str]](), dict[tuple[int, int], set[str]]()
    for _, notes in done.notes.items():
        for note, following in chained(notes):
            if not note["absent"] and following and following["step"] == note["step"] + 1:
                grads.setdefault((note["step"], note["shard"]), set()).add(repr(note["gradients"]))
                for number, words in enumerate(note["told"]):
                    told.setdefault((note["step"], note["shard"], number), set()).add(words)
    found += [
        f"step {step}: replicas differ in shard {of}" for (step, of), own in sorted(grads.items()) if len(own) > 1
    ]
    found += [f"step {step}: reports differ: {own}" for (step, _, _), own in sorted(told.items()) if len(own) > 1]
    if not gone or schedule.members:
        most = max((note["step"] for _, note in notes_of(done)), default=-1)
        # whether a replica that is stuck has more batches is not known: the others go on without data until then
        ended_well = most >= schedule.steps - 1 if schedule.batches and harmed else most == schedule.steps - 1
        found += [f"the job ended after step {most} of {schedule.steps}"] * (not ended_well)
    return found


def _may_end_so(
    schedule: ShardedSchedule, result: object, *, is_gone: bool, is_harmed: bool, any_gone: Collection[int]
) -> bool:
    """Whether a rank may end otherwise than by its loop's end, by what happened to its replica and to others."""
    if is_gone and "Connection closed" in str(result):  # in a collective of FSDP's
        return True
    if schedule.members:
        return isinstance(result, JobDone) or (is_harmed and (result is None or isinstance(result, PeerFailed)))
    return (result is None and is_gone) or (isinstance(result, PeerFailed) and bool(any_gone))
