"""A step in a framework does not wait for its device, but where the framework itself reads: counted on a fake queue."""

import math
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from host_reads import HostReads
from launched import as_launched
from loaded import ranks_with
from queued_device import queued_device
from ranks import digest
from torch import nn

pytestmark = [
    pytest.mark.slow,  # each framework takes its seconds to load
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
PLANNED = 3  # steps after which the stages are planned, and all buffers are as they stay


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("transformers.trainer", "lightning.pytorch") as run:
        yield run


class Pairs(torch.utils.data.Dataset):
    """Lists of numbers, of which a collator makes tensors on the host."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"x": [0.1 * number, 1.0, -0.5, 0.02 * number], "labels": [number % 3, -100 if number % 5 else 1]}


def collated(samples):
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


class Net(nn.Module):
    """A model whose loss is the mean over the labels that are not masked, as a language model's."""

    accepts_loss_kwargs = True  # the number of labels of all of a step's micro-batches, as Trainer asks

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x, labels, num_items_in_batch=None):
        logits = self.head(torch.tanh(self.body(x))).view(-1, 3)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits, labels.view(-1), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


class Reads:
    """The reads of each step of a loop; ``begin`` before it, and ``next_step`` at the end of each."""

    def __init__(self):
        self.mode, self.of_steps = HostReads([]), []

    def begin(self, module):
        self.mode.add([*module.parameters(), *module.buffers()])

    def next_step(self, *_, **__):
        self.of_steps.append(list(self.mode.reads))
        self.mode.reads.clear()


def trainer_steps(rank, folder, queued, words):
    """Each step's reads, and what is logged; ``queued``: on a fake queue, where reads are counted."""
    as_launched(rank)
    import transformers

    from straggle.integrations.transformers import StagedTrainer

    class Counts(transformers.TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            reads.begin(model)

        def on_step_end(self, *_, **__):
            reads.next_step()

    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8, "save_strategy": "no"}
    given |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, **words}
    arguments = transformers.TrainingArguments(output_dir=folder, **given)
    net = Net()
    reads = Reads()
    with queued_device() if queued else nullcontext() as device:
        trainer = StagedTrainer(net, arguments, train_dataset=Pairs(), callbacks=[Counts()])
        with reads.mode if queued else nullcontext():
            trainer.train()
    history = trainer.state.log_history
    logs = [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]
    return reads.of_steps, device.waits if queued else 0, logs, history[-1]["train_loss"], digest(net.parameters())


@pytest.mark.parametrize(
    "words", [{}, {"logging_nan_inf_filter": False}, {"average_tokens_across_devices": False}], ids=str
)
def test_trainer_reads_nothing_back_and_logs_what_the_cpu_does_a_step_later(words, tmp_path, run_loaded):
    on_host = run_loaded(trainer_steps, 2, str(tmp_path), False, words)
    for rank, own in enumerate(run_loaded(trainer_steps, 2, str(tmp_path), True, words)):
        reads, waits, logs, _, state = own
        assert len(reads) == 8
        assert not any(reads[PLANNED:]), reads
        assert waits == 0
        assert state == on_host[rank][4]
        (_, *losses), (first, second, *norms) = zip(*logs, strict=True)
        expected_losses, expected_norms = zip(*on_host[rank][2], strict=True)
        assert losses == pytest.approx(expected_losses[:-1])
        assert (first, second) == pytest.approx(expected_norms[:2])
        assert norms == pytest.approx(expected_norms[:-2])


def test_trainer_that_logs_seldom_has_the_mean_over_the_steps_that_are_known(tmp_path, run_loaded):
    """Each step's loss is in it once, and it is the same on all ranks; the last one's is not known by then."""
    (of_host, *_) = (logs for _, _, logs, _, _ in run_loaded(trainer_steps, 2, str(tmp_path), False, {}))
    losses, means = [loss for loss, _ in of_host], []
    for every, windows in ((1, [losses[n : n + 1] for n in range(7)]), (4, [losses[:3], losses[3:7]]), (9, [])):
        for *_, logs, mean, _ in run_loaded(trainer_steps, 2, str(tmp_path), True, {"logging_steps": every}):
            logged = [loss for loss, _ in logs][int(every == 1) :]  # of the first step each rank has its own
            assert logged == pytest.approx([sum(own) / len(own) for own in windows])
            means.append(mean)
    assert means == pytest.approx([(sum(losses[:7]) + losses[6]) / 8] * 6)


def accelerate_steps(rank, queued, non_blocking):
    as_launched(rank)
    from accelerate.utils import DataLoaderConfiguration

    from straggle.integrations.accelerate import StagedAccelerator

    losses, reads, net = [], Reads(), Net()
    accelerator = StagedAccelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(non_blocking=non_blocking),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    with queued_device() if queued else nullcontext() as device:
        loader = torch.utils.data.DataLoader(Pairs(), batch_size=2, collate_fn=collated)
        model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
        reads.begin(model)
        with reads.mode if queued else nullcontext():
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    model.open_step.log(loss=loss)
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    losses.append(model.last_report.scalars["loss"])
                    reads.next_step()
    return reads.of_steps, device.waits if queued else 0, losses, digest(net.parameters())


@pytest.mark.parametrize("non_blocking", [True, False])
def test_accelerate_waits_for_the_copies_of_its_loader_alone_and_not_if_it_is_told_so(non_blocking, run_loaded):
    on_host = run_loaded(accelerate_steps, 2, False, non_blocking)
    for rank, (reads, waits, losses, state) in enumerate(run_loaded(accelerate_steps, 2, True, non_blocking)):
        assert len(reads) == 8
        assert waits == 0
        for of_step in reads[PLANNED:]:  # two tensors in each of two micro-batches
            assert len(of_step) == (0 if non_blocking else 4), of_step
            assert all("operations.py" in one and "send_to_device" in one for one in of_step)
        assert math.isnan(losses[0])
        assert losses[1:] == pytest.approx(on_host[rank][2][:-1])
        assert state == on_host[rank][3]


def module_of(trainer):
    return trainer.lightning_module


def lightning_steps(rank, folder, queued, words, seldom=False):
    """Each step's reads, and what it logged; ``seldom``: another number in some steps, too."""
    as_launched(rank)
    warnings.simplefilter("ignore")  # of Lightning: few workers, a small log interval
    import lightning.pytorch as pl
    from lightning.fabric.utilities import apply_func
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from straggle.integrations.lightning import StagedStrategy

    class Counts(pl.Callback):
        def on_train_start(self, _trainer, module):
            reads.begin(module)

        def on_train_batch_end(self, trainer, *_):
            if not trainer.fit_loop._should_accumulate():
                now = trainer.callback_metrics
                logged.append({name: now[name].clone() for name in module_of(trainer).logged_now})
                reads.next_step()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            loss = self.net(**batch)["loss"]
            of_step = {"loss": loss}
            if seldom and number // 2 % 3 == 1:  # in some steps, before what is logged in all
                of_step = {"seldom": 100 + 7 * loss, **of_step}
            for name, value in of_step.items():
                self.log(name, value, sync_dist=True)
            self.logged_now = [*of_step]
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    reads, module, logged = Reads(), Module(), []
    # as for a device that is no CPU
    copies_to_device = mock.patch.object(apply_func, "_BLOCKING_DEVICE_TYPES", ())
    with queued_device() if queued else nullcontext() as device, copies_to_device:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=StagedStrategy(),
            plugins=[TorchElasticEnvironment()],
            callbacks=[Counts()],
            default_root_dir=folder,
            max_epochs=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            **words,
        )
        loader = torch.utils.data.DataLoader(Pairs(), batch_size=2, collate_fn=collated)
        with reads.mode if queued else nullcontext():
            trainer.fit(module, loader)
    logged = [{name: float(value) for name, value in of_step.items()} for of_step in logged]
    return reads.of_steps, device.waits if queued else 0, logged, digest(module.parameters())


QUIET = {"logger": False}
LOGS = {"logger": True, "log_every_n_steps": 4}


@pytest.mark.parametrize(("words", "num_reads"), [(QUIET, 0), (LOGS, 1)], ids=["quiet", "logs"])
def test_lightning_waits_if_it_gives_numbers_to_a_logger_alone(words, num_reads, tmp_path, run_loaded):
    on_host = run_loaded(lightning_steps, 2, str(tmp_path), False, words)
    for rank, (reads, waits, logged, state) in enumerate(run_loaded(lightning_steps, 2, str(tmp_path), True, words)):
        assert len(reads) == 8
        assert waits == 0
        assert [len(of_step) for of_step in reads[PLANNED:]] == [0, num_reads, 0, 0, 0]
        losses, expected = ([of_step["loss"] for of_step in own] for own in (logged, on_host[rank][2]))
        assert losses[1:] == pytest.approx(expected[:-1])
        assert math.isfinite(losses[0])  # this rank's own: there is no merged one so far
        assert state == on_host[rank][3]


def test_number_that_lightning_logs_in_some_steps_is_not_taken_for_another(tmp_path, run_loaded):
    """What a device tells is the mean of the last step in which the same number was logged."""
    on_host = run_loaded(lightning_steps, 2, str(tmp_path), False, QUIET, True)
    for rank, (_, waits, logged, _) in enumerate(run_loaded(lightning_steps, 2, str(tmp_path), True, QUIET, True)):
        assert waits == 0
        assert sum("seldom" in of_step for of_step in logged) == 3
        for name in ("loss", "seldom"):
            own, expected = ([of_step[name] for of_step in of if name in of_step] for of in (logged, on_host[rank][2]))
            assert own[1:] == pytest.approx(expected[:-1]), name
