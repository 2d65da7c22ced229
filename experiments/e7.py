"""E7: 27 of 30 users late in every round: what each merge makes of layers that few of them reach.

The setting of Lang et al. 2024, "Stragglers-aware low-latency synchronous federated learning via layer-wise model
updates" (SALF) and of its program: the same users are late in every round and finish some of the layers, from the
output on. As there, each weight and each bias of the network is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from experiments._intervals import difference_interval, mean_interval
from experiments._logical import Learned, Reach, Setting, Treatment, learn, nobody, of_their_own, same_ranks
from experiments._models import WithModel, digits_mlp
from experiments.result import Line, Result
from straggle.lab.workloads.digits import Digits
from straggle.observe.intervals import Interval

USERS, LATE, BATCH, ROUNDS = 30, 27, 16, 100
CHANCES = (1.0, 0.95, 0.80, 0.58, 0.35, 0.19)
SAMPLES = {"alike": False, "own classes": True}  # whether each user has classes of its own
WINDOW, MAX_WEIGHT = 50, 10.0
NEARLY = 1.0  # points of accuracy that count as the same

NONE_LATE, DROP, DROP_N, ZERO, COUNT, INVERSE = (
    "no rank late",
    "drop-late",
    "drop-late over N",
    "zero-fill over N",
    "count-weighted",
    "bias-corrected",
)


def uniform(late: int, num_units: int, generator: Generator) -> Tensor:
    """Any number of layers from one to all, with equal probability, as the program of the paper draws it."""
    return torch.randint(1, num_units + 1, (late,), generator=generator)


def poisson(late: int, num_units: int, generator: Generator) -> Tensor:
    """The first layer, and then a Poisson number of further ones with mean 3, at most all.

    This is the case if each layer takes an exponentially distributed time, as Goren et al. 2025, "Adaptive deadline and
    batch layered synchronized federated learning", have it. Layer ``i`` (from 0) has the probability
    ``P(Poisson(3) >= i)``.
    """
    further = torch.poisson(torch.full((late,), 3.0), generator=generator)
    return (1 + further.long()).clamp(max=num_units)


def by_inverse_chance(finished: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """A gradient counts by the inverse of its user's chance of finishing it (Horvitz and Thompson 1952).

    That chance is known from earlier rounds only; in the first round it is 1.
    """
    chance = torch.stack(tuple(earlier[-WINDOW:])).float().mean(0) if earlier else torch.ones(finished.shape)
    return (1 / chance).clamp(max=MAX_WEIGHT) * finished


def treatments(reach: Reach) -> dict[str, Treatment]:
    """The merges, from the least to the most that they are expected to reach."""
    late = same_ranks(LATE, reach)
    return {
        DROP_N: Treatment(same_ranks(LATE), over_all=True),
        DROP: Treatment(same_ranks(LATE)),
        ZERO: Treatment(late, over_all=True),
        COUNT: Treatment(late),
        INVERSE: Treatment(late, by_inverse_chance),
        NONE_LATE: Treatment(nobody),
    }


@dataclass(frozen=True)
class Runs:
    """The runs of one treatment, one for each seed."""

    learned: tuple[Learned, ...]

    @property
    def accuracy(self) -> list[float]:
        """Per cent of the held-out digits."""
        return [100 * run.scores["accuracy"] for run in self.learned]


def run(quick: bool) -> Result:
    """20 seeds; quick: 4."""
    torch.set_num_threads(1)
    seeds = 4 if quick else 20
    found: dict[tuple[str, str], dict[str, Runs]] = {}
    for samples, by_class in SAMPLES.items():
        # who does not come to any layer, or to all, does not depend on the depth
        first = {name: _runs(treatment, seeds, by_class=by_class) for name, treatment in treatments(uniform).items()}
        others = {
            name: _runs(treatment, seeds, by_class=by_class)
            for name, treatment in treatments(poisson).items()
            if _by_depth(name)
        }
        found[samples, "uniform"] = first
        found[samples, "3 of 6 expected"] = first | others
    lines = [_chance_line(found["alike", "3 of 6 expected"][COUNT])]
    for (samples, depth), runs in found.items():
        lines += _lines(f"samples {samples}, depth {depth}", runs)
    return Result(f"{LATE} of {USERS} users late in all of {ROUNDS} rounds", tuple(lines), _notes(seeds))


def _by_depth(name: str) -> bool:
    return name in (ZERO, COUNT, INVERSE)


def _runs(treatment: Treatment, seeds: int, *, by_class: bool) -> Runs:
    runs = []
    for seed in range(seeds):
        workload = WithModel(Digits(seed=seed), digits_mlp)
        samples = of_their_own(workload, USERS, BATCH, seed, by_class=by_class)
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        runs.append(learn(Setting(workload, optimizer, samples, ROUNDS, seed=seed), treatment))
    return Runs(tuple(runs))


def _chance_line(runs: Runs) -> Line:
    """How often late users came to each unit, over all rounds and seeds."""
    measured = torch.stack([run.reached[-LATE:].mean(0) for run in runs.learned]).mean(0).tolist()
    ok = all(abs(chance - expected) <= 0.01 for chance, expected in zip(measured, CHANCES, strict=True))
    expected, found = (", ".join(f"{chance:.2f}" for chance in chances) for chances in (CHANCES, measured))
    return Line("chance of reaching a layer at 3 expected of 6", f"{expected} +- 0.01", found, ok)


def _lines(what: str, runs: dict[str, Runs]) -> list[Line]:
    """Accuracy under each merge, and the steps of the expected order."""
    lines = [
        Line(f"{what}: {name}, accuracy (%)", "", str(mean_interval(each.accuracy))) for name, each in runs.items()
    ]
    lines.append(_order(what, runs, DROP, ZERO, strictly=True))
    lines.append(_order(what, runs, DROP_N, ZERO, strictly=True))
    lines.append(_order(what, runs, ZERO, COUNT, strictly=True))
    lines.append(_order(what, runs, COUNT, INVERSE, strictly=False))
    gap = difference_interval(runs[INVERSE].accuracy, runs[NONE_LATE].accuracy)
    about = f"within {NEARLY:g} point"
    lines.append(Line(f"{what}: {INVERSE} ~ {NONE_LATE}", about, f"{gap:+.2f} points", _near(gap)))
    return lines


def _order(what: str, runs: dict[str, Runs], worse: str, better: str, *, strictly: bool) -> Line:
    """``worse < better``, or ``<=``, by the interval of the difference between runs of the same seed."""
    gap = difference_interval(runs[better].accuracy, runs[worse].accuracy)
    sign, expected = ("<", "above 0") if strictly else ("<=", "not below 0")
    ok = gap.low > 0 if strictly else gap.high >= 0
    return Line(f"{what}: {worse} {sign} {better}", expected, f"{gap:+.2f} points", ok)


def _near(gap: Interval) -> bool:
    """Whether the difference can be this small."""
    return gap.low <= NEARLY and gap.high >= -NEARLY


def _notes(seeds: int) -> tuple[str, ...]:
    return (
        f"{seeds} seeds, which draw the split, the model, the users' samples and the depths. Intervals: 95 %;",
        "differences are between runs of the same seed.",
        "Digits (8 x 8 pixels) and a 64-32-16-10 network instead of MNIST and 784-32-16-10; momentum is that of the",
        "merged gradient, not each user's own. 'over N' divides by all 30 users, as the program of the paper does.",
    )
