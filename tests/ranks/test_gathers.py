"""Collectives of the loop's own inside of the block: no rank is stopped before one that its peers have made."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from ranks import digest, logged, run_forked, run_ranks, staged
from sharding import batch, pair
from training import Signals, features, mlp

from straggle import FixedDeadline, LateHandling

AT, NUM_STEPS, WORLD = 3, 7, 4


class Gathers:
    """Calls one kind of collective, in which each rank gives ``10 * step + rank``; ``seen``: what came of each call."""

    def __init__(self, kind):
        self.kind, self.rank = kind, dist.get_rank()
        self.own = [dist.new_group([0, 1]), dist.new_group([2, 3])][self.rank // 2] if kind == "own group" else None
        self.seen, self.open = [], []

    def __call__(self, step):
        own = torch.tensor([float(10 * step + self.rank)])
        self.seen.append(float(getattr(self, self.kind.replace(" ", "_"))(own, step)))

    def ends(self):
        for work in self.open:
            work.wait()
        self.open.clear()

    def all_reduce(self, own, _step):
        dist.all_reduce(own)
        return own

    def all_gather(self, own, _step):
        of_each = [torch.zeros(1) for _ in range(WORLD)]
        dist.all_gather(of_each, own)
        return sum(of_each)

    def all_gather_object(self, own, _step):
        of_each = [None] * WORLD
        dist.all_gather_object(of_each, float(own))
        return sum(of_each)

    def barrier(self, _own, _step):
        dist.barrier()
        return 0

    def differentiable(self, own, _step):
        total = sum(differentiable.all_gather(own.requires_grad_()))
        total.sum().backward()  # a collective, too
        assert own.grad == WORLD
        return total.detach()

    def functional(self, own, _step):
        return functional.all_reduce(own, "sum", dist.group.WORLD)

    def reduce(self, own, _step):
        dist.reduce(own, 1)
        return own if self.rank == 1 else 0

    def broadcast(self, own, _step):
        dist.broadcast(own, 0)
        return own

    def scatter(self, own, step):
        given = [torch.tensor([10.0 * step + place]) for place in range(WORLD)]
        dist.scatter(own, given if self.rank == 1 else None, 1)
        return own

    def own_group(self, own, _step):
        dist.all_reduce(own, group=self.own)
        return own

    def begun_only(self, own, _step):
        self.open.append(dist.all_reduce(own, async_op=True))
        return 0


def expected(kind, rank, step):
    """What comes of a call."""
    of_all = 40.0 * step + 6
    other = {"barrier": 0, "begun only": 0, "broadcast": 10.0 * step, "scatter": 10.0 * step + rank}
    other |= {"own group": 20.0 * step + (1 if rank < 2 else 5), "reduce": of_all if rank == 1 else 0}
    return other.get(kind, of_all)


MEET = ("all_reduce", "all_gather", "all_gather_object", "barrier", "differentiable", "functional", "reduce")
PASS = ("broadcast", "scatter", "own group", "begun only")  # a quorum ends the step without the last rank
SENT = ("broadcast", "scatter")  # by gloo, who sends waits for no receiver: they need processes
PLACES = ("before", "after forward", "between passes", "after backward")


def train(rank, kind, place, from_step=0):
    """The last rank is stuck in the first layer of a step, until its peers have begun the step, or merged it."""
    gathers, signals, module = Gathers(kind), Signals(), mlp(seed=0)
    until = f"{place} {'merged' if kind in PASS and place != 'before' else 'begun'} {AT}"
    stuck_in, step = [AT] if rank == WORLD - 1 else [], 0

    def stall(*_):
        if stuck_in == [step]:
            stuck_in.clear()
            signals.wait(until)

    def gathers_in(where):
        if where == place and step >= from_step:
            gathers(step)

    module[0].register_forward_pre_hook(stall)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    late = []
    with staged(module, deadline=FixedDeadline(0.05), late_handling=LateHandling(grace_s=0.0, max_lag=2)) as model:
        for step in range(NUM_STEPS):
            if rank == 0:
                signals.send(f"{place} begun {step}")
            with model.step(num_microbatches=2):
                gathers_in("before")
                for number in range(2):
                    loss = model(features(rank, step)).square().mean() / 2
                    if number == 0:
                        gathers_in("after forward")
                    loss.backward()
                    if number == 0:
                        gathers_in("between passes")
                gathers_in("after backward")
            if rank == 0:
                signals.send(f"{place} merged {step}")
            gathers.ends()
            optimizer.step()
            optimizer.zero_grad()
            late.append(model.last_report.late_ranks)
    right = gathers.seen == [expected(kind, rank, step) for step in range(from_step, NUM_STEPS)]
    return digest(module.parameters()), right, late[AT]


def train_at(rank, kind, from_step):
    return [train(rank, kind, place, from_step) for place in PLACES]


@pytest.mark.parametrize("from_step", [0, AT])
@pytest.mark.parametrize("kind", MEET + PASS)
def test_no_rank_is_stopped_before_a_collective_that_its_peers_have_made(kind, from_step):
    run = run_forked if kind in SENT else run_ranks
    for place, *results in zip(PLACES, *run(train_at, WORLD, kind, from_step), strict=True):
        assert [right for _, right, _ in results] == [True] * WORLD, place
        assert len({parameters for parameters, _, _ in results}) == 1, place
        if kind in PASS and place != "before":
            assert all(WORLD - 1 in late for _, _, late in results), place


def test_late_rank_makes_a_collective_that_its_peers_have_made_and_is_late_all_the_same():
    results = run_ranks(train, WORLD, "own group", "after forward")
    assert [right for _, right, _ in results] == [True] * WORLD
    assert len({parameters for parameters, _, _ in results}) == 1
    assert all(WORLD - 1 in late for _, _, late in results)


def train_joined(rank, lengths):
    """Ranks have different numbers of batches, and each block has two collectives."""
    sums, module = [], mlp(seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    with staged(module, deadline=FixedDeadline(60.0)) as model:
        for step in model.join(range(lengths[rank])):
            with model.step():
                loss = model(features(rank, step)).square().mean()
                dist.all_reduce(first := torch.ones(1))
                loss.backward()
                dist.all_reduce(second := torch.ones(1))
            sums.append(float(first + second))
            optimizer.step()
            optimizer.zero_grad()
        return sums, digest(module.parameters()), [of.idle for of in model.last_report.ranks]


def test_rank_without_data_goes_through_the_block_for_its_peers_collectives_and_gives_nothing():
    results = run_ranks(train_joined, 2, (5, 2))
    assert [(sums, idle) for sums, _, idle in results] == [([4.0] * 5, [False, True])] * 2
    module = mlp(seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(5):
        ranks = range(2 if step < 2 else 1)
        for parameter, *own in zip(
            module.parameters(), *(gradients(module, rank, step) for rank in ranks), strict=True
        ):
            parameter.grad = sum(own) / len(own)
        optimizer.step()
        optimizer.zero_grad()
    assert {parameters for _, parameters, _ in results} == {digest(module.parameters())}


def gradients(module, rank, step):
    return torch.autograd.grad(module(features(rank, step)).square().mean(), list(module.parameters()))


# -- what is said


def loop(rank, where, deadline):
    """What is warned of in some steps with a collective; one of another thread is not the loop's."""
    module = mlp(seed=0)
    with logged("straggle.loop.step_warnings") as messages, staged(module, deadline=deadline) as model:
        for step in range(5):
            with model.step():
                loss = model(features(rank, step)).square().mean()
                if where == "block" or (where, step) in [("first step", 0), ("fourth step", 3)]:
                    dist.all_reduce(loss.detach())
                if where == "thread":
                    (beside := threading.Thread(target=dist.barrier)).start()
                    beside.join()
                loss.backward()
            if where == "outside":
                dist.all_reduce(loss.detach())
            module.zero_grad()
    return messages


def loops(rank, cases):
    return [loop(rank, where, deadline) for where, deadline in cases]


SILENT = [("first step", 60.0), ("thread", 60.0), ("outside", 60.0), ("block", None)]
SAID = {("block", 60.0): 1, ("fourth step", 60.0): 3}


def test_collective_in_the_block_is_warned_of_once_with_its_line_by_the_lowest_rank():
    lowest, other = run_forked(loops, 2, [*SAID, *SILENT])
    assert other == [[]] * len(other)
    assert lowest[len(SAID) :] == [[]] * len(SILENT)
    for (message,), step in zip(lowest, SAID.values(), strict=False):
        assert message.startswith(f"step {step}: ranks wait for each other inside of the block: all_reduce in loop (")
        assert ": dist.all_reduce(loss.detach()))" in message


def means(rank, where):
    """The means of the loss over the ranks, in one of the ways that the warning names, and what is warned of."""
    module, found = mlp(seed=0), []
    with logged("straggle.loop.step_warnings") as messages, staged(module, deadline=60.0) as model:
        for number in range(4):
            with model.step() as step:
                loss = model(features(rank, number)).square().mean()
                mean = loss.detach() / 2
                if where == "block" or (where == "seldom" and number == 0):
                    dist.all_reduce(mean)
                if where == "log":
                    step.log(loss=loss)
                loss.backward()
            if where == "after":
                dist.all_reduce(mean)
            found.append(model.last_report.scalars["loss"] if where == "log" else float(mean))
            module.zero_grad()
    return found, len(messages)


def means_in(rank, ways):
    return [means(rank, where) for where in ways]


def test_what_the_warning_says_to_do_gives_the_same_means_and_ends_the_wait():
    for rank, results in enumerate(run_ranks(means_in, 2, ("block", "after", "log", "seldom"))):
        (block, warned), (after, silent), (log, silent_too), (seldom, silent_as_well) = results
        assert (warned, silent, silent_too, silent_as_well) == (1 - rank, 0, 0, 0)
        assert block == after == pytest.approx(log)
        assert seldom[0] == block[0]


def train_sharded(rank, over_all):
    """Two replicas of two ranks, and a mean of the loss: over the replica's own ranks, or over all."""
    made = pair()
    inside = made.mesh["dp_shard"].get_group()
    with (
        logged("straggle.loop.step_warnings") as messages,
        staged(made.net, mesh=made.mesh["dp_replicate"], deadline=60.0) as model,
    ):
        for step in range(4):
            with model.step():
                loss = model(batch(step, rank)).square().mean()
                dist.all_reduce(loss.detach(), group=None if over_all else inside)
                loss.backward()
            model.zero_grad()
    return messages


def sharded_loops(rank):
    return train_sharded(rank, over_all=False), train_sharded(rank, over_all=True)


def test_what_ranks_of_a_replica_gather_among_themselves_is_not_warned_of():
    results = run_ranks(sharded_loops, 4)
    assert [inside for inside, _ in results] == [[]] * 4
    assert [len(over_all) for _, over_all in results] == [1, 1, 0, 0]
