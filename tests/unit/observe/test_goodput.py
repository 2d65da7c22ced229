"""What a run's time was used for: the parts add up to all of it, and each cause has its own."""

import json
import math
import random
from dataclasses import replace

import pytest
from pages import a_rank, a_step, write_run

from straggle.observe.findings import advise
from straggle.observe.numbers.goodput import LOST, USES, Goodput, Uses, uses_of
from straggle.observe.numbers.registry import summarize
from straggle.observe.numbers.run import read_run, run_of
from straggle.observe.numbers.run_numbers import numbers_of


def of(reports, ended_at=None):
    uses = Uses()
    for place, report in enumerate(reports):
        uses.add(report, math.nan if ended_at is None else ended_at[place])
    return uses.goodput()


def drawn_steps(chance):
    """Steps in which anything may be: absent, idle, late and stuck ranks, times that are unknown or too long."""
    ranks, again_at = chance.randrange(1, 5), chance.randrange(30)
    for step in range(chance.randrange(1, 30)):
        if step == again_at:  # a run may go on with another number of ranks
            ranks = chance.randrange(1, 5)
        attempts = chance.choice([0, 1, 1, 2, 3])
        again_s = chance.random() if attempts > 1 else 0.0
        own = []
        for rank in range(ranks):
            times = {
                name: chance.choice([0.0, chance.random(), math.nan])
                for name in ("wait_s", "outside_s", "collective_s", "loop_end_s", "reach")
            }
            state = {name: chance.random() < 0.2 for name in ("absent", "idle", "stood_in")}
            own.append(a_rank(rank, whole=chance.randrange(6), **times, **state))
        seconds = chance.choice([0.0, chance.random(), 3 * chance.random()])
        rest = {"skipped": chance.random() < 0.1, "network_s": chance.choice([math.nan, -0.1, chance.random()])}
        yield a_step(step, own, seconds=seconds, pool_attempts=attempts, again_s=again_s, **rest)


@pytest.mark.parametrize("seed", range(200))
def test_parts_add_up_to_all_time_whatever_a_trace_has(seed):
    chance = random.Random(seed)
    reports, gaps = list(drawn_steps(chance)), []
    for report in reports:
        for rank in report.ranks:
            for changed in (False, True):
                parts = uses_of(report, rank, changed=changed)
                assert sum(parts.values()) == pytest.approx(report.seconds + report.again_s)
                assert min(parts.values()) >= 0
                assert parts.keys() <= set(USES)
        gaps.append(chance.choice([0.0, 0.0, 5 * chance.random()]) if gaps else 0.0)
    at, ended_at = 1e9, []
    for report, gap in zip(reports, gaps, strict=True):
        at += report.seconds + report.again_s + gap
        ended_at.append(at)
    own = of(reports, ended_at)
    assert sum(own.seconds.values()) == pytest.approx(ended_at[-1] - 1e9, abs=1e-5)
    assert own.seconds["no_step"] == pytest.approx(sum(gaps), abs=1e-5)
    assert set(own.seconds) == set(USES)
    assert all(seconds >= 0 for seconds in own.seconds.values())
    assert math.isnan(own.share) or 0 <= own.share <= 1


def steady(rank, **rest):
    """A rank that waits for 0.1 s, and does something else for 0.05."""
    return a_rank(rank, wait_s=0.1, outside_s=0.05, **rest)


def one(*ranks, **rest):
    return {name: s for name, s in of([a_step(0, ranks, seconds=1.0, **rest)]).seconds.items() if s}


def test_step_in_which_all_is_well_is_useful_but_for_waiting_and_evaluating():
    assert one(steady(0), steady(1)) == pytest.approx({"useful": 0.85, "waiting": 0.1, "outside": 0.05})


@pytest.mark.parametrize(
    ("rank", "rest", "expected"),
    [
        (steady(0, reach=0.5), {"network_s": 0.25}, {"dropped": 0.3, "useful": 0.55, "waiting": 0.1, "outside": 0.05}),
        (a_rank(0, whole=0, wait_s=0.0, outside_s=0.0, stood_in=True), {}, {"dropped": 1.0}),
        (steady(0), {"skipped": True}, {"dropped": 0.85, "waiting": 0.1, "outside": 0.05}),
        (steady(0, idle=True), {}, {"waiting": 0.95, "outside": 0.05}),
        (steady(0, collective_s=0.2, loop_end_s=0.1), {}, {"useful": 0.55, "waiting": 0.3, "outside": 0.15}),
        (steady(0, absent=True), {}, {"members": 1.0}),
    ],
)
def test_each_cause_has_its_part(rank, rest, expected):
    assert one(rank, **rest) == pytest.approx(expected)


def test_attempts_that_were_made_again_are_lost_whole_and_every_reported_step_counts():
    """What was discarded is in no report of its own: hooks and the trace have the last attempt."""
    steps = [(0, 1, 0.0), (1, 1, 0.0), (4, 3, 2.0), (5, 1, 0.0)]  # number, attempts, seconds of those before
    reports = [a_step(n, [steady(0)], seconds=1.0, pool_attempts=own, again_s=s) for n, own, s in steps]
    seconds = of(reports).seconds
    assert seconds["again"] == pytest.approx(2.0)
    assert seconds["useful"] == pytest.approx(4 * 0.85)
    run = run_of(reports)
    assert run.seconds.tolist() == [1.0, 1.0, 3.0, 1.0]
    assert not any("lacks" in sentence for sentence in advise(run, numbers_of(run)))
    without = run_of([reports[0], reports[1], reports[3]])
    said = advise(without, numbers_of(without))
    assert any("lacks 50% of its steps (3 of 6), the first of them step 2" in sentence for sentence in said)


def test_waiting_and_merging_in_a_step_in_which_members_changed_is_the_change():
    gone = steady(1, absent=True)
    steps = [a_step(0, [steady(0), steady(1)], seconds=1.0)]
    steps += [a_step(n, [steady(0), gone], seconds=1.0, network_s=0.2) for n in (1, 2)]
    seconds = of(steps).seconds
    assert seconds["members"] == pytest.approx((0.3 + 1.0 + 1.0) / 2)
    assert seconds["waiting"] == pytest.approx((0.1 + 0.1 + 0.1) / 2)


def test_restart_is_time_in_which_no_step_went_on():
    steps = [a_step(n, [steady(0)], seconds=1.0) for n in range(4)]
    own = of(steps, [10.0, 11.02, 31.0, 32.0])
    assert own.seconds["no_step"] == pytest.approx(23.0 - 4.0)
    assert own.share == pytest.approx(4 * 0.85 / 23.0)
    assert own.lost() == "no step 82.6%, waiting 1.7%, outside 0.9%"


def test_trace_keeps_when_each_step_ended_and_an_older_one_has_no_time(tmp_path):
    steps = [a_step(n, [steady(0), steady(1)], seconds=1.0) for n in range(3)]
    path = write_run(tmp_path, steps) / "trace.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "time": 100.0 + 4 * n}) + "\n" for n, line in enumerate(lines)))
    assert read_run(tmp_path).goodput.seconds["no_step"] == pytest.approx(6.0)
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "time"}) + "\n" for line in lines))
    assert read_run(tmp_path).goodput.share == pytest.approx(0.85)


def test_summary_has_the_goodput_of_the_entire_run_if_it_was_resumed():
    steps = [a_step(n, [steady(0)], seconds=1.0) for n in range(3)]
    assert summarize(steps, {}, ["x"], 1)["goodput"] == pytest.approx(0.85)
    whole = Goodput({**dict.fromkeys(LOST, 0.0), "useful": 1.0, "no_step": 1.0})
    summary = summarize(steps, {}, ["x"], 1, whole)
    assert (summary["goodput"], summary["goodput_seconds"]) == (0.5, whole.seconds)


def test_run_without_a_known_time_has_none():
    own = of([replace(a_step(0, [steady(0)]), seconds=math.nan)])
    assert math.isnan(own.share)
    assert own.lost() == ""
