"""The page of a run: its numbers against the trace, odd traces, the command, and a real browser where there is one."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from pages import ODD, STAGES, a_rank, a_step, content_of, slow_run, write_run

from straggle import StepReport
from straggle.commands import result
from straggle.commands.report import arguments
from straggle.observe.findings import advise
from straggle.observe.numbers.reader import Trace
from straggle.observe.numbers.registry import summarize
from straggle.observe.numbers.replicas import Replicas
from straggle.observe.numbers.run import read_run, read_steps
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.page.figures import timeline
from straggle.observe.page.page import write_page, write_report
from straggle.observe.trace import read_trace
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import MembersReport

# -- numbers


def test_run_ends_with_what_it_gained_over_ddp_and_what_was_dropped_for_it() -> None:
    numbers = {"step_seconds_mean": 0.18, "ddp_seconds_mean": 0.3, "dropped_share": 0.02, "skipped": 0}
    numbers |= {name: [0, 0] for name in ("steps_per_rank", "absent_steps_per_rank", "nonfinite_steps_per_rank")}
    assert result.outcome({**numbers, "dropped_share_per_rank": [0.0, 0.04]}, Replicas(), 20) == (
        "A step took 0.60 of its time under DDP (180 of 300 ms, means); for that 2.0% of the gradients were dropped "
        "(rank 1: 4.0%)."
    )
    nothing = {**numbers, "dropped_share": 0.0, "dropped_share_per_rank": [0.0, 0.0]}
    assert result.outcome(nothing, Replicas(), 20).endswith("and no gradient was dropped.")
    away = {**nothing, "absent_steps_per_rank": [0, 4], "nonfinite_steps_per_rank": [3, 0], "steps_per_rank": [20, 16]}
    assert result.outcome({**away, "skipped": 1}, Replicas(), 20).endswith(
        "and no gradient was dropped of ranks that were there; rank 1 was absent in 4 of 20 steps; gradients of rank 0 "
        "were not finite in 3 of its 20 steps, and left out; 1 of 20 steps changed nothing, as no rank had finite "
        "gradients."
    )


def test_run_without_data_ends_without_a_share_of_ddp() -> None:
    summary = summarize([a_step(step, [a_rank(0, idle=True), a_rank(1, idle=True)]) for step in range(5)], {}, ["x"], 1)
    assert result.outcome(summary, Replicas(), 5).startswith("A step took 620 ms in the mean, and no rank had data")


def test_numbers_shown_are_those_of_the_trace(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    shown = content_of(write_report(tmp_path)).values
    records = list(read_trace(tmp_path / "trace.jsonl"))
    seconds = [record["seconds"] for record in records]
    assert shown["step_seconds_median"] == [pytest.approx(median(seconds[4:]))]
    assert shown["step_seconds_mean"] == [pytest.approx(fmean(seconds[4:]))]
    assert shown["step_seconds_max"] == [pytest.approx(max(seconds[4:]))]
    prediction = DdpPrediction()
    waited = [prediction.add(step).seconds for step in slow_run()]
    assert shown["ddp_seconds_mean"] == [pytest.approx(fmean(waited[4:]))]
    assert shown["saved_share"] == [pytest.approx(1 - fmean(seconds[4:]) / fmean(waited[4:]))]
    assert shown["dropped_share"] == [pytest.approx(1 - fmean(r["reach"] for x in records for r in x["ranks"]))]
    assert shown["late"] == [45]
    assert shown["stood_in"] == [5]
    assert shown["loss"] == [pytest.approx(fmean(record["scalars"]["loss"] for record in records[-20:]))]
    for rank in range(4):
        of = [record["ranks"][rank] for record in records]
        assert shown[f"ranks.{rank}.late"] == [sum(own["late"] for own in of)]
        assert shown[f"ranks.{rank}.stood_in"] == [sum(own["stood_in"] for own in of)]
        assert shown[f"ranks.{rank}.reach"] == [pytest.approx(fmean(own["reach"] for own in of))]
        known = [own["compute_s"] for own in of if own["compute_s"] is not None]
        assert shown[f"ranks.{rank}.compute_s"] == [pytest.approx(median(known))]
    for stage in range(len(STAGES)):  # planned again after the first step, which is left out
        share = fmean(own["stages"][stage] for record in records[1:] for own in record["ranks"])
        assert shown[f"stage_share.{stage}"] == [pytest.approx(share)]


def run_without_rank_1(folder: Path) -> Path:
    """Rank 1 is no member in steps 10 to 29."""
    steps = []
    for step in range(40):
        ranks = [a_rank(number) for number in range(3)]
        if 10 <= step < 30:
            ranks[1] = dataclasses.replace(a_rank(1, whole=0), late=False, cause=None, absent=True, compute_s=math.nan)
        steps.append(a_step(step, ranks))
    write_run(folder, steps)
    left = MembersReport(
        1, 10, (0, 2), 3, left={1: "its process ended by SIGKILL, after 3.0 s"}, left_kinds={1: "ended"}, seconds=0.025
    )
    joined = MembersReport(2, 30, (0, 1, 2), 3, joined={1: "came back"}, seconds=0.01)
    lines = [json.dumps({"time": 1e9 + change.step, **change.as_dict()}) + "\n" for change in (left, joined)]
    (folder / "members.jsonl").write_text("".join(lines))
    return folder


def test_absent_rank_is_not_late_and_its_steps_are_counted_apart(tmp_path: Path) -> None:
    run = read_run(run_without_rank_1(tmp_path))
    numbers = numbers_of(run)
    assert [rank.absent for rank in numbers.ranks] == [0, 20, 0]
    assert [rank.steps for rank in numbers.ranks] == [40, 20, 40]
    assert (numbers.late, numbers.dropped_share, numbers.rank_steps) == (0, 0.0, 100)
    assert numbers.ranks[1].reach == 1.0
    assert numbers.fairness.stages == (1.0,) * len(STAGES)
    summary = summarize(list(Trace(tmp_path / "trace.jsonl").reports()), {"loss": 1.0}, ["a"] * 3, 8)
    assert summary["absent_steps_per_rank"] == [0, 20, 0]
    assert summary["dropped_samples_per_rank"] == [0, 0, 0]
    assert summary["late_steps_per_rank"] == [0, 0, 0]


def test_absent_rank_and_the_changes_are_on_the_page(tmp_path: Path) -> None:
    content = content_of(write_report(run_without_rank_1(tmp_path), steps=[15]))
    assert [content.values[f"ranks.{rank}.absent"] for rank in range(3)] == [[0], [20], [0]]
    assert "rank 1 left: its process ended by SIGKILL, after 3.0 s" in content.text
    assert "rank 1 joined: came back" in content.text
    assert "2001-09-09 01:46:50" in content.text
    assert (
        "Rank 1 was absent in 50% of its steps (20 of 40): its process ended by SIGKILL, after 3.0 s." in content.text
    )
    hover = next(
        trace["hovertext"]
        for chart in json.loads(content.scripts["charts"])
        for trace in chart["data"]
        if trace["type"] == "heatmap"
    )
    assert (hover[1][15], hover[1][30]) == ("rank 1, step 15: absent", "rank 1, step 30: in time")


def test_absent_rank_has_neither_a_bar_nor_a_deadline_in_a_step() -> None:
    absent = a_rank(1, whole=0, absent=True, late=False, cause=None, compute_s=math.nan)
    figure = timeline(a_step(0, [a_rank(0), absent, a_rank(2)], seconds=2.0)).figure
    bars = {trace.name: list(trace.x) for trace in figure.data if trace.type == "bar"}
    assert {"wait", "merge"} < bars.keys()
    for lengths in bars.values():
        assert lengths[1] == 0.0 < lengths[0] == lengths[2]
    deadline = next(trace for trace in figure.data if trace.name == "deadline")
    assert list(map(math.isfinite, deadline.x)) == [True, False, True]
    assert deadline.y[1] == "1 absent"


def test_advice_says_how_often_a_rank_left_and_why_first(tmp_path: Path) -> None:
    members = run_without_rank_1(tmp_path) / "members.jsonl"
    again = MembersReport(3, 35, (0, 2), 3, left={1: "no sign of life for 2 s"}, left_kinds={1: "silent"})
    members.write_text(members.read_text() + json.dumps({"time": 1e9 + 35, **again.as_dict()}) + "\n")
    run = read_run(tmp_path)
    sentence = next(sentence for sentence in advise(run, numbers_of(run)) if "absent" in sentence)
    assert ", 2 times, first: its process ended by SIGKILL, after 3.0 s. The others" in sentence


def test_page_of_a_run_whose_members_stayed_has_no_table_of_changes(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, slow_run()))
    assert 'class="members"' not in page.read_text()


def test_report_read_back_from_a_trace_is_the_one_that_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, slow_run()))
    written = list(slow_run())
    for at, step in read_steps(run, {0, 22}).items():
        assert step.as_dict() == written[at].as_dict()


def test_heat_map_and_timelines_hold_what_happened(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    content = content_of(write_report(tmp_path, steps=[22]))
    charts = json.loads(content.scripts["charts"])
    assert len(charts) == content.charts == 7
    hover = next(trace["hovertext"] for chart in charts for trace in chart["data"] if trace["type"] == "heatmap")
    assert hover[1][22] == "rank 1, step 22: late in data, stood in for<br>0% of its gradients came in"
    assert hover[0][22] == "rank 0, step 22: in time"
    assert "late in backward" in hover[3][5]
    step = next(chart for chart in charts if any(trace["type"] == "bar" for trace in chart["data"]))
    assert next(trace["y"] for trace in step["data"] if trace["name"] == "deadline")[1] == "1 stood in for"
    assert "Step 22: as asked for" in content.text


def test_steps_drawn_are_the_slowest_a_typical_one_and_one_with_a_rank_stood_in_for(tmp_path: Path) -> None:
    steps = [dataclasses.replace(step, seconds=5.0) if step.step == 33 else step for step in slow_run()]
    text = content_of(write_report(write_run(tmp_path, steps))).text
    assert "Step 33: the slowest" in text
    assert "a typical one" in text
    assert "Step 20: a rank was stood in for" in text


# -- advice


def sentences(folder: Path, reports: Iterable[StepReport], /, **summary: Any) -> list[str]:
    run = read_run(write_run(folder, reports, **summary))
    return advise(run, numbers_of(run))


def test_advice_names_the_slow_rank_the_stuck_one_and_the_bias(tmp_path: Path) -> None:
    told = "\n".join(sentences(tmp_path, slow_run()))
    assert "Rank 3 was late in 100% of its steps (40 of 40), in the backward pass: it is persistently slow" in told
    assert "Rank 1 was sometimes late: in 12% of its steps (5 of 40), while it loaded data." in told
    assert "Rank 1 was stuck where it could not stop by itself and was stood in for, up to 5 steps in a row" in told
    assert "Stages near the input get less" in told


USUAL = {"latency_s": 0.0005, "up_bytes_per_s": 20e6, "down_bytes_per_s": 20e6}


@pytest.mark.parametrize(
    ("of_rank_2", "says"),
    [
        ({"up_bytes_per_s": 1e6}, "rank 2's link was slow then"),
        ({}, "no link was known to be slow then, and a busy machine does that, too"),
        (
            dict.fromkeys(USUAL, math.nan),
            "does that, too, and StagedDataParallel(links=True) measures whose link is slow",
        ),
    ],
    ids=["a slow link", "links as usual", "not measured"],
)
def test_merge_that_took_long_is_told_with_what_is_known_of_links(
    tmp_path: Path, of_rank_2: dict[str, float], says: str
) -> None:
    links = [USUAL, USUAL, USUAL | of_rank_2] if len(of_rank_2) < 3 else [of_rank_2] * 3
    ranks = [a_rank(number, **link) for number, link in enumerate(links)]
    big = tuple(dataclasses.replace(stage, numel=10**6) for stage in STAGES)
    steps = [a_step(step, ranks, stages=big, network_s=9.0 if step == 30 else 0.05) for step in range(40)]
    assert any(says in sentence for sentence in sentences(tmp_path, steps))


def test_advice_says_nothing_of_a_run_of_one_rank(tmp_path: Path) -> None:
    assert sentences(tmp_path, (a_step(step, [a_rank(0)]) for step in range(20))) == []


def test_advice_on_a_run_in_which_nobody_was_late_says_only_that(tmp_path: Path) -> None:
    steps = [a_step(step, [a_rank(0), a_rank(1)]) for step in range(20)]
    assert sentences(tmp_path, steps) == [
        "No rank was late in 20 steps: the run took what waiting for all ranks takes."
    ]


def test_advice_names_a_slow_rank_that_everybody_waited_for(tmp_path: Path) -> None:
    ranks = [a_rank(0), a_rank(1), a_rank(2, pace=3.0)]
    told = sentences(tmp_path, (a_step(step, ranks, deadline_s=math.inf) for step in range(20)))
    assert told[0] == "There was no deadline in this run: all ranks were waited for."
    assert told[1].startswith("Rank 2 took 3.0 times as long as the others and was waited for all the same.")


def test_advice_tells_of_bad_numbers_first_and_of_replicas_that_differ(tmp_path: Path) -> None:
    steps = [a_step(step, [a_rank(0), a_rank(1, nonfinite=2 * (step % 2))], skipped=step == 3) for step in range(10)]
    told = sentences(tmp_path, steps, steps=10, parameters_sha256=["a", "b"])
    assert told[0].startswith("The ranks ended with different parameters.")
    assert told[1].startswith("Rank 1 had gradients that were not finite in 50% of its steps (5 of 10).")
    assert told[2] == "In 1 of 10 steps no rank had finite gradients, and nothing was applied."


def test_advice_says_when_ranks_ran_out_of_data(tmp_path: Path) -> None:
    idle = {"whole": 0, "idle": True, "compute_s": math.nan, "cause": None}
    steps = [a_step(step, [a_rank(0), a_rank(1, **(idle if step >= 12 else {}))]) for step in range(16)]
    told = sentences(tmp_path, steps)
    assert "from step 12 on some had none, the first of them rank 1. Fewer than all took part in 4 of 16" in told[-1]


# -- odd traces


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ODD)
def test_odd_trace_has_a_page(name: str, tmp_path: Path) -> None:
    content = content_of(write_report(write_run(tmp_path, ODD[name])))
    assert content.charts == len(json.loads(content.scripts["charts"])) >= 4
    assert not re.search(r"\bnan\b", content.text, re.IGNORECASE)


def test_page_without_a_loss_says_so(tmp_path: Path) -> None:
    assert "No step has a scalar named loss" in content_of(write_report(write_run(tmp_path, ODD["no loss"]))).text


def test_cut_off_trace_is_shown_up_to_its_last_whole_step(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    whole = (tmp_path / "trace.jsonl").read_text()
    (tmp_path / "trace.jsonl").write_text(whole[:-200])
    content = content_of(write_report(tmp_path))
    assert "39 steps of 4 ranks" in content.text


def test_trace_of_an_older_version_without_the_newer_fields_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    records = list(read_trace(tmp_path / "trace.jsonl"))
    for record in records:
        del record["skipped"]
        for rank in record["ranks"]:
            for name in ("idle", "weight", "nonfinite", "overrun_s"):
                del rank[name]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert content_of(write_report(tmp_path)).values["late"] == [45]


def test_summary_of_an_earlier_run_in_the_same_folder_is_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run(), steps=500, validation_loss=1.25, parameters_sha256=["a", "b"])
    content = content_of(write_report(tmp_path))
    assert "validation_loss" not in content.values
    assert "DIFFERENT" not in content.text


def test_what_the_run_is_called_cannot_break_the_page(tmp_path: Path) -> None:
    hostile = '</script><img src=x onerror="x">'
    stage = dataclasses.replace(STAGES[0], name=hostile)
    steps = [a_step(step, [a_rank(0)], stages=(stage, *STAGES[1:])) for step in range(3)]
    content = content_of(write_report(write_run(tmp_path, steps)))
    assert content.addresses == []
    assert hostile in content.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no complete step in it yet"),
        ('{"step": 0, "rank', "there is no complete step in it yet"),
        ("nonsense\n", "not a trace"),
        ('{"step": 0}\n', "line 1 is no step of a straggle trace"),
        ("[]\n", "line 1 is no step of a straggle trace"),
    ],
)
def test_file_that_is_no_trace_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_long_run_of_many_ranks_stays_small(tmp_path: Path) -> None:
    few = write_report(write_run(tmp_path / "few", slow_run(8, 4))).stat().st_size
    many = write_report(write_run(tmp_path / "many", slow_run(260, 130))).stat().st_size
    assert many - few < 1.2e6


# -- one file


def test_page_holds_its_library_and_no_address(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, slow_run()))
    content, text = content_of(path), path.read_text()
    assert content.addresses == []
    assert "default-src 'none'" in text  # so that the browser, too, would refuse
    library = gzip.decompress(base64.b64decode(content.scripts["plotly"])).decode()
    assert "Plotly" in library[:100_000]
    own = text.replace(content.scripts["plotly"], "").replace(content.scripts["charts"], "")
    assert not re.search(r"https?:|url\(|@import", own)
    assert path.stat().st_size < 3e6


# -- two runs


def test_compare_shows_both_runs_side_by_side(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", slow_run(), steps=40, validation_loss=2.0)
    other = write_run(tmp_path / "other", (a_step(step, [a_rank(0), a_rank(1)]) for step in range(10)))
    content = content_of(write_report(one, compare=other, path=tmp_path / "both.html"))
    assert content.values["late"] == [45, 0]
    assert "one:\\u003cbr\\u003eas it was" in content.scripts["charts"]
    assert "other:\\u003cbr\\u003eas it was" in content.scripts["charts"]
    assert content.values["validation_loss"] == [2.0]
    assert "one and other" in content.text
    assert not (one / "report.html").exists()


# -- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/a", "step=3"], "unknown key step; valid keys: compare, steps, out"),
        (["compare=runs/b"], "one RUN_DIR is needed, not 0"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(words)


def test_step_that_is_not_in_the_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step 40 in its trace; it has 0 to 39"):
        write_report(write_run(tmp_path, slow_run()), steps=[40])


@pytest.mark.parametrize(
    ("error", "message"), [(ImportError("no plotly"), "straggle.report"), (OSError("full"), "full")]
)
def test_report_that_fails_does_not_fail_the_run(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run_dir: Path) -> Path:
        raise error

    monkeypatch.setattr("straggle.observe.page.page.write_report", fail)
    result.write_page(tmp_path)
    (record,) = caplog.records
    assert record.getMessage().startswith("no report: ")
    assert "\n" not in record.getMessage()


def test_summary_has_the_page_s_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, slow_run())
    shown = content_of(write_report(tmp_path)).values
    steps = list(slow_run())
    summary = summarize(steps, {"loss": 1.5}, ["a"] * 4, samples_per_step=8)
    for name in ("step_seconds_median", "step_seconds_mean", "ddp_seconds_mean", "dropped_share", "loss"):
        assert shown[name] == [pytest.approx(summary[name])]
    assert summary["late_steps_per_rank"] == [sum(step.ranks[rank].late for step in steps) for rank in range(4)]
    lost = [sum(8 * (1 - step.ranks[rank].reach) for step in steps) for rank in range(4)]
    assert summary["dropped_samples_per_rank"] == [round(samples) for samples in lost]
    assert summarize(steps[:1], {"loss": 1.5}, ["a"] * 4, samples_per_step=8)["dropped_share_per_stage"] == {}


def test_half_a_page_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk it would take what is left."""
    (tmp_path / "report.html").mkdir()  # so that it cannot be put in place
    monkeypatch.setattr("straggle.observe.page.page.page", lambda *_: "half a page")
    with pytest.raises(IsADirectoryError):
        write_page([], [], tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
