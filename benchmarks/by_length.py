"""What it is worth that work of unequal lengths is dealt out by its cost: the same samples four ways, in turns.

torchrun --standalone --nproc-per-node 4 benchmarks/by_length.py
torchrun --standalone --nproc-per-node 2 benchmarks/by_length.py --blocks 3 --scenarios none

Samples are the paragraphs of the docstrings in Python's standard library; their lengths in words stand for tokens, at
most 256. A rank has 16 of them in a step, or a pool of as many, two in each micro-batch. Layers sleep for each token,
so that ranks which share few cores do not contend for them; nothing is padded. Scenarios: `none`, all ranks are equally
fast; `slow`, the last takes twice as long for a token. All ways have the same samples in a step, and the gradient is
the mean over their tokens: parameters must be equal to rounding.

A ratio is to `DealtLoader` by number, of the same block of steps; a block's seconds end with the slowest rank's. The
first blocks, in which shares follow, are left out (--first).
"""

import argparse
import ast
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sleeping import sleeping_net
from torch.utils.data import DataLoader, Dataset

import straggle
from straggle.data.deal import epoch_order
from straggle.lab.process_group import process_group
from straggle.observe.console import print_table

WIDTH, LAYERS, ROWS, PART, MOST = 16, 4, 16, 2, 256
SCENARIOS = ("none", "slow")


def paragraph_lengths():
    """In words, of all docstrings of the standard library's modules."""
    lengths = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                paragraphs = (ast.get_docstring(node) or "").split("\n\n")
                lengths += [min(MOST, words) for words in (len(text.split()) for text in paragraphs) if words]
    return lengths


class Paragraphs(Dataset):
    """A row for each token."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        return torch.sin(torch.arange(self.lengths[number] * WIDTH, dtype=torch.float64) + number).view(-1, WIDTH)


class Way:
    """``DealtLoader``, by number or by cost."""

    def __init__(self, arguments, scenario, data, *, by_cost):
        slow = 2 if scenario == "slow" and dist.get_rank() == dist.get_world_size() - 1 else 1
        torch.manual_seed(0)
        self.net = sleeping_net(WIDTH, LAYERS, 0.0, slow * arguments.token_us / 1e6 / LAYERS).double()
        self.model = straggle.StagedDataParallel(self.net, deadline=None)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.data, self.cost = data, data.lengths if by_cost else None
        self.block_s, self.steps = [], self.epochs()

    def epochs(self):
        plain = DataLoader(self.data, ROWS, shuffle=True, collate_fn=torch.cat)
        loader = straggle.DealtLoader(self.model, plain, cost=self.cost)
        while True:
            for x in loader:
                with self.model.step() as step:
                    step.weight = len(x)
                    self.model(x).square().mean().backward()
                yield

    def block(self, steps):
        dist.barrier()
        began_at = time.perf_counter()
        for _ in range(steps):
            next(self.steps)
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        self.block_s.append((time.perf_counter() - began_at) / steps)


class Pulled(Way):
    def epochs(self):
        parts = straggle.MicroBatches(self.data, size=PART, collate=torch.cat, cost=self.cost)
        total, epoch = ROWS * dist.get_world_size(), 0
        while True:
            for numbers in epoch_order(len(self.data), 0, epoch).split(total):
                batches = parts.of(numbers)
                own = numbers.tolist()
                if self.cost is not None:
                    own.sort(key=lambda number: -self.data.lengths[number])
                pairs = [own[first : first + PART] for first in range(0, len(own), PART)]
                tokens = [float(sum(self.data.lengths[number] for number in pair)) for pair in pairs]
                with self.model.step() as step:
                    for x in step.pull(batches, weights=tokens):
                        self.model(x).square().mean().backward()
                yield
            epoch += 1


WAYS = {
    "DealtLoader, by number": (Way, False),
    "DealtLoader, by cost": (Way, True),
    "pulled, by number": (Pulled, False),
    "pulled, by cost": (Pulled, True),
}


def measure(arguments, scenario, data):
    ways = {name: kind(arguments, scenario, data, by_cost=by_cost) for name, (kind, by_cost) in WAYS.items()}
    for turn in range(arguments.first + arguments.blocks):
        for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
            ways[name].block(arguments.steps)
    base = next(iter(ways.values()))
    rows = [row(name, way, base, arguments) for name, way in ways.items()]
    for way in ways.values():
        way.steps.close()
        way.model.close()
    if dist.get_rank() == 0:
        title = f"{scenario}: {dist.get_world_size()} ranks, {arguments.blocks} blocks of {arguments.steps} steps"
        print_table(title, ("", "step, mean", "ratio, median", "quartiles", "largest difference"), rows)


def row(name, way, base, arguments):
    own, of_base = (one.block_s[arguments.first :] for one in (way, base))
    ratios = [mine / other for mine, other in zip(own, of_base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    pairs = zip(way.net.parameters(), base.net.parameters(), strict=True)
    differ = max(float((mine - other).detach().abs().max()) for mine, other in pairs)
    return name, f"{1e3 * statistics.fmean(own):.0f} ms", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{differ:.0e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--first", type=int, default=4, help="blocks before those, which are left out")
    parser.add_argument("--steps", type=int, default=12, help="of one way before it is the next one's turn")
    parser.add_argument("--token-us", type=float, default=1000.0, help="microseconds that a token takes")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = Paragraphs(paragraph_lengths())
    with process_group():
        if dist.get_rank() == 0:
            low, middle, high = statistics.quantiles(data.lengths, n=4)
            print(
                f"{len(data)} samples of {low:g}, {middle:g}, {high:g} tokens (quartiles), {max(data.lengths)} at most"
            )
        for scenario in arguments.scenarios:
            measure(arguments, scenario, data)


if __name__ == "__main__":
    main()
