"""The groups of a replay: each bucket is summed among those ranks that summed it then, and the others are given it.

gloo's order of summation follows from how many ranks there are and from each one's place among them. So the same ranks
in the same order give the same bits. Who was absent then takes part in no sum, and has the merged step all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from straggle.merge.groups import Group, JobGroup
from straggle.merge.replay import RecordedMembers, RecordedStep


@dataclass(frozen=True)
class StepGroups:
    """Those of one step: for each bucket and for the telemetry. ``lost``: buckets that this rank gives zeros to.

    ``told``: the ranks whose telemetry there is. ``changed``: other ranks gave to some bucket.
    """

    buckets: tuple[Group, ...]
    telemetry: Group
    lost: frozenset[int]
    told: tuple[int, ...]
    changed: bool


class RecordedGroups:
    """The groups of all steps of a recording; made on all ranks together."""

    def __init__(self, members: RecordedMembers, *, rank: int, world_size: int) -> None:
        self._rank, self._all = rank, tuple(range(world_size))
        self._steps = members.steps
        found = {ranks for step in self._steps for ranks in (*step.buckets, step.telemetry)} | {self._all}
        # the same order on all ranks: each of them has to come to the making of each
        self._groups = {ranks: JobGroup(dist.new_group(list(ranks), backend="gloo")) for ranks in sorted(found)}

    def of_step(self, step: int, num_buckets: int) -> StepGroups:
        """Those of ``step``; of one that was not recorded, among all ranks."""
        recorded = RecordedStep((self._all,) * num_buckets, self._all)
        if step < len(self._steps):
            recorded = self._steps[step]
        lost = frozenset(recorded.lost.get(self._rank, ()))
        return StepGroups(
            tuple(self._among(ranks, zeros=bucket in lost) for bucket, ranks in enumerate(recorded.buckets)),
            self._among(recorded.telemetry),
            lost,
            recorded.telemetry,
            changed=any(ranks != recorded.telemetry for ranks in recorded.buckets),
        )

    def tells_apart(self, step: int) -> bool:
        """Whether the telemetry of ``step`` went apart from its last bucket."""
        return step < len(self._steps) and self._steps[step].apart

    def _among(self, ranks: tuple[int, ...], *, zeros: bool = False) -> Group:
        own = self._groups[ranks] if self._rank in ranks else None
        others = None if ranks == self._all else self._groups[self._all]
        return cast("Group", _Among(own, others, ranks[0], zeros=zeros))


class _Among:
    """A sum over the ranks of ``own``, of which the lowest gives it to all of ``others``.

    ``own`` is ``None`` on a rank that is none of them, and ``others`` where there are no others.
    """

    def __init__(self, own: Group | None, others: Group | None, lowest: int, *, zeros: bool) -> None:
        self._own, self._others, self._lowest, self._zeros = own, others, lowest, zeros

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        if self._zeros:
            tensor.zero_()
        first = None if self._own is None else self._own.all_reduce(tensor)
        if self._others is None:
            assert first is not None
            return first
        return cast("dist.Work", _InTurn(first, partial(self._others.broadcast, tensor, self._lowest)))


class _InTurn:
    """One collective, and then another; the second begins when somebody waits.

    All ranks wait for their collectives in the same order, and so they begin the second ones in one order too.
    """

    def __init__(self, first: dist.Work | None, begin: Callable[[], dist.Work]) -> None:
        self._running, self._begin = first, begin
        self._is_second = self._failed = False

    def wait(self, *limit: Any) -> bool:
        """As of a collective. Raises ``RuntimeError`` where it failed, or is not over in time."""
        if not self._is_second:
            self._wait(*limit)
            self._running, self._is_second = self._begin(), True
        self._wait(*limit)
        return True

    def _wait(self, *limit: Any) -> None:
        if self._running is None:
            return
        try:
            self._running.wait(*limit)
        except RuntimeError:
            self._failed = self._running.is_completed()
            raise

    def is_completed(self) -> bool:
        """Whether both are over, or one has failed."""
        return self._failed or (self._is_second and self._running is not None and self._running.is_completed())
