"""The `WatchCallback` that each Lightning ``Trainer`` has by an entry point, which is installed here for real."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import as_launched
from loaded import ranks_with
from ranks import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import straggle
from straggle.observe.numbers.reader import Watched, files_of

pytestmark = [
    pytest.mark.slow,  # frameworks take their seconds to load
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
NUM_RANKS, BATCHES = 2, 6
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = re.compile(r'^\[project\.entry-points\."([^"]+)"\]\n((?:.+\n)+)', re.MULTILINE)


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("lightning.pytorch") as run:
        yield run


def install(folder):
    """The metadata that pip would write, of today's pyproject.toml; it comes before what is installed here."""
    own = Path(folder, "site", "straggle-0.0.0.dist-info")
    own.mkdir(parents=True, exist_ok=True)
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: straggle\nVersion: 0.0.0\n")
    groups = GROUP.findall(PYPROJECT.read_text())
    (own / "entry_points.txt").write_text("".join(f"[{name}]\n{lines}".replace('"', "") for name, lines in groups))
    sys.path.insert(0, str(own.parent))


def module_kind():
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(6, 3)

        def training_step(self, batch, _number):
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Regression


def fit(folder, strategy="ddp", devices=NUM_RANKS, **words):
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()] if devices > 1 else [],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "max_epochs": 1, **words},
    )
    x = torch.randn(4 * NUM_RANKS * BATCHES, 6, generator=torch.Generator().manual_seed(1))
    module = module_kind()()
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :3]), batch_size=4))
    return trainer, digest(module.parameters())


def watched(folder):
    """The folders, under this one, in which a rank was watched."""
    return sorted({str(file.parent.relative_to(folder)) for file in Path(folder).rglob("rank*.jsonl")})


def in_each_way(rank, folder):
    as_launched(rank)
    import lightning.pytorch as pl

    from straggle.integrations.lightning import StagedStrategy, WatchCallback

    class Watches(pl.Callback):
        def on_train_start(self, trainer, _pl_module):
            self.watch = straggle.watch(trainer.strategy.model, f"{folder}/by_hand/mine")

    _, without = fit(f"{folder}/without", callbacks=[WatchCallback(None)])
    install(folder)
    trainer, parameters = fit(f"{folder}/plain")
    assert [type(callback) for callback in trainer.callbacks].count(WatchCallback) == 1
    assert parameters == without
    fit(f"{folder}/logger", logger=pl.loggers.CSVLogger(f"{folder}/logger"))
    fit(f"{folder}/own", callbacks=[WatchCallback(f"{folder}/own/mine")])
    fit(f"{folder}/off", callbacks=[WatchCallback(None)])
    by_hand = Watches()
    fit(f"{folder}/by_hand", callbacks=[by_hand])
    by_hand.watch.close()
    fit(f"{folder}/dev", fast_dev_run=True)
    fit(f"{folder}/staged", strategy=StagedStrategy())
    fit(f"{folder}/short", callbacks=[WatchCallback(f"{folder}/short", max_steps=3)])


def test_a_trainer_watches_without_a_line_and_only_if_nothing_else_does(tmp_path, run_loaded):
    run_loaded(in_each_way, NUM_RANKS, str(tmp_path), timeout_s=240)
    of = {name: watched(tmp_path / name) for name in ("without", "plain", "own", "off", "by_hand", "dev", "staged")}
    nothing = {"without": [], "off": [], "dev": [], "staged": []}
    assert of == {**nothing, "plain": ["runs/watch/watch"], "own": ["mine/watch"], "by_hand": ["mine/watch"]}
    assert watched(tmp_path / "logger") == ["lightning_logs/version_0/watch"]
    for folder, steps in (("plain/runs/watch", BATCHES), ("logger/lightning_logs/version_0", BATCHES), ("short", 3)):
        files = files_of(tmp_path / folder)
        assert isinstance(files, Watched)
        assert [len(file.read_text().splitlines()) for file in files.files] == [1 + steps] * NUM_RANKS
        assert [len(report.ranks) for report in files.reports()] == [NUM_RANKS] * steps


def alone(_rank, folder):
    install(folder)
    trainer, _ = fit(f"{folder}/alone", "auto", 1)
    return [type(callback).__name__ for callback in trainer.callbacks]


def test_one_process_writes_nothing(tmp_path, run_loaded):
    (callbacks,) = run_loaded(alone, 1, str(tmp_path), timeout_s=240)
    assert callbacks.count("WatchCallback") == 1
    assert watched(tmp_path) == []


def test_a_lightning_that_is_not_known_has_its_trainers_without_it(monkeypatch):
    from straggle.integrations import lightning_unasked

    monkeypatch.setitem(sys.modules, "straggle.integrations.lightning", None)
    assert lightning_unasked.callbacks() == []
