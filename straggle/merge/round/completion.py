"""When a closed round is merged, and when ranks then send each other what their modules hold beside gradients.

A round is merged as soon as all of its messages are; a wing may have another way. State is sent after a merge that
found it unlike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.table import Table
from straggle.merge.state.exchange import NOTHING_GIVEN, Exchange, Manifest, different_tensors, transfers
from straggle.merge.wire.channel import GroupsChanged
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
        # the epoch first: if the groups change during the wait, what comes of it is of an older one
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


class OtherState:
    """Called by whichever thread completes a round, without the lock."""

    def __init__(self, rank: RankParts, completion: Completion) -> None:
        self._rank, self._completion = rank, completion

    def send(self, current: Round, epoch: int, give_up_s: float | None) -> None:
        """Exchange what is unlike by the telemetry of a merged round; nothing if it is alike.

        If the groups change meanwhile, what was sent is lost: `sent_in` says so, and the marks of the next step ask for
        it again.
        """
        if current.sent is not None or not self._is_asked(current):
            return
        rank = self._rank
        # only to read who merges: the exchange itself waits for peers, without the lock
        with rank.merging.lock:
            if (groups := self._completion.groups_for(current, epoch)) is None:
                return
        what = f"{rank.where(current.step)}, what the modules hold beside gradients"
        wait = partial(rank.channel.wait, step=current.step, what=what, give_up_s=give_up_s, epoch=epoch)
        try:
            self._exchange(current, Exchange(groups.control, groups.ranks, rank.replica.place, wait))
        except GroupsChanged:
            return

    def _exchange(self, current: Round, exchange: Exchange) -> None:
        training = self._rank.training
        sums: Mapping[str, int] = {}
        if training.is_in(current.step) and training.entry.tensors is not None:
            sums = training.entry.tensors.as_mapping()
        given = NOTHING_GIVEN if current.submitted is None else current.submitted.given
        manifests = exchange.manifests(Manifest.of(given, sums))
        current.exchanged(different_tensors(manifests.values()), exchange.carry_out(transfers(manifests), given))

    def _is_asked(self, current: Round) -> bool:
        table = current.read_rows()
        if table.is_usual:
            return False
        return table.must_exchange(self._rank.rounds.ranks) or bool(table.differ_in_tensors())

    def sent_in(self, current: Round, table: Table) -> Mapping[str, Tensor] | None:
        """What was sent; ``None``: it was not, though it was asked for."""
        if current.sent is None and not table.must_exchange(self._rank.rounds.ranks):
            return {}
        return current.sent
