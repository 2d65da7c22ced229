"""Simulated ranks that draw: closed forms, deadlines, and what was measured with real ranks."""

import re
from random import Random

import pytest
import torch
from repository import ROOT

from straggle import AutoDeadline, FirstK, LateHandling, QuantileDeadline, WaitForAll
from straggle.commands.configuration.config import ConfigurationError, load
from straggle.lab.simulate.communication import Constant
from straggle.lab.simulate.delays import NoDelay, SlowRanks
from straggle.lab.simulate.pulled import PulledCluster, simulate_drawn, simulate_pulled
from straggle.lab.simulate.summary import numbers_of, rows_of
from straggle.lab.simulate.units import Work

PARTS, PART_S, SKIP = 8, 0.02, 12
SCENARIOS = ("none", "slow", "random")
EQUAL = torch.full((4, PARTS), PART_S)
SLOW = EQUAL * torch.tensor([1.0, 1.0, 1.0, 2.0]).unsqueeze(1)


def cluster(deadline=None, *, overhead_s=0.0, request_s=0.0, network=None, **late_handling):
    work = Work(PARTS * PART_S, num_microbatches=PARTS, overhead_s=overhead_s)
    late_handling = LateHandling(**late_handling)
    return PulledCluster(4, work, deadline or WaitForAll(), late_handling, network or Constant(), request_s)


def test_step_ends_with_one_micro_batch_of_the_slow_rank():
    found = simulate_drawn([SLOW] * 12, cluster(overhead_s=0.01))
    assert found.drawn.tolist() == pytest.approx(
        [(8 + 11 * own) / 12 for own in (9, 9, 9, 5)]
    )  # the first one is dealt
    assert found.step_s[1:].tolist() == pytest.approx([10 * PART_S + 0.01] * 11)
    assert found.all_s.tolist() == pytest.approx([16 * PART_S + 0.01] * 12)
    assert found.dropped.tolist() == [0.0] * 12


def test_what_a_late_rank_has_of_its_micro_batch_counts_and_the_rest_of_its_own_is_dropped():
    found = simulate_drawn([SLOW] * 12, cluster(FirstK(3)))
    # the others end after nine, when the slow rank is half through its fifth: a third of that was forward
    assert found.step_s[-1] == pytest.approx(9 * PART_S)
    assert found.late_steps.tolist() == [0, 0, 0, 11]
    assert found.dropped[-1] == pytest.approx((1 - (1 / 2 - 1 / 3) / (1 - 1 / 3)) / 32)


@pytest.mark.parametrize("deadline", [WaitForAll, lambda: QuantileDeadline(0.5, slack=1.5)])
def test_rank_that_does_not_come_is_not_waited_for_and_nothing_is_lost(deadline):
    held_s = [torch.zeros(4) for _ in range(30)]
    held_s[20][3] = 1.0
    found = simulate_drawn([EQUAL] * 30, cluster(deadline(), grace_s=0.02), held_s)
    assert found.dropped.tolist() == pytest.approx([0.0] * 30)
    assert found.all_s[20] == pytest.approx(1.0 + 8 * PART_S)
    # the others do its eight in three steps, then less than all four of them do until it is back, after about a second
    assert found.step_s[20:25].tolist() == pytest.approx([11 * PART_S] * 4 + [10 * PART_S], abs=PART_S + 1e-6)
    assert found.step_s[27:].tolist() == pytest.approx([8 * PART_S] * 3)
    assert 3 <= found.late_steps[3] <= 5


def test_rank_that_does_not_come_is_waited_for_once_it_has_missed_as_many_steps_as_it_may():
    held_s = [torch.zeros(4) for _ in range(30)]
    held_s[20][3] = 3.0
    found = simulate_drawn([EQUAL] * 30, cluster(grace_s=0.02, max_lag=4), held_s)
    assert float(found.step_s[20:25].sum()) == pytest.approx(3.0)
    assert float(found.step_s[20:24].max()) < 12 * PART_S
    assert found.late_steps[3] == 5


@pytest.mark.parametrize("deadline", [WaitForAll, AutoDeadline])
def test_where_no_rank_is_slow_it_is_the_equal_split(deadline):
    found = simulate_drawn([EQUAL] * 20, cluster(deadline(), network=Constant(0.012)))
    torch.testing.assert_close(found.step_s, found.all_s)
    assert found.drawn.tolist() == [8.0] * 4
    assert float(found.dropped.max()) == 0.0


def test_numbers_and_table_say_who_drew():
    work = Work(PARTS * PART_S, num_microbatches=PARTS)
    found = simulate_pulled(20, 4, work, SlowRanks(NoDelay(), 0.25, 2.0), WaitForAll())
    numbers = numbers_of(found)
    assert numbers["drawn_per_rank"]["min"] == pytest.approx((8 + 19 * 5) / 20)
    assert sum(numbers["ranks_drawn"]) == pytest.approx(32)
    assert ("micro-batches of a rank", "8.0", "5.2 to 8.9", "") in rows_of(numbers)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match=r"num_microbatches=1: .* nothing to draw"):
        simulate_pulled(2, 4, Work(1.0), NoDelay(), WaitForAll())
    load("simulate", ["pulled=true", "work.num_microbatches=8"])
    with pytest.raises(ConfigurationError, match="unknown key pulls"):
        load("simulate", ["pulls=true"])


# -- what was measured, with four real ranks (results/: benchmarks/pulled.py on a quiet machine)


def measured():
    """The ratios to the static split, by scenario."""
    table = (ROOT / "results" / "2026-11-23-work-that-ranks-draw.md").read_text()
    cells = re.search(r"^\| pulled \|(.*)\|$", table, re.MULTILINE)[1].split("|")
    return {scenario: float(cell.split()[0]) for scenario, cell in zip(SCENARIOS, cells, strict=True)}


def held_up(scenario, steps):
    """As `benchmarks/pulled.py` holds ranks up."""
    chances = [Random(rank) for rank in range(4)]
    for _ in range(steps):
        held_s = [0.32 / 0.99 * PARTS * PART_S * (scenario == "random" and own.random() < 0.44) for own in chances]
        yield torch.tensor(held_s)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_simulated_steps_are_within_a_twentieth_of_those_of_real_ranks(scenario):
    steps = 6 * SKIP
    own_s = [SLOW if scenario == "slow" else EQUAL] * steps
    found = simulate_drawn(own_s, cluster(request_s=0.0008), held_up(scenario, steps))
    ratio = float(found.step_s[SKIP:].mean() / found.all_s[SKIP:].mean())
    assert ratio == pytest.approx(measured()[scenario], rel=0.05)
