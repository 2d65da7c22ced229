"""Times that are taken in turns, and their ratios: each to its neighbour, so that a drift of the machine meets both."""

import random
import statistics

import torch.distributed as dist

WARMUP = 3  # rounds


def in_turns(steps, rounds, num_steps):
    """For each way the median seconds of ``num_steps`` steps, of every round; ``steps``: for each a step's function.

    The order of a round is drawn alike on all ranks, and begins for each way with a step that is not counted.
    """
    seconds, draw = {way: [] for way in steps}, random.Random(0)
    for number in range(WARMUP + rounds):
        for way in draw.sample(list(steps), len(steps)):
            dist.barrier()
            steps[way]()
            times = [steps[way]() for _ in range(num_steps)]
            if number >= WARMUP:
                seconds[way].append(statistics.median(times))
    return seconds


def median_ratio(times, base):
    """The median of the ratios and their quartiles, as text."""
    ordered = sorted(a / b for a, b in zip(times, base, strict=True))
    quartiles = f"{ordered[len(ordered) // 4]:.3f} to {ordered[-1 - len(ordered) // 4]:.3f}"
    return f"{statistics.median(ordered):.3f}", quartiles
