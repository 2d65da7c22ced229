"""Merged rounds, as whoever waits for a step is given them."""

from __future__ import annotations

import torch
from telemetry_rows import row_of
from training import mlp

from straggle.backward.stages import plan_stages
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.round import Layout, Round, RoundTerms
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import ScalarNames
from straggle.policies.network.rank_links import Way
from straggle.source.replicated import slots_of


def merged_round(
    step: int = 0,
    *,
    merged_at: float = 0.0,
    deadline_s: float = 1.0,
    late: bool = False,
    stood_in: bool = False,
    ways: tuple[Way, ...] = (),
) -> Round:
    """A round of one rank that is merged at this time, by its clock, and had this deadline."""
    module = mlp()
    plan, slots = plan_stages(module, None), slots_of(module.named_parameters())
    buffers = StageBuffers(plan, slots, 1, num_state=0, drop_nonfinite=True)
    current = Round(step, Layout(plan, slots), buffers, RoundTerms(None))
    if stood_in:
        current.stand_in()
    num_stages = len(plan.stages)
    nothing = (0.0,) * num_stages
    of_stages = {"computed": nothing, "estimated": nothing, "stage_s": nothing}
    row = row_of(compute_s=0.5, busy_s=0.5, late=late, ways=ways, **of_stages)
    current.table = Table(torch.stack([row.encode()]), num_stages)
    current.record = StepRecord(step, 0.5, deadline_s, plan, current.table, ScalarNames({}), merged_at=merged_at)
    return current
