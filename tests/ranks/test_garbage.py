"""All ranks collect Python's garbage after the same step, and at no other time."""

from __future__ import annotations

import gc
import weakref

import pytest
from ranks import run_forked, staged
from training import features, mlp

from straggle import CollectGarbage, StagedDataParallel
from straggle.merge.wire.store import default_store


class Cycle:
    """Is freed by a collection only."""

    def __init__(self):
        self.own = self


def train(model, number):
    with model.step():
        model(features(0, number)).square().mean().backward()


def collected_after(rank, every, steps):
    """In which steps garbage was gone when the step was over; and what garbage is left to when it is closed."""
    freed = []
    with staged(mlp()) as model:
        garbage = CollectGarbage(model, every=every)
        for number in range(steps):
            cycle = weakref.ref(Cycle())
            train(model, number)
            freed.append(cycle() is None)
        enabled = gc.isenabled()
        count, frozen = garbage.count, gc.get_freeze_count() > 0
        garbage.close()
    return [number for number, gone in enumerate(freed) if gone], count, enabled, frozen, gc.get_freeze_count()


def test_all_ranks_collect_after_the_same_steps():
    results = run_forked(collected_after, 2, 3, 10)
    assert [steps for steps, *_ in results] == [[0, 2, 5, 8]] * 2
    assert all(count == 4 and not enabled and frozen for _, count, enabled, frozen, _ in results)
    assert all(left == 0 for *_, left in results)


def collected_while_the_peer_computes(rank):
    """Rank 1 finishes its pass only when rank 0 has collected."""
    store = default_store()
    with staged(mlp()) as model:
        garbage = CollectGarbage(model, every=1)
        if rank == 0:
            model.register_submit_hook(lambda _: store.set(f"collected/{garbage.count}", ""))
        for number in range(2):
            with model.step():
                loss = model(features(0, number)).square().mean()
                if rank == 1:
                    store.wait([f"collected/{number + 1}"])
                loss.backward()
        garbage.close()
    return garbage.count


def test_a_rank_collects_while_its_peers_still_compute():
    assert run_forked(collected_while_the_peer_computes, 2) == [2, 2]


def left_to_itself(rank):
    """Whether Python collects again when the model is gone, which nothing closed."""
    model = StagedDataParallel(mlp())
    CollectGarbage(model, every=1)
    train(model, 0)
    train(model, 1)
    before = gc.isenabled()
    del model
    return before, gc.isenabled(), gc.get_freeze_count()


def test_python_collects_again_when_the_model_is_gone():
    assert run_forked(left_to_itself, 1) == [(False, True, 0)]


def test_every_below_one_is_refused():
    with pytest.raises(ValueError, match="every=0"):
        CollectGarbage(None, every=0)  # refused before the model is looked at
