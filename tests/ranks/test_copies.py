"""Copies and pickles of a wrapped model and of its module, as averages of the weights and checkpoints take them."""

import copy
import io
import pickle

import pytest
import torch
from ranks import digest, run_ranks, staged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from training import features, grads, mlp

from straggle import LastMerged, Merge, QuantileDeadline, StagedBackward, StagedDataParallel, watch
from straggle.lab.faults import FaultInjector, Stall


def saved(module):
    """What ``torch.load`` makes of what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module)), "torch.save": saved}
AVERAGES = {"average": lambda module: AveragedModel(module).module}


def plain_gradients(rank):
    module = mlp()
    module(features(rank, 0)).square().mean().backward()
    return grads(module)


def copy_module(rank, how, inside):
    """The gradients that a copy of the wrapped module gets for itself, and the merge of the original around that."""
    module = mlp()
    with staged(module, stages=3) as model:
        for _ in range(2):  # with the hooks of the first plan, and with those of the plan after the first step
            model.zero_grad()
            with model.step():
                loss = model(features(rank, 0)).square().mean()
                if inside:
                    alone = (COPIES | AVERAGES)[how](module)
                    alone(features(rank, 0)).square().mean().backward()
                loss.backward()
        merged = grads(module)
        if not inside:
            alone = (COPIES | AVERAGES)[how](module)
            alone(features(rank, 0)).square().mean().backward()
        return grads(alone), merged, model.last_report.ranks[rank].reach, grads(module)


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside of a step"])
@pytest.mark.parametrize("how", [*COPIES, *AVERAGES])
def test_copy_of_the_module_is_trained_by_itself_and_the_original_merges_as_before(how, inside):
    results = run_ranks(copy_module, 2, how, inside)
    plain = [plain_gradients(rank) for rank in range(2)]
    mean = [(first + second) / 2 for first, second in zip(*plain, strict=True)]
    for rank, (alone, merged, reach, after) in enumerate(results):
        torch.testing.assert_close(alone, plain[rank])
        torch.testing.assert_close(merged, mean)
        torch.testing.assert_close(after, mean)
        assert reach == 1.0


def pickle_module(rank):
    with staged(mlp()) as model:
        return pickle.dumps(model.module)


def test_pickle_of_the_module_needs_nothing_of_straggle():
    (pickled,) = run_ranks(pickle_module, 1)
    assert b"straggle" not in pickled
    assert digest(pickle.loads(pickled).parameters()) == digest(mlp().parameters())


def average_under_ddp(rank, folder):
    """Copies of a model that DDP trains, while it is watched and slowed down."""
    module = mlp()
    model = DistributedDataParallel(module)
    with watch(model, folder), FaultInjector(module, {"stall": Stall(0, seconds=0.0, rank=rank)}, rank=rank):
        for number in range(2):
            model(features(rank, number)).square().mean().backward()
        pickled = [pickle.dumps(model), pickle.dumps(module)]
        averages = AveragedModel(model), AveragedModel(module)
        outputs = [network(features(0, 0)) for network in (*averages, module)]
    return [b"straggle" in content for content in pickled], [torch.equal(outputs[2], o) for o in outputs[:2]]


def test_watched_ddp_and_a_module_with_faults_are_copied_too(tmp_path):
    assert run_ranks(average_under_ddp, 2, tmp_path) == [([False, False], [True, True])] * 2


def average(rank):
    """An exponential moving average of the weights over three steps, by the wrapped model and by its module."""
    module = mlp(seed=rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module, deadline=QuantileDeadline(0.5), estimator=LastMerged()) as model:
        ours, inner = (
            AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)),
            AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)),
        )
        expected = None
        for number in range(3):
            with model.step():
                model(features(rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ours.update_parameters(model)
            inner.update_parameters(module)
            now = [parameter.detach().clone() for parameter in module.parameters()]
            expected = now if expected is None else [(e + n) / 2 for e, n in zip(expected, now, strict=True)]
        with torch.no_grad():
            same_output = torch.equal(ours(features(0, 0)), inner(features(0, 0)))
    averaged = [parameter.detach() for parameter in ours.parameters()]
    return averaged, expected, same_output, list(ours.state_dict()), digest(inner.parameters())


def test_average_of_the_wrapped_model_is_updated_evaluated_and_saved_as_with_ddp():
    results = run_ranks(average, 2)
    for averaged, expected, same_output, keys, _ in results:
        torch.testing.assert_close(averaged, expected)
        assert same_output
        assert keys == ["n_averaged", *(f"module.module.{name}" for name in mlp().state_dict())]
    assert len({parameters for *_, parameters in results}) == 1


def train(model, module, rank, numbers):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in numbers:
        with model.step():
            model(features(rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(module.parameters())


def go_on_with_copy(rank, how, inside):
    """A copy trains two steps beside the original, which then trains the same two."""
    with staged(mlp(seed=rank), deadline=60.0, estimator=LastMerged(), merge=Merge(check_every=1)) as model:
        train(model, model.module, rank, range(2))
        if inside:
            with model.step():
                twin = COPIES[how](model)
                model(features(rank, 2)).square().mean().backward()
            model.zero_grad()
        else:
            twin = COPIES[how](model)
        before = digest(model.parameters())
        fresh = twin.last_report is None and digest(twin.parameters()) == before
        try:
            theirs = train(twin, twin.module, rank, range(3, 5))
            untouched = digest(model.parameters()) == before
            ours = train(model, model.module, rank, range(3, 5))
            compared = twin.last_report.different_ranks  # by default none are, in a second step
            options = (twin.deadline.budget_s, type(twin.estimator).__name__, compared)
            return fresh, untouched, options, ours == theirs, theirs, twin.last_report.step, model.last_report.step
        finally:
            twin.close()


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside of a step"])
@pytest.mark.parametrize("how", COPIES)
def test_copy_of_the_wrapped_model_joins_the_job_when_its_first_step_begins(how, inside):
    first, second = run_ranks(go_on_with_copy, 2, how, inside)
    assert first == second
    assert first[:4] == (True, True, (60.0, "LastMerged", ()), True)
    assert first[5:] == (1, 4 if inside else 3)


def copy_on_one_rank(rank):
    """Only rank 0 keeps an average, evaluates it, closes it, and asks it for what it does not have."""
    with staged(mlp(seed=rank)) as model:
        train(model, model.module, rank, range(2))
        words = ""
        if rank == 0:
            kept = copy.deepcopy(model).eval()
            with torch.no_grad():
                assert torch.equal(kept(features(0, 0)), model.module(features(0, 0)))
            try:
                kept.lag  # noqa: B018
            except RuntimeError as error:
                words = str(error)
            kept.close()
        return words, train(model, model.module, rank, range(2, 4))


def test_copy_on_one_rank_alone_holds_nobody_up():
    first, second = run_ranks(copy_on_one_rank, 2)
    assert first[1] == second[1]
    assert "this model is a copy, which has no coordinator before its first step" in first[0]


def pickle_wrapped(rank):
    with staged(mlp(), deadline=0.5) as model:
        train(model, model.module, rank, range(2))
        return pickle.dumps(model), digest(model.parameters())


def test_pickled_model_is_evaluated_without_a_process_group_and_steps_only_with_one():
    pickled, parameters = run_ranks(pickle_wrapped, 2)[0]
    model = pickle.loads(pickled)
    assert isinstance(model, StagedDataParallel)
    assert digest(model.parameters()) == parameters
    assert model(features(0, 0)).shape == (8, 2)
    with pytest.raises(RuntimeError, match="straggle needs a process group"):
        model.step()


def copy_in_group(rank):
    group = torch.distributed.new_group([0, 1])
    with staged(mlp(), process_group=group) as model:
        train(model, model.module, rank, range(2))
        try:
            copy.deepcopy(model).step()
        except RuntimeError as error:
            return str(error)


def test_copy_of_a_model_with_a_group_of_its_own_says_how_to_wrap_it():
    for words in run_ranks(copy_in_group, 2):
        assert "write StagedDataParallel(copy.module, process_group=...)" in words


@pytest.mark.parametrize("how", [*COPIES, *AVERAGES])
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside of a step"])
def test_copy_of_a_module_with_a_staged_backward_is_plain(how, inside):
    module, seen = mlp(), []
    staged = StagedBackward(module, stages=3, on_stage=lambda stage: seen.append(stage.name))
    with staged.step() as step:
        loss = module(features(0, 0)).square().mean()
        if inside:
            alone = (COPIES | AVERAGES)[how](module)
            alone(features(1, 0)).square().mean().backward()
            assert not seen
        loss.backward()
    if not inside:
        alone = (COPIES | AVERAGES)[how](module)
        alone(features(1, 0)).square().mean().backward()
    assert len(seen) == 3
    assert not step.report.missing
    torch.testing.assert_close(grads(alone), plain_gradients(1))
    torch.testing.assert_close(grads(module), plain_gradients(0))
    assert b"straggle" not in pickle.dumps(module)


def test_copy_of_a_staged_backward_stages_the_copied_module():
    seen = []
    original = StagedBackward(mlp(), stages=3, on_stage=lambda stage: seen.append(stage.name))
    with original.step():
        twin = copy.deepcopy(original)
        original.module(features(0, 0)).square().mean().backward()
    assert len(seen) == 3
    report = twin.backward(twin.module(features(1, 0)).square().mean()).report
    assert [stage.passes for stage in report.stages] == [1, 1, 1]
    assert seen[:3] == seen[3:]
    torch.testing.assert_close(grads(original.module), plain_gradients(0))
    torch.testing.assert_close(grads(twin.module), plain_gradients(1))


def test_copy_of_a_closed_staged_backward_has_no_hooks():
    original = StagedBackward(mlp())
    original.close()
    twin = copy.deepcopy(original)
    assert not twin.module._forward_pre_hooks
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in twin.module.parameters())


def test_copy_of_a_hooked_module_compiles():
    module = nn.Sequential(nn.Linear(4, 4))
    StagedBackward(module)
    compiled = torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True)
    assert compiled(features(0, 0)).shape == (8, 4)
