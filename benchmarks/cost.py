"""Log-normal lengths, with and without `step.cost`: how often a rank is late that is not slow, and one that is.

python benchmarks/cost.py                           # four ranks of this machine, about two minutes

The ranks' work is sleep, in proportion to the tokens of each step. In the second half rank 2 is 1.5 times as slow.
"""

import argparse
import statistics
import time

import torch
from chaos import Net, digest

from straggle import QuantileDeadline, StagedDataParallel
from straggle.lab.jobs import gather
from straggle.lab.local_ranks import run_on_ranks
from straggle.report import text_table

SLOW, FACTOR, MEAN_TOKENS = 2, 1.5, 1000.0


def draw_tokens(generator, spread):
    """Log-normal lengths, of a mean of `MEAN_TOKENS`."""
    return MEAN_TOKENS * float((spread * torch.randn((), generator=generator) - spread**2 / 2).exp())


def run(rank, options):
    """With and without costs: for each step seconds, who was late, and the share that was dropped."""
    results = {}
    for given in (False, True):
        torch.manual_seed(0)
        net = Net(compute_s=options.compute_s)
        usual = [(block.forward_s, block.backward_s) for block in net]
        model = StagedDataParallel(net, deadline=QuantileDeadline(0.5, slack=1.2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        generator, rows = torch.Generator().manual_seed(rank), []
        for number in range(options.warmup + 2 * options.steps):
            tokens = draw_tokens(generator, options.spread)
            slow = FACTOR if rank == SLOW and number >= options.warmup + options.steps else 1.0
            for block, (forward_s, backward_s) in zip(net, usual, strict=True):
                block.forward_s, block.backward_s = (
                    slow * tokens / MEAN_TOKENS * own for own in (forward_s, backward_s)
                )
            began = time.monotonic()
            with model.step() as step:
                if given:
                    step.cost = tokens
                model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = model.last_report
            reach = [own.reach for own in report.ranks]
            rows.append((time.monotonic() - began, list(report.late_ranks), reach))
        results[given] = (rows[options.warmup :], digest(net))
        model.close()
    return gather(results)


def print_results(ranks, options):
    head = (
        "step.cost",
        "none slow: late rank-steps",
        "dropped",
        "mean step",
        f"rank {SLOW} slow: first late in its step",
    )
    rows = [(*head, "late in", "others late in", "mean step", "alike")]
    for given in (False, True):
        own, half = ranks[0][given][0], options.steps
        free, slow = own[:half], own[half:]
        late = sum(len(late_ranks) for _, late_ranks, _ in free) / len(ranks) / half
        dropped = 1 - statistics.mean(reach for _, _, reaches in free for reach in reaches)
        named = [number + 1 for number, (_, late_ranks, _) in enumerate(slow) if SLOW in late_ranks]
        others = sum(rank != SLOW for _, late_ranks, _ in slow for rank in late_ranks) / (len(ranks) - 1) / half
        step_s = [1000 * statistics.mean(seconds for seconds, *_ in part) for part in (free, slow)]
        rows.append(
            (
                "given" if given else "not given",
                f"{late:.1%}",
                f"{dropped:.2%}",
                f"{step_s[0]:.0f} ms",
                str(named[0]) if named else "never",
                f"{len(named) / half:.1%}",
                f"{others:.1%}",
                f"{step_s[1]:.0f} ms",
                str(len({results[given][1] for results in ranks}) == 1),
            )
        )
    print(text_table(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compute-s", type=float, default=0.15)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print_results(run_on_ranks(run, options.ranks, options)[0], options)


if __name__ == "__main__":
    main()
