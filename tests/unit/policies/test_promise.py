"""Whether dropping was worth it, of steps that are written down."""

import math

import pytest
import torch

from straggle import Progress
from straggle.policies.promise import Kept, kept

NAN = math.nan


def steps(rows):
    """``rows`` of (share that rank 1 brought, its seconds, seconds with waiting); rank 0 takes 1 s, and all weigh 1."""
    reach, own_s, waiting_s = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    computed = torch.stack([torch.ones_like(reach), reach], 1).unsqueeze(2)
    at_once = torch.zeros(len(rows), 2, dtype=torch.float64)
    entered_s = at_once.clone()
    entered_s[:, 1] = 1.5 * own_s.isnan()
    progress = Progress(computed, computed, computed, torch.ones(1).double(), at_once + 1, entered_s, at_once[:, 0])
    return kept(progress, torch.stack([torch.ones_like(own_s), own_s], 1), waiting_s)


@pytest.mark.parametrize(
    ("rows", "gain", "num_steps", "broken"),
    [
        ([(1.0, 2.0, 2.0)] * 25, 0.0, 0, False),  # nothing was dropped
        ([(0.5, 1.0, 2.0)] * 25, 0.75 * 2 - 1, 25, False),
        ([(0.0, 1.5, 2.0)] * 25, 0.5 * 2 / 1.5 - 1, 25, True),  # half of all is gone for a quarter of the time
        ([(0.0, 1.5, 2.0)] * 19, 0.5 * 2 / 1.5 - 1, 19, False),  # too few to say
        ([(0.0, NAN, 4.0)] * 25, 0.5 * 4 / 1.5 - 1, 25, False),  # stood in for after 1.5 s
        ([(0.5, 1.0, 2.0), *[(1.0, 1.0, 1.0)] * 8], 0.5, 1, False),  # the others had nothing to gain
        ([(0.5, 1.4, 1.5), (0.5, 1.4, 2.1)] * 10, 0.75 * 1.8 / 1.4 - 1, 20, True),
    ],
)
def test_gain_as_it_came(rows, gain, num_steps, broken):
    seen = steps(rows)
    assert seen.gain == pytest.approx(gain)
    assert seen.num_steps == num_steps
    assert seen.broken(0.01) == broken


@pytest.mark.parametrize(
    ("gain", "dropped", "price", "broken"),
    [
        (0.04, 0.1, 0.5, True),
        (0.06, 0.1, 0.5, False),
        (0.2, 0.1, 3.0, True),
        (0.31, 0.1, 3.0, False),
    ],
)
def test_what_was_dropped_must_have_brought_its_price(gain, dropped, price, broken):
    assert Kept(gain, 0.0, 20, dropped).broken(0.01, price) == broken


def test_what_may_be_noise_is_not_broken():
    assert not Kept(-0.1, 0.2, 20).broken(0.01)
    assert Kept(-0.1, 0.1, 20).broken(0.01)
    even = steps([(0.5, 1.4, 1.5), (0.5, 1.4, 2.1)] * 9)
    assert even.error == pytest.approx((1 + even.gain) * (0.3 / 1.8) / math.sqrt(17))
