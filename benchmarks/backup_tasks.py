"""The end of a step whose micro-batches are drawn: waited for, computed a second time by an idle rank, or cut off.

torchrun --standalone --nproc-per-node 4 benchmarks/backup_tasks.py
torchrun --standalone --nproc-per-node 4 benchmarks/backup_tasks.py --slow 4

The last rank is slow. All draw from one counter in the job's store. "Backup" (Dean and Ghemawat, MapReduce, 2004): a
rank that finds nothing left computes the micro-batch that another is in a second time; the first to come counts, by a
compare-and-set, and the other stops at its next layer. "Cut off": who is in a micro-batch when all others have found
nothing left stops at its next layer, and that micro-batch is dropped. A micro-batch is eight sleeps, as of four layers
forward and backward. This is the arithmetic of the end alone: there is no model, and what is merged is one vector.

Known before: with R ranks at speed 1 and one at 1/s, a backup that begins when the pool is empty ends one micro-batch
later; the slow rank's last micro-batch ends at most s micro-batches later. So a backup can only win where s is well
above 2, and a share that follows speed leaves a rank so slow few micro-batches to be late with.
"""

import argparse
import time
from statistics import fmean

import torch
import torch.distributed as dist

from straggle.lab.jobs import process_group
from straggle.merge.store import default_store
from straggle.observe.console import print_table

EACH, PART_S, SLICES = 8, 0.02, 8
ENDS = ("waited for", "backup", "cut off")


def compute(seconds: float, stops) -> bool:
    """One micro-batch; false where it was left because of ``stops()``."""
    for _ in range(SLICES):
        if stops():
            return False
        time.sleep(seconds / SLICES)
    return True


def first(store, key: str, rank: int) -> bool:
    """Whether this rank is the first to bring what ``key`` says."""
    return store.compare_set(key, "", str(rank)).decode() == str(rank)


def step(store, name: str, end: str, seconds: float, total: int) -> tuple[float, list[int]]:
    """Seconds, and the micro-batches of this rank that count."""
    rank, world, own = dist.get_rank(), dist.get_world_size(), []
    dist.barrier()
    began_at = time.perf_counter()
    while (number := store.add(f"{name}/drawn", 1) - 1) < total:
        store.set(f"{name}/in/{rank}", str(number))
        key, is_end = f"{name}/by/{number}", number >= total - world  # of the others it need not ask
        if end == "backup" and is_end:
            done = compute(seconds, lambda key=key: store.check([key]))
            own += [number] if done and first(store, key, rank) else []
        elif end == "cut off" and is_end:
            own += [number] if compute(seconds, lambda: store.add(f"{name}/idle", 0) == world - 1) else []
        else:
            compute(seconds, lambda: False)
            own.append(number)
    if end == "cut off":
        store.add(f"{name}/idle", 1)
    if end == "backup":
        for other in range(world):  # what the others are in; a rank that is done has brought it
            key = f"{name}/in/{other}"
            number = int(store.get(key)) if other != rank and store.check([key]) else -1
            if number < total - world or store.check([f"{name}/by/{number}"]):
                continue
            key = f"{name}/by/{number}"
            if compute(seconds, lambda key=key: store.check([key])) and first(store, key, rank):
                own.append(number)
    merged = torch.zeros(total)
    merged[own] = 1.0
    dist.all_reduce(merged)
    assert merged.max() <= 1.0, "a micro-batch counts twice"
    return time.perf_counter() - began_at, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each end, in turns")
    parser.add_argument("--slow", type=float, default=2.0, help="how many times as long the last rank takes")
    arguments = parser.parse_args()
    with process_group():
        rank, world = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore("backup", default_store().clone())
        seconds, total = PART_S * (arguments.slow if rank == world - 1 else 1), EACH * world
        step_s, dropped = {end: [] for end in ENDS}, {end: [] for end in ENDS}
        for number in range(arguments.steps):
            for end in ENDS:
                own_s, own = step(store, f"{end}/{number}", end, seconds, total)
                numbers = torch.tensor([own_s, -float(len(own))], dtype=torch.float64)
                count = numbers[1:].clone()
                dist.all_reduce(numbers, dist.ReduceOp.MAX)
                dist.all_reduce(count)
                step_s[end].append(float(numbers[0]))
                dropped[end].append(1.0 + float(count) / total)
        if rank == 0:
            waiting_s = EACH * PART_S * arguments.slow
            rows = [
                (end, f"{1e3 * fmean(own):.1f} ms", f"{fmean(own) / waiting_s:.3f}", f"{fmean(dropped[end]):.2%}")
                for end, own in step_s.items()
            ]
            title = (
                f"{world} ranks, one {arguments.slow:g} times as slow; a static split takes {1e3 * waiting_s:.0f} ms"
            )
            print_table(title, ("the end", "step, mean", "of the static split", "dropped"), rows)


if __name__ == "__main__":
    main()
