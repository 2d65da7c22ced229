"""Steps of many ranks that draw the micro-batches from one pool: list scheduling, under a deadline or none.

Who draws what is `straggle.advise.list_schedule`, which asks the pure functions of training; what a deadline makes of
it is the library's own model of a step, as in `straggle.lab.simulate.ranks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch
from torch import Generator, Tensor

from straggle.advise.list_schedule import REQUEST_S, Drawing, DrawnStep
from straggle.lab.simulate.communication import Constant, Network
from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.ranks import Simulated, Simulation
from straggle.lab.simulate.units import Work
from straggle.policies.deadline import Deadline, LateHandling
from straggle.policies.what_if.simulated_ranks import GivenStep, SimulatedRanks
from straggle.policies.what_if.step_model import SimulatedStep, StopRules
from straggle.pools.pool import WINDOW, PoolTimes

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


class PulledCluster(Simulated):
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
        simulated = SimulatedRanks(
            deadline,
            rules,
            num_ranks=ranks,
            stage_share=stages.stage_share,
            in_stages=False,
            max_lag=late_handling.max_lag,
        )
        super().__init__(simulated, stages, network)
        self._each, self._num_parts = work.num_microbatches, work.num_microbatches * ranks
        self._num_stages = len(stages.stage_share)
        after = stages.base_s[-work.num_stages :].flip(0).cumsum(0).flip(0)
        before_end_s = torch.cat([after[1:], torch.zeros(1)])  # when each stage is ready, before the last one
        self._before_end_s = before_end_s[-self._num_messages :]
        self._silent = torch.full((_COLUMNS * self._each,), work.forward_share)
        self._drawing = Drawing(self._num_parts, ranks, request_s)
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._before: list[list[float]] = []
        self._drawn, self._computed = torch.zeros(ranks), torch.zeros(ranks)

    def step(self, part_s: Tensor, held_s: Tensor | None = None) -> DrawnStep:
        """One step; ``part_s`` (ranks, micro-batches) are those of an equal split, which is what waiting would take.

        A rank that computes more takes as long for these as for those of the step before. Returns what was drawn.
        """
        held_s = torch.zeros(len(part_s)) if held_s is None else held_s
        entered_s = held_s + self._ranks.behind_s
        own_s: list[list[float]] = part_s.tolist()
        before, self._before = self._before or own_s, own_s
        each = [own + earlier for own, earlier in zip(own_s, before, strict=True)]
        drawn = self._drawing.step(entered_s.tolist(), each)
        given, number = self._given(drawn, entered_s)
        ended = self._ranks.step(given, lambda done: self._merging.merge(self._ready_s(float(done.seconds))))
        self._step_s.append(ended.seconds)
        all_s = self._merging.merge(self._ready_s(float((held_s + part_s.sum(1)).max())))
        came_in = ended.part * number
        self._keep(ended, all_s, float(came_in.sum()) / self._num_parts)
        self._learn(drawn, ended.done, came_in)
        return drawn

    def _given(self, drawn: DrawnStep, entered_s: Tensor) -> tuple[GivenStep, Tensor]:
        """When each micro-batch of each rank ended, and how many it stands for: (ranks, columns)."""
        columns = _COLUMNS * self._each
        unit_s = (torch.tensor(drawn.over_s) - entered_s).clamp(min=0.0).unsqueeze(1).repeat(1, columns)
        number = torch.zeros_like(unit_s)
        for rank, ends_s in enumerate(drawn.ends_s):
            first = ends_s[: columns - 1]
            unit_s[rank, : len(first)] = torch.tensor(first) - entered_s[rank]
            number[rank, : len(first)] = 1.0
            number[rank, -1] = len(ends_s) - len(first)
        of_rank = number.sum(1)
        usual = PoolTimes.usual(self._step_s, ())
        given = GivenStep(
            unit_s,
            number / of_rank.clamp(min=1.0).unsqueeze(1),
            entered_s,
            away=entered_s > usual.step_s,  # it has claimed nothing, and is not waited for
            weight=of_rank * len(number) / self._num_parts,
            silent=self._silent,
        )
        return given, number

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

    def result(self) -> Simulation:
        """The result of all steps. Raises ``ValueError`` if there was none."""
        if not self._rows:
            raise ValueError("there are no steps to simulate")
        reach = (self._computed / self._drawn.clamp(min=1e-9)).where(self._drawn > 0, 1.0)
        drawn = self._computed / len(self._rows)
        return self._result(reach.unsqueeze(1).expand(-1, self._num_stages), drawn)
