"""What DDP would have taken: against steps whose times for an equal share are known."""

import math

import pytest

from straggle import RankReport, StageReport, StepReport
from straggle.policies.shares.equal_shares import Overhead
from straggle.policies.what_if.ddp_time import DdpPrediction

STAGES = (StageReport("head", 4, 2.0, False), StageReport("body", 4, 2.0, False))
SAMPLE_S, OVERHEAD, MERGE_S = (0.01, 0.01, 0.01, 0.02), 2.0, 0.005  # rank 3 takes twice as long for a sample
EQUAL_S = 0.02 * (8 + OVERHEAD) + MERGE_S
NAN = math.nan


def rank(number, compute_s, stage_s, **rest):
    whole = tuple(float(not math.isnan(at)) for at in stage_s)
    times = dict.fromkeys(("outside_s", "data_s", "forward_s", "backward_s", "wait_s"), 0.0)
    return RankReport(rank=number, **{**times, "compute_s": compute_s, "reach": sum(whole) / 2, "stages": whole,
                                 "stage_s": stage_s, **rest})  # fmt: skip


def report(*ranks, seconds=1.5, **rest):
    return StepReport(0, seconds, 1.2, ranks, STAGES, **rest)


def dealt(counts, *, machine=1.0, stalls=(0.0,) * 4, **rest):
    """A step in which all ranks finish their shares, and a rank's stall comes on top."""
    own_s = [
        machine * sample_s * (n + OVERHEAD) + stall_s
        for sample_s, n, stall_s in zip(SAMPLE_S, counts, stalls, strict=True)
    ]
    last_s = max(own_s)
    ranks = [
        rank(number, own, (0.6 * own, own), weight=float(n), wait_s=last_s - own)
        for number, (n, own) in enumerate(zip(counts, own_s, strict=True))
    ]
    return report(*ranks, seconds=last_s + MERGE_S, network_s=MERGE_S, dealt=True, **rest)


def after_deals(machine=1.0):
    """A prediction that has seen equal shares, and then those that let all ranks finish together."""
    prediction = DdpPrediction()
    for counts, busy in (((8, 8, 8, 8), 1.0), ((9, 9, 9, 5), machine), ((10, 10, 9, 3), machine)):
        for _ in range(10):
            prediction.add(dealt(counts, machine=busy))
    return prediction


def test_where_no_rank_is_late_and_no_work_is_dealt_ddp_takes_the_same():
    calm = report(rank(0, 1.0, (0.5, 1.0)), rank(1, 1.1, (0.5, 1.1)))
    assert DdpPrediction().add(calm).seconds == 1.5


def test_late_rank_would_have_taken_its_slowness_times_the_others_time():
    late = rank(2, 1.2, (1.0, NAN), late=True, cause="backward")  # had its first stage after twice the time
    step = DdpPrediction().add(report(rank(0, 0.9, (0.5, 0.9)), rank(1, 0.9, (0.5, 0.9)), late))
    assert step.seconds == pytest.approx(1.5 + (2 * 0.9 - 1.2))
    assert step.waits_for == 2


def test_rank_without_data_is_no_measure_of_what_ddp_takes():
    late = rank(2, 1.2, (1.0, NAN), late=True, cause="backward")
    idle, peer = rank(0, NAN, (NAN, NAN), idle=True), rank(1, 0.9, (0.5, 0.9))
    assert DdpPrediction().add(report(idle, peer, late)).seconds == pytest.approx(1.5 + (2 * 0.9 - 1.2))


def test_rank_that_was_stuck_needs_its_usual_time_beside_all_the_time_for_which_it_was():
    """It is stuck for 2 s before it enters, for the rest of one step, one more, and a part of the third."""
    prediction, peers = DdpPrediction(), [rank(number, 1.0, (0.5, 1.0)) for number in (0, 1)]
    prediction.add(report(*peers, rank(2, 1.2, (1.5, NAN), late=True), seconds=1.2))  # three times as slow
    stuck = rank(2, NAN, (NAN, NAN), late=True, stood_in=True, cause="data")
    seconds = [prediction.add(report(*peers, stuck, seconds=1.0)).seconds for _ in range(2)]
    back = rank(2, 0.8, (NAN, NAN), late=True, cause="forward", overrun_s=1.0)
    seconds.append(prediction.add(report(*peers, back, seconds=1.0)).seconds)
    assert sum(seconds) == pytest.approx(2.0 + 3 * 3.0)


@pytest.mark.parametrize("machine", [1.0, 1.5])
def test_rank_with_fewer_samples_would_have_taken_longer_for_an_equal_share(machine):
    """A machine that is busier after the shares have changed does not count as what a step costs beside its samples."""
    step = after_deals(machine).add(dealt((10, 10, 9, 3)))
    assert step.seconds == pytest.approx(EQUAL_S, rel=0.02)
    assert step.waits_for == 3
    assert step.own_s[3] == pytest.approx(0.02 * (3 + OVERHEAD))


def test_stall_counts_once_however_many_samples_a_rank_has():
    stalled = dealt((10, 10, 9, 3), stalls=(0.0, 0.0, 0.0, 1.0))
    assert after_deals().add(stalled).seconds == pytest.approx(EQUAL_S + 1.0, rel=0.01)


def test_last_step_of_an_epoch_has_fewer_samples_for_each_rank():
    assert after_deals().add(dealt((5, 5, 4, 2))).seconds == pytest.approx(0.02 * (4 + OVERHEAD) + MERGE_S, rel=0.02)


def test_rank_that_drew_less_of_a_pool_would_have_taken_longer_for_its_part():
    drew = (rank(0, 0.6, (0.5, 0.6), weight=6.0), rank(1, 0.6, (0.5, 0.6), weight=2.0))
    step = DdpPrediction().add(report(*drew, seconds=0.7, pool_parts=8, pool_weight=8.0, network_s=0.1))
    assert step.seconds == pytest.approx(4 * 0.3 + 0.1)


@pytest.mark.parametrize("overhead", [0.0, 2.0, 8.0])
def test_overhead_is_learned_beside_what_the_machine_did_to_all_ranks(overhead):
    found = Overhead(8.0)
    before, after = (8, 8, 8, 8), (10, 9, 8, 5)
    times_s, new_s = ([n + overhead for n in counts] for counts in (before, after))
    found.learn(before, times_s, after, [1.3 * own for own in new_s])
    assert found.samples == pytest.approx(overhead, abs=0.7)
