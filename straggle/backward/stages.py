"""Which parameters form which stage: contiguous runs of the order in which backward finishes gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import is_

import torch
from torch import Tensor, nn

from straggle import world
from straggle.backward.clocks import FinishTimes
from straggle.backward.device import device_of

STAGE_BYTES = 25 * 2**20  # DDP's bucket size
MIN_STAGES = 8
BUCKET_BYTES = 2**20  # below this, the latency of a message costs more than sending it early gains
QUEUED_BYTES = 64 * 2**20  # the same on a device that is a queue, where each message costs its host much more


@dataclass(frozen=True)
class Stage:
    """Parameters, as numbers into the model's list, and the modules between which they are computed.

    ``entry``: the module that the forward pass meets first; ``exit``: the module whose output is the stage's output.
    """

    name: str
    parameters: tuple[int, ...]
    numel: int
    nbytes: int
    entry: str
    exit: str


@dataclass(frozen=True)
class BalancedByTime:
    """Stages that take about the same time in backward, as measured in the first steps, instead of about equal bytes.

    ``num_stages``: how many; if ``None``, as many as there would be by size.
    """

    num_stages: int | None = None


@dataclass(frozen=True)
class StagePlan:
    """All stages, in the order in which backward finishes them; ``is_queued``: their device is a queue."""

    stages: tuple[Stage, ...]
    is_queued: bool = False

    def buckets(self) -> list[tuple[Stage, ...]]:
        """Consecutive stages that are merged by one allreduce: stages below 1 MB share one.

        On a device that is a queue, stages below 64 MB do, but for the first bucket and the last stage: merging begins
        and ends as early as with small ones.
        """
        buckets: list[tuple[Stage, ...]] = []
        for stage in self.stages:
            is_inner = self.is_queued and len(buckets) > 1 and stage is not self.stages[-1]
            most = QUEUED_BYTES if is_inner else BUCKET_BYTES
            if buckets and sum(other.nbytes for other in buckets[-1]) < most:
                buckets[-1] += (stage,)
            else:
                buckets.append((stage,))
        return buckets

    @property
    def numel(self) -> int:
        """Gradient elements of the entire model."""
        return sum(stage.numel for stage in self.stages)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the model that each stage is."""
        return shares_of([stage.numel for stage in self.stages])


def mean_over(values: Sequence[float], numels: Sequence[int]) -> float:
    """The mean over the elements of these parts; if there are none, parts count alike."""
    if not (total := sum(numels)):  # of small layers that are sharded, a rank may have nothing
        return sum(values) / len(values)
    return sum(value * numel for value, numel in zip(values, numels, strict=True)) / total


def shares_of(numels: Sequence[int]) -> tuple[float, ...]:
    """The share of all these elements that each part has; if there are none, parts count alike."""
    total = sum(numels)
    return tuple(numel / total if total else 1 / len(numels) for numel in numels)


class Registered:
    """The parameters and modules that a module has now, by identity, to notice replaced, added or tied ones."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        tables = [table for child in module.modules() for table in (child._parameters, child._modules)]
        self._empty = [table for table in tables if not table]
        self._tables = [table for table in tables if table]
        self._now = [table.values() for table in self._tables]  # views of the dicts: they show later changes
        self._entries = [*chain.from_iterable(self._now)]

    def __reduce__(self) -> tuple[type[Registered], tuple[nn.Module]]:
        """A copy holds the parameters and modules of the copied module."""
        return Registered, (self._module,)

    def unchanged(self) -> bool:
        """Whether all of them are still the same; called in every step."""
        if any(self._empty) or sum(map(len, self._tables)) != len(self._entries):
            return False
        return all(map(is_, chain.from_iterable(self._now), self._entries))

    def differences(self) -> str:
        """The changed parameters, in words; empty if only modules without parameters changed."""
        then, now = self._parameters, dict(self._module.named_parameters(remove_duplicate=False))
        kinds = {
            "replaced": [name for name in now if name in then and now[name] is not then[name]],
            "added": [name for name in now if name not in then],
            "removed": [name for name in then if name not in now],
        }
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, from which stages are formed, in the module tree's order; each shared one once."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


class PlanLearner:
    """Times the first complete steps; stages by time wait for the third, because the first warms up.

    ``times``: those of the running step; ``None`` if it is not timed.
    """

    def __init__(
        self,
        stages: int | Sequence[str] | BalancedByTime | None,
        device: torch.device,
        clock: Callable[[], float] = world.clock,
    ) -> None:
        self._left = 3 if isinstance(stages, BalancedByTime) else 1
        self._new_times = partial(FinishTimes, device, clock)
        self.times: FinishTimes | None = None

    def skip(self) -> None:
        """Time no more steps: the stages are planned from what other ranks have timed."""
        self._left = 0

    def step_begins(self) -> None:
        """Time the step, if that is still needed."""
        self.times = self._new_times() if self._left else None

    def step_complete(self) -> FinishTimes | None:
        """The step was complete; returns the times to plan the final stages from, if these are now known."""
        times, self.times = self.times, None
        if times is None:
            return None
        self._left -= 1
        return None if self._left else times


def complete_order(named: Sequence[tuple[str, int]], seconds: Mapping[str, float]) -> tuple[list[int], list[float]]:
    """The ``order`` and ``seconds`` to plan stages from, if they are known for only some of the parameters.

    ``named``: all parameters, in the module tree's order, with their elements; ``seconds``: those known, in the order
    in which backward finishes the parameters. Any other parameter comes right after the one that follows it in the
    tree, and takes time in proportion to its elements.
    """
    places, order = {name: place for place, (name, _) in enumerate(named)}, list[int]()
    order += [places[name] for name in seconds if name in places]
    for place in reversed(range(len(named))):
        if named[place][0] not in seconds:
            order.insert(order.index(place + 1) + 1 if place + 1 < len(named) else 0, place)
    numel = sum(numel for name, numel in named if name in seconds)
    each_s = sum(seconds[name] for name, _ in named if name in seconds) / max(1, numel)
    return order, [seconds.get(name, each_s * numel) for name, numel in named]


def plan_stages(
    module: nn.Module,
    stages: int | Sequence[str] | BalancedByTime | None = None,
    order: Sequence[int] | None = None,
    seconds: Sequence[float] | None = None,
    *,
    named: Sequence[tuple[str, Tensor]] | None = None,
) -> StagePlan:
    """Divide the trainable parameters of ``module`` into stages, or those in ``named``: an earlier result of
    `trainable`, or what this rank has of these.

    ``order`` lists the parameters in the order in which backward finishes them (default: the module tree reversed),
    ``seconds`` how long each took. ``stages`` is ``None`` (stages of about 25 MB, but at least eight if the model
    allows), a number, `BalancedByTime`, or a list of module names, each a stage of its own; parameters outside of them
    form further stages.
    Raises ``ValueError`` for unknown module names and for a number of stages that the module cannot be divided into.
    """
    named = trainable(module) if named is None else named
    is_queued = device_of(named[0][1].device).is_queued
    order = list(reversed(range(len(named)))) if order is None else list(order)
    if stages is None or isinstance(stages, (int, BalancedByTime)):
        number = stages.num_stages if isinstance(stages, BalancedByTime) else stages
        runs = _not_empty([list(run) for _, run in groupby(order, key=lambda index: _owner(named[index][0]))], named)
        sizes: list[float] = [sum(_nbytes(named, run)) for run in runs]
        if isinstance(stages, BalancedByTime) and seconds is not None:
            sizes = [sum(seconds[index] for index in run) for run in runs]
        groups = _balanced(runs, sizes, _num_stages(named, runs, number))
        return StagePlan(tuple(_stage(named, group) for group in groups), is_queued)
    by_module = _by_module(module, named, order, list(stages))
    return StagePlan(tuple(_stage(named, group, name) for name, group in by_module), is_queued)


def _not_empty(runs: list[list[int]], named: Sequence[tuple[str, Tensor]]) -> list[list[int]]:
    """Put runs of which this rank has no element, as of a small layer that is sharded, to their neighbours."""
    joined: list[list[int]] = []
    for run in runs:
        if joined and not (sum(_nbytes(named, run)) and sum(_nbytes(named, joined[-1]))):
            joined[-1] += run
        else:
            joined.append(run)
    return joined


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _nbytes(named: Sequence[tuple[str, Tensor]], indices: Sequence[int]) -> list[int]:
    return [named[index][1].numel() * named[index][1].element_size() for index in indices]


def _num_stages(named: Sequence[tuple[str, Tensor]], runs: list[list[int]], stages: int | None) -> int:
    if stages is None:
        total = sum(_nbytes(named, range(len(named))))
        return min(len(runs), max(MIN_STAGES, math.ceil(total / STAGE_BYTES)))
    if not 1 <= stages <= len(runs):
        raise ValueError(f"stages={stages}: this model can be divided into 1 to {len(runs)} stages")
    return stages


def _balanced(runs: list[list[int]], sizes: Sequence[float], num_stages: int) -> list[list[int]]:
    """Exactly ``num_stages`` contiguous groups of ``runs``, of about equal size (bytes or seconds)."""
    groups: list[list[int]] = []
    remaining, position = sum(sizes), 0
    for missing in range(num_stages, 0, -1):
        target, size, group = remaining / missing, 0.0, list[int]()
        # leave at least one run to each later stage
        while position <= len(runs) - missing and (not group or missing == 1 or size + sizes[position] / 2 <= target):
            group += runs[position]
            size += sizes[position]
            position += 1
        remaining -= size
        groups.append(group)
    return groups


def _by_module(
    module: nn.Module, named: Sequence[tuple[str, Tensor]], order: Sequence[int], names: list[str]
) -> list[tuple[str | None, list[int]]]:
    """The parameters of each stage, with the module name that the user gave for it, if any."""
    # a module that is frozen now is a known name without a stage
    known = {prefix for name, _ in module.named_parameters() for prefix in _prefixes(name)}
    wrong = [name for name in names if name not in known]
    if wrong:
        depth = wrong[0].count(".")
        valid = [name for name, _ in module.named_modules() if name in known and name.count(".") <= depth]
        raise ValueError(f"stages not found in {type(module).__name__}: {wrong}; it has {', '.join(valid)}")
    chosen = [max((p for p in _prefixes(named[i][0]) if p in names), key=len, default=None) for i in order]
    groups: dict[str | int, list[int]] = {}
    for position, (index, name) in enumerate(zip(order, chosen, strict=True)):
        if name is None and position and chosen[position - 1] is None:
            groups[next(reversed(groups))].append(index)  # a run of parameters outside of all named modules
        else:
            groups.setdefault(position if name is None else name, []).append(index)
    finished = {index: position for position, index in enumerate(order)}
    stages = [(name if isinstance(name, str) else None, group) for name, group in groups.items()]
    return sorted(stages, key=lambda stage: max(finished[index] for index in stage[1]))


def _prefixes(name: str) -> list[str]:
    """The names of the modules around a parameter: ``a.b`` and ``a`` for ``a.b.weight``."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _stage(named: Sequence[tuple[str, Tensor]], group: list[int], module: str | None = None) -> Stage:
    """The stage of these parameters, which are all in ``module`` if one was named."""
    owners = list(dict.fromkeys(_owner(named[index][0]) for index in group))
    labels = [owner or named[group[0]][0] for owner in owners]
    name = labels[0] if len(labels) == 1 else f"{labels[0]}..{labels[-1]}"
    numel = sum(named[index][1].numel() for index in group)
    return Stage(
        name=module or name,
        parameters=tuple(group),
        numel=numel,
        nbytes=sum(_nbytes(named, group)),
        entry=module or owners[-1],
        exit=module or owners[0],
    )
