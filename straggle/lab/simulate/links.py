"""Links with a latency and a rate for each rank, some of them slow for a time, and the policy that takes ranks out.

When the ring's messages are merged is `straggle.policies.merge_time.merged_at`; who is in the ring is
`straggle.LinkPolicy`; how long the ring waits for a leaf, and what a leaf does not send, are the functions of training.
The policy sees the links as they are when a step begins, without pings that are some seconds old.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from straggle.lab.simulate.communication import Merged, Merging, Network, at_least_0
from straggle.merge.links.patience import FirstSent, Patience
from straggle.policies.deadline import LateHandling
from straggle.policies.leaves import LinkPolicy, Places, SeenLinks
from straggle.policies.merge_time import Message, merged_at
from straggle.policies.rank_links import RankLink, in_ring

_BEHIND = 2  # steps: what a leaf sends comes too late then


@dataclass(frozen=True)
class SlowLink:
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
        """The link ``at_s`` seconds into the run, where the others' are ``usual``."""
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

    ``slow``: for a rank's number what `SlowLink` takes, or ``bytes_per_s`` for both directions. ``pairs``: a rate is
    that of each way between two ranks, as of namespaces on one machine, and not what a rank's link has for all its
    peers. ``members``: the policy puts ranks out (`LinkPolicy`), as with `Elastic`.
    """

    def __init__(
        self,
        nbytes: float,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        slow: Mapping[int, Mapping[str, float]] | None = None,
        pairs: bool = False,
        members: bool = False,
    ) -> None:
        self.nbytes = at_least_0("nbytes", nbytes)
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s}: must be a positive number")
        self.usual = RankLink(at_least_0("latency_s", latency_s), float(bytes_per_s), float(bytes_per_s))
        self.slow = {int(rank): _slow_link(**own) for rank, own in (slow or {}).items()}
        self.pairs, self.members = pairs, members

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

    def merging(
        self, ranks: int, shares: Sequence[float], overhead_s: float = 0.0, policy: LinkPolicy | None = None
    ) -> Merging:
        if unknown := sorted(rank for rank in self.slow if not 0 <= rank < ranks):
            raise ValueError(f"slow={unknown}: there are ranks 0 to {ranks - 1}")
        return _OverLinks(self, ranks, [share * self.nbytes for share in shares], overhead_s, policy)


def _slow_link(bytes_per_s: float | None = None, **given: float) -> SlowLink:
    both = {} if bytes_per_s is None else {"up_bytes_per_s": bytes_per_s, "down_bytes_per_s": bytes_per_s}
    return SlowLink(**(both | given))


class _Leaf:
    """A rank that receives what was merged, ``behind_s`` seconds after its peers, and sends what it can meanwhile."""

    def __init__(self) -> None:
        self.behind_s = 0.0
        self.has_s = deque[float](maxlen=LateHandling().max_lag + 1)  # when it has received the last steps
        self.sends = FirstSent()
        self._free_s = [0.0]  # its ways to its parents

    def begin(self, parents: int) -> None:
        """A step, in which so many parents have a way of their own to it."""
        self._free_s = [self.behind_s] * parents

    def arrives_s(self, number: int, message: Message, link: RankLink) -> float:
        """When a message is with its parent; infinite: it is not sent."""
        if number < self.sends.first:
            return math.inf
        way = number % len(self._free_s)
        begins_s = max(self._free_s[way], self.behind_s + message.ready_s)
        self._free_s[way] = begins_s + message.num_bytes / link.up_bytes_per_s
        return self._free_s[way] + link.latency_s

    def launched(self, number: int, at_s: float) -> None:
        """What is still to be sent of a message is of no use from here on."""
        way = number % len(self._free_s)
        self._free_s[way] = min(self._free_s[way], at_s)

    def received(self, end_s: float, num_bytes: float, last_bytes: float, link: RankLink, parents: int) -> float:
        """When it has received a step whose merge ended at ``end_s``."""
        rate = link.down_bytes_per_s * parents
        return max(self.behind_s + num_bytes / rate, end_s + last_bytes / rate) + link.latency_s


class _OverLinks(Merging):
    """One job: its clock, who is where, and how far its leaves are behind."""

    def __init__(
        self, network: Links, ranks: int, message_bytes: Sequence[float], overhead_s: float, policy: LinkPolicy | None
    ) -> None:
        self._network, self._ranks, self._bytes, self._overhead_s = network, ranks, message_bytes, overhead_s
        self._policy, self._places, self._now_s = policy, Places(), 0.0
        self._step_s = math.inf
        self._leaves: dict[int, _Leaf] = {}
        self._patience = Patience(policy.stretch if policy else 1.0)

    @property
    def outside(self) -> frozenset[int]:
        """Leaves, and ranks that are put out."""
        return self._places.leaves | self._places.out

    def merge(self, ready_s: Sequence[float]) -> Merged:
        links = self._network.links_at(self._ranks, self._now_s)
        messages = [Message(size, ready) for size, ready in zip(self._bytes, ready_s, strict=True)]
        came = torch.ones(self._ranks, len(messages)) if self.outside else None
        if came is not None:
            came[list(self._places.out)] = 0.0
        if self._leaves and came is not None:
            step_s = self._leaves_receive(self._with_leaves(messages, links, came), messages, links)
        else:
            step_s = self._ring_ends(messages)
        step_s += self._overhead_s
        self._now_s += step_s
        self._step_s = step_s
        if self._policy:
            self._move(self._policy, links, ready_s[-1])
        return Merged(step_s, came)

    def _move(self, policy: LinkPolicy, links: Sequence[RankLink], compute_s: float) -> None:
        members = self._network.members
        seen = SeenLinks(links, sum(self._bytes), len(self._bytes), compute_s)
        seen = replace(seen, members=members, min_ranks=self._ranks // 2 + 1 if members else 0)
        self._places = policy.next_places(self._places, seen)
        self._leaves = {rank: self._leaves.get(rank) or _Leaf() for rank in self._places.leaves}

    def _with_leaves(self, messages: Sequence[Message], links: Sequence[RankLink], came: torch.Tensor) -> float:
        """When the last message is merged: one at a time, when its parent has waited for the leaves; sets ``came``."""
        self._patience.begin()
        waited_for = {rank: own for rank, own in self._leaves.items() if own.behind_s <= _BEHIND * self._step_s}
        came[list(self._leaves.keys() - waited_for.keys())] = 0.0
        for leaf in waited_for.values():
            leaf.begin(self._parents)
        end_s = 0.0
        for number, message in enumerate(messages):
            now_s = max(end_s, message.ready_s)
            arrives_s = {rank: own.arrives_s(number, message, links[rank]) for rank, own in waited_for.items()}
            expected_s = max((at_s for at_s in arrives_s.values() if at_s < math.inf), default=0.0)
            launched_s = max(now_s, min(expected_s, self._patience.until(number, now_s)))
            for rank, leaf in waited_for.items():
                came[rank, number] = float(arrives_s[rank] <= launched_s)
                leaf.launched(number, launched_s)
            end_s = self._ring_ends([replace(message, ready_s=launched_s)])
        if self._patience.waits:
            for rank, leaf in waited_for.items():
                leaf.sends.learn([bool(share) for share in came[rank].tolist()])
        self._patience.end(end_s)
        return end_s

    @property
    def _parents(self) -> int:
        """Ranks that have a way of their own to each leaf."""
        return self._ranks - len(self.outside) if self._network.pairs else 1

    def _ring_ends(self, messages: Sequence[Message]) -> float:
        """When the ring has merged the last message, over links that change meanwhile: what was done stays done."""
        inside = [rank for rank in range(self._ranks) if rank not in self.outside]
        if len(inside) > 1 and self._leaves and not self._network.pairs:  # which send to the leaves, too
            more = 1 + len(self._leaves) / (2 * (len(inside) - 1))
            messages = [replace(message, num_bytes=more * message.num_bytes) for message in messages]
        first_s = now_s = messages[0].ready_s
        left = 1.0
        while True:
            links = self._network.links_at(self._ranks, self._now_s + now_s)
            needs_s = merged_at(messages, [in_ring(links[rank]) for rank in inside])[-1] - first_s
            changes_s = self._network.changes_after(self._now_s + now_s) - self._now_s
            if now_s + left * needs_s <= changes_s:
                return max(messages[-1].ready_s, now_s + left * needs_s)
            left -= (changes_s - now_s) / needs_s
            now_s = changes_s

    def _leaves_receive(self, end_s: float, messages: Sequence[Message], links: Sequence[RankLink]) -> float:
        """When the step is over: its peers wait for a leaf that would be more than ``max_lag`` steps behind."""
        num_bytes, last_bytes, step_s = sum(self._bytes), messages[-1].num_bytes, end_s
        received_s = {
            rank: own.received(end_s, num_bytes, last_bytes, links[rank], self._parents)
            for rank, own in self._leaves.items()
        }
        for rank, leaf in self._leaves.items():
            leaf.has_s.append(self._now_s + received_s[rank])
            if len(leaf.has_s) == leaf.has_s.maxlen:
                step_s = max(step_s, leaf.has_s[0] - self._now_s)
        for rank, leaf in self._leaves.items():
            leaf.behind_s = max(0.0, received_s[rank] - step_s)
        return step_s
