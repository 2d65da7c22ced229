"""Steps of many ranks under a deadline, by `straggle.policies.what_if.simulated_ranks`.

With very many ranks the policy sees ``history_ranks`` of them, evenly spread; otherwise each of its decisions would
sort millions of times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Generator, Tensor

from straggle.advise.other_shares import sets_of, work_without
from straggle.lab.simulate.communication import Constant, Network
from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.units import Units, Work
from straggle.policies.deadline import Deadline, LateHandling
from straggle.policies.what_if.simulated_ranks import EndedStep, GivenStep, SimulatedRanks
from straggle.policies.what_if.step_model import SimulatedStep, StopRules, by_stage, parts_of

_LEAST_KEPT, _MOST_KEPT = 20, 20_000_000  # steps, and times of ranks in them, to find the ranks that are always slow
_SLOW = 1.1  # times the median rank's work, from which on a rank is slow
_ALWAYS = 0.5  # of the steps, from which on it is so always
_EACH = 3  # so many slow ranks have a row each


@dataclass(frozen=True)
class Without:
    """The mean step of the others, ``step_s``, if all of them are waited for, and that of all ranks, ``all_s``.

    All samples are computed, so gradients per second go with the steps per second.
    """

    ranks: tuple[int, ...]
    step_s: float
    all_s: float

    @property
    def speedup(self) -> float:
        """Gradients per second, over those when all ranks are waited for."""
        return self.all_s / self.step_s


def always_slow(whole_s: Tensor) -> list[int]:
    """Ranks that take longer than the median rank in most steps; ``whole_s``, (steps, ranks): their own work."""
    slow = whole_s >= _SLOW * whole_s.median(1, keepdim=True).values
    found: list[int] = (slow.float().mean(0) >= _ALWAYS).nonzero().flatten().tolist()
    return found


def without_slow(whole_s: Tensor, all_s: Tensor) -> list[Without]:
    """Without each of them, if they are few, and without all; ``all_s``, (steps,): what waiting for all ranks takes."""
    own_s, sets = whole_s.double(), sets_of(always_slow(whole_s), whole_s.shape[1], each=_EACH)
    rest_s = (all_s - own_s.amax(1)).clamp(min=0.0).numpy()
    steps_s = ((ranks, work_without(ranks, own_s.numpy(), own_s.numpy()) + rest_s) for ranks in sets)
    return [Without(ranks, float(step_s.mean()), float(all_s.mean())) for ranks, step_s in steps_s]


@dataclass(frozen=True)
class Simulation:
    """What happened: of shape (steps,), (ranks,) and (ranks, stages).

    ``step_s`` is under the policy, ``all_s`` what waiting for all ranks takes with the same delays. ``dropped``: share
    of the step's gradients; ``predicted_drop``: what the policy predicted (NaN: it makes no prediction).
    ``late_ranks``: the number of late ranks; ``late_steps``: the number of steps in which each rank was late.
    ``reach``: the share of each stage that each rank computed, over all steps. ``drawn``: micro-batches that each rank
    computed of a step's pool, in the mean; ``None`` if it has none. ``without``: what waiting takes without ranks that
    are always slow.
    """

    step_s: Tensor
    all_s: Tensor
    deadline_s: Tensor
    dropped: Tensor
    predicted_drop: Tensor
    late_ranks: Tensor
    late_steps: Tensor
    reach: Tensor
    drawn: Tensor | None = None
    without: tuple[Without, ...] = ()

    @property
    def speedup(self) -> float:
        """`effective_speedup` of all steps."""
        return self.speedup_after(0)

    def speedup_after(self, steps: int) -> float:
        """`effective_speedup` without the first ``steps``."""
        return effective_speedup(self.dropped[steps:], self.step_s[steps:], self.all_s[steps:])


def effective_speedup(dropped: Tensor, step_s: Tensor, all_s: Tensor) -> float:
    """Gradients that came in per second, relative to waiting for all ranks, which takes ``all_s``; all (steps,)."""
    return float((1 - dropped).mean() * all_s.sum() / step_s.sum())


def simulate(
    steps: int,
    ranks: int,
    work: Work,
    delays: Delays,
    deadline: Deadline,
    *,
    late_handling: LateHandling | None = None,
    network: Network | None = None,
    seed: int = 0,
    history_ranks: int = 256,
) -> Simulation:
    """Simulate ``steps`` steps of ``ranks`` ranks.

    Raises ``ValueError`` if the policy wants more ranks than there are, and for micro-batches of a recorded run.
    """
    late_handling = late_handling or LateHandling()
    units = delays.units(work.units(late_handling.granularity))
    if units.merged and late_handling.granularity == "microbatch":
        raise ValueError("granularity=microbatch: a trace has the times of stages, not of micro-batches")
    generator = Generator().manual_seed(seed)
    drawn = islice(delays.steps(units.base_s, ranks, generator), steps)
    return simulate_times(drawn, units, deadline, late_handling, network or Constant(), history_ranks)


def simulate_times(
    step_times: Iterable[Tensor],
    units: Units,
    deadline: Deadline,
    late_handling: LateHandling,
    network: Network,
    history_ranks: int = 256,
) -> Simulation:
    """Simulate steps in which each rank takes, for each of its units, the given seconds: tensors (ranks, units)."""
    cluster: Cluster | None = None
    for unit_s in step_times:
        cluster = cluster or Cluster(len(unit_s), units, deadline, late_handling, network, history_ranks)
        cluster.step(unit_s.cumsum(1))
    if cluster is None:
        raise ValueError("there are no steps to simulate")
    return cluster.result()


class Simulated:
    """Simulated steps: their merges, and what came of each; ``units`` are those of the merge."""

    def __init__(self, ranks: SimulatedRanks, units: Units, network: Network) -> None:
        self._ranks, num_ranks = ranks, len(ranks.stood_in)
        shares = units.stage_share.tolist() if units.overlaps else [1.0]
        self._num_messages = len(shares)
        self._merging = network.merging(num_ranks, shares, units.overhead_s)
        self._late_steps = torch.zeros(num_ranks, dtype=torch.int64)
        self._rows: list[tuple[float, ...]] = []

    def _keep(self, ended: EndedStep, all_s: float, kept: float) -> None:
        """The step takes ``all_s`` if all are waited for; ``kept``: the share that came in."""
        late, deadline = ended.done.late, ended.deadline
        self._late_steps += late
        self._rows.append((ended.seconds, all_s, deadline.seconds, 1 - kept, deadline.predicted_drop, int(late.sum())))

    def _result(self, reach: Tensor, drawn: Tensor | None = None) -> Simulation:
        step_s, all_s, deadline_s, dropped, predicted, late = torch.tensor(self._rows, dtype=torch.float64).unbind(1)
        return Simulation(step_s, all_s, deadline_s, dropped, predicted, late, self._late_steps, reach, drawn)


class Cluster(Simulated):
    """The state of the ranks between steps, for callers that go step by step; `simulate` runs all steps."""

    def __init__(
        self,
        ranks: int,
        units: Units,
        deadline: Deadline,
        late_handling: LateHandling,
        network: Network,
        history_ranks: int,
    ) -> None:
        num_shown = min(ranks, history_ranks)
        rules = replace(StopRules.of(deadline, late_handling, ranks), checks=units.checks)
        # of those that it is shown, the same share makes a quorum
        quorum = math.ceil(rules.quorum * num_shown / ranks)
        parts = parts_of(len(units.stage_share), late_handling.granularity, units.checks)
        deadline.prepare(replace(late_handling, quorum=quorum), parts)
        simulated = SimulatedRanks(
            deadline,
            rules,
            num_ranks=ranks,
            stage_share=units.stage_share,
            in_stages=units.in_stages,
            shown=torch.linspace(0, ranks - 1, num_shown).round().to(torch.int64),
        )
        super().__init__(simulated, units, Constant() if units.merged else network)
        self._units, self._share = units, units.share.expand(ranks, -1)
        self._computed = torch.zeros(ranks, len(units.share))
        self._whole_s: list[Tensor] = []  # of the first steps, what each rank takes, and all of them together
        self._all_s: list[float] = []
        self._num_kept = max(_LEAST_KEPT, _MOST_KEPT // ranks)

    def step(self, unit_s: Tensor) -> Tensor:
        """One step; ``unit_s`` (ranks, units): when each unit would be finished, if no rank were stopped.

        Returns the share of each unit that comes in, of the same shape.
        """
        last_s = unit_s.T.contiguous().amax(1)  # when no rank is stopped; in half the time of amax(0)
        all_s = self._merging.merge(self._ready_s(last_s))

        def merge(done: SimulatedStep) -> float:
            return self._merging.merge(self._ready_s(last_s.clamp(max=float(done.seconds))))

        ended = self._ranks.step(GivenStep(unit_s, self._share, silent=self._units.silent), merge)
        self._computed += ended.part
        if len(self._whole_s) < self._num_kept:
            self._whole_s.append(unit_s[:, -1].float())
            self._all_s.append(all_s)
        self._keep(ended, all_s, float(ended.part.mean(0) @ self._units.share))
        return ended.part

    def _ready_s(self, last_s: Tensor) -> list[float]:
        """When each message is ready; what comes before the stages of the last micro-batch is none by itself."""
        ready_s: list[float] = last_s[-self._num_messages :].tolist()
        return ready_s

    def result(self) -> Simulation:
        """The result of all steps."""
        units, num_steps = self._units, len(self._rows)
        reach = by_stage(self._computed / num_steps, self._share, len(units.stage_share), in_stages=units.in_stages)
        without = without_slow(torch.stack(self._whole_s), torch.tensor(self._all_s, dtype=torch.float64))
        return replace(self._result(reach), without=tuple(without))
