"""What lies between `pause` and `resume` belongs to no step."""

import time

import pytest
import torch
from ranks import run_forked, staged
from training import Chain, Signals

pytestmark = pytest.mark.light

PAUSE_S = 1000.0


def times(rank, pause):
    """Three steps, and before the third a thousand seconds, by a clock that is put forward."""
    model_seconds = []
    with staged(module := Chain(), deadline=600.0) as model:
        ahead = [0.0]
        model._coordinator.stopwatch.now = lambda: time.monotonic() + ahead[0]
        for number in range(3):
            if number == 2:
                if pause:
                    model.pause()
                ahead[0] += PAUSE_S
                if pause:
                    model.resume()
                torch.distributed.barrier()
            with model.step():
                model(1.0).backward()
            report = model.last_report
            model_seconds.append((report.seconds, report.ranks[0].data_s + report.ranks[0].outside_s))
        assert module.layers[0].weight.grad is not None
    return model_seconds[-1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_pause_belongs_to_no_step(world_size):
    for seconds, between_s in run_forked(times, world_size, True):
        assert max(seconds, between_s) < PAUSE_S / 2


def test_time_between_two_steps_counts_otherwise():
    for seconds, _ in run_forked(times, 1, False):
        assert seconds >= PAUSE_S


def pause_inside(rank):
    with staged(Chain()) as model, model.step():
        with pytest.raises(RuntimeError, match="between two steps"):
            model.pause()
        model(1.0).backward()
    return True


def test_pause_inside_of_a_step_is_refused():
    assert run_forked(pause_inside, 1) == [True]


def evaluated_on_rank_zero(rank):
    """Rank 0 evaluates for a thousand seconds between two steps, while the others are at the end of their pause."""
    signals, others = Signals(), range(1, torch.distributed.get_world_size())
    with staged(Chain(), deadline=600.0) as model:
        ahead = [0.0]
        model._coordinator.stopwatch.now = lambda: time.monotonic() + ahead[0]
        for number in range(4):
            if number == 3:
                with model.pause():
                    signals.send(f"rank {rank} is in its pause")
                    if rank == 0:
                        for other in others:
                            signals.wait(f"rank {other} is in its pause")
                        signals.send("evaluated")
                    ahead[0] += PAUSE_S
                alone = signals.absent("evaluated")
            with model.step():
                model(1.0).backward()
        return alone, model.last_report.late_ranks, model.last_report.seconds


def test_all_ranks_wait_for_the_one_that_evaluates_at_the_end_of_a_pause_that_is_a_block():
    for alone, late, seconds in run_forked(evaluated_on_rank_zero, 3):
        assert not alone
        assert late == ()
        assert seconds < PAUSE_S / 2
