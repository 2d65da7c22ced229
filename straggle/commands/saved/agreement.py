"""What goes wrong on one rank, between steps, is raised on all of them: no rank waits for one that has given up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from straggle.lab.process_group import gather
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.groups import job_rank, job_size
from straggle.merge.wire.store import peek

Result = TypeVar("Result")
_LOOK_S = 0.02


class RefusedByAll(ValueError):
    """What all ranks refuse together."""


class Ranks:
    """All ranks of the job, which agree by its process group.

    ``group``: the ranks that read and write a model's shards together. ``are_all``: whether these are all of the job.
    """

    are_all = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @property
    def leads(self) -> bool:
        """Whether this rank does what one of them does for all."""
        return job_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Each rank's ``value``, in their order."""
        return gather(value)


class OneReplica(Ranks):
    """The ranks of ``group``, which have one copy of the model together; ``None``: this rank alone."""

    are_all = False

    @property
    def leads(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.group is None else gather(value, self.group)


class OverStore(Ranks):
    """All ranks of a job in which replicas come and go: they have no process group, and agree by the job's ``store``.

    Once for each rank, when the job begins: one that is started again later does not come. Values are those of JSON.
    """

    def __init__(self, store: Any, group: dist.ProcessGroup, limit_s: float) -> None:
        super().__init__(group)
        self._store, self._limit_s, self._number = store, limit_s, 0

    def gather(self, value: Any) -> list[Any]:
        """Raises `PeerFailed` if a rank has not come within the limit."""
        # the number of the call, which is the same on all ranks, as they make their calls in one order
        until, self._number = time.monotonic() + self._limit_s, self._number + 1
        keys = [f"begin/{self._number}/{rank}" for rank in range(job_size())]
        self._store.set(keys[job_rank()], json.dumps(value))
        while None in (words := [peek(self._store, key) for key in keys]):
            if time.monotonic() > until:
                missing = [rank for rank, word in enumerate(words) if word is None]
                raise PeerFailed(f"ranks {missing} have not come to the begin of the run within {self._limit_s:g} s")
            time.sleep(_LOOK_S)
        return [json.loads(word) for word in words if word is not None]


ALL = Ranks()


def on_all_ranks(work: Callable[[], Result], ranks: Ranks = ALL) -> list[Result]:
    """What ``work`` returns on each rank; collective.

    If it raises ``OSError`` or ``ValueError`` on one rank, this raises `RefusedByAll` on all, with the ranks' reasons.
    """
    done = ranks.gather(_outcome(work))
    if any(problems for _, problems in done):
        raise RefusedByAll(of_ranks([problems for _, problems in done]))
    return [result for result, _ in done]


def of_ranks(sentences: Sequence[Sequence[str]]) -> str:
    """The ranks' sentences, each once, with the ranks that have it if these are not all."""
    by = dict[str, list[int]]()
    for rank, own in enumerate(sentences):
        for sentence in own:
            by.setdefault(sentence, []).append(rank)
    return "; ".join(_who(ranks, len(sentences)) + sentence for sentence, ranks in by.items())


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, list[str]]:
    try:
        return work(), []
    except (OSError, ValueError) as error:
        return None, [str(error)]


def _who(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
