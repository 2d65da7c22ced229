"""Collectives of the loop's own on gloo: a rank is killed, and the others have what those there give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import left, script
from loaded import launch_with

pytest.importorskip("torchmetrics")

BODY = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torchmetrics import CatMetric
import straggle

dist.init_process_group("gloo")
me = int(rank)
model = straggle.StagedDataParallel(torch.nn.Linear(4, 2), deadline=None, members=straggle.Elastic(1, suspect_s=30))
first = model.register_state()
size, own = dist.get_world_size, lambda: torch.tensor([float(me), 1.0])

def all_reduce():
    x = own()
    dist.all_reduce(x)
    return x

def all_gather():
    came = [torch.zeros(2) for _ in range(size())]
    dist.all_gather(came, own())
    return torch.cat(came)

def all_gather_into():
    came = torch.zeros(2 * size())
    dist.all_gather_into_tensor(came, own())
    return came

def reduce_scatter():
    x = torch.zeros(2)
    dist.reduce_scatter_tensor(x, own().repeat(size()))
    return x

def broadcast():
    x = own()
    dist.broadcast(x, size() - 1)
    return x

def all_to_all():
    x = torch.zeros(size())
    dist.all_to_all_single(x, torch.full((size(),), float(me)))
    return x

def gathered_object():
    came = [None] * size()
    dist.all_gather_object(came, {"rank": me})
    return torch.tensor([float(one["rank"]) for one in came])

def given_object():
    given = [me]
    dist.broadcast_object_list(given, 0)
    return torch.tensor(given)

def of_metric():
    metric = CatMetric()
    metric.update(torch.full((me + 1,), float(me)))  # as many as no other rank has
    return metric.compute()

def traced():
    return functional.all_reduce(own(), "sum", dist.group.WORLD)

def waited_for():
    dist.barrier()
    dist.monitored_barrier()
    return torch.zeros(0)

def of_ddp():
    other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    other(own()).sum().backward()
    return other.module.weight.grad.flatten()

KINDS = [all_reduce, all_gather, all_gather_into, reduce_scatter, broadcast, all_to_all, gathered_object, given_object,
         of_metric, traced, of_ddp, waited_for]
told = []
for step in range(first, 3 * len(KINDS)):
    with model.step():
        model(torch.ones(1, 4)).sum().backward()
    if me == 1 and first == 0 and step == len(KINDS):
        os.kill(os.getpid(), signal.SIGKILL)
    kind, came = KINDS[step % len(KINDS)], torch.zeros(0)
    for _ in range(3):
        try:
            came = kind()
            break
        except straggle.MembersChanged:
            pass
    told.append((step, kind.__name__, size(), dist.get_rank(), came.tolist()))
leave("told", json.dumps(told))
"""


def expected(kind: str, ranks: list[int], rank: int) -> list[float]:
    """What comes among these ranks."""
    total = [float(sum(ranks)), float(len(ranks))]
    each = [number for own in ranks for number in (float(own), 1.0)]
    return {
        "all_reduce": total,
        "traced": total,
        "of_ddp": [number / len(ranks) for number in total],
        "all_gather": each,
        "all_gather_into": each,
        "reduce_scatter": total,
        "broadcast": [float(ranks[-1]), 1.0],
        "all_to_all": [float(own) for own in ranks],
        "gathered_object": [float(own) for own in ranks],
        "given_object": [float(ranks[0])],
        "of_metric": [float(own) for own in ranks for _ in range(own + 1)],
        "waited_for": [],
    }[kind]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked by a server that only Linux allows")
def test_collectives_of_each_kind_go_on_without_a_rank_that_is_killed(tmp_path: Path) -> None:
    words = ("--nproc-per-node=3", "--restart-delay-s=0", script(tmp_path, BODY))
    with launch_with("torchmetrics") as launch, launch(*words, folder=tmp_path) as job:
        status = job.status(200.0)
    assert status == 0, job.log.read_text()
    told: dict[int, list[Any]] = {rank: json.loads(left(tmp_path, "told", rank)) for rank in (0, 2)}
    sizes = [size for _, _, size, _, _ in told[0]]
    assert sizes[: len(sizes) // 3] == [3] * 12
    assert 2 in sizes
    for rank, own in told.items():
        for step, kind, size, place, came in own:
            ranks = [0, 1, 2] if size == 3 else [0, 2]
            assert (place, came) == (ranks.index(rank), expected(kind, ranks, rank)), (rank, step, kind)
