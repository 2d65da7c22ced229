"""What ranks take from batch to batch, which is slow whatever it is given, and what is said of it."""

import json
import math

import pytest
import torch
from telemetry_rows import row_of

from straggle.data.rank_times import BatchTimes, HeldUp, held_up
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import absent_row
from straggle.policies.shares.sample_time import RankTime

QUICK = RankTime(0.05, 0.0125, is_known=True)
DELAYED = RankTime(0.45, 0.0125, is_known=True)
PHASES = {"outside": (0.0,) * 4, "data": (0.01, 0.41, 0.01, 0.01), "forward": (0.05,) * 4}


def found(slow, shares=(8, 8, 8, 8), *, quick=QUICK, **options):
    ranks = dict(enumerate((quick, slow, quick, quick)[: len(shares)]))
    return held_up(ranks, shares, PHASES, **{"least": 1, **options})


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fixed_delay_is_found_with_its_seconds_and_its_place(world_size):
    assert found(DELAYED, (8,) * world_size) == HeldUp(1, pytest.approx(0.4), "data", by_samples=False)


def test_alone_no_rank_is_slow():
    assert found(QUICK, (8,)) is None


@pytest.mark.parametrize(
    ("slow", "shares"),
    [
        (QUICK, (8, 8, 8, 8)),
        (RankTime(0.08, 0.0125, is_known=True), (8, 8, 8, 8)),  # a fifth longer
        (RankTime(0.45, 0.0125), (8, 8, 8, 8)),  # its share has not changed yet
        (RankTime(0.05, 0.08, is_known=True), (8, 8, 8, 8)),  # fewer samples help
    ],
)
def test_nothing_is_said_of_a_rank_that_is_not_slow_or_that_fewer_samples_may_help(slow, shares):
    assert found(slow, shares) is None


def test_rank_that_has_its_least_share_and_is_still_slow_is_found_too():
    slow = RankTime(0.0, 0.5)
    assert found(slow, (10, 1, 10, 11)) == HeldUp(1, pytest.approx(0.5 - 0.175), "data", by_samples=True)
    assert found(slow, (10, 2, 10, 10)) is None
    assert found(slow, (10, 2, 10, 10), least=2) is not None


def test_rank_that_was_found_stays_so_until_it_is_clearly_none():
    now = RankTime(0.09, 0.0125, is_known=True)
    before = found(DELAYED)
    assert (found(now) is None, found(now, before=before) is None) == (True, False)
    assert found(QUICK, before=before) is None


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("loads_missed", [True, False])
@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_words_say_what_does_help(waits, loads_missed, phase):
    words = HeldUp(1, 0.4, phase, by_samples=False).words(waits=waits, loads_missed=loads_missed)
    assert words.startswith("rank 1 takes 400 ms longer than the others in each step, however few samples it has, most")
    assert {"data": "loading data", "optimizer": "in the optimizer"}[phase] in words
    assert ("deadline=straggle.AutoDeadline()" in words) == waits
    assert ("straggle.LateLoader(model, loader)" in words) == (loads_missed and phase == "data")
    assert words.endswith("leave it out")


NOTHING = {"computed": (1.0,), "estimated": (0.0,), "stage_s": (math.nan,)}


def in_time(loading_s, own_s, other_s=0.0):
    busy_s = loading_s + own_s + other_s
    return row_of(compute_s=own_s, busy_s=busy_s, times={"data": loading_s}, **NOTHING).encode()


def missed(loading_s, other_s=0.0):
    times = {"data": loading_s, "optimizer": other_s}
    away = {"stood_in": True, "late": True}
    return row_of(compute_s=math.nan, busy_s=loading_s + other_s, times=times, **away, **NOTHING).encode()


def idle():
    return row_of(compute_s=math.nan, busy_s=9.0, idle=True, **NOTHING).encode()


def times(steps, *, loads_missed=False, stop_after=None):
    followed, seen = BatchTimes(2), []
    for number, rows in enumerate(steps):
        if number == stop_after:
            state = json.loads(json.dumps(followed.state_dict()))
            followed = BatchTimes(2)
            followed.load_state_dict(state)
        seen.append([of.seconds for of in followed.of(Table(torch.stack(rows), 1), loads_missed=loads_missed)])
    return [pytest.approx(own, nan_ok=True) for own in zip(*seen, strict=True)]


def test_loading_counts():
    assert times([(in_time(0.1, 0.2), in_time(0.4, 0.2)), (in_time(0.0, 0.3), in_time(0.1, 0.1))]) == [
        (0.3, 0.3),
        (0.6, 0.2),
    ]


STEPS = [(in_time(0.0, 0.2), row) for row in (missed(0.25), missed(0.25), in_time(0.1, 0.2), in_time(0.3, 0.2))]


@pytest.mark.parametrize("stop_after", [None, 1, 2])
def test_batch_with_which_a_rank_takes_part_again_was_loaded_in_all_the_steps_that_it_missed(stop_after):
    assert times(STEPS, stop_after=stop_after)[1] == (math.nan, math.nan, 0.8, 0.5)


def test_loop_that_loads_a_batch_for_each_step_that_it_missed_took_a_part_of_that_for_each():
    assert times(STEPS, loads_missed=True)[1] == (math.nan, math.nan, 0.6 / 3 + 0.2, 0.5)


def test_what_a_rank_does_between_two_steps_it_has_done_for_each_that_it_missed():
    rows = (missed(0.25), missed(0.25, 0.04), in_time(0.1, 0.2, 0.05))
    assert times([(in_time(0.0, 0.2), row) for row in rows])[1] == (math.nan, math.nan, 0.6 + 0.09 / 3 + 0.2)


def test_rank_without_data_or_that_is_absent_has_no_time():
    steps = [(idle(), absent_row(1)), (in_time(0.1, 0.2), in_time(0.1, 0.2))]
    assert times(steps) == [(math.nan, 0.3), (math.nan, 0.3)]
