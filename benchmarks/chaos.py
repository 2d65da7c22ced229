"""What late ranks cost under chaos, and what straggle costs where no rank is late; ranks are processes of this machine.

python benchmarks/chaos.py stall                     # one of 4 ranks sleeps 2 s every 10 steps: DDP, straggle in turns
python benchmarks/chaos.py long --steps 10000        # random stalls and NaNs: parameters, memory and counters
python benchmarks/chaos.py evidence --clients 1000   # the job's store under one increment per rank and step
python benchmarks/chaos.py overhead text             # no rank late: what stand-in, telemetry and deciding cost, 2 ranks
python benchmarks/chaos.py overhead small            # the same with steps of about 5 ms

The job's store is a TCPStore in the parent process, as that of torchrun's agent; gloo goes over the loopback device.
"""

import argparse
import contextlib
import hashlib
import math
import multiprocessing
import os
import random
import resource
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch
import torch.distributed as dist
from paired import median_ratio
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from straggle import AutoDeadline, FirstK, FixedDeadline, LateHandling, QuantileDeadline, StagedDataParallel
from straggle.lab.jobs import gather
from straggle.lab.local_ranks import HOST, run_on_ranks, serve_store
from straggle.lab.workloads.text import Text
from straggle.merge import telemetry
from straggle.report import PHASES, text_table

PLACES = ("data", "forward", "backward", "optimizer")


def digest(module):
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, math.floor(q * len(values)))]


# -- stalls


class Block(nn.Module):
    """A residual layer that sleeps for its work, and on demand once for longer, in its forward or backward pass."""

    def __init__(self, width, forward_s, backward_s):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.backward_s = forward_s, backward_s
        self.stall = {"forward": 0.0, "backward": 0.0}

    def forward(self, x):
        time.sleep(self.forward_s + self.stall["forward"])
        y = x + torch.tanh(self.linear(x))
        y.register_hook(lambda _: time.sleep(self.backward_s + self.stall["backward"]))
        return y


class Net(nn.Sequential):
    def __init__(self, depth=8, width=64, compute_s=0.0):
        super().__init__(*(Block(width, 0.3 * compute_s / depth, 0.7 * compute_s / depth) for _ in range(depth)))

    def set_stall(self, place, index, seconds):
        """The next passes stall at this place of this block, or nowhere."""
        for number, block in enumerate(self):
            block.stall = dict.fromkeys(block.stall, 0.0)
            if number == index and place in block.stall:
                block.stall[place] = seconds


class Loop:
    """A training loop as users write it, which can be stalled anywhere."""

    def __init__(self, net, model, rank):
        self.net, self.model = net, model
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(rank)
        self.width = net[0].linear.in_features

    def step(self, place=None, block=0, seconds=0.0, bad=False):
        self.net.set_stall(place, block, seconds)
        x = torch.randn(16, self.width, generator=self.generator)
        if bad:
            x.fill_(math.nan)
        if place == "data":
            time.sleep(seconds)
        with self.model.step() if isinstance(self.model, StagedDataParallel) else contextlib.nullcontext():
            self.model(x).square().mean().backward()
        if place == "optimizer":
            time.sleep(seconds)
        self.optimizer.step()
        self.optimizer.zero_grad()


def draw_stalls(seed, num_steps, every, world_size, num_blocks):
    """For every ``every`` steps, which rank stalls, and in which place and block."""
    draw = random.Random(seed)
    return {
        step: (draw.randrange(world_size), draw.choice(PLACES), draw.randrange(num_blocks))
        for step in range(every // 2, num_steps, every)
    }


def stall(rank, options):
    """Turns of DDP and straggle, with the same stalls."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    nets = {"DDP": Net(compute_s=options.compute_s), "straggle": Net(compute_s=options.compute_s)}
    late_handling = LateHandling(max_lag=options.max_lag)
    staged = StagedDataParallel(nets["straggle"], deadline=options.deadline_s, late_handling=late_handling)
    models = {"DDP": DistributedDataParallel(nets["DDP"]), "straggle": staged}
    loops = {name: Loop(nets[name], models[name], rank) for name in models}
    for loop in loops.values():
        for _ in range(3):  # the stages are learned; DDP's buckets are built again
            loop.step()
    peers_s, turns_s, counts = {name: [] for name in models}, {name: [] for name in models}, Counter()
    for turn in range(options.turns):
        stalls = draw_stalls(turn, options.steps, options.every, world_size, len(nets["DDP"]))
        for name, loop in loops.items():
            dist.barrier()
            began = before = time.monotonic()
            for step in range(options.steps):
                sleeper, place, block = stalls.get(step, (-1, None, 0))
                loop.step(*((place, block, options.stall_s) if sleeper == rank else ()))
                now = time.monotonic()
                stood_in = name == "straggle" and staged.last_report.ranks[rank].stood_in
                if sleeper != rank and not stood_in:
                    peers_s[name].append(now - before)
                before = now
                if name == "straggle":
                    counts["late"] += staged.last_report.ranks[rank].late
                    counts["stood in for"] += stood_in
            turns_s[name].append(before - began)
    dist.barrier()
    results = gather((peers_s, turns_s, counts, digest(nets["straggle"])))
    staged.close()
    if rank == 0:
        print_stalls(results, options)


def print_stalls(results, options):
    world_size, num_steps = len(results), options.turns * options.steps
    print(
        f"{world_size} ranks, {1000 * options.compute_s:.0f} ms of work a step, one rank asleep {options.stall_s} s "
        f"every {options.every} steps; deadline {options.deadline_s} s, max_lag {options.max_lag}; "
        f"{options.turns} turns of {options.steps} steps each"
    )
    rows = [("seconds", "peers p50", "peers p99", "peers max", "mean step", "of the slowest rank")]
    for name in ("DDP", "straggle"):
        peers = [seconds for peers_s, *_ in results for seconds in peers_s[name]]
        totals = [sum(turns_s[name]) / num_steps for _, turns_s, *_ in results]
        numbers = [statistics.median(peers), quantile(peers, 0.99), max(peers), statistics.mean(totals), max(totals)]
        rows.append((name, *(f"{number:.3f}" for number in numbers)))
    print(text_table(rows))
    print(
        "peers: steps of ranks that are not asleep in them and not stood in for; "
        "mean step: a rank's complete turn / steps"
    )
    print(f"rank-steps late and stood in for: {[dict(counts) for _, _, counts, _ in results]} of {num_steps} each")
    print(f"parameters under straggle: {sorted({hashed for *_, hashed in results})}")


# -- a long run


def rss_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def draw_chaos(draw, num_blocks):
    """A stall (place, block, seconds, NaNs) for one rank and step."""
    seconds = 0.5 if draw.random() < 0.0005 else draw.uniform(0.0, 0.05) if draw.random() < 0.03 else 0.0
    return draw.choice(PLACES), draw.randrange(num_blocks), seconds, draw.random() < 0.002


def long(rank, options):
    torch.manual_seed(0)
    net = Net()
    staged = StagedDataParallel(
        net,
        deadline=FixedDeadline(options.deadline_s, warmup_steps=5),
        late_handling=LateHandling(grace_s=options.deadline_s / 2, max_lag=32),
    )
    loop, draw = Loop(net, staged, rank), random.Random(rank)
    marks = {max(1, round(options.steps * share)): share for share in (0.1, 0.5, 1.0)}
    injected, counts, hashes, memory, runs = Counter(), Counter(), [], {}, []
    began = time.monotonic()
    for step in range(1, options.steps + 1):
        place, block, seconds, bad = draw_chaos(draw, len(net))
        injected["stalls"] += seconds > 0
        injected["NaNs"] += bad
        loop.step(place, block, seconds, bad)
        own = staged.last_report.ranks[rank]
        counts["late"] += own.late
        counts["truncated"] += own.late and not own.stood_in
        counts["stood in for"] += own.stood_in
        counts["with NaNs"] += own.nonfinite > 0
        counts["skipped"] += staged.last_report.skipped
        runs.append(own.stood_in)
        if step % max(1, options.steps // 20) == 0:
            hashes.append(digest(net))
        if step in marks:
            memory[marks[step]] = rss_mib()
    seconds = time.monotonic() - began
    longest = max((len(list(run)) for stood_in, run in groupby(runs) if stood_in), default=0)
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in net.parameters())
    results = gather((hashes, memory, injected, counts, longest, finite, seconds))
    staged.close()
    if rank == 0:
        print_long(results, options)


def print_long(results, options):
    print(
        f"{len(results)} ranks, {options.steps} steps in {max(seconds for *_, seconds in results):.0f} s; "
        f"deadline {1000 * options.deadline_s:.0f} ms, grace half of it, max_lag 32; no errors"
    )
    names = ("stalls", "NaNs"), ("late", "truncated", "stood in for", "with NaNs", "skipped")
    rows = [("rank", "RSS MiB at 10 %", "50 %", "100 %", *names[0], *names[1], "longest such run", "parameters")]
    for rank, (hashes, memory, injected, counts, longest, finite, _) in enumerate(results):
        cells = [*(f"{memory[share]:.1f}" for share in sorted(memory)), *(str(injected[name]) for name in names[0])]
        cells += [*(str(counts[name]) for name in names[1]), str(longest)]
        rows.append((str(rank), *cells, hashes[-1] + ("" if finite else " not finite")))
    print(text_table(rows))
    agree = sum(len(set(column)) == 1 for column in zip(*(hashes for hashes, *_ in results), strict=True))
    print(f"parameters compared at {len(results[0][0])} moments of the run, the same on all ranks at {agree}")


# -- the evidence that peers wait


def serve(pipe):
    """The store's server, in a process of its own so that its CPU time is known."""
    server = serve_store()
    pipe.send(server.port)
    pipe.recv()


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count_up(port, number, num_clients, barrier, pipe, options):
    """Many clients in one process: in each step each adds one, as `Channel.post_finished` does, some at a time."""
    first = dist.TCPStore(HOST, port)
    with ThreadPoolExecutor(options.threads) as pool:  # each waits for a name server
        clients = list(pool.map(lambda _: dist.PrefixStore("straggle/0", first.clone()), range(num_clients)))

    def post(client, step):
        began = time.monotonic()
        client.add(f"finished/{step}", 1)
        return time.monotonic() - began

    steps = []
    with ThreadPoolExecutor(min(num_clients, options.threads)) as pool:
        for step in range(options.steps):
            barrier.wait()
            began = time.monotonic()
            seconds = list(pool.map(post, clients, [step] * num_clients))
            steps.append((began, time.monotonic(), seconds))
            if number == 0 and step >= 32:
                clients[0].delete_key(f"finished/{step - 32}")
            barrier.wait()
            time.sleep(max(0.0, began + options.period_s - time.monotonic()))
    pipe.send(steps)


def read(port, running, seconds):
    """One late rank that asks how many have finished the running step, as its stand-in does; until that is ``None``."""
    store = dist.PrefixStore("straggle/0", dist.TCPStore(HOST, port))
    while (step := running[0]) is not None:
        began = time.monotonic()
        store.add(f"finished/{step}", 0)
        seconds.append(time.monotonic() - began)
        time.sleep(0.002)


def evidence(options):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    rows = [evidence_columns()]
    rows += [evidence_row(num_clients, options) for num_clients in dict.fromkeys([4, options.clients])]
    print(f"{options.steps} steps, one at least every {options.period_s} s; every client adds one in each")
    print(text_table(rows))
    print(
        "add: one increment as its client sees it, in a burst of all clients; at once: requests in flight at most; "
        "step: from the first increment's start to the last one's end; server: of one core, over the run"
    )


def evidence_columns():
    return (
        "clients",
        "processes",
        "at once",
        "add ms p50",
        "p99",
        "step ms p50",
        "p99",
        "reader ms p50",
        "p99",
        "server CPU",
        "µs per add",
    )


def evidence_row(num_clients, options):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "straggle"])
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    num_processes = min(options.processes, num_clients)
    shares = [num_clients // num_processes + (i < num_clients % num_processes) for i in range(num_processes)]
    barrier = context.Barrier(num_processes + 1)
    pipes, processes = [], []
    for number, share in enumerate(shares):
        pipe, other = context.Pipe()
        arguments = (port, number, share, barrier, other, options)
        processes.append(context.Process(target=count_up, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    running, read_s = [0], []
    reader = threading.Thread(target=read, args=(port, running, read_s))
    for step in range(options.steps):
        running[0] = step
        barrier.wait()
        if step == 0:
            began, cpu_before = time.monotonic(), cpu_s(server.pid)
            reader.start()
        barrier.wait()
    used_s, wall_s = cpu_s(server.pid) - cpu_before, time.monotonic() - began
    running[0] = None
    reader.join()
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    ours.send("end")
    server.join()
    adds = [1000 * second for steps in results for *_, seconds in steps for second in seconds]
    step_ms = [
        1000 * (max(end for _, end, _ in steps) - min(start for start, _, _ in steps))
        for steps in zip(*results, strict=True)
    ]
    at_once = sum(min(share, options.threads) for share in shares)
    numbers = [f(values) for values in (adds, step_ms, [1000 * s for s in read_s]) for f in (statistics.median, p99)]
    per_add = 1e6 * used_s / (len(adds) + len(read_s))
    cells = [*(f"{number:.2f}" for number in numbers), f"{used_s / wall_s:.1%}", f"{per_add:.0f}"]
    return (str(num_clients), str(num_processes), str(at_once), *cells)


def p99(values):
    return quantile(values, 0.99)


# -- no rank is late


def small():
    """A model whose step takes about 5 ms, and its loss."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.Tanh())))
    return model, lambda model: model(torch.randn(32, 192)).square().mean()


def text():
    workload = Text()
    return workload.model(), lambda model: workload.loss(model, workload.batch(torch.randint(10000, (16,))))


WAYS = {
    "DDP": "DistributedDataParallel",
    "bare": "StagedDataParallel without what makes it safe: no stand-in, a row of telemetry that never changes, no "
    "deadline policy",
    "bare again": "a second one, to show how much of a difference is chance",
    "complete": "StagedDataParallel with stand-in, evidence, telemetry and QuantileDeadline(0.5, 1000), never hit",
    "report": "the same with model.last_report read after every step",
    "auto": "as complete, with AutoDeadline, which gets every rank's progress and chooses again every 25 steps; "
    "never hit",
    "auto itself": "as complete, with AutoDeadline(): a step's deadline is 1.4 times the median rank's time",
    "first k": "as complete, with FirstK of half of the ranks and a grace that is never over: each writes to the store "
    "that it has finished, and asks for its peers",
}


def wrap(way, model):
    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "auto":
        return StagedDataParallel(model, deadline=AutoDeadline(least_gain=1000.0, max_over_median=1000.0))
    if way == "auto itself":
        return StagedDataParallel(model, deadline=AutoDeadline())
    if way == "first k":
        return StagedDataParallel(model, deadline=FirstK(dist.get_world_size() // 2, grace_s=1000.0))
    staged = StagedDataParallel(model, deadline=QuantileDeadline(0.5, slack=1000.0))
    return bare(staged) if way.startswith("bare") else staged


def bare(staged):
    """Takes off what `complete` has beyond hooks, flat buffers, weights and the merge."""
    coordinator = staged._coordinator
    row = telemetry.Row(dict.fromkeys(PHASES, 0.0), 0.1, 0.1)
    rows = {}

    def submit(current, own, _scalars, given):
        stages = len(coordinator.plan.stages)
        if stages not in rows:
            ones, zeros = (1.0,) * stages, (0.0,) * stages
            rows[stages] = row._replace(computed=ones, estimated=zeros, stage_s=zeros, weights=ones).numbers()
        current.buffers.write_state(given.message)
        current.buffers.write_telemetry(dist.get_rank(), rows[stages])
        current.close(own, current.weights(own))
        now = coordinator.stopwatch.now()
        coordinator.merging.submit(now)
        return now

    coordinator._submission._submit = submit
    coordinator.deadline.wait_for_all()
    coordinator.deadline._window.append = lambda *_: None
    coordinator.start = lambda: None
    return staged


def overhead(rank, options):
    torch.manual_seed(rank)
    steps_of, ways = {}, [way for way in WAYS if way in {"DDP", "bare", *options.ways}]
    for way in ways:
        model, compute_loss = small() if options.workload == "small" else text()
        steps_of[way] = one_step(way, wrap(way, model), compute_loss)
    draw, seconds, cpu = random.Random(0), {way: [] for way in ways}, {way: [] for way in ways}
    for number in range(options.rounds + 3):
        for way in draw.sample(ways, len(ways)):  # in turns, in an order that changes
            dist.barrier()
            steps_of[way]()
            before = time.process_time()
            times = [steps_of[way]() for _ in range(options.steps)]
            if number >= 3:
                seconds[way].append(statistics.median(times))
                cpu[way].append((time.process_time() - before) / options.steps)
    if rank == 0:
        print_overhead(seconds, cpu, options)


def one_step(way, model, compute_loss):
    """A function that makes a step and gives its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        began = time.perf_counter()
        with contextlib.nullcontext() if way == "DDP" else model.step():
            compute_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if way == "report":
            _ = model.last_report
        return time.perf_counter() - began

    return step


def print_overhead(seconds, cpu, options):
    num_steps = options.rounds * options.steps
    print(f"{options.workload}: {dist.get_world_size()} ranks, {num_steps} steps of each in {options.rounds} turns")
    rows = [("", "ms a step", "ratio to DDP", "ratio to bare", "quartiles", "CPU ms", "ratio to bare", "quartiles")]
    for way, times in seconds.items():
        to_ddp = statistics.median(a / b for a, b in zip(times, seconds["DDP"], strict=True))
        cells = [f"{1000 * statistics.median(times):.3f}", f"{to_ddp:.3f}", *median_ratio(times, seconds["bare"])]
        rows.append((way, *cells, f"{1000 * statistics.median(cpu[way]):.3f}", *median_ratio(cpu[way], cpu["bare"])))
    print(text_table(rows))
    print("medians over rounds of a round's median step on rank 0; ratios within a round; CPU: of all of its threads")
    for way in seconds:
        print(f"  {way}: {WAYS[way]}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("stall")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--turns", type=int, default=3)
    command.add_argument("--steps", type=int, default=60, help="of each turn")
    command.add_argument("--every", type=int, default=10)
    command.add_argument("--stall-s", type=float, default=2.0)
    command.add_argument("--compute-s", type=float, default=0.1)
    command.add_argument("--deadline-s", type=float, default=0.3)
    command.add_argument("--max-lag", type=int, default=64)
    command = commands.add_parser("long")
    command.add_argument("--ranks", type=int, default=4)
    command.add_argument("--steps", type=int, default=10000)
    command.add_argument("--deadline-s", type=float, default=0.01)
    command = commands.add_parser("evidence")
    command.add_argument("--clients", type=int, default=1000)
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--period-s", type=float, default=0.1)
    command.add_argument("--processes", type=int, default=8)
    command.add_argument("--threads", type=int, default=16, help="of each process")
    command = commands.add_parser("overhead")
    command.add_argument("workload", choices=["text", "small"])
    command.add_argument("--ranks", type=int, default=2)
    command.add_argument("--rounds", type=int, default=60)
    command.add_argument("--steps", type=int, default=8, help="of each round and way")
    command.add_argument(
        "--ways", nargs="*", choices=WAYS, default=list(WAYS), help="beside DDP and bare; default: all"
    )
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning for each client whose name is not known
    if options.command == "evidence":
        evidence(options)
    else:
        run_on_ranks({"stall": stall, "long": long, "overhead": overhead}[options.command], options.ranks, options)
