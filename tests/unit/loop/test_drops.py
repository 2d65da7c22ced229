"""What a run says of the gradients that it drops: counts, shares and levels, against steps that are written down."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from telemetry_rows import ALL_COLUMNS, row_of
from torch import nn

from straggle import Merge
from straggle.backward.stages import plan_stages
from straggle.loop.drops import FIRST, DropLog, Drops, Names, words_of
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import ScalarNames
from straggle.report import CAUSES
from straggle.source.kept import NONE

PLAN = plan_stages(nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False)), 2)  # 1 and 3 elements
STEP_S, DDP_S = 0.1, 0.4  # a late rank needs four times as long, and has a quarter of its gradients after that time
NAMES = Names("Net", range(4))
USUAL = {"estimated": (0.0, 0.0), "state": 0, "stepped": 1, "kept": NONE, "frozen": NONE}


def whole(**fields):
    """A rank that gave all."""
    own = {"compute_s": STEP_S, "busy_s": STEP_S, "computed": (1.0, 1.0), "stage_s": (STEP_S / 4, STEP_S)}
    return row_of(**{**USUAL, **own, **fields})


def late(cause="backward", **fields):
    """A rank that gave the first of two stages, a quarter of its gradients."""
    own = {"late": True, "cause": CAUSES.index(cause), "computed": (1.0, 0.0), "stage_s": (STEP_S, math.nan)}
    return whole(**{**own, **fields})


def merged(number, *rows, **fields):
    table = Table(torch.stack([row.encode(ALL_COLUMNS) for row in rows]), len(PLAN.stages), ALL_COLUMNS)
    record = StepRecord(number, STEP_S, STEP_S, PLAN, table, ScalarNames({}), **fields)
    return SimpleNamespace(step=number, record=record)


def calm(number, ranks=4):
    """All is given; of the first step it is not known how often optimizers stepped before it, so it is no usual one."""
    return merged(number, *[whole() if number else whole(stepped=math.nan)] * ranks)


def hit(number, *rows):
    """Rank 3 is late, or these ranks are as they are."""
    return merged(number, *(rows or (whole(), whole(), whole(), late())))


def counted(*steps):
    drops = Drops()
    for step in steps:
        drops.add(step)
    return drops


def test_share_is_that_of_the_ranks_elements_over_the_steps_for_which_it_had_data():
    idle = whole(compute_s=math.nan, idle=True, computed=(0.0, 0.0))
    steps = [calm(0), hit(1), hit(2, whole(), whole(), whole(), idle), hit(3), calm(4)]
    drops = counted(*steps)
    assert drops.share(3) == pytest.approx(2 * 0.75 / 4)
    assert (drops.num_steps, drops.num_with_drops, drops.ranks[3].late) == (5, 2, 2)
    reports = [step.record.report.dropped_share * 4 for step in (steps[1], steps[3])]
    assert drops.share(3) == pytest.approx(sum(reports) / 4)  # as the report has it


def test_ddp_is_predicted_for_steps_with_drops_and_others_take_what_they_took():
    drops = counted(calm(0), *map(hit, range(1, 5)), *map(calm, range(5, 8)), hit(8, *[whole(nonfinite=1)] * 4))
    assert drops.mean_s == pytest.approx(STEP_S)
    # in the first of all steps rank 3 was no slower than others, and after it is taken to be as slow as in the median
    first_s = STEP_S + 0.75 * (1 + 4) / 2 * STEP_S
    assert drops.ddp_s == pytest.approx((first_s + 3 * DDP_S + 4 * STEP_S) / 8)


def test_ddp_waits_once_for_a_rank_that_was_stuck_however_many_others_are_late():
    """Of many alike steps some are predicted; the step in which it is back has the time for which it was stuck."""
    nothing = {"computed": (0.0, 0.0), "stage_s": (math.nan, math.nan), "compute_s": math.nan}
    away = [hit(number, whole(), late("data", stood_in=True, **nothing), whole(), late()) for number in range(101, 104)]
    back = hit(104, whole(), late("forward", overrun_s=20.0, **nothing), whole(), late())
    before, after = [calm(0), *map(hit, range(1, 101))], list(map(hit, range(105, 201)))
    without = counted(*before, *[hit(number) for number in range(101, 105)], *after)
    assert counted(*before, *away, back, *after).ddp_s - without.ddp_s == pytest.approx(20.0 / 200, rel=0.02)
    assert without.ddp_s == pytest.approx(DDP_S, rel=0.02)


def test_a_report_in_brief_has_what_the_whole_one_has():
    for step in (calm(0), hit(1), hit(2, late("data", nonfinite=3), whole(idle=True), whole(absent=True), whole())):
        brief, report = step.record.brief(), step.record.report
        for name in ("step", "seconds", "deadline_s", "network_s", "dealt", "pool_weight", "dropped_share"):
            assert getattr(brief, name) == getattr(report, name)
        for own, ours in zip(brief.ranks, report.ranks, strict=True):
            for name in (
                "rank",
                "overrun_s",
                "wait_s",
                "late",
                "stood_in",
                "idle",
                "absent",
                "weight",
                "cost",
                "reach",
            ):
                assert getattr(own, name) == getattr(ours, name)
            assert (own.compute_s, own.cause, own.nonfinite) == (ours.compute_s, ours.cause, ours.nonfinite)
            assert [at for at in own.stage_s if at == at] == [at for at in ours.stage_s if at == at]


NOTHING = {
    "all was given": whole(),
    "no data": whole(compute_s=math.nan, idle=True, computed=(0.0, 0.0)),
    "no part in the step": whole(compute_s=math.nan, absent=True, computed=(0.0, 0.0)),
    "the loop left the step out": whole(cause=CAUSES.index("skipped"), computed=(0.0, 0.0)),
    "late with all that it had": late(computed=(1.0, 1.0)),
    "given back": whole(pool_parts=8, pool_weight=8.0, weight=1.0, put_back=1),
    "not finite, which is warned of": whole(nonfinite=2),
}


@pytest.mark.parametrize("row", NOTHING.values(), ids=NOTHING)
def test_silent_if_nothing_was_dropped(row, caplog):
    caplog.set_level(logging.DEBUG)
    log = said([hit(number, whole(), whole(), whole(), row) for number in range(2 * FIRST)])
    log.close()
    assert caplog.records == []


def said(steps, place=0, every_s=60.0, seconds=0.0, names=NAMES):
    """A log that has seen these steps, each of them so many seconds after the one before."""
    now = [0.0]
    log = DropLog(names, place, every_s, clock=lambda: now[0])
    for step in steps:
        log.drops.add(step)
        if not step.record.table.is_usual:
            log.merged(step)
        now[0] += seconds
    return log


def test_first_line_is_a_warning_and_says_who_was_late_how_often_what_was_dropped_and_what_helps(caplog):
    caplog.set_level(logging.INFO)
    said([calm(0), *map(hit, range(1, FIRST + 3))])
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("straggle", logging.WARNING)
    assert record.getMessage().splitlines() == [
        "straggle, Net: 22 steps of 100 ms (DDP: ~394 ms); dropped gradients: "
        "72% of rank 3's (late 21 times, in backward)",
        "rank 3 gives less than half: deal it less (straggle.Rebalance), wait longer (deadline=), leave it out, or see "
        "straggle watch",
    ]


def levels(caplog):
    return [record.levelname for record in caplog.records]


def test_lines_are_a_minute_apart_and_all_after_the_first_are_no_warnings(caplog):
    caplog.set_level(logging.INFO)
    said([calm(0), *(hit(number) if number % 4 == 0 else calm(number) for number in range(1, 400))], seconds=1.0)
    steps = [int(record.getMessage().split(": ")[1].split()[0]) for record in caplog.records]
    assert levels(caplog) == ["WARNING"] + ["INFO"] * 6
    assert steps == [25 + 60 * number for number in range(7)]


def test_a_minute_in_which_nothing_was_dropped_has_no_line(caplog):
    caplog.set_level(logging.INFO)
    unusual = [
        hit(number, whole(pool_parts=4, pool_weight=4.0), whole(), whole(), whole()) for number in range(41, 400)
    ]
    said([calm(0), *map(hit, range(1, 41)), *unusual], seconds=1.0)
    assert levels(caplog) == ["WARNING", "INFO"]  # the second one has what came after the first


def test_first_line_waits_for_enough_steps_or_for_its_time(caplog):
    said(map(hit, range(1, 7)), seconds=15.0)
    assert levels(caplog) == ["WARNING"]
    caplog.clear()
    said(map(hit, range(1, FIRST)), seconds=1.0)
    assert levels(caplog) == []


@pytest.mark.parametrize(("often", "expected"), [(1, ["WARNING", "WARNING"]), (4, ["WARNING", "INFO"])])
def test_last_line_is_a_warning_if_a_rank_gave_less_than_half(often, expected, caplog):
    caplog.set_level(logging.INFO)
    said([calm(0), *(calm(number) if number % often else hit(number) for number in range(1, 100))]).close()
    assert levels(caplog) == expected
    assert ("less than half" in caplog.records[-1].getMessage()) == (often == 1)


def test_a_run_that_is_short_has_its_first_line_at_its_end(caplog):
    said([calm(0), hit(1)]).close()
    assert levels(caplog) == ["WARNING"]


def test_lowest_rank_that_takes_part_speaks_and_goes_on_as_the_one_before_it(caplog):
    caplog.set_level(logging.INFO)
    absent = whole(compute_s=math.nan, absent=True, computed=(0.0, 0.0))
    there = [calm(0), *map(hit, range(1, 60))]
    without_0 = [hit(number, absent, whole(), whole(), late()) for number in range(60, 150)]
    for place in (1, 2, 3):
        said(there, place, seconds=1.0).close()
    assert caplog.records == []
    for place in (1, 2, 3):
        said([*there, *without_0], place, seconds=1.0)
    assert levels(caplog) == ["INFO", "INFO"]  # rank 1's: the warning, 21 s after the first drop, was said by rank 0


def test_a_rank_that_took_no_part_in_steps_does_not_count_them():
    absent = whole(compute_s=math.nan, absent=True, computed=(0.0, 0.0))
    drops = counted(calm(0), hit(1), *[hit(number, *[absent] * 4) for number in range(2, 9)], hit(9))
    assert (drops.num_steps, drops.share(3)) == (3, pytest.approx(2 * 0.75 / 3))


def test_gradients_that_are_not_finite_are_named_apart():
    bad = [hit(number, whole(), whole(nonfinite=1), whole(), late()) for number in (1, 2)]
    words, is_bad = words_of(counted(*map(calm, range(8)), *bad), NAMES)
    assert words.endswith("dropped gradients: 15% of rank 3's (late 2 times, in backward); not finite: rank 1")
    assert not is_bad


def test_replicas_are_called_so_with_the_rank_that_made_them_late():
    rows = whole(), late("forward")
    steps = [calm(0, 2), *(merged(number, *rows, slowest_ranks=(-1, 3)) for number in (1, 2, 3))]
    words, _ = words_of(counted(*steps), Names("Net", range(2), "replica"))
    assert "56% of replica 1's (late 3 times, in forward, by rank 3)" in words
    assert "replica 1 gives less than half: wait longer (deadline=)" in words  # shards cannot be dealt


def test_ranks_are_named_as_the_job_numbers_them():
    words, _ = words_of(counted(calm(0, 2), merged(1, whole(), late())), Names("Net", [4, 7]))
    assert "of rank 7's" in words


def test_lost_as_another_rank_left_is_dropped_and_no_lateness():
    lost = whole(cause=CAUSES.index("members"), computed=(0.0, 1.0))
    words, _ = words_of(counted(*map(calm, range(9)), hit(9, whole(), lost, whole(), whole())), NAMES)
    assert words.endswith("2.5% of rank 1's (once, as members changed)")


def test_lines_are_short_however_many_ranks_are_late():
    rows = [whole()] + [late() if rank % 3 else late("data", nonfinite=1) for rank in range(1, 64)]
    drops = counted(calm(0, 64), *(merged(number, *rows) for number in range(1, 12_000, 400)))
    words, _ = words_of(drops, Names("Net", range(64)))
    first, second = words.splitlines()
    assert "62 more ranks" in first
    assert "ranks 1, 2, 3 and others give less than half" in second
    assert max(map(len, (first, second))) <= 160


@pytest.mark.parametrize("every_s", [0, -1.0, math.nan, "60", True])
def test_seconds_between_lines_are_positive(every_s):
    with pytest.raises(ValueError, match=r"log_every_s=.*: must be a positive number of seconds, such as 60"):
        Merge(log_every_s=every_s)
    assert Merge(log_every_s=60).log_every_s == 60
    assert Merge(log_every_s=math.inf).log_every_s == math.inf


def away(cause="data", **fields):
    """A rank that was stood in for before it had entered the step."""
    nothing = {"compute_s": math.nan, "computed": (0.0, 0.0), "stage_s": (math.nan, math.nan)}
    return late(cause, stood_in=True, **{**nothing, **fields})


LOADS = "rank 3 missed step after step, because it loaded data for each: write for batch in straggle.LateLoader("


def of_steps(own, max_lag=2):
    """What is said after these rows of rank 3."""
    drops = Drops(max_lag)
    for number, row in enumerate(own):
        drops.add(merged(number, whole(), whole(), whole(), row))
    return words_of(drops, NAMES)[0]


def test_rank_that_loads_data_for_each_step_that_it_missed_is_told_what_to_write():
    assert f"\n{LOADS}model, loader)" in of_steps([whole(), *[away()] * 5])


@pytest.mark.parametrize(
    "own",
    [
        [*[away()] * 4, whole()] * 3,  # it takes part again after twice `max_lag` steps
        [away("forward")] * 12,  # it is stuck in a step
        [late("data")] * 12,  # it has entered them
    ],
    ids=["takes part", "forward", "entered"],
)
def test_rank_that_takes_part_now_and_then_or_is_slow_elsewhere_is_not(own):
    said = of_steps(own)
    assert "LateLoader" not in said
    assert "\nrank 3 gives less than half: deal it less" in said


def test_two_ranks_with_different_remedies_have_a_line_each():
    drops = Drops(2)
    for number in range(6):
        drops.add(merged(number, whole(), whole(), late(computed=(0.0, 0.0)), away()))
    first, second, third = words_of(drops, NAMES)[0].splitlines()
    assert "rank 2's" in first
    assert second.startswith(LOADS)
    assert third.startswith("rank 2 gives less than half: ")
