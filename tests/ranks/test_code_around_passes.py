"""A user's code around what computes runs as often on a late rank as on the others: the real trainers, beside DDP.

Over framework, place of the code, accumulation, and where the second rank is late. The code gathers from all ranks when
its own counts say so, as trl's GRPO does: a run in which they part hangs.
"""

import time
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import as_launched
from loaded import ranks_with
from ranks import digest
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.slow,  # the frameworks take their seconds to load
    # asked for, not imported: each test process collects this file
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
NUM_RANKS, NUM_STEPS, LATE_IN = 2, 4, 2  # steps are counted from 0
PLACES, ACCUMULATIONS = ("nowhere", "forward", "backward", "stood in"), (1, 3)


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("transformers.trainer", "lightning.pytorch") as run:
        yield run


class Net(nn.Module):
    """In a step the second rank is late in its first forward or backward pass, or it is stuck in its last forward pass.

    ``open_step``, which is set later, returns the step that is open.
    """

    def __init__(self, rank, place, accumulate, file):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.place, self.file, self.calls = place if rank else "nowhere", file, 0
        self.late_at = accumulate * (LATE_IN + 1) - 1 if place == "stood in" else accumulate * LATE_IN
        self.deadline = 0.05 if place == "stood in" else 100.0

    def forward(self, x, labels):
        is_late, self.calls = self.calls == self.late_at, self.calls + 1
        if is_late and self.place == "forward":
            self.open_step().stop()
        while (
            is_late and self.place == "stood in" and not self.file.exists()
        ):  # its stand-in alone can bring that about
            time.sleep(0.01)
        loss = (self.layers(x).squeeze(-1) - labels).square().mean()
        if is_late and self.place == "backward":
            self.open_step().stop()
        return {"loss": loss, "seen": x}


def samples(accumulate):
    x = torch.randn(2 * NUM_RANKS * NUM_STEPS * accumulate, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


def gather_at(number, every):
    """What a library does now and then, such as to generate for all ranks."""
    if number % every == 0:
        dist.all_reduce(torch.ones(()))


@contextmanager
def gradients_seen(file):
    """The gradients with which optimizers step; the file is there when more than `LATE_IN` steps are merged."""
    seen = []

    def look(optimizer, *_):
        seen.append(digest([p.grad for group in optimizer.param_groups for p in group["params"]]))
        if len(seen) > LATE_IN:
            file.touch()

    handle = register_optimizer_step_pre_hook(look)
    yield seen
    handle.remove()


def runs(rank, run, name, folder):
    """``run(rank, name, staged, place, accumulate, file)`` over accumulation and place, and under DDP."""
    as_launched(rank)
    found = {}
    for accumulate, place in product(ACCUMULATIONS, ("ddp", *PLACES)):
        file = Path(folder, f"{accumulate}-{place}")
        with gradients_seen(file) as gradients:
            counts, losses, net, late_steps = run(rank, name, place != "ddp", place, accumulate, file)
        found[accumulate, place] = dict(counts), losses, digest(net.parameters()), gradients, late_steps
    return found


def check(ranks, counted=None):
    """Counts are DDP's on both ranks, at least those that are ``counted``; both apply the same, and as DDP does."""
    for accumulate, place in product(ACCUMULATIONS, PLACES):
        first, second = (found[accumulate, place] for found in ranks)
        ddp = ranks[0][accumulate, "ddp"]
        for counts, *_ in (first, second):
            same = counted or ddp[0].keys()
            assert [(key, counts.get(key)) for key in same] == [(key, ddp[0].get(key)) for key in same], place
        assert first[2:] == second[2:], (accumulate, place)
        assert len(first[3]) == NUM_STEPS
        if place == "nowhere":
            assert first[2] == ddp[2], accumulate
        else:
            assert LATE_IN in first[4], (accumulate, place)


# -- transformers


def counting(base):
    """The Trainer of which the others are derived: ``seen`` is how often what ran."""

    class Counting(base):
        decides, in_a_step = "behind", False  # the count by which it gathers; before a step begins, or between passes

        def __init__(self, *positional, **words):
            self.seen, self.losses = Counter(), []
            super().__init__(*positional, **words)

        def _prepare_inputs(self, inputs):
            self.seen["prepared"] += 1
            gather_at(self.seen[self.decides], 2 if self.in_a_step else self.args.gradient_accumulation_steps)
            return super()._prepare_inputs(inputs)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch)  # a name that trl has

        def _compute_loss(self, *inputs):
            return super().compute_loss(*inputs)

    return Counting


def behind(base):
    class Behind(counting(base)):
        def training_step(self, *positional, **words):
            self.seen["before"] += 1
            loss = super().training_step(*positional, **words)
            self.seen["behind"] += 1
            self.losses.append(float(loss))
            return loss

    return Behind


def whole(base):
    class Whole(counting(base)):
        """A body of its own, with a penalty that leads to parameters."""

        in_a_step = True

        def training_step(self, model, inputs, num_items=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
            self.seen["between"] += 1
            self.losses.append(loss.item())
            loss += 0.01 * sum(parameter.square().sum() for parameter in model.parameters())
            loss /= self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            self.seen["behind"] += 1
            return loss.detach()

    return Whole


def with_outputs(base):
    class WithOutputs(counting(base)):
        decides = "before"

        def training_step(self, model, inputs, num_items=None):
            self.seen["before"] += 1
            inputs = self._prepare_inputs(inputs)
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
            assert outputs["seen"] is inputs["x"]
            loss = loss / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            self.seen["behind"] += 1
            return loss.detach()

    return WithOutputs


def by_itself(base):
    class ByItself(counting(base)):
        """It calls the model and backward, as a loop does."""

        decides = "before"

        def training_step(self, model, inputs, _num_items=None):
            self.seen["before"] += 1
            inputs = self._prepare_inputs(inputs)
            loss = model(**inputs)["loss"] / self.current_gradient_accumulation_steps
            loss.backward()
            self.seen["behind"] += 1
            return loss.detach()

    return ByItself


BODIES = {body.__name__: body for body in (behind, whole, with_outputs, by_itself)}
NAMES = [*BODIES, "derived behind", "derived whole"]  # these from StagedTrainer, the others behind the mixin


def kind_of(name, staged):
    from transformers import Trainer

    from straggle.integrations.transformers import StagedTrainer, StagedTrainerMixin

    body = BODIES[name.split()[-1]]
    if not staged:
        return body(Trainer)
    return body(StagedTrainer) if "derived" in name else type("Mixed", (StagedTrainerMixin, body(Trainer)), {})


def with_trainer(rank, name, staged, place, accumulate, file):
    import transformers

    class Watches(transformers.TrainerCallback):
        def on_substep_end(self, *_, **__):
            trainer.seen["substeps"] += 1

    arguments = transformers.TrainingArguments(
        str(file.parent),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=NUM_STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    net = Net(rank, place, accumulate, file)
    data = [{"x": x, "labels": y} for x, y in samples(accumulate)]
    words = {"deadline": net.deadline} if staged else {}
    trainer = kind_of(name, staged)(net, arguments, train_dataset=data, callbacks=[Watches()], **words)
    net.open_step = lambda: trainer.model_wrapped.open_step
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    late = [number for number, entry in enumerate(logs) if entry.get("straggle/late_ranks")]
    if staged:
        trainer.model_wrapped.close()
    return trainer.seen, (trainer.losses, [entry["loss"] for entry in logs]), net, late


def names_of_ours(rank, folder):
    """Private names that a trainer has only because of the mixin."""
    as_launched(rank)
    from transformers import Trainer, TrainingArguments

    from straggle.integrations.transformers import StagedTrainer

    made = [kind(nn.Linear(1, 1), TrainingArguments(folder, use_cpu=True)) for kind in (Trainer, StagedTrainer)]
    plain, staged = ({*dir(trainer), *vars(trainer)} for trainer in made)
    return sorted(name for name in staged - plain if name.startswith("_"))


def test_private_names_of_the_mixin_cannot_be_those_of_the_class_behind_it(tmp_path, run_loaded):
    names = run_loaded(names_of_ours, NUM_RANKS, str(tmp_path), timeout_s=100)[0]
    assert names
    assert all(name.startswith("_staged") for name in names), names


@pytest.mark.parametrize("name", NAMES)
def test_code_of_a_trainer_around_training_step(tmp_path, run_loaded, name):
    ranks = run_loaded(runs, NUM_RANKS, with_trainer, name, str(tmp_path), timeout_s=200)
    is_left = name in ("with_outputs", "by_itself")  # by a late rank, behind the model
    check(ranks, {"before", "prepared", "substeps"} if is_left else None)
    for accumulate, place in product(ACCUMULATIONS, PLACES):
        (_, first), (own, second) = (found[accumulate, place][1] for found in ranks)
        assert first == second
        if place != "stood in":  # nobody was late before
            assert first[:LATE_IN] == pytest.approx(ranks[0][accumulate, "ddp"][1][1][:LATE_IN], rel=1e-4)
        # what it had instead of a loss is its last one; it goes on for a gather in the step, for which its peers wait
        if place == "forward" and name.endswith("behind"):
            late = LATE_IN * accumulate
            assert own[late : late + accumulate] == [own[late - 1]] * accumulate


# -- Lightning


HOOKS = [
    f"on_{name}"
    for name in (
        "train_batch_start",
        "before_zero_grad",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "train_batch_end",
    )
]


def with_lightning(rank, _name, staged, place, accumulate, file):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from straggle.integrations.lightning import StagedStrategy

    seen, losses, late = Counter(), [], []

    def counted(who, name):
        def hook(_self, *positional, **_):
            if (who, name) == ("Module", "on_train_batch_start"):
                gather_at(seen["Module", "on_train_batch_end"], accumulate)
            if (who, name) == ("Callback", "on_train_batch_end"):
                losses.append(float(positional[2]["loss"]))
            seen[who, name] += 1

        return hook

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(rank, place, accumulate, file)

        def training_step(self, batch, _number):
            seen["before"] += 1
            return {"loss": self.net(*batch)["loss"], "more": 1}

        def backward(self, loss):
            seen["backward"] += 1
            loss.backward()

        def optimizer_step(self, *positional):
            seen["stepping"] += 1
            super().optimizer_step(*positional)
            seen["stepped"] += 1

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    callback = type("Counts", (pl.Callback,), {name: counted("Callback", name) for name in HOOKS})()
    for name in HOOKS:
        setattr(Module, name, counted("Module", name))
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=StagedStrategy(deadline=module.net.deadline) if staged else "ddp",
        plugins=[TorchElasticEnvironment()],
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def note(record):
        if record.report.late_ranks:
            late.append(record.report.step)

    class Notes(pl.Callback):
        def on_train_start(self, trainer, _module):
            if staged:
                trainer.model.register_step_hook(note)

    trainer.callbacks.append(Notes())
    module.net.open_step = lambda: trainer.model.open_step
    trainer.fit(module, DataLoader(samples(accumulate), batch_size=2))
    return seen, losses, module.net, late


def test_hooks_of_a_lightning_module_and_callback(tmp_path, run_loaded):
    ranks = run_loaded(runs, NUM_RANKS, with_lightning, "hooks", str(tmp_path), timeout_s=200)
    check(ranks, counted=[*product(("Callback", "Module"), HOOKS), "backward", "stepping", "stepped"])
    for accumulate in ACCUMULATIONS:
        losses, first = ranks[1][accumulate, "forward"][1], LATE_IN * accumulate
        assert losses[first : first + accumulate] == [losses[first - 1]] * accumulate


# -- Accelerate


def with_accelerator(rank, name, staged, place, accumulate, file):
    from accelerate import Accelerator

    from straggle.integrations.accelerate import StagedAccelerator

    net, seen, late = Net(rank, place, accumulate, file), Counter(), []
    kind, words = (StagedAccelerator, {"deadline": net.deadline}) if staged else (Accelerator, {})
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulate, **words)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(samples(accumulate), batch_size=2)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    net.open_step = lambda: model.open_step
    if staged:
        model.register_step_hook(lambda record: record.report.late_ranks and late.append(record.report.step))
    for x, y in loader:
        seen["before"] += 1
        gather_at(seen["behind"], 2)
        with accelerator.accumulate(model):
            seen["in the block"] += 1
            accelerator.backward(model(x, y)["loss"])
        seen["behind"] += 1
        if accelerator.sync_gradients:
            seen["synchronized"] += 1
        optimizer.step()
        optimizer.zero_grad()
    if staged:
        model.close()
    return seen, None, net, late


def test_code_of_a_loop_around_the_block_of_an_accelerator(tmp_path, run_loaded):
    check(run_loaded(runs, NUM_RANKS, with_accelerator, "loop", str(tmp_path), timeout_s=200))
