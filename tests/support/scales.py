"""A model whose gradients are known numbers, and what is to be merged by what the reports say that each rank gave."""

import math
import random
from functools import cache

import pytest
import torch
from torch import nn

from straggle import LastMerged, LastOwn, MovingAverage, OptimizerMomentum, Zero

NUM_LAYERS = 9
LAYERS = [f"layers.{number}" for number in range(NUM_LAYERS)]
OF_MERGED = (LastMerged, MovingAverage)
DECAY = 0.5
TOLERANCE = 1e-4  # of sums in float32, relative


class Scale(nn.Module):
    def __init__(self, counts=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.counts = counts
        if counts:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(2))

    def forward(self, h, factor):
        if self.counts and math.isfinite(factor):
            self.passes += 1
            self.mean.mul_(0.5).add_(0.5 * factor)
        return h + self.weight * factor


class Scales(nn.Module):
    """The gradient of each layer's weight is the factor that it was given."""

    def __init__(self, *, counts=False):
        super().__init__()
        self.layers = nn.ModuleList(Scale(counts and number % 4 == 0) for number in range(NUM_LAYERS))

    def forward(self, factors):
        h = torch.zeros(())
        for layer, factor in zip(self.layers, factors, strict=True):
            h = layer(h, factor)
        return h


@cache
def at_random(*key):
    """From 0 to 1, the same in a replay."""
    return random.Random(repr(key)).random()


def factor_of(plan, rank, step, part, layer):
    if at_random("NaN", rank, step, layer) < plan.nan:
        return math.nan
    own = 1 + int(8 * at_random(rank, step, layer))
    return own if plan.num_parts else own * (1 + part)  # who draws which part of a pool is not known


def own_gradient(plan, rank, step, layer, share=1.0):
    """The mean over the first micro-batches, this share of them."""
    done = 1 if plan.num_parts else round(share * plan.num_microbatches)
    return sum(factor_of(plan, rank, step, part, layer) for part in range(done)) / done


class Expected:
    """What a rank expects to be merged, from the reports alone."""

    def __init__(self, plan, *, was_away=False):
        self._plan = plan
        unknown = isinstance(plan.estimator, (LastOwn, OptimizerMomentum))  # what a rank filled in is known to it alone
        self._knows = not unknown and not (
            was_away and isinstance(plan.estimator, MovingAverage)
        )  # it has not seen what was averaged
        self._members, self._kept = None, {}
        self.num_left = 0  # stages with something of a rank that left in their step

    def problems(self, report, gradients, unchanged=frozenset()):
        """The stages whose gradient is another; ``unchanged``: what was kept there before the step is there still.

        Whether a zero or nothing was merged into those nobody can see.
        """
        found = []
        for number, stage in enumerate(report.stages if self._knows else ()):
            merged = gradients[stage.name]
            if len(self._gone(report)) > 1:  # whose part is whose is not known
                continue
            no_data = report.skipped or all(own.idle for own in report.ranks if not own.absent)
            expected = [None] if no_data else self._merged(report, number, stage)
            if stage.name in unchanged and not all(expected):
                continue
            if not any(merged == (own and pytest.approx(own, rel=self._plan.tolerance)) for own in expected):
                shares = {own.rank: (own.stages[number], own.weights[number], own.cause) for own in report.ranks}
                found.append(f"step {report.step}, {stage}: {merged} and not {expected}; {shares}")
        return found

    def note(self, report, gradients):
        """This is what was merged."""
        self._members = {own.rank for own in report.ranks if not own.absent}
        for name, own in gradients.items():
            if own is not None:
                before = self._kept.get(name, own) if isinstance(self._plan.estimator, MovingAverage) else own
                self._kept[name] = DECAY * before + (1 - DECAY) * own

    def _merged(self, report, number, stage):
        """What it may be: no row says whether what a rank gave that left was an estimate.

        Nor does one say whether that rank had given anything to any stage. If it had, what was not finite counts in no
        stage's weight.
        """
        given = [self._given_by(own, number, report.step, stage) for own in report.ranks]
        of_rows = sum(own.weights[number] for own in report.ranks)
        gone = self._gone(report)
        expected, lefts = [], {stage.weight - own for own in (of_rows, *[sum(own for own, _ in given)] * bool(gone))}
        for left in (own if own > TOLERANCE * stage.weight else 0.0 for own in lefts):
            of_left = {0.0}
            if left and gone:
                (rank,) = gone
                estimate, of_left = self._estimate(stage), set()
                for share in self._shares(left):
                    own = own_gradient(self._plan, rank, report.step, layer_of(stage), share)
                    filled_in = left - share if estimate is not None and share < min(1, left) else 0.0
                    of_left |= {own, own + filled_in / left * ((estimate or 0.0) - own)}
                of_left |= {estimate} - {None}
            if weight := left + sum(own for own, _ in given):
                expected += [(sum(own for _, own in given) + left * own) / weight for own in of_left]
            else:
                expected.append(self._estimate(stage) if isinstance(self._plan.estimator, OF_MERGED) else None)
        self.num_left += stage.weight - of_rows > TOLERANCE * stage.weight
        return expected

    def _shares(self, weight):
        """Which shares of its micro-batches may have so much weight, if it gave each of them one, two or three."""
        shares = [(done + 1) / self._plan.num_microbatches for done in range(self._plan.num_microbatches)]
        exact = [share for share in shares if any(abs(weight - own * share) < TOLERANCE for own in (1, 2, 3))]
        return exact or shares  # the rest of it is an estimate's

    def _gone(self, report):
        """Those that have left in this step."""
        before = range(len(report.ranks)) if self._members is None else self._members
        return {own.rank for own in report.ranks if own.absent and own.rank in before}

    def _estimate(self, stage):
        """What a rank puts in place of its own gradient; ``None``: nothing."""
        if isinstance(self._plan.estimator, Zero):
            return 0.0
        return self._kept.get(stage.name) if isinstance(self._plan.estimator, OF_MERGED) else None

    def _given_by(self, own, number, step, stage):
        """The weight of what a rank gave, and that times its gradient."""
        share, weight = own.stages[number], own.weights[number]
        filled_in = weight - own.weight * share
        gradient = own_gradient(self._plan, own.rank, step, layer_of(stage), share) if share else 0.0
        if math.isnan(gradient):
            return 0.0, 0.0
        of_estimate = self._kept.get(stage.name, 0.0) if isinstance(self._plan.estimator, OF_MERGED) else 0.0
        return weight, (weight - filled_in) * gradient + filled_in * of_estimate


def layer_of(stage):
    return LAYERS.index(stage.name)


def gradients_of(module):
    layers = zip(LAYERS, module.layers, strict=True)
    return {name: None if layer.weight.grad is None else layer.weight.grad.item() for name, layer in layers}
