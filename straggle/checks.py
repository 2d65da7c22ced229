"""What a module must be for its gradients to be merged in stages; every refusal says what to do instead.

And whether replicas are still the same while they are trained.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parameter import UninitializedParameter

from straggle.channel import Channel
from straggle.stages import trainable


def check_module(module: nn.Module) -> None:
    """Raise ``ValueError`` for a module that cannot be trained in stages."""
    kind = type(module).__name__
    parameters = trainable(module)
    if not parameters:
        raise ValueError(f"{kind} has no parameter with requires_grad=True: there is nothing to train or merge")
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} is not initialized: run one forward pass of the lazy module first")
        if _is_sharded(parameter):
            raise ValueError(f"parameter {name} is sharded (DTensor): wrap the module before it is sharded")
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a SyncBatchNorm: its collectives in the forward pass would hang when a late rank stops; "
                "use BatchNorm or GroupNorm"
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(f"{name} has sparse gradients, which have no place in flat buffers: set sparse=False")


def _is_sharded(parameter: Tensor) -> bool:
    """Whether this is a DTensor, whose module takes most of a second to import: without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def check_same_on_all_ranks(module: nn.Module, channel: Channel) -> None:
    """Raise ``ValueError``, on every rank, naming the first parameter that is not the same everywhere."""
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    everyone = channel.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for position in range(max(len(everyone[0]), len(theirs))):
            ours = everyone[0][position] if position < len(everyone[0]) else "nothing"
            other = theirs[position] if position < len(theirs) else "nothing"
            if ours != other:
                raise ValueError(f"the model differs between ranks: rank 0 has {ours} where rank {rank} has {other}")


def fingerprint(parameters: Iterable[Tensor]) -> int:
    """48 bits that are equal where all parameters are equal bit for bit, and hardly ever where they are not.

    It hashes the sum of each parameter's bits, read as 64-bit integers: exact, and one fast pass on any device. The
    order of these integers within one parameter makes no difference to it.
    """
    sums = [_words(parameter.detach()).sum() for parameter in parameters]
    content = repr(torch.stack(sums).tolist()).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


def _words(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as int64, filled up with zeros; copied only where they do not lie so."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = pad(flat, (0, -flat.numel() % 8)).clone()
    return flat.view(torch.int64)
