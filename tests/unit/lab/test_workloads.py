"""The workloads: their data are deterministic, split without overlap, and their models learn."""

import importlib.util
import inspect
import os
import sys

import pytest
import torch
import yaml
from hydra.utils import get_class
from repository import ROOT
from torch import nn

from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.paced import Paced, pace
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import Text
from straggle.lab.workloads.workload import Shard, Workload

CONF = ROOT / "conf" / "workload"


def shards(num_samples, world_size, batch_size, seed=0):
    return [
        Shard(num_samples, rank=rank, world_size=world_size, batch_size=batch_size, seed=seed)
        for rank in range(world_size)
    ]


def epoch_of(shard, epoch):
    size = shard.num_samples // (shard.world_size * shard.batch_size)
    return torch.cat([shard.indices(epoch * size + batch) for batch in range(size)])


def global_batch(shards, position):
    return torch.cat([shard.indices(position) for shard in shards]).tolist()


def train(workload, steps, batch_size=32, lr=3e-3):
    """Losses of a training run on one rank, and the trained model."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    shard = Shard(workload.num_samples, rank=0, world_size=1, batch_size=batch_size, seed=0)
    losses = []
    for step in range(steps):
        loss = workload.loss(model, workload.batch(shard.indices(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def small_workload(name, folder):
    if name == "text":
        path = folder / "text.txt"
        path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
        return Text(path, context=16, width=16, depth=2, heads=2, validation_share=0.1)
    if name == "digits":
        return Digits(channels=8, depth=2)
    return Synthetic(width=16, depth=2, num_samples=256)


@pytest.fixture(params=["text", "digits", "synthetic"])
def workload(request, tmp_path):
    return small_workload(request.param, tmp_path)


# Shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [48, 53])
def test_shards_of_all_ranks_are_disjoint_and_drop_only_the_remainder(num_samples, world_size):
    seen = torch.cat([epoch_of(shard, 2) for shard in shards(num_samples, world_size, batch_size=4)]).tolist()
    assert len(seen) == len(set(seen)) == num_samples // (world_size * 4) * world_size * 4
    assert set(seen) <= set(range(num_samples))


def test_each_epoch_is_shuffled_anew():
    shard = Shard(64, rank=0, world_size=1, batch_size=8, seed=0)
    first, second = epoch_of(shard, 0), epoch_of(shard, 1)
    assert first.tolist() != second.tolist()
    assert first.sort().values.equal(second.sort().values)


def test_any_micro_batch_can_be_asked_for_in_any_order():
    forward, backward = shards(50, 1, 4) + shards(50, 1, 4)
    expected = [forward.indices(position).tolist() for position in range(40)]
    assert [backward.indices(position).tolist() for position in reversed(range(40))] == expected[::-1]


def test_second_epoch_of_one_seed_is_not_the_first_of_the_next_seed():
    orders = [epoch_of(shards(64, 1, 8, seed)[0], epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_global_batch_is_the_same_however_many_ranks_share_it():
    alone = shards(100, world_size=1, batch_size=12)
    for world_size in (2, 3, 4):
        together = shards(100, world_size, batch_size=12 // world_size)
        assert all(global_batch(together, position) == global_batch(alone, position) for position in range(20))


def test_shard_has_no_micro_batch_before_the_first():
    with pytest.raises(ValueError, match="position is -1; micro-batches are counted from 0"):
        shards(8, 1, 4)[0].indices(-1)


# All workloads


def test_model_depends_on_the_global_seed_only(workload):
    def parameters(seed):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(workload.model().parameters())

    assert parameters(1).equal(parameters(1))
    assert not parameters(1).equal(parameters(2))


def test_batch_is_a_function_of_the_sample_numbers(workload, tmp_path, request):
    again = small_workload(request.node.callspec.params["workload"], tmp_path)
    random_state = torch.get_rng_state()
    x, y = workload.batch(torch.tensor([5, 0, 5]))
    x_alone, y_alone = again.batch(torch.tensor([5]))
    assert x[[0, 2]].equal(x_alone.repeat_interleave(2, 0))
    assert y[[0, 2]].equal(y_alone.repeat_interleave(2, 0))
    assert not x[1:2].equal(x_alone)
    assert torch.get_rng_state().equal(random_state)


def test_every_sample_has_a_number_and_no_more(workload):
    workload.batch(torch.tensor([workload.num_samples - 1]))
    with pytest.raises(IndexError):
        workload.batch(torch.tensor([workload.num_samples]))


def test_loss_falls_and_held_out_scores_improve(workload):
    torch.manual_seed(0)
    before = workload.evaluate(workload.model())
    losses, model = train(workload, steps=60)
    after = workload.evaluate(model)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]


def test_every_parameter_gets_a_gradient(workload):
    model = workload.model()
    workload.loss(model, workload.batch(torch.arange(4))).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_evaluation_repeats_itself_and_leaves_modes_and_gradients_alone(workload):
    model = workload.model()
    frozen = next(iter(model.children())).eval()
    assert workload.evaluate(model) == workload.evaluate(model)
    assert model.training
    assert not frozen.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_is_restored_when_the_evaluation_fails(workload):
    class Failing(nn.Linear):
        def forward(self, x):
            raise RuntimeError(f"broken for {tuple(x.shape)}")

    model = Failing(1, 1)
    with pytest.raises(RuntimeError, match="broken"):
        workload.evaluate(model)
    assert model.training


@pytest.mark.parametrize("name", ["text", "digits", "synthetic"])
def test_configuration_has_every_constructor_argument_with_its_default(name):
    configured = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    target = configured.pop("_target_")
    cls = get_class(target)
    defaults = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    assert issubclass(cls, Workload)
    assert configured == defaults
    assert list(configured) == list(defaults)


# Text


def test_text_of_a_file_comes_in_windows_whose_targets_are_one_byte_ahead(tmp_path):
    path = tmp_path / "bytes.txt"
    path.write_bytes(bytes(range(1, 101)))
    text = Text(path, context=4, validation_share=0.2)
    x, y = text.batch(torch.tensor([0, 1]))
    assert x.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert y.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert x.dtype == y.dtype == torch.int64
    assert text.num_samples == 19  # 80 bytes to train on; the last of them is a target only


def test_held_out_bytes_of_a_file_are_in_no_training_window(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    text = Text(path, context=7, validation_share=0.1)
    x, y = text.batch(torch.arange(text.num_samples))
    assert set(x.unique().tolist()) == set(y.unique().tolist()) == {ord("a")}


def test_text_of_a_folder_is_its_visible_text_files_in_order_and_the_last_are_held_out(tmp_path):
    contents = {
        "b/one.txt": b"1" * 50,
        "a.txt": b"0" * 50,
        "b/two.md": b"2" * 50,
        "z.txt": b"3" * 50,
        "c.bin": b"4\0" * 50,
        ".git/config": b"5" * 50,
        ".hidden": b"6" * 50,
        "empty.txt": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    text = Text(tmp_path, context=1, validation_share=0.25)
    x, _ = text.batch(torch.arange(text.num_samples))
    assert bytes(x.flatten().tolist()) == b"0" * 50 + b"1" * 50 + b"2" * 49

    class Predicts3(nn.Linear):
        def forward(self, x):
            return nn.functional.one_hot(torch.full_like(x, ord("3")), 256).float()

    assert text.evaluate(Predicts3(1, 1))["accuracy"] == 1.0


def test_text_without_a_path_is_the_standard_library():
    first, second = Text(), Text()
    assert 30_000 < first.num_samples <= 8_000_000 // 64
    numbers = torch.arange(0, first.num_samples, 997)
    assert first.batch(numbers)[0].equal(second.batch(numbers)[0])
    assert b"import" in bytes(first.batch(torch.arange(2000))[0].flatten().tolist())


def test_text_model_is_causal(tmp_path):
    model = small_workload("text", tmp_path).model()
    x = torch.randint(256, (1, 16))
    changed = x.clone()
    changed[0, 9] = (x[0, 9] + 1) % 256
    same = torch.isclose(model(x), model(changed), atol=1e-6).all(-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_text_model_names_its_parts_in_the_order_of_the_forward_pass():
    model = Text(depth=6).model()
    assert [name for name, _ in model.named_children()] == ["embedding", "positions", "blocks", "norm", "head"]
    assert isinstance(model.get_submodule("blocks.5"), nn.Module)


def test_text_that_is_too_short_says_by_how_much(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="training text has 50 bytes; context=64 needs 65: give more text"):
        Text(path, validation_share=0.5)
    with pytest.raises(ValueError, match="validation text has 5 bytes; context=16 needs 17: give a larger"):
        Text(path, context=16)


# Digits and synthetic data


def test_digits_are_split_without_overlap_by_the_seed():
    def images(pair):
        return {tuple(image.flatten().tolist()) for image in pair[0]}

    digits = Digits()
    assert digits.num_samples == 1438
    assert len(images(digits.training)) == 1438
    assert not images(digits.training) & images(digits.validation)
    assert images(digits.validation) == images(Digits(seed=0).validation) != images(Digits(seed=1).validation)


def test_digits_are_learned_in_a_few_epochs():
    digits = Digits()
    _, model = train(digits, steps=130)
    assert digits.evaluate(model)["accuracy"] > 0.95


def test_digits_are_those_of_scikit_learn_which_is_not_imported_for_them(monkeypatch):
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    theirs = {(*image.tolist(), digit) for image, digit in zip(images, digits, strict=True)}
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    both = Digits()
    ours = {
        (*(16 * image).flatten().tolist(), digit.item())
        for pair in (both.training, both.validation)
        for image, digit in zip(*pair, strict=True)
    }
    assert ours == theirs


def test_scikit_learn_is_missed_only_where_digits_are_made_and_the_message_names_the_extra(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.find_spec("straggle.lab.workloads.digits")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    with pytest.raises(ImportError, match=r"sklearn.*pip install 'straggle\[train\]'"):
        fresh.Digits()


def test_synthetic_model_has_about_ten_million_parameters_in_twelve_blocks():
    model = Synthetic().model()
    assert 9.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10.5e6
    assert len(model.get_submodule("blocks")) == 12


# Paced


def test_paced_passes_sleep_their_seconds_one_third_in_forward():
    torch.manual_seed(0)
    inner = Synthetic(width=16, depth=2, num_samples=256)
    model = inner.model()
    slept = []
    pace(model, 600.0, slept.append)  # a sleep that does not sleep: nothing of it is taken off
    x, y = inner.batch(torch.arange(4))
    loss = inner.loss(model, (x, y))
    assert slept[-1] == pytest.approx(200.0, rel=1e-3)  # what is owed grows, as none of it was slept
    loss.backward()
    assert slept[-1] == pytest.approx(600.0, rel=1e-3)
    count = len(slept)
    inner.evaluate(model)
    assert len(slept) == count


def test_paced_is_its_inner_workload_otherwise():
    inner = Synthetic(width=16, depth=2, num_samples=256)
    paced = Paced(inner, seconds=0.001)
    assert train(paced, 3)[0] == train(inner, 3)[0]
    assert paced.num_samples == inner.num_samples
