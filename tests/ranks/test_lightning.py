"""`StagedStrategy` beside Lightning's DDP: the real Trainer, on ranks over gloo."""

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import as_launched
from loaded import ranks_with
from ranks import digest, logged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.slow,  # Lightning takes its seconds to load
    # asked for, not imported: each test process collects this file
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
NUM_RANKS, FOUR = 2, 4


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("lightning.pytorch") as run:
        yield run


def module_kind():
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")  # of Lightning: few workers, a small log interval

    class Regression(pl.LightningModule):
        """What people write; ``none_at``: batches in which this rank's training step returns nothing."""

        def __init__(self, manual=False, none_at=(), stop_at=(), rank=0, norm=False, skip_at=None):
            super().__init__()
            torch.manual_seed(0)
            norms = [nn.BatchNorm1d(16)] if norm else []
            self.layers = nn.Sequential(nn.Linear(6, 16), *norms, nn.Tanh(), nn.Linear(16, 3))
            self.lr, self.skip_at = 0.01, skip_at
            self.automatic_optimization = not manual
            self.none_at, self.stop_at, self.of_rank = none_at, stop_at, rank
            self.seen = []

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, number):
            x, y = batch
            if not self.automatic_optimization:
                return self.by_hand(x, y)
            if number in self.none_at:
                return None
            if number in self.stop_at:
                self.trainer.model.open_step.stop()
            loss = nn.functional.mse_loss(self(x), y)
            self.log("loss", loss)
            return loss

        def by_hand(self, x, y):
            optimizer = self.optimizers()
            if type(self.trainer.strategy).__name__ == "StagedStrategy":
                with self.trainer.model.step():
                    self.manual_backward(nn.functional.mse_loss(self.trainer.model(x), y))
            else:
                self.manual_backward(nn.functional.mse_loss(self(x), y))
            optimizer.step()
            optimizer.zero_grad()

        def on_train_batch_start(self, _batch, number):
            return -1 if (self.current_epoch, number) == self.skip_at else None

        def on_before_optimizer_step(self, _optimizer):
            self.seen.append(digest([parameter.grad for parameter in self.parameters()]))

        def validation_step(self, batch, _number):
            self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression


def loader(num_samples=48):
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3]), batch_size=4)


def fitted(folder, strategy, module, *, samples=48, resume=None, devices=NUM_RANKS, accumulate=4, **words):
    """A trainer after two epochs, of 6 batches a rank in each unless told otherwise, 4 to a step."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    manual = not module.automatic_optimization
    given = {} if manual else {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    given |= {"max_epochs": 2, "enable_checkpointing": False, **words}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        **given,
    )
    trainer.fit(module, loader(samples), loader(16), ckpt_path=resume)
    return trainer


def state(trainer, module):
    return digest(module.parameters()), trainer.global_step, module.seen


def beside_ddp(rank, folder):
    as_launched(rank)
    from lightning.pytorch.strategies import DDPStrategy

    from straggle.integrations.lightning import StagedStrategy

    kind = module_kind()
    results = {}
    for name, manual in (("automatic", False), ("manual", True)):
        runs = []
        for strategy in (DDPStrategy(), StagedStrategy()):
            module = kind(manual=manual)
            trainer = fitted(folder, strategy, module)
            runs.append((state(trainer, module), float(trainer.callback_metrics["val"])))
        results[name] = runs
    module = kind()
    straight = fitted(folder, "straggle", module)
    straight.save_checkpoint(f"{folder}/half.ckpt")
    once = kind()
    fitted(folder, StagedStrategy(deadline=100.0), once, max_epochs=1).save_checkpoint(f"{folder}/one.ckpt")
    again = kind()
    fitted(folder, StagedStrategy(deadline=100.0), again, resume=f"{folder}/one.ckpt")
    logged = Path(straight.logger.log_dir, "metrics.csv").read_text() if rank == 0 else ""
    return results, digest(module.parameters()), digest(again.parameters()), logged


def test_trains_as_under_ddp_and_goes_on_from_a_checkpoint(tmp_path, run_loaded):
    ranks = run_loaded(beside_ddp, NUM_RANKS, str(tmp_path), timeout_s=240)
    for results, _, again, _ in ranks:
        for ddp, staged in results.values():
            assert staged == ddp
        assert results["automatic"][0][0][1] == 4
        assert again == results["automatic"][0][0][0]
    assert len({straight for _, straight, _, _ in ranks}) == 1  # whoever was late in it
    assert "straggle/late_ranks" in ranks[0][3]


def logging_kind():
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")

    class Logs(pl.LightningModule):
        """Logs the mean over ranks of ``10 * batch + rank``, in these ways; late in the batch ``stop_at``."""

        def __init__(self, ways, stop_at=None):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
            self.ways, self.stop_at, self.seen = ways, stop_at, []

        def training_step(self, batch, number):
            if number == self.stop_at:
                self.trainer.model.open_step.stop()
            loss = self.layers(batch[0]).square().mean()
            for name, words in self.ways.items():
                self.log(name, 10.0 * number + self.global_rank, sync_dist=True, on_step=True, **words)
            return loss

        def on_train_batch_end(self, _outputs, _batch, _number):
            if not self.trainer.fit_loop._should_accumulate():
                self.seen.append({name: float(self.trainer.callback_metrics[name]) for name in self.ways})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Logs


def log_means(rank, folder, ways, strategies):
    """For each strategy and accumulation, what was logged in each step, and what was warned of."""
    as_launched(rank)
    from lightning.pytorch.strategies import DDPStrategy

    from straggle.integrations.lightning import StagedStrategy

    kind, found = logging_kind(), []
    for name, accumulate, stop_at in strategies:
        strategy = StagedStrategy(deadline=100.0) if name == "staged" else DDPStrategy()
        module = kind(ways, stop_at if rank == 1 else None)
        with logged("straggle.loop.step_warnings") as messages:
            fitted(folder, strategy, module, accumulate=accumulate, max_epochs=1, limit_val_batches=0)
        found.append((module.seen, len(messages)))
    return found


def test_what_is_logged_with_sync_dist_rides_along_and_is_the_mean_over_those_that_are_there(tmp_path, run_loaded):
    ways = {"step": {"on_epoch": False}, "both": {"on_epoch": True}}
    runs = [("ddp", 1, None), ("staged", 1, None), ("staged", 2, None), ("staged", 1, 3), ("staged", 2, 3)]
    ranks = run_loaded(log_means, NUM_RANKS, str(tmp_path), ways, runs, timeout_s=240)
    assert [number for found in ranks for _, number in found] == [0] * (NUM_RANKS * len(runs))
    for found in ranks:
        ddp, staged, halves, _, _ = (seen for seen, _ in found)
        assert staged == ddp == [dict.fromkeys(ways, 10.0 * number + 0.5) for number in range(6)]
        assert halves == ddp[1::2]
    of_first = [10.5, 30.0, 50.5]
    assert [[seen["step"] for seen in ranks[0][run][0]] for run in (3, 4)] == [
        [0.5, 10.5, 20.5, 30.0, 40.5, 50.5],
        of_first,
    ]


def test_what_cannot_ride_along_is_reduced_as_under_ddp_and_warned_of(tmp_path, run_loaded):
    for ways in ({"sum": {"reduce_fx": "sum"}}, {f"number {number}": {} for number in range(9)}):
        ranks = run_loaded(log_means, NUM_RANKS, str(tmp_path), ways, [("ddp", 1, None), ("staged", 1, None)])
        assert [[number for _, number in found] for found in ranks] == [[0, 1], [0, 0]]
        for (ddp, _), (staged, _) in ranks:
            assert staged == ddp


def refused_by_ddp(rank, folder):
    """A training step that returns nothing, a rank that is late, and loaders of different lengths."""
    as_launched(rank, FOUR)
    from straggle.integrations.lightning import StagedStrategy

    kind = module_kind()
    results, is_last = [], rank == FOUR - 1
    for words, samples in (
        ({"none_at": (1, 4, 5) if is_last else ()}, 24 * FOUR),
        ({"stop_at": (1, 4) if is_last else ()}, 24 * FOUR),
        ({}, 24 if is_last else 40),
    ):
        module = kind(rank=rank, **words)
        uneven = {"use_distributed_sampler": False} if not words else {}
        trainer = fitted(
            folder, StagedStrategy(deadline=100.0), module, samples=samples, devices=FOUR, accumulate=2, **uneven
        )
        results.append((digest(module.parameters()), trainer.global_step, float(trainer.callback_metrics["val"])))
    return results


def test_none_lateness_and_uneven_loaders_leave_replicas_equal(tmp_path, run_loaded):
    first, *others = run_loaded(refused_by_ddp, FOUR, str(tmp_path), timeout_s=240)
    assert others == [first] * (FOUR - 1)
    assert [steps for _, steps, _ in first] == [6, 6, 10]


def stopping(trainer, *_):
    """Stops in the middle of an accumulation, and not before as many steps as are asked for."""
    trainer.should_stop = trainer.fit_loop.total_batch_idx >= 1


def situations():
    """Words of the module and of the trainer that leave an accumulation in the middle, or change it in a fit."""
    from lightning.pytorch import callbacks

    change = {0: 1, 1: 4, 2: 3}
    average = getattr(callbacks, "EMAWeightAveraging", None)  # Lightning 2.4 has none
    return {
        "scheduled": ({}, {"accumulate": 1, "callbacks": [callbacks.GradientAccumulationScheduler(change)]}),
        "limited": ({}, {"limit_train_batches": 5, "max_steps": 3}),
        "validated in the middle": ({}, {"val_check_interval": 3}),
        "stopped": ({}, {"min_steps": 3, "callbacks": [callbacks.LambdaCallback(on_train_batch_end=stopping)]}),
        "skipped the rest": ({"skip_at": (0, 3)}, {}),
        "early": ({}, {"max_epochs": 9, "callbacks": [callbacks.EarlyStopping("val", min_delta=1.0, patience=1)]}),
        "averaged": ({}, {"callbacks": [average(decay=0.9)] if average else []}),
        "averaged, with norms": (
            {"norm": True},
            {"callbacks": [callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2)], "limit_val_batches": 0},
        ),
        "found": ({}, {"callbacks": [callbacks.LearningRateFinder(num_training_steps=9, max_lr=0.1)]}),
    }


def resumed(folder, kind, own, **words):
    """From a checkpoint of the middle of an accumulation, whose gradients it does not have; steps known before, too."""
    from lightning.pytorch.callbacks import LambdaCallback

    path = f"{folder}/{kind.__name__}-{len(words)}.ckpt"
    known = []

    def save(trainer, *_):
        if trainer.fit_loop.total_batch_idx == 7:
            trainer.save_checkpoint(path)

    def look(trainer, *_):
        if kind.__name__ == "StagedStrategy":
            known.append(trainer.model.history.num_steps)

    module = module_kind()
    fitted(folder, kind(**words), module(**own), callbacks=[LambdaCallback(on_train_batch_end=save)])
    again = module(**own)
    trainer = fitted(
        folder, kind(**words), again, resume=path, max_epochs=3, callbacks=[LambdaCallback(on_train_start=look)]
    )
    return digest(again.parameters()), trainer.global_step, known


def in_the_middle(rank, folder):
    """Ends of each under DDP and under straggle, and where the last rank is late in some micro-batches."""
    as_launched(rank)
    from lightning.pytorch.strategies import DDPStrategy

    from straggle.integrations.lightning import StagedStrategy

    kinds = [
        (DDPStrategy, {}, {}),
        (StagedStrategy, {}, {}),
        (StagedStrategy, {"deadline": 100.0}, {"stop_at": (2, 4)}),
    ]
    ends = {"resumed": [resumed(folder, kind, own if rank else {}, **words) for kind, words, own in kinds]}
    for name in situations():
        ends[name] = []
        for kind, words, own in kinds:
            module_words, given = situations()[name]
            module = module_kind()(**module_words, **(own if rank else {}))
            trainer = fitted(folder, kind(**words), module, **{"max_epochs": 3, **given})
            ends[name].append((digest(module.parameters()), trainer.global_step))
    return ends


def test_what_ddp_does_with_an_accumulation_that_is_left_in_the_middle(tmp_path, run_loaded):
    first, second = run_loaded(in_the_middle, NUM_RANKS, str(tmp_path), timeout_s=240)
    assert first == second
    ddp, staged, _ = first.pop("resumed")
    assert staged[:2] == ddp[:2]
    assert staged[2] == [2]
    for name, (ddp, staged, late) in first.items():
        assert staged == ddp, name
        assert late[0] != ddp[0], name
        assert late[1] == ddp[1], name
    numbers = [ends[0][1] for ends in first.values()]
    assert numbers[:-1] == [10, 3, 6, 3, 4, 4, 6, 7]  # after its finder, Lightning's versions count in other ways


def refused(rank, folder):
    as_launched(rank)
    from straggle.integrations.lightning import StagedStrategy

    class ByItself(module_kind()):
        def training_step(self, dataloader_iter):
            """It fetches its batch."""

    class OfAllBatches(module_kind()):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    said = []
    for kind, words in (
        (ByItself, {}),
        (OfAllBatches, {}),
        (module_kind(), {"find_unused_parameters": True}),
        (module_kind(), {"ddp_comm_hook": digest}),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            fitted(folder, StagedStrategy(**words), kind())
        said.append(str(caught.value))
    return said


def test_what_is_refused_is_told_what_to_do(tmp_path, run_loaded):
    fetches, closure, unused, hook = run_loaded(refused, NUM_RANKS, str(tmp_path), timeout_s=120)[0]
    assert "write training_step(self, batch, batch_idx)" in fetches
    assert "use another optimizer" in closure
    assert "leave it out" in unused
    assert "merge=" in hook


def one_that_fails(rank, folder):
    """In a callback, between two micro-batches of a step."""
    as_launched(rank)
    from lightning.pytorch.callbacks import LambdaCallback

    from straggle.integrations.lightning import StagedStrategy

    def fail(trainer, *_):
        if rank == 1 and trainer.fit_loop.total_batch_idx == 1:
            raise ArithmeticError("a bad callback")

    fitted(folder, StagedStrategy(), module_kind()(), callbacks=[LambdaCallback(on_train_batch_end=fail)])


def test_an_error_between_two_micro_batches_is_told_to_the_other_ranks(tmp_path, run_loaded):
    first, second = run_loaded(one_that_fails, NUM_RANKS, str(tmp_path), timeout_s=60, outcomes=True)
    assert first.kind == "PeerFailed"
    assert "a bad callback" in first.message
    assert second.kind == "ArithmeticError"


def fine_tuned(rank, folder):
    """The backbone is frozen in the first epoch, and has a tenth of the head's learning rate in the others."""
    as_launched(rank)
    import lightning.pytorch as pl

    from straggle.integrations.lightning import StagedStrategy

    class TwoParts(module_kind()):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = self.layers[:2], self.layers[2]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.head.parameters(), lr=0.01)

    module = TwoParts()
    before = digest(module.backbone.parameters())
    unfreezing = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    fitted(folder, StagedStrategy(deadline=100.0), module, max_epochs=3, accumulate=1, callbacks=[unfreezing])
    return digest(module.parameters()), module.seen, before != digest(module.backbone.parameters())


def test_backbone_that_a_callback_unfreezes_is_trained_alike_on_all_ranks(tmp_path, run_loaded):
    first, second = run_loaded(fine_tuned, NUM_RANKS, str(tmp_path), timeout_s=240)
    assert first == second
    assert first[2]


def epochs_kind():
    import lightning.pytorch as pl
    from torchmetrics import MaxMetric

    warnings.simplefilter("ignore")

    class Epochs(pl.LightningModule):
        """Logs ``10 * batch + rank`` over each epoch; in the batches ``lost`` it is late before it comes to that."""

        def __init__(self, lost, first):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.highest = nn.Linear(6, 3), MaxMetric()
            self.lost, self.first, self.seen = lost, first, []

        def training_step(self, batch, number):
            value = 10.0 * number + self.global_rank
            if self.first:  # so that not all ranks come to their numbers in one order
                self.log("max", value, sync_dist=True, on_epoch=True, on_step=False, reduce_fx="max")
            if (self.current_epoch, number) in self.lost:
                self.trainer.model.open_step.stop()
            loss = self.layers(batch[0]).square().mean()
            self.log("mean", value, sync_dist=True, on_epoch=True, on_step=False)
            self.log("max", value, sync_dist=True, on_epoch=True, on_step=False, reduce_fx="max")
            self.log("sum", value, sync_dist=True, on_epoch=True, on_step=False, reduce_fx="sum")
            self.highest.update(value)
            self.log("highest", self.highest, on_epoch=True, on_step=False)
            return loss

        def on_train_epoch_end(self):
            names = ("mean", "max", "sum", "highest")
            self.seen.append([float(self.trainer.callback_metrics[name]) for name in names])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Epochs


def log_epochs(rank, folder, lost, first):
    as_launched(rank)
    from lightning.pytorch.callbacks import EarlyStopping

    from straggle.integrations.lightning import StagedStrategy

    module = epochs_kind()(lost[rank], first == rank)
    stops = EarlyStopping("mean", patience=10)
    fitted(
        folder,
        StagedStrategy(deadline=100.0),
        module,
        accumulate=1,
        max_epochs=3,
        limit_val_batches=0,
        callbacks=[stops],
    )
    return module.seen


BATCHES = 6
WHOLE = [(epoch, number) for epoch in range(3) for number in range(BATCHES)]
LOST = {
    "none": ([], []),
    "an epoch in the middle": ([], [one for one in WHOLE if one[0] == 1]),
    "the first epoch, of rank 0": ([one for one in WHOLE if one[0] == 0], []),
    "each epoch's first batch": ([], [one for one in WHOLE if one[1] == 0]),
    "all": ([], WHOLE),
    "other epochs on each": ([one for one in WHOLE if one[0] == 0], [one for one in WHOLE if one[0] == 2]),
}


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("name", LOST)
def test_numbers_of_an_epoch_are_over_the_ranks_that_came_to_them_also_if_one_came_to_none(
    name, first, tmp_path, run_loaded
):
    """Else its peers wait for it in their collectives until the group's time limit."""
    lost = LOST[name]
    ranks = run_loaded(log_epochs, NUM_RANKS, str(tmp_path), lost, first, timeout_s=120)
    assert ranks[0] == ranks[1]
    for epoch in range(3):
        given = {rank: [n for n in range(BATCHES) if (epoch, n) not in lost[rank]] for rank in range(NUM_RANKS)}
        values = [10.0 * number + rank for rank, numbers in given.items() for number in numbers]
        mean, largest, total, highest = ranks[0][epoch]
        assert mean == pytest.approx(sum(values) / len(values))
        assert total == pytest.approx(sum(values))
        assert highest == max(values)
        if first is None:
            assert largest == max(values)


def numbers_kind():
    import lightning.pytorch as pl
    from torchmetrics import Metric

    warnings.simplefilter("ignore")

    class Pairs(Metric):
        """The sum of all pairs that it has in a list, and how many they are."""

        def __init__(self):
            super().__init__()
            self.add_state("pairs", [], dist_reduce_fx="cat")

        def update(self, pairs):
            self.pairs.append(pairs)

        def compute(self):
            pairs = torch.cat(self.pairs) if isinstance(self.pairs, list) else self.pairs
            return (pairs.sum() + 1000 * len(pairs)).float()

    class Numbers(pl.LightningModule):
        """Logs ``10 * batch + rank`` in one way; the last rank is late in the epochs ``lost`` before it comes to it."""

        def __init__(self, way, lost):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.pairs = nn.Linear(6, 3), Pairs()
            self.way, self.lost, self.seen, self.num_told = way, lost, [], 0

        def training_step(self, batch, number):
            if self.current_epoch in self.lost and self.global_rank:
                self.trainer.model.open_step.stop()
            loss = self.layers(batch[0]).square().mean()
            self.log_one(10.0 * number + self.global_rank, number)
            return loss

        def log_one(self, value, number):
            words = {"on_epoch": True, "on_step": False, "sync_dist": True}
            if self.way == "double":
                self.log("number", torch.tensor(value, dtype=torch.float64), **words)
            elif self.way == "odd":
                self.log("number", value, batch_size=5, **words)
            elif self.way == "one" and number == 0:
                self.log("number", value + 7, batch_size=1, **words)
            elif self.way == "pairs":
                self.pairs.update(torch.full((number + 1, 2), int(value)))
                self.log("number", self.pairs, on_epoch=True, on_step=False)
            elif self.way == "of rank 0":
                self.log("both", value, **words)
                if self.global_rank == 0:
                    self.log("number", value, rank_zero_only=True, **words)
            elif self.way == "usual":
                self.log("number", value, **words)

        def on_train_batch_end(self, _outputs, _batch, number):
            if self.way == "fails" and self.global_rank and number == 2:
                raise ArithmeticError("after the last step")

        def on_train_epoch_end(self):
            found = self.trainer.callback_metrics
            self.seen.append(float(found["number"]) if "number" in found else None)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    return Numbers


def log_numbers(rank, folder, runs):
    """For each way and its words: what was seen in each epoch, and how often ranks told each other their numbers."""
    as_launched(rank)
    import torch.distributed as dist

    from straggle.integrations.lightning import StagedStrategy
    from straggle.merge.wire.channel import Channel

    told, found = [], []
    ours, torchs = Channel.gather, dist.all_gather_object
    Channel.gather = lambda self, value, of: told.append(of) or ours(self, value, of)
    dist.all_gather_object = lambda *words, **others: told.append("objects") or torchs(*words, **others)
    for way, lost, words in runs:
        module, num_before = numbers_kind()(way, lost), told.count("numbers of an epoch") + told.count("objects")
        fitted(
            folder,
            StagedStrategy(deadline=100.0),
            module,
            accumulate=1,
            limit_val_batches=0,
            limit_train_batches=3,
            **words,
        )
        found.append((module.seen, told.count("numbers of an epoch") + told.count("objects") - num_before))
    return found


def seen_by(run_loaded, folder, runs):
    return run_loaded(log_numbers, NUM_RANKS, str(folder), runs, timeout_s=60)


NOBODY, FIRST, SECOND = (), (0,), (1,)


def test_numbers_of_doubles_are_reduced_also_with_a_rank_that_came_to_none(tmp_path, run_loaded):
    double = {"precision": "64-true"}
    runs = [("double", FIRST, {}), ("double", SECOND, {}), ("usual", FIRST, double), ("usual", SECOND, double)]
    for found in seen_by(run_loaded, tmp_path, runs):
        assert [seen for seen, _ in found] == [[10.0, 10.5], [10.5, 10.0]] * 2


def test_number_of_rank_0_alone_is_on_no_other_rank_whoever_is_late(tmp_path, run_loaded):
    runs = [("of rank 0", lost, {}) for lost in (NOBODY, FIRST)]
    first, second = seen_by(run_loaded, tmp_path, runs)
    assert [seen for seen, _ in first] == [[10.0, 10.0]] * 2
    assert [seen for seen, _ in second] == [[None, None]] * 2


def test_ranks_tell_each_other_their_numbers_only_after_an_epoch_in_which_one_was_late(tmp_path, run_loaded):
    runs = [("usual", lost, {}) for lost in (NOBODY, FIRST, SECOND, (0, 1))]
    for found in seen_by(run_loaded, tmp_path, runs):
        assert [number for _, number in found] == [0, 1, 1, 2]


def test_mean_of_an_epoch_is_right_if_ranks_have_unequal_numbers_of_samples(tmp_path, run_loaded):
    """An odd total of two ranks: 15 and 0, 1 and 0."""
    for found in seen_by(run_loaded, tmp_path, [("odd", FIRST, {}), ("one", FIRST, {})]):
        assert [seen for seen, _ in found] == [[10.0, 10.5], [7.0, 7.5]]


def test_metric_with_a_list_is_over_the_ranks_that_came_to_it(tmp_path, run_loaded):
    of_first = 2 * (1 * 0 + 2 * 10 + 3 * 20) + 6000
    of_both = 2 * of_first + 2 * 6
    for found in seen_by(run_loaded, tmp_path, [("pairs", FIRST, {}), ("pairs", SECOND, {})]):
        assert [seen for seen, _ in found] == [[of_first, of_both], [of_both, of_first]]


def test_rank_that_ends_before_the_numbers_of_an_epoch_is_an_error_with_the_step(tmp_path, run_loaded):
    runs = [("fails", FIRST, {})]
    first, second = run_loaded(log_numbers, NUM_RANKS, str(tmp_path), runs, timeout_s=60, outcomes=True)
    assert second.kind == "ArithmeticError"
    assert first.kind == "PeerFailed"
    assert "before step 3, the comparison of the ranks' numbers of an epoch" in first.message
