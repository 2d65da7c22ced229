"""The micro-batches of a sharded replica: its first rank draws them, and all of its ranks compute each one together.

What comes next goes with the votes that the ranks have at each unit (`UnitVote`): in a backward pass the first rank
says in them what the next micro-batch is, as soon as it knows it. Then that is promised, and not put back any more. The
answer to a pass's last vote is there when the pass is over, so this costs no message. Before the first micro-batch, and
if the first rank did not know by then, they ask each other, and wait. Whether one of them is to stop is agreed in the
same way: no rank begins a micro-batch that another one does not begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import final

from straggle.loop.open_step import OpenStep
from straggle.merge.late.replica import Vote
from straggle.pools.drawn import Drawn, PoolWeights
from straggle.pools.turns import NONE_LEFT, NOTHING_SAID, Turns

_MARKS = 2**40  # exact in a float
_WHAT = "the next micro-batch"


@final
class Together:
    """What one rank of a replica computes of the pool in its step; on its training thread.

    ``turns``: of the first rank of the replica, if it draws. ``ranks``: of the replica. ``is_stopped()``: whether this
    rank is to begin no other. ``seed``: of the step; ``None``: what is lost is lost, and a late rank leaves its pass.
    """

    def __init__(
        self,
        opened: OpenStep,
        vote: Vote,
        of_pool: PoolWeights,
        *,
        turns: Turns | None,
        ranks: Sequence[int],
        seed: int | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._opened, self._vote, self._of_pool = opened, vote, of_pool
        self._turns, self._ranks, self._seed, self._is_stopped = turns, ranks, seed, is_stopped
        self._parts: list[int] = []
        self.later: Sequence[int] = ()  # as far as this rank knows, what the replica has drawn after `number`
        if turns is None:
            opened.use(lambda _: Drawn((), of_pool, is_open=True))
        else:
            vote.say_ahead(turns.promise)

    @property
    def number(self) -> int:
        """That of the micro-batch that is begun."""
        return self._parts[-1]

    def next(self) -> bool:
        """Begin the next one, as all ranks of the replica do; false: none of them does.

        Raises ``ValueError``, on all of them, if they were not given the same pool.
        """
        # the same answer on all ranks of the replica: all of them ask below, or none does
        late, word = self._vote.heard()
        if word == NOTHING_SAID or (late and self._seed is not None):
            word = self._ask()
        elif self._turns is not None:
            self._turns.next()
        self.later = [number for number in self.later if word == NONE_LEFT or number != word // 2 - 1]
        if self._turns is not None:
            self.later = self._turns.later
        if word <= NONE_LEFT:
            self._has(is_open=False)
            return False
        self._parts.append(word // 2 - 1)
        self._has(is_open=not word % 2)
        return True

    def close(self) -> None:
        """Say nothing ahead any more."""
        self._vote.say_nothing_ahead()

    def _has(self, *, is_open: bool) -> None:
        if self._turns is None:
            parts = tuple(self._parts)
            self._opened.use(lambda _: Drawn(parts, self._of_pool, is_open=is_open, num_begun=len(parts)))

    def _ask(self) -> int:
        """What comes next, if the last vote did not tell."""
        turns, word, num_later = self._turns, NOTHING_SAID, 0
        if turns is not None:
            word = turns.word if turns.next() else NONE_LEFT
            num_later = _num_in_a_row(turns) if word > NONE_LEFT else 0
        weights, seed = self._of_pool.weights, self._seed
        mark = hash((weights, self._of_pool.costs, -1 if seed is None else seed)) % _MARKS
        # after the draw, which may take long
        stops = self._is_stopped() and (self._seed is not None or not self._parts)
        said = self._vote.ask((stops, self._opened.idle, len(weights), mark, word, num_later), _WHAT)
        self._check(said)
        *_, word, num_later = map(int, said[0])
        if any(of_rank[0] for of_rank in said):
            if turns is not None and word > NONE_LEFT:
                turns.leave()
            return NONE_LEFT
        self.later = range(word // 2, word // 2 + num_later)
        return word

    def _check(self, said: Sequence[Sequence[float]]) -> None:
        if len({(idle, num_parts, mark) for _, idle, num_parts, mark, *_ in said}) == 1:
            return
        of_ranks = ", ".join(
            f"rank {rank} has {int(num_parts)} micro-batches{' and no data for the step' if idle else ''}"
            for rank, (_, idle, num_parts, *_) in zip(self._ranks, said, strict=True)
        )
        raise ValueError(
            f"step.pull(parts): ranks {[*self._ranks]} shard one copy of the model, compute each micro-batch together, "
            f"and were not given the same pool, with the same weights, costs and seed: {of_ranks}. Give each of them "
            "its own part of every micro-batch, parts of equal size: as many parts, with equal weights"
        )


def _num_in_a_row(turns: Turns) -> int:
    """How many of the micro-batches that it has drawn come one after another behind the one that is begun."""
    in_a_row = (later == turns.number + 1 + place for place, later in enumerate(turns.later))
    return sum(1 for _ in takewhile(bool, in_a_row))
