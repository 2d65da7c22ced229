"""A member that is slow for good: put out and, once it is fast, let in again, beside one that stays.

python benchmarks/slow_work.py                                            # about twenty minutes
python benchmarks/slow_work.py --cases dataset --rounds 1                 # a first look

Rank 1 of four sleeps 0.4 s a step more than the others, whose layers sleep 0.15 s: as it loads a batch, or in its
layers, and from a step on no more. Jobs under `straggle launch` in turns, so that each round meets the same machine.
"""

import argparse
import math
import os
import statistics
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from members_job import End, Job, Lines, digest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import straggle
from straggle.report import text_table

RANKS, SLOW, WIDTH, ROWS, SLOW_S, LAYERS_S = 4, 1, 16, 8, 0.4, 0.15
FIRST, APART, LAST = (10, 60), 100, 40  # steps with it; that it is out before it is fast; and then
CASES = {
    "dataset": ("data", "none"),
    "layers": ("layers", "none"),
    "dataset, AutoDeadline": ("data", "auto"),
    "layers, AutoDeadline": ("layers", "auto"),
}
WAYS = {"put out": 1.1, "stays": math.inf}


class Data(Dataset):
    """Each batch takes ``batch_s()`` to load."""

    def __init__(self, batch_s):
        self._batch_s = batch_s

    def __len__(self):
        return 1_000_000

    def __getitems__(self, numbers):
        time.sleep(self._batch_s())
        return [torch.full((WIDTH,), float(number % 7)) for number in numbers]


def work(folder, place, deadline, gain):
    """One rank: for each step when it was over, and who was out."""
    dist.init_process_group("gloo")
    rank, fast = dist.get_rank(), folder / "fast"

    def more_s(where):
        return SLOW_S if rank == SLOW and where == place and not fast.exists() else 0.0

    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    policy = straggle.AutoDeadline() if deadline == "auto" else None
    model = straggle.StagedDataParallel(net, deadline=policy, members=straggle.Elastic(absence_gain=gain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = model.register_state(optimizer=optimizer)
    data, lines, end = Data(lambda: more_s("data")), Lines(folder, rank), End(folder)
    for x in islice(DataLoader(data, ROWS, sampler=DistributedSampler(data)), step, None):
        if end.reached(step):
            break
        with model.step():
            loss = model(x).square().mean()
            time.sleep(LAYERS_S + more_s("layers"))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        lines.write(step, list(report.absent_ranks), [own.reach for own in report.ranks])
        step += 1
    (folder / f"hash.{rank}").write_text(digest(net))
    model.close()


def watched(case, way):
    """What came of a job: ms of a step with it, without it, when it was out, and how soon it was back."""
    place, deadline = CASES[case]
    arguments = ["--place", place, "--deadline", deadline, "--gain", str(WAYS[way])]
    job = Job(RANKS, __file__, *arguments, preload=True)
    try:
        until(lambda: len(job.lines(0)) > FIRST[1] + APART or any(line[2] for line in job.lines(0)))
        begins = len(job.lines(0)) if way == "put out" else FIRST[1]
        until(lambda: len(job.lines(0)) > begins + APART)
        (job.folder / "fast").touch()
        fast_at, num_lines = time.time(), len(job.lines(0))
        if way == "put out":
            until(lambda: not job.lines(0)[-1][2])
        until(lambda: len(job.lines(0)) > num_lines + LAST)
        job.end_at(len(job.lines(0)) + 15)
        job.wait()
        lines, same = job.lines(0), len(set(job.hashes().values())) == 1
    finally:
        job.close()
    out = next((line[1] for line in lines if line[2]), None)
    back = next((line[0] - fast_at for line in lines[num_lines:] if not line[2]), math.nan) if out else math.nan
    with_it, without = lines[slice(*FIRST)], lines[num_lines - APART + 10 : num_lines]
    given = statistics.fmean(line[3][SLOW] for line in with_it)
    return ms_a_step(with_it), ms_a_step(without), out, back, given, same


def ms_a_step(lines):
    return 1e3 * (lines[-1][0] - lines[0][0]) / (len(lines) - 1)


def until(condition, limit_s=300):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "too slow"
        time.sleep(0.2)


def row(case, way, made):
    first, later, out, back, given, same = zip(*made, strict=True)
    ratios = sorted(b / a for a, b in zip(first, later, strict=True))
    return (
        case,
        way,
        f"{statistics.median(first):.0f}",
        f"{statistics.median(given):.2f}",
        f"{statistics.median(later):.0f}",
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        ", ".join("never" if step is None else str(step) for step in out),
        ", ".join(f"{seconds:.0f}" for seconds in back if seconds == seconds),
        "yes" if all(same) else "NO",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", help=argparse.SUPPRESS)
    parser.add_argument("--gain", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        work(args.folder, args.place, args.deadline, args.gain)
        return
    made = {(case, way): [] for case in args.cases for way in WAYS}
    for _ in range(args.rounds):
        for case, way in made:
            made[case, way].append(watched(case, way))
            print(f"load {os.getloadavg()[0]:.0f}", case, way, made[case, way][-1], flush=True)
    header = ("slow in", "", "ms with it", "it gave", "ms later", "ratio", "out in step", "s until back", "same")
    print(text_table([header, *(row(*key, own) for key, own in made.items())]))


if __name__ == "__main__":
    main()
