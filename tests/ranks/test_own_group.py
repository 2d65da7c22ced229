"""Collectives of the loop's own while a rank dies before, within or after one: all others have the same of it."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

from straggle import Elastic, FixedDeadline, MembersChanged, StagedDataParallel
from straggle.lab.world.faults import Freeze
from straggle.lab.world.run import parameters_of, run_world

STEPS, AT = 6, 2  # after this step the rank dies


def own(rank, step):
    return torch.tensor([float(100 * step + rank), float(rank + 1)])


def all_reduce(rank, step):
    x = own(rank, step)
    return [x], dist.all_reduce(x, async_op=True)


def all_gather(rank, step):
    came = [torch.zeros(2) for _ in range(dist.get_world_size())]
    return came, dist.all_gather(came, own(rank, step), async_op=True)


def broadcast(rank, step):
    x = own(rank, step)
    return [x], dist.broadcast(x, 0, async_op=True)


def reduce_scatter(rank, step):
    size, x = dist.get_world_size(), torch.zeros(2)
    parts = [own(rank, step) * (place + 1) for place in range(size)]
    return [x], dist.reduce_scatter(x, parts, async_op=True)


def barrier(_rank, _step):
    return [], dist.barrier(async_op=True)


def gather(rank, step):
    came = [torch.zeros(2) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else []
    return came, dist.gather(own(rank, step), came or None, dst=0, async_op=True)


def scatter(rank, step):
    x = torch.zeros(2)
    given = [own(rank, step) * (place + 1) for place in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    return [x], dist.scatter(x, given, src=0, async_op=True)


def expected(kind, ranks, rank, step):
    """What rank ``rank`` has of it among these."""
    each, place = [own(other, step) for other in ranks], ranks.index(rank)
    return {
        all_reduce: lambda: [sum(each)],
        all_gather: lambda: each,
        broadcast: lambda: [each[0]],
        reduce_scatter: lambda: [sum(each) * (place + 1)],
        barrier: list,
        gather: lambda: each if place == 0 else [],
        scatter: lambda: [each[0] * (place + 1)],
    }[kind]()


@dataclass
class Told:
    """What the loop of one rank saw: for each collective that ended, its step, the ranks, and what came; and errors."""

    came: dict = field(default_factory=dict)
    errors: list = field(default_factory=list)


def loop(rank, kind, victim, when, back_s):
    torch.manual_seed(0)
    model = StagedDataParallel(nn.Linear(4, 2), deadline=FixedDeadline(0.5), members=Elastic(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, told, me = model.register_state(optimizer=optimizer), Told(), rank.number
    dies = first == 0 and me == victim

    def die():
        rank.job.kill(me)
        if back_s is not None:
            rank.job.start_later(me, back_s)
        rank.work(0.0)

    for step in range(first, STEPS if back_s is None else 60):
        with model.step():
            rank.work(0.05)
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        rank.work(0.01 * me)
        if dies and step == AT and when == "before":
            die()
        while True:
            try:
                came, work = kind(me, step)
                if dies and step == AT and when == "within":
                    rank.work(0.002)
                    die()
                work.wait()
                break
            except MembersChanged as error:
                told.errors.append((step, error.before, error.ranks))
        if dies and step == AT and when == "after":
            die()
        told.came[step] = dist.get_world_size(), dist.get_rank(), [tensor.clone() for tensor in came]
    return told


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("kind", [all_reduce, all_gather, broadcast, reduce_scatter, barrier, gather, scatter])
def test_collective_ends_with_those_that_are_there_or_all_repeat_it(kind, when):
    for size, victim, seed in [(4, 0, 1), (4, 2, 2), (2, 1, 3), (2, 0, 4), (4, 3, 5)]:
        done = run_world(lambda rank: loop(rank, kind, victim, when, None), ranks=size, seed=seed)  # noqa: B023
        everybody = list(range(size))
        left = [rank for rank in everybody if rank != victim]
        told = {rank: done.results[rank] for rank in left}
        assert all(isinstance(own, Told) for own in told.values()), done.results
        assert len({str(own.errors) for own in told.values()}) == 1
        for step in range(STEPS):
            sizes = {told[rank].came[step][0] for rank in left}
            assert len(sizes) == 1, (size, victim, step, sizes)
            ranks = everybody if sizes == {size} else left
            assert sizes == {len(ranks)}
            assert ranks is everybody if step < AT else step == AT or ranks is left
            for rank in left:
                _, place, came = told[rank].came[step]
                assert place == ranks.index(rank)
                for got, wanted in zip(came, expected(kind, ranks, rank, step), strict=True):
                    assert torch.equal(got, wanted), (size, victim, step, rank)
        for step, before, after in told[left[0]].errors:
            assert (step, before, after) in [
                (AT, tuple(everybody), tuple(left)),
                (AT + 1, tuple(everybody), tuple(left)),
            ]


@pytest.mark.parametrize("kind", [all_reduce, all_gather, barrier])
def test_rank_that_is_back_takes_part_again_in_the_same_collectives(kind):
    for size, victim, seed in [(4, 0, 1), (3, 2, 2)]:
        done = run_world(lambda rank: loop(rank, kind, victim, "within", 0.2), ranks=size, seed=seed)  # noqa: B023
        told = done.results
        assert all(isinstance(own, Told) for own in told), told
        everybody, left = list(range(size)), [rank for rank in range(size) if rank != victim]
        steps = [step for step in told[left[0]].came if told[left[0]].came[step][0] == size and step > AT]
        assert len(steps) > 20
        for step in told[left[0]].came:
            ranks = everybody if told[left[0]].came[step][0] == size else left
            for rank in ranks:
                if rank == victim and step not in told[rank].came:
                    continue
                size_there, place, came = told[rank].came[step]
                assert (size_there, place) == (len(ranks), ranks.index(rank)), (step, rank)
                for got, wanted in zip(came, expected(kind, ranks, rank, step), strict=True):
                    assert torch.equal(got, wanted), (step, rank)


def test_rank_that_was_frozen_walks_on_alone_and_comes_back():
    done = run_world(lambda rank: loop(rank, all_reduce, -1, "", 9.0), ranks=3, seed=7, faults=[Freeze(1, 0.4, 2.3)])
    told = done.results
    assert all(isinstance(own, Told) for own in told), told
    sizes = [told[0].came[step][0] for step in range(60)]
    assert {2, 3} == set(sizes)
    assert sizes[-1] == 3
    for step in range(60):
        assert torch.equal(told[0].came[step][2][0], told[2].came[step][2][0])
        if sizes[step] == 3:
            assert torch.equal(told[0].came[step][2][0], told[1].came[step][2][0])
        else:
            assert torch.equal(told[1].came[step][2][0], 3 * own(1, step))


def of_another_number(rank):
    model = StagedDataParallel(nn.Linear(4, 2), deadline=None, members=Elastic(1))
    told = []
    for step in range(4):
        with model.step():
            rank.work(0.02)
            model(torch.ones(1, 4)).sum().backward()
        if step == 2:
            work = dist.all_gather([torch.zeros(1)], torch.ones(1), async_op=True)
            while not work.is_completed():
                rank.work(0.01)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"for another number of ranks than 2") as error:
                    work.wait()
            told.append(str(error.value))
    x = torch.tensor(float(rank.number))
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return told, float(x), model.rank


def test_list_that_was_too_short_from_the_start_is_no_change_of_members():
    done = run_world(of_another_number, ranks=2, seed=1)
    for rank, (told, most, own_rank) in enumerate(done.results):
        assert told == [
            f"rank {rank}, after step 2, all_gather of the loop's own: "
            "its tensors are for another number of ranks than 2"
        ]
        assert (most, own_rank) == (1.0, rank)


def in_the_block(rank, when):
    """As a contrastive loss does: each step gathers from all ranks. Rank 1 dies in one."""
    torch.manual_seed(0)
    model = StagedDataParallel(nn.Linear(4, 2), deadline=FixedDeadline(0.5), members=Elastic(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, told = model.register_state(optimizer=optimizer), []
    for step in range(first, 40):
        with model.step():
            rank.work(0.05)
            each = [torch.zeros(2) for _ in range(dist.get_world_size())]
            if first == 0 and rank.number == 1 and step == AT and when == "before":
                rank.job.kill(1)
                rank.job.start_later(1, 0.2)
                rank.work(0.0)
            dist.all_gather(each, own(rank.number, step))
            if first == 0 and rank.number == 1 and step == AT and when == "after":
                rank.job.kill(1)
                rank.job.start_later(1, 0.2)
                rank.work(0.0)
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        told.append((step, [r.weight for r in report.ranks], parameters_of(model.module), dist.get_world_size()))
    return told


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_in_whose_block_a_collective_was_to_be_repeated_ends_early_on_all_ranks(when):
    for size, seed in [(3, 1), (4, 2), (3, 3)]:
        done = run_world(lambda rank: in_the_block(rank, when), ranks=size, seed=seed)
        told = done.results
        assert all(isinstance(own, list) and own for own in told), told
        assert all(own == told[0] for number, own in enumerate(told) if number != 1)
        assert [step for step, *_ in told[0]] == list(range(40))
        assert told[0][-1][3] == size  # rank 1 is back
        assert told[1][-1] == told[0][-1]
        without = [step for step, weights, *_ in told[0] if not any(weights)]
        assert without in ([], [AT], [AT + 1])
