"""One step of one rank on its way through the merge: what is in its buffers, what is missing, what has been issued.

Nothing here is thread-safe: the coordinator's lock guards it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from straggle.buffers import Share, StageBuffers
from straggle.estimators import Estimator, Supplement
from straggle.stages import Stage, StagePlan
from straggle.telemetry import Table


class Layout:
    """A plan as the merge needs it: which bucket ends with which stage, and which parameter is in which."""

    def __init__(self, plan: StagePlan, parameters: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        self.buckets: list[tuple[Stage, ...]] = plan.buckets()
        self.bucket_ends = [sum(len(bucket) for bucket in self.buckets[: b + 1]) for b in range(len(self.buckets))]
        self.stage_of = {index: number for number, stage in enumerate(plan.stages) for index in stage.parameters}
        self.numel = [parameter.numel() for parameter in parameters]

    def by_stage(self, shares: Sequence[float]) -> tuple[float, ...]:
        """The mean share over the elements of each stage, from a share for each parameter."""
        if (lowest := min(shares)) == max(shares):
            return (lowest,) * len(self.plan.stages)
        return tuple(sum(shares[i] * self.numel[i] for i in s.parameters) / s.numel for s in self.plan.stages)


@dataclass(frozen=True)
class Contribution:
    """What a rank hands in: for each parameter the share of the step's micro-batches, and the weights of estimates."""

    computed: Sequence[float]
    estimated: Mapping[int, float]


class Round:
    """One step; ``num_microbatches`` and ``weight`` are those that this rank gave it.

    ``factors``: what a computed gradient of each stage counts beside that; ``None``: 1. ``whole``: all that the rank
    computes goes into the merge, or nothing does.
    """

    def __init__(
        self,
        step: int,
        layout: Layout,
        buffers: StageBuffers,
        group: dist.ProcessGroup,
        *,
        factors: Sequence[float] | None = None,
        whole: bool = False,
    ) -> None:
        self.step = step
        self.buffers = buffers
        self.closed = False  # all collectives are issued
        self.stood_in = False
        self.num_microbatches = 1
        self.weight = 1.0
        self.stage_s = [math.nan] * len(layout.plan.stages)  # when each stage was whole
        self.works: list[tuple[dist.Work, str]] = []
        self._layout = layout
        self._group = group
        self._factors = factors
        self._supplemented: dict[int, float] = {}  # for some parameters, the weight of what was added to them
        self._unusual: dict[int, Share] = {}  # complete parameters that do not simply have the rank's weight
        self._whole = whole
        self._passes = [0] * len(layout.numel)  # for each parameter, the micro-batches that are in
        self._missing = [len(stage.parameters) for stage in layout.plan.stages]  # parameters that are not complete
        self._issued = 0  # buckets whose merge has begun
        buffers.begin()

    @property
    def num_gradients(self) -> int:
        """Finished gradients that are in, over all micro-batches."""
        return sum(self._passes)

    def is_full(self, index: int) -> bool:
        """Whether parameter ``index`` has had all its backward passes."""
        return self._passes[index] == self.num_microbatches

    def put(self, index: int, gradient: Tensor) -> bool:
        """Take the gradient of one backward pass; true where the parameter is complete with it."""
        self.buffers.put(index, gradient, add=self._passes[index] > 0, weight=self.weight * self._factor(index))
        self._passes[index] += 1
        return self.is_full(index)

    def read(self, index: int) -> Tensor:
        """A copy of this rank's own gradient of parameter ``index``, as far as it is in."""
        return self.buffers.read(index, self.weight * self._factor(index))

    def add(self, index: int, supplement: Supplement | None) -> None:
        """Add to this rank's contribution to parameter ``index``."""
        if supplement is not None:
            add = self._passes[index] > 0
            self.buffers.put(index, supplement.gradient, add=add, weight=self.weight)
            self._supplemented[index] = supplement.weight

    def parameter_complete(self, index: int, after_s: float) -> bool:
        """Merge what is complete now; true where the parameter's stage is, ``after_s`` seconds into the step."""
        stage, layout = self._layout.stage_of[index], self._layout
        if self._factors is not None or index in self._supplemented:
            self._unusual[index] = Share(self.weight * self._weight(index, 1.0), True)
        self._missing[stage] -= 1
        if self._missing[stage] > 0:
            return False
        self.stage_s[stage] = after_s
        if self._whole:
            return True
        # the last bucket waits for the end of the step, because the telemetry goes with it
        while self._issued < len(layout.buckets) - 1 and not any(self._missing[: layout.bucket_ends[self._issued]]):
            self._issue(self._unusual)
        return True

    def finished_part(self) -> Contribution:
        """What is in, and nothing else."""
        return self._kept([passes / self.num_microbatches for passes in self._passes])

    def own_part(self, *, truncated: bool, in_backward: bool) -> Contribution:
        """What the rank computed: where the graph did not use a parameter, its gradient is a computed zero."""
        passes = self._passes
        if not any(passes):
            return Contribution([0.0] * len(passes), {})
        if not truncated or not any(self._missing):
            return Contribution([1.0] * len(passes), {})
        done = max(passes) - in_backward
        return self._kept([max(count, done) / self.num_microbatches for count in passes])

    def _kept(self, computed: list[float]) -> Contribution:
        if self._whole and min(computed) < 1:
            self._passes = [0] * len(computed)
            computed = [0.0] * len(computed)
        return Contribution(computed, {})

    def estimate(self, own: Contribution, estimator: Estimator, parameters: Sequence[nn.Parameter]) -> Contribution:
        """Put the estimator's contributions in for what is not in ``own``."""
        weights = {}
        for index, share in enumerate(own.computed):
            if share == 1:
                continue
            if estimator.supplements:
                self.add(index, estimator.supplement(parameters[index], None))
            estimate = estimator.contribution(parameters[index])
            if estimate is not None and estimate.weight > 0:
                weights[index] = estimate.weight * (1 - share)
                self.buffers.put(index, estimate.gradient, add=self._is_in(index), weight=self.weight * weights[index])
            estimator.missed(parameters[index], 1 - share, estimate)
        return Contribution(own.computed, weights)

    def abstain(self, own: Contribution, estimator: Estimator, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing stands in for what is not in ``own``."""
        for parameter, share in zip(parameters, own.computed, strict=True):
            if share < 1:
                estimator.missed(parameter, 1 - share, None)

    def weights(self, own: Contribution) -> Sequence[float]:
        """What this rank's contribution to each parameter counts, relative to the rank's own weight."""
        if self._factors is None and not self._supplemented and not own.estimated:
            return own.computed
        return [self._weight(i, share) + own.estimated.get(i, 0.0) for i, share in enumerate(own.computed)]

    def _factor(self, index: int) -> float:
        return 1.0 if self._factors is None else self._factors[self._layout.stage_of[index]]

    def _weight(self, index: int, share: float) -> float:
        """What counts beside an estimate."""
        return share * self._factor(index) + self._supplemented.get(index, 0.0)

    def _is_in(self, index: int) -> bool:
        """Whether something is in the buffer for a parameter."""
        return self._passes[index] > 0 or index in self._supplemented

    def close(self, own: Contribution) -> None:
        """Issue what is left; the telemetry is in the buffers."""
        weights = self.weights(own)
        shares = self._unusual | {
            index: Share(self.weight * weights[index], self._is_in(index) or index in own.estimated)
            for index in range(len(weights))
            if not self.is_full(index)
        }
        while self._issued < len(self._layout.buckets):
            self._issue(shares)
        self.closed = True

    def _issue(self, shares: Mapping[int, Share]) -> None:
        """Begin the merge of the next bucket."""
        works = self.buffers.all_reduce(self._issued, shares, self._group, self.weight)
        name = ", ".join(stage.name for stage in self._layout.buckets[self._issued])
        self.works += [(work, name) for work in works]
        self._issued += 1


@dataclass(frozen=True)
class MergedStep:
    """A step that all ranks have merged, waiting for this rank to apply it."""

    step: int
    plan: StagePlan
    buffers: StageBuffers
    table: Table
    seconds: float
    deadline_s: float
    shadow_s: float
    merged_at: float
    stood_in: bool
    num_gradients: int
