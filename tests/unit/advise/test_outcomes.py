"""What is advised in jobs that were recorded, beside what then came: place x kind x number of slow ranks.

`python benchmarks/outcomes.py tests/unit/advise/outcomes` has recorded them.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
from recorded_jobs import JOBS, what_came, write_watched

from straggle.advise.answer import Answer, answer
from straggle.advise.verdict import Choice

pytestmark = pytest.mark.slow
WIDTH = 90


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    @cache
    def of(job: str) -> Answer:
        return answer(write_watched(job, tmp_path_factory.mktemp(job)))

    return of


def method_of(choice: Choice) -> str:
    return "DealtLoader" if choice.kind == "deal" else choice.gain.code.replace("straggle.", "")


def test_all_places_kinds_and_numbers_were_recorded():
    assert len(JOBS) == 24


@pytest.mark.parametrize("job", JOBS)
def test_what_is_advised_is_within_its_own_range_of_what_then_came(job, advised):
    judged = advised(job).verdict
    if judged.chosen is not None:
        saved, dropped = judged.chosen.gain.saved, judged.chosen.gain.dropped
        came = what_came(job)[method_of(judged.chosen)]
        assert saved.low <= came.saved <= saved.high
        assert dropped.low - 0.01 <= came.dropped <= dropped.high + 0.05


def test_nine_of_ten_rows_are_within_their_own_range_of_what_came(advised):
    within = [
        one.gain.saved.low <= came[method].saved <= one.gain.saved.high
        for job in JOBS
        for came in [what_came(job)]
        for one in advised(job).verdict.choices
        if (method := method_of(one)) in came
    ]
    assert len(within) > 4 * len(JOBS)
    assert sum(within) >= 0.9 * len(within)


@pytest.mark.parametrize("job", JOBS)
def test_answer_begins_with_what_to_do_and_says_one_thing_of_each_rank(job, advised):
    found = advised(job)
    lines = str(found).splitlines()
    assert lines[0].startswith("Do this: ")
    assert max(len(line) for line in lines if "/" not in line) <= WIDTH
    said = [
        re.findall(rf"Rank {rank.rank} (is always slow|is slow at times|was slow)", str(found))
        for rank in found.slowness.ranks
    ]
    assert [len(own) for own in said] == [1] * len(said)
    if "always" in job:  # the machine may have slowed another one down for a while
        assert found.slowness.ranks[0].rank in (1, 3)
    if found.verdict.chosen is not None:
        row = method_of(found.verdict.chosen)
        assert [line for line in lines if line.startswith(row)], row


@pytest.mark.parametrize("job", JOBS)
def test_no_row_breaks_its_own_promise(job, advised):
    for one in advised(job).verdict.choices:
        if "share=0.05" in one.gain.code:
            assert one.gain.dropped.value <= one.gain.dropped.high <= 0.05
        if one.kind != "deadline":
            assert one.gain.dropped.high == 0
