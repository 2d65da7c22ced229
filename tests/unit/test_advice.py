"""The advice of errors about a value can be followed: it is refused, and one that the text allows is accepted."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sysconfig
from functools import partial

import pytest
import torch
from advice import pattern
from training import mlp
from watched import write_trace, write_watch

import straggle
from straggle import Elastic, LateHandling, StagedBackward
from straggle.advise import timings
from straggle.backward.stage_profile import measure_stages
from straggle.commands.launching import launch_options, store_host
from straggle.data.rebalance import check_shares
from straggle.lab import faults
from straggle.lab.simulate import communication, delays, pulled, units
from straggle.lab.workloads import digits, paced, synthetic, text, workload
from straggle.members.healed import state_wire
from straggle.merge.wire.contents import bytes_of
from straggle.observe import metrics_endpoint
from straggle.observe.numbers import run
from straggle.policies.deadline import as_deadline
from straggle.policies.shares.cost import check_cost
from straggle.pools.pool import Pool

SGD = torch.optim.SGD
NO_DELAY, SMALL = delays.NoDelay(), {"width": 8, "depth": 1, "num_samples": 64}
INF, NAN = math.inf, math.nan


def backward(budget_s=None, **words):
    """A pass of a `StagedBackward`, whose gradients are all there."""
    module = mlp()
    StagedBackward(module).backward(module(torch.ones(3, 4)).sum(), budget_s=budget_s, **words)
    assert all(parameter.grad is not None for parameter in module.parameters())


def backward_of(make, *args):
    module = mlp()
    StagedBackward(module).backward(make(module(torch.ones(3, 4))), *args)


def budget_within(of_the_step):
    module = mlp()
    staged = StagedBackward(module)
    with staged.step(60.0 if of_the_step else None):
        staged.backward(module(torch.ones(3, 4)).sum(), budget_s=None if of_the_step else 60.0)


def one_after_another(nested):
    module = mlp()
    staged = StagedBackward(module)
    if nested:
        with staged.step(), staged.step():
            pass
    for _ in range(2):
        with staged.step():
            staged.backward(module(torch.ones(3, 4)).sum())


def staged_of(module, **words):
    staged = StagedBackward(module, **words)
    staged.backward(module(torch.ones(3, 4)).sum())


def measured(num_steps):
    module = mlp()
    measure_stages(module, lambda: module(torch.ones(3, 4)).sum(), num_steps=num_steps)


class OfTwoRanks:
    """What a sampler asks a wrapped model."""

    rank, world_size = 0, 2

    def register_step_hook(self, _hook):
        return self

    def remove(self):
        pass


def with_a_model(use):
    model = OfTwoRanks()
    return use(model), model


def sent(state):
    """As a rank that comes back gets it."""
    encoded = state_wire.encode(state)
    return state_wire.decode(encoded.header, encoded.data)


def with_file(path, name, content):
    path.mkdir(exist_ok=True)
    (path / name).write_text(content)
    return path / name


def launch(*words):
    """The launcher's command line; its complaint as an error."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            launch_options.arguments([*words, "train.py"], {})
    except SystemExit:
        raise ValueError(complaint.getvalue()) from None


def standard_library_in(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(path)})
        text.Text()


def lacking(folder):
    (folder / "watch" / "rank1.jsonl").unlink()
    return folder


def without_older(folder):
    for rank in (4, 5):
        (folder / "watch" / f"rank{rank}.jsonl").unlink()
    return folder


COUNT = "{}={}: must be an integer of at least {}"
NUMBER = "{}={}: must be a number {}, such as {}"
FIRST_K, FIXED = straggle.FirstK(1), straggle.FixedDeadline(1.0)
PARAMETERS = list(mlp().parameters())
AdamMomentum = partial(straggle.OptimizerMomentum, torch.optim.Adam(PARAMETERS))
Epochs = partial(straggle.Epochs, OfTwoRanks())
Units = partial(units.Work, 1.0)
Part = partial(workload.Shard(8, rank=0, world_size=2, batch_size=1, seed=0).part, 0, total=4, first=2)
Words = partial(text.Text, __file__)  # a text of enough bytes
Shard = partial(workload.Shard, num_samples=100, rank=0, world_size=2, batch_size=4, seed=0)
Synthetic = partial(synthetic.Synthetic, **SMALL)
# by text: constructors, one argument of each, values that it refuses and ones that it takes, as the text says
ARGUMENTS = {
    # backward
    "budget_s={}: must be a positive number of seconds (or None)": [(backward, "budget_s", [0.0], [60.0, None])],
    "num_steps={}: at least one pass is needed": [(measured, "num_steps", [0], [1])],
    # policies
    "budget_s={}: a deadline needs a positive number of seconds (or deadline=None)": [
        (straggle.FixedDeadline, "budget_s", [0, 0.0, NAN], [0.5])
    ],
    "q={}: a quantile lies between 0 and 1, such as 0.5 for the median": [
        (straggle.QuantileDeadline, "q", [90, 1.1], [0.5])
    ],
    NUMBER: [
        (partial(straggle.QuantileDeadline, 0.9), "slack", [0.5, 0.9], [1.2]),
        (partial(straggle.FirstK, 1), "grace_s", [-1.0], [0.05]),
        (straggle.AutoDeadline, "least_gain", [-1.0], [0.1]),
        (straggle.AutoDeadline, "max_over_median", [1.0, INF], [1.4]),
    ],
    COUNT: [
        (straggle.FirstK, "k", [0, True], [1]),
        (partial(straggle.FirstK, 1), "warmup_steps", [0], [1]),
        (partial(straggle.FixedDeadline, 1.0), "warmup_steps", [-1], [0]),
        (partial(straggle.QuantileDeadline, 0.5), "window", [0], [1]),
        (partial(straggle.QuantileDeadline, 0.5), "warmup_steps", [0], [1]),
        (straggle.AutoDeadline, "window", [0], [1]),
        (straggle.AutoDeadline, "warmup_steps", [0], [1]),
        (straggle.AutoDeadline, "every", [0], [1]),
        (partial(straggle.DropBudget, FIRST_K, 0.5), "window", [0], [2]),
        (LateHandling, "quorum", [0], [1]),
        (LateHandling, "max_lag", [-1, 1.5], [0]),
        (straggle.Merge, "check_every", [-1], [0]),
        (partial(check_shares, 4, total=16), "min_share", [0], [1]),
        (partial(check_shares, 4, total=16), "multiple_of", [0], [1]),
        (partial(check_shares, 4, total=16), "window", [1], [2]),
        (partial(straggle.MicroBatches, [1]), "size", [0], [1]),
        (partial(straggle.MicroBatches, [1], size=1), "num_workers", [-1], [0]),
        (partial(Epochs, batch_size=1), "num_samples", [0], [2]),
        (partial(Epochs, num_samples=4), "batch_size", [0], [1]),
        (Units, "num_stages", [0], [1]),
        (Units, "num_microbatches", [0], [1]),
        (Units, "checks_per_stage", [-1], [0]),
    ],
    "grace_s={}: must be a number of seconds, and seconds cannot be negative": [
        (LateHandling, "grace_s", [-1, -0.1, NAN], [0])
    ],
    "give_up_s={}: must be a finite number of seconds, at least 1": [(LateHandling, "give_up_s", [INF, 0.5], [1])],
    "stages={}: this model can be divided into 1 to {} stages": [
        (partial(StagedBackward, mlp()), "stages", [0, -1, 4], [1, 3])
    ],
    "granularity={}: choose one of {}": [
        (LateHandling, "granularity", ["layer"], ["stage", "microbatch", "step"]),
        (partial(StagedBackward, mlp()), "granularity", ["layer", "step"], ["stage", "microbatch"]),
    ],
    "late_by={}: choose one of {}": [(LateHandling, "late_by", ["clock"], ["host", "device"])],
    "log_every_s={}: must be a positive number of seconds, such as 60 (infinite: what is dropped is not logged)": [
        (straggle.Merge, "log_every_s", [0], [60, INF])
    ],
    "stuck_after_s={}: must be a positive number of seconds, such as 10 (infinite: no rank is reported as stuck)": [
        (LateHandling, "stuck_after_s", [0], [10, INF])
    ],
    "decay={}: must be at least 0 and below 1, such as 0.9": [(straggle.MovingAverage, "decay", [1, 1.0], [0.9])],
    "weight={}: relative to a computed gradient's weight of 1, so from 0 to 1": [
        (straggle.LastOwn, "weight", [2.0, 1.5], [1.0]),
        (straggle.LastMerged, "weight", [-0.1], [0.0]),
        (straggle.MovingAverage, "weight", [2], [0.5]),
        (AdamMomentum, "weight", [2], [0.5]),
    ],
    "absence_gain={}: must be a number, at least 1 (inf: no member is put out)": [
        (Elastic, "absence_gain", [0.5], [1, INF])
    ],
    "inner={}: give a straggle.Deadline": [
        (straggle.Shadow, "inner", [0.5], [FIXED]),
        (partial(straggle.DropBudget, share=1.0), "inner", [0.5], [FIXED]),
    ],
    "share={}: must lie above 0 and at most at 1, such as 0.05": [
        (partial(straggle.DropBudget, FIRST_K), "share", [5, 0.0], [0.05])
    ],
    "than the budget of the full window; give window={} or more": [
        (partial(straggle.DropBudget, FIRST_K, 0.05), "window", [10], [20])
    ],
    "deadline={}: give a straggle.Deadline, a number of seconds, or None": [
        (as_deadline, "deadline", ["1", True, [1.0], straggle.FixedDeadline], [FIXED, 2, None])
    ],
    # merge and members
    "{}={}: choose one of {}": [(straggle.Merge, "buffers", ["sum"], ["mean", "rank0", "local"])],
    "wire_dtype={}: choose bfloat16 or None; other dtypes have too small a range for gradients, or save nothing": [
        (straggle.Merge, "wire_dtype", [torch.float16], ["bfloat16", None])
    ],
    "min_ranks={}: must be an integer, at least 1": [(Elastic, "min_ranks", [0, -1, 1.5, "2", True], [1])],
    "suspect_s={}: must be a finite number of seconds, at least 0.5": [
        (Elastic, "suspect_s", [0.4, 0, -1.0, INF, NAN, True], [0.5])
    ],
    "min_ranks={}: there are only {} ranks": [(lambda min_ranks: Elastic(min_ranks).least(4), "min_ranks", [5], [4])],
    "quorum={}: there are only {} ranks": [(lambda quorum: LateHandling(quorum).quorum_of(4), "quorum", [5], [4])],
    # data
    "least_gain={}: must be a positive number, such as 0.05 for a twentieth": [
        (partial(check_shares, 2, total=8), "least_gain", [0, 0.0], [0.05])
    ],
    "total={}: must be a multiple of {}, and {} at least for each of {} ranks": [
        (partial(check_shares, 4, multiple_of=4), "total", [10, 12], [16]),
        (partial(check_shares, 4, min_share=5), "total", [16], [20]),
        (partial(check_shares, 4, min_share=3, multiple_of=8), "total", [16], [32]),
    ],
    "repeat_up_to={}: must be a share of the gradient, from 0 to 1": [
        (partial(Epochs, num_samples=4, batch_size=1), "repeat_up_to", [2], [1])
    ],
    "must be a positive number, such as the tokens": [(check_cost, "cost", [0, -1.0, INF, NAN, True, "many"], [64.0])],
    # observing
    "port={}: must be an integer from 0 (any that is free) to 65535, or null for none": [
        (metrics_endpoint.check_port, "port", [70000], [0, None])
    ],
    # faults
    "factor is {}; give a number from 1.0 (no delay), such as 2.0 for twice as long": [
        (faults.Slowdown, "factor", [0.5, NAN], [2.0])
    ],
    "probability is {}; give a number from 0.0 to 1.0, per micro-batch": [
        (partial(faults.RandomDelay, seconds=1), "probability", [2, 1.5], [0.5])
    ],
    "chance is {}; give a number from 0.0 to 1.0, per step": [
        (partial(faults.Slowdown, 2.0), "chance", [2, -0.1, 1.1], [0.5])
    ],
    "ranks are {}; give ranks from 0, or leave them out for every rank": [
        (partial(faults.Slowdown, 2.0), "ranks", [[-1], []], [[0], None]),
        (lambda ranks: faults.Stall(1, seconds=1.0, rank=ranks[0]), "ranks", [[-2]], [[0]]),
    ],
    "phase is {}; give one of {}": [
        (partial(faults.RandomDelay, 0.5, seconds=1), "phase", ["update"], ["data", "forward", "backward"]),
        (partial(faults.Kill, 1, rank=0), "phase", ["update"], ["data", "forward", "backward"]),
    ],
    "{} is {}; give a finite number of seconds from 0.0": [
        (partial(faults.RandomDelay, 0.5), "seconds", [-1, -1.0], [0.0]),
        (partial(faults.Stall, 1, rank=0), "seconds", [INF], [0.0]),
        (faults.DropComputeDelay, "base_s", [-1.0], [0.0]),
    ],
    "factor is {}; give a finite number from 0.0 (no delay); the paper's is 1.0": [
        (partial(faults.DropComputeDelay, 1.0), "factor", [-1], [1.0])
    ],
    "every is {}; give a number of steps from 1, or leave it out to stall once": [
        (partial(faults.Stall, 0, seconds=1, rank=0), "every", [0], [1, None])
    ],
    "step is {}; steps count from 0": [
        (partial(faults.Kill, rank=0), "step", [-1], [0]),
        (partial(faults.Stall, seconds=1, rank=0), "step", [-1], [0]),
    ],
    # the simulator
    "{}={}: must be a finite number from 0 on": [(communication.Constant, "seconds", [-1], [0])],
    "inner={}: give delays, such as straggle.lab.simulate.delays.NoDelay()": [
        (partial(delays.Stalls, probability=0.5, seconds=1), "inner", ["none"], [NO_DELAY])
    ],
    "lasts_steps={}: must be a number of steps from 1 on": [
        (partial(delays.SlowRanks, NO_DELAY, 0.25, 2), "lasts_steps", [0], [1])
    ],
    "share={}: with lasts_steps={} it must be below lasts / (1 + lasts)": [
        (partial(delays.SlowRanks, NO_DELAY, factor=2, lasts_steps=1), "share", [0.5], [0.49])
    ],
    "{}={}: must lie between 0 and 1": [(partial(delays.Stalls, NO_DELAY, seconds=1), "probability", [2], [1])],
    "step_s={}: must be a positive number of seconds": [(units.Work, "step_s", [0], [1])],
    "forward_share={}: must be a share of a micro-batch's time, from 0 to 1": [(Units, "forward_share", [2], [1])],
    "overhead_s={}: must be a number of seconds": [(Units, "overhead_s", [-1], [1])],
    "only the last micro-batch comes in stages; use 0, or one micro-batch": [
        (partial(Units, num_microbatches=2), "checks_per_stage", [1], [0]),
        (partial(Units, checks_per_stage=1), "num_microbatches", [2], [1]),
    ],
    "checks_per_stage={} with granularity={}: use 0": [
        (lambda checks_per_stage: Units(checks_per_stage=checks_per_stage).units("step"), "checks_per_stage", [1], [0])
    ],
    # workloads
    "channels is {}; it must be a multiple of {}, such as 16": [(digits.Digits, "channels", [6], [16])],
    "validation_share is {}; it must be between 0 and 1, such as 0.2": [
        (digits.Digits, "validation_share", [2, 0], [0.2])
    ],
    "validation_share is {}; it must be between 0 and 1, such as 0.05": [(Words, "validation_share", [1, 1.0], [0.05])],
    "seconds is {}; give a number of seconds from 0.0": [(partial(paced.Paced, Synthetic()), "seconds", [-1], [0.0])],
    "rank is {}; with world_size={} it must be from 0 to {}": [(Shard, "rank", [2, -1], [0, 1])],
    "classes is {}; there must be at least 2 to tell apart": [(Synthetic, "classes", [1], [2])],
    "width {} is not divisible by heads {}; use a multiple, such as {}": [(Words, "width", [10, 30], [64])],
    "{} is {}; it must be at least 1": [
        *((Synthetic, name, [0], [1]) for name in ("width", "depth", "num_samples")),
        *((Words, name, [0, -1], [1]) for name in ("depth", "context")),
        *((Shard, name, [0], [1]) for name in ("world_size", "batch_size")),
        (digits.Digits, "depth", [0], [1]),
    ],
}
# what takes more than one argument
VALUES = {
    "got {} tensors and {} gradients: give one for each, or None": (
        lambda _: backward_of(lambda out: [out.sum(), out.mean()], torch.ones(())),
        lambda _: backward_of(lambda out: [out.sum(), out.mean()], [torch.ones(()), None]),
        lambda _: backward_of(lambda out: [(out.sum() + out.mean())], None),
    ),
    "backward from a tensor of shape {} needs gradient=, of the same shape (or reduce it to a scalar first, such as": (
        lambda _: backward_of(lambda out: out),
        lambda _: backward_of(lambda out: out, torch.ones(3, 2)),
        lambda _: backward_of(lambda out: out.mean()),
    ),
    "budget_s is the step's: write `with staged.step(budget_s)`": (
        lambda _: budget_within(of_the_step=False),
        lambda _: budget_within(of_the_step=True),
    ),
    "a step() cannot be nested in another of the same model": (
        lambda _: one_after_another(nested=True),
        lambda _: one_after_another(nested=False),
    ),
    "{} has no parameter with requires_grad=True: there is nothing to compute": (
        lambda _: staged_of(mlp().requires_grad_(False)),
        lambda _: staged_of(mlp().requires_grad_(True)),
    ),
    "{} keeps no momentum: use Adam, AdamW or SGD(momentum=...)": (
        lambda _: straggle.OptimizerMomentum(SGD(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(torch.optim.Adam(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(torch.optim.AdamW(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(SGD(mlp().parameters(), momentum=0.9)),
    ),
    "{}(Shadow(...)): Shadow goes around all the others": (
        lambda _: straggle.DropBudget(straggle.Shadow(straggle.FirstK(1)), 0.05),
        lambda _: straggle.Shadow(straggle.DropBudget(straggle.FirstK(1), 0.05)),
    ),
    "step.pull() is for {} ranks at most, not {}: use Rebalance there": (
        lambda _: Pool(9000, (1,) * 9000),
        lambda _: check_shares(9000, total=9000),
    ),
    "which cannot be sent: give the object that keeps it a state_dict() of None, bool, int, float, str, list, tuple,": (
        lambda _: sent({"counter": object()}),
        lambda _: sent({"counter": {"a": [None, True, 1, 0.5, "b", b"c", (torch.ones(2),)]}}),
    ),
    "has the key {}, which cannot be sent: let its keys be str or int": (
        lambda _: sent({(0, 1): 2}),
        lambda _: sent({"0, 1": 2, 3: 4}),
    ),
    "which cannot be sent: let its state_dict() give a dense tensor": (
        lambda _: sent({"a": torch.eye(2).to_sparse()}),
        lambda _: sent({"a": torch.eye(2)}),
    ),
    "and more than its elements: use a plain dense one": (
        lambda _: bytes_of(torch.eye(2).to_sparse()),
        lambda _: bytes_of(torch.eye(2)),
    ),
    "certfile and keyfile belong together: give both, or neither": (
        lambda _: metrics_endpoint.Security(certfile="a"),
        lambda _: metrics_endpoint.Security(certfile="a", keyfile="b"),
        lambda _: metrics_endpoint.Security(),
    ),
    "{}: must be names of modules, with commas between them": (
        lambda _: launch("--preload", "torch numpy"),
        lambda _: launch("--preload", "torch,numpy"),
    ),
    "{} is no HOST:PORT, such as node0:29500": (
        lambda _: store_host.StoreAddress.of("node0"),
        lambda _: store_host.StoreAddress.of("node0:29500"),
    ),
    "there is nothing to draw; give work.num_microbatches=8": (
        lambda _: pulled.simulate_pulled(2, 2, units.Work(1.0), NO_DELAY, straggle.FixedDeadline(1)),
        lambda _: pulled.simulate_pulled(
            2, 2, units.Work(1.0, num_microbatches=8), NO_DELAY, straggle.FixedDeadline(1)
        ),
    ),
    "use a smaller batch_size, fewer ranks or more data": (
        lambda _: workload.Shard(8, rank=0, world_size=2, batch_size=8, seed=0),
        lambda _: workload.Shard(8, rank=0, world_size=2, batch_size=4, seed=0),
        lambda _: workload.Shard(8, rank=0, world_size=1, batch_size=8, seed=0),
        lambda _: workload.Shard(16, rank=0, world_size=2, batch_size=8, seed=0),
    ),
    "the part must lie in the step, and the step in the epoch": (
        lambda _: workload.Shard(8, rank=0, world_size=2, batch_size=1, seed=0).part(0, total=4, first=2, count=4),
        lambda _: workload.Shard(8, rank=0, world_size=2, batch_size=1, seed=0).part(0, total=4, first=2, count=2),
    ),
    "the {} text has {} bytes; context={} needs {}: give {}": (
        lambda path: text.Text(with_file(path, "t", "a" * 50)),
        lambda path: text.Text(with_file(path, "t", "a" * 4000)),
        lambda path: text.Text(with_file(path, "t", "a" * 50), context=1),
        lambda path: text.Text(with_file(path, "t", "a" * 200), validation_share=0.4),
    ),
    "text path not found: {}; give a file or a folder, or none for Python's own sources": (
        lambda path: text.Text(path / "nowhere"),
        lambda path: text.Text(with_file(path, "t", "a" * 4000)),
        lambda path: text.Text(with_file(path, "t", "a" * 4000).parent),
        lambda _: text.Text(),
    ),
    "no text in {}: what it has is empty, hidden or binary; give another file or folder": (
        lambda path: text.Text(with_file(path, "t", "")),
        lambda path: text.Text(with_file(path, "t", "a" * 4000)),
    ),
    "this Python has no sources in {}; give the path of a text file or folder": (
        standard_library_in,
        lambda path: text.Text(with_file(path, "t", "a" * 4000)),
        lambda path: text.Text(with_file(path, "t", "a" * 4000).parent),
    ),
    "give the run_dir of straggle train or straggle.watch, or a trace.jsonl": (
        lambda path: timings.read_timings(path),
        lambda path: timings.read_timings(write_trace(path, 1.0) / "trace.jsonl"),
        lambda path: timings.read_timings(write_trace(path, 1.0)),
    ),
    "{}: no such file; give a trace.jsonl or a run_dir": (
        lambda path: timings.read_timings(path / "trace"),
        lambda path: timings.read_timings(write_trace(path, 1.0) / "trace.jsonl"),
        lambda path: timings.read_timings(write_trace(path, 1.0)),
    ),
    "{}: one rank's times say nothing about the others; give the folder, {}": (
        lambda path: timings.read_timings(write_watch(path) / "watch" / "rank0.jsonl"),
        lambda path: timings.read_timings(write_watch(path) / "watch"),
    ),
    "of all machines to one folder, or, if it ran on this one, call straggle.watch(model) in the script": (
        lambda path: timings.read_timings(lacking(write_watch(path))),
        lambda path: timings.read_timings(write_watch(path)),
    ),
    "{}: the files are of runs of different sizes; remove those of the older one": (
        lambda path: timings.read_timings(write_watch(write_watch(path, ranks=6), ranks=4)),
        lambda path: timings.read_timings(without_older(write_watch(write_watch(path, ranks=6), ranks=4))),
    ),
    "{}: no such file; give the run_dir of a run of straggle train or straggle.watch": (
        lambda path: run.read_run(path),
        lambda path: run.read_run(write_trace(path, 1.0)),
    ),
}


# command lines of the launcher: one that is refused, and ones that the text allows
NODES = "--nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500"
VALUES |= {
    says: tuple(lambda _, words=words: launch(*words.split()) for words in lines)
    for says, lines in {
        "{}: must be seconds, at least 0": ("--grace-s -1", "--grace-s 0"),
        "{}: must be an integer of at least 1": ("--nproc-per-node 0", "--nproc-per-node 1"),
        "{}: must be an integer of at least 0": ("--max-restarts -1", "--max-restarts 0"),
        "{}: a job has a fixed number of nodes, whose ranks may leave and come back: give the larger number": (
            "--nnodes 1:2",
            NODES,
        ),
        "--standalone is for one node: leave it out, or --nnodes": (f"--standalone {NODES}", NODES, "--standalone"),
        "several nodes need --node-rank, 0 on the first, and the same --rdzv-endpoint HOST:PORT on all": (
            "--nnodes 2",
            NODES,
        ),
        "--node-rank {}: with --nnodes {} it is 0 to {}": (f"{NODES} --node-rank 2", f"{NODES} --node-rank 1"),
        "--external-store needs --rdzv-endpoint HOST:PORT, which says where it is": (
            "--external-store",
            "--external-store --rdzv-endpoint node0:29500",
        ),
    }.items()
}


@pytest.mark.parametrize(
    ("says", "make", "name", "refused", "taken"), [(says, *row) for says, rows in ARGUMENTS.items() for row in rows]
)
def test_argument_is_refused_by_name_and_value_and_one_that_the_text_allows_is_taken(says, make, name, refused, taken):
    for value in refused:
        with pytest.raises((ValueError, TypeError), match=pattern(says)) as error:
            make(**{name: value})
        shown = re.escape(str(value).removeprefix("torch."))
        assert re.search(rf"{name}(=| is | are | )'?{shown}", str(error.value)), (name, value)
    for value in taken:
        make(**{name: value})


@pytest.mark.parametrize("says", VALUES)
def test_value_that_the_text_allows_is_accepted(says, tmp_path):
    refused, *followed = VALUES[says]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=pattern(says)):
        refused(tmp_path)
    for number, way in enumerate(followed):
        (folder := tmp_path / str(number)).mkdir()
        way(folder)
