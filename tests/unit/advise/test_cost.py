"""A rank whose steps cost more takes longer by right: it is not found slow, and one of the same cost is."""

from dataclasses import replace

import pytest

from straggle import RankReport, StageReport, StepReport
from straggle.advise.slow import find_slow_ranks
from straggle.advise.timings import read_timings
from straggle.observe.trace import TraceWriter
from straggle.policies.what_if.ddp_time import DdpPrediction

STAGES = tuple(StageReport(name, 10, 4.0, False) for name in ("head", "body"))


def a_rank(number, cost, slowness, step, **rest):
    compute_s = cost * slowness * (0.3 + 0.001 * ((step + number) % 3))
    times = {"outside_s": 0.0, "data_s": 0.01, "forward_s": compute_s / 3, "backward_s": 2 * compute_s / 3}
    stage_s = (compute_s * 0.7, compute_s)
    whole = {"wait_s": 0.0, "reach": 1.0, "stages": (1.0, 1.0), "stage_s": stage_s}
    return RankReport(rank=number, **times, **whole, compute_s=compute_s, cost=cost, **rest)


def write_trace(folder, cost, slowness):
    """Rank 1's steps have this cost, and it takes so many times as long for it as its peers would."""
    with TraceWriter(folder / "trace.jsonl") as trace:
        for step in range(60):
            ranks = [a_rank(rank, *((cost, slowness) if rank == 1 else (1.0, 1.0)), step) for rank in range(4)]
            seconds = max(rank.compute_s for rank in ranks) + 0.02
            trace.write(StepReport(step, seconds, 9.0, tuple(ranks), STAGES))
    return read_timings(folder)


@pytest.mark.parametrize(("cost", "slowness", "slow"), [(2.0, 1.0, []), (1.0, 2.0, [1]), (2.0, 1.5, [1])])
def test_slow_is_who_takes_longer_than_its_steps_cost(cost, slowness, slow, tmp_path):
    timings = write_trace(tmp_path, cost, slowness)
    assert [rank.rank for rank in find_slow_ranks(timings).ranks] == slow
    assert timings.network_s == pytest.approx(0.01, abs=1e-6)  # data takes the other hundredth


def test_untruncated_time_of_a_late_rank_is_predicted_from_its_peers_and_its_own_cost():
    peers = [a_rank(number, 1.0, 1.0, 0) for number in (0, 3)]
    late = replace(
        a_rank(1, 2.0, 1.0, 0),
        forward_s=0.2,
        backward_s=0.1,
        compute_s=0.3,
        reach=0.5,
        stages=(1.0, 0.0),
        stage_s=(float("nan"),) * 2,
        late=True,
    )
    report = StepReport(0, 0.4, 0.3, (peers[0], late, peers[1]), STAGES)
    assert DdpPrediction().add(report).own_s[1] == pytest.approx(2.0 * 0.3)
