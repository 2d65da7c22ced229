"""Which micro-batch of the pool comes next, for a rank that draws by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from straggle.loop.open_step import OpenStep
from straggle.merge.round.step_passes import Passes
from straggle.pools.drawn import Drawn, PoolWeights
from straggle.pools.draws import Draws

NOTHING_SAID, NONE_LEFT = 0, 1


@final
class Turns:
    """The micro-batches of one rank in its step, one after another; on its training thread.

    ``most_ahead``: none beyond so many is asked for ahead, by what they cost. ``gone()``: ranks of the pool that have
    left; ``goes_on()``: whether this one is to begin another. ``put_back_after_s``: in one of usual cost, until the
    rest is put back.
    """

    def __init__(
        self,
        opened: OpenStep,
        draws: Draws,
        of_pool: PoolWeights,
        *,
        most_ahead: float,
        gone: Callable[[], frozenset[int]],
        goes_on: Callable[[], bool],
        put_back_after_s: float,
    ) -> None:
        self._opened, self._draws, self._of_pool = opened, draws, of_pool
        self._most_ahead, self._gone, self._goes_on = most_ahead, gone, goes_on
        self._put_back_after_s = put_back_after_s
        self._taken = 0  # that the loop has got
        self._begun = 0  # the same and, if it is promised, the next one: these are not put back
        self._drawn = Drawn((), of_pool)

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the store."""
        return self._draws.waited_s

    @property
    def number(self) -> int:
        """That of the micro-batch that is begun."""
        return self._drawn.parts[self._begun - 1]

    @property
    def later(self) -> Sequence[int]:
        """Those that the rank has drawn after it, in order."""
        return self._drawn.parts[self._begun :]

    def ask_ahead(self, less: float = 0.0) -> None:
        """Request the one after the next, if the rank does not have it; called whenever a pass is nearly over."""
        numbers = self._draws.numbers
        if len(numbers) - self._taken <= 1 and self._of_pool.cost(numbers) + 1 <= self._most_ahead - less:
            self._draws.ask()

    def next(self) -> bool:
        """Begin the next one; false: none is left, or the rank is not to go on."""
        draws = self._draws
        while self._begun == self._taken and self._goes_on():
            # before more is asked for: the store's thread takes both in this order, and then tries their shares, too
            draws.left(self._gone())
            if self._begun + 1 >= len(draws.numbers):
                draws.wait()
            if self._begun + 1 == len(draws.numbers) and not draws.exhausted:  # the first answer
                draws.wait()
            # if it is open, its rest was put back: there may be more
            if not self._begin() and not self._drawn.is_open:
                break
        more = self._begun > self._taken
        self._taken = self._begun
        return more

    def _begin(self) -> bool:
        """Count the next one among those that are begun, if there is one."""
        self._drawn = self._opened.use(self._has)
        before, self._begun = self._begun, max(self._begun, self._drawn.num_begun)
        return self._begun > before

    def _has(self, _: Passes) -> Drawn:  # called with the lock held, so that nothing of it is put back meanwhile
        draws, following = self._draws, self._draws.numbers[self._begun : self._begun + 1]
        longer = max(1.0, self._of_pool.cost(following))
        return Drawn(
            draws.numbers,
            self._of_pool,
            is_open=not draws.exhausted,
            num_begun=min(self._begun + 1, len(draws.numbers)),
            draws=draws,
            stuck_at=self._opened.stopwatch.now() + longer * self._put_back_after_s,
        )

    # -- for other ranks of the replica, which compute the same

    def promise(self) -> int:
        """What comes next, in a word, if it is known without waiting: from here on it is as good as begun."""
        if self._begun == self._taken:
            # early in the pass, so that the answer is there at its last vote: only what is this replica's part by its
            # speed, as a slow one would draw what a fast one could begin sooner
            self.ask_ahead(less=1.0)
            self._draws.look()
            left = len(self._draws.numbers) - self._begun
            if left > 1 or (left == 1 and self._draws.exhausted):
                self._begin()
            elif left == 0 and self._draws.exhausted:
                return NONE_LEFT
        return NOTHING_SAID if self._begun == self._taken else self.word

    @property
    def word(self) -> int:
        """The number of the micro-batch that is begun, and whether it is the last one, as one number."""
        drawn = self._drawn
        return 2 + 2 * self.number + (not drawn.is_open and self._begun == drawn.number)

    def leave(self) -> None:
        """Compute no more, though the last one that is begun was not: put it back with the rest, if that can be."""
        self._taken = self._begun = max(0, self._begun - 1)
        # after the count, from which `_without_rest` puts back
        self._drawn = self._opened.use(self._without_rest)

    def _without_rest(self, _: Passes) -> Drawn:  # with the lock held
        draws = self._draws
        if draws.may_put_back:
            draws.put_back(self._begun)
        return Drawn(draws.numbers, self._of_pool, num_begun=self._begun)
