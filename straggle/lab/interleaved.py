"""Jobs that take turns, each on its own clock, and how much faster one of them is than another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean, median, pstdev, quantiles

import torch.distributed as dist

from straggle.lab.jobs import Job
from straggle.observe.numbers.goodput import Uses
from straggle.observe.numbers.intervals import Interval
from straggle.observe.numbers.reader import num_warmup_steps
from straggle.policies.what_if.ddp_time import DdpPrediction


class TimedJob:
    """A job and the clock of its own steps: neither the other jobs' turns count, nor the evaluations after its own.

    ``clock`` gives seconds.
    """

    def __init__(self, job: Job, clock: Callable[[], float] = time.perf_counter) -> None:
        self.job = job
        self._clock = clock
        self.step_s: list[float] = []
        self.turn_s: list[float] = []
        self.scores: list[dict[str, float]] = []  # on held-out data, after each turn
        self._records = job.records()
        job.pause()

    @property
    def end_s(self) -> list[float]:
        """When each turn ended, on this job's own clock."""
        return list(accumulate(self.turn_s))

    @property
    def losses(self) -> list[float]:
        """The validation loss after each turn."""
        return [scores["loss"] for scores in self.scores]

    def turn(self, first: int, steps: int) -> None:
        """Train some steps, and evaluate; what a rank must catch up with at the end of the turn counts, too.

        Collective.
        """
        dist.barrier()
        self.job.resume()
        begin = before = self._clock()
        for number in range(first, first + steps):
            self.job.step(number)
            now = self._clock()
            self.step_s.append(now - before)
            before = now
        dist.barrier()
        self.turn_s.append(self._clock() - begin)
        self.job.pause()
        self.scores.append(self.job.evaluate())

    def summary(self, steps: int, turns: int) -> dict[str, float]:
        """Times of the first ``steps``, which took this number of ``turns``.

        Median and deviation leave out the first of them (`num_warmup_steps`).
        """
        step_s = self.step_s[:steps]
        steady = step_s[num_warmup_steps(len(step_s)) :]
        return {
            "step_seconds_median": median(steady),
            "step_seconds_mean": sum(self.turn_s[:turns]) / steps,
            "step_seconds_p95": quantiles(steady, n=20)[-1] if len(steady) > 1 else steady[0],
            "step_seconds_stdev": pstdev(steady),
            "seconds": sum(self.turn_s[:turns]),
        }

    def ddp_seconds(self, steps: int) -> dict[str, float | None]:
        """What DDP would have taken for the first ``steps``, as predicted from them; ``None``: nothing is known."""
        prediction = DdpPrediction()
        seconds = [prediction.add(record.report).seconds for record in self._records[:steps]]
        steady = seconds[num_warmup_steps(len(seconds)) :]
        numbers = (median(steady), fmean(seconds)) if steady else (None, None)
        return dict(zip(("ddp_seconds_median", "ddp_seconds_mean"), numbers, strict=True))

    def goodput(self, steps: int) -> float | None:
        """The useful part of the first ``steps``' time; ``None`` for a method whose steps straggle does not merge."""
        uses = Uses()
        for record in self._records[:steps]:
            uses.add(record.report)
        return uses.goodput().share if self._records else None

    def dropped_share(self, steps: int) -> float:
        """Share of all gradient elements of the first ``steps`` that did not come in time."""
        shares = [record.report.dropped_share for record in self._records[:steps]]
        return fmean(shares) if shares else 0.0


def seconds_to(losses: Sequence[float], end_s: Sequence[float], target: float) -> float | None:
    """When a loss that was measured at the times ``end_s`` first reached ``target``, interpolated between two of them.

    ``None``: never.
    """
    before_s, before = 0.0, math.inf
    for after_s, after in zip(end_s, losses, strict=True):
        if after <= target:
            part = (before - target) / (before - after) if math.isfinite(before) else 1.0
            return before_s + part * (after_s - before_s)
        before_s, before = after_s, after
    return None


def time_to_loss_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Interval:
    """Our seconds to the last loss, divided by theirs, and the ratio's range over all losses but a tenth at each end.

    ``None``: a loss was never reached; the ratio is infinite if we did not, NaN if they did not.
    """
    ratios = [
        math.nan if their is None else math.inf if our is None else our / their
        for our, their in zip(ours, theirs, strict=True)
    ]
    known = sorted(ratio for ratio in ratios if not math.isnan(ratio))
    tenth = len(known) // 10
    return Interval(ratios[-1], known[tenth], known[-1 - tenth]) if known else Interval(math.nan, math.nan, math.nan)


def reference_losses(losses: Sequence[float]) -> list[float]:
    """The losses by which runs are compared: those that the reference reached in its second half, its last one last."""
    lowest, levels = math.inf, []
    for loss in losses[len(losses) // 2 :]:
        if loss < lowest:
            lowest = loss
            levels.append(loss)
    return [*(level for level in levels if level > losses[-1]), losses[-1]]
