"""Steps whose micro-batches are drawn, by list scheduling: closed forms, and what holds whatever the times are."""

import random

import pytest

from straggle.advise.list_schedule import Drawing, draw_step
from straggle.pools.pool import Pool


def after(steps, num_parts, part_s, entered_s=None, request_s=0.0):
    """The last of so many steps of ranks whose micro-batches all take ``part_s`` seconds."""
    drawing = Drawing(num_parts, len(part_s), request_s)
    for _ in range(steps):
        step = drawing.follow(entered_s or [0.0] * len(part_s), [[own] for own in part_s])
    return step


@pytest.mark.parametrize(
    ("num_parts", "part_s", "parts", "step_s"),
    [
        (32, [1.0] * 4, (8, 8, 8, 8), 8.0),
        (32, [1.0, 1.0, 1.0, 2.0], (9, 9, 9, 5), 10.0),  # 32 / 3.5 is 9.14; it ends with one of the slow rank's
        (16, [1.0, 2.0], (10, 6), 12.0),  # the slow rank asks for its sixth before it begins its fifth, after 8 s
        (8, [1.0, 1.0, 1.0, 2.0], (2, 2, 2, 2), 4.0),  # two for each rank are too few
        (8, [1.0], (8,), 8.0),
        (24, [1.0, 1.0, 4.0], (10, 10, 4), 16.0),
    ],
)
def test_a_slow_rank_draws_fewer(num_parts, part_s, parts, step_s):
    step = after(12, num_parts, part_s)
    assert (step.parts, max(step.over_s)) == (parts, step_s)


def test_the_first_pool_is_dealt_out_equally():
    step = after(1, 32, [1.0, 1.0, 1.0, 2.0])
    assert (step.parts, max(step.over_s)) == ((8, 8, 8, 8), 16.0)


@pytest.mark.parametrize(("entered_s", "parts", "over_s"), [(1.0, (9, 8, 8, 7), 9.0), (100.0, (11, 11, 10, 0), 100.0)])
def test_a_rank_that_comes_late_finds_less_and_is_waited_for(entered_s, parts, over_s):
    drawing = Drawing(32, 4, request_s=0.0)
    for _ in range(4):
        drawing.follow([0.0] * 4, [[1.0]] * 4)
    step = drawing.follow([0.0, 0.0, 0.0, entered_s], [[1.0]] * 4)
    assert sorted(step.parts, reverse=True) == sorted(parts, reverse=True)
    assert step.parts[3] == parts[3]
    assert max(step.over_s) == over_s


def test_only_the_answer_to_the_claim_is_waited_for():
    assert max(after(9, 32, [1.0] * 4, request_s=0.125).over_s) == 8.125


def test_a_rank_that_was_stood_in_for_has_no_sure_share():
    drawing = Drawing(32, 4, request_s=0.0)
    drawing.follow([0.0] * 4, [[1.0]] * 4)
    drawing.learn((11, 11, 10, 0), (11.0, 11.0, 10.0, 0.0), (False, False, False, True))
    assert drawing.step([0.0, 0.0, 0.0, 50.0], [[1.0]] * 4).parts[3] == 0


@pytest.mark.parametrize(
    ("stuck_s", "parts", "over_s"),
    [(2.4, (9, 8, 8, 7), 9.0), (4.0, (9, 9, 9, 5), 9.0), (100.0, (10, 10, 9, 3), 102.0)],
)
def test_a_rank_that_stands_still_in_a_micro_batch_puts_back_what_it_has_not_begun(stuck_s, parts, over_s):
    drawing = Drawing(32, 4, request_s=0.0)
    for _ in range(4):
        drawing.follow([0.0] * 4, [[1.0]] * 4)
    step = drawing.follow([0.0] * 4, [[1.0]] * 3 + [[1.0, 1.0, stuck_s] + [1.0] * 5])
    assert (sorted(step.parts[:3], reverse=True), step.parts[3]) == (list(parts[:3]), parts[3])
    assert max(step.over_s) == pytest.approx(over_s)


@pytest.mark.parametrize("seed", range(20))
def test_each_micro_batch_is_computed_once_and_the_step_ends_with_one_of_them(seed):
    chance = random.Random(seed)
    num_ranks, each = chance.randint(2, 6), chance.randint(2, 10)
    drawing = Drawing(num_ranks * each, num_ranks, request_s=0.0)
    for _ in range(12):
        part_s = [[chance.uniform(0.5, 3.0) for _ in range(each)] for _ in range(num_ranks)]
        entered_s = [chance.choice([0.0, 0.0, chance.uniform(0.0, 4.0)]) for _ in range(num_ranks)]
        step = drawing.follow(entered_s, part_s)
        assert sum(step.parts) == num_ranks * each
    # no rank that had nothing left to do was idle for longer than others' last two micro-batches took
    last = sorted(step.over_s)
    assert last[-1] - last[0] <= 2 * 3.0 + 4.0


def test_a_pool_that_is_dealt_asks_nothing():
    step = draw_step(Pool(4, (2, 2), drawn=False), [9.0, 9.0], [0.0, 1.0], [[1.0], [2.0, 3.0]], request_s=5.0)
    assert step.ends_s == ((1.0, 2.0), (3.0, 6.0))
