"""What came of each thing that `straggle advise` may advise, in 24 jobs: recorded for the test that compares the two.

python benchmarks/outcomes.py tests/unit/advise/outcomes
python benchmarks/outcomes.py tests/unit/advise/outcomes data-always-1 backward-sometimes-2

A job has four ranks of this machine, one or two of which are slow in one place of the loop, always or sometimes. It is
watched under DDP, and then run by each method. Everything sleeps for its work, so that ranks do not contend; work goes
by the number of samples, what is outside of loading and the passes does not. A job's file has the watched times of its
ranks, and for each method the mean step of steps 15 to 45, on rank 0's clock, and the share that was dropped in them.
DDP runs again at the end, as the machine may be busier by then; if it is much busier, the job is recorded again.
"""

import json
import sys
import time
from contextlib import closing
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.observe.trace import read_trace
from straggle.report import in_words

RANKS, BATCH, STEPS, FIRST = 4, 8, 45, 15
PLACES = ("data", "forward", "backward", "optimizer", "outside", "loop_end")
BY_SAMPLES = ("data", "forward", "backward")
KINDS = ("always", "sometimes")
SLOW = {1: (1,), 2: (1, 3)}
JOBS = {f"{place}-{kind}-{number}": (place, kind, number) for place, kind, number in product(PLACES, KINDS, SLOW)}
USUAL_S = {"data": 0.006, "forward": 0.02, "backward": 0.04, "optimizer": 0.002, "outside": 0.001, "loop_end": 0.001}
EXTRA_S, STALL_S, STALLS = 0.12, 0.3, 0.12  # always; and sometimes, in this share of the steps
TRIES, SAME = 3, 1.35  # times; how far apart the two runs of DDP may be
SPREAD = 0.05  # of each place's time, from step to step

DEADLINES = {
    "AutoDeadline()": lambda: straggle.AutoDeadline(),
    "QuantileDeadline(0.5, slack=1.2)": lambda: straggle.QuantileDeadline(0.5, slack=1.2),
    "FirstK(3)": lambda: straggle.FirstK(3),
    "DropBudget(QuantileDeadline(0.5, slack=1.2), share=0.05)": lambda: straggle.DropBudget(
        straggle.QuantileDeadline(0.5, slack=1.2), share=0.05
    ),
}
LATE = ("AutoDeadline()", "FirstK(3)")  # also tried with a loader that passes missed batches by


class Times:
    """How long one rank takes in each place of its present step."""

    def __init__(self, rank, place, kind, slow):
        self._random = torch.Generator().manual_seed(rank)
        self._extra_s = 0.0 if rank not in slow else EXTRA_S if kind == "always" else STALL_S
        self._place, self._kind = place, kind
        self.begin()

    def begin(self):
        stalls = float(torch.rand((), generator=self._random)) < STALLS
        self._now_s = self._extra_s if self._kind == "always" or stalls else 0.0
        self._pace = float(torch.exp(SPREAD * torch.randn((), generator=self._random)))

    def spend(self, place, samples=BATCH, part=1.0):
        share = samples / BATCH if place in BY_SAMPLES else 1.0
        extra_s = self._now_s if place == self._place else 0.0
        time.sleep(part * share * (USUAL_S[place] * self._pace + extra_s))


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times, part):
        ctx.times, ctx.part, ctx.samples = times, part, len(x)
        times.spend("forward", len(x), part)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.times.spend("backward", ctx.samples, ctx.part)
        return gradient, None, None


class Layers(nn.Module):
    def __init__(self, times, number=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(number))
        self.times = times

    def forward(self, x):
        for layer in self.layers:
            x = Spend.apply(torch.tanh(layer(x)), self.times, 1 / len(self.layers))
        return x


class Samples(Dataset):
    def __len__(self):
        return RANKS * BATCH * (STEPS + 4)

    def __getitem__(self, index):
        return torch.full((16,), index % 7 / 7)


class Collate:
    """Loads as long as a batch takes."""

    def __init__(self, times):
        self.times = times

    def __call__(self, samples):
        self.times.spend("data", len(samples))
        return torch.stack(samples)


def loader_of(times, rank, ranks=RANKS, batch=BATCH):
    sampler = DistributedSampler(Samples(), num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(Samples(), batch_size=batch, sampler=sampler, collate_fn=Collate(times))


class SlowSGD(torch.optim.SGD):
    def __init__(self, parameters, times):
        super().__init__(parameters, lr=0.001)
        self.times = times

    def step(self, closure=None):
        self.times.spend("optimizer")
        return super().step(closure)


def loop(times, model, loader, compute):
    """The mean step from step ``FIRST`` on."""
    optimizer = SlowSGD(model.parameters(), times)
    began, steps = 0.0, 0
    times.begin()
    for x in loader:
        if steps == FIRST:
            began = time.perf_counter()
        compute(x)
        times.spend("outside")
        optimizer.step()
        optimizer.zero_grad()
        times.spend("loop_end")
        steps += 1
        if steps == STEPS:
            break
        times.begin()
    return (time.perf_counter() - began) / (steps - FIRST)


def under_ddp(times, folder, rank, ranks=RANKS, group=None, batch=BATCH):
    model = DistributedDataParallel(Layers(times), process_group=group)
    watched = straggle.watch(model, folder) if folder else None
    step_s = loop(times, model, loader_of(times, rank, ranks, batch), lambda x: model(x).square().mean().backward())
    if watched:
        watched.close()
    return {"step_s": step_s, "dropped": 0.0}


def staged(times, rank, deadline, wrap=None):
    with closing(straggle.StagedDataParallel(Layers(times), deadline=deadline)) as model:
        dropped = []
        model.register_step_hook(lambda record: dropped.append(record.report.dropped_share))
        loader = loader_of(times, rank) if wrap is None else wrap(model)

        def compute(x):
            with model.step():
                model(x).square().mean().backward()

        step_s = loop(times, model, loader, compute)
        return {"step_s": step_s, "dropped": sum(dropped[FIRST:]) / len(dropped[FIRST:])}


def job(rank, folder, place, kind, number):
    """What each method brought, on this rank."""
    slow, done = SLOW[number], {}

    def run(name, method):
        torch.manual_seed(0)
        dist.barrier()
        done[name] = method(Times(rank, place, kind, slow))
        dist.barrier()

    run("DDP", lambda times: under_ddp(times, folder, rank))
    for name, make in DEADLINES.items():
        run(name, lambda times, make=make: staged(times, rank, make()))
    if place == "data":
        for name in LATE:
            run(
                f"{name}, LateLoader",
                lambda times, name=name: staged(
                    times,
                    rank,
                    DEADLINES[name](),
                    lambda model, times=times: straggle.LateLoader(model, loader_of(times, rank)),
                ),
            )
    if kind == "always":
        plain = lambda times: DataLoader(Samples(), batch_size=BATCH, collate_fn=Collate(times))  # noqa: E731
        if place in BY_SAMPLES:
            run(
                "DealtLoader",
                lambda times: staged(
                    times, rank, straggle.WaitForAll(), lambda model: straggle.DealtLoader(model, plain(times))
                ),
            )
        others = [other for other in range(RANKS) if other not in slow]
        group = dist.new_group(others)
        batch = BATCH * RANKS / len(others)
        run(
            f"without {in_words(slow)}",
            lambda times: (
                under_ddp(times, None, others.index(rank), len(others), group, round(batch)) if rank in others else {}
            ),
        )
    run("DDP again", lambda times: under_ddp(times, None, rank))
    return json.dumps(done)


def compact(folder):
    """What the watch wrote, by ranks and columns, in tenths of a millisecond."""
    of_ranks = []
    for rank in range(RANKS):
        head, *lines = read_trace(Path(folder, "watch", f"rank{rank}.jsonl"))
        columns = {
            name: [rounded(line[name]) for line in lines]
            for name in lines[0]
            if name.endswith("_s") or name == "seconds"
        }
        of_ranks.append({"head": {**head, "unknown": []}, "columns": columns})
    return of_ranks


def rounded(seconds):
    return [rounded(one) for one in seconds] if isinstance(seconds, list) else round(1e4 * seconds)


def record(name, to):
    """Again if the machine became another one meanwhile."""
    for _ in range(TRIES):
        with TemporaryDirectory() as folder:
            done = json.loads(run_on_ranks(job, RANKS, folder, *JOBS[name], timeout_s=600.0)[0])
            watched = compact(folder)
        if max(before := done["DDP"]["step_s"], after := done["DDP again"]["step_s"]) < SAME * min(before, after):
            break
    rounded_ = {method: {key: round(own, 4) for key, own in one.items()} for method, one in done.items()}
    ranks = ",\n".join(json.dumps(own, separators=(",", ":")) for own in watched)
    head = f'"job": "{name}", "slow": {list(SLOW[JOBS[name][2]])},\n"outcomes": {json.dumps(rounded_)}'
    to.joinpath(f"{name}.json").write_text(f'{{{head},\n"ranks": [\n{ranks}\n]}}\n')
    print(name, rounded_, flush=True)


def main():
    to, *names = sys.argv[1:]
    Path(to).mkdir(parents=True, exist_ok=True)
    for name in names or JOBS:
        record(name, Path(to))


if __name__ == "__main__":
    main()
