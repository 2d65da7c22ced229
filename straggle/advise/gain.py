"""What each policy would have done in the recorded steps: its own class decides, and one model predicts the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
import torch

from straggle.advise.timings import Timings
from straggle.observe.numbers.intervals import Interval, prediction_interval, span, steps_interval
from straggle.observe.numbers.run import Array
from straggle.policies.auto_deadline import AutoDeadline
from straggle.policies.deadline import Deadline, FirstK, LateHandling, QuantileDeadline, WaitForAll
from straggle.policies.what_if.simulated_ranks import GivenStep, SimulatedRanks
from straggle.policies.what_if.step_model import SimulatedStep, StopRules, parts_of
from straggle.policies.wrappers import DropBudget

# of a step's time, by which predictions missed what came in recorded jobs, beside noise;
# steps in which a rank is late may take more, which is not known from steps in which all were waited for
MISSED, MORE_IF_LATE = 0.12, 0.2
_MANY, _MANY_STEPS = 4, 200  # times a policy's window, and steps
_OVER = 1.5  # times its share, at most: a policy that is predicted to drop more does not keep its promise
WORTH_IT = 1.01  # effective speedup, from which on a policy is recommended


@dataclass(frozen=True)
class Candidate:
    """A policy, which ``make()`` makes, and how it is written in Python and on the command line.

    ``passes_by``: with a loader that loads nothing for steps that a rank has missed (`LateLoader`).
    """

    code: str
    keys: str
    make: Callable[[], Deadline]
    passes_by: bool = False

    @property
    def policy(self) -> Deadline:
        """A new one."""
        return self.make()

    @property
    def most_dropped(self) -> float:
        """The share of the gradients that it promises not to pass over its window."""
        policy = self.make()
        return policy.share if isinstance(policy, DropBudget) else 1.0


@dataclass(frozen=True)
class Replayed:
    """The recorded steps under a policy: ``seconds`` and ``dropped`` (steps,), ``late`` (steps, ranks).

    ``lag``: the most merged steps that a rank still had to take at the end of a step.
    """

    seconds: Array
    dropped: Array
    late: Array
    lag: int = 0

    def since(self, first: int) -> Replayed:
        """Without the steps before the position ``first``."""
        return Replayed(self.seconds[first:], self.dropped[first:], self.late[first:], self.lag)

    def folded(self, steps: int) -> Replayed:
        """The last times that these ``steps`` were repeated, as their mean."""
        times = len(self.seconds) // steps
        seconds, dropped = (a[-times * steps :].reshape(times, steps).mean(0) for a in (self.seconds, self.dropped))
        return Replayed(seconds, dropped, self.late[-steps:], self.lag)


@dataclass(frozen=True)
class Gain:
    """``saved`` is of the mean step's seconds when all ranks are waited for, ``dropped`` of all gradient elements.

    ``speedup`` is effective: gradients per second, divided by those when all ranks are waited for. The values are those
    of the cautious replay (`replay`). The intervals reach from its low end to the high end of the other replay.
    ``surely`` is the speedup's low end for these steps alone, without the noise of future runs. ``saves``: whether time
    is saved for sure, once it has settled.
    """

    code: str
    keys: str
    step_s: float
    saved: Interval
    dropped: Interval
    speedup: Interval
    saves: bool
    surely: float


def candidates(num_ranks: int) -> list[Candidate]:
    """The policies to try."""
    some = [
        Candidate(
            "straggle.QuantileDeadline(0.5, slack=1.2)",
            "deadline=quantile deadline.q=0.5 deadline.slack=1.2",
            partial(QuantileDeadline, 0.5, slack=1.2),
        ),
        Candidate("straggle.AutoDeadline()", "deadline=auto", AutoDeadline),
        Candidate(
            "straggle.DropBudget(straggle.QuantileDeadline(0.5, slack=1.2), share=0.05)",
            "deadline=budget deadline.share=0.05 deadline.inner.q=0.5 deadline.inner.slack=1.2",
            lambda: DropBudget(QuantileDeadline(0.5, slack=1.2), share=0.05),
        ),
    ]
    for k in sorted({num_ranks - 1, num_ranks // 2 + 1} - {num_ranks}, reverse=True):
        some.append(Candidate(f"straggle.FirstK({k})", f"deadline=first_k deadline.k={k}", partial(FirstK, k)))
    return some


def with_late_loader(some: Sequence[Candidate]) -> list[Candidate]:
    """The same with a loader that passes by the batches of missed steps."""
    return [replace(one, code=f"{one.code}, LateLoader", passes_by=True) for one in some]


def gains(
    timings: Timings, late_handling: LateHandling | None = None, first: int = 0, *, loads_slowly: bool = False
) -> list[Gain]:
    """All candidates, the best first: what they gain from position ``first`` on, after seeing the steps before it.

    ``loads_slowly``: a rank does, so that its loader matters. What would break its own promise is not among them.
    """
    waiting = replay(timings, WaitForAll(), late_handling).since(first)
    some = candidates(timings.num_ranks)
    if loads_slowly:
        some += with_late_loader(some[:2] + some[3:])
    found = [(one, _gain(timings, one, late_handling, first, waiting)) for one in some]
    kept = [gain for one, gain in found if gain.dropped.value <= one.most_dropped]
    return sorted(kept, key=lambda gain: -gain.speedup.value)


def _gain(timings: Timings, one: Candidate, late_handling: LateHandling | None, first: int, waiting: Replayed) -> Gain:
    """From when it has settled, cautiously; the ranges begin with how it begins."""
    found = [
        replayed
        for cautious in (True, False)
        for replayed in _settling(timings, one, late_handling, first, cautious=cautious)
    ]
    if found[0].lag >= (late_handling or LateHandling()).max_lag > 0:
        found.append(waiting)  # its peers wait for it again and again, and how often is not known
    often = float(found[0].late.any(axis=1).mean())
    gain = gain_of(one, found[0], found[1:], waiting, more=MISSED + often * MORE_IF_LATE)
    # the last of its windows may be a part of one: over many steps it keeps to its share
    dropped = Interval(
        *(min(own, one.most_dropped) for own in (gain.dropped.value, gain.dropped.low, gain.dropped.high))
    )
    return replace(gain, dropped=dropped) if gain.dropped.value <= _OVER * one.most_dropped else gain


def _settling(
    timings: Timings, one: Candidate, late_handling: LateHandling | None, first: int, *, cautious: bool
) -> list[Replayed]:
    """The steps when what is to come has come, if that takes time, and as they are at first.

    It takes time that a rank falls as far behind as it may, and that a budget is used up: the same steps are repeated.
    """

    def of(steps: Timings) -> Replayed:
        return replay(steps, one.policy, late_handling, cautious=cautious, passes_by=one.passes_by)

    at_first = of(timings).since(first)
    steps, window = len(at_first.seconds), one.policy.window
    needed = window if one.most_dropped < 1 else steps if at_first.lag > 1 else 0
    if not needed or steps >= max(_MANY_STEPS, _MANY * window):  # in so many steps, the first ones matter little
        return [at_first]
    recent = timings.select(slice(first, None))
    times = -(-needed // recent.num_steps)
    again = of(recent.select(np.tile(np.arange(recent.num_steps), 2 * times)))
    return [again.since(times * recent.num_steps).folded(recent.num_steps), at_first]


def best(found: list[Gain]) -> Gain | None:
    """The one to use, with the surest gain; ``None`` if even that may be worth nothing, or may not be measurable."""
    seen = [gain for gain in found if gain.saves and gain.surely >= WORTH_IT]
    return max(seen, key=lambda gain: gain.surely, default=None)


def replay(
    timings: Timings,
    policy: Deadline,
    late_handling: LateHandling | None = None,
    *,
    cautious: bool = False,
    passes_by: bool = False,
) -> Replayed:
    """The recorded steps, one after another, under a policy (`SimulatedRanks`).

    A rank that was stood in for goes through its loop for each step that it missed, loads for it unless it
    ``passes_by``, and when it is ``max_lag`` of them behind its peers wait.

    ``cautious``: a late rank stops when it finishes its running stage. The merge of what it leaves comes after that and
    overlaps with nothing, so it costs the network's time once more. Otherwise a late rank stops at once.
    """
    late_handling = late_handling or LateHandling()
    rules = replace(StopRules.of(policy, late_handling, timings.num_ranks), checks=int(cautious))
    stage_share = torch.from_numpy(timings.stage_share).float()
    policy.prepare(late_handling, parts_of(len(stage_share), late_handling.granularity, rules.checks))
    ranks = SimulatedRanks(
        policy, rules, num_ranks=timings.num_ranks, stage_share=stage_share, max_lag=late_handling.max_lag
    )
    unit_s, share, entered_s = (torch.from_numpy(a) for a in (timings.unit_s, timings.unit_share, timings.entered_s))
    in_hand_s = torch.from_numpy(timings.phases["data"]) if passes_by else torch.zeros_like(entered_s)
    seconds, dropped, late = list[float](), list[float](), list[Array]()
    for step, network_s in enumerate(timings.network_s.tolist()):
        held_s = (entered_s[step] - in_hand_s[step].where(ranks.stood_in, 0.0)).clamp(min=0.0)
        given = GivenStep(unit_s[step], share[step], held_s + ranks.behind_s)
        ended = ranks.step(given, partial(_seconds, network_s, cautious))
        seconds.append(ended.seconds)
        dropped.append(float(1 - (ended.part * share[step]).sum(-1).mean()))
        late.append(ended.done.late.numpy())
    return Replayed(np.array(seconds), np.array(dropped), np.array(late), ranks.most_lag)


def _seconds(network_s: float, cautious: bool, done: SimulatedStep) -> float:
    return float(done.seconds) + network_s * (2 if cautious and bool(done.late.any()) else 1)


def gain_of(
    candidate: Candidate,
    cautious: Replayed,
    others: Sequence[Replayed],
    waiting: Replayed,
    *,
    begins: Sequence[Replayed] = (),
    more: float = MISSED,
) -> Gain:
    """What a candidate gains over ``waiting``, by replays of it: the values are the first one's.

    ``begins``: how it begins, which ranges reach to, and which makes it no less sure. ``more``: the share of its time
    that a step may take beyond that.
    """

    def speedup(kept: Array, own_s: Array, all_s: Array) -> Array:
        return kept * all_s / own_s

    def between(
        statistic: Callable[..., Array], replays: Sequence[Replayed] = (cautious, *others, *begins)
    ) -> Interval:
        found = [prediction_interval(statistic, 1 - own.dropped, own.seconds, waiting.seconds) for own in replays]
        return reduce(span, found)

    def step_time(_: Array, own_s: Array, all_s: Array) -> Array:
        return own_s / all_s

    # the step's time over that of waiting, and the gradients per second, with what predictions miss
    step, faster = between(step_time), between(speedup)
    saved = Interval(1 - step.value, 1 - step.high * (1 + more), 1 - step.low * (1 - MISSED))

    dropped = between(lambda kept, *_: 1 - kept)
    return Gain(
        candidate.code,
        candidate.keys,
        step_s=float(cautious.seconds.mean()),
        saved=saved,
        dropped=replace(dropped, low=max(0.0, dropped.low)),
        speedup=replace(faster, low=faster.low / (1 + more), high=faster.high / (1 - MISSED)),
        saves=between(step_time, (cautious, *others)).high * (1 + more) < 1,
        surely=steps_interval(speedup, 1 - cautious.dropped, cautious.seconds, waiting.seconds).low,
    )
