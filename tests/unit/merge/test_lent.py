"""A gradient that the loop still has when the next step begins stays as it is: its memory is not used again."""

import weakref

import pytest
import torch
from torch import nn

from straggle.backward import stages
from straggle.backward.stages import plan_stages
from straggle.merge.round.buffers import StageBuffers
from straggle.source.replicated import slots_of

KEEPS = {
    "the gradient": lambda gradient: gradient,
    "a view of it": lambda gradient: gradient[:2],
    "its detached form": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "a graph that it is in": lambda gradient: (torch.ones_like(gradient, requires_grad=True) * gradient).sum(),
    "an object of numpy or of another library": lambda gradient: torch.from_dlpack(torch.to_dlpack(gradient)),
}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(stages, "BUCKET_BYTES", 1)


def model_of(kind):
    """Three children, each in a bucket of its own; one of them has the telemetry."""
    layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.Linear(5, 3)])
    if kind == "channels last":
        layers.to(memory_format=torch.channels_last)
    elif kind == "float16":
        layers.half()
    elif kind == "mixed":
        layers[2].weight.data = layers[2].weight.data.double()
    return layers


def buffers_of(kind, **options):
    module = model_of(kind)
    return StageBuffers(plan_stages(module), slots_of(module.named_parameters()), 2, **options)


def places(buffers):
    return [view.data_ptr() for view in buffers.views]


def shares_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", ["plain", "channels last", "float16", "mixed"])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("index", [0, 2, 5])
def test_bucket_of_which_the_loop_has_something_gets_other_memory(index, keep, kind):
    buffers = buffers_of(kind)
    before, kept = places(buffers), keep(buffers.views[index])
    buffers.begin()
    buffers.renew_held()
    of_bucket = [number // 2 == index // 2 for number in range(6)]
    assert [new != old for new, old in zip(places(buffers), before, strict=True)] == of_bucket
    del kept


@pytest.mark.parametrize("kind", ["plain", "channels last", "float16", "mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"wire_dtype": torch.bfloat16, "drop_nonfinite": True}], ids=["as is", "rounded"]
)
def test_without_anything_kept_all_memory_is_used_again(options, kind):
    buffers = buffers_of(kind, **options)
    before = places(buffers)
    for _ in range(3):
        buffers.begin()
        buffers.use_telemetry(torch.zeros_like(buffers.telemetry))  # as where members change
        torch._foreach_add_(buffers.views, 1.0)
        buffers.renew_held()
        assert places(buffers) == before


def test_gradient_whose_data_were_replaced_is_not_handed_out_again():
    buffers = buffers_of("plain")
    before = places(buffers)
    buffers.views[0].data = torch.zeros(4, 3, 3, 3)
    buffers.renew_held()
    assert buffers.views[0].data_ptr() != before[0]
    buffers.views[0].fill_(7.0)
    flat = torch.empty(0).set_(buffers.views[0].untyped_storage())
    assert (flat == 7.0).sum() >= buffers.views[0].numel()  # what is written there travels


@pytest.mark.parametrize("index", [0, 5])
def test_two_memories_take_turns_where_the_loop_always_has_the_gradient_of_its_last_step(index):
    buffers, seen = buffers_of("plain"), []
    for _ in range(6):
        kept = buffers.views[index]
        seen.append(kept.data_ptr())
        buffers.renew_held()
    assert seen == [*seen[:2]] * 3
    assert seen[0] != seen[1]


def test_memory_that_was_set_aside_is_let_go_when_the_loop_keeps_nothing_any_more():
    buffers = buffers_of("plain")
    kept, beside_it = buffers.views[0], weakref.ref(buffers.views[1])
    buffers.renew_held()
    assert beside_it() is not None
    buffers.renew_held()
    assert beside_it() is None
    del kept


def test_telemetry_is_written_where_it_travels_after_its_bucket_got_other_memory():
    buffers = buffers_of("plain")
    last = next(i for i in range(6) if shares_memory(buffers.views[i], buffers.rows))
    kept = buffers.views[last]
    buffers.renew_held()
    buffers.begin()
    assert shares_memory(buffers.views[last], buffers.rows)
    assert not shares_memory(kept, buffers.rows)


def test_gradients_are_no_views_for_autograd():
    for gradient in buffers_of("channels last").views:
        gradient.detach_()
        assert not gradient._is_view()
