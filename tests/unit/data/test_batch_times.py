"""What ranks take from batch to batch, also over steps that they missed."""

import json
import math

import pytest
import torch
from telemetry_rows import row_of

from straggle.data.batch_times import BatchTimes
from straggle.merge.table import Table
from straggle.merge.telemetry import absent_row

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
