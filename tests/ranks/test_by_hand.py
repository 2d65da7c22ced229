"""What a loop does by hand in the block: gradients in ``p.grad`` are merged, or refused by name."""

import contextlib

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from training import Chain, Stopper, features, mlp, warned

import straggle
from straggle import world
from straggle.backward import stages

WITHIN_S = 30.0
NUM_STEPS = 4


def both_losses(output):
    return output[:, 0].square().mean(), (output[:, 1] - 1).square().mean()


def trainable(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def combined(network, module, x):
    """The gradients of two losses, combined as PCGrad and others do: by what this rank sees of both."""
    parameters, (one, other) = trainable(module), both_losses(network(x))
    first = torch.autograd.grad(one, parameters, retain_graph=True)
    second = torch.autograd.grad(other, parameters)
    conflict = sum((a * b).sum() for a, b in zip(first, second, strict=True)) < 0
    return [a + (0.5 if conflict else 2.0) * b for a, b in zip(first, second, strict=True)]


def assign(network, module, x):
    for parameter, gradient in zip(trainable(module), combined(network, module, x), strict=True):
        parameter.grad = gradient


def add(network, module, x):
    for parameter, gradient in zip(trainable(module), combined(network, module, x), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def copy(network, module, x):
    for parameter, gradient in zip(trainable(module), combined(network, module, x), strict=True):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad.copy_(gradient)


def head_by_hand(network, module, x):
    """A backward pass for all but the last layer, whose gradients are put in place after it."""
    head = list(module[-1].parameters())
    gradients = torch.autograd.grad(sum(both_losses(network(x))), head)
    for parameter in head:
        parameter.requires_grad_(False)
    sum(both_losses(network(x))).backward()
    for parameter, gradient in zip(head, gradients, strict=True):
        parameter.requires_grad_()
        parameter.grad = 3 * gradient


def penalty_first(network, module, x):
    """The gradient of a penalty is there before the backward pass adds to it."""
    for parameter in module.parameters():
        parameter.grad = parameter.detach() * x.sum()
    sum(both_losses(network(x))).backward()


def some_only(network, module, x):
    """The first layer gets none."""
    assign(network, module, x)
    for parameter in module[0].parameters():
        parameter.grad = None


LOOPS = [assign, add, copy, head_by_hand, penalty_first, some_only]
ZEROES = ["after the step", "in the block", "in place, in the block", "never"]


def zero(optimizer, now, order):
    if now == order or (now == "in the block" and order == "in place, in the block"):
        optimizer.zero_grad(set_to_none=not order.startswith("in place"))


def train(rank, loop, order, late=()):
    """Parameters after some steps; ``late`` has the steps and ranks that end before anything is computed."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with staged(module) as model:
        for number in range(NUM_STEPS):
            with model.step() as step:
                if (number, rank) in late:
                    step.stop()
                    model(features(rank, number))
                zero(optimizer, "in the block", order)
                loop(model, module, features(rank, number))
            optimizer.step()
            zero(optimizer, "after the step", order)
        return digest(module.parameters()), [parameter.tolist() for parameter in module.parameters()]


def alone(num_ranks, loop, order, late=()):
    """The same without any merge: each step has the mean of what lies in ``p.grad`` of those that are not late."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for number in range(NUM_STEPS):
        before = [p.grad for p in module.parameters()]
        ranks = [rank for rank in range(num_ranks) if (number, rank) not in late]
        lying = []
        for rank in ranks:
            for parameter, gradient in zip(module.parameters(), before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            zero(optimizer, "in the block", order)
            loop(module, module, features(rank, number))
            lying.append([p.grad for p in module.parameters()])
        for parameter, *own in zip(module.parameters(), *lying, strict=True):
            parameter.grad = None if own[0] is None else sum(own) / len(ranks)
        optimizer.step()
        zero(optimizer, "after the step", order)
    return list(module.parameters())


def train_all(rank, loop, cases):
    return [train(rank, loop, *case) for case in cases]


def check(num_ranks, loop, cases):
    of_ranks = run_ranks(train_all, num_ranks, loop, cases, timeout_s=WITHIN_S)
    for case, results in zip(cases, zip(*of_ranks, strict=True), strict=True):
        assert len({hashed for hashed, _ in results}) == 1
        for own, theirs in zip(results[0][1], alone(num_ranks, loop, *case), strict=True):
            torch.testing.assert_close(torch.tensor(own), theirs.detach())


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_gradients_that_the_loop_puts_in_place_are_merged_wherever_it_zeroes_them(loop):
    orders = ZEROES[:3] if loop is head_by_hand else ZEROES
    check(2, loop, [(order,) for order in orders])


@pytest.mark.parametrize("loop", [assign, head_by_hand, penalty_first], ids=lambda loop: loop.__name__)
def test_gradients_that_the_loop_puts_in_place_are_the_mean_of_ranks_that_are_not_late(loop):
    orders = ["after the step", "in the block"] + ["never"] * (loop is not head_by_hand)
    check(3, loop, [(order, late) for order in orders for late in (((1, 2),), ((1, 2), (2, 0), (2, 1)))])


def stopped_between(rank, num_microbatches):
    """Rank 1 is late in the second of two forward passes, when the first half of the model has its gradients."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    with staged(module) as model:
        model(torch.ones(1, 4))
        with model.step(num_microbatches) as step:
            for part in module:
                if rank == 1 and part is module[1]:
                    step.stop()
                model(torch.ones(1, 4))
                for parameter in part.parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + rank)
        report = model.last_report.ranks[1]
        return [parameter.grad.unique().tolist() for parameter in module.parameters()], report.late, report.reach


def test_late_rank_gives_what_it_had_put_in_place_and_of_several_micro_batches_nothing():
    for gradients, late, reach in run_ranks(stopped_between, 2, 1):
        assert gradients == [[1.5], [1.5], [1.0], [1.0]]
        assert late
        assert reach == pytest.approx(20 / 30)
    for gradients, late, reach in run_ranks(stopped_between, 2, 2):
        assert gradients == [[1.0]] * 4
        assert (late, reach) == (True, 0.0)


def in_parts(rank, ways):
    """What is in place at the end is the sum over the micro-batches, and counts as the entire step."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results = []
    for options, words in ways:
        with staged(mlp_as_before(module), **options) as model:
            for number in range(2):
                stepped = {"optimizer": optimizer} if "optimizer" in words else {}
                with model.step(2, **stepped):
                    for part in features(rank, number).chunk(2):
                        add(model, module, part)
                if not stepped:
                    optimizer.step()
                optimizer.zero_grad()
            report = model.last_report
            results.append((digest(module.parameters()), [(own.reach, own.weight, own.cause) for own in report.ranks]))
    return results


def mlp_as_before(module):
    module.load_state_dict(mlp().state_dict())
    return module


def test_micro_batches_an_optimizer_in_the_block_and_members_change_nothing():
    keep = straggle.Merge(nonfinite="keep")
    ways = [({}, ""), ({"merge": keep}, "optimizer"), ({"members": straggle.Elastic()}, "")]
    first, second = run_ranks(in_parts, 2, ways, timeout_s=WITHIN_S)
    assert first == second
    assert {hashed for hashed, _ in first} == {first[0][0]}
    assert all(ranks == [(1.0, 1.0, None)] * 2 for _, ranks in first)


def seen_by(rank):
    """What an estimator is shown of this rank's own."""
    module, estimator = nn.Linear(2, 1), straggle.LastOwn()
    with staged(module, estimator=estimator) as model:
        with model.step():
            model(torch.ones(1, 2))
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + rank)
        return [estimator.memory[parameter].unique().item() for parameter in module.parameters()]


def test_estimator_sees_gradients_that_the_loop_puts_in_place():
    assert run_ranks(seen_by, 2) == [[1.0, 1.0], [2.0, 2.0]]


def put(module, rank):
    """A penalty, on top of what is there."""
    for own in module.parameters():
        penalty = torch.full_like(own, 10.0 * (1 + rank))
        own.grad = penalty if own.grad is None else own.grad + penalty


def of_an_unused_one(rank):
    """Passes use one of two heads, and the other one has a penalty alone: that is its gradient, of a late rank too."""
    module = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "other": nn.Linear(1, 1, bias=False)})
    module.forward = lambda x: module["used"](x).sum()
    stopper = Stopper(module["used"])
    with staged(module) as model:
        found = []
        for number in range(2):
            with model.step(2) as step:
                put(module["other"], rank)
                for part in range(2):
                    if (number, rank, part) == (1, 1, 1):
                        stopper.arm(step, 0)
                    model(torch.ones(1, 1)).backward()
            found.append([own.grad.item() for own in module.parameters()])
            module.zero_grad()
        return found


def test_penalty_of_a_parameter_that_passes_do_not_use_is_its_gradient():
    for first, second in run_ranks(of_an_unused_one, 2):
        assert first == [2.0, 15.0]
        assert second == pytest.approx([2.0, (10.0 + 0.5 * 20.0) / 1.5])


def cut_after_the_passes(rank, num_microbatches, how):
    """Rank 1 is late between its last pass and the gradient that the loop gives the other layer."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("used", "other")})
    module.forward = lambda x: module["used"](x).sum()
    handling = straggle.LateHandling(grace_s=0.01)
    with staged(module, stages=["used", "other"], deadline=0.2, late_handling=handling) as model:
        for number in range(3):
            with model.step(num_microbatches) as step:
                for _ in range(num_microbatches):
                    (model(torch.full((1, 1), 1.0 + rank)) / num_microbatches).backward()
                if (number, rank) == (2, 1):
                    world.pause(2.0) if how == "stuck" else step.stop()
                model(torch.ones(1, 1))
                module["other"].weight.grad = torch.full((1, 1), 10.0 * (1 + rank))
            found = [own.grad.item() for own in module.parameters()]
            module.zero_grad()
        own = model.last_report.ranks[1]
        return found, (own.late, own.stood_in, own.stages)


@pytest.mark.parametrize("how", ["stopped", "stuck"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradient_that_a_late_rank_did_not_come_to_give_by_hand_is_missing_and_no_zero(num_microbatches, how):
    for found, own in run_ranks(cut_after_the_passes, 2, num_microbatches, how):
        assert found == [1.5, 10.0]
        assert own == (True, how == "stuck", (1.0, 0.0))


def before_and_after(rank, order):
    """The loop gives one of two layers its gradient: a part before the passes, and the rest after them."""
    stages.BUCKET_BYTES = 1
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("used", "other")})
    module.forward = lambda x: module["used"](x).sum()
    found = []
    with staged(module, stages=order) as model:
        for _ in range(3):
            with model.step(2):
                put(module["other"], rank)
                for _ in range(2):
                    (model(torch.full((1, 1), 1.0 + rank)) / 2).backward()
                module["other"].weight.grad = torch.full((1, 1), 100.0 * (1 + rank))
            found.append([own.grad.item() for own in module.parameters()])
            module.zero_grad()
    return found


@pytest.mark.parametrize("order", [["used", "other"], ["other", "used"]])
def test_what_is_put_in_place_before_the_passes_and_after_them_adds_up(order):
    for found in run_ranks(before_and_after, 2, order):
        assert found == [[1.5, 165.0]] * 3


class Constant(straggle.Estimator):
    def contribution(self, parameter):
        return straggle.Estimate(torch.full_like(parameter, 100.0), 1.0)


def penalty_and_estimate(rank):
    """Rank 1 is late in the second of two passes, which do not use one of two layers; that has a penalty."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("used", "other")})
    module.forward = lambda x: module["used"](x).sum()
    stopper = Stopper(module["used"])
    with staged(module, estimator=Constant()) as model, model.step(2) as step:
        put(module["other"], rank)
        for part in range(2):
            if (rank, part) == (1, 1):
                stopper.arm(step, 0)
            (model(torch.full((1, 1), 1.0 + rank)) / 2).backward()
    return [own.grad.item() for own in module.parameters()]


def test_estimate_is_added_to_the_share_of_a_penalty():
    for gradients in run_ranks(penalty_and_estimate, 2):
        assert gradients == [(1 + 1 + 50) / 2, (10 + 10 + 50) / 2]


def caught_and_put(rank):
    """A pass fails when one of two layers has its gradient, and the loop gives both gradients of its own."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("first", "last")})
    module.forward = lambda x: module["last"](module["first"](x)).sum()
    fails = [False]

    def fail(_gradient):
        if fails[0]:
            raise ArithmeticError

    module["first"].weight.register_hook(fail)
    with staged(module) as model:
        for number in range(2):
            with model.step():
                fails[0] = (number, rank) == (1, 1)
                with contextlib.suppress(ArithmeticError):
                    model(torch.ones(1, 1)).backward()
                if fails[0]:
                    put(module, rank)


def test_gradient_that_is_put_beside_one_on_its_way_is_refused_after_a_pass_that_failed():
    _, theirs = run_ranks(caught_and_put, 2, outcomes=True)
    assert theirs.kind == "RuntimeError"
    assert "parameter last.weight has a gradient of a backward pass in this step, and another was put" in theirs.message


def seen_with_passes(rank):
    """What an estimator is shown of a rank's own gradient of two passes, with its penalty."""
    module, estimator = Chain(1), straggle.LastOwn()
    with staged(module, estimator=estimator) as model:
        with model.step(2):
            put(module, rank)
            for _ in range(2):
                (model(1.0 + rank) / 2).backward()
        return [estimator.memory[own].unique().item() for own in module.parameters()]


def test_estimator_sees_the_penalty_with_the_passes():
    assert run_ranks(seen_with_passes, 2) == [[11.0], [22.0]]


def repeat(rank, decisions):
    """Rank 1 is stood in for, and comes to put its gradients in place when the step is merged."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    with staged(module) as model:
        if decisions is not None:
            model.replay(straggle.replay.wing.Recording((), (), tuple(decisions[rank])))
        for number in range(3):
            with model.step() as step:
                if decisions is None and (number, rank) == (1, 1):
                    step.stop()
                assign(model, module, features(rank, number))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.last_decision)
        return digest(module.parameters()), seen


def test_run_with_gradients_by_hand_is_repeated_bit_for_bit():
    recorded = run_ranks(repeat, 2, None)
    again = run_ranks(repeat, 2, [seen for _, seen in recorded])
    assert [hashed for hashed, _ in again] == [hashed for hashed, _ in recorded]


# -- what is refused


def sparse(_model, module, _step):
    parameter = module[0].weight
    parameter.grad = torch.zeros_like(parameter).to_sparse()


def other_dtype(_model, module, _step):
    module[0].weight.grad_dtype = None
    module[0].weight.grad = torch.zeros_like(module[0].weight, dtype=torch.float64)


def of_a_frozen_one(model, module, _step):
    assign(model, module, features(0, 0))
    module.frozen.grad = torch.zeros(2)


def after_backward(model, module, _step):
    model(features(0, 0)).sum().backward()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def in_a_pool(model, module, step):
    for part in step.pull(list(features(0, 0).chunk(2))):
        assign(model, module, part)


def clamp(model, module, _step):
    model(features(0, 0)).sum().backward()
    with torch.no_grad():
        module[2].weight.clamp_(-0.1, 0.1)


def first_values(model, module, _step):
    """As a layer that takes its first values from data, by a write that torch does not count."""
    module[2].weight.data.mul_(2.0)
    model(features(0, 0)).sum().backward()


def own_update(model, module, _step):
    """As a loop that takes the gradients of ``torch.autograd.grad`` and applies them itself."""
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(model(features(0, 0)).sum(), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


def optimizer_in_backward(model, module, _step):
    model(features(0, 0)).sum().backward()


def step_at_once(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def optimizer_at_once(parameter):
    torch.optim.SGD([parameter], lr=0.1).step()


REFUSED = {
    sparse: "parameter 0.weight has a gradient of layout torch.sparse_coo: use dense gradients",
    other_dtype: "p.grad of parameter 0.weight has the dtype torch.float64, and the parameter has torch.float32",
    of_a_frozen_one: "a gradient was put into p.grad of parameter frozen, which is frozen, and so is not merged",
    after_backward: "parameter 0.weight has a gradient of a backward pass in this step, and another was put into its",
    in_a_pool: "gradients were put into p.grad by hand in a step with step.pull()",
    clamp: "parameter 2.weight was written to inside of `with model.step()`, before the gradients of all ranks",
    first_values: "parameter 2.weight was written to inside of `with model.step()`, before the gradients of all",
    own_update: "parameter 0.weight (and 5 more) was written to inside of `with model.step()`",
    optimizer_in_backward: "parameter 0.weight (and 5 more) was written to inside of `with model.step()`",
}


def do(rank, loop, hook=None, only=None):
    module = mlp()
    if loop is of_a_frozen_one:
        module.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    if hook is not None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    with staged(module) as model, model.step() as step:
        if only in (None, rank):
            loop(model, module, step)


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_what_cannot_be_merged_is_refused_by_name_in_the_first_step(loop):
    hook = step_at_once if loop is optimizer_in_backward else None
    for end in run_ranks(do, 2, loop, hook, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind in ("RuntimeError", "ValueError")
        assert REFUSED[loop] in end.message


def test_peers_of_a_rank_that_writes_to_a_parameter_learn_of_it():
    peer, own = run_ranks(do, 2, clamp, None, 1, outcomes=True, timeout_s=WITHIN_S)
    assert own.kind == "RuntimeError"
    assert peer.kind == "PeerFailed"
    assert "rank 1 raised in step 0" in peer.message
    assert REFUSED[clamp] in peer.message


def test_optimizer_that_a_hook_steps_in_backward_is_refused():
    for end in run_ranks(do, 2, optimizer_in_backward, optimizer_at_once, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "RuntimeError"
        assert "optimizer.step() inside of `with model.step()`" in end.message


def with_max_norm(_rank):
    module = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Linear(3, 1))
    with staged(module) as model, model.step():
        model(torch.tensor([1, 2])).sum().backward()


def test_embedding_with_max_norm_is_refused_by_name():
    for end in run_ranks(with_max_norm, 2, outcomes=True, timeout_s=WITHIN_S):
        assert "parameter 0.weight was written to" in end.message
        assert "nn.Embedding(max_norm=...)" in end.message


def with_parametrizations(rank):
    """Both change buffers, and compute their weights anew in each forward pass."""
    module = mlp()
    nn.utils.parametrizations.spectral_norm(module[0])
    nn.utils.parametrizations.weight_norm(module[2])
    nn.utils.spectral_norm(module[4])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module) as model:
        for number in range(3):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digest(module.parameters()), model.last_report.ranks[rank].reach


def test_weights_that_the_forward_pass_computes_are_no_parameters_that_it_writes_to():
    first, second = run_ranks(with_parametrizations, 2)
    assert first == second
    assert first[1] == 1.0


def before_a_gradient_is_kept(rank):
    module = mlp()
    with staged(module) as model:
        for number in range(2):
            with model.step():
                head_by_hand(model, module, features(rank, number))


def test_gradient_that_is_put_beside_one_of_the_step_before_is_refused_by_name():
    for end in run_ranks(before_a_gradient_is_kept, 2, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert "parameter 4.weight has a gradient of before the block" in end.message
        assert "zero_grad() before the block" in end.message


def unfrozen_before(model, module, number):
    if number == 1:
        module[0].requires_grad_(True)
    with model.step():
        assign(model, module, features(0, number))


def changed_by_a_hook(model, module, number):
    if number == 0:
        module[0].requires_grad_(True)
        module[2].weight.register_hook(lambda gradient: 2 * gradient)
    with model.step():
        sum(both_losses(model(features(0, number)))).backward()


def changed_after_the_block(model, module, number):
    with model.step():
        sum(both_losses(model(features(0, number)))).backward()
    module[2].weight.grad.mul_(2)


def clamped_outside(model, module, number):
    with torch.no_grad():
        module[2].weight.clamp_(-0.5, 0.5)
    with model.step():
        sum(both_losses(model(features(0, number)))).backward()


def by_backward_in_a_pool(model, module, number):
    del module
    with model.step() as step:
        for part in step.pull(list(features(0, number).chunk(2))):
            sum(both_losses(model(part))).backward()


def micro_batches_of_its_own(model, module, number):
    with model.step(2):
        for part in features(0, number).chunk(2):
            add(model, module, part)


FOLLOWED = [
    unfrozen_before,
    changed_by_a_hook,
    changed_after_the_block,
    clamped_outside,
    by_backward_in_a_pool,
    micro_batches_of_its_own,
]


def follow(rank):
    del rank
    states = []
    for loop in FOLLOWED:
        module = mlp()
        module[0].requires_grad_(False)
        before = digest(module[2].parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with staged(module) as model:
            for number in range(2):
                loop(model, module, number)
                optimizer.step()
                optimizer.zero_grad()
        states.append((digest(module.parameters()), digest(module[2].parameters()) != before))
    return states


def test_what_the_errors_say_to_do_instead_trains():
    first, second = run_ranks(follow, 2)
    assert first == second
    assert all(trained for _, trained in first)


# -- hooks of others


def double(parameter):
    parameter.grad.mul_(2)


def with_hooks(rank, when):
    """The weight's gradient is doubled by a hook; what is merged is what the hook has left in place."""
    module = nn.Linear(2, 1)
    if when == "before":
        module.weight.register_post_accumulate_grad_hook(double)
    with staged(module) as model:
        gradients = []
        for number in range(4):
            if number == 2 and when == "later":
                module.weight.register_post_accumulate_grad_hook(double)
            with model.step():
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            gradients.append(module.weight.grad.unique().item())
            module.zero_grad()
        return gradients


def test_gradient_is_merged_as_the_hooks_of_others_leave_it_whenever_they_were_registered():
    assert run_ranks(with_hooks, 2, "before") == [[3.0] * 4] * 2
    assert run_ranks(with_hooks, 2, "later") == [[1.5, 1.5, 3.0, 3.0]] * 2


# -- steps without a gradient


def nothing(model, module, number):
    del model, module, number


def forward_only(model, module, number):
    del module
    model(features(0, number))


def without_place(model, module, number):
    """Gradients are computed, and put nowhere."""
    torch.autograd.grad(model(features(0, number)).sum(), list(module.parameters()))


def gradients_at_times(model, module, number):
    del module
    loss = model(features(0, number)).sum()
    if number == 2:
        loss.backward()


def of_others(model, module, number):
    del module
    other = mlp()
    (other(features(0, number)) - model(features(0, number)).detach()).square().sum().backward()


def skip(rank, loop, num_steps):
    module = mlp()
    with warned() as warnings, staged(module) as model:
        for number in range(num_steps):
            with model.step():
                loop(model, module, number)
        return warnings, [own.cause for own in model.last_report.ranks]


def test_step_whose_gradients_are_put_nowhere_is_told_of_once():
    for rank, (warnings, causes) in enumerate(run_ranks(skip, 2, without_place, 2)):
        (words,) = warnings
        assert words.startswith(f"rank {rank}, step 0: 1 backward pass went through the model and gave no parameter")
        assert "torch.autograd.grad" in words
        assert "put them into p.grad" in words
        assert causes == ["skipped"] * 2


@pytest.mark.parametrize("loop", [nothing, forward_only, of_others], ids=lambda loop: loop.__name__)
def test_model_that_gets_no_gradient_in_its_first_steps_is_told_of_once(loop):
    for rank, (warnings, _) in enumerate(run_ranks(skip, 2, loop, 5)):
        assert len(warnings) == (rank == 0)
        assert all("no rank had a gradient in the first 3 steps" in words for words in warnings)


@pytest.mark.parametrize(("loop", "num_steps"), [(nothing, 2), (gradients_at_times, 7)])
def test_steps_that_are_skipped_on_purpose_are_not_told_of(loop, num_steps):
    assert [warnings for warnings, _ in run_ranks(skip, 2, loop, num_steps)] == [[], []]
