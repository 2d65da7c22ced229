"""A model that is used otherwise than it was wrapped: refused by name with the remedy, or reported in one warning."""

from contextlib import suppress

import pytest
import torch
from ranks import digest, run_ranks, staged
from training import Chain, Stopper, features, mlp, warned

from straggle.source.replicated import check_kinds

WITHIN_S = 30.0


def train(model, optimizer, rank, number):
    with model.step():
        model(features(rank, number).to(optimizer.param_groups[0]["params"][0].dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


CONVERSIONS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.module.double(),
    "one layer": lambda model: model.module[2].double(),
}


def convert(rank, kind):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with staged(module) as model:
        for number in range(3):
            if number == 2:
                CONVERSIONS[kind](model)
            train(model, optimizer, rank, number)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "half",
            "parameter 0.weight was torch.float32 on cpu when the model was wrapped and is torch.float16 on cpu now",
        ),
        ("bfloat16", "and is torch.bfloat16 on cpu now: convert or move the module before StagedDataParallel(model)"),
        ("double", "and is torch.float64 on cpu now"),
        ("one layer", "parameter 2.weight was torch.float32"),
    ],
)
def test_model_that_is_converted_after_wrapping_is_refused_when_the_next_step_is_entered(kind, words):
    for end in run_ranks(convert, 2, kind, outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "RuntimeError"
        assert words in end.message


def test_parameter_on_another_device_is_refused_by_its_name():
    wrapped = [(torch.float32, torch.device("cpu"))]
    check_kinds([("head", torch.ones(1))], wrapped)
    with pytest.raises(RuntimeError, match=r"parameter head was torch.float32 on cpu .* is torch.float32 on meta now"):
        check_kinds([("head", torch.ones(1, device="meta"))], wrapped)


def convert_in_time(rank):
    """Converted before it is wrapped, closed, converted and wrapped again."""
    module = mlp().double()
    for dtype in (torch.float64, torch.bfloat16):
        module.to(dtype)
        with staged(module) as model:
            train(model, torch.optim.SGD(module.parameters(), lr=0.1), rank, 0)
    return digest(module.parameters())


def test_model_is_converted_before_it_is_wrapped_or_after_it_is_closed():
    first, second = run_ranks(convert_in_time, 2)
    assert first == second


def ask_for(rank, numbers):
    words = []
    with staged(mlp()) as model:
        for number in numbers:
            try:
                model.step(num_microbatches=number)
            except ValueError as error:
                words.append(str(error))
    return words


def test_number_of_microbatches_that_is_none_is_refused():
    (words,) = run_ranks(ask_for, 1, [1.5, "2", True, 0, -1, None, float("nan")])
    assert words == [
        "num_microbatches=1.5: must be an integer number of backward passes, such as 4",
        "num_microbatches='2': must be an integer number of backward passes, such as 4",
        "num_microbatches=True: must be an integer number of backward passes, such as 4",
        "num_microbatches=0: a step has at least one backward pass",
        "num_microbatches=-1: a step has at least one backward pass",
        "num_microbatches=None: must be an integer number of backward passes, such as 4",
        "num_microbatches=nan: must be an integer number of backward passes, such as 4",
    ]


def run_passes(rank, announced, came, stop_after):
    """Two steps with fewer passes than announced, which rank 0 may be stopped in."""
    module = Chain(3)
    stopper = Stopper(module)
    with warned() as warnings, staged(module) as model:
        for _ in range(2):
            with model.step(num_microbatches=announced) as step:
                stopper.arm(step, stop_after if rank == 0 else None)
                for _ in range(came):
                    model(1.0).backward()
        return warnings


def test_rank_with_fewer_passes_than_announced_is_warned_once_with_how_many_came():
    for rank, warnings in enumerate(run_ranks(run_passes, 2, 4, 2, None)):
        (words,) = warnings
        assert words.startswith(f"rank {rank}, step 0: 2 of 4 backward passes came, and nothing stopped the others")
        assert "model.step(num_microbatches=2)" in words


@pytest.mark.parametrize(("came", "stop_after"), [(2, None), (0, None)])
def test_rank_whose_passes_all_came_or_that_had_none_is_not_warned(came, stop_after):
    assert run_ranks(run_passes, 2, 2, came, stop_after) == [[], []]


def test_rank_that_was_stopped_between_its_passes_is_not_warned():
    assert run_ranks(run_passes, 2, 2, 2, 4) == [[], []]


def norm(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def value(model):
    with suppress(RuntimeError):  # torch's own, where no parameter has a gradient
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def penalty(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


def go_through_parameters(rank, use, inside):
    module = mlp()
    with warned() as warnings, staged(module) as model:
        for number in range(2):
            with model.step():
                model(features(rank, number)).sum().backward()
                if inside:
                    use(model)
            if not inside:
                use(model)
        assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
    return warnings


@pytest.mark.parametrize("clip", [norm, value])
def test_clipping_inside_of_the_block_is_told_of_once_with_where_to_clip(clip):
    for rank, warnings in enumerate(run_ranks(go_through_parameters, 2, clip, True)):
        (words,) = warnings
        assert words.startswith(f"rank {rank}, step 0: gradients are clipped inside of `with model.step()`")
        assert words.endswith("clip after the block, before optimizer.step()")


@pytest.mark.parametrize(("use", "inside"), [(norm, False), (value, False), (penalty, True), (penalty, False)])
def test_clipping_after_the_block_and_a_penalty_inside_of_it_are_not_told_of(use, inside):
    assert run_ranks(go_through_parameters, 2, use, inside) == [[], []]
