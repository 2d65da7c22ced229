"""When a closed round is merged: as soon as all of its messages are. A wing may have another way."""

from __future__ import annotations

from collections.abc import Callable

from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.wire.groups import ProcessGroups


class Completion:
    """Called by whichever thread has closed a round; without the lock, if nothing else is said.

    ``epoch``: that of the channel's groups.
    """

    def __init__(self, rank: RankParts) -> None:
        self._rank = rank

    def wait(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int | None:
        """Wait for all of a closed round; the epoch that it was merged in, or ``None`` if the rank has given it up.

        ``on_merged(round)`` is called after each message. Raises `PeerFailed` as `Channel.wait` does.
        """
        rank = self._rank
        where, epoch = rank.where(current.step), rank.channel.epoch
        for work, name in current.works:
            rank.channel.wait(work, current.step, f"{where}, stage {name}", give_up_s, epoch)
            if on_merged is not None:
                on_merged(current)
        return epoch

    def is_current(self, epoch: int) -> bool:
        """Whether what was merged in this epoch may be published; with the lock held."""
        return epoch == self._rank.channel.epoch

    def groups_for(self, current: Round, epoch: int) -> ProcessGroups | None:  # noqa: ARG002
        """Among whom more may be sent of a merged round before it is published; ``None``: nothing. With the lock."""
        return self._rank.rounds.groups
