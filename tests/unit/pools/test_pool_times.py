"""How long what is drawn from a pool usually takes."""

import math

import pytest

from straggle.pools.pool_times import PoolTimes


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
