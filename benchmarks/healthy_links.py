"""Whether a link is named that is as the others: four ranks on a machine that others use, and what they say of links.

OMP_NUM_THREADS=1 SLOWNET=path/to/slownet.py python benchmarks/healthy_links.py --minutes 30 --members
python benchmarks/healthy_links.py --loopback --minutes 30

About 5.1 MB of gradients, and 0.1 s of work a step that sleeps. Without ``--loopback`` the ranks are in network
namespaces of this machine, whose links have no limit; that needs root. Each line is what a rank said of a link or a
long merge, with the load of the machine. With ``--members`` a rank may be put out. ``--pings`` writes each ping to a
file.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import Unavailable, enter, hosts, options_of
from network import LAYERS, MTU, RANKS, WIDTH, WORK_S
from sleeping import sleeping_net

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.links import pings

MORE = 50  # steps after the one in which rank 0 has seen that the time is over: no rank is further by then


class Said(logging.Handler):
    """Prints what is said, with when and at what load."""

    def emit(self, record):
        print(f"{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}: {record.getMessage()}", flush=True)


def write_pings(rank, path):
    """Each ping goes into a file, as it was measured."""
    measure, file = pings.measure, open(f"{path}.{rank}", "a", buffering=1)  # noqa: SIM115 - until the process ends

    def measured(host, port, token, largest_bytes, **more):
        begin = time.time()
        found = measure(host, port, token, largest_bytes, **more)
        link, load = found.link, os.getloadavg()[0]
        file.write(json.dumps([begin, time.time() - begin, host, largest_bytes, *vars(link).values(), load]) + "\n")
        return found

    pings.measure = measured


def train(rank, names, folder, options):
    """Its steps' seconds, the load in them, the steps without a member, and the bytes of its pings."""
    logging.getLogger("straggle").addHandler(Said(logging.WARNING))
    if options["pings"]:
        write_pings(rank, options["pings"])
    if names:
        dist.destroy_process_group()
        enter(names[rank])
        store = dist.FileStore(f"{folder}/store")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    members = straggle.Elastic() if options["members"] else None
    net = sleeping_net(WIDTH, LAYERS, WORK_S)
    model = straggle.StagedDataParallel(net, members=members, links=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if members:
        model.register_state(optimizer=optimizer)
    until, seconds, load, absent = time.monotonic() + 60 * options["minutes"], [], [], 0
    ends, end = dist.FileStore(f"{folder}/ends"), None
    while end is None or model.last_report.step < end:
        began = time.perf_counter()
        with model.step():
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        load.append(os.getloadavg()[0])
        absent += any(own.absent for own in model.last_report.ranks)
        if rank == 0 and end is None and time.monotonic() > until:
            ends.set("end", str(model.last_report.step + MORE))
        if end is None and ends.check(["end"]):
            end = int(ends.get("end"))
    found = {"seconds": seconds, "load": load, "absent": absent, "bytes": model.ping_bytes}
    model.close()
    return found


def measured(options):
    with contextlib.ExitStack() as stack:
        folder, names = stack.enter_context(tempfile.TemporaryDirectory()), None
        if not options.loopback:
            where = {"network": "10.83.1", "prefix": "lk", "niceness": options.niceness}
            made = hosts(RANKS, {}, forwarder=options.slownet, mtu=MTU, **where)
            names = stack.enter_context(made)
        return run_on_ranks(train, RANKS, names, folder, vars(options))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--members", action="store_true", help="ranks may be put out")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--niceness", type=int, default=-10, help="of what forwards packets (default: -10)")
    parser.add_argument("--pings", help="beginning of the names of files, one for each rank")
    options = options_of(parser)
    options.pings = options.pings and str(Path(options.pings).resolve())
    try:
        results = measured(options)
    except Unavailable as why:
        sys.exit(f"skipped, {why}")
    first = results[0]
    load = first["load"]
    print(f"{len(first['seconds'])} steps, the median {1e3 * statistics.median(first['seconds']):.0f} ms")
    print(f"load {min(load):.1f} to {max(load):.1f}, {statistics.median(load):.1f} in the middle")
    print(f"steps without a member: {first['absent']}; {first['bytes'] / 1e6:.1f} MB of pings from rank 0")


if __name__ == "__main__":
    main()
