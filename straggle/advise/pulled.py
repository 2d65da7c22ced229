"""What it would be worth that the ranks draw a step's micro-batches (`step.pull`), by list scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from straggle.advise.gain import WORTH_IT, Candidate, Gain, Replayed, gain_of, replay
from straggle.advise.list_schedule import Drawing
from straggle.advise.slow import HELD_UP
from straggle.advise.timings import Timings
from straggle.observe.numbers.run import Array
from straggle.policies.deadline import LateHandling, WaitForAll
from straggle.pools.pool import WINDOW

KEYS = "work=pulled"
TRIED = (2, 4, 8, 16)  # micro-batches of a rank, if a step has one
_MOST = 0.9  # of what the most micro-batches would save: so many are enough
_STEPS = 1000  # the last ones, that are looked at


@dataclass(frozen=True)
class Pulled:
    """``num_microbatches`` of each rank in a step, drawn from one pool; ``drawn``: how many each rank would compute.

    ``accumulates``: the recorded steps have as many. Otherwise they would have to be divided into these.
    """

    num_microbatches: int
    accumulates: bool
    drawn: tuple[float, ...]
    gain: Gain

    @property
    def is_worth_it(self) -> bool:
        """Whether that is sure to gain, and would show in a comparison."""
        return self.gain.saves and self.gain.surely >= WORTH_IT


def best_pulled(
    timings: Timings, num_microbatches: int, late_handling: LateHandling | None = None, first: int = 0
) -> Pulled | None:
    """With the micro-batches that a step has; if it has one, with the fewest that gain nearly as much as more.

    ``None``: more than one would be needed, and no number that was tried is worth it.
    """
    if num_microbatches > 1:
        return pulled(timings, num_microbatches, late_handling, first)
    recent, waiting = _recent(timings, late_handling, first)
    tried = [replace(_pulled(recent, n, waiting), accumulates=False) for n in TRIED]
    worth = [one for one in tried if one.is_worth_it]
    most = max((one.gain.saved.value for one in worth), default=0.0)
    return next((one for one in worth if one.gain.saved.value >= _MOST * most), None)


def pulled(
    timings: Timings, num_microbatches: int, late_handling: LateHandling | None = None, first: int = 0
) -> Pulled:
    """If the ranks had drawn in the steps from position ``first`` on; all ranks are waited for, nothing is dropped."""
    recent, waiting = _recent(timings, late_handling, first)
    return _pulled(recent, num_microbatches, waiting)


def _recent(timings: Timings, late_handling: LateHandling | None, first: int) -> tuple[Timings, Replayed]:
    """The steps that are looked at, and what they take when all ranks are waited for."""
    recent = timings.select(slice(max(first, timings.num_steps - _STEPS), None))
    return recent, replay(recent, WaitForAll(), late_handling)


def _pulled(recent: Timings, num_microbatches: int, waiting: Replayed) -> Pulled:
    (cautious, drawn), (bold, _) = (_drawn(recent, num_microbatches, cautious=flag) for flag in (True, False))
    candidate = Candidate(f"straggle.step.pull of {num_microbatches} micro-batches", KEYS, WaitForAll)
    return Pulled(num_microbatches, True, drawn, gain_of(candidate, cautious, [bold], waiting))


def _drawn(timings: Timings, num_microbatches: int, *, cautious: bool) -> tuple[Replayed, tuple[float, ...]]:
    """The steps, and how many micro-batches each rank computed in the mean."""
    num_ranks = timings.num_ranks
    drawing = Drawing(num_microbatches * num_ranks, num_ranks)
    steps = list(_parts(timings, num_microbatches, cautious=cautious))
    found = [drawing.follow(*step) for step in (*steps[:WINDOW], *steps)][-len(steps) :]  # as after steps like these
    seconds = np.array([max(step.over_s) for step in found]) + timings.network_s
    parts = np.array([step.parts for step in found], dtype=float)
    replayed = Replayed(seconds, np.zeros(len(steps)), np.zeros(parts.shape))
    return replayed, tuple(map(float, parts.mean(axis=0)))


def _parts(
    timings: Timings, num_microbatches: int, *, cautious: bool
) -> Iterator[tuple[list[float], list[list[float]]]]:
    """For each step when each rank enters it, and the seconds of its micro-batches; then those of the step before."""
    entered_s, part_s = part_times(timings, num_microbatches, cautious=cautious)
    for step, begin_s in enumerate(entered_s):
        own_s = np.concatenate([part_s[step], part_s[max(0, step - 1)]], axis=1)
        yield begin_s.tolist(), own_s.tolist()


def part_times(timings: Timings, num_microbatches: int, *, cautious: bool = False) -> tuple[Array, Array]:
    """When each rank enters each step, (steps, ranks), and its micro-batches' seconds (steps, ranks, micro-batches).

    Micro-batches that were recorded are as they were. Otherwise a rank's loading and passes are divided equally. With
    ``cautious``, what is beyond 1.5 times the rank's median step is not divided: the rank was held up by so much in one
    piece, before it entered or in its first micro-batch.
    """
    if timings.num_microbatches == num_microbatches > 1:
        last = num_microbatches - 1
        ends_s = np.concatenate([timings.unit_s[..., :last], timings.unit_s[..., -1:]], axis=-1)
        part_s = np.diff(ends_s, axis=-1, prepend=0.0)
        if (part_s > 0).all():
            return timings.entered_s, part_s
    data_s = timings.phases["data"]
    passes_s = timings.phases["forward"] + timings.phases["backward"]
    usual: list[Array] = [np.minimum(s, HELD_UP * np.median(s, axis=0)) if cautious else s for s in (data_s, passes_s)]
    usual_data_s, usual_passes_s = usual
    part_s = np.repeat((usual_data_s + usual_passes_s)[..., np.newaxis] / num_microbatches, num_microbatches, axis=-1)
    part_s[..., 0] += passes_s - usual_passes_s
    return np.asarray(timings.own_s - passes_s - usual_data_s), np.maximum(part_s, 1e-9)
