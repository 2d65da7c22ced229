"""The advice of errors about data, policies and members: made, followed, and trained with."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from advice import case, check, follow, pattern, plain, sgd, stepping, train, trains, wrapping
from ranks import digest, logged, run_forked, staged
from stores import serve_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted
from training import Stopper, features, mlp

import straggle
from straggle import Estimate, Estimator, StagedDataParallel
from straggle.merge.rows.telemetry import name_hash

SAMPLES = TensorDataset(features(0, 0, rows=24))

# -- data


class Stream(IterableDataset):
    def __iter__(self):
        rank = dist.get_rank()
        return iter([(row,) for row in features(rank, 0, rows=8 + 8 * rank)])


def one_batch(model, optimizer, x):
    plain(model, optimizer, x)


def loop(batches_of, step=one_batch, logger="straggle"):
    """A way whose loop is over ``batches_of(model)``; as a refusal, it gives the first warning."""

    def way(rank):
        module = mlp()
        before = digest(module.parameters())
        with staged(module) as model:
            optimizer, number = sgd(model), 0
            for number, batch in enumerate(batches_of(model)):
                step(model, optimizer, *batch)
                if number == 40:
                    break
            assert number, "there are no batches"
        assert digest(module.parameters()) != before, "it does not train"
        return module

    return way


def warned_in(way):
    def refused(rank):
        with logged("straggle.data.rebalance") as warnings:
            way(rank)
        return warnings[0] if warnings else None

    return refused


def dealt(loader, **ways):
    return loop(lambda model: straggle.DealtLoader(model, loader, **ways))


def late(loader, **ways):
    return loop(lambda model: straggle.LateLoader(model, loader, **ways))


def joined(loader):
    return loop(lambda model: model.join(loader))


def by_shares(model):
    """Batches of a sampler of one's own, of as many samples as `Rebalance` says."""
    rebalance = straggle.Rebalance(model, total=16)
    for number in range(3):
        share = rebalance.share()
        yield (features(model.rank, number, rows=share.count), share.count)


def weighed(model, optimizer, x, count):
    with model.step() as step:
        step.weight = count
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def unequal(model):
    """The shares differ; the loop may set weights."""
    rebalance = straggle.Rebalance(model, total=16)
    rebalance.load_state_dict({**rebalance.state_dict(), "shares": [4, 12]})
    for number in range(3):
        count = rebalance.share().count
        yield (features(model.rank, number, rows=count), count)


def epochs(model):
    one = straggle.Epochs(model, num_samples=24, batch_size=4)
    return one.batches(DataLoader(SAMPLES, batch_sampler=one.sampler))


def wrap_again(new_loader):
    """In the middle of an epoch; the loader is still that of the model that was closed, or a new one."""

    def way(rank):
        module = mlp()
        with staged(module) as model:
            loader = straggle.DealtLoader(model, DataLoader(SAMPLES, 4))
            x = next(iter(loader))[0]
            plain(model, sgd(model), x)
        with staged(module) as model:
            if new_loader:
                loader = straggle.DealtLoader(model, DataLoader(SAMPLES, 4))
            optimizer = sgd(model)
            for (x,) in loader:
                plain(model, optimizer, x)
        return module

    return way


def no_step(model, optimizer, x):
    model(x)


def skipped(model, optimizer, x):
    with model.step():
        if x.sum() > 0:
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_steps(model, optimizer, x):
    for half in x.chunk(2):
        plain(model, optimizer, half)


def streamed(model):
    """Batches of a stream, of which a slow rank takes fewer samples."""
    rebalance = straggle.Rebalance(model, total=8)
    rows = iter(Stream())
    for _ in range(2):
        count = rebalance.share().count
        yield (torch.stack([next(rows)[0] for _ in range(count)]), count)


def pull(model, optimizer, parts):
    with model.step() as step:
        for (x,) in step.pull(parts):
            model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def drawn(dataset):
    def steps(model):
        batches = straggle.MicroBatches(dataset, size=4)
        with contextlib.closing(batches):
            yield from ((batches.of(range(8 * number, 8 * number + 8)),) for number in range(3))

    return loop(steps, pull)


def other_lengths(rank):
    return [(features(rank, number),) for number in range(1 + 2 * rank)]


def ended_early(rank):
    with staged(mlp()) as model:
        for (x,) in other_lengths(rank):
            plain(model, sgd(model), x)


class OfOther:
    """A state of as many samples."""

    def __init__(self, make, other):
        self.make, self.other = make, other

    def refused(self, _rank):
        with staged(mlp()) as model:
            self.make(model, 16).load_state_dict(self.make(model, self.other).state_dict())

    def begun_without(self, rank):
        with staged(mlp()) as model:
            self.make(model, 16)
            return train(model, rank)


DEALT = OfOther(lambda model, total: straggle.Rebalance(model, total=total), 32)
EPOCHS = OfOther(lambda model, total: straggle.Epochs(model, num_samples=total, batch_size=2), 17)

OWN = "whose shares a sampler of your own can deal out"
DATA = {
    "stream": case(
        "that could be dealt out: use model.join(loader)",
        dealt(DataLoader(Stream(), 4)),
        joined(DataLoader(Stream(), 4)),
    ),
    "batch sampler": case(
        "give it batch_size=, which is dealt out",
        dealt(DataLoader(SAMPLES, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 4, False))),
        dealt(DataLoader(SAMPLES, batch_size=4)),
    ),
    "drop_last": case(
        "a last step with fewer of them has less weight; leave it out",
        dealt(DataLoader(SAMPLES, 5, drop_last=True)),
        dealt(DataLoader(SAMPLES, 5)),
    ),
    "sampler": case(
        OWN,
        dealt(DataLoader(SAMPLES, 4, sampler=Weighted([1.0] * 24, 24))),
        dealt(DataLoader(SAMPLES, 4, shuffle=True)),
        dealt(DataLoader(SAMPLES, 4, shuffle=False)),
        loop(by_shares, weighed),
    ),
    "cost of too few": case(
        "give one for each, or a function",
        dealt(DataLoader(SAMPLES, 4), cost=[1.0]),
        dealt(DataLoader(SAMPLES, 4), cost=[1.0] * len(SAMPLES)),
        dealt(DataLoader(SAMPLES, 4), cost=lambda number: 1.0 + number),
    ),
    "cost that is none": case(
        "must be a positive number, such as its tokens",
        dealt(DataLoader(SAMPLES, 4), cost=lambda number: number),
        dealt(DataLoader(SAMPLES, 4), cost=lambda number: 1 + number),
    ),
    "weights": case(
        "write step.weight = count in the step",
        warned_in(loop(unequal, lambda model, optimizer, x, _: plain(model, optimizer, x))),
        loop(unequal, weighed),
    ),
    "wrapped again": case(
        "if the model was wrapped again, make the loader again with the new one",
        wrap_again(new_loader=False),
        wrap_again(new_loader=True),
    ),
    "no step": case("leave a batch out inside of `with model.step():`", loop(epochs, no_step), loop(epochs, skipped)),
    "two steps": case("Epochs needs one step for each", loop(epochs, two_steps), loop(epochs)),
    "micro-batches of a stream": case(
        "use a map-style dataset, or straggle.Rebalance, which gives slow ranks fewer samples of streams too",
        drawn(Stream()),
        drawn(SAMPLES),
        loop(streamed, weighed),
    ),
    "uneven": case(
        "or it called sys.exit; use model.join(loader) for uneven data",
        ended_early,
        loop(lambda model: model.join(other_lengths(model.rank))),
    ),
    "no length": case(
        "has no length, and a late rank must end with the others: give num_steps=",
        late(DataLoader(Stream(), 4)),
        late(DataLoader(Stream(), 4), num_steps=2),
    ),
    "shares of another total": case("begin without them", DEALT.refused, DEALT.begun_without),
    "epochs of other data": case(
        "this state is of {} samples, not of {}: begin without it", EPOCHS.refused, EPOCHS.begun_without
    ),
}

# -- policies and members


class Gives(Estimator):
    """Contributes this for a parameter that a late rank did not reach."""

    def __init__(self, of):
        self.of = of

    def contribution(self, parameter):
        return self.of(parameter)


class Says(straggle.Deadline):
    def __init__(self, seconds):
        self.seconds = seconds

    def decide(self, _history):
        return self.seconds


def stopped(estimate):
    """Rank 1 is late in each step, and what its estimator gives takes part."""

    def way(rank):
        module = mlp()
        stopper, before = Stopper(module), digest(module.parameters())
        with staged(module, estimator=Gives(estimate)) as model:
            optimizer = sgd(model)
            for number in range(3):
                with model.step() as step:
                    stopper.arm(step, 2 if rank else None)
                    model(features(rank, number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert digest(module.parameters()) != before
        return module

    return way


class Counter:
    """Has no state, or one."""

    def __init__(self):
        self.number = 0


class Saved(Counter):
    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def register(make):
    def way(rank):
        with staged(mlp(), members=straggle.Elastic()) as model:
            model.register_state(counter=make())
            return train(model, rank)

    return way


def watched(rank):
    """DDP, with its times in a folder."""
    model = DistributedDataParallel(mlp())
    with tempfile.TemporaryDirectory() as folder, straggle.watch(model, folder):
        for number in range(3):
            model(features(rank, number)).square().mean().backward()
            sgd(model).step()
            model.zero_grad()
        assert len(Path(folder, "watch", f"rank{rank}.jsonl").read_text().splitlines()) > 1
    return model


def reported(rank):
    """`StagedDataParallel` has reports of its own."""
    with staged(mlp()) as model:
        module = train(model, rank)
        assert model.last_report.step == 2
        return module


def watch_another(rank):
    with staged(mlp()) as model:
        straggle.watch(model)


def same_hash():
    """Two names that have."""
    names = {}
    number = 0
    while (first := names.setdefault(name_hash(f"loss_{number}"), f"loss_{number}")) == f"loss_{number}":
        number += 1
    return first, f"loss_{number}"


def logs(names):
    def step(model, optimizer, x):
        with model.step() as step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(**dict.fromkeys(names, loss))
        optimizer.step()
        optimizer.zero_grad()

    return step


NO_GROUP = "straggle needs a process group: launch with torchrun and call torch.distributed.init_process_group() before"
NO_MEMBERS = 'has a copy of the model: write dist.init_process_group("gloo"), or leave members out'


def register_fake():
    """A backend that does nothing."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401


def init_process_groups(rank, ports):
    """With each backend; what cannot be formed again is one that does nothing."""
    register_fake()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=pattern(NO_GROUP)):
        StagedDataParallel(mlp())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(ports[0])}
    dist.init_process_group("cpu:gloo,cuda:fake")
    no_gloo = patch.object(dist, "get_backend_config", return_value="cpu:fake,cuda:fake")
    with no_gloo, pytest.raises(ValueError, match=pattern(NO_MEMBERS)):
        StagedDataParallel(mlp(), members=straggle.Elastic())
    modules = [trains()(rank)]
    for port, backend in ((ports[1], []), (ports[2], ["gloo"])):
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
        torch.distributed.init_process_group(*backend)
        modules.append(trains(members=straggle.Elastic())(rank))
    return [digest(module.parameters()) for module in modules]


FIRST, SECOND = same_hash()
POLICIES = {
    "watched": case(
        "it has reports of its own; use model.last_report, or give advise the trace of straggle train",
        watch_another,
        watched,
        reported,
    ),
    "same hash": case(
        "give one of them another name", stepping(logs([FIRST, SECOND])), trains(step=logs([FIRST, "another"]))
    ),
    "no estimate": case("give a straggle.Estimate, or None to abstain", stopped(lambda p: p), stopped(lambda _: None)),
    "weight of an estimate": case(
        "must be a finite number of at least 0, such as 0.5",
        stopped(lambda p: Estimate(torch.ones_like(p), -1.0)),
        stopped(lambda p: Estimate(torch.ones_like(p), 0.5)),
    ),
    "shape of an estimate": case(
        "they must be the same",
        stopped(lambda _: Estimate(torch.ones(3), 0.5)),
        stopped(lambda p: Estimate(torch.ones_like(p), 0.5)),
    ),
    "no seconds": case(
        "give a number of seconds of at least 0, or math.inf to wait for all ranks",
        stepping(plain, deadline=Says("soon")),
        trains(deadline=Says(60.0)),
        trains(deadline=Says(float("inf"))),
    ),
    "members of a group": case(
        "members=Elastic() is for all ranks of the job: leave process_group out",
        lambda rank: wrapping(members=straggle.Elastic(), process_group=dist.new_group([0, 1]))(rank),
        trains(members=straggle.Elastic()),
    ),
    "no state": case("has no state_dict() and load_state_dict()", register(Counter), register(Saved)),
}


def run_cases(rank, name):
    return follow(rank, globals()[name])


@pytest.mark.parametrize("name", ["DATA", "POLICIES"])
def test_advice_on_data_and_policies_can_be_followed(name):
    check(*run_forked(run_cases, 2, name))


def test_process_group_is_made_as_the_texts_say():
    stores = [serve_store() for _ in range(3)]
    first, second = run_forked(init_process_groups, 2, [store.port for store in stores])
    assert first == second
