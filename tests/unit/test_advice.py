"""The advice of errors about a value can be followed: it is refused, and one that the text allows is accepted."""

from __future__ import annotations

import contextlib
import io
import math
import sysconfig

import pytest
import torch
from advice import pattern
from training import mlp
from watched import write_trace, write_watch

import straggle
from straggle import LateHandling, StagedBackward
from straggle.advise import timings
from straggle.backward.stage_profile import measure_stages
from straggle.commands.launching import launch_options, store_host
from straggle.data.rebalance import check_shares
from straggle.lab import faults
from straggle.lab.simulate import communication, delays, links, pulled, units
from straggle.lab.workloads import digits, paced, shard, synthetic, text
from straggle.members import state_wire
from straggle.merge.tensor_bytes import bytes_of
from straggle.observe import metrics_endpoint, run
from straggle.pools.pool import Pool

SGD = torch.optim.SGD
NO_DELAY = delays.NoDelay()


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


NODES = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "node0:29500")


def launch(*words):
    """The launcher's command line; its complaint as an error."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            launch_options.arguments([*words, "train.py"], {"STRAGGLE_JOB_SECRET": "a"})
    except SystemExit:
        raise ValueError(complaint.getvalue()) from None


COUNT = "{}={}: must be an integer of at least {}"
NUMBER = "{}={}: must be a number {}, such as {}"
VALUES = {
    # backward
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
    "budget_s={}: must be a positive number of seconds (or None)": (
        lambda _: backward(budget_s=0.0),
        lambda _: backward(budget_s=60.0),
        lambda _: backward(budget_s=None),
    ),
    "a step() cannot be nested in another of the same model": (
        lambda _: one_after_another(nested=True),
        lambda _: one_after_another(nested=False),
    ),
    "{} has no parameter with requires_grad=True: there is nothing to compute": (
        lambda _: staged_of(mlp().requires_grad_(False)),
        lambda _: staged_of(mlp().requires_grad_(True)),
    ),
    "num_steps={}: at least one pass is needed": (lambda _: measured(0), lambda _: measured(1)),
    # policies
    "budget_s={}: a deadline needs a positive number of seconds (or deadline=None)": (
        lambda _: straggle.FixedDeadline(0),
        lambda _: straggle.FixedDeadline(0.5),
    ),
    "q={}: a quantile lies between 0 and 1, such as 0.5 for the median": (
        lambda _: straggle.QuantileDeadline(90),
        lambda _: straggle.QuantileDeadline(0.5),
    ),
    NUMBER: (
        lambda _: straggle.QuantileDeadline(0.9, slack=0.5),
        lambda _: straggle.QuantileDeadline(0.9, slack=1.2),
        lambda _: straggle.FirstK(1, grace_s=0.05),
    ),
    COUNT: (
        lambda _: straggle.FirstK(0),
        lambda _: straggle.FirstK(1),
        lambda _: straggle.Merge(check_every=0),
        lambda _: straggle.DropBudget(straggle.FirstK(1), 0.5, window=2),
    ),
    "grace_s={}: must be a number of seconds, and seconds cannot be negative": (
        lambda _: LateHandling(grace_s=-1),
        lambda _: LateHandling(grace_s=0),
    ),
    "give_up_s={}: must be a finite number of seconds, at least 1": (
        lambda _: LateHandling(give_up_s=math.inf),
        lambda _: LateHandling(give_up_s=1),
    ),
    "granularity={}: choose one of {}": (
        lambda _: LateHandling(granularity="layer"),
        *(lambda _, choice=choice: LateHandling(granularity=choice) for choice in ("stage", "microbatch", "step")),
    ),
    "late_by={}: choose one of {}": (
        lambda _: LateHandling(late_by="clock"),
        *(lambda _, choice=choice: LateHandling(late_by=choice) for choice in ("host", "device")),
    ),
    "log_every_s={}: must be a positive number of seconds, such as 60 (infinite: what is dropped is not logged)": (
        lambda _: straggle.Merge(log_every_s=0),
        lambda _: straggle.Merge(log_every_s=60),
        lambda _: straggle.Merge(log_every_s=math.inf),
    ),
    "stuck_after_s={}: must be a positive number of seconds, such as 10 (infinite: no rank is reported as stuck)": (
        lambda _: LateHandling(stuck_after_s=0),
        lambda _: LateHandling(stuck_after_s=10),
        lambda _: LateHandling(stuck_after_s=math.inf),
    ),
    "decay={}: must be at least 0 and below 1, such as 0.9": (
        lambda _: straggle.MovingAverage(1),
        lambda _: straggle.MovingAverage(0.9),
    ),
    "weight={}: relative to a computed gradient's weight of 1, so from 0 to 1": (
        lambda _: straggle.LastOwn(2.0),
        lambda _: straggle.LastOwn(1.0),
    ),
    "{} keeps no momentum: use Adam, AdamW or SGD(momentum=...)": (
        lambda _: straggle.OptimizerMomentum(SGD(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(torch.optim.Adam(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(torch.optim.AdamW(mlp().parameters())),
        lambda _: straggle.OptimizerMomentum(SGD(mlp().parameters(), momentum=0.9)),
    ),
    "absence_gain={}: must be a number, at least 1 (inf: no member is put out)": (
        lambda _: straggle.Elastic(absence_gain=0.5),
        lambda _: straggle.Elastic(absence_gain=1),
        lambda _: straggle.Elastic(absence_gain=math.inf),
    ),
    "inner={}: give a straggle.Deadline": (
        lambda _: straggle.Shadow(0.5),
        lambda _: straggle.Shadow(straggle.FixedDeadline(0.5)),
    ),
    "{}(Shadow(...)): Shadow goes around all the others": (
        lambda _: straggle.DropBudget(straggle.Shadow(straggle.FirstK(1)), 0.05),
        lambda _: straggle.Shadow(straggle.DropBudget(straggle.FirstK(1), 0.05)),
    ),
    "share={}: must lie above 0 and at most at 1, such as 0.05": (
        lambda _: straggle.DropBudget(straggle.FirstK(1), 5),
        lambda _: straggle.DropBudget(straggle.FirstK(1), 0.05),
    ),
    "than the budget of the full window; give window={} or more": (
        lambda _: straggle.DropBudget(straggle.FirstK(1), 0.003),
        lambda _: straggle.DropBudget(straggle.FirstK(1), 0.003, window=334),
    ),
    # merge
    "{}={}: choose one of {}": (
        lambda _: straggle.Merge(buffers="sum"),
        *(lambda _, choice=choice: straggle.Merge(buffers=choice) for choice in ("mean", "rank0", "local")),
    ),
    "wire_dtype={}: choose bfloat16 or None; other dtypes have too small a range for gradients, or save nothing": (
        lambda _: straggle.Merge(wire_dtype=torch.float16),
        lambda _: straggle.Merge(wire_dtype="bfloat16"),
        lambda _: straggle.Merge(wire_dtype=None),
    ),
    "min_ranks={}: must be an integer, at least 1": (
        lambda _: straggle.Elastic(min_ranks=0),
        lambda _: straggle.Elastic(min_ranks=1),
    ),
    "suspect_s={}: must be a finite number of seconds, at least 0.5": (
        lambda _: straggle.Elastic(suspect_s=0.1),
        lambda _: straggle.Elastic(suspect_s=0.5),
    ),
    "min_ranks={}: there are only {} ranks": (
        lambda _: straggle.Elastic(min_ranks=5).least(4),
        lambda _: straggle.Elastic(min_ranks=4).least(4),
    ),
    "step.pull() is for {} ranks at most, not {}: use Rebalance there": (
        lambda _: Pool(9000, (1,) * 9000),
        lambda _: check_shares(9000, total=9000),
    ),
    "which cannot be sent: give the object that keeps it a state_dict() of None, bool, int, float, str, bytes, list,": (
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
    # data
    "least_gain={}: must be a positive number, such as 0.05 for a twentieth": (
        lambda _: check_shares(2, total=8, least_gain=0),
        lambda _: check_shares(2, total=8, least_gain=0.05),
    ),
    "total={}: must be a multiple of {}, and {} at least for each of {} ranks": (
        lambda _: check_shares(4, total=10, multiple_of=4),
        lambda _: check_shares(4, total=16, multiple_of=4),
    ),
    "repeat_up_to={}: must be a share of the gradient, from 0 to 1": (
        lambda _: with_a_model(lambda model: straggle.Epochs(model, num_samples=4, batch_size=1, repeat_up_to=2)),
        lambda _: with_a_model(lambda model: straggle.Epochs(model, num_samples=4, batch_size=1, repeat_up_to=1)),
    ),
    # observing
    "port={}: must be an integer from 0 (any that is free) to 65535, or null for none": (
        lambda _: metrics_endpoint.check_port(70000),
        lambda _: metrics_endpoint.check_port(0),
        lambda _: metrics_endpoint.check_port(None),
    ),
    "certfile and keyfile belong together: give both, or neither": (
        lambda _: metrics_endpoint.Security(certfile="a"),
        lambda _: metrics_endpoint.Security(certfile="a", keyfile="b"),
        lambda _: metrics_endpoint.Security(),
    ),
    # launching
    "{}: must be seconds, at least 0": (
        lambda _: launch("--grace-s", "-1"),
        lambda _: launch("--grace-s", "0"),
    ),
    "{}: must be an integer of at least 1": (
        lambda _: launch("--nproc-per-node", "0"),
        lambda _: launch("--nproc-per-node", "1"),
    ),
    "{}: must be an integer of at least 0": (
        lambda _: launch("--max-restarts", "-1"),
        lambda _: launch("--max-restarts", "0"),
    ),
    "{}: must be names of modules, with commas between them": (
        lambda _: launch("--preload", "torch numpy"),
        lambda _: launch("--preload", "torch,numpy"),
    ),
    "{} is no HOST:PORT, such as node0:29500": (
        lambda _: store_host.StoreAddress.of("node0"),
        lambda _: store_host.StoreAddress.of("node0:29500"),
    ),
    "{}: a job has a fixed number of nodes, whose ranks may leave and come back: give the larger number": (
        lambda _: launch("--nnodes", "1:2"),
        lambda _: launch(*NODES),
    ),
    "--standalone is for one node: leave it out, or --nnodes": (
        lambda _: launch("--standalone", *NODES),
        lambda _: launch(*NODES),
        lambda _: launch("--standalone"),
    ),
    "several nodes need --node-rank, 0 on the first, and the same --rdzv-endpoint HOST:PORT on all": (
        lambda _: launch("--nnodes", "2"),
        lambda _: launch(*NODES),
    ),
    "--node-rank {}: with --nnodes {} it is 0 to {}": (
        lambda _: launch(*NODES, "--node-rank", "2"),
        lambda _: launch(*NODES, "--node-rank", "1"),
    ),
    "--external-store needs --rdzv-endpoint HOST:PORT, which says where it is": (
        lambda _: launch("--external-store"),
        lambda _: launch("--external-store", "--rdzv-endpoint", "node0:29500"),
    ),
}


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


SMALL = {"width": 8, "depth": 1, "num_samples": 64}
LAB = {
    "factor is {}; give a number from 1.0 (no delay), such as 2.0 for twice as long": (
        lambda _: faults.Slowdown(0.5),
        lambda _: faults.Slowdown(2.0),
    ),
    "probability is {}; give a number from 0.0 to 1.0, per micro-batch": (
        lambda _: faults.RandomDelay(2, seconds=1),
        lambda _: faults.RandomDelay(0.5, seconds=1),
    ),
    "chance is {}; give a number from 0.0 to 1.0, per step": (
        lambda _: faults.Slowdown(2.0, chance=2),
        lambda _: faults.Slowdown(2.0, chance=0.5),
    ),
    "ranks are {}; give ranks from 0, or leave them out for every rank": (
        lambda _: faults.Slowdown(2.0, ranks=[-1]),
        lambda _: faults.Slowdown(2.0, ranks=[0]),
        lambda _: faults.Slowdown(2.0),
    ),
    "phase is {}; give one of {}": (
        lambda _: faults.RandomDelay(0.5, seconds=1, phase="update"),
        *(lambda _, phase=phase: faults.RandomDelay(0.5, seconds=1, phase=phase) for phase in ("data", "backward")),
    ),
    "{} is {}; give a finite number of seconds from 0.0": (
        lambda _: faults.RandomDelay(0.5, seconds=-1),
        lambda _: faults.RandomDelay(0.5, seconds=0.0),
    ),
    "factor is {}; give a finite number from 0.0 (no delay); the paper's is 1.0": (
        lambda _: faults.DropComputeDelay(1.0, factor=-1),
        lambda _: faults.DropComputeDelay(1.0, factor=1.0),
    ),
    "every is {}; give a number of steps from 1, or leave it out to stall once": (
        lambda _: faults.Stall(0, seconds=1, rank=0, every=0),
        lambda _: faults.Stall(0, seconds=1, rank=0, every=1),
        lambda _: faults.Stall(0, seconds=1, rank=0),
    ),
    "{}={}: must be a finite number from 0 on": (
        lambda _: communication.Constant(-1),
        lambda _: communication.Constant(0),
    ),
    "inner={}: give delays, such as straggle.lab.simulate.delays.NoDelay()": (
        lambda _: delays.Stalls("none", 0.5, 1),
        lambda _: delays.Stalls(delays.NoDelay(), 0.5, 1),
    ),
    "lasts_steps={}: must be a number of steps from 1 on": (
        lambda _: delays.SlowRanks(NO_DELAY, 0.25, 2, lasts_steps=0),
        lambda _: delays.SlowRanks(NO_DELAY, 0.25, 2, lasts_steps=1),
    ),
    "share={}: with lasts_steps={} it must be below lasts / (1 + lasts)": (
        lambda _: delays.SlowRanks(NO_DELAY, 0.5, 2, lasts_steps=1),
        lambda _: delays.SlowRanks(NO_DELAY, 0.49, 2, lasts_steps=1),
    ),
    "{}={}: must lie between 0 and 1": (
        lambda _: delays.Stalls(NO_DELAY, 2, 1),
        lambda _: delays.Stalls(NO_DELAY, 1, 1),
    ),
    "{}={}: must be a positive number": (
        lambda _: links.Links(1, bytes_per_s=1, slow={0: {"slow_s": 0}}),
        lambda _: links.Links(1, bytes_per_s=1, slow={0: {"slow_s": 1}}),
    ),
    "bytes_per_s={}: must be a positive number": (
        lambda _: links.Links(1, bytes_per_s=0),
        lambda _: links.Links(1, bytes_per_s=1),
    ),
    "there is nothing to draw; give work.num_microbatches=8": (
        lambda _: pulled.simulate_pulled(2, 2, units.Work(1.0), NO_DELAY, straggle.FixedDeadline(1)),
        lambda _: pulled.simulate_pulled(
            2, 2, units.Work(1.0, num_microbatches=8), NO_DELAY, straggle.FixedDeadline(1)
        ),
    ),
    "step_s={}: must be a positive number of seconds": (lambda _: units.Work(0), lambda _: units.Work(1)),
    "forward_share={}: must be a share of a micro-batch's time, from 0 to 1": (
        lambda _: units.Work(1, forward_share=2),
        lambda _: units.Work(1, forward_share=1),
    ),
    "overhead_s={}: must be a number of seconds": (
        lambda _: units.Work(1, overhead_s=-1),
        lambda _: units.Work(1, overhead_s=1),
    ),
    "only the last micro-batch comes in stages; use 0, or one micro-batch": (
        lambda _: units.Work(1, num_microbatches=2, checks_per_stage=1),
        lambda _: units.Work(1, num_microbatches=2, checks_per_stage=0),
        lambda _: units.Work(1, num_microbatches=1, checks_per_stage=1),
    ),
    "checks_per_stage={} with granularity={}: use 0": (
        lambda _: units.Work(1, checks_per_stage=1).units("step"),
        lambda _: units.Work(1, checks_per_stage=0).units("step"),
    ),
    "channels is {}; it must be a multiple of {}, such as 16": (
        lambda _: digits.Digits(channels=6),
        lambda _: digits.Digits(channels=16),
    ),
    "validation_share is {}; it must be between 0 and 1, such as 0.2": (
        lambda _: digits.Digits(validation_share=2),
        lambda _: digits.Digits(validation_share=0.2),
    ),
    "seconds is {}; give a number of seconds from 0.0": (
        lambda _: paced.Paced(synthetic.Synthetic(**SMALL), seconds=-1),
        lambda _: paced.Paced(synthetic.Synthetic(**SMALL), seconds=0.0),
    ),
    "rank is {}; with world_size={} it must be from 0 to {}": (
        lambda _: shard.Shard(8, rank=2, world_size=2, batch_size=1, seed=0),
        lambda _: shard.Shard(8, rank=1, world_size=2, batch_size=1, seed=0),
    ),
    "use a smaller batch_size, fewer ranks or more data": (
        lambda _: shard.Shard(8, rank=0, world_size=2, batch_size=8, seed=0),
        lambda _: shard.Shard(8, rank=0, world_size=2, batch_size=4, seed=0),
        lambda _: shard.Shard(8, rank=0, world_size=1, batch_size=8, seed=0),
        lambda _: shard.Shard(16, rank=0, world_size=2, batch_size=8, seed=0),
    ),
    "the part must lie in the step, and the step in the epoch": (
        lambda _: shard.Shard(8, rank=0, world_size=2, batch_size=1, seed=0).part(0, total=4, first=2, count=4),
        lambda _: shard.Shard(8, rank=0, world_size=2, batch_size=1, seed=0).part(0, total=4, first=2, count=2),
    ),
    "classes is {}; there must be at least 2 to tell apart": (
        lambda _: synthetic.Synthetic(**SMALL, classes=1),
        lambda _: synthetic.Synthetic(**SMALL, classes=2),
    ),
    "width {} is not divisible by heads {}; use a multiple, such as {}": (
        lambda path: text.Text(with_file(path, "t", "a" * 4000), width=30, heads=4),
        lambda path: text.Text(with_file(path, "t", "a" * 4000), width=64, heads=4),
    ),
    "validation_share is {}; it must be between 0 and 1, such as 0.05": (
        lambda path: text.Text(with_file(path, "t", "a" * 4000), validation_share=1),
        lambda path: text.Text(with_file(path, "t", "a" * 4000), validation_share=0.05),
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
    "{} is {}; it must be at least 1": (
        lambda _: synthetic.Synthetic(**{**SMALL, "depth": 0}),
        lambda _: synthetic.Synthetic(**{**SMALL, "depth": 1}),
    ),
    # what a run has written
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


@pytest.mark.parametrize("says", VALUES | LAB)
def test_value_that_the_text_allows_is_accepted(says, tmp_path):
    refused, *followed = (VALUES | LAB)[says]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=pattern(says)):
        refused(tmp_path)
    for number, way in enumerate(followed):
        (folder := tmp_path / str(number)).mkdir()
        way(folder)
