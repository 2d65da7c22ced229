"""The simulator: its delays, its communication, and that its steps follow the library's own policies."""

import json
import math
from itertools import islice

import pytest
import torch

from straggle import AutoDeadline, Deadline, FirstK, FixedDeadline, LateHandling, Shadow, WaitForAll
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError
from straggle.lab.faults import dropcompute_factors
from straggle.lab.simulate.communication import Constant, Ring, Tree
from straggle.lab.simulate.delays import (
    DropCompute,
    Exponential,
    LogNormal,
    NoDelay,
    Normal,
    RecordedDelays,
    SlowRanks,
    Stalls,
)
from straggle.lab.simulate.ranks import simulate, simulate_times, without_slow
from straggle.lab.simulate.summary import numbers_of, rows_of
from straggle.lab.simulate.units import Work

MODELS = [
    (NoDelay(), 1.0, 0.0),
    (Normal(0.1), 1.0, 0.1),
    (LogNormal(0.5), math.exp(0.125), math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
    (Exponential(0.5), 1.5, 0.5),
    (DropCompute(), 1.5, 0.581),
]


def drawn(delays, steps, ranks, base_s=(1.0, 2.0), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(list(islice(delays.steps(torch.tensor(base_s), ranks, generator), steps)))


@pytest.mark.parametrize(("delays", "mean", "std"), MODELS, ids=lambda value: type(value).__name__)
def test_delays_have_the_mean_and_the_spread_that_they_name(delays, mean, std):
    times = drawn(delays, 20, 2000)
    for unit, base_s in enumerate((1.0, 2.0)):
        assert float(times[..., unit].mean()) == pytest.approx(base_s * mean, rel=0.02)
        assert float(times[..., unit].std()) == pytest.approx(base_s * std, rel=0.03, abs=1e-6)


@pytest.mark.parametrize("delays", [Stalls(Normal(), 0.1, 1.0), SlowRanks(Normal(), 0.2, 2.0, lasts_steps=3.0)])
def test_a_seed_gives_the_same_delays_again(delays):
    assert torch.equal(drawn(delays, 3, 16), drawn(delays, 3, 16))
    assert not torch.equal(drawn(delays, 3, 16), drawn(delays, 3, 16, seed=1))


def test_dropcompute_is_the_model_of_the_faults():
    times = drawn(DropCompute(0.7), 1, 5, (1.0,))
    expected = dropcompute_factors((5, 1), torch.Generator().manual_seed(0), 0.7)
    torch.testing.assert_close(times[0], expected.float())


def test_stalls_strike_a_rank_as_often_as_they_say_and_in_one_unit():
    extra = drawn(Stalls(NoDelay(), 0.1, 5.0), 100, 200) - torch.tensor([1.0, 2.0])
    struck = extra > 0
    assert set(extra[struck].tolist()) == {5.0}
    assert float(struck.any(-1).double().mean()) == pytest.approx(0.1, abs=0.01)
    assert int(struck.sum(-1).max()) == 1


def test_slow_ranks_are_the_same_in_all_steps_or_change_at_their_share():
    always = drawn(SlowRanks(NoDelay(), 0.25, 3.0), 10, 8)[..., 0] == 3.0
    assert always.sum(1).tolist() == [2] * 10
    assert bool((always == always[0]).all())
    changing = drawn(SlowRanks(NoDelay(), 0.25, 3.0, lasts_steps=5.0), 400, 400)[..., 0] == 3.0
    assert float(changing.double().mean()) == pytest.approx(0.25, abs=0.01)
    ended = changing[:-1] & ~changing[1:]
    assert float(ended.sum() / changing[:-1].sum()) == pytest.approx(1 / 5, abs=0.01)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Normal(-1.0), "std=-1.0"),
        (lambda: Stalls(NoDelay(), 1.5, 1.0), "probability=1.5"),
        (lambda: SlowRanks(NoDelay(), 0.5, 2.0, lasts_steps=0.5), "lasts_steps=0.5"),
        (lambda: SlowRanks(NoDelay(), 0.9, 2.0, lasts_steps=2.0), "share=0.9"),
        (lambda: Work(0.0), "step_s=0.0"),
        (lambda: Work(1.0, forward_share=1.1), "forward_share=1.1"),
        (lambda: Work(1.0, checks_per_stage=2).units("step"), "checks_per_stage=2 with granularity='step'"),
        (lambda: Ring(1.0, bytes_per_s=0.0, latency_s=0.0), "bytes_per_s=0"),
    ],
)
def test_number_out_of_range_is_refused_with_its_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_allreduce_around_a_ring_and_through_a_tree():
    ring, tree = (kind(1000.0, bytes_per_s=100.0, latency_s=0.5) for kind in (Ring, Tree))
    assert ring.merge_s(4, 1.0) == pytest.approx(6 * (0.5 + 250 / 100))
    assert tree.merge_s(5, 0.5) == pytest.approx(2 * (3 * 0.5 + 500 / 100))
    assert ring.merge_s(1, 1.0) == tree.merge_s(1, 1.0) == 0.0


@pytest.mark.parametrize("granularity", ["stage", "microbatch", "step"])
def test_units_of_work_take_the_step_and_bring_all_gradients(granularity):
    units = Work(6.0, num_stages=4, num_microbatches=3, forward_share=0.5).units(granularity)
    assert units.base_s.tolist() == pytest.approx(
        {"stage": [2, 2, 1.25, 0.25, 0.25, 0.25], "microbatch": [2] * 3, "step": [6]}[granularity]
    )
    assert float(units.share.sum()) == pytest.approx(1.0)
    assert (len(units.stage_share), units.in_stages) == (4, granularity == "stage")


# -- steps


def times_of(*ranks):
    return torch.tensor(ranks)


def run(unit_s, deadline, *, steps=3, late_handling=None, network=None, **work):
    work = Work(1.0, num_stages=unit_s.shape[1], **work)
    late_handling = late_handling or LateHandling(quorum=1)
    units = work.units(late_handling.granularity)
    return simulate_times([unit_s] * steps, units, deadline, late_handling, network or Constant())


SLOW_LAST = times_of([1.0, 1.0], [1.0, 1.0], [1.0, 5.0])


def test_a_rank_that_is_late_hands_in_what_it_has():
    result = run(SLOW_LAST, FixedDeadline(3.5))
    assert result.step_s.tolist() == [6.0, 3.5, 3.5]  # no rank is late in the first step
    assert result.all_s.tolist() == [6.0] * 3
    assert result.dropped.tolist() == pytest.approx([0.0, 0.5 / 6, 0.5 / 6])  # half of its second stage
    assert result.late_steps.tolist() == [0, 0, 2]
    assert result.reach[2].tolist() == pytest.approx([1.0, 2 / 3])
    assert result.speedup == pytest.approx((1 - 0.5 / 9) * 18 / 13)


def test_of_the_first_unit_what_backward_finished_counts():
    # two seconds of forward pass, one of each stage's backward pass; stopped half-way through the first stage's
    result = run(times_of([1.0, 0.5], [3.0, 1.0]), FixedDeadline(2.5), forward_share=0.5)
    assert result.reach[1].tolist() == pytest.approx([(1 + 2 * 0.5) / 3, 1 / 3])


def test_first_k_waits_for_k_ranks_and_its_grace():
    assert run(SLOW_LAST, FirstK(2, grace_s=1.0)).step_s.tolist() == [6.0, 3.0, 3.0]


@pytest.mark.parametrize(("k", "ranks"), [(5, 6), (15, 16), (96, 100)])
def test_step_of_the_first_k_takes_the_mean_of_the_kth_of_exponential_times(k, ranks):
    step_s = simulate(1001, ranks, Work(1.0, num_stages=1, forward_share=0.0), Exponential(1.0), FirstK(k)).step_s[1:]
    expected_s = 1 + sum(1 / n for n in range(ranks - k + 1, ranks + 1))
    assert float(step_s.mean()) == pytest.approx(expected_s, abs=4 * float(step_s.std()) / 1000**0.5)


def test_whole_microbatches_are_finished_within_the_grace():
    for grace_s, seconds, dropped in ((9.0, 6.0, 0.0), (1.0, 3.0, 1 / 6)):
        late_handling = LateHandling(quorum=1, granularity="microbatch", grace_s=grace_s)
        units = Work(2.0, num_microbatches=2, num_stages=3).units("microbatch")
        result = simulate_times([SLOW_LAST] * 2, units, FixedDeadline(2.0), late_handling, Constant())
        assert (float(result.step_s[1]), float(result.dropped[1])) == pytest.approx((seconds, dropped))


def test_where_whole_steps_are_dropped_a_late_rank_hands_in_nothing():
    late_handling = LateHandling(quorum=1, granularity="step")
    in_one = run(SLOW_LAST.sum(1, keepdim=True), FixedDeadline(5.0), late_handling=late_handling)
    in_stages = simulate_times(
        [SLOW_LAST] * 3, Work(1.0, num_stages=2).units("stage"), FixedDeadline(5.0), late_handling, Constant()
    )
    for result in (in_one, in_stages):
        assert result.step_s.tolist() == [6.0, 5.0, 5.0]
        assert result.dropped.tolist() == pytest.approx([0.0, 1 / 3, 1 / 3])


def test_a_stage_is_merged_while_those_after_it_are_computed():
    unit_s = times_of([1.0, 1.0], [2.0, 1.0])
    overlapped, after = (
        run(unit_s, WaitForAll(), network=Constant(3.0), overlap=overlap, overhead_s=0.25) for overlap in (True, False)
    )
    assert overlapped.step_s.tolist() == [2.0 + 1.5 + 1.5 + 0.25] * 3
    assert after.step_s.tolist() == [3.0 + 3.0 + 0.25] * 3


def test_a_deadline_that_is_not_enforced_stops_nobody():
    result = run(SLOW_LAST, Shadow(FixedDeadline(2.5)))
    assert result.step_s.tolist() == [6.0] * 3
    assert result.late_steps.tolist() == [0, 0, 0]


class Watching(Deadline):
    """Keeps what it is shown."""

    window = 4
    wants_progress = True

    def __init__(self):
        self.seen = []

    def prepare(self, late_handling, parts=()):
        self.late_handling, self.parts = late_handling, parts

    def decide(self, history):
        self.seen.append(history)
        return 3.5


def test_policy_sees_the_steps_as_in_training():
    policy = Watching()
    run(SLOW_LAST, policy)
    history = policy.seen[-1]
    assert history.num_steps == 3
    assert history.finished.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    assert history.compute_s.tolist() == [[2.0, 2.0, 6.0], [2.0, 2.0, 3.5], [2.0, 2.0, 3.5]]
    assert history.progress.unit_s[1, 2, 0] == 1.0
    assert math.isnan(history.progress.unit_s[1, 2, 1])
    assert history.progress.computed[1].tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.5]]


def test_policy_is_shown_some_of_very_many_ranks_and_their_share_of_the_quorum():
    policy = Watching()
    simulate(2, 1000, Work(1.0), NoDelay(), policy, late_handling=LateHandling(quorum=900), history_ranks=10)
    assert policy.seen[-1].compute_s.shape == (2, 10)
    assert policy.late_handling.quorum == 9


@pytest.mark.parametrize(
    ("granularity", "checks", "parts"), [("stage", 3, [3, 3]), ("stage", 0, [100, 100]), ("microbatch", 0, [])]
)
def test_policy_is_told_in_how_many_parts_a_late_rank_drops_stages(granularity, checks, parts):
    policy, work = Watching(), Work(1.0, num_stages=2, checks_per_stage=checks)
    simulate(1, 4, work, NoDelay(), policy, late_handling=LateHandling(granularity=granularity))
    assert policy.parts == parts


def test_quorum_of_more_ranks_than_there_are_is_refused():
    with pytest.raises(ValueError, match="quorum=5: there are only 4 ranks"):
        simulate(1, 4, Work(1.0), NoDelay(), FirstK(5))


def test_auto_deadline_drops_what_it_predicts():
    result = simulate(300, 64, Work(1.0), DropCompute(), AutoDeadline())
    assert result.speedup > 1.2
    realised, predicted = result.dropped[20:].mean(), result.predicted_drop[20:].mean()
    assert float(realised) == pytest.approx(float(predicted), abs=0.01)


# -- a recorded run


def record(step, compute_s, stage_s, late=(), seconds=3.0):
    others = {"stages": [], "reach": 1.0, "wait_s": 0.0}
    ranks = [
        {"rank": rank, "compute_s": c, "forward_s": c, "stage_s": s, "late": rank in late, **others}
        for rank, (c, s) in enumerate(zip(compute_s, stage_s, strict=True))
    ]
    stages = [{"name": name, "numel": 2, "weight": 3.0} for name in "ab"]
    return {"step": step, "seconds": seconds, "deadline_s": None, "ranks": ranks, "stages": stages}


def recorded(folder, records, block=0):
    (folder / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return RecordedDelays(str(folder), block=block)


def test_what_a_late_rank_did_not_finish_takes_as_much_longer_as_what_it_did(tmp_path):
    whole = record(1, [2.0, 2.0, 4.0], [[1.0, 2.0], [1.0, 2.0], [2.0, 4.0]], seconds=4.5)
    cut = record(2, [2.0, 2.0, 2.5], [[1.0, 2.0], [1.0, 2.0], [2.0, None]], late=(2,))
    delays = recorded(tmp_path, [whole, cut] * 6)
    assert drawn(delays, 11, 3).tolist() == [[[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]] * 11
    assert delays.units(Work(1.0).units("stage")).overhead_s == 0.5


def test_replay_keeps_the_order_within_blocks_and_draws_each_group_of_ranks_by_itself(tmp_path):
    records = [record(n, [float(n), 2.0 * n], [[0.5 * n, 0.9 * n], [n, 1.9 * n]]) for n in range(12)]
    times = drawn(recorded(tmp_path, records, block=4), 40, 4)
    whole = times.sum(-1)
    torch.testing.assert_close(whole[:, 1], 2 * whole[:, 0])  # the ranks of a step stay together
    assert not torch.allclose(whole[:, 2], whole[:, 0])
    steps = whole[:, 0].round().int()
    follows = (steps[1:] == steps[:-1] % 11 + 1).view(-1)
    assert bool(follows[[n for n in range(39) if n % 4 != 3]].all())
    in_order = drawn(recorded(tmp_path, records), 11, 2).sum(-1)[:, 0]
    assert in_order.tolist() == pytest.approx(list(range(1, 12)))


# -- the command


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("delays=x", "choose one of dropcompute"),
        ("delays.factr=2", "unknown key delays.factr"),
        ("ranks=0", "ranks=0: must be an integer of at least 1"),
        ("work.step_s=-1", "step_s=-1"),
        ("network.latency=1", "unknown key network.latency"),
        ("late_handling.quorum=65", "quorum=65: there are only 64 ranks"),
        ("delays=replay", "no such file"),
        ("workload=text", "unknown key workload; valid keys: ranks"),
    ],
)
def test_wrong_configuration_is_refused_with_what_is_valid(override, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=complaint):
        load("simulate", [override])


def test_without_a_rank_that_is_always_slow_the_others_have_its_samples():
    delays = SlowRanks(NoDelay(), share=0.25, factor=3.0)
    found = simulate(50, 4, Work(0.3), delays, WaitForAll())
    (one,) = found.without
    assert one.all_s == pytest.approx(float(found.all_s.mean()))
    assert one.all_s - one.step_s == pytest.approx(3 * 0.3 - 4 / 3 * 0.3)  # what the network takes is in both
    assert numbers_of(found)["without"][0]["ranks"] == list(one.ranks)
    assert [row[0] for row in rows_of(numbers_of(found)) if "without" in row[0]] == [
        f"waiting without rank {one.ranks[0]}"
    ]


def test_slow_ranks_are_left_out_one_by_one_and_together_and_none_where_all_only_vary():
    whole_s = torch.ones(10, 4)
    whole_s[:, 1], whole_s[:6, 3] = 2.0, 1.5
    assert [one.ranks for one in without_slow(whole_s, whole_s.amax(1))] == [(1,), (3,), (1, 3)]
    assert [one.speedup for one in without_slow(whole_s, whole_s.amax(1))] == pytest.approx(
        [1.15384, 0.75, 1.0], rel=1e-3
    )
    assert not simulate(50, 8, Work(0.3), LogNormal(0.3), WaitForAll()).without
