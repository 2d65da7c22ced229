"""Simulated links: beside what was measured over namespaces, and over links that change."""

import pytest

from straggle import WaitForAll
from straggle.lab.simulate.delays import NoDelay
from straggle.lab.simulate.links import ImpairedLink, Links
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work
from straggle.policies.rank_links import RankLink

NBYTES = 8 * (400 * 400 + 400) * 4
# What a step of the namespaces takes beside its 0.1 s and its links: the first row of the table, which is so given.
OVERHEAD_S = 0.036
# Seconds of a median step: straggle in `SLOWNET=... python benchmarks/network.py --ways none`, with the cases
# none, one-5ms ... all-jitter, all-20MB/s, half and one-1MB/s.
MEASURED = [
    ("none", 0.136, {}),
    ("one rank 5 ms", 0.196, {"slow": {3: {"latency_s": 0.005}}}),
    ("one rank 20 ms", 0.380, {"slow": {3: {"latency_s": 0.02}}}),
    ("one rank 50 ms", 0.756, {"slow": {3: {"latency_s": 0.05}}}),
    ("all 5 ms", 0.212, {"latency_s": 0.005}),
    ("all 20 ms", 0.377, {"latency_s": 0.02}),
    ("all 50 ms", 0.766, {"latency_s": 0.05}),
    # 10 ms and up to 20 ms more for each packet: a part of a message waits for the last of its packets, and what says
    # that there is room for the next one is a single packet
    ("jitter on one rank", 0.452, {"slow": {3: {"latency_s": 0.01 + 0.02 * (1 + 0.5) / 2}}}),
    ("jitter on all", 0.452, {"latency_s": 0.01 + 0.02 * (1 + 0.5) / 2}),
    ("all 20 MB/s", 0.440, {"bytes_per_s": 20e6}),
    ("one rank 10 MB/s", 0.827, {"bytes_per_s": 20e6, "slow": {3: {"bytes_per_s": 10e6}}}),
    ("one rank 1 MB/s", 8.1, {"slow": {3: {"bytes_per_s": 1e6}}}),
]


def simulated(steps=40, *, overhead_s=OVERHEAD_S, ranks=4, **links):
    network = Links(NBYTES, **{"bytes_per_s": 1e9} | links)
    work = Work(0.1, num_stages=4, overhead_s=overhead_s)  # stages below 1 MB share a message
    return simulate(steps, ranks, work, NoDelay(), WaitForAll(), network=network)


@pytest.mark.parametrize(("name", "measured_s", "links"), MEASURED, ids=[row[0] for row in MEASURED])
def test_prediction_is_within_a_tenth_of_what_was_measured_over_namespaces(name, measured_s, links):
    last = simulated(**links).step_s[-20:]
    assert float(last.median()) == pytest.approx(measured_s, rel=0.1), name


def test_a_link_is_slow_for_a_time_and_then_as_the_others_are():
    usual, slow = RankLink(0.0, 100.0, 100.0), ImpairedLink(0.5, up_bytes_per_s=10.0, slow_s=5.0, good_s=3.0)
    assert slow.over(usual, 4.9) == slow.over(usual, 8.0) == RankLink(0.5, 10.0, 100.0)
    assert slow.over(usual, 5.0) == slow.over(usual, 7.9) == usual
    assert [slow.changes_after(at) for at in (0.0, 5.0, 7.9, 8.0)] == [5.0, 8.0, 8.0, 13.0]


def test_what_was_merged_before_a_link_changes_stays_merged():
    bytes_per_s = {"slow": {3: {"bytes_per_s": 1e6, "slow_s": 5.0, "good_s": 5.0}}, "bytes_per_s": 20e6}
    steps = simulated(3, overhead_s=0.0, **bytes_per_s).step_s.tolist()
    needs_s = 2 * 3 / 4 * NBYTES / 1e6
    done = (5.0 - 0.05) / needs_s  # the first message is ready after half of the work
    assert steps[0] == pytest.approx(5.0 + (1 - done) * needs_s / 20, rel=1e-3)
    assert steps[1] == pytest.approx(0.05 + needs_s / 20, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Links(1.0, bytes_per_s=0.0), "bytes_per_s=0"),
        (lambda: Links(1.0, bytes_per_s=1.0, slow={1: {"up_bytes_per_s": -1.0}}), "up_bytes_per_s=-1"),
        (lambda: Links(1.0, bytes_per_s=1.0, slow={4: {}}).merging(4, [1.0]), "ranks 0 to 3"),
    ],
)
def test_what_no_link_can_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
