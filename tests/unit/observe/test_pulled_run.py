"""A run whose ranks drew their micro-batches: who drew how many, and what was dropped, wherever it is reported."""

import dataclasses
import io
import json

import pytest
from pages import a_rank, a_step, content_of, pulled_run, write_run
from rich.console import Console

from straggle.commands.report import report
from straggle.observe.console import LiveView
from straggle.observe.findings import advise
from straggle.observe.numbers.registry import summarize
from straggle.observe.numbers.run import read_run
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.page.page import write_report
from straggle.observe.scalars import StepScalars


def test_numbers_are_of_the_pools(tmp_path):
    numbers = numbers_of(read_run(write_run(tmp_path, pulled_run())))
    drawn = [sum(step.ranks[rank].parts for step in pulled_run()) / 20 for rank in range(4)]
    assert [rank.drawn for rank in numbers.ranks] == pytest.approx(drawn)
    assert [rank.put_back for rank in numbers.ranks] == [0, 0, 0, 3]
    assert (numbers.pool_parts, numbers.not_computed) == (640, 1)
    assert numbers.dropped_share == pytest.approx(1 / 32 / 20)  # not the half of what one rank of four had


def test_page_and_sentences_say_who_drew_and_what_was_lost(tmp_path):
    run = read_run(write_run(tmp_path, pulled_run()))
    said = advise(run, numbers_of(run))
    assert (
        "The ranks drew the micro-batches of a step: rank 3 computed 4.5 of them on average and rank 0 9.2, because "
        "rank 3 had less time for them. 1 of 640 micro-batches were not computed."
    ) in said
    assert any(sentence.startswith("Rank 3 was stuck with micro-batches that it had drawn") for sentence in said)
    assert not any("had as much data" in sentence for sentence in said)  # nothing was left for it, once
    content = content_of(write_report(tmp_path))
    assert content.values["ranks.3.drawn"] == [pytest.approx((18 * 5 + 1) / 20)]
    assert content.values["not_computed"] == [1]
    assert "4.5, 3 put back" in content.text
    assert "Drew is how many micro-batches" in content.text


def test_the_command_that_writes_the_page_says_it_too(tmp_path, capsys):
    assert report([str(write_run(tmp_path, pulled_run()))]) == 0
    path, *said = capsys.readouterr().out.splitlines()
    assert path.startswith(f"report: {tmp_path}")
    assert said[0].startswith(f"{tmp_path.name}: The ranks drew the micro-batches of a step: rank 3 computed 4.5")


def test_page_of_a_run_without_pools_says_nothing_of_them(tmp_path):
    content = content_of(write_report(write_run(tmp_path, [a_step(step, [a_rank(0), a_rank(1)]) for step in range(5)])))
    assert "micro-batches" not in content.text.split("Steps in detail")[0].lower().replace("several micro-batches", "")
    assert "ranks.0.drawn" not in content.values


def test_summary_has_them_and_null_without_pools():
    summary = summarize(list(pulled_run()), {"loss": 1.0}, ["a"] * 4, 1)
    assert summary["drawn_per_rank"][3] == pytest.approx(4.55)
    assert summary["put_back_per_rank"] == [0, 0, 0, 3]
    plain = summarize([a_step(step, [a_rank(0)]) for step in range(3)], {"loss": 1.0}, ["a"], 1)
    assert plain["drawn_per_rank"] is plain["put_back_per_rank"] is None
    json.dumps([summary, plain], allow_nan=False)


def test_scalars_are_means_over_the_steps_that_had_a_pool():
    scalars = StepScalars()
    first, second = list(pulled_run())[11:13]
    for step in (first, second, a_step(13, [a_rank(0)])):
        scalars.add(step)
    taken = scalars.take()
    assert (taken["straggle/fewest_drawn"], taken["straggle/most_drawn"]) == ((5 + 0) / 2, (9 + 11) / 2)


@pytest.mark.parametrize(
    ("num_ranks", "attempts", "words"),
    [(4, 1, "drew 9,9,9,5 of 32\n"), (4, 2, "drew 9,9,9,5 of 32, attempt 2"), (12, 1, "drew 5 to 9")],
)
def test_live_line_has_them(num_ranks, attempts, words):
    text = io.StringIO()
    report = next(iter(pulled_run()))
    ranks = [dataclasses.replace(report.ranks[number % 4], rank=number) for number in range(num_ranks)]
    with LiveView(1, console=Console(file=text, width=300)) as view:
        view.show(dataclasses.replace(report, ranks=tuple(ranks), pool_attempts=attempts))
    assert words in text.getvalue()
