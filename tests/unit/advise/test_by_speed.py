"""What fewer samples for a slow rank are said to be worth, against closed forms."""

import json

import numpy as np
import pytest
from watched import NETWORK_S, USUAL, when, write_trace, write_watch

from straggle.advise.answer import answer
from straggle.advise.other_shares import by_speed, shares_of
from straggle.advise.timings import read_timings

BY_SAMPLES_S = USUAL["data"] + USUAL["forward"] + USUAL["backward"]
FIXED_S = USUAL["outside"] + USUAL["optimizer"]


@pytest.mark.parametrize(
    ("work_s", "fixed_s", "shares"),
    [
        ([1.0, 1.0], [0.0, 0.0], [1.0, 1.0]),
        ([1.0, 2.0], [0.0, 0.0], [4 / 3, 2 / 3]),
        ([1.0, 1.0, 1.0, 2.0], [0.0] * 4, [8 / 7, 8 / 7, 8 / 7, 4 / 7]),
        ([1.0, 1.0], [0.0, 1.0], [1.5, 0.5]),  # both end after 1.5 s
        ([1.0, 1.0], [0.0, 9.0], [1.95, 0.05]),  # a rank that is slow without samples, too
        ([0.0, 0.0], [1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_ranks_finish_together(work_s, fixed_s, shares):
    assert shares_of(np.array(work_s), np.array(fixed_s)) == pytest.approx(shares)


def test_gain_has_a_closed_form(tmp_path):
    slow = when(1, range(1000), **{name: USUAL[name] for name in ("data", "forward", "backward")})
    timings = read_timings(write_watch(tmp_path, extra=slow, noise=0.0))
    found = by_speed(timings)
    assert found.shares == pytest.approx([8 / 7, 4 / 7, 8 / 7, 8 / 7])
    step_s = 8 / 7 * BY_SAMPLES_S + FIXED_S + NETWORK_S
    assert found.gain.step_s == pytest.approx(step_s)
    assert found.gain.dropped.value == 0
    assert found.gain.speedup.value == pytest.approx((2 * BY_SAMPLES_S + FIXED_S + NETWORK_S) / step_s)


def test_only_the_steps_from_which_on_ranks_are_as_they_are_now_count(tmp_path):
    slow = when(1, range(70, 1000), forward=BY_SAMPLES_S)
    found = by_speed(timings := read_timings(write_watch(tmp_path, extra=slow, noise=0.0)), first=70)
    assert found.shares[1] == pytest.approx(4 / 7)
    assert by_speed(timings).shares[1] == pytest.approx(1.0)  # by the median of all steps


def test_advice_for_a_rank_that_is_always_slow_says_what_it_is_worth(tmp_path):
    said = answer(write_watch(tmp_path, extra=when(1, range(1000), backward=0.2)))
    assert "Rank 1 is always slow" in str(said)
    assert "Do this: deal the samples out by speed (rank 1 then has 39% of an equal share)." in str(said)
    assert "\n  loader = straggle.DealtLoader(model, loader)\n" in str(said)
    assert json.loads(said.as_json())["by_speed"]["shares"][1] == pytest.approx(0.39, abs=0.01)


def test_rank_that_sometimes_stalls_is_not_to_have_less(tmp_path):
    said = answer(write_watch(tmp_path, steps=70, extra=when(2, range(15, 1000, 20), data=1.0)))
    assert said.by_speed is None
    assert "deal the samples out" not in str(said)


def test_rank_that_is_a_little_slow_beside_one_that_stalls_is_not_the_one_whose_gradients_are_dropped(tmp_path):
    a_little = when(0, range(1000), forward=0.02)
    stalls = when(3, [step for step in range(1000) if step % 5 < 2], forward=0.5)
    found = answer(write_watch(tmp_path, steps=70, extra=lambda rank, step: a_little(rank, step) | stalls(rank, step)))
    assert "Rank 3 is slow at times" in str(found)
    assert "Rank 0 is always slow" in str(found)
    assert found.verdict.kind == "deadline"


@pytest.mark.parametrize("dealt", [True, False])
def test_run_that_is_dealt_by_speed_already_is_not_told_to(dealt, tmp_path):
    write_trace(tmp_path, 9.0)
    of_run = "{_target_: straggle.Rebalance}" if dealt else "{}"
    (tmp_path / "config.yaml").write_text(f"late_handling: {{quorum: null}}\nrebalance: {of_run}\n")
    assert ("\n  rebalance=by_speed\n" in str(answer(tmp_path))) == (not dealt)
