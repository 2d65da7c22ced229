"""What a step costs on a slow network, beside DDP's: four ranks in network namespaces of this machine, in turns.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/network.py --cases none one-50ms
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/network.py --cases latency
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/network.py --cases half --ways members --apart
python benchmarks/network.py --cases loopback

Needs root. About 5.1 MB of gradients, and 0.1 s of work that sleeps, so that the ranks do not contend for the cores.
All ways are in one job and share its links, or with ``--apart`` each turn is a job of its own: a way that measures
its links is to be alone on them. Parameters are compared after each turn. Times are those of rank 0: the
median of a turn's steps, or the mean where the network changes within a turn. The first number is the median over
turns, the ratios are each turn's to that of DDP beside it, with their quartiles.
"""

import argparse
import contextlib
import functools
import hashlib
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from namespaces import Slow, Unavailable, enter, hosts, options_of
from paired import median_ratio
from sleeping import sleeping_net
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

RANKS = 4
WIDTH, LAYERS = 400, 7  # and one: 1.28 M parameters
WORK_S = 0.1
MTU = 9000
NETWORK, PORT = "10.84.0", 29521
ONE = RANKS - 1  # the rank whose link it is


@dataclass(frozen=True)
class Case:
    """``links`` of ranks, of ``None``: all others; how many turns of each way, steps of each, and steps before all.

    ``aligned_s``: each turn is a period of the network's changes but for its last second, however many steps that is,
    and its mean is taken.
    ``apart``: so many steps before the ones that are measured, where each turn is a job of its own.
    """

    links: dict = field(default_factory=dict)
    turns: int = 6
    steps: int = 8
    warmup: int = 16
    apart: int = 24
    aligned_s: float = 0.0
    namespaces: bool = True


def one(**slow):
    return {ONE: Slow(**slow)}


def everyone(**slow):
    return {None: Slow(**slow)}


CASES = {
    "loopback": Case(namespaces=False),
    "none": Case(),
    **{f"one-{ms}ms": Case(one(delay_s=ms / 1e3), steps=6, warmup=12) for ms in (5, 20, 50)},
    **{f"all-{ms}ms": Case(everyone(delay_s=ms / 1e3), steps=6, warmup=12) for ms in (5, 20, 50)},
    "one-jitter": Case(one(delay_s=0.01, jitter_s=0.02)),
    "all-jitter": Case(everyone(delay_s=0.01, jitter_s=0.02)),
    "one-loss": Case(one(loss=0.01)),
    "one-1MB/s": Case(one(bytes_per_s=1e6), turns=2, steps=2, warmup=4),
    "half": Case({None: Slow(bytes_per_s=20e6), ONE: Slow(bytes_per_s=10e6)}, steps=6),
    "all-20MB/s": Case(everyone(bytes_per_s=20e6), steps=6),
    "cut-3s": Case(one(loss=1.0, for_s=3.0, every_s=20.0), turns=2, apart=16, aligned_s=20.0),
    "flapping": Case(one(bytes_per_s=1e6, for_s=5.0, every_s=10.0), turns=2, apart=16, aligned_s=20.0),
}
GROUPS = {
    "latency": ["one-5ms", "one-20ms", "one-50ms", "all-5ms", "all-20ms", "all-50ms", "one-jitter", "all-jitter"],
    "rate": ["one-1MB/s", "half", "all-20MB/s"],
    "changing": ["one-loss", "cut-3s", "flapping"],
}


def staged(**options):
    return lambda module: straggle.StagedDataParallel(module, **options)


# of a module that is made alike on all ranks
WAYS = {
    "DDP": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "DDP again": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "none": staged(),
    "auto": lambda module: straggle.StagedDataParallel(module, deadline=straggle.AutoDeadline()),
    "members": staged(members=straggle.Elastic()),
}


def one_step(model):
    """A function that makes a step and gives its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    is_staged = isinstance(model, straggle.StagedDataParallel)
    if is_staged:
        model.register_state(optimizer=optimizer)

    def step():
        began = time.perf_counter()
        with model.step() if is_staged else contextlib.nullcontext():
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def digest_of(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def check_replicas(model, where):
    """Raises where the parameters are not the same, bit for bit, on all ranks."""
    own = torch.frombuffer(bytearray.fromhex(digest_of(model)), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    if any(not torch.equal(other, own) for other in gathered):
        raise RuntimeError(f"{where}: the replicas are not the same")


def turn(step, case, end):
    """A turn's seconds a step; ``end(num_steps, is_over)`` says after how many steps it ends, if that is known."""
    if not case.aligned_s:
        step()
        return statistics.median(step() for _ in range(case.steps))
    time.sleep(case.aligned_s - time.monotonic() % case.aligned_s)
    began, num_steps = time.perf_counter(), 0
    while num_steps != end(num_steps, time.perf_counter() - began > case.aligned_s - 1.0):
        step()
        num_steps += 1
    return (time.perf_counter() - began) / num_steps


def agreed_end(store, key):
    """Rank 0 says after which step a turn ends, before it makes the last one: no other rank can be further by then."""

    def end(num_steps, is_over):
        if dist.get_rank() == 0 and is_over and not store.check([key]):
            store.set(key, str(num_steps + 1))
        return int(store.get(key)) if store.check([key]) else None

    return end


def join(rank, names):
    """Take part in a group over the namespaces; its store is beside rank 0, at the other end of a slow link."""
    dist.destroy_process_group()
    enter(names[rank])
    store = dist.TCPStore(f"{NETWORK}.1", PORT, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(names))


def measure(rank, case, ways, names, folder):
    if names:
        join(rank, names)
    store = dist.FileStore(f"{folder}/ends")  # of a turn, which is agreed on beside the network
    steps, models = {}, {}
    for way in ways:
        torch.manual_seed(0)
        models[way] = WAYS[way](sleeping_net(WIDTH, LAYERS, WORK_S))
        steps[way] = one_step(models[way])
        for _ in range(case.warmup):
            steps[way]()
    seconds, draw = {way: [] for way in ways}, random.Random(0)
    for number in range(case.turns):
        for way in draw.sample(ways, len(ways)):
            dist.barrier()
            seconds[way].append(turn(steps[way], case, agreed_end(store, f"end/{way}/{number}")))
            check_replicas(models[way], f"{way}, turn {number}")
    return seconds


def job(rank, case, way, names, folder):
    """A job of one turn: its seconds a step, and whether this rank is a member at its end, with what parameters."""
    join(rank, names)
    torch.manual_seed(0)
    model = WAYS[way](sleeping_net(WIDTH, LAYERS, WORK_S))
    step = one_step(model)
    for _ in range(case.apart):
        step()
    try:
        seconds = turn(step, case, agreed_end(dist.FileStore(f"{folder}/end"), "end"))
    except straggle.JobDone:  # it was out, and the others are done
        model.close()
        return math.nan, False, ""
    if isinstance(model, DistributedDataParallel):
        return seconds, True, digest_of(model)
    absent = model.last_report.ranks[rank].absent
    digest = digest_of(model)
    model.close()
    return seconds, not absent, digest


def jobs(name, case, names, options):
    """For each way, every turn's seconds, where each turn is a job of its own."""
    seconds, draw = {way: [] for way in options.ways}, random.Random(0)
    for number in range(case.turns):
        for way in draw.sample(options.ways, len(options.ways)):
            with tempfile.TemporaryDirectory() as folder:
                where = f"{name}, {way}, turn {number}"
                found = tried_twice(where, functools.partial(run_on_ranks, job, RANKS, case, way, names, folder))
            if len({digest for _, is_member, digest in found if is_member}) > 1:
                raise RuntimeError(f"{where}: the replicas are not the same")
            seconds[way].append(found[0][0])
            members = sum(is_member for _, is_member, _ in found)
            print(f"{where}: {1e3 * found[0][0]:.0f} ms, {members} members at its end", flush=True)
    return seconds


def measured(name, case, options):
    """For each way, every turn's seconds."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = None
        if case.namespaces:
            made = hosts(RANKS, case.links, forwarder=options.slownet, mtu=MTU, network=NETWORK, prefix="nt")
            names = stack.enter_context(made)
        if options.apart:
            return jobs(name, case, names, options)
        return tried_twice(name, lambda: run_on_ranks(measure, RANKS, case, options.ways, names, folder)[0])


def tried_twice(name, run):
    """On a busy machine gloo's first connections may fail, and what else there is is to be measured all the same."""
    try:
        return run()
    except ProcessRaisedException as error:
        if "connectFullMesh" not in str(error):
            raise
        print(f"{name}: the ranks did not meet, and are started again", flush=True)
        return run()


def cells(seconds, ways):
    times = [f"{1000 * statistics.median(seconds[way]):.0f}" for way in ways]
    ratios = ["{} ({})".format(*median_ratio(seconds[way], seconds["DDP"])) for way in ways if way != "DDP"]
    return times + ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["none", "latency"], metavar="CASE")
    parser.add_argument("--ways", nargs="+", default=["none", "auto"], choices=list(WAYS), help="beside DDP")
    parser.add_argument("--turns", type=int, help="of each way (default: by the case)")
    parser.add_argument("--apart", action="store_true", help="each turn of a way is a job of its own")
    options = options_of(parser)
    options.ways = ["DDP", *(way for way in options.ways if way != "DDP")]
    cases = [name for given in options.cases for name in GROUPS.get(given, [given])]
    if unknown := set(cases) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join((*CASES, *GROUPS))}")
    ratios = [f"{way} / DDP" for way in options.ways if way != "DDP"]
    rows = [("case", *(f"{way}, ms" for way in options.ways), *ratios)]
    for name in cases:
        case = CASES[name]
        if options.turns:
            case = Case(**{**vars(case), "turns": options.turns})
        try:
            rows.append((name, *cells(measured(name, case, options), options.ways)))
        except Unavailable as why:
            print(f"{name}: skipped, {why}", flush=True)
            continue
        print(*rows[-1], sep=" | ", flush=True)
    print(text_table(rows))


if __name__ == "__main__":
    main()
