"""What a rank hands in beside the gradient of the step: error feedback, late gradients, and weights by chance."""

import random
import time

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Chain, Signals, Stopper, features, grads, mlp, random_stops, shared

from straggle import Abstain, Carry, ErrorFeedback, Estimate, FixedDeadline, LastOwn, LateHandling, Merge, Zero
from straggle.backward import stages
from straggle.commands.checkpoint import Checkpoint
from straggle.merge.options import ReachedShares, inverse_probability

WORLD_SIZES = [1, 2, 3, 4]
NUM_LAYERS = 4
LAYERS = [f"layers.{number}" for number in range(NUM_LAYERS)]
FIRST, SECOND = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])


@pytest.fixture
def parameter():
    return nn.Parameter(torch.tensor([7.0, 7.0]))


def input_of(rank, step):
    return float(1 + rank + 10 * step)


def merge(rank, estimator, stops, options):
    """Each layer's merged gradient over its scale, and the report, for each step; the last rank alone stops.

    ``stops`` has for each step after how many gradients.
    """
    stages.BUCKET_BYTES = 1
    module = Chain(NUM_LAYERS)
    stopper = Stopper(module)
    last = rank == torch.distributed.get_world_size() - 1
    passes = options.pop("passes", 1)
    results = []
    with staged(module, estimator=estimator, stages=LAYERS, **options) as model:
        for number, stop in enumerate(stops):
            with model.step(passes) as step:
                stopper.arm(step, stop if last else None)
                for _ in range(passes):
                    model(input_of(rank, number)).backward()
            results.append(([mean_of(layer) for layer in module.layers], model.last_report))
            model.zero_grad()
    return results


def mean_of(layer):
    if (gradient := layer.weight.grad) is None:
        return None
    assert gradient.min() == gradient.max()
    return gradient[0].item() / layer.scale


def peers(world_size, step):
    """The sum over all ranks but the last."""
    return sum(input_of(rank, step) for rank in range(world_size - 1))


# -- error feedback


# the last rank misses the first two layers in the second and third step
DROPPED = [None, 2, 2, None, None]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("most", [4.0, 1.0])
@pytest.mark.parametrize(("inner", "weight", "kept"), [(Abstain(), 0, 0), (Zero(), 1, 0), (LastOwn(0.5), 0.5, 1)])
def test_what_was_dropped_is_added_to_the_next_gradient_less_what_stood_in(world_size, most, inner, weight, kept):
    own = [input_of(world_size - 1, step) for step in range(5)]
    scale = min(1.0, most / 2)
    added = scale * (2 * own[3] - 2 * weight * kept * own[0])  # both estimates are the first step's gradient, or zeros
    more = scale * (2 - 2 * weight)
    means = [
        (peers(world_size, 3) + own[3] + added) / (world_size + more),
        (peers(world_size, 4) + own[4]) / world_size,  # everything is settled
    ]
    for results in run_ranks(merge, world_size, ErrorFeedback(inner, most), DROPPED, {}):
        for (gradients, report), mean, total in zip(results[3:], means, [world_size + more, world_size], strict=True):
            whole = (peers(world_size, report.step) + own[report.step]) / world_size
            assert gradients == pytest.approx([mean, mean, whole, whole])
            assert [stage.weight for stage in report.stages] == pytest.approx([world_size] * 2 + [total] * 2)
            assert [stage.estimated for stage in report.stages] == [False] * 4
            assert report.ranks[-1].weights == pytest.approx([1, 1, total - world_size + 1, total - world_size + 1])
            assert report.dropped_share == 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_over_all_steps_together_error_feedback_gives_each_rank_its_whole_weight(world_size):
    (results, *_) = run_ranks(merge, world_size, ErrorFeedback(LastOwn(0.25)), DROPPED, {})
    for layer in range(NUM_LAYERS):
        assert sum(report.ranks[-1].weights[layer] for _, report in results) == pytest.approx(len(DROPPED))


def test_missing_microbatches_are_fed_back_by_their_share():
    # rank 1 has one of two passes of the first two layers: half of a gradient is missing, and later half is added
    steps = [None, NUM_LAYERS + 2, None]
    for results in run_ranks(merge, 2, ErrorFeedback(), steps, {"passes": 2}):
        gradients, report = results[2]
        other, own = (2 * input_of(rank, 2) for rank in range(2))
        assert gradients == pytest.approx([(other + 1.5 * own) / 2.5] * 2 + [(other + own) / 2] * 2)
        assert report.ranks[1].weights == pytest.approx([1, 1, 1.5, 1.5])


class Heavy(Abstain.__base__):
    def contribution(self, parameter):
        return Estimate(torch.ones_like(parameter), 1.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ErrorFeedback(max_residual=0), "max_residual=0"),
        (lambda: ErrorFeedback(ErrorFeedback()), "ErrorFeedback adds to later contributions itself"),
        (lambda: ErrorFeedback(Carry()), "Carry adds to later contributions itself"),
        (lambda: ErrorFeedback(Heavy()).contribution(nn.Parameter(torch.zeros(1))), "weight=1.5 of Heavy"),
        (lambda: Carry(1.5), "weight=1.5"),
        (lambda: Carry(max_staleness=0), "max_staleness=0"),
        (lambda: Merge(weighting="chance"), "weighting='chance': choose one of count, inverse_probability"),
        (lambda: Merge(probability_window=0), "probability_window=0"),
        (lambda: Merge(max_weight=0.5), "max_weight=0.5"),
    ],
)
def test_wrong_value_is_refused_with_it(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- carry


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_late_part_joins_the_next_contribution(world_size, weight):
    last = world_size - 1
    for results in run_ranks(merge, world_size, Carry(weight), [None, 2, None, None], {}):
        late, after, settled = results[1:]
        whole = [(peers(world_size, step) + input_of(last, step)) / world_size for step in range(4)]
        alone = peers(world_size, 1) / last if last else None
        assert late[0] == [pytest.approx(mean) if mean else None for mean in [alone] * 2 + [whole[1]] * 2]
        joined = (world_size * whole[2] + weight * input_of(last, 1)) / (world_size + weight)
        assert after[0] == pytest.approx([joined] * 2 + [whole[2]] * 2)
        assert settled[0] == pytest.approx([whole[3]] * 4)
        rank = late[1].ranks[last]
        assert (rank.late, rank.stood_in, rank.cause, rank.stages) == (True, False, "backward", (1, 1, 0, 0))
        assert [report.ranks[last].weights for _, report in results[2:]] == [(1, 1, 1 + weight, 1 + weight), (1,) * 4]
        assert [stage.weight for stage in after[1].stages] == [world_size] * 2 + [world_size + weight] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_late_part_is_handed_in_by_a_rank_that_is_late_again(world_size):
    last = world_size - 1
    for results in run_ranks(merge, world_size, Carry(), [None, 2, 1, 0, None], {}):
        # in each step the part that the step before left, which is one step old
        for step, old, new in ((2, [1, 1, 0, 0], [0, 0, 0, 1]), (3, [1, 1, 1, 0], [0, 0, 0, 0])):
            weights = [a + b for a, b in zip(old, new, strict=True)]
            stale, own = input_of(last, step - 1), input_of(last, step)
            means = [
                (peers(world_size, step) + a * stale + b * own) / (last + a + b) if last + a + b else None
                for a, b in zip(old, new, strict=True)
            ]
            assert results[step][0] == [mean and pytest.approx(mean) for mean in means]
            assert results[step][1].ranks[last].weights == tuple(reversed(weights))
        assert results[4][1].ranks[last].weights == (1,) * 4  # a step that ended before its backward pass left nothing


@pytest.mark.parametrize("stop", [NUM_LAYERS + 2, 1])
def test_late_microbatch_counts_by_its_share_and_the_next_is_not_begun(stop):
    in_time = [
        (stop > layer) + (stop > NUM_LAYERS + layer) for layer in range(NUM_LAYERS)
    ]  # passes, in backward's order
    begun = 2 if stop > NUM_LAYERS else 1
    for results in run_ranks(merge, 2, Carry(), [None, stop, None], {"passes": 2}):
        assert results[1][1].ranks[1].stages == tuple(passes / 2 for passes in in_time)
        assert results[2][1].ranks[1].weights == tuple(1 + (begun - passes) / 2 for passes in in_time)


def test_late_gradient_is_a_copy_and_forgotten_when_it_is_too_old(parameter):
    carry, lent = Carry(max_staleness=2), FIRST.clone()
    carry.observe_late(parameter, lent, 1.0)
    lent.zero_()
    for _ in range(2):
        carry.observe(parameter, SECOND, merged=True)
    assert carry.supplement(parameter, SECOND).gradient.tolist() == FIRST.tolist()
    assert carry.supplement(parameter, SECOND) is None
    carry.observe_late(parameter, FIRST, 1.0)
    for _ in range(3):
        carry.observe(parameter, SECOND, merged=True)
    assert carry.supplement(parameter, SECOND) is None
    assert not carry.state_dict({parameter: "weight"})


def train_slowly(rank, max_lag):
    """Rank 1 goes on with the backward pass of step 3 until rank 0 has merged two more steps."""
    module, signals = mlp(), Signals()
    goes_on = [False]

    def wait(_):
        if goes_on[0]:
            signals.wait("merged 5")

    module[0].weight.register_post_accumulate_grad_hook(wait)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    late_handling = LateHandling(grace_s=0.0, max_lag=max_lag)
    reports = []
    with staged(module, deadline=FixedDeadline(1.0), late_handling=late_handling, estimator=Carry(), stages=3) as model:
        for number in range(10):
            goes_on[0] = (rank, number) == (1, 3)
            if number == 6:
                signals.send("rank 1 is there") if rank == 1 else signals.wait("rank 1 is there")
            with model.step():
                loss = model(features(rank, number)).square().mean()
                if goes_on[0]:
                    time.sleep(1.3)  # longer than its deadline, in which rank 0 is done
                loss.backward()
            reports.append(model.last_report)
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
    return digest(module.parameters()), reports


def test_peers_go_on_while_a_late_rank_finishes_its_backward_pass():
    results = run_ranks(train_slowly, 2, 8)
    assert results[0][0] == results[1][0]
    for reports in zip(*(reports for _, reports in results), strict=True):
        assert len({shared(report) for report in reports}) == 1
    ranks = [report.ranks[1] for report in results[0][1]]
    assert ranks[3].late
    assert ranks[3].cause in ("forward", "backward")
    assert [rank.stood_in for rank in ranks[4:6]] == [True, True]
    # what step 3 left, three steps later
    left = [1 - own for own in ranks[3].stages]
    more = [weight - own for weight, own in zip(ranks[6].weights, ranks[6].stages, strict=True)]
    assert left[-1] == 1
    assert more == pytest.approx(left)


def finish_late_and_go_on(rank):
    """Rank 1 goes on with the backward pass of step 2, for a while, after it has handed in what it has."""
    module, late = Chain(NUM_LAYERS), [False]
    stopper = Stopper(module)
    module.layers[0].weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.2 * late[0]))
    with staged(module, estimator=Carry(), stages=LAYERS) as model:
        for number in range(5):
            late[0] = (rank, number) == (1, 2)
            with model.step() as step:
                stopper.arm(step, 2 if late[0] else None)
                model(1.0).backward()
            yield model.last_report.ranks[1]


def compute_times(rank):
    return [part.compute_s for part in finish_late_and_go_on(rank)]


def test_time_of_a_rank_that_finished_late_counts_from_when_its_peers_began():
    # or a slow rank's short steps would make the deadline of all ranks shorter
    for compute_s in run_ranks(compute_times, 2):
        assert compute_s[3] > 0.19
        assert compute_s[2] < compute_s[3]


def random_carry(rank, seed, num_steps):
    """Random stops, with a pass that sometimes takes longer than the peers' complete step."""
    module = mlp(seed=rank, depth=4)
    stopper, draw = Stopper(module), random.Random(100 * seed + rank)
    nap = [0.0]
    module[2].weight.register_post_accumulate_grad_hook(lambda _: time.sleep(nap[0]))
    stops = random_stops(rank, num_steps, 8, seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    reports = []
    options = {"deadline": FixedDeadline(0.03), "late_handling": LateHandling(grace_s=0.01, max_lag=4)}
    with staged(module, estimator=Carry(), stages=4, **options) as model:
        for number, stop in enumerate(stops):
            nap[0] = 0.1 if draw.random() < 0.15 else 0.0
            with model.step() as step:
                stopper.arm(step, stop)
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reports.append(model.last_report)
    return digest(module.parameters()), [shared(report) for report in reports], reports


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_stay_identical_when_ranks_finish_late(world_size):
    results = run_ranks(random_carry, world_size, 0, 60)
    assert len({parameters for parameters, _, _ in results}) == 1
    assert all(lines == results[0][1] for _, lines, _ in results)
    ranks = [rank for report in results[0][2] for rank in report.ranks]
    assert any(max(rank.weights) == 2 for rank in ranks)
    assert any(rank.stood_in for rank in ranks)


# -- weights by the inverse chance of reaching a stage


@pytest.mark.parametrize(("share", "cap", "weight"), [(1.0, 10, 1), (0.5, 10, 2), (0.25, 3, 3), (0.0, 10, 10)])
def test_inverse_probability_is_one_over_the_share_up_to_a_cap(share, cap, weight):
    assert inverse_probability(torch.tensor([share, 1.0]), cap).tolist() == [weight, 1.0]


def test_chance_is_the_mean_share_over_a_window_of_steps():
    reached = ReachedShares(4)
    assert reached.factors(2, 10) is None
    reached.append((1.0, 1.0))
    assert reached.factors(2, 10) is None
    for share in (0.5, 0.0, 0.0):
        reached.append((1.0, share))
    assert reached.factors(2, 10) == pytest.approx([1, 4 / 1.5])
    reached.append((1.0, 0.0))
    assert reached.factors(2, 10) == pytest.approx([1, 8])
    assert reached.factors(2, 3) == pytest.approx([1, 3])
    assert reached.factors(3, 10) is None  # other stages now
    again = ReachedShares(4)
    again.restore(reached.tensor())
    assert again.factors(2, 10) == reached.factors(2, 10)
    reached.append((1.0, 1.0, 1.0))
    assert reached.factors(3, 10) is None


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_computed_gradients_are_weighted_by_their_ranks_own_chance(world_size):
    stops = [None, 2, 2, None, 3, None]
    shares = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]  # in backward's order
    last = world_size - 1
    for results in run_ranks(merge, world_size, Abstain(), stops, {"merge": Merge(weighting="inverse_probability")}):
        for step in (1, 2, 3, 4, 5):
            chance = [sum(column) / step for column in zip(*shares[:step], strict=True)]
            weights = [share / p for share, p in zip(shares[step], chance, strict=True)]
            means = [
                (peers(world_size, step) + w * input_of(last, step)) / (last + w) if last + w else None for w in weights
            ]
            gradients, report = results[step]
            assert gradients == [mean and pytest.approx(mean) for mean in reversed(means)]
            assert report.ranks[last].weights == pytest.approx(weights)
            assert [stage.weight for stage in report.stages] == pytest.approx([last + w for w in weights])
            assert report.ranks[last].stages == tuple(shares[step])  # what was reached is reported as it is


def train_with(rank, weighting, stop):
    module = mlp(seed=rank)
    stopper = Stopper(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with staged(module, merge=Merge(weighting=weighting)) as model:
        for number in range(20):
            with model.step() as step:
                stopper.arm(step, stop if (rank, number) == (0, 5) else None)
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(module.parameters())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_with_nobody_late_both_weightings_are_the_same_bit_for_bit(world_size):
    count, chance = (
        run_ranks(train_with, world_size, weighting, None) for weighting in ("count", "inverse_probability")
    )
    assert count == chance
    if world_size > 1:  # of one rank's gradient alone the weight cancels out
        late, other = (
            run_ranks(train_with, world_size, weighting, 2) for weighting in ("count", "inverse_probability")
        )
        assert late != other
        assert len(set(other)) == 1


# -- saved and loaded


MAKE = {
    "error feedback": lambda: ErrorFeedback(LastOwn(0.5)),
    "carry": lambda: Carry(),
    "chance": lambda: Abstain(),
}


def save_and_load(rank, kind, directory):
    """The parameters after eight steps, and after the last four of them from the checkpoint."""
    checkpoint = Checkpoint(directory / "checkpoint")
    ends = []
    for resumed in (False, True):
        module = mlp(seed=resumed, depth=4)
        optimizer = torch.optim.AdamW(module.parameters())
        stopper = Stopper(module)
        stops = [None, 2, 5, 3, None, 1, None, None]  # in the first step after a resume no rank is late
        merge = Merge(weighting="inverse_probability" if kind == "chance" else "count")
        with staged(module, estimator=MAKE[kind](), merge=merge, stages=["0", "2", "4", "6"]) as model:
            if resumed:
                checkpoint.load(model, optimizer)
            for number in range(4 if resumed else 0, 8):
                if number == 4 and not resumed:
                    checkpoint.save(4, model, optimizer)
                with model.step() as step:
                    stopper.arm(step, stops[number] if rank else None)
                    model(features(rank, number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append((digest(module.parameters()), digest(grads(module))))
    return ends


@pytest.mark.parametrize("kind", [*MAKE])
def test_resumed_run_equals_an_uninterrupted_one(kind, tmp_path):
    for first, again in run_ranks(save_and_load, 2, kind, tmp_path):
        assert first == again
