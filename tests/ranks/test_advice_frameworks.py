"""The advice of errors of the integrations can be followed: with the real frameworks, on ranks over gloo."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec

import pytest
import torch
from advice import case, check, follow, sgd
from launched import as_launched
from loaded import ranks_with
from ranks import digest
from training import features, mlp

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
    """A stream of sentences."""

    def __iter__(self):
        tokens = torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(1))
        return ({"input_ids": row, "labels": row, "number": number} for number, row in enumerate(tokens))


class Collate:
    """Notes which sentences came."""

    def __init__(self):
        self.came = []

    def __call__(self, samples):
        self.came += [sample["number"] for sample in samples]
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def of_a_stream(**changes):
    """A way that trains by `StagedTrainer`; every sentence comes to one rank."""

    def way(rank):
        from straggle.integrations.transformers import StagedTrainer
        from tests.ranks.test_transformers import arguments, tiny_gpt

        given, collate = arguments("/tmp/never", remove_unused_columns=False, **changes), Collate()
        trained = StagedTrainer(tiny_gpt(), given, train_dataset=Tokens(), data_collator=collate)
        before = digest(trained.model.parameters())
        trained.train()
        assert digest(trained.model.parameters()) != before
        by_rank = [None, None]
        torch.distributed.all_gather_object(by_rank, collate.came)
        every = sorted(number for own in by_rank for number in own)
        assert every == sorted(set(every)) == list(range(len(every))), by_rank
        return trained.model

    return way


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
        of_a_stream(),
        of_a_stream(accelerator_config={"dispatch_batches": False}),
    ),
}


def run_cases(rank):
    as_launched(rank)
    return follow(rank, FRAMEWORKS)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_advice_of_integrations_can_be_followed():
    with ranks_with("transformers.trainer") as run_loaded:
        check(*run_loaded(run_cases, 2, timeout_s=240))
