"""The simulator of pulled micro-batches against real ranks, in the scenarios of benchmarks/pulled.py.

torchrun --standalone --nproc-per-node 4 benchmarks/pulled_simulated.py                 # about four minutes
torchrun --standalone --nproc-per-node 4 benchmarks/pulled_simulated.py --scenarios slow random
torchrun --standalone --nproc-per-node 4 benchmarks/pulled_simulated.py --quick

The static split, pulled, and pulled with a deadline take turns. The simulator is given what was measured of the static
split: each rank's seconds in each step, divided equally, and what a mean step takes beside its slowest rank's work; and
which rank is held up or stands still in which step, which is decided before. It is given nothing of the steps that it
predicts.

"said by advise": what `python -m straggle advise` says of pulling, from the trace of the static split.
"""

import tempfile
from pathlib import Path
from random import Random
from statistics import fmean

import torch
import torch.distributed as dist
from pulled import CHANCE, DELAY, PARTS, STALL_S, Pulled, Way, arguments_of, blocks_of, is_stalled

from straggle import LateHandling, QuantileDeadline, StagedDataParallel, WaitForAll
from straggle.advise.pulled import pulled
from straggle.advise.timings import read_timings
from straggle.lab.jobs import process_group
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.pulled import PulledCluster, simulate_drawn
from straggle.lab.simulate.units import Work
from straggle.observe.console import print_table
from straggle.observe.trace import TraceWriter

STATIC = "static split"


class PulledToDeadline(Pulled):
    def wrapped(self):
        return StagedDataParallel(self.net, deadline=QuantileDeadline(0.5, slack=1.05))


WAYS = {STATIC: Way, "pulled": Pulled, "pulled, deadline": PulledToDeadline}
POLICIES = {"pulled": WaitForAll, "pulled, deadline": lambda: QuantileDeadline(0.5, slack=1.05)}


def main() -> None:
    arguments = arguments_of(__doc__)
    torch.set_num_threads(1)
    rows = []
    with process_group():
        for scenario in arguments.scenarios:
            rows += measure(arguments, scenario)
        if dist.get_rank() == 0:
            title = (
                f"{dist.get_world_size()} ranks, {PARTS} micro-batches each; {arguments.runs} blocks of "
                f"{arguments.block} steps of each way; means, and over the static split"
            )
            columns = ("scenario", "way", "measured", "simulated", "off by", "ratio (blocks)", "simulated")
            print_table(title, (*columns, "said by advise", "drew; simulated"), rows)


def measure(arguments, scenario):
    """A scenario's rows, on every rank."""
    ways = {name: way(arguments, scenario) for name, way in WAYS.items()}
    for turn in range(arguments.runs + 1):
        for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
            ways[name].turn(arguments.block)
    blocks = {name: blocks_of(way.step_s, arguments) for name, way in ways.items()}
    rows = compared(arguments, scenario, ways, blocks)
    for way in ways.values():
        way.close()
    return rows


def compared(arguments, scenario, ways, blocks):
    reports = ways[STATIC].reports
    compute_s = [[rank.compute_s for rank in report.ranks] for report in reports]
    own_s = [part_s(scenario, arguments.stall_every, step, own) for step, own in enumerate(compute_s)]
    held_s = held_up(arguments, scenario, len(own_s[0]))
    kept = slice(arguments.block, None)
    beside_s = fmean(blocks[STATIC]) - float(simulated(own_s, held_s, WaitForAll(), 0.0).all_s[kept].mean())
    said = said_by_advise(reports[kept])
    rows = []
    for name, policy in POLICIES.items():
        found = simulated(own_s, held_s, policy(), beside_s)
        ours, theirs = float(found.step_s[kept].mean()), fmean(blocks[name])
        ratios = sorted(a / b for a, b in zip(blocks[name], blocks[STATIC], strict=True))
        parts = [[rank.parts for rank in report.ranks] for report in ways[name].reports[kept]]
        drew = " ".join(f"{fmean(own):.1f}" for own in zip(*parts, strict=True))
        rows.append(
            (
                scenario,
                name,
                f"{1e3 * theirs:.1f} ms",
                f"{1e3 * ours:.1f} ms",
                f"{ours / theirs - 1:+.1%}",
                f"{theirs / fmean(blocks[STATIC]):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                f"{ours / fmean(blocks[STATIC]):.3f}",
                said if name == "pulled" else "",
                f"{drew}; {' '.join(f'{own:.1f}' for own in found.drawn.tolist())}",
            )
        )
    return rows


def part_s(scenario, stall_every, step, compute_s):
    """Seconds of each micro-batch of each rank (ranks, micro-batches), from the seconds of all of a rank's."""
    times = (torch.tensor(compute_s) / PARTS).unsqueeze(1).repeat(1, PARTS)
    if scenario == "stuck" and is_stalled(step, stall_every):
        times[-1] -= STALL_S / PARTS
        times[-1, 2] += STALL_S
    return times


def held_up(arguments, scenario, num_ranks):
    """Seconds that each rank comes later to each step, as `Way.hold_up` has it."""
    chances, held_s = [Random(rank) for rank in range(num_ranks)], []
    for step in range((arguments.runs + 1) * arguments.block):
        late_s = DELAY * PARTS * arguments.part_ms / 1e3
        own_s = [late_s * (scenario == "random" and chance.random() < CHANCE) for chance in chances]
        own_s[-1] += STALL_S * (scenario == "stall" and is_stalled(step, arguments.stall_every))
        held_s.append(torch.tensor(own_s))
    return held_s


def simulated(own_s, held_s, policy, beside_s):
    """The steps as the simulator has them; ``own_s``: for each the seconds of (ranks, micro-batches)."""
    work = Work(float(own_s[0].sum(1).median()), num_microbatches=PARTS, overhead_s=max(0.0, beside_s))
    return simulate_drawn(own_s, PulledCluster(len(own_s[0]), work, policy, LateHandling(), Constant()), held_s)


def said_by_advise(reports):
    """What pulling is said to give, over waiting for all."""
    with tempfile.TemporaryDirectory() as folder:
        with TraceWriter(Path(folder) / "trace.jsonl") as trace:
            for report in reports:
                trace.write(report)
        saved = pulled(read_timings(Path(folder)), PARTS).gain.saved
    return f"{1 - saved.value:.3f} ({1 - saved.high:.3f} to {1 - saved.low:.3f})"


if __name__ == "__main__":
    main()
