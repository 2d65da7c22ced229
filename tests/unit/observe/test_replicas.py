"""A row of a sharded model's run is of a replica, and the rank that made it late is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import a_rank, a_step, content_of, write_run

from straggle import StepReport
from straggle.advise.answer import answer
from straggle.commands.result import finish
from straggle.observe.console import LastSteps
from straggle.observe.numbers.reader import Trace
from straggle.observe.numbers.registry import summarize
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.numbers.run import run_of
from straggle.observe.page.page import write_report
from straggle.policies.what_if.ddp_time import DdpStep


def a_late_step(step: int, slowest: tuple[int, ...] = (0, 3), **rest: object) -> StepReport:
    """Replica 1 of two is late."""
    late = a_rank(1, whole=1, late=True, cause="backward")
    return a_step(step, [a_rank(0), late], slowest_ranks=slowest, **rest)


def a_run(num_steps: int = 20) -> list[StepReport]:
    """In one step of five it is rank 2 that makes replica 1 late."""
    return [a_late_step(step, (step % 2, 2 if step % 5 == 0 else 3)) for step in range(num_steps)]


MADE_LATE = "(rank 3 made it late)"


def test_replica_is_named_with_the_rank_that_made_it_late_and_several_are_counted() -> None:
    of = Replicas.of(a_run())
    assert (of.row, of.rows) == ("replica", "replicas")
    assert of.who(1) == f"replica 1 {MADE_LATE}"
    assert of.who(0) == "replica 0 (rank 0 was its slowest)"
    assert of.who(7) == "replica 7"
    assert of.all_of([1]) == of.who(1)
    assert of.all_of([1, 0]) == "replicas 0 and 1"


def test_ranks_are_named_alone_if_each_has_a_copy() -> None:
    alone = Replicas.of(dataclasses.replace(report, slowest_ranks=()) for report in a_run())
    assert (alone.row, alone.rows, alone.who(1), alone.all_of([2, 1])) == ("rank", "ranks", "rank 1", "ranks 1 and 2")


def test_steps_in_which_a_replica_was_not_late_do_not_say_who_made_it_late() -> None:
    calm = [a_step(step, [a_rank(0), a_rank(1)], slowest_ranks=(0, 2)) for step in range(9)]
    assert Replicas.of([*calm, a_late_step(9)]).who(1) == f"replica 1 {MADE_LATE}"
    assert Replicas.of(calm).who(1) == "replica 1 (rank 2 was its slowest)"


def test_replica_that_waited_for_none_of_its_ranks_is_named_alone() -> None:
    assert Replicas.of([a_late_step(0, (-1, -1))]).who(1) == "replica 1"


def test_live_line_names_the_rank_that_made_a_replica_late() -> None:
    last = LastSteps(4)
    last.add(a_late_step(0), DdpStep(1.0, 1, ()))
    assert last.words() == f"replica 1 {MADE_LATE} was stopped in 1 of 1 steps"


def test_trace_has_the_ranks_that_were_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    assert [report.slowest_ranks for report in Trace(tmp_path / "trace.jsonl").reports()] == [
        report.slowest_ranks for report in a_run()
    ]


def test_page_speaks_of_replicas_and_counts_who_made_them_late(tmp_path: Path) -> None:
    write_run(tmp_path, a_run())
    text = write_report(tmp_path).read_text()
    assert "rank 3 16, rank 2 4" in text
    assert f"Replica 1 {MADE_LATE} was late" in text
    assert '<th scope="col">replica</th>' in text
    assert "Replicas by steps: 20 times that a replica was late" in text
    assert "20 steps of 2 replicas" in text
    assert "times that a replica was late" in text
    assert "Each cell is a replica in a step" in text
    assert "replica 1: 0.0% came in" in text  # what a cell of a figure says
    assert content_of(tmp_path / "report.html")


def test_page_of_ranks_has_no_word_of_replicas(tmp_path: Path) -> None:
    write_run(tmp_path, [dataclasses.replace(report, slowest_ranks=()) for report in a_run()])
    text = write_report(tmp_path).read_text()
    assert '<th scope="col">rank</th>' in text
    assert "made late by" not in text
    assert "A replica is" not in text


def test_summary_has_the_ranks_that_made_a_replica_late() -> None:
    summary = summarize(a_run(), {"loss": 1.0}, ["same"], 8)
    assert json.loads(json.dumps(summary))["made_late_by"] == [{}, {"2": 4, "3": 16}]
    alone = [dataclasses.replace(report, slowest_ranks=()) for report in a_run()]
    assert summarize(alone, {"loss": 1.0}, ["same"], 8)["made_late_by"] is None


def test_table_at_the_end_names_the_replica_and_its_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job: Any = SimpleNamespace(samples_per_step=8, ranks_per_replica=2, rebalance=None)
    finish(job, tmp_path, a_run(), {"loss": 1.0}, ["same"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"(replica 1 {MADE_LATE}: 80.4%)" in out
    assert "times that a replica was late" in out
    assert "parameters on all ranks" in out
    assert json.loads((tmp_path / "summary.json").read_text())["dropped_samples_per_rank"] == [0, 257]


def test_advice_is_about_replicas_and_deals_out_no_samples(tmp_path: Path) -> None:
    slow = a_rank(1, whole=2, pace=4.0, forward_s=0.2, backward_s=0.8)
    write_run(tmp_path, [a_step(step, [a_rank(0), slow], slowest_ranks=(0, 3)) for step in range(60)])
    text = str(answer(tmp_path))
    assert f"Replica 1 {MADE_LATE} is always slow" in text
    assert "steps of 2 replicas" in text
    assert "DealtLoader" not in text
    assert "by_speed" not in text


def test_run_has_its_replicas() -> None:
    assert run_of(a_run()).replicas.row == "replica"
