"""What drawing a step's micro-batches is said to be worth, from recorded steps: closed forms, and the words."""

import json

import numpy as np
import pytest
from watched import NETWORK_S, USUAL, when, write_trace, write_watch

from straggle.advise.answer import answer
from straggle.advise.list_schedule import REQUEST_S
from straggle.advise.pulled import best_pulled, part_times, pulled
from straggle.advise.timings import read_timings

WORK_S = USUAL["data"] + USUAL["forward"] + USUAL["backward"]
FIXED_S = USUAL["outside"] + USUAL["optimizer"]
SLOW = when(1, range(1000), **{name: USUAL[name] for name in ("data", "forward", "backward")})  # twice as slow
CONFIG = "late_handling: {quorum: null}\nrebalance: {}\n"


def accumulating(folder, number):
    """The same steps, each of this number of equal micro-batches."""
    for path in (folder / "watch").glob("rank*.jsonl"):
        head, *steps = map(json.loads, path.read_text().splitlines())
        for step in steps:
            step["microbatch_s"] = [step["compute_s"] * (part + 1) / number for part in range(number)]
        path.write_text("".join(json.dumps(line) + "\n" for line in [head, *steps]))
    return folder


@pytest.mark.parametrize(("number", "parts", "longest"), [(8, (9, 5, 9, 9), 10 / 8), (4, (5, 3, 4, 4), 6 / 4)])
def test_gain_of_steps_that_are_divided_has_a_closed_form(number, parts, longest, tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=SLOW, noise=0.0))
    found = pulled(timings, number)
    assert found.drawn == pytest.approx(parts, abs=0.01)
    step_s = FIXED_S + longest * WORK_S + NETWORK_S
    assert found.gain.step_s == pytest.approx(step_s, abs=3.01 * REQUEST_S)
    assert found.gain.saved.value == pytest.approx(1 - step_s / (FIXED_S + 2 * WORK_S + NETWORK_S), abs=0.015)
    assert found.gain.dropped.value == 0


def test_recorded_micro_batches_are_as_they_were(tmp_path):
    timings = read_timings(accumulating(write_watch(tmp_path, extra=SLOW, noise=0.0), 4))
    entered_s, part_s = part_times(timings, 4)
    assert entered_s == pytest.approx(timings.entered_s)
    passes_s = np.array([1, 2, 1, 1]) * (USUAL["forward"] + USUAL["backward"])
    assert part_s == pytest.approx(np.broadcast_to(passes_s[:, None] / 4, part_s.shape))


def test_a_rank_that_stalls_is_held_up_in_one_piece_where_caution_is_asked_for(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(2, range(20, 1000, 20), data=1.0), noise=0.0))
    at = list(timings.step).index(40)
    entered_s, part_s = part_times(timings, 8, cautious=True)
    assert entered_s[at, 2] == pytest.approx(FIXED_S + 1.0 - 0.5 * USUAL["data"])
    assert part_s[at, 2].sum() == pytest.approx(WORK_S + 0.5 * USUAL["data"])
    assert part_times(timings, 8)[0][at, 2] == pytest.approx(FIXED_S)


def test_fewest_micro_batches_that_gain_nearly_as_much_are_named(tmp_path):
    found = best_pulled(read_timings(write_watch(tmp_path, extra=SLOW)), 1)
    assert (found.num_microbatches, found.accumulates) == (8, False)
    assert best_pulled(read_timings(write_watch(tmp_path)), 1) is None  # no rank is slow


def words_of(found):
    return " ".join(str(found).split())


def test_where_steps_have_several_micro_batches_it_is_said_how_to_draw_them(tmp_path):
    said = words_of(found := answer(accumulating(write_watch(tmp_path, extra=SLOW), 8)))
    assert "et the ranks draw the 8 micro-batches of a step from one pool" in said
    assert "rank 1 would compute 5.0 micro-batches in a step, others up to 9.0" in said
    assert "for x, y in step.pull(parts):" in said
    assert json.loads(found.as_json())["pulled"]["drawn"][1] == pytest.approx(5.0)


def test_where_a_step_has_one_it_is_said_how_many_would_be_needed(tmp_path):
    said = words_of(answer(write_watch(tmp_path, extra=SLOW)))
    assert (
        "a step has one micro-batch on each rank, so there is nothing to draw. With 8 in a step, each an eighth" in said
    )
    assert "micro-batches in a step, others up to 9.0: steps of" in said


def test_nothing_is_said_of_it_where_no_rank_is_waited_for(tmp_path):
    said = answer(accumulating(write_watch(tmp_path), 8))
    assert said.pulled is None
    assert "ull" not in words_of(said).partition("change nothing")[2].replace("DropBudget", "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIG + "num_microbatches: 8\n", "  work=pulled num_microbatches=8\n"),
        (CONFIG + "num_microbatches: 1\n", "  work=pulled num_microbatches=8\n"),
    ],
)
def test_a_run_of_train_is_told_the_keys(config, words, tmp_path):
    write_trace(tmp_path, 9.0)
    (tmp_path / "config.yaml").write_text(config)
    assert words in str(answer(tmp_path))


def test_a_run_that_is_dealt_by_speed_or_draws_already_is_not_told_to(tmp_path):
    write_trace(tmp_path, 9.0)
    (tmp_path / "config.yaml").write_text("rebalance: {_target_: straggle.Rebalance}\nnum_microbatches: 8\n")
    assert answer(tmp_path).pulled is None
    trace = tmp_path / "trace.jsonl"
    lines = [json.loads(line) | {"pool_parts": 32, "pool_weight": 32.0} for line in trace.read_text().splitlines()]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(CONFIG + "num_microbatches: 8\n")
    assert answer(tmp_path).pulled is None
