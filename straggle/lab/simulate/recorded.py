"""Delays that are drawn from the times of a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Generator, Tensor

from straggle.advise.timings import read_timings
from straggle.lab.simulate.delays import Delays
from straggle.lab.simulate.units import Units
from straggle.policies.deadline import check_count


@final
class RecordedDelays(Delays):
    """The steps of a recorded run, in blocks of ``block`` steps that begin at random.

    ``trace``: what `advise` reads, such as a ``trace.jsonl`` or its folder. What a late rank did not finish takes as
    much longer than its peers' as what it did (`read_timings`).

    Adjacent steps stay together, and so do the ranks of a step. With more ranks than were recorded, each further group
    of ranks has its own blocks. ``block=0``: all steps in their order, again and again.
    """

    def __init__(self, trace: str, *, block: int = 20) -> None:
        check_count("block", block)
        self.block = block
        timings = read_timings(Path(trace))
        # earlier micro-batches of a step are in its first stage
        ends_s = torch.from_numpy(timings.unit_s[..., -len(timings.stage_share) :]).float()
        self._unit_s = ends_s.diff(dim=-1, prepend=torch.zeros_like(ends_s[..., :1])).clamp(min=0)
        self._stage_share = torch.from_numpy(timings.stage_share).float()
        self._overhead_s = float(np.median(timings.network_s + np.median(timings.entered_s, axis=1)))

    def units(self, units: Units) -> Units:  # noqa: ARG002
        share, base_s = self._stage_share, self._unit_s.flatten(0, 1).median(0).values
        return Units(base_s, share, share, None, self._overhead_s, overlaps=False, merged=True)

    def steps(self, base_s: Tensor, ranks: int, generator: Generator) -> Iterator[Tensor]:  # noqa: ARG002
        groups = -(-ranks // self._unit_s.shape[1])
        orders = [self._order(len(self._unit_s), generator) for _ in range(groups)]
        while True:
            yield torch.cat([self._unit_s[next(order)] for order in orders])[:ranks]

    def _order(self, steps: int, generator: Generator) -> Iterator[int]:
        """Numbers of recorded steps: blocks, from the end around to the beginning, so that all are equally likely."""
        while True:
            first = int(torch.randint(steps, (), generator=generator)) if self.block else 0
            yield from (number % steps for number in range(first, first + (self.block or steps)))
