"""Watching DDP changes nothing, and its times are those of a clock that only the model's layers move."""

from __future__ import annotations

import gc
import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ranks import digest, run_forked
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import features, grads, mlp

import straggle
from straggle.observe.watch.pauses import PauseDetector

NUM_STEPS = 5


def normed() -> nn.Module:
    """A network with buffers, which DDP copies before each forward pass."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def train(rank, folder, watchers, options, microbatches):
    model = DistributedDataParallel(normed(), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    threads = set(threading.enumerate())
    if rank in watchers:
        straggle.watch(model, folder)
    for number in range(NUM_STEPS):
        for part in range(microbatches - 1):
            with model.no_sync():
                model(features(rank, 100 * part + number)).square().mean().backward()
        model(features(rank, number)).square().mean().backward()
        seen.append(digest(grads(model)))
        optimizer.step()
        optimizer.zero_grad()
    new = {thread.name for thread in set(threading.enumerate()) - threads}
    assert new <= {"straggle-pauses"}, "it looks at the clock; a watch sends nothing meanwhile"
    return seen, digest(model.parameters())


OPTIONS = [({}, 1), ({}, 3), ({"gradient_as_bucket_view": True}, 3), ({"find_unused_parameters": True}, 1)]


@pytest.mark.parametrize(("options", "microbatches"), [*OPTIONS, ({"static_graph": True}, 1)])
def test_watched_ddp_trains_bit_for_bit_as_it_does_alone(options, microbatches, tmp_path):
    plain, watched = (run_forked(train, 2, tmp_path, who, options, microbatches) for who in ((), (0, 1)))
    assert watched == plain
    for rank in range(2):
        head, *lines = map(json.loads, (tmp_path / "watch" / f"rank{rank}.jsonl").read_text().splitlines())
        assert (head["rank"], head["world_size"]) == (rank, 2)
        assert [line["step"] for line in lines] == list(range(NUM_STEPS))
        assert {len(line["microbatch_s"]) for line in lines} == {microbatches}
        assert {len(line["stage_s"]) for line in lines} == {len(head["stages"])}


def test_one_rank_can_watch_alone(tmp_path):
    """So it sends nothing that a peer would have to answer."""
    assert run_forked(train, 2, tmp_path, (1,), {}, 1) == run_forked(train, 2, tmp_path, (), {}, 1)
    assert [path.name for path in (tmp_path / "watch").iterdir()] == ["rank1.jsonl"]


class Clock:
    """Time that passes only where the test moves it."""

    now = 0.0


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        Clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Clock.now += ctx.backward_s
        return gradient, None, None


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = Spend.apply(layer(x), 1.0, 10.0 * (number + 1))
        return x


class TimedOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        Clock.now += 0.25
        return super().step(closure)


def watch_timed(rank, folder):
    model = DistributedDataParallel(Timed())
    optimizer = TimedOptimizer(model.parameters(), lr=0.1)
    with straggle.Watch(model, folder, clock=lambda: Clock.now):
        for number in range(4):
            Clock.now += 0.5  # data
            loss = model(features(rank, number)).square().mean()
            loss.backward()
            Clock.now += 0.125  # clipping
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(features(rank, number))  # an evaluation: three seconds of forward passes
            model.train()
    return [json.loads(line) for line in (folder / "watch" / "rank0.jsonl").read_text().splitlines()]


def test_each_second_is_in_the_phase_in_which_it_passed(tmp_path):
    head, first, *lines = run_forked(watch_timed, 1, tmp_path)[0]
    assert [stage["name"] for stage in head["stages"]] == ["layers.2", "layers.1", "layers.0"]
    assert first["seconds"] == 63.5
    for line in lines:
        assert line["seconds"] == 0.5 + 3 + 60 + 0.125 + 0.25 + 3
        assert (line["forward_s"], line["backward_s"], line["optimizer_s"]) == (3, 60, 0.25)
        # after an evaluation, nothing says where it ends and loading begins
        assert (line["outside_s"], line["data_s"], line["wait_s"]) == (0.125 + 3 + 0.5, 0, 0)
        assert line["stage_s"] == [33, 53, 63]
        assert (line["compute_s"], line["microbatch_s"]) == (63, [63])


def accumulate_timed(rank, folder, passes, ahead, is_ddp):
    """A loop that loads a batch in 4 s and prepares it in 1 s, before its pass or after the pass before."""

    class Loaded(torch.utils.data.Dataset):
        def __len__(self):
            return 5 * passes

        def __getitem__(self, _):
            Clock.now += 4.0
            return torch.ones(4)

    def fetch():
        x = next(batches, None)
        Clock.now += 1.0
        return x

    model = DistributedDataParallel(mlp()) if is_ddp else mlp()
    optimizer = TimedOptimizer(model.parameters(), lr=0.1)
    with straggle.Watch(model, folder, clock=lambda: Clock.now):
        batches = iter(torch.utils.data.DataLoader(Loaded()))
        x = fetch()
        for _ in range(5):
            for number in range(passes):
                is_last = number == passes - 1
                with model.no_sync() if is_ddp and not is_last else nullcontext():
                    model(x).square().mean().backward()
                if ahead or not is_last:
                    x = fetch()
            Clock.now += 0.125  # clipping
            optimizer.step()
            optimizer.zero_grad()
            Clock.now += 2.0  # logging
            if not ahead:
                x = fetch()
    return [json.loads(line) for line in (folder / "watch" / "rank0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("is_ddp", [True, False], ids=["DDP", "a loop"])
@pytest.mark.parametrize("ahead", [False, True], ids=["before its pass", "after the pass before"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_batch_of_each_pass_of_a_step_is_loaded_and_prepared_and_not_between_its_passes(
    passes, ahead, is_ddp, tmp_path
):
    _, _, *lines = run_forked(accumulate_timed, 1, tmp_path, passes, ahead, is_ddp)[0]
    clear = lines[:-1]  # the last has no batch to fetch
    assert len(clear) == 3
    prepared_s = 1.0 if ahead else 0.0  # of the next step's first batch: before the optimizer nothing tells what it is
    for line in clear:
        assert line["data_s"] == passes * 5.0 - prepared_s
        assert line["outside_s"] + line["wait_s"] == 0.125 + prepared_s
        assert (line["loop_end_s"], line["optimizer_s"]) == (2.0, 0.25)


def freeze_after_watching(rank, folder):
    model = DistributedDataParallel(mlp(), find_unused_parameters=True)
    with straggle.watch(model, folder):
        first = next(model.module.parameters())
        first.requires_grad_(False)
        for number in range(4):
            if number == 2:
                first.requires_grad_(True)
            model(features(rank, number)).square().mean().backward()
    return [json.loads(line) for line in (folder / "watch" / "rank0.jsonl").read_text().splitlines()]


def test_parameters_may_be_frozen_and_unfrozen_while_they_are_watched(tmp_path):
    head, *lines = run_forked(freeze_after_watching, 1, tmp_path)[0]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert len(line["stage_s"]) == len(head["stages"])
        assert line["stage_s"] == sorted(line["stage_s"])
        assert 0 < line["stage_s"][-1] <= line["compute_s"]


def close(rank, folder):
    model = DistributedDataParallel(mlp())
    callbacks = len(gc.callbacks)
    watched = straggle.watch(model, folder)
    assert len(gc.callbacks) == callbacks + 1
    watched.close()
    watched.close()
    left = [*model._forward_hooks, *model._forward_pre_hooks, *model.module._forward_pre_hooks]
    left += [hook for p in model.parameters() for hook in p._post_accumulate_grad_hooks or ()]
    return left, len(gc.callbacks) - callbacks


def test_closed_watch_leaves_no_hook(tmp_path):
    assert run_forked(close, 1, tmp_path) == [([], 0)]


def test_pause_is_time_in_which_the_process_did_nothing():
    times = SimpleNamespace(now=0.0, cpu=0.0)
    detector = PauseDetector(lambda: times.now, lambda: times.cpu)
    times.now, times.cpu = 3.0, 3.0  # three seconds of work that let no other thread run
    detector.credit("data")
    times.now = 5.0  # stopped for two
    detector.credit("backward")
    detector.collecting("start", {})
    times.now += 0.01
    detector.collecting("stop", {})
    detector.credit("forward")
    pauses = detector.take()
    assert pauses.keys() == {"backward", "forward"}
    assert pauses["backward"]["stopped_s"] == pytest.approx(2.0, abs=0.05)
    assert pauses["forward"] == {"gc_s": pytest.approx(0.01)}
    assert detector.take() == {}
