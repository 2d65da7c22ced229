"""A rank outside of the ring: what is merged is the same on all ranks, and is the mean over what came in time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from ranks import die, digest, run_ranks, staged
from training import Chain, grads

from straggle import LateHandling, LinkPolicy
from straggle.backward import stages
from straggle.merge.replay import Decision, Recording
from straggle.policies.leaves import Places, SeenLinks

NUM_LAYERS = 5


@dataclass(frozen=True)
class Scheduled(LinkPolicy):
    """These leaves from these steps on, whatever the links are."""

    leaves: tuple[tuple[int, frozenset[int]], ...] = ()

    def next_places(self, now: Places, seen: SeenLinks) -> Places:  # noqa: ARG002
        wanted = now.leaves
        for step, leaves in self.leaves:
            if now.step >= step:
                wanted = leaves
        return Places(wanted, step=now.step + 1)


def train_chain(rank, schedule, num_steps, event=None, options=None, stretch=1.2):
    """Gradients and reports of all steps; ``event``: a rank, a step, and for how many seconds it is stuck or None."""
    stages.BUCKET_BYTES = 1
    module = Chain(NUM_LAYERS)
    results = []
    policy = Scheduled(stretch=stretch, leaves=tuple((step, frozenset(leaves)) for step, leaves in schedule))
    with staged(module, links=policy, stages=[f"layers.{i}" for i in range(NUM_LAYERS)], **(options or {})) as model:
        for number in range(num_steps):
            with model.step():
                loss = model(10.0 * rank + 1)
                if event is not None and (rank, number) == event[:2]:
                    die() if event[2] is None else time.sleep(event[2])
                loss.backward()
            results.append((grads(module), model.last_report))
            for parameter in module.parameters():
                parameter.grad = None
    return results


def check(results):
    """Each merged gradient is the mean over what the report says, on every rank with the same bits."""
    for step in zip(*results, strict=True):
        gradients, report = step[0]
        assert len({digest(own) for own, _ in step}) == 1
        assert len({str([(rank.stages, rank.cause) for rank in other.ranks]) for _, other in step}) == 1
        for number, stage in enumerate(report.stages):
            share = [rank.stages[number] for rank in report.ranks]
            mean = sum(own * (10.0 * rank + 1) for rank, own in enumerate(share)) / sum(share)
            layer = int(stage.name.partition(".")[2])
            torch.testing.assert_close(gradients[layer], torch.full((2 + layer,), (layer + 1) * mean))


def test_what_leaves_merge_with_the_ring_is_the_mean_over_what_came_in_time():
    results = run_ranks(train_chain, 4, [(3, {3}), (12, {1, 3}), (25, ())], 50)
    check(results)
    reports = [report for _, report in results[0]]
    assert {rank.cause for report in reports for rank in report.ranks if rank.reach < 1} <= {"link"}
    assert all(report.ranks[rank].reach == 1 for report in reports for rank in (0, 2))
    assert all(report.dropped_share == 0 for report in reports[-5:])
    since = [report.ranks[3].leaf_since for report in reports]
    first = since.index(next(filter(None, since)))
    assert 4 <= first == since[first]  # the ring is formed in a step or more
    assert since == [None] * first + [first] * since.count(first) + [None] * (50 - first - since.count(first))
    assert {report.ranks[0].leaf_since for report in reports} == {None}


def replay_leaves(_):
    decisions = (Decision(0, 2, None, False), Decision(1, 2, None, False, leaves=(3,)))
    with staged(Chain(2)) as model, pytest.raises(ValueError, match=r"from step 1 on ranks \[3\] were outside"):
        model.replay(Recording((), (), decisions))


def test_a_recording_of_a_run_with_leaves_is_refused():
    run_ranks(replay_leaves, 1)


def test_parents_that_have_patience_wait_for_all_of_a_leafs_gradients():
    results = run_ranks(train_chain, 3, [(3, {2})], 30, None, {}, 1000.0)
    check(results)
    came = [report.ranks[2].reach for _, report in results[0][12:]]
    assert sum(came) / len(came) > 0.7  # but for the steps in which they do not wait, to know what is usual


def test_rank_0_may_be_a_leaf():
    results = run_ranks(train_chain, 3, [(3, {0})], 30)
    check(results)
    assert all(rank.reach == 1 for _, report in results[0] for rank in report.ranks[1:])


def test_a_leaf_that_is_stuck_is_stood_in_for_and_applies_what_was_merged():
    options = {"deadline": 0.1, "late_handling": LateHandling(grace_s=0.05, max_lag=100)}
    results = run_ranks(train_chain, 3, [(3, {2})], 60, (2, 25, 1.0), options)
    check(results)
    assert results[2][25][1].ranks[2].reach < 1


@pytest.mark.parametrize("rank", [0, 2])
def test_where_a_leaf_or_a_parent_dies_the_others_end_with_a_sentence(rank):
    ends = run_ranks(train_chain, 3, [(3, {2})], 60, (rank, 25, None), outcomes=True)
    assert [end.kind for end in ends] == ["Killed" if other == rank else "PeerFailed" for other in range(3)]
    assert all(
        f"ranks [{rank}]" in end.message or f"rank {rank}" in end.message for end in ends if end.kind != "Killed"
    )
