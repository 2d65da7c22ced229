"""The advice on runs whose slow ranks are known, because the files are made here."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import textwrap

import numpy as np
import pages
import pytest
from watched import NETWORK_S, NUM_STAGES, STAGES, USUAL, a_rank, when, write_trace, write_watch

from straggle import FirstK, FixedDeadline, LateHandling, StepReport, WaitForAll
from straggle.advise.answer import answer, configured_late_handling
from straggle.advise.gain import MISSED, best, candidates, gains, replay
from straggle.advise.slow import change_points, find_slow_ranks, slowdown
from straggle.advise.timings import read_timings
from straggle.observe.numbers.intervals import prediction_interval, steps_interval
from straggle.observe.trace import TraceWriter


@pytest.mark.parametrize("phase", USUAL)
def test_slow_rank_is_named_with_its_phase(phase, tmp_path):
    found = find_slow_ranks(read_timings(write_watch(tmp_path, extra=when(1, range(1000), **{phase: 0.2}))))
    assert [rank.rank for rank in found.ranks] == [1]
    one = found.ranks[0]
    assert (one.named, one.since, one.until, one.steady) == ((phase,), None, None, 1.0)
    assert one.excess_s == pytest.approx(0.2, abs=0.002)
    assert one.attributed >= 0.8
    assert found.attributed >= 0.8
    assert found.network_s == pytest.approx(NETWORK_S)


def test_phase_that_is_all_of_it_and_more_is_told_as_all(tmp_path):
    extra = when(1, range(1000), data=0.2, forward=-0.01)  # quicker than its peers in another phase
    assert "Of that, 100% while it loaded data" in str(answer(write_watch(tmp_path, extra=extra)))


def test_two_phases_are_named_where_one_explains_too_little(tmp_path):
    extra = when(2, range(1000), data=0.1, forward=0.08)
    one = find_slow_ranks(read_timings(write_watch(tmp_path, extra=extra))).ranks[0]
    assert one.named == ("data", "forward")
    assert one.phases["data"] == pytest.approx(0.1 / 0.18, abs=0.02)
    assert one.attributed == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("rank", "steps", "since", "until"), [(3, range(70, 1000), 70, None), (0, range(40, 80), 40, 80)]
)
def test_rank_is_slow_from_the_step_at_which_it_became_so_until_it_recovers(rank, steps, since, until, tmp_path):
    one = find_slow_ranks(read_timings(write_watch(tmp_path, extra=when(rank, steps, backward=0.1)))).ranks[0]
    assert (one.rank, one.since, one.until) == (rank, since, until)
    assert ("from step 40 to step 79" in str(answer(tmp_path))) == (until is not None)


def test_rank_that_stalls_now_and_then_is_told_from_a_slow_one(tmp_path):
    one = find_slow_ranks(read_timings(write_watch(tmp_path, extra=when(2, range(15, 1000, 20), data=1.0)))).ranks[0]
    assert (one.rank, one.named, one.since) == (2, ("data",), None)
    assert one.steady == pytest.approx(6 / 110, abs=0.01)
    assert "Rank 2 is slow at times" in str(answer(tmp_path))


def test_garbage_collection_is_not_taken_for_the_phase_it_fell_into(tmp_path):
    slow = when(1, range(1000), backward=0.2)
    one = find_slow_ranks(read_timings(write_watch(tmp_path, extra=slow, pauses=slow))).ranks[0]
    assert one.named == ("pauses",)


def test_noise_of_all_ranks_names_nobody(tmp_path):
    chance = random.Random(1)

    def noisy(_rank, _step):
        return {"forward": 0.1} if chance.random() < 0.2 else {}

    found = find_slow_ranks(read_timings(write_watch(tmp_path, extra=noisy)))
    assert found.ranks == ()
    assert found.lost_s > 0.03


def test_two_slow_ranks_of_six_are_both_named(tmp_path):
    def both(rank, step):
        return {"backward": 0.2 if (step + rank) % 2 else 0.19} if rank in (1, 4) else {}

    found = find_slow_ranks(read_timings(write_watch(tmp_path, ranks=6, extra=both)))
    assert sorted(rank.rank for rank in found.ranks) == [1, 4]


@pytest.mark.parametrize("every", [1, 2])
def test_job_is_not_faster_because_of_a_slow_rank_whose_peer_stalls(every, tmp_path):
    def stalls_and_is_slow(rank, step):
        return {"forward": 1.0 * (rank == 1 and step % 8 == 0) + 0.05 * (rank == 3 and step % every == 0)}

    found = find_slow_ranks(read_timings(write_watch(tmp_path, extra=stalls_and_is_slow)))
    of = {rank.rank: rank.slowdown for rank in found.ranks}
    assert of.keys() == {1, 3}
    # rank 3 makes the steps longer in which rank 1 does not stall
    assert of[3].value == pytest.approx(1 + 0.05 * 7 / 8 / every / (1.0 / 8 + 0.11), rel=0.03)


def test_slowdown_is_the_ratio_of_the_steps_with_and_without(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(1, range(1000), backward=0.2), noise=0.0))
    found = slowdown(timings, 1)
    assert (found.low, found.value, found.high) == pytest.approx((0.31 / 0.11,) * 3)


def test_level_that_does_not_change_has_no_change_point():
    random_ = np.random.default_rng(0)
    assert change_points(1 + 0.2 * random_.random(400)) == []
    series = np.concatenate([1 + 0.2 * random_.random(100), 2 + 0.2 * random_.random(100)])
    series[::30] = 50.0  # stalls, which move every mean
    assert change_points(series) == [100]


def test_first_k_replayed_has_the_outcome_of_a_closed_form(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(1, range(1000), backward=0.24), noise=0.0))
    everyone, some = replay(timings, WaitForAll()), replay(timings, FirstK(3))
    assert everyone.seconds == pytest.approx(0.35)
    assert everyone.dropped == pytest.approx(0.0)
    # its first step waits for all; then the peers are done after 0.1 s, and rank 1 after 0.3 s of its backward pass;
    # it has done 0.06 s of that: one stage of eight, and six tenths of the next
    assert some.seconds[1:] == pytest.approx(0.11)
    assert some.late[1:, 1].all()
    assert not some.late[:, [0, 2, 3]].any()
    assert some.dropped[1:] == pytest.approx((1 - 1.6 / 8) / 4)


def test_gain_is_of_the_steps_since_ranks_are_as_they_are_now(tmp_path):
    given = answer(write_watch(tmp_path, extra=when(1, range(70, 1000), backward=0.2)))
    assert "steps from 70 on, run with" in str(given)
    first_k = next(gain for gain in given.gains if gain.code == "straggle.FirstK(3)")
    # of 0.31 s: cautious, rank 1 stops 0.04 + 2 / 8 * 0.26 s after the merge before, and the network comes twice
    stopped_s = 0.04 + 0.065 + 2 * NETWORK_S
    assert first_k.saved.value == pytest.approx(1 - stopped_s / 0.31, abs=0.02)
    assert first_k.saved.high == pytest.approx(1 - (1 - MISSED) * 0.11 / 0.31, abs=0.02)
    assert given.best is not None


def test_rank_that_recovered_is_no_reason_to_change_anything(tmp_path):
    given = answer(write_watch(tmp_path, extra=when(0, range(20, 60), forward=0.3)))
    assert given.slowness.ranks[0].until == 60
    assert given.best is None


def test_cautious_replay_lets_a_late_rank_finish_its_stage_and_merges_after_that(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(1, range(1000), backward=0.24), noise=0.0))
    some = replay(timings, FirstK(3), LateHandling(grace_s=0.05), cautious=True)
    # its second stage ends 0.04 + 2 / 8 * 0.3 s after the merge before, and the network comes twice
    assert some.seconds[0] == pytest.approx(0.35)
    assert some.seconds[1:] == pytest.approx(0.04 + 0.075 + 2 * NETWORK_S)
    assert some.dropped[1:] == pytest.approx((1 - 2 / 8) / 4)


def test_range_holds_what_a_comparison_of_two_new_runs_finds():
    random_ = np.random.default_rng(0)
    runs, steps, held, too_narrow = 200, 60, 0, 0

    def saved(own_s, all_s):
        return 1 - own_s / all_s

    def seconds():
        return random_.lognormal(0.0, 0.4, steps)

    for seed in range(runs):
        recorded = seconds()
        truth = saved(0.8 * seconds().mean(), seconds().mean())
        found = prediction_interval(saved, 0.8 * recorded, recorded, seed=seed)
        assert found.value == pytest.approx(0.2)
        held += found.low <= truth <= found.high
        narrow = steps_interval(saved, 0.8 * recorded, recorded, seed=seed)
        too_narrow += not narrow.low <= truth <= narrow.high
    assert 0.85 <= held / runs <= 0.99
    assert too_narrow == runs  # of the steps alone, which would have been as long in proportion


def test_rank_that_is_stuck_over_several_replayed_steps_has_the_outcome_of_a_closed_form(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(2, range(50, 51), data=0.3), noise=0.0))
    some = replay(timings, FixedDeadline(0.12), LateHandling(grace_s=0.05))
    # peers enter after 0.01 s and are done after 0.1; rank 2 is stood in for 0.05 s after the deadline, 0.13 s before
    # it enters; again when its peers are done, 0.04 s before; then it enters after 0.04 s, and is stopped by its
    # peers' clock, when it is two thirds through the seventh of eight stages
    shown = slice(at := list(timings.step).index(49), at + 5)
    assert some.seconds[shown] == pytest.approx([0.11, 0.18, 0.11, 0.13, 0.11])
    assert some.dropped[shown] == pytest.approx([0.0, 0.25, 0.25, (2 - 2 / 3) / 8 / 4, 0.0])
    assert some.late[shown, 2].tolist() == [False, True, True, True, False]


@pytest.mark.slow
def test_best_policy_is_worth_it_and_its_keys_are_valid(tmp_path):
    from straggle.commands.configuration.config import load

    write_watch(tmp_path, extra=when(1, range(1000), backward=0.2))
    given = answer(tmp_path)
    assert given.best is not None
    assert given.best.speedup.low > 1.5
    assert given.best.code in str(given)
    for candidate in candidates(4):
        load("train", candidate.keys.split())
        assert eval(candidate.code, {"straggle": __import__("straggle")}).__class__ is candidate.policy.__class__


def printed_code(text: str) -> list[str]:
    """The indented lines, those that belong together as one."""
    return [textwrap.dedent(block) for block in re.findall(r"(?:^  .*\n)+", text, re.MULTILINE)]


def test_run_of_the_command_is_told_keys_and_no_code(tmp_path):
    from straggle.commands.configuration.config import load

    write_trace(tmp_path, 9.0)
    (tmp_path / "config.yaml").write_text("late_handling: {quorum: null}\n")
    dealt, keys, drawn = printed_code(str(answer(tmp_path)))
    assert dealt.split() == ["rebalance=by_speed"]
    for words in (dealt, keys, drawn):
        load("train", words.split())


def test_micro_batches_of_a_step_are_in_the_line_to_paste(tmp_path):
    folder = write_watch(tmp_path, extra=when(1, range(1000), backward=0.2)) / "watch"
    for file in folder.iterdir():
        head, *lines = map(json.loads, file.read_text().splitlines())
        lines = [line | {"microbatch_s": [line["compute_s"] / 2, line["compute_s"]]} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    assert "`with model.step(num_microbatches=2):`" in str(answer(tmp_path))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_nobody_is_slow_nothing_is_to_be_changed(ranks, noise, tmp_path):
    given = answer(write_watch(tmp_path, ranks=ranks, noise=noise))
    assert given.best is None
    assert given.slowness.ranks == ()
    for words in ("No rank is slow", "change nothing", "wait for all ranks"):
        assert words in str(given)
    assert "StagedDataParallel" not in str(given)
    assert json.loads(given.as_json())["best"] is None


def test_ranks_that_are_held_up_at_random_are_worth_a_deadline(tmp_path):
    chance = random.Random(1)
    given = answer(write_watch(tmp_path, extra=lambda *_: {"forward": 0.3} if chance.random() < 0.1 else {}))
    assert given.slowness.ranks == ()
    assert given.best is not None
    assert "now one and now another takes 1.5 times as long" in str(given)


# -- traces of straggle


@pytest.mark.parametrize("stop_s", [9.0, 1.0])
def test_rank_of_a_trace_is_as_slow_whether_it_was_stopped_or_not(stop_s, tmp_path):
    found = find_slow_ranks(read_timings(write_trace(tmp_path, stop_s)))
    assert [(rank.rank, rank.named) for rank in found.ranks] == [(2, ("backward",))]
    assert found.ranks[0].excess_s == pytest.approx(1.6 - 0.808, rel=0.02)
    assert found.ranks[0].slowdown.value == pytest.approx(1.61 / 0.826, rel=0.02)


def write_stuck(folder, num_steps, is_stuck):
    """Rank 1 loads for 0.8 s in some steps, and is stood in for."""
    stuck = {"stood_in": True, "late": True, "cause": "data", "reach": 0.0, "compute_s": float("nan")}
    stuck |= {"stages": (0.0,) * NUM_STAGES, "stage_s": (float("nan"),) * NUM_STAGES, "backward_s": 0.0, "data_s": 0.8}
    with TraceWriter(folder / "trace.jsonl") as trace:
        for step in range(num_steps):
            ranks = [a_rank(rank, 1.0, 9.0) for rank in range(4)]
            if is_stuck(step):
                ranks[1] = dataclasses.replace(ranks[1], **stuck)
            trace.write(StepReport(step, 0.81, 1.0, tuple(ranks), STAGES))


def test_rank_that_was_stuck_for_several_steps_counts_once(tmp_path):
    write_stuck(tmp_path, 60, lambda step: step % 20 in (15, 16, 17))
    found = find_slow_ranks(read_timings(tmp_path))
    assert [(rank.rank, rank.named[0]) for rank in found.ranks] == [(1, "data")]
    assert found.ranks[0].steady == pytest.approx(3 / 54, abs=0.01)


def test_rank_that_misses_most_steps_is_always_slow_and_nothing_says_otherwise(tmp_path):
    """What it took for eight steps is all in the first of them."""
    write_stuck(tmp_path, 80, lambda step: step % 8)
    found = answer(tmp_path)
    (one,) = found.slowness.ranks
    assert (one.rank, one.since, one.until, one.named[0]) == (1, None, None, "data")
    assert one.steady > 0.8
    said = str(found)
    assert "Rank 1 is always slow, from the first step on" in said
    for other in ("at times", "sometimes", "persistently", "change nothing, and wait"):
        assert other not in said


def test_run_whose_deadline_saved_time_is_not_told_to_wait_for_all(tmp_path):
    found = answer(write_trace(tmp_path, 0.9))
    own = [one for one in found.sentences if "less time" in one]
    assert own
    assert found.verdict.kind != "nothing"
    assert "change nothing, and wait" not in str(found)


# -- the command


def test_trace_is_read_by_its_name_and_by_its_folder(tmp_path):
    write_trace(tmp_path, 1.0)
    by_folder, by_name = answer(tmp_path), answer(tmp_path / "trace.jsonl")
    assert str(by_folder) == str(by_name)
    assert by_folder.sentences


def test_folder_of_a_watch_is_read_whatever_the_run_dir_is_called(tmp_path):
    for run_dir in (tmp_path / "mine", tmp_path / "watch"):  # runs/watch is the default
        write_watch(run_dir)
        for path in (run_dir, run_dir / "watch"):
            assert read_timings(path).num_steps == 110


def test_intervals_hold_their_value(tmp_path):
    timings = read_timings(write_watch(tmp_path, extra=when(1, range(60, 1000), backward=0.2)))
    for gain in gains(timings):
        for found in (gain.saved, gain.dropped, gain.speedup):
            assert found.low <= found.value <= found.high
    assert best(gains(timings)) is not None


def test_report_draws_a_watched_run(tmp_path):
    from straggle.observe.numbers.run import read_run, read_steps
    from straggle.observe.numbers.run_numbers import numbers_of
    from straggle.observe.page.page import write_report

    write_watch(tmp_path, steps=40, extra=when(1, range(1000), backward=0.2), noise=0.0)
    run = read_run(tmp_path)
    assert (run.num_steps, run.num_ranks) == (40, 4)
    assert run.ranks["wait_s"][5] == pytest.approx([0.2, 0.0, 0.2, 0.2])
    assert read_steps(run, [7])[7].ranks[1].backward_s == pytest.approx(0.26)
    assert numbers_of(run).ranks[1].slowness == pytest.approx(0.29 / 0.09)
    assert "waited for" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("text", ["late_handling: [1", "late_handling: 3", "late_handling: {quorumm: 2}"])
def test_configuration_that_cannot_be_read_is_told_with_its_file(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text + "\n")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        configured_late_handling(tmp_path)


def test_trace_of_a_run_that_dropped_micro_batches_is_judged_by_its_stages(tmp_path):
    (tmp_path / "config.yaml").write_text("late_handling: {granularity: microbatch, grace_s: 0.5}\n")
    assert configured_late_handling(tmp_path) == LateHandling(granularity="stage", grace_s=0.5)


WHOSE = "Whether it is one rank's link, straggle.StagedDataParallel(model, links=True) measures"
USUAL_LINK = {"latency_s": 0.0005, "up_bytes_per_s": 20e6, "down_bytes_per_s": 20e6}


@pytest.mark.parametrize(
    ("ranks", "links", "says"), [(4, {}, True), (4, USUAL_LINK, False), (2, {}, False)], ids=["", "measured", "two"]
)
def test_share_of_the_network_is_told_with_what_would_measure_links_if_nothing_has(ranks, links, says, tmp_path):
    steps = [pages.a_step(n, [pages.a_rank(r, **links) for r in range(ranks)], seconds=2.0) for n in range(40)]
    told = " ".join(str(answer(pages.write_run(tmp_path, steps))).split())
    assert "is the network: it comes after the slowest rank's own work" in told
    assert (WHOSE in told) is says
