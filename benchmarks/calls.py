"""The way of a step through the library: calls for each gradient and for leaving a step, and the files they cross.

OMP_NUM_THREADS=1 python benchmarks/calls.py
OMP_NUM_THREADS=1 python benchmarks/calls.py --list      # every call, in order

A call is a function of the library that Python entered on the training thread, comprehensions left out; a crossing is a
call from one of the library's files into another. Medians over the gradients, and over the steps, after ten steps.
"""

import argparse
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import straggle

ROOT = str(Path(straggle.__file__).parent)


class Calls:
    """The library's calls on this thread between entering and leaving the block."""

    def __init__(self):
        self.seen = []
        self._caller = {}

    def __enter__(self):
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_error):
        sys.setprofile(None)

    def _event(self, frame, event, _argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name.startswith("<"):
            caller = caller.f_back
        inside = caller is not None and caller.f_code.co_filename.startswith(ROOT)
        self.seen.append(
            (
                code.co_filename,
                getattr(code, "co_qualname", code.co_name),
                caller.f_code.co_filename if inside else None,
            )
        )


def ways(calls, begins):
    """The calls split where one that was not made by the library ``begins`` a way."""
    found = []
    for call in calls:
        if call[2] is None:
            found.append([])
            found[-1].append(call)
        elif found:
            found[-1].append(call)
    return [way for way in found if begins(way[0])]


def print_calls(title, found):
    calls = [len(way) for way in found]
    files = [len({file for file, _, _ in way}) for way in found]
    crossings = [sum(caller not in (None, file) for file, _, caller in way) for way in found]
    print(
        f"{title}: {statistics.median(calls):g} calls ({min(calls)} to {max(calls)}), "
        f"{statistics.median(files):g} files, {statistics.median(crossings):g} crossings"
    )


def listed(way):
    for (file, name, caller), number in Counter(way).items():
        mark = " <" if caller not in (None, file) else ""
        print(f"    {number} x {Path(file).relative_to(ROOT)}:{name}{mark}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true", help="print the calls of one gradient and of leaving one step")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(9)]
    model = straggle.StagedDataParallel(nn.Sequential(*layers), deadline=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 64)
    gradients, leavings = [], []
    for number in range(20):
        with Calls() as calls, model.step():
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= 10:
            gradients += ways(calls.seen, lambda call: call[1].rpartition(".")[2] in ("finished", "gradient_ready"))
            leavings += ways(calls.seen, lambda call: call[1].endswith("Step.__exit__"))
    print_calls("a gradient", gradients)
    print_calls("leaving a step", leavings)
    if options.list:
        print("a gradient")
        listed(gradients[1])
        print("leaving a step")
        listed(leavings[-1])
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
