"""The commands' jobs on real ranks: a rank that loads slowly loads nothing for the steps that it has missed."""

import pytest
import torch
import torch.distributed as dist
from ranks import digest, run_forked
from training import Signals

from straggle.commands.configuration.config import load
from straggle.lab.jobs import StagedJob
from straggle.lab.workloads.synthetic import Synthetic

FIRST, LAST = 2, 4  # steps that rank 1 misses, while it loads
OPTIONS = ["batch_size=2", "deadline=fixed", "deadline.budget_s=1.0", "late_handling.grace_s=0.0", "faults=none"]
ONE_FOR_ONE = ["rebalance=none"]


class Slow(Synthetic):
    """Notes what is loaded, and waits before the batch of step ``FIRST``."""

    def __init__(self, wait):
        super().__init__(width=4, depth=1, num_samples=64)
        self.wait, self.loaded = wait, []

    def batch(self, samples):
        if len(self.loaded) == FIRST:
            self.wait()
        self.loaded.append(samples.tolist())
        return super().batch(samples)


def train(rank, config, resumes_after=None):
    """What this rank has loaded in eight steps, which of them counted for rank 1, and the parameters.

    After step ``resumes_after`` another job goes on from what this one would save.
    """
    signals = Signals()
    workload = Slow(lambda: signals.wait(f"merged {LAST}") if rank else None)
    job = StagedJob(config, workload, torch.device("cpu"))
    counted = []
    for number in range(8):
        if number == LAST + 1:
            signals.send("in time") if rank else signals.wait("in time")
        job.step(number)
        own = job.report.ranks[1]
        counted.append(not own.idle and own.reach == 1)
        if rank == 0 and number == LAST:
            signals.send(f"merged {LAST}")
        if number == resumes_after:
            job = resumed(job, config, workload)
    parameters = digest(job.module.parameters())
    job.close()
    return workload.loaded, counted, parameters


def resumed(job, config, workload):
    """A new job that goes on from the state of ``job``."""
    dist.barrier()
    dealt = {name: dealer.state_dict() for name, dealer in job.dealt.items()}
    states = job.module.state_dict(), job.optimizer.state_dict(), job.model.straggle_state()
    job.close()
    job = StagedJob(config, workload, torch.device("cpu"))
    job.module.load_state_dict(states[0])
    job.optimizer.load_state_dict(states[1])
    job.model.load_straggle_state(states[2])
    for name, dealer in job.dealt.items():
        dealer.load_state_dict(dealt[name])
    return job


@pytest.mark.parametrize("options", [ONE_FOR_ONE, ["rebalance=by_speed"]], ids=["equal", "by speed"])
def test_rank_that_loads_slowly_has_the_same_batch_until_it_is_in_time(options):
    (others, _, same), (own, counted, parameters) = run_forked(train, 2, load("train", [*OPTIONS, *options]))
    assert counted == [True] * FIRST + [False] * (LAST - FIRST + 1) + [True] * 3
    assert (len(others), len(own)) == (8, 8 - (LAST - FIRST + 1))
    assert parameters == same


@pytest.mark.parametrize("options", [ONE_FOR_ONE, ["rebalance=by_speed"]], ids=["equal", "by speed"])
def test_run_that_is_resumed_has_the_samples_that_it_would_have_had(options):
    config = load("train", [*OPTIONS, *options])
    uninterrupted, resumed = (run_forked(train, 2, config, after) for after in (None, LAST))
    assert [counted for _, counted, _ in resumed] == [counted for _, counted, _ in uninterrupted]
    assert [parameters for _, _, parameters in resumed] == [parameters for _, _, parameters in uninterrupted]
