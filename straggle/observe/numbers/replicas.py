"""Words about the rows of reports: of a rank each or, if a model is sharded over several, of a replica each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from straggle.report import StepReport, in_words


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

    @property
    def rows(self) -> str:
        """What several rows are of."""
        return f"{self.row}s"

    def from_to(self, first: int, last: int) -> str:
        """As in "ranks 4 to 7", or "rank 4"."""
        return f"{self.row} {first}" if first == last else f"{self.rows} {first} to {last}"

    def who(self, number: int) -> str:
        """As in "rank 1"; behind a replica is the rank that made it late, or that it waited for."""
        return f"{self.row} {number}{self._why(number)}"

    def all_of(self, numbers: Sequence[int]) -> str:
        """As in "ranks 1 and 2"; of one, `who` it is."""
        return self.who(numbers[0]) if len(numbers) == 1 else in_words(numbers, self.row)

    def _why(self, number: int) -> str:
        if number >= len(self.slowest) or not self.slowest[number]:
            return ""
        late = self.made_late[number]
        ((rank, _),) = (late or self.slowest[number]).most_common(1)
        return f" (rank {rank} {'made it late' if late else 'was its slowest'})"

    def made_late_words(self, number: int) -> str:
        """Which of a replica's ranks made it late, and how often."""
        return ", ".join(f"rank {rank} {often:,}" for rank, often in self.made_late[number].most_common())
