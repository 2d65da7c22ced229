"""The numbers of runs in which anything may be, against plain sums over their reports: whatever shows them agrees."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from pages import STAGES, a_rank, a_step, content_of, write_run

from straggle import RankReport, StepReport
from straggle.commands.result import deeds, finish, mean_shares
from straggle.observe.findings import advise, headline
from straggle.observe.numbers.registry import summarize
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.numbers.run import run_of
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.page.page import write_report

SAMPLES = 8  # of a rank in a step of weight 1


def drawn(seed: int) -> list[StepReport]:
    """Ranks that are absent, without data, late, stood in for or have bad numbers, with or without a pool, resumed."""
    chance = random.Random(seed)
    num_ranks, has_pool = chance.randrange(1, 5), chance.random() < 0.3
    first, never = chance.choice([0, 0, 700]), chance.choice([None, None, 0, num_ranks - 1])
    away = {name: chance.choice([0.0, 0.0, 0.2, 0.6]) for name in ("absent", "idle")}
    return [
        _step(chance, first + number, num_ranks, has_pool=has_pool, away=away, never=never)
        for number in range(chance.randrange(2, 25))
    ]


def _step(
    chance: random.Random, step: int, num_ranks: int, *, has_pool: bool, away: dict[str, float], never: int | None
) -> StepReport:
    ranks = [_rank(chance, rank, has_pool=has_pool, away=away, never=never) for rank in range(num_ranks)]
    bad = chance.random() < 0.1
    rest: dict[str, Any] = {"skipped": bad and all(rank.nonfinite for rank in ranks), "seconds": 1.0}
    if has_pool:  # some of it is lost with a rank that is gone
        given = math.fsum(rank.weight for rank in ranks if there(rank))
        rest |= {"pool_parts": 16, "pool_weight": given + chance.choice([0.0, 0.0, 2.0]) or 16.0}
    return a_step(step, ranks, **rest)


def _rank(
    chance: random.Random, number: int, *, has_pool: bool, away: dict[str, float], never: int | None
) -> RankReport:
    if number == never or chance.random() < away["absent"]:  # the others write its row
        nothing = {"absent": True, "late": False, "cause": None, "compute_s": math.nan, "wait_s": 0.0}
        return a_rank(number, whole=0, **nothing)
    if chance.random() < away["idle"]:
        return a_rank(number, whole=0, idle=True, compute_s=math.nan)
    whole = chance.choice([5, 5, 5, 3, 0])
    words: dict[str, Any] = {"weight": float(chance.choice([1, 2, 3])), "nonfinite": chance.choice([0, 0, 0, 2])}
    if has_pool:
        words["weight"] = float(chance.randrange(0 if whole == 0 else 1, 6))
        words["parts"] = int(words["weight"])
    return a_rank(number, whole=whole, stood_in=whole == 0, **words)


def there(rank: RankReport) -> bool:
    return not (rank.absent or rank.idle)


def of_each(reports: Sequence[StepReport], of: Callable[[list[RankReport]], Any]) -> list[Any]:
    """``of`` the rows of each rank in which it had data."""
    rows = zip(*(report.ranks for report in reports), strict=True)
    return [of([rank for rank in own if there(rank)]) for own in rows]


def dropped_of(reports: Sequence[StepReport]) -> list[float | None]:
    """By rank; of a pool, what it had drawn counts, as a part of that pool."""
    found = []
    for number in range(len(reports[0].ranks)):
        had = gave = 0.0
        for report in reports:
            rank, num_there = report.ranks[number], sum(map(there, report.ranks))
            if there(rank):
                part = num_there * rank.weight / report.pool_weight if report.pool_weight else 1.0
                had, gave = had + part, gave + part * rank.reach
        found.append(1 - gave / had if had else None)
    return found


def or_none(values: list[float]) -> float | None:
    return fmean(values) if values else None


@pytest.mark.parametrize("seed", range(150))
def test_summary_is_what_its_reports_add_up_to(seed: int) -> None:
    reports = drawn(seed)
    summary = summarize(reports, {"loss": 1.0}, ["same"], SAMPLES)
    json.dumps(summary, allow_nan=False)
    assert summary["steps"] == reports[-1].step + 1
    assert summary["dropped_share"] == pytest.approx(fmean(report.dropped_share for report in reports))
    assert summary["dropped_share_per_rank"] == pytest.approx(dropped_of(reports))
    for name, of in {
        "steps_per_rank": len,
        "late_steps_per_rank": lambda own: sum(rank.late for rank in own),
        "stood_in_steps_per_rank": lambda own: sum(rank.stood_in for rank in own),
        "nonfinite_steps_per_rank": lambda own: sum(rank.nonfinite > 0 for rank in own),
        "weight_per_rank": lambda own: or_none([rank.weight for rank in own]),
        "dropped_samples_per_rank": lambda own: round(sum((1 - rank.reach) * rank.weight * SAMPLES for rank in own)),
    }.items():
        assert summary[name] == pytest.approx(of_each(reports, of)), name
    absent = [sum(report.ranks[rank].absent for report in reports) for rank in range(len(reports[0].ranks))]
    assert summary["absent_steps_per_rank"] == absent


@pytest.mark.parametrize("seed", range(150))
def test_what_is_missing_of_the_stages_is_what_is_missing_of_the_model(seed: int) -> None:
    """Of the steps with this plan, which is made after the first, and in which a rank had data."""
    reports = drawn(seed)
    run = run_of(reports)
    known = [report for report in reports[1:] if any(map(there, report.ranks))]
    if any(report.pool_weight and not any(rank.weight for rank in report.ranks if there(rank)) for report in known):
        return
    numel = [stage.numel for stage in STAGES]
    missing = math.fsum(of * (1 - own) for of, own in zip(numel, numbers_of(run).stage_share, strict=True)) / sum(numel)
    if known:
        assert missing == pytest.approx(fmean(report.dropped_share for report in known))
    else:
        assert math.isnan(missing)


def test_stages_of_one_name_are_told_apart() -> None:
    stages = tuple(dataclasses.replace(stage, name="head") for stage in STAGES)
    reports = [a_step(step, [a_rank(0), a_rank(1, whole=2)], stages=stages) for step in range(4)]
    dropped = summarize(reports, {}, ["same"], 1)["dropped_share_per_stage"]
    assert dropped == {"head": 0.0, "head#2": 0.0, "head#3": 0.5, "head#4": 0.5, "head#5": 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_run_and_its_page_say_all_that_is_missing(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = drawn(seed)
    job: Any = SimpleNamespace(samples_per_step=SAMPLES, ranks_per_replica=1, rebalance=None)
    finish(job, write_run(tmp_path, reports), reports, {"loss": 1.0}, ["same"])
    out = " ".join(capsys.readouterr().out.split())
    first, *_ = out.split("Cut: ")
    assert "nan" not in out
    assert "None" not in out
    run = run_of(reports)
    values, said = (
        content_of(write_report(tmp_path)).values,
        [*advise(run, numbers_of(run)), headline(run, numbers_of(run))],
    )
    rows = list(zip(*(report.ranks for report in reports), strict=True))
    all_bad = sum(any(rank.nonfinite for rank in own) for own in rows)
    all_late = sum(any(rank.late for rank in own) for own in rows)
    all_absent = sum(any(rank.absent for rank in own) for own in rows)
    assert ("so were those of 1 more ranks" in first) == (all_bad > 3)
    assert ("1 more ranks were absent in some" in first) == (all_absent > 3)
    for number, own in enumerate(rows):
        if absent := sum(rank.absent for rank in own):
            words = f"rank {number} was absent in {absent} of {len(reports)} steps"
            assert words in first or all_absent > 3
            assert any(f"rank {number} was a" in sentence.lower() for sentence in said) or all_absent > 3
            assert "no gradient was dropped." not in first
        if bad := sum(rank.nonfinite > 0 for rank in own):
            words = f"rank {number} were not finite in {bad} of its {sum(map(there, own))} steps"
            assert words in first or all_bad > 3
            assert any(f"Rank {number} had gradients that were not finite" in sentence for sentence in said)
        if late := sum(rank.late for rank in own):
            words = f"rank {number} was late in {late} of {sum(map(there, own))} steps"
            assert words in out or all_late > 3
            assert values[f"ranks.{number}.late"] == [late]
    if reports[0].step:
        assert f"{reports[-1].step + 1} steps, and the numbers of the last {len(reports)}" in out
    of = sum(map(there, (rank for report in reports for rank in report.ranks)))
    assert f"times that a rank was late │ {sum(len(report.late_ranks) for report in reports)} of {of} │" in out


def test_rank_that_was_absent_is_not_said_to_be_slow() -> None:
    shares = mean_shares([(0, (8, 8, 8, 8)), (20, (11, 11, 10, 0)), (60, (9, 9, 9, 5))], 80)
    counts = {"late_steps_per_rank": [0] * 4, "stood_in_steps_per_rank": [0] * 4, "steps_per_rank": [80, 80, 80, 40]}
    (only,) = deeds({**counts, "dropped_share_per_rank": [0.0] * 4}, shares, Replicas())
    assert only.startswith("Dealt less: rank 3 is slow in most steps, so it had 6.5 of 32 that are dealt out")
    shares = mean_shares([(0, (8, 8, 8, 8)), (20, (11, 11, 10, 0)), (60, (8, 8, 8, 8))], 80)
    assert not list(deeds({**counts, "dropped_share_per_rank": [0.0] * 4}, shares, Replicas()))


@pytest.mark.parametrize("state", ["absent", "idle"])
def test_rank_without_a_part_in_the_last_step_is_not_said_to_have_less_of_it(state: str) -> None:
    def at(step: int, number: int) -> RankReport:
        gone = number == 1 and step > 6
        return a_rank(number, weight=1.0 if gone else 64.0, **({state: True, "whole": 0} if gone else {}))

    run = run_of(a_step(step, [at(step, number) for number in range(3)], dealt=True) for step in range(10))
    dealt = dataclasses.replace(run, config={"rebalance": {"_target_": "by_speed"}})
    assert not any("samples in step" in sentence for sentence in advise(dealt, numbers_of(dealt)))


def test_ranks_that_differed_and_a_store_that_did_not_answer_are_on_the_page(tmp_path: Path) -> None:
    rest: dict[int, dict[str, Any]] = {
        3: {"different_ranks": ()},
        6: {"different_ranks": (1,), "different_tensors": ("head.weight", "norm.bias")},
        9: {"different_ranks": (1,), "ranks_without_store": (0,)},
    }
    reports = [a_step(step, [a_rank(0), a_rank(1)], **rest.get(step, {})) for step in range(12)]
    text = content_of(write_report(write_run(tmp_path, reports))).text
    assert (
        "Rank 1 had other parameters or buffers than most (head.weight, norm.bias), seen in 2 of 12 steps, first in "
        "step 6."
    ) in text
    assert "The job's store did not answer rank 0 in 8% of its steps (1 of 12): no deadline held for it there." in text


def test_rank_that_comes_back_is_not_said_to_have_had_no_data() -> None:
    def at(step: int, number: int, last: int) -> RankReport:
        state = "absent" if step < 6 else "idle"
        return a_rank(number, **({state: True, "whole": 0} if number == 1 and 4 <= step < last else {}))

    for last in (8, 12):
        run = run_of(a_step(step, [at(step, number, last) for number in range(3)]) for step in range(12))
        assert not any("had as much data" in sentence for sentence in advise(run, numbers_of(run)))
    without = run_of(
        a_step(step, [a_rank(0), a_rank(1, **({"idle": True, "whole": 0} if step > 8 else {}))]) for step in range(12)
    )
    assert any("from step 9 on some had none" in sentence for sentence in advise(without, numbers_of(without)))
