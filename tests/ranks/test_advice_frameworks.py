"""The advice of errors of the integrations can be followed: with the real frameworks, on ranks over gloo."""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec

import pytest
import torch
from advice import case, check, follow, sgd
from launched import as_launched
from loaded import ranks_with
from ranks import digest
from training import features, mlp

import straggle

pytestmark = [
    pytest.mark.slow,  # frameworks take their seconds to load
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]


def two_models(rank):
    """As of a GAN, prepared by `StagedAccelerator`, with two micro-batches in a step."""
    from straggle.integrations.accelerate import StagedAccelerator

    accelerator = StagedAccelerator(cpu=True, gradient_accumulation_steps=2)
    models = [accelerator.prepare(mlp(seed=seed)) for seed in (0, 1)]
    return accelerator, models, [accelerator.prepare(sgd(model)) for model in models]


def accumulate_both(rank):
    accelerator, models, _ = two_models(rank)
    try:
        with accelerator.accumulate(*models):
            pass
    finally:
        for model in models:
            model.close()


def a_step_for_each(rank):
    accelerator, models, optimizers = two_models(rank)
    before = digest(models[0].parameters())
    for number in range(3):
        with models[0].step(num_microbatches=2), models[1].step(num_microbatches=2):
            for part in features(rank, number).chunk(2):
                accelerator.backward(models[1](models[0](part).repeat(1, 2)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        model.close()
    assert digest(models[0].parameters()) != before
    return torch.nn.ModuleList(model.module for model in models)


class Tokens(torch.utils.data.IterableDataset):
    """A stream of sentences; which of them a rank was given is noted."""

    def __iter__(self):
        tokens = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(1))
        return ({"input_ids": row, "labels": row, "number": number} for number, row in enumerate(tokens))


class Collate:
    """Counts the tokens, and notes which sentences came."""

    def __init__(self):
        self.num_tokens, self.came = 0, []

    def __call__(self, samples):
        self.num_tokens += sum(len(sample["input_ids"]) for sample in samples)
        self.came += [sample["number"] for sample in samples]
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def trainer(data, own=None, **changes):
    """A way that trains by `StagedTrainer`; every sentence comes to one rank."""

    def way(rank):
        from straggle.integrations.transformers import StagedTrainer
        from tests.ranks.test_transformers import arguments, tiny_gpt

        given = arguments("/tmp/never", remove_unused_columns=False, **changes)
        collate = Collate()
        trained = StagedTrainer(tiny_gpt(), given, train_dataset=data(rank), data_collator=collate, **(own or {}))
        before = digest(trained.model.parameters())
        trained.train()
        assert digest(trained.model.parameters()) != before
        assert collate.num_tokens == 12 * len(collate.came)
        by_rank = [None, None]
        torch.distributed.all_gather_object(by_rank, collate.came)
        every = sorted(number for own in by_rank for number in own)
        assert every == sorted(set(every)) == list(range(len(every))), by_rank
        return trained.model

    return way


def sentences(rank):
    return [{"input_ids": row, "labels": row, "number": number} for number, row in enumerate(row_of_tokens())]


def row_of_tokens():
    return torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(1))


def stream(rank):
    return Tokens()


def joined(*, even=None, by_model=False):
    """A way that trains by `StagedAccelerator` in its ``join_uneven_inputs``, or by ``model.join``."""

    def way(rank):
        from straggle.integrations.accelerate import StagedAccelerator

        accelerator = StagedAccelerator(cpu=True)
        model = accelerator.prepare(mlp())
        optimizer, before = accelerator.prepare(sgd(model)), digest(model.module.parameters())
        batches = [features(rank, number) for number in range(3 + (rank if by_model else 0))]
        joining = contextlib.nullcontext() if by_model else accelerator.join_uneven_inputs([model], even)
        try:
            with joining:
                for x in model.join(batches) if by_model else batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            model.close()
        assert digest(model.module.parameters()) != before
        return model.module

    return way


def lightning(changes=None):
    """A way that trains by Lightning a module with these attributes."""

    def way(rank):
        from straggle.integrations.lightning import StagedStrategy
        from tests.ranks.test_lightning import fitted, module_kind

        module = type("Own", (module_kind(),), changes or {})()
        before = digest(module.parameters())
        with tempfile.TemporaryDirectory() as folder:
            fitted(folder, StagedStrategy(), module)
        assert digest(module.parameters()) != before
        return module

    return way


def fetching(self, dataloader_iter):
    """A training step that takes its batch itself."""


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters())


PLAIN = trainer(stream, accelerator_config={"dispatch_batches": False})
FRAMEWORKS = {
    "two models": case(
        "accumulate() of several models: write `with model.step(num_microbatches=...)` for each",
        accumulate_both,
        a_step_for_each,
    ),
    "uneven": case(
        "leave even_batches=True, or give the loop `for x, y in model.join(loader)` of a loader that is not prepared",
        joined(even=False),
        joined(),
        joined(by_model=True),
    ),
    "dispatched": case(
        'set accelerator_config={"dispatch_batches": False}; each rank then reads all of the stream, as it is',
        trainer(stream),
        PLAIN,
    ),
    "tokens": case(
        "would wait for a stuck one: leave it out, and count tokens in your data_collator",
        trainer(stream, include_num_input_tokens_seen="all"),
        PLAIN,
    ),
    "batch size": case(
        "set per_device_train_batch_size",
        trainer(stream, auto_find_batch_size=True),
        trainer(stream, accelerator_config={"dispatch_batches": False}, per_device_train_batch_size=1),
    ),
    "members": case(
        "members=Elastic() is for a loop of your own", trainer(stream, {"members": straggle.Elastic()}), PLAIN
    ),
}
LIGHTNING = {
    "fetching": case(
        "write training_step(self, batch, batch_idx)", lightning({"training_step": fetching}), lightning()
    ),
    "LBFGS": case(
        "would be in different steps: use another optimizer", lightning({"configure_optimizers": lbfgs}), lightning()
    ),
}


def run_cases(rank, cases):
    as_launched(rank)
    return follow(rank, globals()[cases])


@pytest.mark.parametrize(
    ("cases", "package", "loaded"),
    [("FRAMEWORKS", "transformers", "transformers.trainer"), ("LIGHTNING", "lightning", "lightning.pytorch")],
)
def test_advice_of_integrations_can_be_followed(cases, package, loaded):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with ranks_with(loaded) as run_loaded:
        check(*run_loaded(run_cases, 2, cases, timeout_s=240))
