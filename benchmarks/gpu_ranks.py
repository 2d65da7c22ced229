"""What a step costs beside DDP's where several ranks share one GPU, over gloo: nobody late, and a rank that is late.

python benchmarks/gpu_ranks.py                  # two ranks, then four; each size ends within half a minute
python benchmarks/gpu_ranks.py --ranks 2 --rounds 20

The late rank sleeps on the host, in its data, beyond its deadline and grace in each fourth step. With gloo the host
carries gradients itself: it waits for the device, under DDP too. Parameters have to be identical on all ranks.
"""

import argparse
import hashlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from device_calls import calls_of, print_calls
from paired import in_turns, median_ratio
from step_time import one_step
from torch.nn.parallel import DistributedDataParallel

from straggle import FixedDeadline, LateHandling, StagedDataParallel
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.workloads.text import Text
from straggle.report import text_table

DEVICE = torch.device("cuda", 0)
WAYS = ("DDP", "DDP again", "straggle")
LATE = "straggle, a late rank"
DEADLINE_S, GRACE_S, SLEEP_S = 0.15, 0.05, 0.4
WARMUP, EVERY, PROFILED = 5, 4, 8  # steps
LIMIT_S = 28.0  # of all ranks of a size


def wrapped(way, text):
    torch.manual_seed(0)
    model = text.model().to(DEVICE)
    if way.startswith("DDP"):
        return DistributedDataParallel(model)
    handling = LateHandling(grace_s=GRACE_S)
    return StagedDataParallel(
        model, deadline=FixedDeadline(DEADLINE_S if way == LATE else 1000.0), late_handling=handling
    )


def timed(step):
    """A function that makes a step and gives its seconds, the device's work included."""

    def whole():
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return whole


def late_steps(model, compute_loss, sleeps, rounds):
    """Seconds of the steps in which a rank sleeps, and of all others; how often that rank's gradients were missing."""
    number = 0

    def loss(model):
        if sleeps and number % EVERY == 0:
            time.sleep(SLEEP_S)
        return compute_loss(model)

    step, late, others, missing = timed(one_step(model, loss, 1)), [], [], 0
    for number in range(1, 1 + WARMUP + EVERY * rounds):
        dist.barrier()
        (others if number % EVERY else late).append(step())
        missing += number % EVERY == 0 and model.last_report.ranks[-1].reach < 1
    return late, others[WARMUP:], missing


def digest(model):
    content = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def measure(rank, options):
    """On rank 0: the seconds of each way, the late steps, what the profiler counts, and the hashes of all ranks."""
    torch.cuda.set_device(DEVICE)
    text = Text()
    batch = tuple(part.to(DEVICE) for part in text.batch(torch.arange(32) + 32 * rank))
    models = {way: wrapped(way, text) for way in (*WAYS, LATE)}

    def compute_loss(model):
        return text.loss(model, batch)

    steps = {way: one_step(models[way], compute_loss, 1) for way in WAYS}
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    seconds = in_turns({way: timed(step) for way, step in steps.items()}, options.rounds, options.steps)
    calls = {way: counted(step, rank) for way, step in steps.items() if way != "DDP again"}
    late = late_steps(models[LATE], compute_loss, rank == dist.get_world_size() - 1, options.rounds)
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, {way: digest(model) for way, model in models.items()})
    for way in (WAYS[-1], LATE):
        models[way].close()
    return seconds, late, calls, hashes


def counted(step, rank):
    """By the profiler on rank 0; its peers make the same steps."""
    if rank == 0:
        return calls_of(step, PROFILED)
    for _ in range(PROFILED):
        step()
    return None


def show(ranks, seconds, late, calls, hashes):
    rows = [(f"{ranks} ranks", "ms", "over DDP", "quartiles")]
    for way, own in seconds.items():
        rows.append((way, f"{1000 * statistics.median(own):.2f}", *median_ratio(own, seconds["DDP"])))
    slept, others, missing = late
    rows.append((LATE, f"{1000 * statistics.median(slept):.2f}", "", ""))
    rows.append((f"{LATE}, but in time", f"{1000 * statistics.median(others):.2f}", "", ""))
    print(text_table(rows))
    print(
        f"  asleep for {SLEEP_S:g} s, with a deadline of {DEADLINE_S:g} s: left out of {missing} of {len(slept)} steps"
    )
    print_calls(calls)
    different = [way for way in hashes[0] if len({own[way] for own in hashes}) > 1]
    print(f"  parameters: {f'DIFFERENT under {different}' if different else 'identical on all ranks'}\n", flush=True)
    return not different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each round and way")
    options = parser.parse_args()
    failed = False
    for ranks in options.ranks:
        try:
            failed |= not show(ranks, *run_on_ranks(measure, ranks, options, timeout_s=LIMIT_S)[0])
        except Exception as error:  # the next size may still end
            print(f"{ranks} ranks: {error}", flush=True)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
