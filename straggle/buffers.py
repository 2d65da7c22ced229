"""Flat buffers that hold one step's gradients and their weights, ready for allreduce.

A contribution is scaled by ``1 / world_size`` as it is copied in, as DDP does, so that after the allreduce
``merged = sum(w * g) / sum(w) = buffer * (world_size / sum(w))``, which is the buffer itself when nobody is late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from straggle.stages import StagePlan

_ALIGN = 16  # elements: each gradient starts on a cache line


@dataclass(frozen=True)
class _Flat:
    """The gradients of one stage that share a dtype and a device; ``tail`` holds their weights and presence flags.

    The tail is fp32 or finer. It is the end of the gradients' own buffer where that is, so that both travel in one message.
    """

    parameters: tuple[int, ...]
    tail: Tensor
    messages: tuple[Tensor, ...]


@dataclass(frozen=True)
class Share:
    """What is in the buffer for one parameter: a weight, and whether a gradient or an estimate is there.

    After the merge the sum over ranks. Weight without presence is a parameter that the graph did not use: a zero gradient.
    """

    weight: float
    present: bool


FULL = Share(1.0, True)
UNUSED = Share(1.0, False)
NOTHING = Share(0.0, False)


class StageBuffers:
    """One step's gradients of all stages. Not thread-safe: the coordinator's lock guards it."""

    def __init__(self, plan: StagePlan, parameters: Sequence[nn.Parameter], world_size: int) -> None:
        self._world_size = world_size
        self.views: list[Tensor] = [torch.empty(0)] * len(parameters)
        self._stages = [self._allocate(stage.parameters, parameters) for stage in plan.stages]

    def put(self, index: int, gradient: Tensor, *, add: bool, weight: float = 1.0) -> None:
        """Write ``weight * gradient`` of parameter ``index``, or add it to what is there."""
        scale = weight / self._world_size
        view = self.views[index]
        if add:
            view.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient.detach(), scale, out=view)

    def read(self, index: int) -> Tensor:
        """A copy of this rank's gradient of parameter ``index`` as it was put in."""
        return self.views[index] * self._world_size

    def all_reduce(self, stage: int, share: Mapping[int, Share], group: dist.ProcessGroup) -> list[dist.Work]:
        """Start the merge of a stage with this rank's ``share`` of each of its parameters."""
        works = []
        for flat in self._stages[stage]:
            shares = [share[index] for index in flat.parameters]
            if all(one is FULL for one in shares):
                flat.tail.fill_(1.0)
            else:
                tail = [one.weight for one in shares] + [float(one.present) for one in shares]
                flat.tail.copy_(torch.tensor(tail, dtype=flat.tail.dtype), non_blocking=True)
                for index in flat.parameters:
                    if not share[index].present:
                        self.views[index].zero_()
            works += [dist.all_reduce(message, group=group, async_op=True) for message in flat.messages]
        return works

    def settle(self) -> list[Share]:
        """After all merges: scale each gradient to the weighted mean, in place, and tell what is in it."""
        merged = [NOTHING] * len(self.views)
        for flat in (flat for stage in self._stages for flat in stage):
            weights = flat.tail.tolist()
            count = len(flat.parameters)
            for position, index in enumerate(flat.parameters):
                weight = weights[position]
                merged[index] = Share(weight, weights[count + position] > 0)
                if weight > 0 and weight != self._world_size:
                    self.views[index].mul_(self._world_size / weight)
        return merged

    def _allocate(self, indices: Sequence[int], parameters: Sequence[nn.Parameter]) -> list[_Flat]:
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in indices:
            alike.setdefault((parameters[index].dtype, parameters[index].device), []).append(index)
        flats = []
        for (dtype, device), members in alike.items():
            starts, end = [], 0
            for index in members:
                starts.append(end)
                end += -(-parameters[index].numel() // _ALIGN) * _ALIGN
            precise = dtype in (torch.float32, torch.float64)
            data = torch.zeros(end + (2 * len(members) if precise else 0), dtype=dtype, device=device)
            tail = data[end:] if precise else torch.zeros(2 * len(members), device=device)
            messages = (data,) if precise else (data, tail)
            for index, start in zip(members, starts, strict=True):
                self.views[index] = _view(data, start, parameters[index])
            flats.append(_Flat(tuple(members), tail, messages))
        return flats


def _view(data: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """A gradient's place in the buffer, in the memory format of its parameter."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if parameter.dim() == (4 if layout is torch.channels_last else 5) and parameter.is_contiguous(
            memory_format=layout
        ):
            return data.as_strided(parameter.size(), parameter.stride(), start)
    return data[start : start + parameter.numel()].view(parameter.shape)
