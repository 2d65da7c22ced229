"""What a job would be worth without slow ranks, and what a rank costs that goes through its loop for missed steps."""

import json

import numpy as np
import pytest
from watched import NETWORK_S, USUAL, when, write_watch

from straggle import FirstK, LateHandling
from straggle.advise.answer import answer
from straggle.advise.gain import candidates, gains, replay
from straggle.advise.other_shares import all_without, without
from straggle.advise.timings import read_timings

BY_SAMPLES_S = USUAL["data"] + USUAL["forward"] + USUAL["backward"]
FIXED_S = sum(USUAL.values()) - BY_SAMPLES_S


@pytest.fixture
def fixed(tmp_path):
    """Rank 1 takes 0.3 s more between the backward pass and the optimizer's step."""
    return read_timings(write_watch(tmp_path, extra=when(1, range(1000), outside=0.3), noise=0.0))


def test_the_others_have_the_samples_of_a_rank_that_is_left_out(fixed):
    gain = without(fixed, [1], None)
    step_s = 4 / 3 * BY_SAMPLES_S + FIXED_S + NETWORK_S
    assert gain.step_s == pytest.approx(step_s)
    assert gain.dropped.value == gain.dropped.high == 0
    assert gain.speedup.value == pytest.approx((BY_SAMPLES_S + FIXED_S + NETWORK_S + 0.3) / step_s)


def test_each_slow_rank_has_a_row_and_all_of_them_together(fixed):
    found = dict(all_without(fixed, [3, 1], None))
    assert list(found) == [(3,), (1,), (1, 3)]
    assert [gain.code for gain in found.values()] == ["without rank 3", "without rank 1", "without ranks 1 and 3"]
    assert not dict(all_without(fixed, [], None))


def test_rank_that_is_slow_outside_of_its_passes_is_left_out_and_has_no_fewer_samples(tmp_path):
    found = answer(write_watch(tmp_path, extra=when(1, range(1000), outside=0.3)))
    assert (found.verdict.kind, found.verdict.chosen.ranks) == ("without", (1,))
    said = " ".join(str(found).split())
    assert said.startswith("Do this: start the job without rank 1, and give the samples to the others. It brings")
    assert "multiply the others' batch size by 4/3" in said
    assert "between backward and the optimizer's step" in said
    assert "so to have fewer of them is no help" in said
    assert "DealtLoader" not in said


def test_waiting_in_collectives_of_the_loops_own_is_told_and_is_no_ranks_work(tmp_path):
    folder = write_watch(tmp_path, steps=40, extra=when(1, range(1000), backward=0.1)) / "watch"
    for rank, file in enumerate(sorted(folder.iterdir())):
        head, *lines = map(json.loads, file.read_text().splitlines())
        lines = [line | {"collective_s": 0.1 * (rank != 1)} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    found = answer(tmp_path)
    assert [(one.rank, one.named) for one in found.slowness.ranks] == [(1, ("backward",))]
    assert "ranks wait in collectives of the loop's own, where a deadline does not help" in " ".join(str(found).split())


def test_rank_that_goes_through_its_loop_for_each_missed_step_sets_the_pace_when_it_may_miss_no_more(fixed):
    found = replay(fixed, FirstK(3))
    own_s = 0.3 + USUAL["outside"] + USUAL["optimizer"] + USUAL["data"]
    assert found.seconds[1:9].max() < 0.2  # its peers go on without it
    assert found.seconds[-40:].mean() == pytest.approx(own_s, rel=1e-3)
    assert found.lag == LateHandling().max_lag


def test_rank_that_loads_slowly_does_not_set_the_pace_if_it_passes_missed_batches_by(tmp_path):
    timings = read_timings(write_watch(tmp_path, steps=60, extra=when(1, range(1000), data=0.4), noise=0.0))
    plain, passing = (replay(timings, FirstK(3), passes_by=flag) for flag in (False, True))
    assert plain.seconds[-40:].mean() > 0.39
    assert passing.seconds[-40:].mean() < 0.15
    assert passing.lag < LateHandling().max_lag
    found = {gain.code: gain for gain in gains(timings, loads_slowly=True)}
    assert found["straggle.FirstK(3), LateLoader"].step_s < 0.4 * found["straggle.FirstK(3)"].step_s
    assert found["straggle.FirstK(3)"].saved.low < 0  # how often it is waited for is not known


def test_slow_loading_is_answered_with_a_loader_that_passes_missed_batches_by(tmp_path):
    said = str(answer(write_watch(tmp_path, steps=30, extra=when(1, range(1000), data=0.4))))
    assert "FirstK(3), LateLoader" in said
    assert "AutoDeadline(), LateLoader" in said


@pytest.mark.parametrize("steps", [30, 120])
def test_budget_drops_no_more_than_it_promises_whatever_was_recorded(steps, tmp_path):
    timings = read_timings(write_watch(tmp_path, steps=steps, extra=when(1, range(1000), backward=0.4)))
    (budget,) = [gain for gain in gains(timings) if "DropBudget" in gain.code]
    (promised,) = [one.most_dropped for one in candidates(4) if one.code == budget.code]
    assert promised == 0.05
    assert 0.01 < budget.dropped.value <= budget.dropped.high <= promised
    assert np.isfinite(budget.step_s)
