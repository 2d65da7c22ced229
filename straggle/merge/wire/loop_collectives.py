"""How many collectives a loop has begun by itself in the open step, as its process groups number them.

A number is read when a step is entered and when it is left: nothing is done for a collective. Groups of straggle's own
do not count, nor those inside of a replica, which stops as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from straggle import world
from straggle.merge.wire.groups import OWN_GROUP, ranks_of_job


class LoopCollectives:
    """Of one rank; ``replica``: the job's ranks that have a copy of the model together with it, if it is not alone.

    Those with a time limit by themselves, as ``monitored_barrier``, and messages between two ranks have no numbers.
    """

    def __init__(self, replica: Collection[int] = ()) -> None:
        self._replica = frozenset(replica)
        self._groups: list[tuple[str, Callable[[], int]]] = []  # the name of each, and what tells its number
        self._num_known = 0  # groups that torch had when they were looked at
        self._before: list[int] = []

    def begin(self) -> None:
        """A step begins."""
        if len(world.dist.distributed_c10d._world.pg_map) != self._num_known:
            self._look()
        self._before = [number() for _, number in self._groups]

    @property
    def number(self) -> int:
        """How many were begun since."""
        return sum([number() for _, number in self._groups]) - sum(self._before)

    @property
    def begun(self) -> dict[str, range]:
        """Their numbers, by the name of their group."""
        pairs = zip(self._groups, self._before, strict=True)
        return {name: range(before + 1, now + 1) for (name, number), before in pairs if (now := number()) > before}

    def forget(self) -> None:
        """Hold no group any longer: the model is closed."""
        self._groups, self._before, self._num_known = [], [], 0

    def _look(self) -> None:
        known = world.dist.distributed_c10d._world.pg_map
        self._num_known = len(known)
        self._groups = [
            (group.group_name, number) for group in tuple(known) if self._counts(group) for number in _numbers(group)
        ]

    def _counts(self, group: Any) -> bool:
        if group.group_desc == OWN_GROUP:
            return False
        ranks = world.dist.get_process_group_ranks(group)
        return len(ranks) > 1 and not self._replica.issuperset(ranks_of_job(ranks))


def _numbers(group: Any) -> list[Callable[[], int]]:
    """For each backend of a group what tells how many collectives were begun in it; nothing if it does not count."""
    found: dict[int, Callable[[], int]] = {}
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
            backend._get_sequence_number_for_group()
        except RuntimeError:  # none for this device, or one that has no numbers
            continue
        found[id(backend)] = backend._get_sequence_number_for_group  # which keeps the backend, and so its id
    return list(found.values())
