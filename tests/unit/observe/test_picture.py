"""The picture at a page's head: its lanes hold the run's time, each second once; and the sentence above it."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import ODD, a_rank, a_step, content_of, pulled_run, slow_run, write_run

from straggle import StepReport
from straggle.observe.findings import headline
from straggle.observe.numbers.run import Run, run_of
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.page.page import write_report
from straggle.observe.page.picture import PARTS, SHORT, WIDTH, Picture, is_short, picture
from straggle.observe.perfetto import slices_of
from straggle.report import MembersReport

MANY = 40


def long_one(reports: list[StepReport]) -> list[StepReport]:
    """The same steps again and again, until the run is not short."""
    return [dataclasses.replace(reports[at % len(reports)], step=at) for at in range(max(MANY, len(reports)))]


def members_run(num_steps: int = MANY, left: int = 10, back: int = 25) -> list[StepReport]:
    """Rank 1 of three is absent from step ``left`` to ``back``."""
    nothing = {"absent": True, "weight": 0.0}
    return [
        a_step(step, [a_rank(rank, **(nothing if rank == 1 and left <= step < back else {})) for rank in range(3)])
        for step in range(num_steps)
    ]


RUNS = {name: long_one(reports) for name, reports in ODD.items() if name != "no times"}
RUNS |= {"slow": list(slow_run()), "pulled": list(pulled_run(MANY)), "members": members_run()}
RUNS["made again"] = [
    dataclasses.replace(report, again_s=0.4 * (at % 3 == 1), pool_attempts=1 + (at % 3 == 1), network_s=0.04)
    for at, report in enumerate(members_run())
]
RUNS["network"] = [dataclasses.replace(report, network_s=0.04) for report in slow_run()]


def drawn(run: Run, reports: list[StepReport] | None = None) -> Picture:
    own = picture(run, reports if is_short(run) and reports is not None else ())
    assert own is not None
    return own


def bars(path: str) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of each bar."""
    found = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H\1z", path)
    assert "".join(f"M{a} {b}H{c}V{d}H{a}z" for a, b, c, d in found) == path
    return [(float(a), float(c), float(b), float(d)) for a, b, c, d in found]


def areas(own: Picture, lane: int) -> dict[str, float]:
    """The part of a lane that each part of time has: 1 is all of it."""
    whole = own.width * own.height
    paths = own.lanes[lane].paths
    return {
        part: sum((right - left) * (low - high) for left, right, high, low in bars(path)) / whole
        for part, path in paths.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_lane_of_a_long_run_holds_each_second_of_its_rank_once(name: str) -> None:
    run = run_of(RUNS[name])
    own = drawn(run)
    assert not is_short(run)
    assert (own.width, len(own.lanes)) == (run.num_steps, run.num_ranks)
    for rank in range(run.num_ranks):
        cells = Counter(
            (x, y)
            for path in own.lanes[rank].paths.values()
            for left, right, top, bottom in bars(path)
            for x in range(int(left), int(right))
            for y in range(int(top), int(bottom))
        )
        there = int(np.isfinite(run.uses[:, :, rank]).all(axis=0).sum())
        assert set(cells.values()) == {1}, "no two parts lie on each other"
        assert len(cells) == there * own.height, "and none of its time is left out"


@pytest.mark.parametrize("name", RUNS)
def test_parts_of_the_picture_are_the_run_s_goodput(name: str) -> None:
    """To half a pixel; the merge is of the useful time."""
    run = run_of(RUNS[name])
    own = drawn(run)
    there = np.isfinite(run.uses).all(axis=(0, 1))
    of_all: Counter[str] = Counter()
    for rank in np.flatnonzero(there).tolist():
        of_all.update(areas(own, rank))
    seconds = run.goodput.seconds
    if there.all():
        total = math.fsum(seconds.values())
        for use, parts in {"useful": ("work", "merge"), **{use: (use,) for use in PARTS if use in seconds}}.items():
            share = sum(of_all[part] for part in parts) / run.num_ranks
            assert share == pytest.approx(seconds[use] / total, abs=1.5 / own.height), use


@pytest.mark.parametrize("name", ["members", "made again"])
def test_parts_of_a_short_run_are_its_goodput_too(name: str) -> None:
    of_name = RUNS[name][SHORT // 4 : SHORT // 4 + SHORT]  # in which a rank leaves
    reports = [dataclasses.replace(own, seconds=1.0, network_s=0.32) for own in of_name]  # the merge is what is left
    run = run_of(reports)
    own = drawn(run, reports)
    assert is_short(run)
    of_all = sum((Counter(areas(own, rank)) for rank in range(run.num_ranks)), Counter[str]())
    total = math.fsum(run.goodput.seconds.values())
    for use in ("again", "members", "waiting", "dropped"):
        expected = run.goodput.seconds[use] / total
        assert of_all[use] / run.num_ranks == pytest.approx(expected, abs=0.005), use
    assert of_all["members"] > 0
    assert (of_all["again"] > 0) == (name == "made again")


def test_dropped_work_is_on_the_lane_of_the_rank_that_was_late_and_waiting_on_the_others() -> None:
    own = drawn(run_of(slow_run()))
    assert [areas(own, rank).get("dropped", 0.0) > 0.3 for rank in range(4)] == [False, False, False, True]
    assert "work that was dropped, or stuck" in own.lanes[3].words


def test_merge_and_absence_have_their_own_colours() -> None:
    merged, without = drawn(run_of(RUNS["network"])), drawn(run_of(RUNS["slow"]))
    assert "merge" in merged.parts
    assert "merge" not in without.parts
    absent = drawn(run_of(members_run()))
    # all of its steps in which it was absent, and what of the next the change took
    assert areas(absent, 1)["members"] == pytest.approx(15 / MANY, abs=0.02)


@pytest.mark.parametrize("num_steps", [1, 2, SHORT])
@pytest.mark.parametrize("name", RUNS)
def test_short_run_is_drawn_in_the_order_in_which_it_was(name: str, num_steps: int) -> None:
    reports = RUNS[name][:num_steps]
    own = drawn(run_of(reports), reports)
    seconds = math.fsum(report.seconds for report in reports)
    assert own.width == WIDTH
    for lane in range(len(own.lanes)):
        of_rank = [report for report in reports if lane < len(report.ranks)]
        spans = sorted(bar[:2] for path in own.lanes[lane].paths.values() for bar in bars(path))
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        covered = sum(right - left for left, right in spans) / WIDTH
        assert covered == pytest.approx(sum(report.seconds for report in of_rank) / seconds, abs=0.005 * num_steps)
        waited = sum(s for one in of_rank for part, s in slices_of(one.ranks[lane], one.seconds) if part == "wait")
        if not any(one.ranks[lane].idle for one in of_rank):
            assert areas(own, lane).get("waiting", 0) == pytest.approx(waited / seconds, abs=0.005 * num_steps)


def repeated(num_steps: int, num_ranks: int) -> Run:
    """A run of that size whose parts vary from step to step, without as many reports."""
    few = run_of(slow_run(8, 4))
    chance = np.random.default_rng(0)

    def tiled(values: np.ndarray) -> np.ndarray:
        if values.ndim == 1:
            return np.resize(values, num_steps)
        return np.resize(values, (num_steps, num_ranks))

    changed: dict[str, Any] = {name: tiled(getattr(few, name)) for name in ("seconds", "network_s", "ddp_s")}
    uses = chance.exponential(size=(few.uses.shape[0], num_steps, num_ranks)).astype(np.float32)
    ranks = {name: tiled(values) for name, values in few.ranks.items()}
    return dataclasses.replace(few, step=np.arange(float(num_steps)), uses=uses, ranks=ranks, **changed)


@pytest.mark.parametrize(("num_steps", "num_ranks"), [(10_000, 4), (10_000, 64), (300, 64), (200, 500)])
def test_picture_of_a_long_run_of_many_ranks_is_small(num_steps: int, num_ranks: int) -> None:
    own = drawn(repeated(num_steps, num_ranks))
    assert len(own.lanes) <= 96
    assert own.width <= 300
    assert len(own.lanes) * own.height <= 650
    assert sum(len(path) for lane in own.lanes for path in lane.paths.values()) < 900_000
    assert {"work", "waiting", "dropped"} <= own.parts.keys()
    assert own.ticks[0].at == 0.0
    assert own.ticks[-1].text == f"{num_steps - 1:,}"


def test_mark_stands_where_members_changed_and_says_what() -> None:
    run = run_of(members_run())
    assert [(mark.at, mark.text) for mark in drawn(run).changes] == [
        (100 * 10 / MANY, "step 10: rank 1 left"),
        (100 * 25 / MANY, "step 25: rank 1 came back"),
    ]
    change = MembersReport(1, 12, (0, 2), 3, left={1: "no sign of life"})
    told = dataclasses.replace(run, changes=((1.0, change), (2.0, dataclasses.replace(change, step=MANY + 5))))
    (mark,) = drawn(told).changes
    assert (mark.at, mark.text) == (100 * 12 / MANY, f"step 12: {change.what}")


def test_changes_without_end_have_marks_that_can_be_told_apart() -> None:
    change = MembersReport(1, 0, (0, 2), 3, left={1: "no sign of life"})
    run = run_of(members_run())
    many = tuple((float(at), dataclasses.replace(change, step=at % MANY)) for at in range(1000))
    assert len(drawn(dataclasses.replace(run, changes=many)).changes) <= 60


def test_run_without_times_has_no_picture(tmp_path: Path) -> None:
    assert picture(run_of(ODD["no times"])) is None
    assert 'class="picture"' not in write_report(write_run(tmp_path, ODD["no times"])).read_text()


def test_page_opens_with_the_sentence_and_the_picture_before_any_number(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, slow_run()))
    text = path.read_text()
    places = [text.index(part) for part in ('class="sentence"', 'class="picture"', 'id="headline"', 'class="chart"')]
    assert places == sorted(places)
    assert "Rank 3 was slow" in content_of(path).text
    both = write_report(write_run(tmp_path / "a", slow_run()), compare=write_run(tmp_path / "b", members_run()))
    assert both.read_text().count('class="picture"') == 2


def steps_of(ranks: Any, num_steps: int = 30, **rest: Any) -> list[StepReport]:
    return [a_step(step, ranks(step), **rest) for step in range(num_steps)]


def late_by_chance(step: int) -> list[Any]:
    chance = random.Random(step)
    return [a_rank(rank, whole=3 if chance.random() < 0.1 else 5) for rank in range(6)]


SENTENCES = {
    "a slow rank": (
        steps_of(lambda _: [a_rank(0), a_rank(1), a_rank(2, whole=3, pace=2.0)]),
        r"Rank 2 was slow; straggle dropped 13\.\d% of the gradients, and took \d\.\d\d of DDP's time\.",
    ),
    "two of five": (
        steps_of(lambda _: [a_rank(rank, whole=3 if rank > 2 else 5) for rank in range(5)]),
        r"Ranks 3 and 4 were slow; straggle dropped .*",
    ),
    "no one late": (
        steps_of(lambda _: [a_rank(0), a_rank(1)]),
        r"No rank was slow; straggle dropped none of the gradients, and took 1\.\d\d of DDP's time\.",
    ),
    "late now and then": (
        steps_of(lambda step: [a_rank(0), a_rank(1), a_rank(2, whole=2 if step % 5 == 0 else 5)]),
        r"Rank 2 was late in 20% of its steps; straggle dropped .*",
    ),
    "all late now and then": (steps_of(late_by_chance, 60), r"6 ranks were late at times; straggle dropped .*"),
    "all late always": (ODD["nobody in time"], r"Ranks 0 and 1 were late often; straggle dropped .*"),
    "no deadline": (
        steps_of(lambda _: [a_rank(0, wait_s=0.3), a_rank(1), a_rank(2, pace=2.0)], deadline_s=math.inf),
        r"Rank 2 was slow, and all ranks were waited for\. \d+% of the time was waiting\.",
    ),
    "absent": (
        members_run(),
        r"No rank was slow; rank 1 was away for 38% of its steps \(15 of 40\); straggle dropped none of the .*",
    ),
    "one rank": (ODD["one rank"], r"One rank: there was nobody to wait for\."),
    "no times": (ODD["no times"], r"Ranks 0, 1 and 2 were late often; straggle dropped 80\.\d% of the gradients\."),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_says_who_was_slow_what_was_dropped_and_what_that_brought(name: str) -> None:
    reports, expected = SENTENCES[name]
    numbers = numbers_of(run := run_of(reports))
    own = headline(run, numbers)
    assert re.fullmatch(expected, own), own
    for number in re.findall(r"took ([\d.]+) of DDP", own):
        assert float(number) == pytest.approx(1 - numbers.saved_share, abs=0.006)
