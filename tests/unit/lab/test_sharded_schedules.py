"""Sharded replicas in the simulated world: drawn jobs against what each rank is known to compute."""

import pytest
from sharded_schedules import ShardedSchedule, draw, own_gradients, problems_of

from straggle.lab.world.faults import Freeze, Kill


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_what_must_hold_does_in_schedules_that_are_drawn(seed):
    assert problems_of(draw(seed)) == []


@pytest.mark.slow
def test_replica_that_comes_back_has_the_gradients_that_its_peers_have_kept():
    frozen = (Freeze(0, 0.3, 2.6),)
    schedule = ShardedSchedule(1, 2, steps=40, members=True, zero_every=3, slow=(4.0,) * 4, faults=frozen)
    assert problems_of(schedule) == []


def test_draws_have_members_and_none_and_faults_of_both():
    drawn = [draw(seed) for seed in range(60)]
    assert {schedule.members for schedule in drawn} == {True, False}
    kinds = {type(fault) for schedule in drawn for fault in schedule.faults}
    assert {Kill, Freeze} <= kinds


def test_gradient_that_is_merged_wrongly_is_found(monkeypatch):
    """The oracle's own gradients of one rank are others: nothing else would say that it looks at them."""
    real = own_gradients

    def wrong(rank, step, num_microbatches):
        return tuple(1.001 * own if rank == 2 else own for own in real(rank, step, num_microbatches))

    monkeypatch.setattr("sharded_schedules.own_gradients", wrong)
    assert problems_of(draw(1))
