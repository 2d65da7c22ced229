"""What a state that travels to a newcomer costs the peers' steps on a slow network.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_healing.py
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_healing.py --mb-per-s 20 --ballast-mb 60
OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/slow_healing.py --latency-ms 25 --ballast-mb 60

Four ranks in network namespaces of this machine, with about 5.1 MB of gradients and 0.1 s of work a step that sleeps.
Each link between two of them carries so many megabytes a second, each way. In step 40 one rank is stopped for 4 s; it
is put out, and comes back. gloo's ring goes from each rank to the one before it, so the state of rank 0 shares its link
with gradients where it is sent to rank 3 (the default), and not where it is sent to rank 1 or 2. Needs root. Times are
those of rank 0. The replicas are compared at the end.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import Slow, Unavailable, enter, hosts, options_of
from sleeping import sleeping_net
from torch import nn

import straggle
from straggle.lab.local_ranks import run_on_ranks

RANKS = 4
WIDTH, LAYERS, WORK_S = 400, 7, 0.1
STOPPED_AT, STEPS = 40, 150
STOPPED_S = 4.0  # longer than the suspicion time
MTU = 9000
PORT = 29519
NETWORK = "10.84.0"


def train(rank, names, folder, options):
    """Each step's seconds, and whether the one rank was a ``member``, ``out``, or gave nothing (``heals``)."""
    dist.destroy_process_group()
    enter(names[rank])
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    store = dist.TCPStore(f"{NETWORK}.1", PORT, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    late_handling = straggle.LateHandling(max_lag=options["max_lag"])
    model = straggle.StagedDataParallel(
        sleeping_net(WIDTH, LAYERS, WORK_S), members=straggle.Elastic(), late_handling=late_handling
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ballast = nn.Module()
    ballast.register_buffer("zeros", torch.zeros(options["ballast_mb"] << 18))
    model.register_state(optimizer=optimizer, ballast=ballast)
    stopping, steps = threading.Thread(target=stop, args=(Path(folder) / str(options["rank"]),)), []
    for number in range(STEPS):
        if rank == 0 and number == STOPPED_AT:
            stopping.start()
        began = time.perf_counter()
        with model.step():
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = model.last_report.ranks[options["rank"]]
        steps.append((time.perf_counter() - began, "out" if own.absent else "member" if own.reach else "heals"))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    model.close()
    return {"steps": steps, "digest": digest}


def stop(pid_file):
    """Stop the one rank for a while."""
    pid = int(pid_file.read_text())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)


def measured(options):
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        links = {None: Slow(bytes_per_s=1e6 * options.mb_per_s, delay_s=1e-3 * options.latency_ms)}
        made = hosts(RANKS, links, forwarder=options.slownet, mtu=MTU, network=NETWORK, prefix="sh")
        return run_on_ranks(train, RANKS, stack.enter_context(made), folder, vars(options))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb-per-s", type=float, default=50.0, help="of each link")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of each link, each way")
    parser.add_argument("--ballast-mb", type=int, default=100, help="of state beside 5 MB of parameters")
    parser.add_argument("--rank", type=int, default=RANKS - 1, choices=range(1, RANKS), help="which one is stopped")
    parser.add_argument("--max-lag", type=int, default=8, help="LateHandling.max_lag")
    options = options_of(parser)
    try:
        results = measured(options)
    except Unavailable as why:
        sys.exit(f"skipped, {why}")
    if len({own["digest"] for own in results}) > 1:
        sys.exit("the replicas are not the same")
    steps = results[0]["steps"]
    usual = statistics.median(seconds for seconds, _ in steps[5:STOPPED_AT])
    missed = next(number for number, (_, what) in enumerate(steps) if what == "out")
    print(f"the usual step takes {1e3 * usual:.0f} ms; the one in which it is missed {steps[missed][0]:.2f} s")
    for what, words in (("out", "without it"), ("heals", "while it heals"), ("member", "after that")):
        own = [seconds for seconds, was in steps[missed + 1 :] if was == what]
        if own:
            median, longest, more_s = statistics.median(own) / usual, max(own) / usual, sum(own) - len(own) * usual
            print(f"{words}: {len(own)} steps, median {median:.2f}, longest {longest:.2f}, together {more_s:+.2f} s")


if __name__ == "__main__":
    main()
