"""Whose link was slow in a run, from which step to which, and which merges took long: from what its steps report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from straggle.links.network_event import long_after_s
from straggle.policies.network.rank_links import RankLink
from straggle.policies.network.slow_links import SlowLink, SlowLinks


@dataclass(frozen=True)
class LinkSpell:
    """A link that was slow up to ``until_step``; ``None``: it was so at the end."""

    slow: SlowLink
    until_step: int | None

    def words(self, row: str = "rank") -> str:
        """Whose, when, and how slow; ``row``: what has a link."""
        until = "on" if self.until_step is None else f"to step {self.until_step}"
        whose, _, how = self.slow.words(row).partition(": ")
        return f"{whose[:1].upper()}{whose[1:]} was slow from step {self.slow.since_step} {until}: {how}"


@dataclass(frozen=True)
class LongMerges:
    """Merges that took many times as long on the network as usual: how many, and the longest."""

    number: int
    usual_s: float
    longest_s: float
    longest_step: int


def link_spells(steps: Iterable[tuple[int, Sequence[RankLink], float]], *, num_bytes: float) -> tuple[LinkSpell, ...]:
    """The spells of a run, of each of whose steps there is the number, the ranks' links and the seconds."""
    follows, running = SlowLinks(), dict[int, SlowLink]()
    over = list[LinkSpell]()
    for step, links, seconds in steps:
        follows.add(step, links, num_bytes=num_bytes, step_s=seconds)
        now = {slow.rank: slow for slow in follows.now}
        over += [LinkSpell(slow, step - 1) for rank, slow in running.items() if rank not in now]
        running = now
    spells = [*over, *(LinkSpell(slow, None) for slow in running.values())]
    return tuple(sorted(spells, key=lambda spell: spell.slow.since_step))


def long_merges(step: NDArray[np.float64], network_s: NDArray[np.float64]) -> LongMerges | None:
    """Those of a run, if there were any."""
    known = np.isfinite(network_s)
    usual_s = network_s[known].tolist()
    long = known & (network_s >= long_after_s(usual_s))
    if not long.any():
        return None
    at = int(np.nanargmax(network_s))
    return LongMerges(int(long.sum()), median(usual_s), float(network_s[at]), int(step[at]))
