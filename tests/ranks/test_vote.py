"""A replica leaves a step at one boundary: its vote decides, and what this rank's own rule says is one word in it."""

import pytest
from ranks import run_ranks, staged
from training import Chain, Stopper

from straggle.merge.replica import Agreed, Replica

pytestmark = pytest.mark.light


def step_of_a_replica(rank, asked_after, voted_at):
    """This rank's words in a step, and the gradients that it gave; its replica leaves at ask number ``voted_at``."""
    words, module = [], Chain(4)

    class Vote:
        def begin(self):
            words.clear()

        def __call__(self, own, _at):
            words.append(own)
            return len(words) == voted_at

        def agree(self, present, _waited_s, _weights):
            return Agreed(present, ())

        def close(self):
            pass

    Replica.of_one_rank = staticmethod(lambda channel: Replica(channel.rank, channel.world_size, Vote()))
    stopper = Stopper(module)
    with staged(module) as model:
        with model.step() as step:
            stopper.arm(step, asked_after)
            model(1.0).backward()
        return words, [layer.weight.grad is not None for layer in module.layers], model.last_report.ranks[0].late


FORWARD = [False] * 5  # a rank is asked before the model, before each of its four layers, and after the first gradients


def test_rank_leaves_as_its_replica_does_though_its_own_rule_would_go_on():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, None, 7)
    assert words == [*FORWARD, False, False]
    assert given == [False, False, True, True]
    assert late


def test_rank_goes_on_until_its_replica_leaves_though_its_own_rule_would_not():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, 1, 8)
    assert words == [*FORWARD, True, True, True]
    assert given == [False, True, True, True]
    assert late


def test_rank_finishes_its_step_if_its_replica_does():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, 1, None)
    assert words == [*FORWARD, True, True, True]
    assert given == [True] * 4
    assert not late
