"""Training without ranks that are slow: the others have their samples, and the slow ones look on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from straggle.lab.build import build_faults
from straggle.lab.faults import Fault
from straggle.lab.jobs import TorchJob
from straggle.lab.workloads.workload import Workload


@final
class WithoutJob(TorchJob):
    """DDP on the other ranks, which divide each step's samples among them; ``ranks``: those that are left out.

    Without ``ranks`` these are the ranks that some fault strikes, and not every rank. They get the others' parameters
    when the job is evaluated. Raises ``ValueError`` if none is left out, or none is left.
    """

    def __init__(
        self, config: DictConfig, workload: Workload, device: Any, *, ranks: Sequence[int] | None = None
    ) -> None:
        world_size = dist.get_world_size()
        out = set(struck(build_faults(config), world_size) if ranks is None else ranks)
        self._others = [rank for rank in range(world_size) if rank not in out]
        if not out or not self._others:
            raise ValueError(
                f"methods.without.job.ranks={sorted(out)} of {world_size} ranks: name those that are slow, and not "
                "all; where no fault strikes some ranks alone, leave `without` out of methods"
            )
        self._group = dist.new_group(self._others)
        super().__init__(config, workload, device)

    def _wrap(self, config: DictConfig) -> Any:  # noqa: ARG002
        return DistributedDataParallel(self.module, process_group=self._group) if self._trains else self.module

    @property
    def _trains(self) -> bool:
        return dist.get_rank() in self._others

    def _samples(self, number: int) -> list[Tensor]:
        """This rank's part of each micro-batch of all ranks."""
        total = dist.get_world_size() * self._shard.batch_size
        position, among = self._others.index(dist.get_rank()), len(self._others)
        first, end = (total * part // among for part in (position, position + 1))
        steps = (number * self.num_microbatches + part for part in range(self.num_microbatches))
        return [self._shard.part(step, total=total, first=first, count=end - first) for step in steps]

    def step(self, number: int) -> None:
        """Train step ``number``, unless this rank is left out."""
        if self._trains:
            super().step(number)

    def evaluate(self) -> dict[str, float]:
        self._hand_on(self.module)
        return super().evaluate()

    def _hand_on(self, module: nn.Module) -> None:
        """All ranks have what the others have trained; collective."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), self._others[0])


def struck(faults: Mapping[str, Fault], world_size: int) -> list[int]:
    """The ranks that some fault strikes which does not strike all."""
    of_each = ([rank for rank in range(world_size) if fault.affects(rank)] for fault in faults.values())
    return sorted({rank for ranks in of_each if len(ranks) < world_size for rank in ranks})
