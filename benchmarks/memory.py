"""Peak memory beside DDP's: two ranks of this machine, each way in processes of its own.

OMP_NUM_THREADS=1 python benchmarks/memory.py                        # all models
OMP_NUM_THREADS=1 python benchmarks/memory.py text small --runs 7

Resident memory of rank 0's process over what it had before the model was wrapped, while no rank is late. Then of rank
1, which is stuck in one step while rank 0 makes ``--lag`` of them: each waits for it in a ring. DDP has
``gradient_as_bucket_view=True``. Linux only: it reads and resets ``VmHWM``.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from paired import median_ratio
from step_time import COMPUTING, MODELS, one_step, wrap

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

STEPS = 12
WAYS = ("DDP", "straggle")
STATUS = Path("/proc/self/status")


def resident(name):
    """``VmRSS`` or its peak, ``VmHWM``, in MB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def healthy(_rank, name, way):
    """MB of gradients, and the peak of the whole process and over what it had before the model was wrapped."""
    torch.manual_seed(0)
    make, num_microbatches = MODELS[name]
    model, compute_loss = make()
    compute_loss(model).backward()  # what the first pass loads counts for neither
    model.zero_grad()
    before = resident("VmRSS")
    step = one_step(wrap(way, model), compute_loss, num_microbatches)
    reset_peak()
    for _ in range(STEPS):
        step()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    return gradients, resident("VmHWM"), resident("VmHWM") - before


def stuck(rank, name, lag):
    """MB that rank 1 has more for each merged step that waits for it, and of gradients."""
    torch.manual_seed(0)
    make, num_microbatches = MODELS[name]
    module, compute_loss = make()
    late_handling = straggle.LateHandling(quorum=1, grace_s=0.01, max_lag=lag + 1)
    model = straggle.StagedDataParallel(module, deadline=0.2, late_handling=late_handling)
    step = one_step(model, compute_loss, num_microbatches)
    for _ in range(4):
        step()
    dist.barrier()
    before, gradients = resident("VmRSS"), sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
    if rank == 0:
        for _ in range(lag):
            step()
        return gradients, 0.0
    until = time.monotonic() + 300
    while model.lag < lag and time.monotonic() < until:
        time.sleep(0.05)
    grown = resident("VmRSS") - before
    for _ in range(lag):
        step()
    return gradients, grown / lag


def row(name, options):
    """One model's line: medians over the runs, whose ways are in turns."""
    peaks, grown = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for _ in range(options.runs):
        for way in WAYS:
            gradients, peak, own = run_on_ranks(healthy, 2, name, way)[0]
            peaks[way].append(peak)
            grown[way].append(own)
    ratio, quartiles = median_ratio(peaks["straggle"], peaks["DDP"])
    own = [f"{statistics.median(grown[way]):.1f}" for way in WAYS]
    whole = [f"{statistics.median(peaks[way]):.0f}" for way in WAYS]
    per_step = statistics.median(run_on_ranks(stuck, 2, name, options.lag)[1][1] for _ in range(3))
    return (name, f"{gradients:.1f}", *whole, ratio, quartiles, *own, f"{per_step:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all that compute")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--lag", type=int, default=16)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    columns = (
        "model",
        "gradients",
        "DDP",
        "straggle",
        "ratio",
        "quartiles",
        "DDP, own",
        "straggle, own",
        "a step of lag",
    )
    rows = [row(name, options) for name in options.models or COMPUTING]
    print(f"MB, medians of {options.runs} runs; own: beyond what the process had before the model was wrapped")
    print(text_table([columns, *rows]))


if __name__ == "__main__":
    main()
