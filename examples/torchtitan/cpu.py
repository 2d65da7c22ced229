"""torchtitan on CPUs, for which it has no mode (its issue 1661): import this before any other part of it."""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils


def _nothing(*_, **__):
    pass


# what it asks of torch.cuda, and torch.cpu has not
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=_nothing,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: SimpleNamespace(total_memory=1),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
    synchronize=_nothing,
)

from torchtitan.distributed import fsdp  # noqa: E402 - each part takes the two names when it is loaded
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # torch before 2.14
    dist_utils.set_pg_timeouts = _nothing
_no_division = fsdp.disable_fsdp_gradient_division


def _sums_alone(model):
    _no_division(model)
    for unit in model.modules():
        if isinstance(unit, fsdp.FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo can neither divide nor multiply


fsdp.disable_fsdp_gradient_division = _sums_alone


def on_cpu(config):
    """A config of one of torchtitan's models, changed so that it trains on CPUs."""
    for _, _, owner, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())  # causal, over the ends of documents
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" needs a newer torch than 2.13
    return config
