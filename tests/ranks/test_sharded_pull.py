"""Sharded replicas that draw micro-batches from one pool: a replica draws, and its ranks compute each together."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from members import run_forked_job, run_job
from ranks import Raised, run_ranks, staged
from replicas import ranks_of, start_again
from sharded_whole_steps import SHARDS, alone, assert_equal, mesh_of, sharded, train
from sharding import batch, pair
from sharding import mesh_of as replicas_by_shards
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from whole_steps import LAYER_S, PARTS, Net, loss_of, samples_of

from straggle import StagedDataParallel
from straggle.lab.world.faults import Cut, Freeze, Kill, Notice, Stall
from straggle.lab.world.run import run_world
from straggle.pools.pulling import random_numbers_of


def run_with(faults, *, replicas, steps, seed=0, slow=2.0, **options):
    """Checks each rank that took part in the last step; the steps that each process made. The last replica is slow."""
    ranks = replicas * SHARDS

    def loop(rank):
        layer_s = LAYER_S * (slow if rank.number == ranks - 1 else 1.0)
        own = {"end": lambda made: made >= steps, "told": lambda: rank.is_told}
        return train(rank.number, lambda: rank.work(layer_s), **own, **options)

    run = run_world(loop, ranks=ranks, seed=seed, faults=faults, longest_s=1200.0)
    ends = [(rank, own) for rank, own in enumerate(run.results) if isinstance(own, tuple)]
    assert run.results[-1][1] == steps, run.results[-1]
    for rank, (parameters, made, seen) in ends:
        if not seen[-1].was_out:
            assert_equal(rank, parameters, alone(made))
    last = ends[-1][1][2]
    assert [own.step for own in last] == list(range(steps))
    assert all(own.dropped_share == pytest.approx(0.0) for own in last)
    return last


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_without_faults_no_step_is_made_again(replicas):
    seen = run_with([], replicas=replicas, steps=6, members=False)
    assert [own.attempts for own in seen] == [1] * 6


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_micro_batch_changes_no_parameter():
    stalls = [Stall(0, 0.63, 1.5), Stall(3, 2.13, 0.5)]
    seen = run_with(stalls, replicas=2, steps=14, deadline=0.2, members=False)
    assert sum(own.attempts > 1 for own in seen) >= 1


@pytest.mark.parametrize("fault", [Kill(0, 0.6), Freeze(1, 0.6, 4.0), Cut(0, 0.6, 4.0), Notice(1, 0.6)], ids=repr)
def test_a_replica_that_leaves_changes_no_parameter(fault):
    run_with([fault], replicas=2, steps=12)


def drawn_by_speed(rank) -> list[tuple[int, float]]:
    """What the slow replica drew in each step, and when the step was over."""
    mesh, own = mesh_of(members=False)
    net = sharded(Net(), mesh, lambda: rank.work(LAYER_S * (2.0 if rank.number == 3 else 1.0)))
    model, seen = StagedDataParallel(net, links=False, **own), []
    for number in range(8):
        with model.step() as step:
            for part in step.pull([samples[rank.number % SHARDS :: SHARDS] for samples in samples_of(0)], seed=number):
                loss_of(model, part).backward()
        net.zero_grad()
        seen.append((int(model.last_report.ranks[1].parts), rank.now))
    model.close()
    return seen


def test_slow_replica_draws_less_and_steps_are_shorter():
    seen = run_world(drawn_by_speed, ranks=2 * SHARDS).results[0]
    assert seen[0][0] == PARTS // 2  # the first pool is dealt out equally
    assert [parts for parts, _ in seen[3:]] == [PARTS // 2 - 1] * 5
    assert (seen[-1][1] - seen[-2][1]) < 0.85 * seen[0][1]


def with_other_pools(rank: int, weights: bool) -> None:
    both = pair()
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model, model.step() as step:
        number = 5 if rank == 3 and not weights else 4
        parts = [batch(part, rank) for part in range(number)]
        for x in step.pull(parts, weights=[2.0 if rank == 3 else 1.0] * number if weights else None):
            model(x).square().mean().backward()


@pytest.mark.parametrize("weights", [False, True])
def test_ranks_of_a_replica_that_were_given_other_pools_are_refused_and_named(weights):
    ends = run_ranks(with_other_pools, 4, weights, outcomes=True)
    assert all(isinstance(end, Raised) for end in ends)
    for rank in (2, 3):
        words = f"rank 2 has 4 micro-batches, rank 3 has {4 if weights else 5} micro-batches"
        assert words in ends[rank].message
        assert "ranks [2, 3] shard one copy" in ends[rank].message


def stopped_by_hand(rank: int) -> list[float]:
    """In the second step one rank of the first replica is asked to stop: the other one computes the rest."""
    both = pair()
    parts = [batch(part, rank % SHARDS) for part in range(8)]
    seen = []
    with staged(both.net, mesh=both.mesh["dp_replicate"]) as model:
        for number in range(3):
            model.zero_grad()
            with model.step() as step:
                for at, x in enumerate(step.pull(parts, seed=number)):
                    if number == 1 and rank == 1 and at == 1:
                        step.stop()
                    model(x).square().mean().backward()
            seen.append(model.last_report.ranks[0].parts)
            both.plain.zero_grad()
            for part in range(8):
                whole = torch.cat([batch(part, shard) for shard in range(SHARDS)])
                (both.plain(whole).square().mean() / 8).backward()
            pairs = zip(both.net.parameters(), both.plain.parameters(), strict=True)
            assert max((own.grad.full_tensor() - other.grad).abs().max().item() for own, other in pairs) < 1e-6
    return seen


def test_a_rank_that_is_stopped_by_hand_stops_its_replica_between_two_micro_batches_and_nothing_is_lost():
    ends = run_ranks(stopped_by_hand, 4)
    assert all(own == ends[0] for own in ends)


def plain_pool(rank: int) -> list[float]:
    """What is dropped of steps without a seed."""
    both = pair()
    seen = []
    with staged(both.net, mesh=both.mesh["dp_replicate"], deadline=1.0) as model:
        for _ in range(4):
            with model.step() as step:
                for x in step.pull([batch(part, rank % SHARDS) for part in range(6)]):
                    model(x).square().mean().backward()
            seen.append(model.last_report.dropped_share)
    return seen


def test_a_replica_that_is_not_late_drops_nothing():
    assert run_ranks(plain_pool, 4) == [[0.0] * 4] * 4


def on_board(rank, board):
    """A rank of a job that the test ends; the last one is twice as slow."""
    layer_s = 0.002 * (2.0 if rank == 2 * SHARDS - 1 else 1.0)
    own = {"end": lambda steps: steps >= board.end, "made": lambda steps: board.note(rank, steps)}
    return train(rank, lambda: time.sleep(layer_s), **own)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_forked_job, run_job], ids=["processes", "world"])
def test_replicas_that_are_killed_and_stopped_and_come_back_change_no_parameter(run):
    with run(2 * SHARDS, on_board, replica_size=SHARDS) as job:
        job.walk(3)
        job.kill(1)
        job.walk(5, ranks_of(1))
        start_again(job, 0)
        job.wait(lambda: min(map(job.board.made, ranks_of(0))) > 0, "it is back")
        job.walk(5)
        job.stop(0)
        job.walk(8, ranks_of(1))
        job.resume(0)
        job.meet()
        ends = job.finish()
    for rank, (parameters, made, seen) in enumerate(ends):
        assert not seen[-1].was_out
        assert_equal(rank, parameters, alone(made))
    assert [own.step for own in ends[-1][2]] == list(range(ends[-1][1]))
    assert any(own.attempts > 1 for own in ends[-1][2])


class Split(nn.Module):
    """A block that tensor parallelism splits, between dropouts that are alike on all ranks of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) + self.down(torch.tanh(self.up(self.dropout(x))))


def split_over_ranks(_rank: int) -> list[float]:
    """The gap to one process in each step."""
    torch.manual_seed(0)
    plain, gaps = nn.Sequential(Split(), Split()), []
    net, mesh = copy.deepcopy(plain), replicas_by_shards()
    for block in net:
        parallelize_module(block, mesh["dp_shard"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        for number in range(2):
            for own in (model, plain):
                own.zero_grad()
            with model.step() as step:
                for x in step.pull([batch(number, part) for part in range(6)], seed=number):
                    model(x).square().mean().backward()
            for part in range(6):
                with random_numbers_of(number, part):
                    (plain(batch(number, part)).square().mean() / 6).backward()
            pairs = zip(net.parameters(), plain.parameters(), strict=True)
            gaps.append(max((own.grad.full_tensor() - other.grad).abs().max().item() for own, other in pairs))
    return gaps


def test_ranks_that_split_layers_compute_the_same_samples_with_the_same_random_numbers():
    assert max(max(gaps) for gaps in run_ranks(split_over_ranks, 4)) < 1e-6
