"""Checks that a module's gradients can be merged in stages; every refusal names the remedy."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from inspect import unwrap
from itertools import chain
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from straggle.backward.hooks import observers_of
from straggle.backward.stages import trainable

# DistributedDataParallel's name for it, and its replacement
INSTEAD = {
    "device_ids": "leave it out; move the module to its device before wrapping it",
    "output_device": "leave it out; outputs stay on the module's device",
    "dim": "leave it out; every rank has a process, and batches of its own",
    "broadcast_buffers": 'merge=straggle.Merge(buffers="mean"), "rank0" or "local"',
    "forward_sync_buffers": 'merge=straggle.Merge(buffers="mean"), "rank0" or "local"',
    "init_sync": "leave it out; parameters and buffers are overwritten with rank 0's",
    "bucket_cap_mb": "stages=<a number of stages>; small ones share a message of about 1 MB",
    "bucket_cap_mb_list": "stages=<a number of stages>; small ones share a message of about 1 MB",
    "find_unused_parameters": "leave it out; a parameter that the graph does not use is found without it",
    "check_reduction": "leave it out; it does nothing in DDP either",
    "gradient_as_bucket_view": "leave it out; they lie in the merged buffers, and what the loop keeps stays as it is",
    "batched_grad_copy": "leave it out; each gradient is copied as soon as it is finished",
    "static_graph": "leave it out; any graph will do, and it may change from step to step",
    "delay_all_reduce_named_params": "leave it out; which gradients are merged together is planned in stages=",
    "param_to_hook_all_reduce": "leave it out; which gradients are merged together is planned in stages=",
    "mixed_precision": "torch.autocast in the block, or convert the module before wrapping it",
    "device_mesh": "mesh=<the mesh of the replicas> for a sharded model, or process_group=mesh.get_group()",
    "skip_all_reduce_unused_params": "leave it out; all parameters travel with their stage",
    "no_sync": "`with model.step(num_microbatches=n):` around the n backward passes",
    "require_backward_grad_sync": "`with model.step(num_microbatches=n):` around the n backward passes",
    "register_comm_hook": "an Estimator or a Merge; how contributions are merged cannot be replaced",
    "register_builtin_comm_hook": "an Estimator or a Merge; how contributions are merged cannot be replaced",
}
_MOST_CALLS = 3  # that are shown
_LEAST_BYTES = 2  # the smallest element of a gradient that collectives can sum: they cannot for float8
_CLIPPING = {unwrap(clip).__code__ for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_)}
CLIP_AFTER_THE_BLOCK = (
    "gradients are clipped inside of `with model.step()`, where every p.grad is None until the merge, so nothing is "
    "clipped: clip after the block, before optimizer.step()"
)

CLIP_BEFORE_THE_STEP = (
    "gradients are clipped, and the optimizer has used them already: clipping must see all gradients before it, so "
    "leave optimizer= out of step(), and call optimizer.step() after clipping (for the norm alone there is "
    "torch.nn.utils.get_total_norm)"
)
STEPPED_ALREADY = (
    "optimizer.step() after `with model.step(optimizer=optimizer)`, which has made this step: leave out one of them"
)


def clips(frame: FrameType | None) -> bool:
    """Whether this is the frame of a torch function that clips gradients, or of a comprehension in it."""
    return frame is not None and (
        frame.f_code in _CLIPPING or (frame.f_code.co_name == "<listcomp>" and clips(frame.f_back))
    )


def refuse_ddp_kwargs(given: Iterable[str]) -> None:
    """Raise ``TypeError`` for unknown constructor arguments, with the replacement for those of DDP."""
    words = [f"{name} ({INSTEAD[name]})" if name in INSTEAD else name for name in given]
    if words:
        raise TypeError(f"StagedDataParallel() has no argument {', '.join(words)}")


def check_unwrapped(module: nn.Module, wrapper: type[nn.Module], observer: type) -> None:
    """Raise ``ValueError`` for a module that is or contains a data-parallel one, or is in an open ``wrapper``.

    Parameters in an open wrapper have an ``observer`` in their hooks.
    """
    for name, child in module.named_modules():
        if isinstance(child, (wrapper, nn.parallel.DistributedDataParallel, nn.DataParallel)):
            where = f"{name} is" if name else "this is already"
            closed = ", after close()" if isinstance(child, wrapper) else ""
            raise ValueError(
                f"{where} a {type(child).__name__}: wrap the entire plain module, once (its .module{closed})"
            )
    for name, parameter in module.named_parameters():
        if any(isinstance(found, observer) for found in observers_of(parameter)):
            raise ValueError(
                f"parameter {name} belongs to a {wrapper.__name__} that is not closed: use that, or close() it first"
            )


def check_module(module: nn.Module, *, sharded: bool = False) -> None:
    """Raise ``ValueError`` for a module that cannot be trained in stages; ``sharded``: over the ranks of a replica."""
    kind = type(module).__name__
    parameters = trainable(module)
    if not parameters:
        raise ValueError(f"{kind} has no parameter with requires_grad=True: there is nothing to train or merge")
    for name, parameter in parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name} is not initialized: run one forward pass of the lazy module first")
        if is_sharded(parameter) and not sharded:
            raise ValueError(
                f"parameter {name} is sharded (DTensor), and it is not known which ranks have the same shards: write "
                'StagedDataParallel(model, mesh=mesh["dp_replicate"]), the mesh over which replicas are copies'
            )
        if parameter.itemsize < _LEAST_BYTES:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, in which gradients cannot be summed: train it in bfloat16 or "
                "wider, or set requires_grad=False"
            )
    _check_dense(module)
    for name, child in module.named_modules():
        if type(child).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"{name or kind} is a FullyShardedDataParallel (FSDP1), whose passes cannot be left between two units: "
                'shard the model by fully_shard(), and write StagedDataParallel(model, mesh=mesh["dp_replicate"])'
            )
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a SyncBatchNorm: its collectives in the forward pass would hang when a late rank stops; "
                "use BatchNorm or GroupNorm"
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(f"{name} has sparse gradients, which have no place in flat buffers: set sparse=False")


def _check_dense(module: nn.Module) -> None:
    """Raise ``ValueError`` for a parameter or buffer that is no dense tensor: rank 0's cannot be copied into it."""
    parameters = ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    for name, tensor in chain(parameters, ((f"buffer {name}", buffer) for name, buffer in module.named_buffers())):
        if tensor.is_quantized or tensor.layout is not torch.strided:
            kind = f"quantized ({tensor.dtype})" if tensor.is_quantized else tensor.layout
            raise ValueError(f"{name} is {kind}: keep it as dense tensors (`dequantize()`, `to_dense()`)")


def is_sharded(parameter: Tensor) -> bool:
    """Whether this is a DTensor; false if its module, which takes most of a second to import, is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a parameter."""
    with torch.no_grad():
        own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return own


def check_num_microbatches(num_microbatches: int) -> None:
    """Raise ``ValueError`` for an invalid number of backward passes."""
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise ValueError(
            f"num_microbatches={num_microbatches!r}: must be an integer number of backward passes, such as 4"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: a step has at least one backward pass")


def check_weight(weight: float) -> None:
    """Raise ``ValueError`` for a weight that is not positive, or infinite."""
    if not 0 < weight < math.inf:
        raise ValueError(f"weight={weight}: must be a positive number, such as the samples of this rank's step")


def check_passes_to_come(number: int, came: int, announced: int) -> None:
    """Raise if an open step, of which ``came`` passes have begun, cannot be set to ``number`` of them."""
    check_num_microbatches(number)
    if number < came:
        raise ValueError(f"num_microbatches={number}: {came} backward passes of this step have come")
    if came >= announced < number:
        raise RuntimeError(
            f"num_microbatches={number}: all {announced} backward passes of this step have come, and are being merged; "
            "set it before the last one"
        )


def too_few_passes(announced: int, came: int) -> str:
    """The warning for a rank that was not stopped and had only some of its backward passes; empty if it had all."""
    if not 0 < came < announced:
        return ""
    return (
        f"{came} of {announced} backward passes came, and nothing stopped the others: gradients count as if all had "
        f"come. Write model.step(num_microbatches={came}) if a step has fewer, such as at the end of an epoch"
    )


def no_gradient_of_passes(number: int) -> str:
    """The warning for a rank whose passes all left ``p.grad`` unchanged."""
    passes = "1 backward pass" if number == 1 else f"{number} backward passes"
    return (
        f"{passes} went through the model and gave no parameter a gradient, so that this rank has nothing to merge and "
        "counts as one that skipped the step. Gradients of torch.autograd.grad are merged if you put them into p.grad "
        "inside of the block; parameters that you update yourself would differ between ranks"
    )


def no_gradient_at_first(number: int) -> str:
    """The warning for a model that was not trained in its first steps."""
    return (
        f"no rank had a gradient in the first {number} steps: nothing is trained. Call loss.backward() inside of `with "
        "model.step()`, with a loss that depends on this model's parameters (not of a copy, not on detached outputs)"
    )


def meets_in_block(calls: Sequence[str]) -> str:
    """The warning for collectives of the loop's own while a step is open; ``calls``: their lines, if they are known."""
    more = [f"and {len(calls) - _MOST_CALLS} more"] if len(calls) > _MOST_CALLS else []
    where = f": {'; '.join([*calls[:_MOST_CALLS], *more])}" if calls else ""
    return (
        f"ranks wait for each other inside of the block{where}. No rank is late before that, so a step takes what the "
        "slowest rank takes to get there. Call it after the block, or seldom; the mean of a number needs no call of "
        "its own: step.log(loss=loss)"
    )


def left_out(ranks: Iterable[int], *, skipped: bool, zeros: bool = False) -> str:
    """The warning for ranks whose gradients were not finite; ``zeros``: a step without others has zeros for them."""
    if not skipped:
        rest = ""
    elif zeros:
        rest = ", no rank had others, and the merged gradients were zeros: only a fused optimizer changes nothing then"
    else:
        rest = ", no rank had others, and the step changes nothing"
    return (
        f"gradients of ranks {list(ranks)} were not finite and are left out of the merge{rest}. They are counted in "
        'RankReport.nonfinite. If a GradScaler is to see them, write merge=straggle.Merge(nonfinite="keep")'
    )
