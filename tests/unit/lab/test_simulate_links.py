"""Simulated links: beside what was measured over namespaces, over links that change, and with the policy."""

import pytest

from straggle import LinkPolicy, WaitForAll
from straggle.lab.simulate.communication import Ring
from straggle.lab.simulate.delays import NoDelay
from straggle.lab.simulate.links import Links, SlowLink
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work
from straggle.policies.rank_links import RankLink

NBYTES = 8 * (400 * 400 + 400) * 4
# What a step of the namespaces takes beside its 0.1 s and its links: the first row of the table, which is so given.
OVERHEAD_S = 0.036
# Seconds of a median step: straggle in `SLOWNET=... python benchmarks/network.py --ways none leaf`, with the cases
# none, one-5ms ... all-jitter, all-20MB/s, half and one-1MB/s. In the last row a leaf is max_lag steps behind.
MEASURED = [
    ("none", 0.136, {}, False),
    ("one rank 5 ms", 0.196, {"slow": {3: {"latency_s": 0.005}}}, False),
    ("one rank 20 ms", 0.380, {"slow": {3: {"latency_s": 0.02}}}, False),
    ("one rank 50 ms", 0.756, {"slow": {3: {"latency_s": 0.05}}}, False),
    ("all 5 ms", 0.212, {"latency_s": 0.005}, False),
    ("all 20 ms", 0.377, {"latency_s": 0.02}, False),
    ("all 50 ms", 0.766, {"latency_s": 0.05}, False),
    # 10 ms and up to 20 ms more for each packet: a part of a message waits for the last of its packets, and what says
    # that there is room for the next one is a single packet
    ("jitter on one rank", 0.452, {"slow": {3: {"latency_s": 0.01 + 0.02 * (1 + 0.5) / 2}}}, False),
    ("jitter on all", 0.452, {"latency_s": 0.01 + 0.02 * (1 + 0.5) / 2}, False),
    ("all 20 MB/s", 0.440, {"bytes_per_s": 20e6}, False),
    ("all 20 MB/s, with the policy", 0.448, {"bytes_per_s": 20e6}, True),
    ("one rank 10 MB/s", 0.827, {"bytes_per_s": 20e6, "slow": {3: {"bytes_per_s": 10e6}}}, False),
    ("one rank 10 MB/s, a leaf", 0.457, {"bytes_per_s": 20e6, "slow": {3: {"bytes_per_s": 10e6}}}, True),
    ("one rank 1 MB/s", 8.1, {"slow": {3: {"bytes_per_s": 1e6}}}, False),
    ("one rank 1 MB/s, a leaf", 1.7, {"slow": {3: {"bytes_per_s": 1e6}}}, True),
]


def simulated(steps=40, *, policy=False, overhead_s=OVERHEAD_S, ranks=4, **links):
    network = Links(NBYTES, **{"bytes_per_s": 1e9, "pairs": True} | links)
    work = Work(0.1, num_stages=4, overhead_s=overhead_s)  # stages below 1 MB share a message
    rule = LinkPolicy() if policy else None
    return simulate(steps, ranks, work, NoDelay(), WaitForAll(), network=network, links=rule)


@pytest.mark.parametrize(("name", "measured_s", "links", "policy"), MEASURED, ids=[row[0] for row in MEASURED])
def test_prediction_is_within_a_tenth_of_what_was_measured_over_namespaces(name, measured_s, links, policy):
    last = simulated(policy=policy, **links).step_s[-20:]
    assert float(last.median()) == pytest.approx(measured_s, rel=0.1), name


def test_steps_of_a_leaf_are_short_until_it_is_max_lag_steps_behind_as_was_measured():
    result = simulated(24, policy=True, slow={3: {"bytes_per_s": 1e6}})
    leaf_from = LinkPolicy().after_steps
    in_the_ring, short = result.step_s[:leaf_from], result.step_s[leaf_from : leaf_from + 8]
    behind = result.step_s[leaf_from + 10 :]
    assert min(in_the_ring) > 7.0
    assert max(short) < 0.17  # measured: 0.17 s, eight of them
    assert min(behind) > 1.6
    assert float(result.dropped[10]) == pytest.approx(0.25)  # it gave nothing
    assert result.reach[3].max() < 0.3 < result.reach[0].min() == 1.0


def test_a_link_is_slow_for_a_time_and_then_as_the_others_are():
    usual, slow = RankLink(0.0, 100.0, 100.0), SlowLink(0.5, up_bytes_per_s=10.0, slow_s=5.0, good_s=3.0)
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


def test_with_members_the_policy_puts_a_rank_out_and_lets_it_in_when_its_link_is_good():
    slow = {3: {"bytes_per_s": 1e6, "slow_s": 42.0, "good_s": 1e6}}
    result = simulated(200, policy=True, members=True, slow=slow)
    assert float(result.dropped[10]) == 0.25
    assert float(result.step_s[10]) == pytest.approx(float(result.step_s[-1]), rel=0.05)  # no step waits for it
    assert float(result.dropped[-1]) == 0.0


def test_without_a_policy_all_wait_for_all():
    result = simulated(12, slow={3: {"bytes_per_s": 1e6, "slow_s": 5.0, "good_s": 5.0}})
    assert result.step_s.tolist() == result.all_s.tolist()
    assert float(result.dropped.max()) == 0.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Links(1.0, bytes_per_s=0.0), "bytes_per_s=0"),
        (lambda: Links(1.0, bytes_per_s=1.0, slow={1: {"up_bytes_per_s": -1.0}}), "up_bytes_per_s=-1"),
        (lambda: Links(1.0, bytes_per_s=1.0, slow={4: {}}).merging(4, [1.0]), "ranks 0 to 3"),
        (lambda: Ring(1.0, bytes_per_s=1.0, latency_s=0.0).merging(4, [1.0], policy=LinkPolicy()), "network=links"),
    ],
)
def test_what_no_link_can_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
