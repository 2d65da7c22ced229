"""Which parameters form which stage: contiguous runs of the order in which backward finishes gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

STAGE_BYTES = 25 * 2**20  # DDP's bucket size
MIN_STAGES = 8
BUCKET_BYTES = 2**20  # below this, the latency of a message costs more than sending it early gains


@dataclass(frozen=True)
class Stage:
    """Parameters (numbers into the model's list); ``entry`` is their module that the forward pass meets first."""

    name: str
    parameters: tuple[int, ...]
    numel: int
    nbytes: int
    entry: str


@dataclass(frozen=True)
class StagePlan:
    """All stages, in the order in which backward finishes them."""

    stages: tuple[Stage, ...]

    def buckets(self) -> list[tuple[Stage, ...]]:
        """Consecutive stages that are merged by one allreduce: stages below 1 MB share one."""
        buckets: list[tuple[Stage, ...]] = []
        for stage in self.stages:
            if buckets and sum(other.nbytes for other in buckets[-1]) < BUCKET_BYTES:
                buckets[-1] += (stage,)
            else:
                buckets.append((stage,))
        return buckets

    @property
    def numel(self) -> int:
        """Gradient elements of the whole model."""
        return sum(stage.numel for stage in self.stages)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the stages are made of, each shared one once, in the module tree's order."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def plan_stages(
    module: nn.Module, stages: int | Sequence[str] | None = None, order: Sequence[int] | None = None
) -> StagePlan:
    """Divide the trainable parameters of ``module`` into stages.

    ``order`` lists the parameters in the order in which backward finishes them (default: the module tree reversed).
    ``stages`` is ``None`` (stages of about 25 MB, but not fewer than eight where the model allows), a number, or a list
    of module names, each a stage of its own; parameters outside of them form further stages.
    Raises ``ValueError`` for names that the module does not have and for a number that it cannot be divided into.
    """
    named = trainable(module)
    order = list(reversed(range(len(named)))) if order is None else list(order)
    if stages is None or isinstance(stages, int):
        runs = [list(run) for _, run in groupby(order, key=lambda index: _owner(named[index][0]))]
        groups = _balanced(runs, [sum(_nbytes(named, run)) for run in runs], _num_stages(named, runs, stages))
    else:
        groups = _by_module(module, named, order, list(stages))
    return StagePlan(tuple(_stage(named, group) for group in groups))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _nbytes(named: Sequence[tuple[str, nn.Parameter]], indices: Sequence[int]) -> list[int]:
    return [named[index][1].numel() * named[index][1].element_size() for index in indices]


def _num_stages(named: Sequence[tuple[str, nn.Parameter]], runs: list[list[int]], stages: int | None) -> int:
    if stages is None:
        total = sum(_nbytes(named, range(len(named))))
        return min(len(runs), max(MIN_STAGES, math.ceil(total / STAGE_BYTES)))
    if not 1 <= stages <= len(runs):
        raise ValueError(f"stages={stages}: this model can be divided into 1 to {len(runs)} stages")
    return stages


def _balanced(runs: list[list[int]], nbytes: list[int], num_stages: int) -> list[list[int]]:
    """Exactly ``num_stages`` contiguous groups of ``runs``, of about equal bytes."""
    groups: list[list[int]] = []
    remaining, position = sum(nbytes), 0
    for missing in range(num_stages, 0, -1):
        target, size, group = remaining / missing, 0, list[int]()
        # leave at least one run to each stage that still comes
        while position <= len(runs) - missing and (not group or missing == 1 or size + nbytes[position] / 2 <= target):
            group += runs[position]
            size += nbytes[position]
            position += 1
        remaining -= size
        groups.append(group)
    return groups


def _by_module(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], order: Sequence[int], names: list[str]
) -> list[list[int]]:
    known = {prefix for name, _ in named for prefix in _prefixes(name)}
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
    return sorted(groups.values(), key=lambda group: max(finished[index] for index in group))


def _prefixes(name: str) -> list[str]:
    """``a.b.weight`` lies in the modules ``a.b`` and ``a``."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _stage(named: Sequence[tuple[str, nn.Parameter]], group: list[int]) -> Stage:
    owners = list(dict.fromkeys(_owner(named[index][0]) for index in group))
    labels = [owner or named[group[0]][0] for owner in owners]
    name = labels[0] if len(labels) == 1 else f"{labels[0]}..{labels[-1]}"
    numel = sum(named[index][1].numel() for index in group)
    return Stage(name, tuple(group), numel, sum(_nbytes(named, group)), owners[-1])
