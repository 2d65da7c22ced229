"""Steps of many ranks that draw the micro-batches from one pool: list scheduling, under a deadline or none.

Who draws what is `straggle.advise.list_schedule`, which asks the pure functions of training; what a deadline makes of
it is the library's own model of a step, as in `straggle.lab.simulate.ranks`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Generator, Tensor

from straggle.advise.list_schedule import REQUEST_S, Drawing, DrawnStep
from straggle.lab.simulate.communication import Constant, Network
from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.ranks import Ranks, Simulation
from straggle.lab.simulate.units import Work
from straggle.policies.deadline import Deadline, LateHandling
from straggle.policies.history import StepProgress
from straggle.policies.step_model import SimulatedStep, StopRules, computed_share, simulate_step
from straggle.pools.pool import WINDOW
from straggle.pools.pool_times import PoolTimes

_COLUMNS = 4  # times a rank's equal share: of more micro-batches than these the last ones count as one


def simulate_pulled(
    steps: int,
    ranks: int,
    work: Work,
    delays: Delays,
    deadline: Deadline,
    *,
    late_handling: LateHandling | None = None,
    network: Network | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate ``steps`` steps of ``ranks`` ranks that draw; the delays are those of `simulate` with micro-batches.

    Raises ``ValueError`` for one micro-batch, for a recorded run, and if the policy wants more ranks than there are.
    """
    if work.num_microbatches < 2:
        raise ValueError(
            f"num_microbatches={work.num_microbatches}: ranks draw micro-batches, and with one for each rank there is "
            "nothing to draw; give work.num_microbatches=8"
        )
    units = work.units("microbatch")
    if delays.units(units).merged:
        raise ValueError("pulled: a trace has the times of stages, not of micro-batches; `advise` reads a trace")
    generator = Generator().manual_seed(seed)
    drawn = islice(delays.steps(units.base_s, ranks, generator), steps)
    cluster = PulledCluster(ranks, work, deadline, late_handling or LateHandling(), network or Constant())
    return simulate_drawn(drawn, cluster)


def simulate_drawn(part_s: Iterable[Tensor], cluster: PulledCluster, held_s: Iterable[Tensor] = ()) -> Simulation:
    """Simulate steps in which the micro-batches of a rank take these seconds: tensors (ranks, micro-batches).

    ``held_s``: for each step how much later than its peers each rank comes to it, (ranks,).
    """
    holds = iter(held_s)
    for own_s in part_s:
        cluster.step(own_s, next(holds, None))
    return cluster.result()


class PulledCluster(Ranks):
    """The state of the ranks between steps."""

    def __init__(
        self,
        ranks: int,
        work: Work,
        deadline: Deadline,
        late_handling: LateHandling,
        network: Network,
        request_s: float = REQUEST_S,
    ) -> None:
        stages, rules = work.units("stage"), StopRules.of(deadline, late_handling, ranks)
        deadline.prepare(replace(late_handling, quorum=rules.quorum, granularity="microbatch"))
        super().__init__(ranks, stages, deadline, rules, network, ranks)
        self._each, self._num_parts = work.num_microbatches, work.num_microbatches * ranks
        self._num_stages = len(stages.stage_share)
        after = stages.base_s[-work.num_stages :].flip(0).cumsum(0).flip(0)
        before_end_s = torch.cat([after[1:], torch.zeros(1)])  # when each stage is ready, before the last one
        self._before_end_s = before_end_s[-self._num_messages :]
        self._silent = torch.full((_COLUMNS * self._each,), work.forward_share)
        self._drawing = Drawing(self._num_parts, ranks, request_s)
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._before: list[list[float]] = []
        self._behind_s, self._stood_in = torch.zeros(ranks), torch.zeros(ranks, dtype=torch.bool)
        self._drawn, self._computed = torch.zeros(ranks), torch.zeros(ranks)

    def step(self, part_s: Tensor, held_s: Tensor | None = None) -> DrawnStep:
        """One step; ``part_s`` (ranks, micro-batches) are those of an equal split, which is what waiting would take.

        A rank that computes more takes as long for these as for those of the step before. Returns what was drawn.
        """
        held_s = torch.zeros(len(part_s)) if held_s is None else held_s
        entered_s = held_s + self._behind_s
        own_s: list[list[float]] = part_s.tolist()
        before, self._before = self._before or own_s, own_s
        each = [own + earlier for own, earlier in zip(own_s, before, strict=True)]
        drawn = self._drawing.step(entered_s.tolist(), each)
        unit_s, share = self._units(drawn, entered_s)
        usual = PoolTimes.usual(self._step_s, ())
        away = self._stood_in | (entered_s > usual.step_s)  # it has claimed nothing, and is not waited for
        done = simulate_step(unit_s, self._next.seconds, self._rules, entered_s, behind=away)
        computed = computed_share(unit_s, done, self._rules, self._silent) * (share > 0)
        step_s = self._merging.merge(self._ready_s(float(done.seconds)))
        self._step_s.append(step_s)
        all_s = self._waiting.merge(self._ready_s(float((held_s + part_s.sum(1)).max())))
        self._keep(done, step_s, all_s, float((computed * share).sum()) / self._num_parts)
        self._learn(drawn, done, computed * share)
        overhead_s = max(0.0, step_s - float(done.seconds))
        progress = partial(self._progress, unit_s, share, done, computed, entered_s, overhead_s)
        self._decide(done.own_s.masked_fill(done.stood_in, math.nan), ~done.late & (share.sum(1) > 0), progress)
        self._stood_in = done.stood_in
        self._behind_s = (entered_s - step_s).clamp(min=0.0).where(done.stood_in, 0.0)
        return drawn

    def _units(self, drawn: DrawnStep, entered_s: Tensor) -> tuple[Tensor, Tensor]:
        """When each micro-batch of each rank ended, from entering, and how many it stands for: (ranks, columns)."""
        columns = _COLUMNS * self._each
        unit_s = (torch.tensor(drawn.over_s) - entered_s).clamp(min=0.0).unsqueeze(1).repeat(1, columns)
        share = torch.zeros_like(unit_s)
        for rank, ends_s in enumerate(drawn.ends_s):
            first = ends_s[: columns - 1]
            unit_s[rank, : len(first)] = torch.tensor(first) - entered_s[rank]
            share[rank, : len(first)] = 1.0
            share[rank, -1] = len(ends_s) - len(first)
        return unit_s, share

    def _learn(self, drawn: DrawnStep, done: SimulatedStep, came_in: Tensor) -> None:
        """What the next pools follow from, and what the result counts."""
        self._drawn += torch.tensor(drawn.parts, dtype=torch.float32)
        self._computed += came_in.sum(1)
        finished = came_in.sum(1).floor().to(torch.int64).tolist()  # a part of a micro-batch is none
        self._drawing.learn(finished, done.own_s.tolist(), done.stood_in.tolist())

    def _ready_s(self, end_s: float) -> list[float]:
        """When each stage is ready, if the last rank ends its own work at ``end_s``."""
        ready_s: list[float] = (end_s - self._before_end_s).tolist()
        return ready_s

    def _progress(
        self,
        unit_s: Tensor,
        share: Tensor,
        done: SimulatedStep,
        computed: Tensor,
        entered_s: Tensor,
        overhead_s: float,
    ) -> StepProgress:
        count = share.sum(1, keepdim=True)
        given = share / count.clamp(min=1.0)
        return StepProgress(
            unit_s=unit_s.where(done.reached, math.nan),
            unit_share=given,
            computed=(computed * given).sum(1, keepdim=True).expand(-1, self._num_stages),
            weight=count.squeeze(1) * len(share) / self._num_parts,
            entered_s=torch.minimum(entered_s, done.end_s),
            overhead_s=torch.tensor(overhead_s),
        )

    def result(self) -> Simulation:
        """The result of all steps. Raises ``ValueError`` if there was none."""
        if not self._rows:
            raise ValueError("there are no steps to simulate")
        reach = (self._computed / self._drawn.clamp(min=1e-9)).where(self._drawn > 0, 1.0)
        drawn = self._computed / len(self._rows)
        return self._result(reach.unsqueeze(1).expand(-1, self._num_stages), drawn)
