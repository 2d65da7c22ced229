"""What the parts of one rank's coordinator share."""

from __future__ import annotations

from dataclasses import dataclass

from straggle.backward.clocks import Stopwatch
from straggle.merge.channel import Channel
from straggle.merge.current_deadline import CurrentDeadline
from straggle.merge.members.membership import Membership
from straggle.merge.rank_state import MergeSide, TrainingSide
from straggle.merge.round import Round
from straggle.merge.rounds import Rounds
from straggle.merge.stand_in import StandIn


@dataclass(frozen=True)
class RankParts:
    """The two sides of a rank, and what merges for it; ``merging.lock`` guards all of it.

    ``ring``: by their number, the merged rounds that wait for the training thread. ``membership``: ``None`` where ranks
    cannot leave.
    """

    channel: Channel
    training: TrainingSide
    merging: MergeSide
    deadline: CurrentDeadline
    stand_in: StandIn
    rounds: Rounds
    ring: dict[int, Round]
    membership: Membership | None

    @property
    def stopwatch(self) -> Stopwatch:
        """Which measures the phases of the training thread, and tells the time."""
        return self.training.stopwatch

    @property
    def lag(self) -> int:
        """Merged steps that the training thread has not yet taken; from any thread."""
        return max(0, self.merging.step - self.training.step)

    def where(self, step: int) -> str:
        """As errors begin."""
        return f"rank {self.channel.rank}, step {step}"
