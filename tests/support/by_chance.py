"""Jobs drawn by chance, and what happens to their ranks. Which job it is follows from its number."""

import os
import random
import time

from members import run_forked_job
from recorded import LAST, MIDDLE, Stops, Stuck, kill_in_backward, stuck

JOBS = range(*map(int, os.environ.get("STRAGGLE_JOBS", "0:3").split(":")))
_HITS = ("short stop", "stall")
_HITS_OF_MEMBERS = ("kill", "kill in backward", "stop", "stop in backward", "short stop", "stall")


class Stalls:
    """By chance, at the ends and in the middle of each pass."""

    def __init__(self, module, share):
        self._chance, self._share = random.Random(), share
        for layer in (LAST, MIDDLE):
            module.layers[layer].register_forward_pre_hook(self._stall)
            module.layers[layer].weight.register_post_accumulate_grad_hook(self._stall)

    def _stall(self, *_):
        if self._chance.random() < self._share:
            time.sleep(self._chance.choice([0.02, 0.06, 0.15]))


def made_to_be_hit(module, folder, rank, stalls):
    """Let a model with ``layers`` be hit while it computes, and stall by itself in this share of the places."""
    for layer in (MIDDLE, LAST):
        Stuck(module, folder, rank, layer)
    Stalls(module, stalls)
    return Stops(module, folder, rank)


def draw_hits(chance, world_size, *, has_members):
    """Two to four hits: kind, rank, and a number from 0 to 1."""
    kinds = _HITS_OF_MEMBERS if has_members else _HITS
    return tuple(
        (chance.choice(kinds), chance.randrange(world_size), chance.random()) for _ in range(chance.randint(2, 4))
    )


def run_with_hits(number, plan, function, folder):
    """What ``function(rank, board, folder, plan)`` returns on each rank, which were hit meanwhile.

    Every other job has a store that is a server, as on a cluster.
    """
    with run_forked_job(plan.world_size, function, folder, plan, served=number % 2 == 1) as job:
        job.walk(12)
        for kind, rank, share in plan.hits:
            job.walk(3)
            job.meet()
            _hit(job, folder, kind, rank, share)
        job.walk(3)
        job.meet()
        return job.finish()


def _hit(job, folder, kind, rank, share):
    others = [other for other in range(job.world_size) if other != rank]
    match kind:
        case "kill" | "kill in backward":
            if kind == "kill":
                job.kill(rank)
            else:
                kill_in_backward(job, folder, rank)
            job.walk(8, others)
            job.start(rank)
        case "stop":
            job.stop(rank)
            job.walk(8, others)
            job.resume(rank)
        case "stop in backward":
            with stuck(job, folder, rank, LAST if share < 0.4 else MIDDLE):
                job.stop(rank)
                job.walk(8, others)
                job.resume(rank)
                time.sleep(share)
        case "short stop":
            job.stop(rank)
            time.sleep(0.1 + 2 * share)
            job.resume(rank)
        case "stall":
            with stuck(job, folder, rank):
                time.sleep(0.05 + 0.35 * share)
    job.walk(5)
