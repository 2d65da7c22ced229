"""What a model holds becomes rank 0's, whatever its dtype and strides; an error of torch's is reported as itself."""

import pytest
import torch
from ranks import run_forked, run_ranks, staged
from torch import nn
from training import features, mlp

from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import is_of_peer

DTYPES = [torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.complex64, torch.bfloat16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def model_of(rank):
    """Buffers of many kinds, and a frozen parameter, with the bits of this rank."""
    module = mlp()
    for number, dtype in enumerate(DTYPES):
        bits = torch.full((6 * dtype.itemsize,), 0 if dtype == torch.bool and rank else rank + 1, dtype=torch.uint8)
        module.register_buffer(f"kind{number}", bits.view(dtype).view(2, 3), persistent=False)
    module.register_buffer("expanded", torch.full((1,), float(rank)).expand(4), persistent=False)
    module.register_buffer("empty", torch.empty(0, 3), persistent=False)
    values = torch.arange(6.0).view(2, 3) + 10 * rank
    transposed = values if rank == 0 else values.t().contiguous().t()  # other strides than on rank 0
    module.register_buffer("transposed", transposed, persistent=False)
    frozen = torch.full((3,), rank + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    module.frozen = nn.Parameter(frozen, requires_grad=False)
    return module


def wrap_kinds(rank):
    module = model_of(rank)
    with staged(module) as model:
        with model.step():
            model(features(rank, 0)).sum().backward()
        expected = model_of(0)
        buffers = dict(expected.named_buffers()) | {"frozen": expected.frozen}
        held = dict(module.named_buffers()) | {"frozen": module.frozen}
        return [name for name, own in buffers.items() if held[name].tolist() != own.tolist()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_model_holds_becomes_rank_0s_in_every_dtype_and_with_any_strides(world_size):
    assert run_ranks(wrap_kinds, world_size) == [[]] * world_size


def wrap_one(rank, kind):
    module = mlp()
    if kind == "float8":
        module.register_parameter("scale", nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn)))
    elif kind == "sparse":
        module.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=False)
    else:
        bound = torch.arange(4.0) if rank == 0 else torch.zeros(1).expand(4)
        module.register_buffer("bound", bound, persistent=False)
    with staged(module) as model, model.step():
        model(features(rank, 0)).sum().backward()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("float8", "parameter scale is torch.float8_e4m3fn, in which gradients cannot be summed: train it in bfloat16"),
        ("sparse", "buffer adjacency is torch.sparse_coo: keep it as dense tensors"),
    ],
)
def test_tensor_that_cannot_be_merged_or_sent_is_refused_by_name_on_all_ranks(kind, words):
    for end in run_ranks(wrap_one, 2, kind, outcomes=True):
        assert end.kind == "ValueError"
        assert words in end.message


def test_tensor_that_cannot_hold_what_rank_0_has_ends_all_ranks_with_its_name():
    first, second, third = run_ranks(wrap_one, 3, "expanded", outcomes=True)
    words = "before step 0, rank 0's buffer bound: elements of this tensor share their memory"
    for rank, end in ((1, second), (2, third)):
        assert end.kind == "RuntimeError"
        assert f"rank {rank}, {words}" in end.message
    assert first.kind == "PeerFailed"
    assert words in first.message


def sum_what_gloo_cannot(rank):
    channel = Channel(None, give_up_s=30.0)
    try:
        if rank == 1:
            work = channel.groups.data.all_reduce(torch.zeros(4).to(torch.float8_e5m2))
            channel.wait(work, 7, "rank 1, step 7, stage head")
        channel.end_pause()
    finally:
        channel.close()


def test_error_of_torch_in_a_merge_is_reported_as_itself_and_to_the_peers():
    """gloo has no sum of float8, and no rank is lost."""
    first, second = run_forked(sum_what_gloo_cannot, 2, outcomes=True)
    assert second.kind == "RuntimeError"
    assert second.message == "rank 1, step 7, stage head: Invalid scalar type"
    assert first.kind == "PeerFailed"
    assert "rank 1, step 7, stage head: Invalid scalar type" in first.message
    assert "connection lost" not in first.message


@pytest.mark.parametrize(
    "words",
    [
        "[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51094",
        "[/torch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv",
        "Application timeout caused pair closure",
    ],
)
def test_words_of_gloo_about_a_peer_are_known(words):
    assert is_of_peer(RuntimeError(words))
    assert not is_of_peer(RuntimeError("Invalid scalar type"))
