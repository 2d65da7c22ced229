"""What a job would be worth without ranks that are always slow, whose samples the others have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from straggle.advise.by_speed import BY_SAMPLES
from straggle.advise.gain import Candidate, Gain, Replayed, gain_of, replay
from straggle.advise.timings import Timings
from straggle.policies.deadline import LateHandling, WaitForAll
from straggle.report import in_words


def without(timings: Timings, ranks: Collection[int], late_handling: LateHandling | None, first: int = 0) -> Gain:
    """The steps from position ``first`` on, with as many samples as before; the others are waited for.

    With ``n`` of ``N`` ranks left, what goes by the samples takes these ``N / n`` times as long.
    """
    recent = timings.select(slice(first, None))
    kept = [rank for rank in range(timings.num_ranks) if rank not in ranks]
    more = timings.num_ranks / len(kept) - 1
    by_samples_s = np.asarray(sum(recent.phases[phase] for phase in BY_SAMPLES))
    seconds = (recent.own_s + more * by_samples_s)[:, kept].max(axis=1) + recent.network_s
    alone = Replayed(seconds, np.zeros(len(seconds)), np.zeros((len(seconds), len(kept))))
    named = Candidate(f"without {in_words(ranks)}", "", WaitForAll)
    return gain_of(named, alone, [], replay(timings, WaitForAll(), late_handling).since(first))


def all_without(
    timings: Timings, slow: Sequence[int], late_handling: LateHandling | None, first: int = 0
) -> Iterator[tuple[tuple[int, ...], Gain]]:
    """Without each of the ``slow`` ranks, and without all of them, if one at least is left."""
    sets = [(rank,) for rank in slow] + ([tuple(sorted(slow))] if len(slow) > 1 else [])
    for ranks in sets:
        if len(ranks) < timings.num_ranks:
            yield ranks, without(timings, ranks, late_handling, first)
