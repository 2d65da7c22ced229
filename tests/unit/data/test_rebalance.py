"""Slow ranks get less of a step: how it is dealt out, how soon, and that the merged gradient is that of all samples."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from telemetry_rows import row_of
from torch.utils.hooks import RemovableHandle

from straggle import Rebalance
from straggle.data.shares import soonest
from straggle.lab.workloads.workload import Shard
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import absent_row
from straggle.policies.shares.sample_time import RankTime

STAGES = (0.4, 0.6, 0.8, 1.0)  # of a rank's time, when each stage is complete


class Telemetry:
    """Ranks that take ``overhead_s`` + ``pace`` seconds for a sample, and what they tell of it, without any rank.

    Before that, loading takes them ``load`` seconds for a sample and ``delay`` seconds beside that. With ``deadline``
    (over the median time) they are stopped there.
    """

    def __init__(self, pace, *, overhead=0.0, noise=0.0, deadline=math.inf, seed=0, rank=0, **options):
        self.pace, self.overhead, self.noise, self.deadline = list(pace), overhead, noise, deadline
        self.load, self.delay = [0.0] * len(self.pace), [0.0] * len(self.pace)
        self.rank, self.world_size = rank, len(self.pace)
        self.step, self.hooks = 0, OrderedDict()
        self.slowest_s = []
        self._draw = random.Random(seed)
        self.is_dealt, self.evenly, self.loads_missed = False, True, True
        self.rebalance = Rebalance(self, **{"total": 64 * len(self.pace), **options})

    def work_is_dealt(self, *, evenly=True, after=-1):
        assert after < self.step + 1
        self.is_dealt, self.evenly = True, evenly

    def dealt(self, *, idle):
        self.idle = idle

    def register_step_hook(self, hook):
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def run(self, num_steps, **changes):
        """Train; gives the shares of each step.

        ``stuck`` ranks never enter, ``idle`` ones have no data, ``absent`` ones are no members.
        """
        seen = []
        for _ in range(num_steps):
            seen.append(self.rebalance.shares)
            whole_s = [
                pace * (self.overhead + count) * math.exp(self._draw.gauss(0, self.noise))
                for pace, count in zip(self.pace, seen[-1], strict=True)
            ]
            if (stall := changes.get("stall")) and self._draw.random() < stall:
                whole_s[self._draw.randrange(len(whole_s))] += 1000.0
            self.slowest_s.append(max(whole_s))
            limit_s = self.deadline * sorted(whole_s)[(len(whole_s) - 1) // 2]
            rows = [
                self._row(rank, seen[-1][rank], own_s, limit_s, stuck=rank in changes.get("stuck", ()))
                if rank not in changes.get("idle", ())
                else self._idle_row()
                for rank, own_s in enumerate(whole_s)
            ]
            encoded = [
                absent_row(4) if rank in changes.get("absent", ()) else r.encode() for rank, r in enumerate(rows)
            ]
            table = Table(torch.stack(encoded), 4)
            for hook in self.hooks.values():
                hook(SimpleNamespace(step=self.step, table=table, deadline_s=self.deadline))
            self.step += 1
        return seen

    def _idle_row(self):
        nothing = {"computed": (1.0,) * 4, "estimated": (0.0,) * 4, "stage_s": (math.nan,) * 4}
        return row_of(compute_s=math.nan, idle=True, **nothing)

    def _row(self, rank, count, whole_s, limit_s, *, stuck):
        late = whole_s > limit_s or stuck
        ends = [math.nan if stuck or at * whole_s > limit_s else at * whole_s for at in STAGES]
        return row_of(
            compute_s=math.nan if stuck else min(whole_s, limit_s),
            busy_s=self.delay[rank] + self.load[rank] * count + (1.0 if stuck else min(whole_s, limit_s)),
            times={"data": self.delay[rank] + self.load[rank] * count},
            late=late,
            stood_in=stuck,
            weight=float(count),
            computed=tuple(0.0 if math.isnan(end) else 1.0 for end in ends),
            estimated=(0.0,) * 4,
            stage_s=tuple(ends),
        )


# -- dealing out


def test_shares_begin_equal_and_are_whole_multiples():
    assert Telemetry([1] * 4, total=256).rebalance.shares == (64,) * 4
    assert Telemetry([1] * 4, total=72, multiple_of=8).rebalance.shares == (24, 16, 16, 16)


# -- following the ranks' speeds


@pytest.mark.parametrize("overhead", [0.0, 16.0, 64.0])
@pytest.mark.parametrize("deadline", [math.inf, 1.1])
@pytest.mark.parametrize("slow", [1.5, 2.0, 4.0])
def test_rank_that_becomes_slow_and_recovers_is_balanced_within_50_steps(overhead, deadline, slow):
    ranks = Telemetry([1, 1, 1, 1], overhead=overhead, deadline=deadline, noise=0.02)
    assert set(ranks.run(60)) == {(64,) * 4}
    ranks.pace[3] = slow
    seen = ranks.run(50)
    best = soonest(256, [RankTime(overhead * pace, pace) for pace in ranks.pace], least=1)
    best_s = max(pace * (count + overhead) for pace, count in zip(ranks.pace, best, strict=True))

    def slowest_s(shares):
        return max(pace * (count + overhead) for pace, count in zip(ranks.pace, shares, strict=True))

    assert slowest_s(ranks.rebalance.shares) < 1.08 * best_s
    # no step is longer because it has less than at the balance
    assert all(slowest_s(shares) < 1.04 * best_s for shares in seen if shares[3] < best[3])
    ranks.pace[3] = 1
    ranks.run(50)
    assert slowest_s(ranks.rebalance.shares) < 1.08 * (64 + overhead)


def test_shares_do_not_jitter_where_times_are_noisy():
    ranks = Telemetry([1, 1, 2, 1], noise=0.1)
    ranks.run(100)
    assert len(set(ranks.run(400))) <= 4


def test_rank_that_stalls_now_and_then_is_not_slow():
    ranks = Telemetry([1] * 4, deadline=1.1)
    assert set(ranks.run(300, stall=0.3)) == {(64,) * 4}


def test_samples_stay_where_they_are_if_time_hardly_depends_on_them():
    ranks = Telemetry([1, 1, 1, 2], overhead=5000.0)
    seen = ranks.run(300)
    assert len(set(seen)) <= 2  # it has to try once
    assert min(min(shares) for shares in seen) > 30


# -- loading, and what does not go with the samples


def heard(caplog):
    return [record.getMessage() for record in caplog.records if "longer than the others" in record.getMessage()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rank_that_loads_its_samples_slowly_has_fewer(world_size, caplog):
    ranks = Telemetry([1.0] * world_size, noise=0.02)
    ranks.load[1] = 3.0
    ranks.run(60)
    best = soonest(64 * world_size, [RankTime(0.0, 4.0 if rank == 1 else 1.0) for rank in range(world_size)])
    assert ranks.rebalance.shares == pytest.approx(best, abs=4)
    assert heard(caplog) == []


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rank_with_a_fixed_delay_keeps_its_share_and_it_is_said_once_after_twenty_steps(world_size, noise, caplog):
    ranks = Telemetry([0.001] * world_size, noise=noise)
    ranks.delay[1] = 4.0
    seen = ranks.run(200)
    assert ranks.rebalance.shares == (64,) * world_size
    assert len(set(seen)) <= 2  # it has to try once
    assert set(seen[25:]) == {seen[0]}
    (words,) = heard(caplog)
    assert 20 <= int(words.split()[1].strip(":")) < 40
    took_ms = float(words.split(" takes ")[1].split()[0])
    assert took_ms == pytest.approx(4000, rel=0.1)
    assert "rank 1 takes" in words
    assert "loading data" in words
    assert not ranks.evenly


def test_slow_samples_of_a_rank_that_is_delayed_too_go_to_others():
    ranks = Telemetry([1.0, 1.0, 1.0, 1.0], noise=0.01)
    ranks.delay[1], ranks.load[1] = 60.0, 1.0
    ranks.run(80)
    best = soonest(256, [RankTime(60.0 * (rank == 1), 1.0 + (rank == 1)) for rank in range(4)])
    assert ranks.rebalance.shares == pytest.approx(best, abs=6)


def test_delay_that_ends_or_that_becomes_slow_samples_is_seen(caplog):
    ranks = Telemetry([1.0] * 4, noise=0.01)
    ranks.delay[1] = 300.0
    ranks.run(60)
    assert (ranks.evenly, len(heard(caplog))) == (False, 1)
    ranks.delay[1] = 0.0
    ranks.run(60)
    assert ranks.evenly
    assert ranks.rebalance.shares == pytest.approx((64,) * 4, abs=3)
    ranks.load[1] = 3.0
    ranks.run(80)
    assert ranks.rebalance.shares == pytest.approx((79, 20, 79, 78), abs=5)
    assert ranks.evenly


def test_rank_whose_samples_are_slow_is_not_said_to_be_delayed(caplog):
    ranks = Telemetry([1.0] * 4, total=32, noise=0.03)
    ranks.load[1] = 40.0
    ranks.run(100)
    assert ranks.rebalance.shares[1] == 1
    (words,) = heard(caplog)
    assert "rank 1" in words
    assert "and has no more samples to give to them" in words


def test_rank_with_one_sample_that_is_still_slow_is_named(caplog):
    ranks = Telemetry([1.0, 1.0, 1.0, 1.0], total=4)
    ranks.load[2] = 5.0
    assert set(ranks.run(40)) == {(1, 1, 1, 1)}
    (words,) = heard(caplog)
    assert "rank 2 takes 5000 ms longer than the others in each step, and has no more samples to give" in words


def test_rank_that_is_always_stopped_before_its_first_stage_gets_less_until_it_comes_through():
    ranks = Telemetry([1, 1, 1, 8], deadline=1.1)
    ranks.run(50)
    assert ranks.rebalance.shares[3] <= 12
    assert ranks.rebalance.shares[3] >= 7


def test_no_rank_has_less_than_the_least():
    ranks = Telemetry([1, 1, 1, 100], total=256, min_share=8, multiple_of=4)
    seen = ranks.run(200)
    assert min(min(shares) for shares in seen) == 8
    assert {sum(shares) for shares in seen} == {256}
    assert {count % 4 for shares in seen for count in shares} == {0}


def test_rank_that_is_spoken_for_keeps_its_share_until_it_is_measured_again():
    ranks = Telemetry([1, 1, 1, 2])
    ranks.run(40)
    settled = ranks.rebalance.shares
    assert settled[3] < 40
    assert set(ranks.run(60, stuck={3})) == {settled}


def test_rank_that_was_never_measured_is_taken_as_the_others():
    ranks = Telemetry([1, 1, 2, 1])
    ranks.run(100, stuck={3})
    assert ranks.rebalance.shares[2] < 40
    assert ranks.rebalance.shares[3] > 64


def test_rank_without_data_changes_nothing():
    ranks = Telemetry([1, 1, 1, 2])
    ranks.run(40)
    settled = ranks.rebalance.shares
    assert set(ranks.run(40, idle={0})) == {settled}
    assert set(ranks.run(40, idle={0, 1, 2, 3})) == {settled}


def test_closed_it_measures_no_more():
    ranks = Telemetry([1, 2])
    ranks.rebalance.close()
    assert set(ranks.run(40)) == {(64, 64)}
    assert len(set(Telemetry([1, 2]).run(40))) > 1


# -- how long a late rank would have taken


def late_table(ranks):
    """Rows of (compute_s, finished, num_microbatches, ends of micro-batches, ends of stages)."""
    rows = [
        row_of(
            compute_s=own_s,
            busy_s=own_s,
            late=not done,
            computed=(float(done),) * 2,
            estimated=(0.0,) * 2,
            stage_s=stage_s,
            num_microbatches=count,
            microbatch_s=microbatch_s,
        ).encode()
        for own_s, done, count, microbatch_s, stage_s in ranks
    ]
    return Table(torch.stack(rows), 2)


NO = math.nan


@pytest.mark.parametrize(
    ("late", "expected_s"),
    [
        ((1.5, False, 1, (), (1.2, NO)), 2.0),  # its first stage is at 0.6
        ((1.5, False, 1, (), (NO, NO)), 2.5),  # it had not even that: at least
        ((1.9, False, 1, (), (0.6, NO)), 1.9),  # it was stuck after its first stage
        ((1.5, False, 4, (0.7, 1.4), (NO, NO)), 2.8),  # two of four micro-batches
        ((1.8, False, 2, (1.0,), (1.6, NO)), 2.0),  # 0.8 is the first stage of the second of two
        ((NO, False, 1, (), (NO, NO)), NO),
    ],
)
def test_late_rank_would_have_taken_as_long_as_its_last_mark_tells(late, expected_s):
    peers = [(1.0, True, 1, (), (0.6, 1.0)), (1.1, True, 1, (), (0.66, 1.1)), (0.9, True, 1, (), (0.54, 0.9))]
    whole = late_table([*peers, late]).untruncated_times()
    assert [of.seconds for of in whole] == pytest.approx([1.0, 1.1, 0.9, expected_s], nan_ok=True)
    assert [of.at_least for of in whole] == [False, False, False, expected_s == 2.5]


def test_stages_are_marks_of_the_last_micro_batch_alone():
    peer = (4.0, True, 4, (1.0, 2.0, 3.0, 4.0), (3.6, 4.0))  # 0.4 of a micro-batch is left after the first stage
    late = (3.5, False, 2, (2.0,), (3.2, NO))
    assert [of.seconds for of in late_table([peer, late]).untruncated_times()] == pytest.approx([4.0, 4.0])


# -- its state


def test_resumed_it_goes_on_as_if_it_had_not_been_interrupted():
    ranks, others = (Telemetry([1, 1, 1, 2], overhead=20.0, noise=0.05) for _ in range(2))
    ranks.run(13)
    others.run(13)
    state = json.loads(json.dumps(ranks.rebalance.state_dict()))
    resumed = Rebalance(others, total=256)
    resumed.load_state_dict(state)
    others.rebalance = resumed
    assert ranks.run(80) == others.run(80)
    assert resumed.schedule == ranks.rebalance.schedule


def test_resumed_it_knows_of_a_rank_that_is_held_up():
    ranks = Telemetry([0.001] * 4)
    ranks.delay[1] = 4.0
    ranks.run(60)
    other = Telemetry([0.001] * 4)
    other.rebalance.load_state_dict(json.loads(json.dumps(ranks.rebalance.state_dict())))
    assert not other.evenly
    other.delay, other.step = ranks.delay, ranks.step
    assert set(other.run(60)) == {(64,) * 4}


def test_state_of_other_ranks_is_refused():
    state = Telemetry([1, 1], total=128).rebalance.state_dict()
    with pytest.raises(ValueError, match="these shares are of 128 for 2 ranks, not of 256 for 4"):
        Telemetry([1] * 4, total=256).rebalance.load_state_dict(state)


def test_replayed_it_gives_the_recorded_shares_whatever_it_measures():
    recorded = Telemetry([1, 1, 1, 3])
    seen = recorded.run(60)
    assert len(set(seen)) > 1
    replayed = Telemetry([3, 1, 1, 1])
    replayed.rebalance.replay(json.loads(json.dumps(recorded.rebalance.schedule)))
    assert replayed.run(60) == seen
    assert replayed.rebalance.schedule == recorded.rebalance.schedule


# -- the commands' data


def test_every_sample_comes_once_in_an_epoch_however_shares_change():
    shard = Shard(100, rank=0, world_size=4, batch_size=4, seed=0)
    shares = [(6, 6, 6, 6), (9, 9, 5, 1), (1, 1, 1, 21), (8, 8, 8, 0)]
    for epoch in (0, 1):
        seen = []
        for number, counts in enumerate(shares):
            first = 0
            for count in counts:
                seen += shard.part(4 * epoch + number, total=24, first=first, count=count).tolist()
                first += count
        assert len(seen) == len(set(seen)) == 96
        assert set(seen) <= set(range(100))


# -- absent ranks


@pytest.mark.parametrize("pace", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]])
def test_absent_rank_has_no_share_and_its_own_again_when_it_is_back(pace):
    telemetry = Telemetry(pace)
    telemetry.run(60)
    before = telemetry.rebalance.shares
    telemetry.run(1, absent={1})
    without = telemetry.rebalance.shares
    assert without[1] == 0
    assert sum(without) == sum(before) == 256
    times = [count * own for count, own in zip(without, pace, strict=True) if count]
    assert max(times) <= 1.05 * min(times)
    assert telemetry.run(30, absent={1}) == [without] * 30
    assert telemetry.run(5, stuck={1}) == [without] * 5  # its state arrives
    telemetry.run(1, idle={1})
    assert telemetry.rebalance.shares == pytest.approx(before, abs=2)
    assert telemetry.rebalance.schedule[-1] == (97, telemetry.rebalance.shares)


def test_shares_follow_the_speeds_while_a_rank_is_absent():
    telemetry = Telemetry([1.0, 1.0, 1.0])
    telemetry.run(30, absent={2})
    telemetry.pace[1] = 2.0
    telemetry.run(60, absent={2})
    assert telemetry.rebalance.shares == pytest.approx((128, 64, 0), abs=6)


def test_state_says_who_is_absent():
    one, other = Telemetry([1.0, 2.0, 1.0]), Telemetry([1.0, 2.0, 1.0])
    one.run(40)
    one.run(5, absent={2})
    other.rebalance.load_state_dict(json.loads(json.dumps(one.rebalance.state_dict())))
    other.step = one.step
    assert other.run(30, absent={2}) == one.run(30, absent={2})
    assert other.run(30) == one.run(30)


def test_rank_that_was_just_healed_is_given_samples_that_do_not_count():
    one, other = Telemetry([1.0, 1.0]), Telemetry([1.0, 1.0])
    one.idle = other.idle = False
    assert tuple(other.rebalance.share()) == (0, 64)
    one.run(1, absent={0})
    assert one.rebalance.shares == (64, 64)  # it is rank 0 itself, and knows of nothing
    peer = Telemetry([1.0, 1.0], rank=1)
    peer.run(1, absent={0})
    other.rebalance.load_state_dict(peer.rebalance.state_dict())
    assert other.idle  # its loop has samples that are another's now
    assert tuple(other.rebalance.share()) == (0, 1)
    assert other.idle
    other.run(1, idle={0})
    assert tuple(other.rebalance.share()) == (0, 64)
    assert not other.idle


def test_deadline_policy_knows_that_work_is_dealt():
    assert Telemetry([1.0, 1.0]).is_dealt
