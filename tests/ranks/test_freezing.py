"""Parameters that are frozen, unfrozen, replaced or added between two steps: alike on all ranks they are trained on."""

import time

import pytest
import torch
from ranks import digest, logged, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, mlp, shared

import straggle
from straggle.replay.wing import Recording

WITHIN_S = 30.0


class Adapted(nn.Module):
    """A layer with a correction beside it, and a running mean in a buffer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.correction = layer, nn.Linear(layer.in_features, layer.out_features)
        self.norm = nn.BatchNorm1d(layer.out_features)

    def forward(self, x):
        return self.layer(x) + self.norm(self.correction(x))


def freeze_all_but(module, *layers):
    for index, layer in enumerate(module):
        layer.requires_grad_(index in layers)


def new_head(module, rank):
    torch.manual_seed(10 + rank)  # rank 0's is that of all
    module[4] = nn.Linear(8, 2)


def adapt(module, rank):
    torch.manual_seed(20 + rank)
    module[2] = Adapted(module[2].requires_grad_(False))
    module.insert(3, nn.Linear(8, 8).requires_grad_(False))  # a frozen one is rank 0's, too


def new_adapter(module, rank):
    """Its buffers have the names of those that there were, and other values on each rank."""
    torch.manual_seed(30 + rank)
    module[2].norm = nn.BatchNorm1d(8)
    module[2].norm.running_mean.fill_(float(rank))
    module[2].correction = nn.Linear(8, 8)


def weight_norm(module, _rank):
    nn.utils.parametrizations.weight_norm(module[2])


def tie(module, _rank):
    module[2].bias = module[0].bias


def remove(module, _rank):
    del module[3], module[2]


def only(*layers):
    return lambda module, _rank: freeze_all_but(module, *layers)


# what is changed before which step; `WRAPPING`: before the model is wrapped
WRAPPING = -1
SCRIPTS = {
    "gradual unfreezing": {WRAPPING: only(4), 2: only(2, 4), 3: only(0, 2, 4)},
    "before the first step": {WRAPPING: only(4), 0: only(2, 4)},
    "in turns": {WRAPPING: only(0), **{number: only(2 * (number % 3)) for number in range(1, 6)}},
    "frozen": {2: only(2, 4), 4: only(0, 2)},
    "a new head": {3: new_head},
    "a new head on a frozen trunk": {WRAPPING: only(4), 2: new_head, 4: new_head},
    "adapters": {WRAPPING: only(4), 3: adapt},
    "adapters that are replaced": {WRAPPING: adapt, 2: new_adapter, 4: new_adapter},
    "a parametrization": {3: weight_norm},
    "tied": {2: tie},
    "removed": {2: remove},
}
NUM_PLANS = {"in turns": 2, "frozen": 0, "before the first step": 1, "gradual unfreezing": 2}
NUM_STEPS = 6


def follow(optimizer, module):
    """The optimizer has the trainable parameters that there are, as Lightning's fine-tuning adds them."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    new = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter not in known]
    if new:
        optimizer.add_param_group({"params": new})


def make(script):
    module = mlp()
    if WRAPPING in SCRIPTS[script]:
        SCRIPTS[script][WRAPPING](module, 0)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return module, torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def train(rank, script, options, late=()):
    """Parameters and buffers after some steps; ``late`` has the steps and ranks that end before they compute."""
    module, optimizer = make(script)
    with staged(module, **options) as model, logged("straggle.loop.plans") as messages:
        for number in range(NUM_STEPS):
            if number in SCRIPTS[script]:
                SCRIPTS[script][number](module, rank)
                follow(optimizer, module)
            with model.step() as step:
                if (number, rank) in late:
                    step.stop()
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = [*module.parameters(), *module.buffers()]
        report = model.last_report
        return digest(state), [own.tolist() for own in module.parameters()], messages, report.step, shared(report)


def alone(num_ranks, script, late=()):
    """One process that steps by the mean of the ranks' gradients."""
    module, optimizer = make(script)
    for number in range(NUM_STEPS):
        if number in SCRIPTS[script]:
            SCRIPTS[script][number](module, 0)
            follow(optimizer, module)
        gradients = []
        for rank in range(num_ranks):
            if (number, rank) not in late:
                module.zero_grad()
                module(features(rank, number)).square().mean().backward()
                gradients.append([parameter.grad for parameter in module.parameters()])
        for parameter, *own in zip(module.parameters(), *gradients, strict=True):
            parameter.grad = None if own[0] is None else sum(own) / len(own)
        optimizer.step()
        optimizer.zero_grad()
    return list(module.parameters())


def check(num_ranks, script, options, late=()):
    results = run_ranks(train, num_ranks, script, options, late, timeout_s=WITHIN_S)
    assert len({hashed for hashed, *_ in results}) == 1
    assert len({report for *_, report in results}) == 1
    for own, theirs in zip(results[0][1], alone(num_ranks, script, late), strict=True):
        torch.testing.assert_close(torch.tensor(own), theirs.detach())
    assert [step for *_, step, _ in results] == [NUM_STEPS - 1] * num_ranks
    return [messages for _, _, messages, *_ in results]


@pytest.mark.parametrize("script", SCRIPTS)
def test_parameters_that_change_alike_on_all_ranks_are_trained_by_the_mean_gradient(script):
    messages, others = check(2, script, {})
    assert others == []
    assert len(messages) == NUM_PLANS.get(script, len(SCRIPTS[script].keys() - {WRAPPING}))


@pytest.mark.parametrize("script", ["gradual unfreezing", "a new head", "adapters", "adapters that are replaced"])
def test_rank_that_is_late_around_the_change_has_the_parameters_of_the_others(script):
    late = ((1, 1), (2, 2), (3, 0), (4, 2))
    check(3, script, {"deadline": 10.0}, late)


class Momentum(nn.Module):
    """An encoder, and one that follows it in each forward pass and is frozen after the model was wrapped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return (self.query(x) - self.key(x)).square().mean()


def follow_slowly(rank):
    module = Momentum()
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.1)
    with staged(module, deadline=10.0) as model:
        module.key.requires_grad_(False)
        for number in range(4):
            with model.step() as step:
                if (rank, number) == (1, 2):
                    step.stop()
                model(features(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(module.parameters()), module.key.weight.sum().item()


def test_encoder_that_is_frozen_after_wrapping_may_follow_another_in_the_forward_pass():
    first, second = run_ranks(follow_slowly, 2)
    assert first == second


def with_options(rank, cases):
    return [train(rank, script, options, late)[0] for script, options, late in cases]


def test_options_of_the_model_change_nothing_of_what_is_trained():
    scripts = ["gradual unfreezing", "a new head"]
    options = [
        {},
        {"deadline": straggle.AutoDeadline()},
        {"stages": 1},
        {"stages": straggle.BalancedByTime()},
        {"late_handling": straggle.LateHandling(granularity="microbatch")},
        {"estimator": straggle.LastOwn()},
    ]
    cases = [(script, own, ()) for script in scripts for own in options]
    first, second = run_ranks(with_options, 2, cases, timeout_s=WITHIN_S)
    assert first == second
    assert len(set(first)) == len(scripts)


def frozen_and_late(rank, kind, late):
    """The first layer is frozen before the third step, and in the fourth these ranks reach the last alone."""
    module = Chain(3)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    stopper, optimizer = Stopper(module), torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    estimator = straggle.OptimizerMomentum(optimizer) if kind == "OptimizerMomentum" else getattr(straggle, kind)()
    frozen, others = module.layers[0].weight, module.layers[1].weight
    with staged(module, estimator=estimator) as model:
        for number in range(4):
            if number == 2:
                frozen.requires_grad_(False)
                before = digest([frozen])
            with model.step() as step:
                stopper.arm(step, 1 if number == 3 and rank in late else None)
                model(float(rank + 1)).backward()
            seen = frozen.grad, others.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        return *seen, digest([frozen]) == before


@pytest.mark.parametrize("late", [(1,), (0, 1)])
@pytest.mark.parametrize("kind", ["Zero", "LastOwn", "LastMerged", "MovingAverage", "OptimizerMomentum"])
def test_estimator_fills_in_nothing_for_a_parameter_that_is_frozen(kind, late):
    for gradient, has_others, is_as_before in run_ranks(frozen_and_late, 2, kind, late):
        assert gradient is None
        assert has_others
        assert is_as_before


def reached(rank):
    """A rank is truncated in stages of the new plan, and its estimator knows those parameters."""
    module, optimizer = make("gradual unfreezing")
    estimator = straggle.OptimizerMomentum(torch.optim.SGD(module[4].parameters(), lr=0.1, momentum=0.9))
    estimator.optimizer = optimizer
    with staged(module, estimator=estimator, stages=["0", "2", "4"][2:]) as model:
        for number in range(NUM_STEPS):
            if number == 2:
                module.requires_grad_(True)
                follow(optimizer, module)
            with model.step() as step:
                if (number, rank) == (5, 1):
                    module[2].weight.register_hook(lambda _, step=step: step.stop())
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = model.straggle_state()
        return digest(module.parameters()), [own.stages for own in model.last_report.ranks], saved["model"]


def test_late_rank_is_stopped_between_stages_that_were_planned_again():
    (first, stages, model), (second, *_) = run_ranks(reached, 2)
    assert first == second
    assert stages[0] == (1.0, 1.0)
    assert stages[1][0] == 1.0
    assert 0 < stages[1][1] < 1
    assert model == "6 parameters of 130 elements"


def stuck(rank):
    """Rank 1 is stuck for so long that its peers merge steps without it, right up to the one with the change."""
    module, optimizer = make("gradual unfreezing")
    stood_in, lag = 0, 0
    with staged(module, deadline=0.02, late_handling=straggle.LateHandling(grace_s=0.01, quorum=1)) as model:
        for number in range(10):
            if number == 6:
                module.requires_grad_(True)
                follow(optimizer, module)
            if (number, rank) == (4, 1):
                time.sleep(0.5)
                lag = model.lag
            with model.step():
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stood_in += model.last_report.ranks[1].stood_in
        return digest(module.parameters()), stood_in, lag, model.last_report.step


@pytest.mark.slow
def test_peers_wait_at_the_change_for_a_rank_that_is_stood_in_for():
    first, second = run_ranks(stuck, 2, timeout_s=WITHIN_S)
    assert first[0] == second[0]
    assert first[1] >= 2
    assert second[2] >= 2
    assert first[3] == second[3] == 9


def repeat(rank, decisions):
    """Rank 1 is late in the steps around the one with the change."""
    module, optimizer = make("gradual unfreezing")
    seen, learned = [], None
    with staged(module) as model:
        stopper = Stopper(module[4])
        if decisions is not None:
            model.replay(Recording(*decisions[rank][0], decisions[rank][1]))
        for number in range(NUM_STEPS):
            if number == 3:
                module.requires_grad_(True)
                follow(optimizer, module)
            with model.step() as step:
                stopper.arm(step, 1 if decisions is None and rank and number in (2, 3) else None)
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.last_decision)
            learned = learned or model.learned
    return digest(module.parameters()), learned, tuple(seen)


def test_run_whose_stages_were_planned_again_is_repeated_bit_for_bit():
    recorded = run_ranks(repeat, 2, None)
    assert recorded[1][2][3].left_at is not None
    again = run_ranks(repeat, 2, [own for _, *own in recorded])
    assert [own[0] for own in again] == [recorded[0][0]] * 2 == [own[0] for own in recorded]


# -- not alike on all ranks


def freeze(module, _number):
    module[0].requires_grad_(False)


def unfreeze(module, _number):
    module[2].requires_grad_(True)


def replace(module, _number):
    module[4] = nn.Linear(8, 2)


def other_shape(module, number):
    module[2], module[4] = nn.Linear(8, 8 + number), nn.Linear(8 + number, 2)


def unlike(rank, change, steps):
    """The model is changed before the steps that ``steps`` has for this rank."""
    module = mlp()
    module[2].requires_grad_(False)
    with staged(module) as model:
        for number in range(5):
            if number in steps[rank]:
                change(module, rank)
            with model.step():
                model(features(rank, number)).square().mean().backward()
            module.zero_grad()


@pytest.mark.parametrize(
    ("change", "steps", "step", "words"),
    [
        (freeze, [(), (2,), ()], 2, "ranks [1] have frozen other parameters than the rest"),
        (unfreeze, [(), (2,), ()], 2, "ranks [1] have other parameters than before"),
        (unfreeze, [(3,), (2,), (3,)], 2, "ranks [1] have other parameters than before"),
        (unfreeze, [(0,), (0,), ()], 0, "ranks [0, 1] have other parameters than before"),
        (replace, [(), (2,), ()], 2, "ranks [1] have other parameters than before"),
        (other_shape, [(2,), (2,), (2,)], 2, "ranks [0, 1, 2] have other parameters than before"),
    ],
)
def test_change_that_is_not_alike_on_all_ranks_is_refused_on_all_of_them_by_name(change, steps, step, words):
    parameter = {freeze: "0.weight", other_shape: "2.weight"}
    for rank, end in enumerate(run_ranks(unlike, 3, change, steps, outcomes=True, timeout_s=WITHIN_S)):
        assert end.kind == "RuntimeError"
        assert end.message.startswith(f"rank {rank}, step {step}: {words}; freeze, unfreeze, add or replace parameters")
        if change is replace:
            assert "rank 1 has 'replaced: 4.weight, 4.bias' where rank 0 has 'nothing'" in end.message
        else:
            assert "the model differs between ranks: rank 0 has" in end.message
            assert f"'{parameter.get(change, '2.weight')}'" in end.message


def members(rank):
    module = mlp()
    with staged(module, members=straggle.Elastic(min_ranks=1)) as model:
        for number in range(8):
            module[0].requires_grad_(number not in (2, 3))
            if (rank, number) == (1, 6):
                module[2].requires_grad_(False)
            with model.step():
                model(features(rank, number)).square().mean().backward()
            module.zero_grad()
        return model.member_ranks


@pytest.mark.slow
def test_member_that_freezes_other_parameters_than_the_others_leaves_them():
    first, second, third = run_ranks(members, 3, outcomes=True, timeout_s=WITHIN_S)
    assert second.kind == "RuntimeError"
    assert second.message.startswith("rank 1, step 6: ranks [1] have frozen other parameters than the rest")
    assert second.message.endswith("(frozen on this rank: 2.weight, 2.bias)")
    assert first == third == (0, 2)


def alone_and_late(rank):
    """Rank 1 is late for the step before which it alone unfreezes a layer: its peers have made it without the word."""
    module = mlp()
    module[2].requires_grad_(False)
    with staged(module, deadline=0.02, late_handling=straggle.LateHandling(grace_s=0.01, quorum=1)) as model:
        for number in range(60):
            if (rank, number) == (1, 3):
                time.sleep(0.4)
                module[2].requires_grad_(True)
            with model.step():
                model(features(rank, number)).square().mean().backward()
            module.zero_grad()


@pytest.mark.slow
def test_rank_that_is_late_for_a_change_of_its_own_names_it_to_its_peers():
    peer, own = run_ranks(alone_and_late, 2, outcomes=True, timeout_s=WITHIN_S)
    words = "rank 1, step 3: its parameters are others now (unfrozen: 2.weight, 2.bias), and its peers' are not"
    assert own.kind == "RuntimeError"
    assert words in own.message
    assert peer.kind == "PeerFailed"
    assert words in peer.message


def unfreeze_inside(rank):
    module = mlp()
    module[2].requires_grad_(False)
    with staged(module) as model, model.step():
        module[2].requires_grad_(True)
        model(features(rank, 0)).sum().backward()


def test_parameter_that_is_unfrozen_inside_of_the_block_is_refused_by_name():
    for end in run_ranks(unfreeze_inside, 2, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "RuntimeError"
        assert "parameter 2.weight was frozen when the step was entered, and unfrozen inside of" in end.message


def put_in_place(rank):
    """What is put in place of a layer is refused by each rank by itself."""
    module = mlp()
    with staged(module) as model:
        for number in range(2):
            with model.step():
                model(features(rank, number)).sum().backward()
            module[4] = nn.SyncBatchNorm(8)


def test_module_that_could_not_be_wrapped_is_refused_when_it_is_put_in_place_of_another():
    for end in run_ranks(put_in_place, 2, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "RuntimeError"
        assert "4 is a SyncBatchNorm" in end.message
