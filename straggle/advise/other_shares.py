"""What other shares of a step's samples would have been worth, if a rank is always slow: by speed, or none for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from straggle.advise.gain import Candidate, Gain, Replayed, gain_of, replay
from straggle.advise.timings import Timings
from straggle.data.shares import exact_shares
from straggle.observe.numbers.run import Array
from straggle.policies.deadline import LateHandling, WaitForAll
from straggle.report import in_words

BY_SAMPLES = ("data", "forward", "backward")  # phases whose time goes with the samples
_LEAST = 0.05  # of an equal share, that a rank has at least
_SETTLES = 20  # steps with equal shares at first, at most: they show how slow each rank is
KEYS = "rebalance=by_speed"


@dataclass(frozen=True)
class BySpeed:
    """Each rank's ``shares`` of a step, 1 on average, and the ``gain`` if all ranks are then waited for."""

    shares: tuple[float, ...]
    gain: Gain


def by_speed(timings: Timings, late_handling: LateHandling | None = None, first: int = 0) -> BySpeed:
    """If the steps from position ``first`` on had been dealt out by speed; nothing is dropped then.

    The range reaches to what they take if shares are equal at first.
    """
    recent = timings.select(slice(first, None))
    by_samples_s = sum(recent.phases[phase] for phase in BY_SAMPLES)
    work_s = np.median(by_samples_s, axis=0)
    shares = shares_of(work_s, np.median(recent.own_s - by_samples_s, axis=0))
    waiting = replay(timings, WaitForAll(), late_handling).since(first)
    alone = Candidate("straggle.DealtLoader(model, loader)", KEYS, WaitForAll)
    dealt = replay(with_shares(timings, shares), WaitForAll(), late_handling).since(first)
    begins_s = np.concatenate([waiting.seconds[:_SETTLES], dealt.seconds[_SETTLES:]]).mean()
    begins = replace(dealt, seconds=dealt.seconds * begins_s / dealt.seconds.mean())
    return BySpeed(tuple(map(float, shares)), gain_of(alone, dealt, [], waiting, begins=[begins]))


def shares_of(work_s: Array, fixed_s: Array) -> Array:
    """Shares of mean 1 with which all ranks finish together; a share of 1 takes ``work_s``, beside ``fixed_s``.

    A rank that would have less than a twentieth has that, and the others have the rest.
    """
    work_s = np.maximum(work_s, 1e-9)
    speeds, overheads = (1 / work_s).tolist(), (fixed_s / work_s).tolist()
    return np.array(exact_shares(len(work_s), speeds, overheads, least=_LEAST))


def with_shares(timings: Timings, shares: Array) -> Timings:
    """The recorded steps, had each rank had ``shares`` times as many samples in them."""
    phases = {name: s * shares if name in BY_SAMPLES else s for name, s in timings.phases.items()}
    entered_s = np.maximum(0.0, timings.entered_s + (shares - 1) * timings.phases["data"])
    return replace(timings, phases=phases, entered_s=entered_s, unit_s=timings.unit_s * shares[:, None])


def without(timings: Timings, ranks: Collection[int], late_handling: LateHandling | None, first: int = 0) -> Gain:
    """The steps from position ``first`` on, with as many samples as before; the others are waited for."""
    recent = timings.select(slice(first, None))
    by_samples_s = np.asarray(sum(recent.phases[phase] for phase in BY_SAMPLES))
    seconds = work_without(ranks, recent.own_s, by_samples_s) + recent.network_s
    alone = Replayed(seconds, np.zeros(len(seconds)), np.zeros((len(seconds), timings.num_ranks)))
    named = Candidate(f"without {in_words(ranks)}", "", WaitForAll)
    return gain_of(named, alone, [], replay(timings, WaitForAll(), late_handling).since(first))


def all_without(
    timings: Timings, slow: Sequence[int], late_handling: LateHandling | None, first: int = 0
) -> Iterator[tuple[tuple[int, ...], Gain]]:
    """Without each of the ``slow`` ranks, and without all of them, if one at least is left."""
    for ranks in sets_of(slow, timings.num_ranks):
        yield ranks, without(timings, ranks, late_handling, first)


def sets_of(slow: Sequence[int], num_ranks: int, each: int | None = None) -> Iterator[tuple[int, ...]]:
    """Which ranks to leave out: each by itself, of up to ``each`` of them, and all of them, if one at least is left."""
    if num_ranks > 1 and (each is None or len(slow) <= each):
        yield from ((rank,) for rank in slow)
    if 1 < len(slow) < num_ranks:
        yield tuple(sorted(slow))


def work_without(ranks: Collection[int], own_s: Array, by_samples_s: Array) -> Array:
    """The work of the slowest of the other ranks in each step, (steps,), which have these ranks' samples, too.

    ``own_s`` and ``by_samples_s``, (steps, ranks): of all their work, and of what goes by the samples. With ``n`` of
    ``N`` ranks left, that takes these ``N / n`` times as long.
    """
    kept = [rank for rank in range(own_s.shape[1]) if rank not in ranks]
    more = own_s.shape[1] / len(kept) - 1
    return np.asarray((own_s[:, kept] + more * by_samples_s[:, kept]).max(axis=1))
