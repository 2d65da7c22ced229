"""The pool of micro-batches: each is drawn once, whoever asks in whatever order, and whoever dies."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from straggle.pools.pool import (
    MAX_RANKS,
    MOST_ATTEMPTS,
    SETTLED,
    Claim,
    Count,
    Did,
    Drawer,
    Owner,
    Pool,
    PoolTimes,
    Release,
    Request,
    Seize,
    even_parts,
    is_made_again,
    static_shares,
    sure_shares,
)


@pytest.mark.parametrize(
    ("num_parts", "shares", "sizes"),
    [
        (32, (7, 7, 7, 7), [1, 1, 1, 1]),
        (32, (4, 4, 4, 4), [2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]),
        (16, (0, 0), [4, 4, 2, 2, 1, 1, 1, 1]),
        (9, (1, 1), [2, 2, 1, 1, 1]),
        (4, (2, 2), []),
        (1, (0, 0, 0), [1]),
    ],
)
def test_chunks_halve_what_is_left_for_every_rank(num_parts, shares, sizes):
    pool = Pool(num_parts, shares)
    chunks = [pool.chunk(index) for index in range(len(sizes) + 2)]
    assert [len(chunk) for chunk in chunks] == [*sizes, 0, 0]
    own = [number for rank in range(len(shares)) for number in pool.share(rank)]
    assert own + [number for chunk in chunks for number in chunk] == list(range(num_parts))


@pytest.mark.parametrize(
    ("num_parts", "done", "present", "expected"),
    [
        (32, [], [True] * 4, (4, 4, 4, 4)),  # never seen: half
        (32, [[0.25] * 4], [True] * 4, (7, 7, 7, 7)),
        (32, [[9 / 32, 9 / 32, 9 / 32, 5 / 32]], [True] * 4, (8, 8, 8, 4)),
        (32, [[0.25] * 4, [10 / 32, 10 / 32, 10 / 32, 2 / 32]], [True] * 4, (7, 7, 7, 1)),
        (32, [[0.25] * 4] * 7 + [[9 / 32, 9 / 32, 9 / 32, 5 / 32]], [True] * 4, (7, 7, 7, 6)),  # one hiccup
        (32, [[0.5, 0.0, 0.5]], [True] * 3, (14, 0, 14)),
        (30, [[0.5, 0.5, None]], [True, True, False], (14, 14, 0)),
        (30, [[0.5, 0.5, None]], [True, True, True], (12, 12, 4)),  # more than there are: in proportion
        (64, [[0.5, 0.5]], [True, True], (28, 28)),
        (8, [[1.0, 0.0]] + [[0.5, 0.5]] * 8, [True, True], (3, 3)),  # the ninth step before is forgotten
    ],
)
def test_what_is_sure_is_a_little_less_than_what_was_done_at_least(num_parts, done, present, expected):
    seen = [[None if own is None else Did(own, math.nan) for own in step] for step in done]
    assert sure_shares(num_parts, seen, present) == expected


def test_a_slow_rank_that_always_has_a_share_is_given_less_by_its_speed():
    slow = [Did(9 / 32, 0.02)] * 3 + [Did(5 / 32, 0.04)]  # nine and four and a half would be even
    assert sure_shares(32, [slow] * 3, [True] * 4) == (8, 8, 8, 3)
    new = [Did(9 / 32, 0.02)] * 3 + [Did(0.0, math.nan)]  # it came to nothing, and nobody knows its speed
    assert sure_shares(32, [new], [True] * 4) == (7, 7, 7, 0)


def test_more_ranks_than_a_counter_can_tell_apart_are_refused():
    assert len(Pool(9000, (1,) * MAX_RANKS).shares) == 8191
    assert not Pool(9000, (1,) * 9000, drawn=False).drawn  # none draws
    with pytest.raises(ValueError, match="8191 ranks at most, not 8192"):
        Pool(9000, (1,) * 8192)


@pytest.mark.parametrize(("part_s", "expected"), [(0.0201, 7), (0.0206, 7), (0.021, 6), (0.025, 5)])
def test_a_rank_that_is_hardly_slower_has_as_much_for_sure_as_the_others(part_s, expected):
    step = [Did(0.25, 0.02)] * 3 + [Did(0.25, part_s)]
    assert sure_shares(32, [step] * 8, [True] * 4) == (7, 7, 7, expected)


def test_even_parts_are_by_speed():
    slow = [Did(0.25, 0.02)] * 3 + [Did(0.25, 0.04)]
    assert even_parts(28, [slow], [True] * 4) == pytest.approx([8, 8, 8, 4])
    assert even_parts(28, [slow], [True, True, True, False]) == pytest.approx([28 / 3] * 3 + [0])
    assert even_parts(8, [], [True, True]) == [4, 4]


def test_static_shares_are_the_entire_pool():
    assert static_shares(10, [True, True, False, True]) == (4, 3, 0, 3)
    assert static_shares(2, [True] * 3) == (1, 1, 0)
    assert static_shares(4, [False] * 2) == (2, 2)


def drawn_by_one(pool):
    """Its chunks."""
    chunks, index = [], 0
    while chunk := pool.chunk(index):
        chunks.append(list(chunk))
        index += 1
    return chunks


@pytest.mark.parametrize("seed", range(40))
def test_longest_come_first_and_no_sure_share_is_more_than_its_room(seed):
    chance = random.Random(seed)
    number, ranks = chance.choice([1, 5, 16, 40]), chance.choice([1, 2, 4])
    costs = [chance.expovariate(1.0) + 0.01 for _ in range(number)]
    mean = sum(costs) / number
    costs = [own / mean for own in costs]
    shares = [chance.choice([0, number / (2 * ranks), 0.8 * number / ranks]) for _ in range(ranks)]
    pool = Pool.by_cost(costs, shares)
    sure, chunks = [pool.share(rank) for rank in range(ranks)], drawn_by_one(pool)
    assert sorted([*(n for own in sure for n in own), *(n for own in chunks for n in own)]) == list(range(number))
    assert all(sum(costs[n] for n in own) <= share * 1.001 for own, share in zip(sure, shares, strict=True))
    for own in (*sure, [n for chunk in chunks for n in chunk]):
        lengths = [costs[n] for n in own]
        assert lengths == sorted(lengths, reverse=True)
    left = [sum(costs[n] for own in chunks[index:] for n in own) for index in range(len(chunks))]
    for index, chunk in enumerate(chunks):  # by factoring: a half of what was left, of which each rank gets its part
        of_round = left[index - index % ranks] / (2 * ranks)
        assert sum(costs[n] for n in chunk[:-1]) < of_round


def test_equal_costs_are_as_none():
    for shares in ((7, 7, 7, 7), (4, 0, 4, 4), (0, 0, 0, 0)):
        by_cost, by_number = Pool.by_cost([1.0] * 32, shares), Pool(32, shares)
        assert by_cost.shares == by_number.shares
        assert list(map(len, drawn_by_one(by_cost))) == list(map(len, drawn_by_one(by_number)))


def test_pool_that_is_not_drawn_is_dealt_out_entirely_so_that_all_end_together():
    pool = Pool.by_cost([1.0, 5.0, 2.0, 2.0, 2.0], (2, 0, 3), drawn=False)
    assert [list(pool.share(rank)) for rank in range(3)] == [[1, 0], [], [2, 3, 4]]
    assert not pool.chunk(0)


# -- the protocol, exhaustively


class Store(NamedTuple):
    drawn: int = 0
    owners: tuple[Owner | None, ...] = ()
    taken: tuple[int, ...] = ()

    def asked(self, request: Request) -> tuple[Store, Owner | int]:
        if isinstance(request, Count):
            if request.rank is None:
                return self._replace(drawn=self.drawn + request.amount), self.drawn + request.amount
            taken = self.taken[request.rank] + request.amount
            return self._replace(taken=_with(self.taken, request.rank, taken)), taken
        owner = self.owners[request.rank]
        match request:
            case Claim():
                owner = owner or request.owner
            case Release():
                owner = request.numbers if owner == "own" else owner
            case Seize():
                owner = "open" if owner in (None, "own") else owner
        return self._replace(owners=_with(self.owners, request.rank, owner)), owner


class Job(NamedTuple):
    """``dead``: a rank that has died, with what its last request gave it. ``parts``: what each rank has.

    ``back``: what a rank, as long as it may, has put back.
    """

    store: Store
    drawers: tuple[Drawer, ...]
    parts: tuple[tuple[int, ...], ...]
    dead: int | None = None
    back: tuple[int, ...] = ()

    @property
    def living(self) -> list[int]:
        return sorted(number for rank, own in enumerate(self.parts) if rank != self.dead for number in own)


def _with(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def begin(pool: Pool) -> Job:
    ranks = range(len(pool.shares))
    store = Store(owners=tuple(None for _ in ranks), taken=tuple(0 for _ in ranks))
    return Job(store, tuple(Drawer.begin(pool, rank) for rank in ranks), tuple(() for _ in ranks))


def asks(job: Job, pool: Pool, rank: int, *, dies: bool):
    """A rank's next request is carried out; it may die before that, or before the answer comes."""
    if (request := job.drawers[rank].request(pool)) is None:
        return
    store, answer = job.store.asked(request)
    drawer, more = job.drawers[rank].answered(pool, answer)
    parts = _with(job.parts, rank, (*job.parts[rank], *more))
    yield job._replace(store=store, drawers=_with(job.drawers, rank, drawer), parts=parts)
    if dies and job.dead is None:
        yield from (job._replace(dead=rank), job._replace(store=store, parts=parts, dead=rank))


def puts_back(job: Job, pool: Pool, rank: int, *, dies: bool):
    """A rank is stuck, and puts back all that it has but the first few; once. No other rank sees it before it asks."""
    if job.back or not job.drawers[rank].owns:
        return
    own = job.parts[rank]
    for kept in range(len(own)):
        drawer = job.drawers[rank].put_back(own[kept:])
        drawers, parts = _with(job.drawers, rank, drawer), _with(job.parts, rank, own[:kept])
        yield from asks(job._replace(drawers=drawers, parts=parts, back=own[kept:]), pool, rank, dies=dies)


def learns(job: Job, pool: Pool, rank: int):
    """A rank that still draws learns that the dead one is no member, before it asks the next time."""
    if job.dead is not None and (drawer := job.drawers[rank].without(frozenset({job.dead}))) != job.drawers[rank]:
        yield from asks(job._replace(drawers=_with(job.drawers, rank, drawer)), pool, rank, dies=False)


def explore(pool: Pool, *, deaths: bool, back: int | None = None, leaves: bool = False) -> tuple[list[Job], int]:
    """All ends that any order of the ranks' requests can come to, and the number of states on the way.

    A rank may die before any of its requests, or after it was carried out and before the answer came. One that stalls
    and comes back is an order in which the others go first. ``back``: this rank may put back what it has, at any
    moment and any number of them. ``leaves``: the others learn of the death, each at any moment, while they draw.
    """
    ranks = range(len(pool.shares))
    seen, left, ends = {begin(pool)}, [begin(pool)], []
    while left:
        job = left.pop()
        after = []
        for rank in ranks:
            if job.dead == rank:
                continue
            after += asks(job, pool, rank, dies=deaths)
            after += puts_back(job, pool, rank, dies=deaths) if rank == back else ()
            after += learns(job, pool, rank) if leaves else ()
        if all(drawer.request(pool) is None for drawer in job.drawers if drawer.rank != job.dead):
            ends.append(job)
        for one in after:
            before = len(seen)
            seen.add(one)  # hashing one is most of the work: once
            if len(seen) > before:
                left.append(one)
    return ends, len(seen)


@pytest.mark.parametrize("shares", [(0, 0, 0), (1, 1, 1), (2, 1, 1), (1, 0, 1), (2, 2, 0), (4, 0, 0), (0, 0, 2)])
def test_each_part_is_drawn_once_in_every_order(shares):
    ends, num_states = explore(Pool(4, shares), deaths=False)
    assert num_states > 50
    for job in ends:
        assert sorted(number for own in job.parts for number in own) == [0, 1, 2, 3]


@pytest.mark.parametrize("shares", [(0, 0, 0), (1, 1.5, 1)])
def test_each_part_of_a_pool_with_costs_is_drawn_once_in_every_order(shares):
    ends, _ = explore(Pool.by_cost([0.4, 1.6, 1.2, 0.8], shares), deaths=False)
    for job in ends:
        assert sorted(number for own in job.parts for number in own) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "shares", [(0, 0, 0), pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 1, 1), (1, 0, 1), (2, 2, 0), (0, 0, 2)]
)
def test_only_what_a_dead_rank_had_drawn_is_lost_in_every_order(shares):
    """No micro-batch has two owners; the dead rank's are its own, and all others are drawn by the ranks that live."""
    ends, _ = explore(Pool(4, shares), deaths=True)
    assert any(job.dead is not None and not job.parts[job.dead] for job in ends)  # it died before it had any
    for job in ends:
        assert sorted(number for own in job.parts for number in own) == [0, 1, 2, 3]
        assert all(drawer.phase == "done" for drawer in job.drawers if drawer.rank != job.dead)


@pytest.mark.parametrize(("num_parts", "shares", "back"), [(4, (0, 0, 2), 2), (3, (1, 0, 1), 0)])
def test_what_a_stuck_rank_puts_back_is_drawn_once_in_every_order(num_parts, shares, back):
    ends, _ = explore(Pool(num_parts, shares), deaths=False, back=back)
    assert any(set(job.back) & set(job.parts[other]) for job in ends for other in range(3) if other != back)
    assert any(set(job.back) & set(job.parts[back]) for job in ends)  # it is back before the others come to that
    assert all(job.living == list(range(num_parts)) for job in ends)


@pytest.mark.parametrize(("num_parts", "shares", "back"), [(3, (0, 0, 2), 2), (4, (0, 0, 3), 2)])
def test_what_is_put_back_is_never_drawn_twice_though_a_rank_dies(num_parts, shares, back):
    ends, _ = explore(Pool(num_parts, shares), deaths=True, back=back)
    for job in ends:
        own = job.parts[job.dead] if job.dead is not None else ()
        assert len(set(job.living)) == len(job.living)
        assert not set(job.living) & set(own)
        # who had put something back and died before it could be seen takes that along
        assert set(range(num_parts)) - set(job.living) <= {*own, *(job.back if job.dead == back else ())}


@pytest.mark.parametrize("shares", [(0, 0, 2), (4, 0, 0)])
def test_who_still_draws_takes_the_share_of_a_rank_that_left_in_every_order(shares):
    """What the rank that left had merged is nothing, as long as one draws; so its entire share is drawn, once."""
    ends, _ = explore(Pool(4, shares), deaths=True, leaves=True)
    pool, seized = Pool(4, shares), False
    for job in ends:
        assert len(set(job.living)) == len(job.living)
        if job.dead is None:
            continue
        share, own = set(pool.share(job.dead)), set(job.parts[job.dead])
        if job.drawers[job.dead].owns and job.store.owners[job.dead] == "open":
            seized = True
            assert share <= set(job.living)
            assert not (own - share) & set(job.living)
        assert set(range(4)) - set(job.living) <= own
    assert seized


def test_a_share_that_nobody_claims_is_drawn_one_by_one():
    pool = Pool(4, (2, 2))
    drawer, store = Drawer.begin(pool, 0), Store(owners=(None, None), taken=(0, 0))
    given = []
    while (request := drawer.request(pool)) is not None:
        store, answer = store.asked(request)
        drawer, parts = drawer.answered(pool, answer)
        given.append(list(parts))
    assert [parts for parts in given if parts] == [[0, 1], [2], [3]]
    assert store.owners == ("own", "open")


def test_where_all_is_claimed_three_requests_at_most_are_enough():
    pool = Pool(8, (3, 3))
    store = Store(owners=(None, None), taken=(0, 0))
    drawers, numbers = [Drawer.begin(pool, rank) for rank in range(2)], [0, 0]
    while any(drawer.request(pool) for drawer in drawers):
        for rank in range(2):
            if (request := drawers[rank].request(pool)) is not None:
                store, answer = store.asked(request)
                drawers[rank], _ = drawers[rank].answered(pool, answer)
                numbers[rank] += 1
    assert numbers == [3, 2]  # who draws the last chunk knows that it is the last
    assert store.drawn // SETTLED == 2


@pytest.mark.parametrize(
    ("step_s", "part_s", "expected"),
    [
        ([], [], (math.inf, math.inf)),
        ([1.0, 1.0], [0.1, 0.1], (math.inf, math.inf)),  # too few to say
        ([1.0, 9.0, 1.0], [0.1, 0.7, 0.1], (1.2, 0.25)),
        ([1.0] * 8, [0.1], (1.2, math.inf)),  # of a rank that computes hardly any
        ([1e-3] * 3, [1e-4] * 3, (1.2e-3, 0.01)),  # a hiccup of the machine is none of the rank
    ],
)
def test_what_takes_much_longer_than_usual_is_not_waited_for(step_s, part_s, expected):
    times = PoolTimes.usual(step_s, part_s)
    assert (times.step_s, times.put_back_after_s) == pytest.approx(expected)


# -- a step that has lost something is made again


@pytest.mark.parametrize(
    ("attempt", "given", "expected"),
    [
        (1, [8.0, 8.0], False),
        (1, [8.0, 7.0], True),  # of one stage a micro-batch is missing
        (1, [8.0 - 1e-6, 8.0], False),  # sums of weights are rounded
        (0, [8.0, 7.0], False),  # without a seed what is lost is lost
        (MOST_ATTEMPTS - 1, [0.0], True),
        (MOST_ATTEMPTS, [0.0], False),
    ],
)
def test_a_step_is_made_again_if_something_of_its_pool_is_missing(attempt, given, expected):
    assert is_made_again(attempt, 8.0, given) is expected


def draws_of(pool: Pool, chance: random.Random, dying: set[int]) -> list[list[int]]:
    """What each rank has in the end, in an order that is drawn; these ranks stop anywhere, with all that they have."""
    ranks = range(len(pool.shares))
    store = Store(owners=(None,) * len(ranks), taken=(0,) * len(ranks))
    drawers = [Drawer.begin(pool, rank) for rank in ranks]
    parts: list[list[int]] = [[] for _ in ranks]
    left = {rank: chance.randrange(6) if rank in dying else 1000 for rank in ranks}
    while going := [rank for rank in ranks if left[rank] and drawers[rank].request(pool) is not None]:
        rank = chance.choice(going)
        request = drawers[rank].request(pool)
        assert request is not None
        left[rank] -= 1
        store, answer = store.asked(request)
        drawers[rank], more = drawers[rank].answered(pool, answer)
        parts[rank] += more
    return parts


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_whoever_stops_where_the_last_attempt_has_each_micro_batch_once(num_ranks):
    """A rank that stops gives nothing in its attempt, or stages of what it had; it may be there in the next one."""
    chance, num_again = random.Random(num_ranks), 0
    for _ in range(300):
        num_parts, attempt, merged = chance.randrange(1, 20), 1, list[int]()
        shares = tuple(chance.randrange(1 + num_parts // num_ranks) for _ in range(num_ranks))
        while True:
            dying = set(chance.sample(range(num_ranks), chance.choice([0, 0, 1, num_ranks - 1])))
            parts = draws_of(Pool(num_parts, shares), chance, dying)
            merged = [number for rank in range(num_ranks) if rank not in dying for number in parts[rank]]
            early = [number for rank in dying for number in parts[rank] if chance.random() < 0.5]
            if not is_made_again(attempt, num_parts, [len(merged + early), len(merged)]):
                break
            attempt, shares, num_again = attempt + 1, (0,) * num_ranks, num_again + 1
        assert sorted(merged) == list(range(num_parts)) or attempt == MOST_ATTEMPTS
        assert attempt < MOST_ATTEMPTS
    assert num_again > 50
