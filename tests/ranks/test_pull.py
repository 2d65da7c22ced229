"""A step's micro-batches drawn from one pool: whoever draws what, the merged gradient is the mean over all of them."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, digest, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, grads, mlp, shared

from straggle import Abstain, FixedDeadline, LastOwn
from straggle.replay.wing import Recording

pytestmark = pytest.mark.light
NUM_PARTS = 8


def parts_of(step, number=NUM_PARTS):
    """The step's micro-batches, the same on every rank."""
    return [features(part, step) for part in range(number)]


def loss_of(model, x):
    return model(x).square().mean()


def first_step(model):
    """In which the pool is dealt out equally; draws begin with the next one."""
    with model.step() as step:
        for x in step.pull(parts_of(0)):
            loss_of(model, x).backward()
    model.zero_grad()


def mean_gradients(parts, weights=None):
    """By one process, over all micro-batches."""
    module = mlp()
    weights = weights or [1.0] * len(parts)
    for x, weight in zip(parts, weights, strict=True):
        (loss_of(module, x) * weight / sum(weights)).backward()
    return grads(module)


def pulled(rank, num_steps, weights):
    """Gradients, and what each rank did."""
    module = mlp()
    results = []
    with staged(module) as model:
        for number in range(num_steps):
            with model.step() as step:
                for x in step.pull(parts_of(number), weights=weights):
                    loss_of(model, x).backward()
            report = model.last_report
            results.append((digest(grads(module)), grads(module), report, shared(report)))
            module.zero_grad()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 4.0, 0.5)])
def test_the_merged_gradient_is_the_mean_over_all_micro_batches(world_size, weights):
    ranks = run_ranks(pulled, world_size, 4, weights)
    for number in range(4):
        steps = [own[number] for own in ranks]
        assert len({step[0] for step in steps}) == 1  # bit for bit the same on all ranks
        assert len({step[3] for step in steps}) == 1
        expected = mean_gradients(parts_of(number), list(weights) if weights else None)
        for merged, mean in zip(steps[0][1], expected, strict=True):
            torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-7)
        report = steps[0][2]
        assert sum(own.parts for own in report.ranks) == report.pool_parts == NUM_PARTS
        assert sum(own.weight for own in report.ranks) == report.pool_weight == sum(weights or [1] * NUM_PARTS)
        assert report.dropped_share == 0.0
        assert not report.late_ranks


def late_to_come(rank, estimator):
    """In the second step rank 1 does not come before rank 0 has done all there is: then nothing is left for it."""
    store, module, seen = dist.distributed_c10d._get_default_store(), mlp(), []
    with staged(module, estimator=estimator) as model:
        for number in range(3):
            if number == 1 and rank == 1:
                store.wait(["rank 0 is done"])
            with model.step() as step:
                for x in step.pull(parts_of(number)):
                    loss_of(model, x).backward()
                if number == 1 and rank == 0:
                    store.set("rank 0 is done", "")
            report = model.last_report
            seen.append((digest(grads(module)), grads(module), report))
            module.zero_grad()
    return seen


@pytest.mark.parametrize("estimator", [None, LastOwn()], ids=["none", "LastOwn"])
def test_a_rank_that_does_not_come_has_its_sure_share_done_by_the_others(estimator):
    first, second = run_ranks(late_to_come, 2, estimator)
    assert [step[0] for step in first] == [step[0] for step in second]
    report = first[1][2]
    assert [own.parts for own in report.ranks] == [NUM_PARTS, 0]
    assert [own.weight for own in report.ranks] == [NUM_PARTS, 0]
    assert [own.idle for own in report.ranks] == [False, True]
    assert (report.dropped_share, report.late_ranks) == (0.0, ())
    for number in (1, 2):  # nothing stands for what it had not drawn, nor is it made up for afterwards
        for merged, mean in zip(first[number][1], mean_gradients(parts_of(number)), strict=True):
            torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-7)
    assert sum(own.parts for own in first[2][2].ranks) == NUM_PARTS  # and goes on


def slow_in_its_first(rank):
    """Rank 1 is in its first micro-batch until the others have done all that they can have."""
    store, module, own = dist.distributed_c10d._get_default_store(), mlp(), []
    with staged(module) as model:
        first_step(model)
        with model.step() as step:
            for number, x in step.pull(list(enumerate(parts_of(0)))):
                own.append(number)
                if rank == 1 and len(own) == 1:
                    store.set("its share is claimed", "")
                    store.wait(["others are done/0", "others are done/2"])
                elif rank != 1 and len(own) == 1:
                    store.wait(["its share is claimed"])
                loss_of(model, x).backward()
            if rank != 1:
                store.set(f"others are done/{rank}", "")
        return digest(grads(module)), grads(module), own, model.last_report


def test_a_slow_rank_does_its_sure_share_and_the_others_the_rest():
    ranks = run_ranks(slow_in_its_first, 3)
    assert len({own[0] for own in ranks}) == 1
    assert sorted(number for own in ranks for number in own[2]) == list(range(NUM_PARTS))
    # in the step before it did three: two of them are sure now
    assert len(ranks[1][2]) == 2
    for merged, mean in zip(ranks[0][1], mean_gradients(parts_of(0)), strict=True):
        torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-7)


def stuck_in_its_first(rank):
    """In the fifth step rank 1 is in its first micro-batch until what it had beside that is put back and done."""
    store, module, own = dist.distributed_c10d._get_default_store(), mlp(), []
    with staged(module, deadline=None) as model:
        first_step(model)
        # as after steps in which all ranks did as much, each micro-batch in a millisecond
        model.pulling.load_state_dict({"done": [[[1 / 3, 1e-3]] * 3] * 4, "present": [True] * 3, "draws": True})
        with model.step() as step:
            for number, x in step.pull(list(enumerate(parts_of(0, 12)))):
                own.append(number)
                if rank == 1 and len(own) == 1:
                    while not model.pulling.num_put_back:
                        time.sleep(0.001)
                    store.set("it is put back", "")
                    store.wait(["others are done/0", "others are done/2"])
                elif rank != 1 and len(own) == 1:
                    store.wait(["it is put back"])
                loss_of(model, x).backward()
            if rank != 1:
                store.set(f"others are done/{rank}", "")
        return digest(grads(module)), grads(module), own, model.last_report


def test_what_a_stuck_rank_has_not_begun_is_put_back_and_done_by_the_others():
    ranks = run_ranks(stuck_in_its_first, 3, timeout_s=25.0)
    assert len({own[0] for own in ranks}) == 1
    assert sorted(number for own in ranks for number in own[2]) == list(range(12))
    assert len(ranks[1][2]) == 1
    report = ranks[0][3]
    assert report.ranks[1].put_back > 0
    assert (report.dropped_share, report.late_ranks) == (0.0, ())
    for merged, mean in zip(ranks[0][1], mean_gradients(parts_of(0, 12)), strict=True):
        torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-7)


def between_two_steps(rank, estimator):
    """Rank 1 does not enter the sixth step before the others have merged it: nobody waits, though none can be late."""
    store, module = dist.distributed_c10d._get_default_store(), mlp()
    with staged(module, deadline=None, estimator=estimator) as model:
        for _ in range(5):
            first_step(model)
        if rank == 1:
            store.wait(["merged/0", "merged/2"])
        seen, reports = [], []
        for number in range(2):
            with model.step() as step:
                for x in step.pull(parts_of(number)):
                    if number == 1:  # there is something for the one that was not there
                        store.set("it is back", "") if rank == 1 else store.wait(["it is back"])
                    loss_of(model, x).backward()
            if number == 0:
                store.set(f"merged/{rank}", "")
            seen.append(grads(module))
            reports.append(model.last_report)
            module.zero_grad()
        return digest([gradient for own in seen for gradient in own]), seen, reports


@pytest.mark.parametrize("estimator", [None, LastOwn()], ids=["none", "LastOwn"])
def test_a_rank_that_does_not_come_is_not_waited_for_and_nothing_is_lost(estimator):
    ranks = run_ranks(between_two_steps, 3, estimator, timeout_s=25.0)
    assert len({own[0] for own in ranks}) == 1
    report = ranks[0][2][0]
    assert report.ranks[1].stood_in
    assert report.dropped_share == 0.0
    assert [own.parts for own in report.ranks][1] == 0
    assert ranks[0][2][1].ranks[1].parts > 0
    for number, own in enumerate(ranks[0][1]):
        for merged, mean in zip(own, mean_gradients(parts_of(number)), strict=True):
            torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-7)


def stopped_in_the_middle(rank, stop_after, estimator):
    """Rank 1's pass is stopped; the micro-batches that each rank has computed, or begun to."""
    module = Chain()
    stopper, own = Stopper(module), []
    with staged(module, estimator=estimator) as model:
        with model.step() as step:
            for x in step.pull([0.0] * NUM_PARTS):
                model(x).backward()
        module.zero_grad()
        with model.step() as step:
            stopper.arm(step, stop_after if rank else None)
            for x in step.pull([float(number + 1) for number in range(NUM_PARTS)]):
                own.append(x)
                model(x).backward()
        return digest(grads(module)), [g[0].item() for g in grads(module)], own, model.last_report, module.finish_order


@pytest.mark.parametrize("stop_after", [0, 1, 3, 5, 7, 10])
def test_a_stopped_rank_counts_what_it_computed_of_each_micro_batch(stop_after):
    ranks = run_ranks(stopped_in_the_middle, 2, stop_after, None)
    assert ranks[0][0] == ranks[1][0]
    order = ranks[0][4]
    own = [ranks[0][2], ranks[1][2]]
    most = len(order) * len(own[1])
    for layer, merged in enumerate(ranks[0][1]):
        place = order.index(layer)
        come = [x for number, x in enumerate(own[1]) if len(order) * number + place < stop_after or stop_after > most]
        xs = [*own[0], *come]
        assert merged == pytest.approx((layer + 1) * sum(xs) / len(xs), rel=1e-5)
    report = ranks[0][3]
    if report.late_ranks:
        assert report.late_ranks == (1,)
        assert report.dropped_share > 0
    else:  # it had come to the end of its last micro-batch by then
        assert stop_after >= most
        assert report.dropped_share == 0


def test_an_estimator_fills_in_for_what_a_stopped_rank_had_drawn():
    ranks = run_ranks(stopped_in_the_middle, 2, 7, LastOwn())
    assert ranks[0][0] == ranks[1][0]
    assert all(math.isfinite(own) for own in ranks[0][1])


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


def recorded_and_repeated(rank, estimator):
    """Trains with random stops, and again as it was recorded; hashes of all parameters and buffers."""
    hashes, reports, decisions, learned = [], [], [], ((), ())
    for replays in (False, True):
        module = Noisy()
        stopper = Stopper(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(rank)
        with staged(module, estimator=estimator) as model:
            if replays:
                model.replay(Recording(*map(tuple, learned), tuple(decisions)))
            for number in range(12):
                with model.step() as step:
                    stop = int(torch.randint(1, 40, (), generator=draws))
                    stopper.arm(step, stop if number % 3 == 2 and not replays else None)
                    for x in step.pull(parts_of(number)):
                        loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not replays:
                    decisions.append(model.last_decision)
                    learned = model.learned
                reports.append([own.parts for own in model.last_report.ranks])
        hashes.append(digest([*module.parameters(), *module.buffers()]))
    return hashes, reports[:12] == reports[12:], [sorted(one.parts) for one in decisions]


@pytest.mark.parametrize("estimator", [None, LastOwn()], ids=["none", "LastOwn"])
def test_draws_are_recorded_and_a_run_is_repeated_bit_for_bit(estimator):
    first, second = run_ranks(recorded_and_repeated, 2, estimator)
    assert first[0][0] == first[0][1] == second[0][0] == second[0][1]
    assert first[1]
    assert second[1]
    for number, (own, other) in enumerate(zip(first[2], second[2], strict=True)):
        drawn = sorted(own + other)
        assert drawn == sorted(set(drawn))
        assert drawn == list(range(NUM_PARTS)) or number % 3 == 2  # what was on its way to a stopped rank is lost


def put_back_and_stopped(rank):
    """Rank 1 is stopped in the backward pass of its first micro-batch, all that it has left; and again as recorded."""
    store, hashes, decisions, learned = dist.distributed_c10d._get_default_store(), [], [], ((), ())
    for replays in (False, True):
        module = Noisy()
        with staged(module, deadline=None) as model:
            if replays:
                model.replay(Recording(*map(tuple, learned), tuple(decisions)))
            for number in range(2):
                if number == 1:  # as in the test of a stuck rank
                    model.pulling.load_state_dict(
                        {"done": [[[1 / 3, 1e-3]] * 3] * 4, "present": [True] * 3, "draws": True}
                    )
                with model.step() as step:
                    for done, x in enumerate(step.pull(parts_of(number, 12))):
                        if number == 1 and not replays and rank != 1 and done == 0:
                            store.wait(["it is put back"])
                        loss = loss_of(model, x)
                        if number == 1 and not replays and rank == 1:
                            while not model.pulling.num_put_back:
                                time.sleep(0.001)
                            store.set("it is put back", "")
                            step.stop()
                        loss.backward()
                module.zero_grad()
                if not replays:
                    decisions.append(model.last_decision)
                    learned = model.learned
        hashes.append(digest(module.buffers()))
    return hashes, decisions[1]


def test_statistics_of_a_stopped_rank_are_those_of_what_it_did_not_put_back_in_a_replay_too():
    ranks = run_ranks(put_back_and_stopped, 3, timeout_s=25.0)
    assert len({own for hashes, _ in ranks for own in hashes}) == 1
    decision = ranks[1][1]
    assert len(decision.parts) == 1
    assert decision.left_at is not None


def all_that_it_has_left(rank, estimator):
    """Rank 1 finishes all that it has not put back of a step, and is late in the ones around it; again as recorded."""
    store, runs, decisions, learned = dist.distributed_c10d._get_default_store(), [], [], ((), ())
    for replays in (False, True):
        module = Chain()
        stopper, merged = Stopper(module), []
        with staged(module, estimator=estimator) as model:
            if replays:
                model.replay(Recording(*map(tuple, learned), tuple(decisions)))
            for number in range(4):
                # as in the test of a stuck rank; the other pools are dealt out equally
                done = [[[1 / 3, 1e-3]] * 3] * 4
                model.pulling.load_state_dict({"done": done, "present": [True] * 3, "draws": number == 2})
                with model.step() as step:
                    if number in (1, 3) and not replays:
                        stopper.arm(step, 7 if rank == 1 else None)
                    for place, x in enumerate(step.pull([1.0 + number] * 12)):
                        if number == 2 and not replays and rank != 1 and place == 0:
                            store.wait(["it is put back"])
                        loss = model(x)
                        if number == 2 and not replays and rank == 1:
                            while not model.pulling.num_put_back:
                                time.sleep(0.001)
                            store.set("it is put back", "")
                            store.wait(["others are done/0", "others are done/2"])
                        loss.backward()
                    if number == 2 and not replays and rank != 1:
                        store.set(f"others are done/{rank}", "")
                merged.append(grads(module))
                module.zero_grad()
                if not replays:
                    decisions.append(model.last_decision)
                    learned = model.learned
        runs.append(merged)
    return runs, decisions


@pytest.mark.parametrize("estimator", [Abstain(), LastOwn()], ids=["Abstain", "LastOwn"])
def test_what_a_rank_has_left_after_it_put_some_back_counts_as_all_of_its_step(estimator):
    ranks = run_ranks(all_that_it_has_left, 3, estimator, timeout_s=25.0)
    (first, again), _ = ranks[0]
    assert [digest(own) for own in first] == [digest(own) for own in again]
    _, late, own, late_again = ranks[1][1]
    assert (len(own.parts), own.num_gradients, own.left_at) == (1, 5, None)
    assert None not in (late.left_at, late_again.left_at)
    for layer, gradient in enumerate(first[2]):  # whatever a rank counts, it has the gradient that all have
        torch.testing.assert_close(gradient, torch.full_like(gradient, 3.0 * (layer + 1)))


def drawn_after_it_was_stood_in_for(rank):
    """In the second step rank 1 has another micro-batch once that is merged; again as recorded."""
    store, runs, decisions, learned = dist.distributed_c10d._get_default_store(), [], [], ((), ())
    for replays in (False, True):
        module, merged = Chain(), []
        deadline = None if replays else FixedDeadline(1.0)  # long beside a micro-batch
        with staged(module, deadline=deadline) as model:
            if replays:
                model.replay(Recording(*map(tuple, learned), tuple(decisions)))
            for number in range(4):
                model.pulling.load_state_dict(
                    {"done": [[[1 / 2, 1e-3]] * 2] * 4, "present": [True] * 2, "draws": number == 1}
                )
                with model.step() as step:
                    if number == 1 and rank == 0 and not replays:
                        store.wait(["rank 1 has asked for two"])  # or all but one may be drawn by then
                    for x in step.pull([1.0 + number + rank] * 4):
                        model(x).backward()
                        if number == 1 and rank == 1 and not replays:
                            store.set("rank 1 has asked for two", "")
                            while not model.lag:
                                time.sleep(0.001)
                merged.append(digest(module.parameters()) + digest(p.grad for p in module.parameters()))
                module.zero_grad()
                if not replays:
                    decisions.append(model.last_decision)
                    learned = model.learned
        runs.append(merged)
    return runs, decisions


def test_what_is_drawn_after_the_step_is_submitted_is_no_part_of_it_in_a_replay_either():
    ranks = run_ranks(drawn_after_it_was_stood_in_for, 2, timeout_s=25.0)
    decision = ranks[1][1][1]
    assert decision.stood_in
    assert 0 < decision.num_parts < len(decision.parts)
    for (first, again), _ in ranks:
        assert first == again


def plain_after_a_pool(rank):
    """In the second step, which has no pool, rank 1 is stopped in the backward pass."""
    module = Chain()
    stopper = Stopper(module)
    with staged(module, estimator=LastOwn(0.5)) as model:
        with model.step() as step:
            for x in step.pull([1.0] * NUM_PARTS):
                model(x).backward()
        module.zero_grad()
        with model.step() as step:
            stopper.arm(step, 2 if rank else None)
            model(1.0).backward()
        return model.last_report, model.last_decision


def test_a_step_without_a_pool_has_its_estimates_though_the_one_before_had_one():
    (report, _), (_, decision) = run_ranks(plain_after_a_pool, 2)
    own = report.ranks[1]
    assert report.late_ranks == (1,)
    assert min(own.stages) < 1
    # in the order of backward, as the shares are; a stage that a rank has counts 1, and an estimate half
    assert [stage.weight for stage in report.stages] == pytest.approx([1 + (1 + share) / 2 for share in own.stages])
    assert [stage.estimated for stage in report.stages] == [share < 1 for share in own.stages]
    assert decision.parts is None


def leaves_its_loop(rank):
    """Rank 1 goes out of its loop after one micro-batch."""
    store, module = dist.distributed_c10d._get_default_store(), mlp()
    with staged(module) as model:
        first_step(model)
        with model.step() as step:
            if rank == 0:
                store.wait(["rank 1 has asked for two"])  # or all but one may be drawn by then
            for x in step.pull(parts_of(0)):
                if rank == 1:
                    store.set("rank 1 has asked for two", "")
                loss_of(model, x).backward()
                if rank == 1:
                    break
        return digest(grads(module)), model.last_report


def test_what_a_loop_leaves_out_is_counted_as_dropped():
    (first, report), (second, _) = run_ranks(leaves_its_loop, 2)
    assert first == second
    assert report.dropped_share > 0
    assert report.ranks[1].cause == "skipped"
    assert report.ranks[1].parts == 1


def no_data(rank):
    """Rank 1 has no data for the second of three steps."""
    module, seen = mlp(), []
    with staged(module) as model:
        for number in range(3):
            model.idle = rank == 1 and number == 1
            with model.step() as step:
                for x in step.pull(parts_of(number)):
                    loss_of(model, x).backward()
            seen.append((digest(grads(module)), [own.parts for own in model.last_report.ranks]))
    return seen


def test_a_rank_without_data_draws_nothing():
    first, second = run_ranks(no_data, 2)
    assert first == second
    assert first[1][1] == [NUM_PARTS, 0]
    assert sum(first[2][1]) == NUM_PARTS


def resumed(rank):
    """What the next pool would be dealt out by, in a run and in one that goes on from its state."""
    states = []
    with staged(mlp()) as model:
        first_step(model)
        done = [[[0.75, 0.01], None], [[0.5, 0.01], [0.5, 0.02]]]
        model.pulling.load_state_dict({"done": done, "present": [True, False], "draws": True})
        states.append(model.pulling.state_dict())
        saved = model.straggle_state()
    with staged(mlp()) as model:
        model.load_straggle_state(saved)
        states.append(model.pulling.state_dict())
        with model.step() as step:
            for x in step.pull(parts_of(0)):
                loss_of(model, x).backward()
        return states, model.last_report


def test_a_resumed_run_begins_with_the_shares_that_were_saved():
    for states, report in run_ranks(resumed, 2):
        assert states[0] == states[1]
        assert sum(own.parts for own in report.ranks) == NUM_PARTS
        assert report.dropped_share == 0.0


def wrong_uses(rank):
    words = []
    with staged(mlp()) as model:

        def refused(kind, use, **options):
            with pytest.raises(kind) as caught, model.step(**options) as step:
                use(step)
            words.append(str(caught.value))

        refused(ValueError, lambda step: step.pull([]))
        refused(ValueError, lambda step: step.pull([1, 2], weights=[1.0]))
        refused(ValueError, lambda step: step.pull([1], weights=[0.0]))
        refused(RuntimeError, lambda step: step.pull([1]), num_microbatches=2)
        refused(RuntimeError, lambda step: (step.pull([1]), step.pull([1])))
        refused(RuntimeError, lambda step: (step.pull([1]), setattr(step, "weight", 2.0)))
        refused(ValueError, lambda step: step.pull([1, 2], costs=[1.0]))
        refused(ValueError, lambda step: step.pull([1], costs=[math.nan]))
        with pytest.raises(RuntimeError, match="inside of"):
            model.step().pull([1])
    return words


def test_wrong_uses_are_refused_with_what_to_write():
    (words,) = run_ranks(wrong_uses, 1)
    assert "at least one" in words[0]
    assert "as many positive" in words[1]
    assert "as many positive" in words[2]
    assert "leave out num_microbatches" in words[3]
    assert "once in each step" in words[4]
    assert "step.pull(parts, weights=...)" in words[5]
    assert "2 micro-batches need as many positive costs, such as tokens, not [1.0]" in words[6]
    assert "as many positive costs" in words[7]


def other_costs(rank):
    with staged(mlp()) as model, model.step() as step:
        for x in step.pull(parts_of(0, 2), costs=[1.0, 2.0 + rank]):
            loss_of(model, x).backward()


def test_ranks_with_other_costs_are_told_so():
    for end in run_ranks(other_costs, 2, outcomes=True):
        assert isinstance(end, Raised)
        assert end.kind == "ValueError"
        assert "give every rank the same costs" in end.message


def other_pools(rank):
    with staged(mlp()) as model, model.step() as step:
        for x in step.pull(parts_of(0, 4 + rank)):
            loss_of(model, x).backward()


def test_ranks_with_other_pools_are_told_so():
    for end in run_ranks(other_pools, 2, outcomes=True):
        assert isinstance(end, Raised)
        assert end.kind == "ValueError"
        assert "[4, 5] micro-batches" in end.message
