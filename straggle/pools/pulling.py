"""`Pulling`: what a rank draws from the pools of its steps, and its sure share of the next pool.

The first pool is dealt out equally: in the first step no rank can be late, and the store need not be connected yet.
Without the store nothing can be drawn: if a rank had none in the step before, the pool is dealt out equally, too.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from straggle.loop.open_step import OpenStep
from straggle.merge.late.replica import Vote
from straggle.merge.late.sides import Entry
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.rows.table import Table
from straggle.merge.wing import Wing
from straggle.pools.drawn import Drawn, PoolWeights
from straggle.pools.draws import Draws, StoreCounters
from straggle.pools.pool import (
    NEVER,
    WINDOW,
    Did,
    Pool,
    PoolTimes,
    even_parts,
    is_made_again,
    static_shares,
    sure_shares,
)
from straggle.pools.rows import ATTEMPTS, COMPUTED, COSTS, PARTS, WEIGHT
from straggle.pools.together import Together
from straggle.pools.turns import Turns
from straggle.replay.wing import AsRecorded
from straggle.report import CAUSES

# A micro-batch beyond a rank's even part by so much is not asked for ahead: a slow rank that draws early what it can
# only begin late is whom all others wait for. The answer that nothing is left, one beyond the even part, is.
AHEAD = 1.25
_LEFT = [CAUSES.index(cause) for cause in ("skipped", "error")]  # by the loop's own will


@final
class Pulling(Wing):
    """The draws of one model, on its training thread. The first step with a pool reports that work is dealt by speed.

    ``waited_s``: seconds that this rank has waited for the store until now, and ``num_requests`` how often it asked.
    """

    def __init__(self, rank: RankParts) -> None:
        self._rank, self._channel, self._replica = rank, rank.channel, rank.replica
        self._counters = StoreCounters(rank.channel.rank)
        self._done: deque[tuple[Did | None, ...]] = deque(maxlen=WINDOW)
        self._step_s: deque[float] = deque(maxlen=WINDOW)  # seconds of the last steps, as long as all have pools
        self._present = (True,) * rank.replica.count
        self._times = NEVER
        self._without_store: tuple[bool, ...] | None = None  # who took part in the last merge, if a rank had no store
        self._has_seed = False  # the step that the training thread is in
        self._draws = False  # whether the next pool is drawn: one was merged, and all ranks had the store then
        self.waited_s = 0.0

    def attach(self, opened: OpenStep) -> None:
        """Connect the training thread's open step."""
        self._opened = opened
        opened.make_again_if(self._is_made_again)

    @property
    def num_requests(self) -> int:
        """Requests sent to the store until now."""
        return self._counters.num_requests

    @property
    def num_put_back(self) -> int:
        """Micro-batches that were put back until now, because this rank was stuck before it could begin them."""
        return self._counters.num_put_back

    def numbers(
        self, weights: tuple[float, ...], costs: tuple[float, ...], seed: int | None
    ) -> Generator[tuple[int, Sequence[int]]]:
        """The numbers of this rank's micro-batches, of a pool with these weights; called inside of its step.

        ``costs``: relative to their mean; empty: all take as long as each other. With each come the numbers that the
        rank has drawn after it, in order. With a ``seed`` torch's random numbers are those of each micro-batch, and the
        step is merged here: more come if it is to be made again.
        """
        if seed is None:
            yield from self._numbers(PoolWeights(weights, self._replica.count, costs=costs), None)
            return
        self._opened.stay()
        self._has_seed = True
        for attempt in itertools.count(1):
            for number, ahead in self._numbers(PoolWeights(weights, self._replica.count, attempt, costs), seed):
                with random_numbers_of(seed, number, self._replica.own_data):
                    yield number, ahead
            if not self._opened.merge_inside():
                break

    def _numbers(self, of_pool: PoolWeights, seed: int | None) -> Iterator[tuple[int, Sequence[int]]]:
        opened, vote = self._opened, self._replica.vote
        replayed = opened.rule.decision if isinstance(opened.rule, AsRecorded) else None
        # beyond the end of the recording it is drawn
        draws = replayed is None or (replayed.parts is None and replayed.num_gradients == sys.maxsize)
        if draws and vote is not None:
            yield from self._drawn_together(of_pool, vote, seed)
        elif opened.idle or self._is_stopped():
            opened.use(lambda _: Drawn((), of_pool))
            yield from self._without_data()
        elif replayed is not None and (own := replayed.parts) is not None:
            opened.use(lambda _: Drawn(own, of_pool, num_submitted=replayed.num_parts))
            yield from ((number, own[place + 1 :]) for place, number in enumerate(own))
        elif draws:
            yield from self._drawn(of_pool)

    def _without_data(self) -> Iterator[tuple[int, Sequence[int]]]:
        """One without a gradient: its forward pass ends the block."""
        return ((number, ()) for number in range(self._opened.idle))

    def _drawn(self, of_pool: PoolWeights) -> Iterator[tuple[int, Sequence[int]]]:
        """Draw; the next is requested in a backward pass, so the answer is there before the rank begins its last."""
        turns = self._turns(of_pool)
        while turns.next():
            yield turns.number, turns.later
        self.waited_s += turns.waited_s

    def _drawn_together(
        self, of_pool: PoolWeights, vote: Vote, seed: int | None
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """The first rank of the replica draws, and the others compute the same."""
        opened, step, training = self._opened, self._opened.step, self._rank.training
        turns = None
        if self._replica.is_first and not (opened.idle or self._is_stopped()):
            turns = self._turns(of_pool)
        together = Together(
            opened,
            vote,
            of_pool,
            turns=turns,
            ranks=self._replica.ranks,
            seed=seed,
            is_stopped=lambda: self._is_stopped() or training.stops.asked_step >= training.step,
        )
        try:
            while opened.step is step and not opened.stopped and together.next():
                yield together.number, together.later
        finally:
            together.close()
        self.waited_s += 0.0 if turns is None else turns.waited_s
        yield from self._without_data()

    def _turns(self, of_pool: PoolWeights) -> Turns:
        opened, step = self._opened, self._opened.step
        pool, channel, lock = self._pool(of_pool), self._channel, self._rank.merging.lock
        draws = Draws(pool, channel.rank, self._rank.training.step, channel.store, self._counters, lock)
        sharing = frozenset(rank for rank, share in enumerate(pool.shares) if share)
        turns = Turns(
            opened,
            draws,
            of_pool,
            most_ahead=self._even(pool.num_parts)[self._replica.place] + AHEAD,
            gone=lambda: sharing.difference(channel.awaited),
            goes_on=lambda: opened.step is step and not (opened.stopped or (opened.stays and self._is_stopped())),
            put_back_after_s=self._times.put_back_after_s,
        )
        opened.call_on_backward(turns.ask_ahead)
        return turns

    def _is_stopped(self) -> bool:
        training = self._rank.training
        return training.stops.has(training.step)

    def _pool(self, of_pool: PoolWeights) -> Pool:
        num_parts, drawn = len(of_pool.weights), True
        if of_pool.attempt > 1 and self._without_store is not None:
            shares, drawn = static_shares(num_parts, self._without_store), False
        elif of_pool.attempt > 1 and self._replica.count > 1:  # it is not known who has no part in it
            shares = (0,) * self._replica.count
        elif self._draws:
            shares = sure_shares(num_parts, tuple(self._done), self._present)
        else:
            shares, drawn = static_shares(num_parts, self._present), False
        if not of_pool.costs:
            return Pool(num_parts, shares, drawn)
        return Pool.by_cost(of_pool.costs, shares, self._even(num_parts), drawn=drawn)

    def _even(self, num_parts: int) -> list[float]:
        return even_parts(num_parts, tuple(self._done), self._present)

    # -- after each step

    def rows_read(self, current: Round) -> None:
        """In a step that has a pool, set each rank's weight to its share."""
        if any(current.table.told(PARTS)):
            share_out(current.table)
            self._rank.deadline.work_is_dealt()

    def entry(self, entry: Entry) -> Entry:
        """The training thread is about to enter a step, of which it is not known whether it has a pool."""
        self._has_seed = False
        return entry

    def _is_made_again(self, current: Round) -> bool:
        """Whether all ranks make a merged step again; the ranks of a replica agree on it, as each sees its own merge.

        What one of these merges lacks, another may have, if a rank was stood in for. All replicas have the same merges.
        """
        own = _is_made_again(current)
        # nothing could be drawn then, in any number of attempts
        lacks_store = bool(current.table.ranks_without_store())
        self._without_store = self._present_in(current.table) if lacks_store else None
        # all ranks of the replica have a seed, or none has: `Together` has compared them, so all ask or none does
        if self._replica.vote is None or not self._has_seed:
            return own
        return any(any(said) for said in self._replica.vote.ask((own,), "whether the step is made again"))

    def left(self, current: Round) -> None:
        """Learn from a merged step. Raises ``ValueError``, on all ranks, if their pools differ."""
        record, table = current.record, current.table
        if table.total_weight is None:
            if self._times is not NEVER or self._step_s:  # the times hold no longer: every rank is waited for
                self._step_s.clear()
                self._expect(NEVER)
            return
        sizes = [int(number) for number in table.told(PARTS)]
        if len(pools := {number for number in sizes if number}) > 1:
            raise ValueError(
                f"step {record.step}: step.pull() was given {sizes} micro-batches by ranks 0, 1, ...: all "
                "ranks draw from one pool, so give every rank all micro-batches of the step"
            )
        costs = [int(mark) for mark, size in zip(table.told(COSTS), sizes, strict=True) if size]
        if len(set(costs)) > 1:
            raise ValueError(
                f"step {record.step}: step.pull() was given other costs by some ranks than by others: they decide who "
                "has which micro-batches, so give every rank the same costs"
            )
        self._learn(table, pools.pop())
        self._step_s.append(record.seconds)
        if self._opened.rule.by_clock:
            self._expect(self._usual())

    def _usual(self) -> PoolTimes:
        own = [step[self._replica.place] for step in self._done]
        return PoolTimes.usual(self._step_s, [did.part_s for did in own if did is not None and did.share])

    def _expect(self, times: PoolTimes) -> None:
        if times != self._times:
            self._times = times
            with self._rank.merging.lock:  # because the stand-in reads it
                self._rank.training.wait_unentered(times.step_s)

    def _present_in(self, table: Table) -> tuple[bool, ...]:
        away = table.absent_ranks() | table.stood_in_ranks()
        return tuple(rank not in away for rank in range(self._replica.count))

    def _learn(self, table: Table, num_parts: int) -> None:
        present = self._present_in(table)
        self._present = present if any(present) else self._present
        done = zip(table.told(COMPUTED), table.compute_s(), present, strict=True)
        self._done.append(tuple(_did(own, own_s, num_parts) if here else None for own, own_s, here in done))
        self._draws = self._replica.count > 1 and not table.ranks_without_store()

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: each rank's share and seconds in each of the last steps; -1 if unknown."""
        if not self._done:
            return {}
        done = [[(-1.0, 0.0) if own is None else (own.share, own.part_s) for own in step] for step in self._done]
        return {
            "done": torch.tensor(done, dtype=torch.float64),
            "present": torch.tensor(self._present),
            "draws": torch.tensor(self._draws),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with the shares that the saved run was about to have; does nothing if it had no pool."""
        if tensors:
            done = [[None if share < 0 else (share, s) for share, s in step] for step in tensors["done"].tolist()]
            present, draws = tensors["present"].tolist(), tensors["draws"].item()
            self.load_state_dict({"done": done, "present": present, "draws": draws})

    def state_dict(self) -> dict[str, Any]:
        """The state for a rank that comes back, equal on all ranks."""
        done = [[None if own is None else [own.share, own.part_s] for own in step] for step in self._done]
        return {"done": done, "present": list(self._present), "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the others do."""
        done = (tuple(None if own is None else Did(*own) for own in step) for step in state["done"])
        self._done = deque(done, maxlen=WINDOW)
        self._present, self._draws = tuple(state["present"]), bool(state["draws"])
        self._expect(self._usual())


def _is_made_again(current: Round) -> bool:
    """Whether a merged step lacks micro-batches that are to be computed again; the same on all ranks."""
    table = current.table
    if table.is_usual or not (attempt := int(max(table.told(ATTEMPTS)))):
        return False
    computed, weights = table.rows[:, table.of_stages.computed], torch.tensor(table.column("weight"))
    left = [cause in _LEFT for cause in table.column("cause")]
    given = (weights[:, None] * computed).sum(0).tolist()
    return not any(left) and is_made_again(attempt, max(table.told(WEIGHT)), given)


def share_out(table: Table) -> None:
    """In a step with a pool, give a rank that did not enter it weight 0: its row has the weight of another step."""
    weights = zip(table.told(PARTS), table.column("weight"), strict=True)
    table.share_weight([weight if parts else 0.0 for parts, weight in weights], max(table.told(WEIGHT)))


def _did(cost_done: float, compute_s: float, num_parts: int) -> Did:
    return Did(cost_done / num_parts, compute_s / cost_done if cost_done else math.nan)


@contextmanager
def random_numbers_of(seed: int, number: int, part: int = 0) -> Iterator[None]:
    """In this context torch's generators begin from a step's ``seed`` and a micro-batch's ``number``; then as before.

    ``part``: of that micro-batch's samples, if the ranks of a replica have some each. The generators are those of the
    CPU and, if CUDA is in use, of its present device.
    """
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []):
        own = _mixed(seed, number, part)
        torch.default_generator.manual_seed(own)
        if on_cuda:
            torch.cuda.manual_seed(own)
        yield


def _mixed(seed: int, number: int, part: int) -> int:
    """A seed of 63 bits: neighbouring ones would have generators that begin alike."""
    words = hashlib.sha256(f"{seed} {number} {part}".encode()).digest()
    return int.from_bytes(words[:8], "big") >> 1
