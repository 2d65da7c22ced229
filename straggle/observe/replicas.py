"""Words about the rows of reports: of a rank each or, if a model is sharded over several, of a replica each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from straggle.report import StepReport

_RANK = re.compile(r"\b([Rr])ank(?:(s)\b|\b(?: (\d+)\b('s)?)?)")


@dataclass
class Replicas:
    """Whom each replica of a run waited for; ``made_late``: in the steps in which it was late, by replica and rank.

    Both are empty if each rank has a copy of the model by itself.
    """

    slowest: list[Counter[int]] = field(default_factory=list)
    made_late: list[Counter[int]] = field(default_factory=list)

    @staticmethod
    def of(reports: Iterable[StepReport]) -> Replicas:
        """Of these steps."""
        replicas = Replicas()
        for report in reports:
            replicas.add(report)
        return replicas

    def add(self, report: StepReport) -> None:
        """One more step."""
        for number, rank in enumerate(report.slowest_ranks):
            if number == len(self.slowest):
                self.slowest.append(Counter())
                self.made_late.append(Counter())
            if rank >= 0:
                self.slowest[number][rank] += 1
                if report.ranks[number].late:
                    self.made_late[number][rank] += 1

    @property
    def row(self) -> str:
        """What a row is of."""
        return "replica" if self.slowest else "rank"

    def words(self, text: str, *, names_ranks: bool = True) -> str:
        """``text``, written for ranks, with the replicas that its numbers are of.

        ``names_ranks``: behind the first mention of a replica is the rank that made it late, or that it waited for.
        """
        if not self.slowest:
            return text
        named = set[int]() if names_ranks else set(range(len(self.slowest)))

        def replaced(found: re.Match[str]) -> str:
            noun = f"{found[1]}eplica{found[2] or ''}"
            if found[3] is None:
                return noun
            number, owns = int(found[3]), found[4] or ""
            why = "" if owns or number in named else self._why(number)
            named.add(number)
            return f"{noun} {number}{owns}{why}"

        return _RANK.sub(replaced, text)

    def _why(self, number: int) -> str:
        if number >= len(self.slowest) or not self.slowest[number]:
            return ""
        late = self.made_late[number]
        ((rank, _),) = (late or self.slowest[number]).most_common(1)
        return f" (rank {rank} {'made it late' if late else 'was its slowest'})"

    def made_late_words(self, number: int) -> str:
        """Which of a replica's ranks made it late, and how often."""
        return ", ".join(f"rank {rank} {often:,}" for rank, often in self.made_late[number].most_common())
