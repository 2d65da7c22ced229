"""What a rank has to do in a step: units of work, one after another, and what each adds to the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.policies.deadline import Granularity, check_count


@dataclass(frozen=True)
class Units:
    """``base_s`` (units,): seconds of each, one after another, without delays.

    ``share`` (units,): the share of the rank's gradient that each adds; ``stage_share`` (stages,): the share of the
    model that each stage is; ``silent`` (units,): see `part_computed`; ``in_stages``: the last units are the stages.
    ``overhead_s``: seconds of a step beside the ranks' own work and the merge, such as the optimizer's. ``overlaps``:
    whether a stage is merged while those after it are computed; ``merged``: the overhead is that of a recorded step,
    the merge included. ``checks``: at how many moments of a unit a late rank can stop (`StopRules`).
    """

    base_s: Tensor
    share: Tensor
    stage_share: Tensor
    silent: Tensor | None = None
    overhead_s: float = 0.0
    in_stages: bool = True
    overlaps: bool = True
    merged: bool = False
    checks: int = 0


class Work:
    """A step of ``step_s`` seconds on every rank: micro-batches of a forward pass and ``num_stages`` equal stages.

    ``forward_share`` is the part of a micro-batch's time that the forward pass takes. ``checks_per_stage``: at how many
    moments of a stage, evenly over its time, a late rank can stop: the number of its layers. 0: at any moment.
    """

    def __init__(
        self,
        step_s: float,
        *,
        num_stages: int = 12,
        num_microbatches: int = 1,
        forward_share: float = 1 / 3,
        overhead_s: float = 0.0,
        overlap: bool = True,
        checks_per_stage: int = 0,
    ) -> None:
        if not 0 < step_s < math.inf:
            raise ValueError(f"step_s={step_s}: must be a positive number of seconds")
        check_count("num_stages", num_stages, least=1)
        check_count("num_microbatches", num_microbatches, least=1)
        if not 0 <= forward_share <= 1:
            raise ValueError(f"forward_share={forward_share}: must be a share of a micro-batch's time, from 0 to 1")
        if not 0 <= overhead_s < math.inf:
            raise ValueError(f"overhead_s={overhead_s}: must be a number of seconds")
        check_count("checks_per_stage", checks_per_stage)
        if checks_per_stage and num_microbatches > 1:
            raise ValueError(
                f"checks_per_stage={checks_per_stage} with num_microbatches={num_microbatches}: only the last "
                "micro-batch comes in stages; use 0, or one micro-batch"
            )
        self.step_s = step_s
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.forward_share = forward_share
        self.overhead_s = overhead_s
        self.overlap = overlap
        self.checks_per_stage = checks_per_stage

    def units(self, granularity: Granularity) -> Units:
        """Its units, as the telemetry counts them (`Progress`): micro-batches, stages in the last one, or just one.

        Raises ``ValueError`` for ``checks_per_stage`` if there are no stages to be dropped.
        """
        if self.checks_per_stage and granularity != "stage":
            raise ValueError(f"checks_per_stage={self.checks_per_stage} with granularity={granularity!r}: use 0")
        stages, passes = self.num_stages, self.num_microbatches
        stage_share = torch.full((stages,), 1 / stages)
        overhead_s = self.overhead_s
        if granularity == "step":  # its merge begins when a rank has finished
            one = torch.ones(1)
            return Units(one * self.step_s, one, stage_share, one, overhead_s, in_stages=False, overlaps=False)
        whole_s, share, silent = (
            torch.full((passes,), each) for each in (self.step_s / passes, 1 / passes, self.forward_share)
        )
        if granularity == "microbatch":
            return Units(whole_s, share, stage_share, silent, overhead_s, in_stages=False, overlaps=False)
        backward_s = (1 - self.forward_share) * self.step_s / passes / stages
        last_s = torch.full((stages,), backward_s)
        last_s[0] += self.forward_share * self.step_s / passes
        silent_last = torch.zeros(stages)
        silent_last[0] = 1 - backward_s / float(last_s[0])
        return Units(
            torch.cat([whole_s[:-1], last_s]),
            torch.cat([share[:-1], stage_share / passes]),
            stage_share,
            torch.cat([silent[:-1], silent_last]),
            overhead_s,
            overlaps=self.overlap,
            checks=self.checks_per_stage,
        )
