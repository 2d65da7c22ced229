"""Links with a latency and a rate for each rank, some of them slow for a time.

When the ring's messages are merged is `straggle.policies.merge_time.merged_at`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from straggle.lab.simulate.communication import Merging, Network, at_least_0
from straggle.policies.merge_time import Message, merged_at
from straggle.policies.rank_links import RankLink, in_ring


@dataclass(frozen=True)
class ImpairedLink:
    """A rank's link: ``up`` is what it sends, ``down`` what it receives. Rates that are ``None`` are the others'.

    It is slow for ``slow_s`` seconds, then like the others' for ``good_s``, and so on.
    """

    latency_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    slow_s: float = math.inf
    good_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up_bytes_per_s", "down_bytes_per_s", "slow_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be a positive number")
        at_least_0("latency_s", self.latency_s or 0.0)
        at_least_0("good_s", self.good_s)

    def over(self, usual: RankLink, at_s: float) -> RankLink:
        """The link ``at_s`` seconds into the run, if the others' are ``usual``."""
        if math.isfinite(self.slow_s) and at_s % (self.slow_s + self.good_s) >= self.slow_s:
            return usual
        given = {
            "latency_s": self.latency_s,
            "up_bytes_per_s": self.up_bytes_per_s,
            "down_bytes_per_s": self.down_bytes_per_s,
        }
        return replace(usual, **{name: value for name, value in given.items() if value is not None})

    def changes_after(self, at_s: float) -> float:
        """When it changes next."""
        if not math.isfinite(self.slow_s) or not self.good_s:
            return math.inf
        period_s = self.slow_s + self.good_s
        began_s = at_s // period_s * period_s
        return began_s + (self.slow_s if at_s < began_s + self.slow_s else period_s)


@final
class Links(Network):
    """All ranks' links, of which those in ``slow`` are not like the others.

    ``slow``: for a rank's number what `ImpairedLink` takes, or ``bytes_per_s`` for both directions.
    """

    def __init__(
        self,
        nbytes: float,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        slow: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self.nbytes = at_least_0("nbytes", nbytes)
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s}: must be a positive number")
        self.usual = RankLink(at_least_0("latency_s", latency_s), float(bytes_per_s), float(bytes_per_s))
        self.slow = {int(rank): _slow_link(**own) for rank, own in (slow or {}).items()}

    def links_at(self, ranks: int, at_s: float) -> list[RankLink]:
        """Each rank's link, ``at_s`` seconds into the run."""
        links = [self.usual] * ranks
        for rank, own in self.slow.items():
            links[rank] = own.over(self.usual, at_s)
        return links

    def changes_after(self, at_s: float) -> float:
        """When a link changes next."""
        return min((own.changes_after(at_s) for own in self.slow.values()), default=math.inf)

    def merge_s(self, ranks: int, share: float) -> float:
        ends = merged_at([Message(share * self.nbytes)], [in_ring(link) for link in self.links_at(ranks, 0.0)])
        return ends[-1]

    def merging(self, ranks: int, shares: Sequence[float], overhead_s: float = 0.0) -> Merging:
        if unknown := sorted(rank for rank in self.slow if not 0 <= rank < ranks):
            raise ValueError(f"slow={unknown}: there are ranks 0 to {ranks - 1}")
        return _OverLinks(self, ranks, [share * self.nbytes for share in shares], overhead_s)


def _slow_link(bytes_per_s: float | None = None, **given: float) -> ImpairedLink:
    both = {} if bytes_per_s is None else {"up_bytes_per_s": bytes_per_s, "down_bytes_per_s": bytes_per_s}
    return ImpairedLink(**(both | given))


class _OverLinks(Merging):
    """One job, and its clock."""

    def __init__(self, network: Links, ranks: int, message_bytes: Sequence[float], overhead_s: float) -> None:
        self._network, self._ranks, self._bytes, self._overhead_s = network, ranks, message_bytes, overhead_s
        self._now_s = 0.0

    def merge(self, ready_s: Sequence[float]) -> float:
        messages = [Message(size, ready) for size, ready in zip(self._bytes, ready_s, strict=True)]
        step_s = self._ends(messages) + self._overhead_s
        self._now_s += step_s
        return step_s

    def _ends(self, messages: Sequence[Message]) -> float:
        """When the last message is merged, over links that change meanwhile: what was done stays done."""
        first_s = now_s = messages[0].ready_s
        left = 1.0
        while True:
            links = self._network.links_at(self._ranks, self._now_s + now_s)
            needs_s = merged_at(messages, [in_ring(link) for link in links])[-1] - first_s
            changes_s = self._network.changes_after(self._now_s + now_s) - self._now_s
            if now_s + left * needs_s <= changes_s:
                return max(messages[-1].ready_s, now_s + left * needs_s)
            left -= (changes_s - now_s) / needs_s
            now_s = changes_s
