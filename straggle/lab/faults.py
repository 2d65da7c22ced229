"""Make a rank slow on purpose, reproducibly from a seed, so that methods are compared under the same faults.

The hooks are on the plain module, below its later wrapper, and sleep a little after every layer, so that a slow rank is
slow evenly. With `w` seconds of work since the previous moment, fault `i` gives its delay `d_i` from
`elapsed_i = w + d_1 + ... + d_(i-1)`, and the rank sleeps `d_1 + ... + d_n`. So slowdowns multiply, to `w * f_1 * f_2`,
and a slowdown also stretches the delays that faults listed before it give at the same moment.
"""

import hashlib
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from straggle.backward.hooks import ModuleHook

Phase = Literal["data", "forward", "backward"]


@final
@dataclass(frozen=True)
class Moment:
    """A point in a rank's step at which a fault may delay it.

    There is one when a micro-batch is loaded, one after every module that owns parameters, one after the complete
    forward pass, and one when each parameter's gradient is finished.

    microbatch: passes of this phase in this step before this one.
    elapsed_s: seconds since the previous moment of work, and of delays by the faults listed before this one.
    index: moments of this phase in this micro-batch before this one.
    num_moments: moments that this phase has at least in this micro-batch; in the backward pass that is the number of
        trainable parameters whose modules ran, and 1 in the other phases.
    seed: this fault's own, so that two faults do not strike together.
    """

    rank: int
    step: int
    microbatch: int
    phase: Phase
    elapsed_s: float
    index: int = 0
    num_moments: int = 1
    seed: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the first moment of its phase in its micro-batch."""
        return self.index == 0

    def generator(self) -> torch.Generator:
        """A new generator, the same for all moments of this seed, rank, step, micro-batch and phase."""
        return torch.Generator().manual_seed(_seed_from(self.seed, self.rank, self.step, self.microbatch, self.phase))


class Fault(ABC):
    """What makes a rank slow; `ranks` says which ranks, None means all."""

    ranks: frozenset[int] | None = None

    def affects(self, rank: int) -> bool:
        """Whether this fault can ever delay this rank."""
        return self.ranks is None or rank in self.ranks

    @abstractmethod
    def delay_s(self, moment: Moment) -> float:
        """Seconds to sleep now; asked at every moment of the ranks that this fault affects."""


@final
class Slowdown(Fault):
    """A constant factor on forward and backward: 2.0 means that this rank takes twice as long as it would.

    ``chance``: the probability with which a step is slow so; 1: all are.
    """

    def __init__(self, factor: float, *, ranks: Collection[int] | None = None, chance: float = 1.0) -> None:
        if not 1.0 <= factor < math.inf:
            raise ValueError(f"factor is {factor}; give a number from 1.0 (no delay), such as 2.0 for twice as long")
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"chance is {chance}; give a number from 0.0 to 1.0, per step")
        self.factor = factor
        self.ranks = _rank_set(ranks)
        self.chance = chance

    def delay_s(self, moment: Moment) -> float:
        return (self.factor - 1.0) * moment.elapsed_s if moment.phase != "data" and self._strikes(moment) else 0.0

    def _strikes(self, moment: Moment) -> bool:
        if self.chance == 1.0:
            return True
        drawn = torch.Generator().manual_seed(_seed_from(moment.seed, moment.rank, moment.step))  # one for all phases
        return torch.rand((), generator=drawn, dtype=torch.float64).item() < self.chance


@final
class RandomDelay(Fault):
    """With this probability a micro-batch is delayed by ``seconds``, at the first moment of the phase."""

    def __init__(
        self, probability: float, *, seconds: float, ranks: Collection[int] | None = None, phase: Phase = "forward"
    ) -> None:
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability is {probability}; give a number from 0.0 to 1.0, per micro-batch")
        self.probability = probability
        self.seconds = _seconds(seconds, "seconds")
        self.ranks = _rank_set(ranks)
        self.phase = _phase(phase)

    def delay_s(self, moment: Moment) -> float:
        if moment.phase != self.phase or not moment.first:
            return 0.0
        strikes = torch.rand((), generator=moment.generator(), dtype=torch.float64).item() < self.probability
        return self.seconds if strikes else 0.0


@final
class DropComputeDelay(Fault):
    """DropCompute's random delay: a micro-batch of `base_s` seconds takes `base_s * (1 + 0.5 * factor * X)`.

    Sleeps the `base_s * 0.5 * factor * X` on top, at the first moment of the forward pass. At factor 1.0 that is on
    average half of `base_s`, and at most 5.70 times `base_s`.

    Source: Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute variance
    reduction" (NeurIPS 2023), the simulated delay environment. See `dropcompute_factors` for X.
    """

    def __init__(self, base_s: float, *, factor: float = 1.0, ranks: Collection[int] | None = None) -> None:
        self.base_s = _seconds(base_s, "base_s")
        self.factor = _delay_factor(factor)
        self.ranks = _rank_set(ranks)

    def delay_s(self, moment: Moment) -> float:
        if moment.phase != "forward" or not moment.first:
            return 0.0
        return self.base_s * (dropcompute_factors((), moment.generator(), self.factor).item() - 1.0)


@final
class Stall(Fault):
    """One sleep at `step`, and every `every` steps after it, in the first micro-batch of the step.

    Data and forward stall at their first moment. Backward stalls in its middle: at a random parameter, drawn from the
    seed, that is not the first to finish. The data phase needs a loop that calls `FaultInjector.data`.
    """

    def __init__(
        self, step: int, *, seconds: float, rank: int, phase: Phase = "forward", every: int | None = None
    ) -> None:
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        if every is not None and every < 1:
            raise ValueError(f"every is {every}; give a number of steps from 1, or leave it out to stall once")
        self.step = step
        self.seconds = _seconds(seconds, "seconds")
        self.ranks = _rank_set([rank])
        self.phase = _phase(phase)
        self.every = every

    def delay_s(self, moment: Moment) -> float:
        if moment.phase != self.phase or moment.microbatch != 0 or not self._strikes(moment.step):
            return 0.0
        return self.seconds if moment.index == self._index(moment) else 0.0

    def _strikes(self, step: int) -> bool:
        if self.every is None:
            return step == self.step
        return step >= self.step and (step - self.step) % self.every == 0

    def _index(self, moment: Moment) -> int:
        if self.phase != "backward" or moment.num_moments == 1:
            return 0
        return int(torch.randint(1, moment.num_moments, (), generator=moment.generator()).item())


@final
class Kill(Fault):
    """Kills the process with SIGKILL in ``step``, at the first moment of the phase: nothing is reported.

    A rank that is started again, and goes on from a later step, is not killed again.
    """

    def __init__(self, step: int, *, rank: int, phase: Phase = "backward") -> None:
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        self.step = step
        self.ranks = _rank_set([rank])
        self.phase = _phase(phase)

    def delay_s(self, moment: Moment) -> float:
        if (moment.step, moment.phase, moment.first) == (self.step, self.phase, True):
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


def dropcompute_pmf() -> Tensor:
    """Probabilities of L = 1, ..., 999 in DropCompute's delay model, shape [999], float64; `E[L] = 87.63`.

    Log-normal (4, 1) density at the integers, truncated at 999: `P(L)` proportional to `exp(-(ln L - 4)^2 / 2) / L`.
    """
    lengths = torch.arange(1, 1000, dtype=torch.float64)
    density = torch.exp(-((lengths.log() - 4.0) ** 2) / 2.0) / lengths
    return density / density.sum()


def dropcompute_factors(
    shape: Sequence[int], generator: torch.Generator, factor: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Random factors `1 + 0.5 * factor * X`, `X = L / E[L]`, on the time of a micro-batch.

    At factor 1.0: mean 1.5, standard deviation 0.581, maximum 6.70. The distribution is `dropcompute_pmf`.
    """
    cdf, quantiles, mean = _dropcompute_tables()
    uniform = torch.rand(tuple(shape), generator=generator, dtype=torch.float64).view(-1)
    drawn = quantiles.to(dtype).index_select(0, (uniform * len(quantiles)).to(torch.int32))
    several = drawn.isnan().nonzero().squeeze(1)
    drawn[several] = torch.searchsorted(cdf, uniform[several], right=True).to(dtype) + 1.0
    return drawn.mul_(0.5 * _delay_factor(factor) / mean).add_(1.0).view(tuple(shape))


@lru_cache(maxsize=1)
def _dropcompute_tables() -> tuple[Tensor, Tensor, float]:
    """The distribution function of L; L for each 32,768th of it, NaN if several lie in one; and `E[L]`.

    The table answers for 98 uniform numbers in 100 at once: many ranks are drawn in less than half of the time.
    """
    pmf = dropcompute_pmf()
    # divided by its last entry, the cdf ends in exactly 1.0, above every uniform number: L is never 1000
    cdf = pmf.cumsum(0) / pmf.sum()
    cdf[-1] = 1.0
    found = torch.searchsorted(cdf, torch.arange(32769, dtype=torch.float64) / 32768, right=True)
    quantiles = torch.where(found[:-1] == found[1:], found[:-1].double() + 1.0, math.nan)
    return cdf, quantiles, float(pmf @ torch.arange(1, 1000, dtype=torch.float64))


@final
class FaultInjector:
    """Delays one rank's training of `module` by `faults`, in their order; no hook is set if none affects the rank.

    It takes the plain module, before DDP or `StagedDataParallel` wraps it:

        with FaultInjector(module, {"slow": Slowdown(2.0, ranks=[3])}, rank=rank) as injector:
            model = DistributedDataParallel(module)
            for n, (x, y) in enumerate(loader):
                injector.step(n)
                injector.data()
                criterion(model(x), y).backward()

    A micro-batch begins with a forward pass of `module` in training mode with gradients enabled; other forward passes
    are not delayed. A step that an exception left at any point needs no clean-up: `step` discards it.

    `seed` and the name of a fault determine its random numbers. `sleep` must advance `clock`: what a sleep takes too
    long is subtracted from the next sleeps of the step. Work is measured on the host's clock; on an accelerator, whose
    kernels are queued, give a `clock` that synchronises the device first. Waiting inside other hooks of a pass counts
    as work.

    A slowdown is relative to the work as it takes then, and a CPU that slept between layers works more slowly. With
    layers of 2.6 ms forward and backward, factors 2, 4 and 8 made a pass 2.2, 5 and 11 times as long (2 shared cores),
    and more with shorter layers. Compare ranks by the times that they measure, not by their nominal factors.

    Parameters that start to train later, and modules under `torch.compile`, are not supported.
    """

    def __init__(
        self,
        module: nn.Module,
        faults: Mapping[str, Fault],
        *,
        rank: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rank = rank
        self._faults = [(fault, _seed_from(seed, name)) for name, fault in faults.items() if fault.affects(rank)]
        self._clock = clock
        self._sleep = sleep
        self._reached: set[nn.Parameter] = set()
        self.step(0)
        self._handles = self._attach(module) if self._faults else []

    def step(self, step: int) -> None:
        """Begin step `step`, counted from 0."""
        self._step = step
        self._phase: Phase | None = None
        self._microbatches: dict[Phase, int] = dict.fromkeys(get_args(Phase), -1)
        self._index = 0
        self._in_forward = False
        self._owed_s = 0.0
        self._mark_s = self._clock()

    def data(self) -> None:
        """Mark the end of loading a micro-batch, before its forward pass, and sleep the data phase's delay."""
        self._begin("data")
        self._delay("data")

    def close(self) -> None:
        """Remove the hooks; the module then runs at its own speed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._faults.clear()

    def __enter__(self) -> "FaultInjector":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _attach(self, root: nn.Module) -> list[RemovableHandle]:
        owners = [m for m in root.modules() if m is not root and next(m.parameters(recurse=False), None) is not None]
        return [
            root.register_forward_pre_hook(ModuleHook(self._begin_forward)),
            *(owner.register_forward_hook(ModuleHook(self._after_owner)) for owner in owners),
            root.register_forward_hook(ModuleHook(self._end_forward)),
            *(
                p.register_post_accumulate_grad_hook(self._after_gradient)  # type: ignore[no-untyped-call]
                for p in root.parameters()
                if p.requires_grad
            ),
        ]

    def _begin_forward(self, root: nn.Module, _args: Any) -> None:
        # The root decides for its entire pass: layers kept in evaluation mode, and checkpointed blocks, which run
        # without gradients first, belong to a training pass; the recomputation of such a block is backward work.
        self._in_forward = root.training and torch.is_grad_enabled()
        if self._in_forward:
            self._begin("forward")
            self._reached.clear()
            self._mark_s = self._clock()

    def _after_owner(self, owner: nn.Module, _args: Any, _output: Any) -> None:
        if self._in_forward:
            self._reached.update(p for p in owner.parameters(recurse=False) if p.requires_grad)
            self._delay("forward")

    def _end_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        self._after_owner(root, args, output)
        self._in_forward = False

    def _after_gradient(self, _parameter: Tensor) -> None:
        if self._phase != "backward":
            self._begin("backward")
        self._delay("backward", num_moments=max(1, len(self._reached)))

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        self._microbatches[phase] += 1
        self._index = 0

    def _delay(self, phase: Phase, num_moments: int = 1) -> None:
        work_s = self._clock() - self._mark_s
        place = (self._rank, self._step, self._microbatches[phase], phase)
        delay_s = 0.0
        for fault, seed in self._faults:
            delay_s += fault.delay_s(Moment(*place, work_s + delay_s, self._index, num_moments, seed))
        self._index += 1
        self._sleep_for(delay_s)

    def _sleep_for(self, delay_s: float) -> None:
        # A sleep lasts a little too long, which many short layers would add up, so the excess is carried over.
        self._owed_s += delay_s
        start_s = self._mark_s = self._clock()
        if delay_s > 0.0 and self._owed_s > 0.0:
            self._sleep(self._owed_s)
            self._mark_s = self._clock()
            self._owed_s -= self._mark_s - start_s


def _seed_from(*parts: int | str) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _rank_set(ranks: Collection[int] | None) -> frozenset[int] | None:
    if ranks is None:
        return None
    if not ranks or min(ranks) < 0:
        raise ValueError(f"ranks are {list(ranks)}; give ranks from 0, or leave them out for every rank")
    return frozenset(ranks)


def _phase(phase: Phase) -> Phase:
    if phase not in get_args(Phase):
        raise ValueError(f"phase is {phase!r}; give one of {', '.join(get_args(Phase))}")
    return phase


def _seconds(seconds: float, name: str) -> float:
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"{name} is {seconds}; give a finite number of seconds from 0.0")
    return seconds


def _delay_factor(factor: float) -> float:
    if not 0.0 <= factor < math.inf:
        raise ValueError(f"factor is {factor}; give a finite number from 0.0 (no delay); the paper's is 1.0")
    return factor
