"""How far bfloat16 gradients on the wire are from those that are not rounded, beside DDP's hook: ranks of this machine.

OMP_NUM_THREADS=1 python benchmarks/wire_dtype.py
"""

import argparse
import contextlib
import os
from functools import partial

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.local_ranks import run_on_ranks
from straggle.lab.workloads.text import Text
from straggle.report import text_table


def rounding_hook(state, bucket):
    """By its own name, DDP refuses torch's hook on gloo."""
    return bf16_compress_hook(state, bucket)


def with_hook(module):
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, rounding_hook)
    return model


WAYS = {
    "exact": DistributedDataParallel,
    "straggle, bfloat16": partial(straggle.StagedDataParallel, merge=straggle.Merge(wire_dtype="bfloat16")),
    "DDP, bf16_compress_hook": with_hook,
}


def gradients(rank, way, workload):
    """The merged gradients of one batch, as one vector."""
    torch.manual_seed(0)
    model = WAYS[way](workload.model())
    torch.manual_seed(1 + rank)
    batch = workload.batch(torch.randint(workload.num_samples, (4,)))
    with model.step() if isinstance(model, straggle.StagedDataParallel) else contextlib.nullcontext():
        workload.loss(model, batch).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.module.parameters()]).double()


def measure(rank):
    workload = Text()
    found = {way: gradients(rank, way, workload) for way in WAYS}
    exact = found.pop("exact")
    scale = exact.square().mean().sqrt()
    return {
        way: (float((own - exact).square().mean().sqrt() / scale), float(torch.cosine_similarity(own, exact, dim=0)))
        for way, own in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rows = [("", "ranks", "error / gradient, rms", "cosine")]
    for ranks in options.ranks:
        for way, (error, cosine) in run_on_ranks(measure, ranks)[0].items():
            rows.append((way, str(ranks), f"{error:.5f}", f"{cosine:.7f}"))
    print(text_table(rows))


if __name__ == "__main__":
    main()
