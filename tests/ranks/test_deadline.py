"""A user's own policy decides alike on every rank."""

import math
import time

import torch
from ranks import run_ranks, staged
from training import features, mlp

from straggle import Deadline, History, LateHandling


def history(compute_s, num_steps=None, finished=None):
    times = torch.tensor(compute_s, dtype=torch.float64)
    done = torch.ones_like(times, dtype=torch.bool) if finished is None else torch.tensor(finished)
    return History(len(times) if num_steps is None else num_steps, times, done)


class Impatient(Deadline):
    """A user's own policy: waits for all ranks in the first two steps, and then for none."""

    window = 3

    def __init__(self):
        self.seen = []

    def decide(self, history):
        self.seen.append((history.num_steps, history.compute_s.tolist(), history.finished.tolist()))
        return 1e-6 if history.num_steps >= 2 else math.inf


def work_until_late(rank):
    """Rank 1 goes on with its forward pass in steps 2 and 3 until it is stopped."""
    policy, late, deadlines = Impatient(), [], []
    with staged(mlp(), deadline=policy, late_handling=LateHandling(grace_s=60.0)) as model:
        for number in range(4):
            with model.step():
                while (rank, number) in ((1, 2), (1, 3)):
                    model(features(rank, number))
                    time.sleep(0.001)
                model(features(rank, number)).sum().backward()
            late.append(model.last_report.late_ranks)
            deadlines.append(model.last_report.deadline_s)
    return policy.seen, late, deadlines


def test_users_own_policy_decides_alike_on_every_rank():
    first, second = run_ranks(work_until_late, 2)
    assert repr(first) == repr(second)
    seen, late, deadlines = first
    assert late == [(), (), (1,), (1,)]
    assert deadlines == [math.inf, math.inf, 1e-6, 1e-6]
    assert [num_steps for num_steps, _, _ in seen] == [1, 2, 3, 4]
    assert [len(compute_s) for _, compute_s, _ in seen] == [1, 2, 3, 3]
    assert seen[-1][2] == [[True, True], [True, False], [True, False]]
