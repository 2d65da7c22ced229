"""How long a worker takes to be up under `straggle launch`, and what that costs, with --preload and without, in turns.

OMP_NUM_THREADS=1 python benchmarks/starts.py
"""

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from straggle.report import text_table

WAYS = {"new processes": (), "--preload torch,straggle": ("--preload", "torch,straggle")}
KILLED = 1


def worker(folder):
    """Build an optimizer, say how long that took from the process's start, and end when all have; one dies first."""
    import torch

    torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    up_s = time.clock_gettime(time.CLOCK_BOOTTIME) - _started_at()
    rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _leave(folder / f"up.{rank}.{count}", up_s)
    _wait(folder, "up.*.0")
    if count:
        return
    server = os.getppid()
    shared = rank == 0 and "fork_server" in Path(f"/proc/{server}/cmdline").read_text()
    _leave(folder / f"memory.{rank}", _memory(os.getpid()) + (_memory(server) if shared else 0))
    _wait(folder, "memory.*")
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def _started_at():
    """Seconds from when the machine was started, by ticks of 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pid):
    """MB of a process: its own pages, and its share of those that others have, too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def _leave(path, number):
    partial = path.with_suffix(".partial" + path.suffix)
    partial.write_text(str(number))
    partial.rename(path.with_name(path.name.replace(".partial", "")))


def _wait(folder, files):
    while len([path for path in folder.glob(files) if "partial" not in path.name]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def one(options, workers):
    """Seconds to be up at each first start and at the restart, of the job, and of its CPU; MB of all processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["-m", "straggle", "launch", *options, "--restart-delay-s", "0", "--nproc-per-node", str(workers)]
        began_at, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words, __file__, "--worker", name], check=True, stderr=subprocess.DEVNULL)
        seconds, after = time.monotonic() - began_at, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        first = [float(path.read_text()) for path in folder.glob("up.*.0")]
        again = [float(path.read_text()) for path in folder.glob("up.*.1")]
        memory = sum(float(path.read_text()) for path in folder.glob("memory.*"))
    return first, again, [seconds], [cpu_s], [memory]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker)
    found = {way: [[] for _ in range(5)] for way in WAYS}
    for _ in range(given.turns):
        for way, options in WAYS.items():
            for every, own in zip(found[way], one(options, given.workers), strict=True):
                every += own
    names = ("first start, s", "restart, s", "the whole job, s", "its CPU, s", "memory of the workers, MB")
    rows = [
        (name, *(f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})" for own in numbers))
        for name, numbers in zip(names, zip(*found.values(), strict=True), strict=True)
    ]
    print(f"{given.workers} workers, {given.turns} turns: median (range)\n")
    print(text_table([("", *WAYS), *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
