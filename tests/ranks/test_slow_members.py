"""A member that is slow for good is put out, times its own steps while it is out, and comes back when it is fast."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from members import Board, run_forked_job, run_job
from ranks import digest, logged, staged
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training import features, mlp

from straggle import Elastic, Epochs, LateLoader
from straggle.lab.world.run import run_world

NUM_RANKS, SLOW, ROWS, NUM_SAMPLES = 4, 1, 4, 400_000
SLOW_S, USUAL_S = 0.25, 0.03  # of a step, at least


class Samples(Dataset):
    """Loading a batch takes ``seconds()``."""

    def __init__(self, seconds):
        self._seconds = seconds

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        time.sleep(self._seconds() / ROWS)
        return features(0, index, rows=1)[0]


def batches(way, model, epochs, data):
    """The batches of an endless loop."""
    if way == "Epochs":
        return epochs.batches(DataLoader(data, batch_sampler=epochs.sampler))
    loader = DataLoader(data, ROWS, sampler=DistributedSampler(data, NUM_RANKS, model.rank))
    return LateLoader(model, loader) if way == "LateLoader" else loader


def train(rank, board: Board, place, way):
    """Its parameters, and of each step how long it took, and who was there; rank `SLOW` is slow in ``place``."""
    fast = Path(board.folder, "fast")

    def extra_s(where):
        return SLOW_S if rank == SLOW and where == place and not fast.exists() else 0.0

    steps = []
    with staged(mlp(), members=Elastic(suspect_s=2.0)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        epochs = Epochs(model, num_samples=NUM_SAMPLES, batch_size=ROWS)
        model.register_state(optimizer=optimizer, epochs=epochs)
        began = time.monotonic()
        for number, x in enumerate(batches(way, model, epochs, Samples(lambda: extra_s("data")))):
            if number >= board.end:
                break
            with model.step():
                loss = model(x).square().mean()
                time.sleep(USUAL_S + extra_s("layers"))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.monotonic()
            steps.append((now - began, model.last_report.absent_ranks))
            began = now
            board.note(rank, number + 1)
    return digest(model.parameters()), steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "place", "way"),
    [(run_forked_job, "layers", "plain"), (run_job, "data", "LateLoader"), (run_job, "data", "Epochs")],
    ids=["processes", "world-LateLoader", "world-Epochs"],
)
def test_member_that_is_slow_for_good_is_put_out_and_let_in_again_when_it_is_fast(run, place, way):
    with run(NUM_RANKS, train, place, way) as job:
        job.wait(lambda: f"rank {SLOW} is no member from generation 1 on" in job.log(), "it is put out", 90)
        why = re.search(r"is no member from generation 1 on: (.*)", job.log())[1]
        words = {"layers": "in forward", "data": "loading data"}[place]
        assert "of a step, the others after" in why, why
        assert words in why, why
        job.wait(lambda: "for a step of its own" in job.log(), "a probe", 60)
        assert float(re.search(r"(\S+) s for a step of its own", job.log())[1]) >= SLOW_S
        job.walk(100, [0, 2, 3])
        assert "may be let in again" not in job.log()
        (job.folder / "fast").touch()
        job.wait(lambda: f"rank {SLOW} takes part again" in job.log(), "it comes back", 120)
        job.meet()
        results, log = job.finish(), job.log()
    assert len({own[0] for own in results}) == 1, log
    steps = results[0][1]
    assert steps[-1][1] == ()
    with_it = [seconds for seconds, absent in steps[1:40] if not absent]
    assert sum(with_it) > 0.8 * SLOW_S * len(with_it)  # it is waited for: no load of the machine makes these shorter,
    without = [seconds for seconds, absent in steps if absent == (SLOW,)]
    tens = [sum(without[first : first + 10]) for first in range(len(without) - 9)]
    assert min(tens) < 0.8 * SLOW_S * 10  # and only because nobody waits for it can ten of these be


class Counting(nn.Module):
    """It counts its forward passes in a buffer that is averaged, and in one that is sent if it changes."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("large", torch.zeros(2**16 + 1))

    def forward(self, x):
        self.large[0] += 1
        return self.layer(self.norm(x))

    @property
    def counts(self):
        return self.norm.num_batches_tracked.item(), self.large[0].item()


def test_steps_that_a_rank_makes_alone_while_it_is_out_leave_its_buffers_as_they_were_without_a_word():
    seen = {rank: [] for rank in range(3)}

    def loop(rank):
        module = Counting()
        module.layer.register_forward_hook(lambda *_: rank.work(0.3 if rank.number == SLOW else 0.01))
        with staged(module, members=Elastic(min_ranks=1)) as model:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            model.register_state(optimizer=optimizer)
            while len(seen[rank.number]) < 66:
                with model.step():
                    model(features(rank.number, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[rank.number].append((model.last_report.ranks[rank.number].absent, module.counts))

    with logged("straggle.merge.state.module_state") as said:
        run_world(loop, ranks=3, seed=0)
    first = [absent for absent, _ in seen[SLOW]].index(True)
    assert seen[0][-1][-1] == seen[2][-1][-1] == (66, 66.0)
    assert {counts for _, counts in seen[SLOW][first:]} == {(first, float(first))}
    assert said == []
