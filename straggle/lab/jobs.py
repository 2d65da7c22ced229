"""One model being trained by one method, on this rank: what `train` runs once and `compare` runs in turns."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from straggle.data.epochs import Epochs
from straggle.data.micro_batches import StepBatches
from straggle.data.rebalance import Rebalance
from straggle.garbage import CollectGarbage
from straggle.lab.build import build_estimator, build_faults, build_members, build_optimizer, stages_of
from straggle.lab.faults import FaultInjector
from straggle.lab.sharding import Sharded, WorkClock, whole
from straggle.lab.workloads.workload import Shard, Workload
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.rows.table import Table
from straggle.merge.wire.groups import job_rank, job_size
from straggle.parallel import StagedDataParallel
from straggle.report import StepReport
from straggle.stop_signal import StopSignal

_log = logging.getLogger(__name__)


class Job(ABC):
    """A model, its optimizer, its share of the data and its faults; the same for every method.

    ``replica``: the mesh of this rank's replica, if replicas come and go.
    """

    def __init__(
        self, config: DictConfig, workload: Workload, device: torch.device, replica: DeviceMesh | None = None
    ) -> None:
        torch.manual_seed(config.seed)
        self.workload = workload
        self.num_microbatches: int = config.num_microbatches
        self.samples_per_step: int = config.num_microbatches * config.batch_size  # of a rank, in a step of weight 1
        self.module = workload.model().to(device)
        self.mesh: DeviceMesh | None = None  # of replicas by shards, or of one replica; if it is several ranks
        if config.get("parallel"):
            sharded: Sharded = instantiate(config.parallel)
            self.mesh = sharded.mesh(device.type) if replica is None else replica
            sharded.shard(self.module, self._shards_over(self.mesh))
        self.optimizer = build_optimizer(config, self.module)
        self._loss_so_far = 0.0  # of the running step's micro-batches, of each its part of the mean
        self._device = device
        rank, world_size = job_rank(), job_size()
        self._shard = Shard(
            workload.num_samples, rank=rank, world_size=world_size, batch_size=config.batch_size, seed=config.seed
        )
        faults = build_faults(config)
        if idle := [name for name, fault in faults.items() if not any(map(fault.affects, range(world_size)))]:
            _log.log(logging.WARNING if rank == 0 else logging.DEBUG, "no rank of %d has faults %s", world_size, idle)
        clock: Any = WorkClock()
        clocks = {} if self.mesh is None else {"clock": clock, "sleep": clock.sleep}
        self._faults = FaultInjector(self.module, faults, rank=rank, seed=config.seed, **clocks)
        self.model = self._wrap(config)

    @abstractmethod
    def _wrap(self, config: DictConfig) -> nn.Module:
        """The module, made data-parallel by the method."""

    def _shards_over(self, mesh: DeviceMesh) -> DeviceMesh:
        """What FSDP2 is given of the mesh: the ranks of one replica, as the method merges the replicas."""
        return mesh["dp_shard"]

    @abstractmethod
    def _passes(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Forward and backward over the step's micro-batches."""

    def _samples(self, number: int) -> list[Tensor]:
        """Sample numbers of each micro-batch that this rank has in step ``number``."""
        first = number * self.num_microbatches
        return [self._shard.indices(first + position) for position in range(self.num_microbatches)]

    def _batches(self, number: int) -> Sequence[tuple[Tensor, Tensor]]:
        """The micro-batches of step ``number``."""
        return [self._load(samples) for samples in self._samples(number)]

    def step(self, number: int) -> None:
        """Train step ``number``."""
        self._faults.step(number)
        batches = self._batches(number)
        self._loss_so_far = 0.0
        self._passes(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def ranks_per_replica(self) -> int:
        """How many ranks have one copy of the model together."""
        return 1 if self.mesh is None else self.mesh["dp_shard"].size()

    def records(self) -> list[StepRecord]:
        """A list to which each step's record is appended from here on; it stays empty if the method drops nothing."""
        return []

    def pause(self) -> None:  # noqa: B027
        """Others use the ranks from here on, until `resume`."""

    def resume(self) -> None:  # noqa: B027
        """It is this job's turn again."""

    def evaluate(self) -> dict[str, float]:
        """Scores on held-out data, by the plain module; collective."""
        return self.workload.evaluate(self.module)

    def parameters_sha256(self) -> str:
        """A fingerprint of all parameters: equal on two ranks if these are equal bit for bit; collective."""
        digest = hashlib.sha256()
        for parameter in self.module.parameters():
            digest.update(whole(parameter).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Remove all hooks."""
        self._faults.close()

    def _load(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.workload.batch(samples)
        self._faults.data()
        return x.to(self._device), y.to(self._device)

    def _loss(self, batch: tuple[Tensor, Tensor], num_microbatches: int) -> Tensor:
        """This micro-batch's part of the mean loss of this rank's step."""
        loss = self.workload.loss(self.model, batch) / num_microbatches
        self._loss_so_far += loss.item()
        return loss


@final
class StagedJob(Job):
    """Training by `StagedDataParallel`; ``stop`` may end it early.

    With ``work=pulled`` the ranks draw the step's micro-batches, and each loads those that it draws: a slow one fewer.
    Else, with ``rebalance``, its unit is a sample if a step has one micro-batch, and otherwise a complete micro-batch.
    If members come and go, ``epochs`` deals the samples, so that none is lost with a rank; those of a replica are.
    A rank that missed a step has the same samples in the next one, so that it loads none for the steps that it missed.
    """

    model: StagedDataParallel

    def __init__(
        self,
        config: DictConfig,
        workload: Workload,
        device: torch.device,
        stop: StopSignal | None = None,
        replica: DeviceMesh | None = None,
    ) -> None:
        super().__init__(config, workload, device, replica)
        self._stop = stop
        every = config.get("collect_garbage_every") or 0
        self._garbage = CollectGarbage(self.model, every=every) if every else None
        self._batch_size: int = config.batch_size
        self._weight = 1.0  # of the next step
        self._pulls: bool = config.get("work") == "pulled"
        if self._pulls:
            self.samples_per_step = 1  # the weight is the number of samples
        self.rebalance: Rebalance | None = None
        if config.get("rebalance") and not self._pulls:
            self._unit: int = config.batch_size if self.num_microbatches > 1 else 1  # samples
            self._total = job_size() * self.samples_per_step
            self.rebalance = instantiate(config.rebalance, model=self.model, total=self._total // self._unit)
            self.samples_per_step = self._unit  # the weight is the rank's share
        self._position = _Position()
        self._loaded: _Loaded | None = None  # for the last step
        self._number = 0  # of the running step
        self._missed = _Missed()
        self.model.loader_begins()
        self.model.register_step_hook(self._merged)
        self._comes_and_goes = bool(config.get("members"))
        self.epochs: Epochs | None = None
        if self._comes_and_goes and not self._pulls and self.mesh is None:
            self.epochs = Epochs(
                self.model,
                num_samples=workload.num_samples,
                batch_size=self.samples_per_step,
                seed=config.seed,
                rebalance=self.rebalance,
            )

    @property
    def dealt(self) -> dict[str, Rebalance | Epochs | _Missed | _Position]:
        """What determines the next samples, by name: to be saved, and given to a rank that comes back."""
        pool = self._position if self._pulls and self._comes_and_goes else None
        missed = None if self._pulls or self._comes_and_goes else self._missed
        named = {"rebalance": self.rebalance, "epochs": self.epochs, "position": pool, "missed": missed}
        return {name: own for name, own in named.items() if own is not None}

    def _wrap(self, config: DictConfig) -> StagedDataParallel:
        return StagedDataParallel(
            self.module,
            stages=stages_of(config.stages),
            deadline=instantiate(config.deadline),
            estimator=build_estimator(config, self.optimizer),
            late_handling=instantiate(config.late_handling),
            merge=instantiate(config.merge),
            members=build_members(config, job_size() // self.ranks_per_replica),
            links=config.get("links"),
            mesh=None if self.mesh is None or config.get("members") else self.mesh["dp_replicate"],
        )

    def _passes(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._pulls:
            self._pulled()
            return
        done = 0
        with self.model.step(num_microbatches=len(batches)) as step:
            if self.rebalance is not None or self.epochs is not None:
                step.weight = self._weight
            if self._stop is not None:
                self._stop.tell(step)
            for batch in batches:
                loss = self._loss(batch, len(batches))
                done += 1
                step.log(loss=self._loss_so_far * len(batches) / done)
                loss.backward()  # type: ignore[no-untyped-call]

    def _pulled(self) -> None:
        with self.model.step() as step:
            if self._stop is not None:
                self._stop.tell(step)
            # a rank that comes back has learned on entering which step the others are in
            for done, batch in enumerate(step.pull(self._pool())):
                loss = self._loss(batch, 1)
                step.log(loss=self._loss_so_far / (done + 1))
                loss.backward()  # type: ignore[no-untyped-call]

    def _batches(self, number: int) -> Sequence[tuple[Tensor, Tensor]]:
        self._number = number
        if self._pulls:
            self._position.comes_to(number)
            return ()
        since = self._missed.since.get(self.model.rank)
        samples, had = self._samples(number if since is None else since), self._loaded
        if since is None or had is None or not had.has(samples):
            had = self._loaded = _Loaded(samples, [self._load(own) for own in samples])
        return had.batches

    def _merged(self, record: StepRecord) -> None:
        """After each step."""
        self._missed.merged(self._number, record.table)

    def _pool(self) -> StepBatches:
        """All micro-batches of the step; if the model is sharded, this rank's part of each."""
        number, shard = self._position.number, 0 if self.mesh is None else self.mesh["dp_shard"].get_local_rank()
        total = job_size() * self.num_microbatches * self._batch_size
        samples = self._shard.part(number, total=total, first=0, count=total)
        own = samples.view(-1, self.ranks_per_replica, self._batch_size)[:, shard]
        return StepBatches(own.tolist(), lambda part: self._load(torch.tensor(part)))

    def records(self) -> list[StepRecord]:
        kept: list[StepRecord] = []
        self.model.register_step_hook(kept.append)
        return kept

    def pause(self) -> None:
        self.model.pause()

    def resume(self) -> None:
        self.model.resume()

    def _samples(self, number: int) -> list[Tensor]:
        if self.epochs is not None:
            samples = self.epochs.draw()
        elif self.rebalance is not None:
            rank, schedule = self.model.rank, self.rebalance.schedule
            shares = next(shares for first_step, shares in reversed(schedule) if first_step <= number)
            first, count = self._unit * sum(shares[:rank]), self._unit * shares[rank]
            samples = self._shard.part(number, total=self._total, first=first, count=count)
        else:
            return super()._samples(number)
        self._weight = len(samples) / self.samples_per_step
        return list(torch.split(samples, len(samples) if self.num_microbatches == 1 else self._batch_size))

    @property
    def report(self) -> StepReport:
        """What happened in the last step."""
        assert self.model.last_report is not None
        return self.model.last_report

    @property
    def asked_to_stop(self) -> bool:
        """Whether the last step must be the last of the run, on all ranks, though there are more to do."""
        return self._stop is not None and self._stop.agreed(self.report)

    def close(self) -> None:
        super().close()
        if self._garbage is not None:
            self._garbage.close()
        self.model.close()


@dataclass(frozen=True)
class _Loaded:
    """The ``batches`` of a step, and whose samples they are."""

    samples: Sequence[Tensor]
    batches: Sequence[tuple[Tensor, Tensor]]

    def has(self, samples: Sequence[Tensor]) -> bool:
        """Whether they are of these samples."""
        return len(samples) == len(self.samples) and all(map(torch.equal, samples, self.samples))


class _Missed:
    """Since which step a rank has the same samples: the first of those that it has missed up to now."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}  # by rank, the same on all

    def merged(self, number: int, table: Table) -> None:
        """After step ``number``."""
        missed = () if table.is_usual else sorted(table.missed_ranks())
        self.since = {rank: self.since.get(rank, number) for rank in missed}

    def state_dict(self) -> dict[str, Any]:
        """Those steps."""
        return {"since": dict(self.since)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self.since = dict(state["since"])


class _Position:
    """The step whose pool comes next: a rank that comes back must have it from its peers."""

    def __init__(self) -> None:
        self.number = 0

    def comes_to(self, number: int) -> None:
        """The pool of this step is next."""
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        """That number."""
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.number = int(state["number"])


class TorchJob(Job):
    """Training by a wrapper around torch's ``DistributedDataParallel``."""

    model: DistributedDataParallel

    def _passes(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        with self._no_sync():
            for batch in batches[:-1]:
                self._loss(batch, len(batches)).backward()  # type: ignore[no-untyped-call]
        self._loss(batches[-1], len(batches)).backward()  # type: ignore[no-untyped-call]

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def close(self) -> None:
        """Remove all hooks, and the wrapper while its process group lives.

        If DDP's reducer is the last that holds the group, it ends gloo's threads with the GIL held. A thread that still
        frees a tensor waits for the GIL: the process would never end.
        """
        super().close()
        del self.model


@final
class DdpJob(TorchJob):
    """Training as torch does it: by ``DistributedDataParallel`` or, for a sharded model, by FSDP2's own replicas."""

    def _shards_over(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    def _wrap(self, config: DictConfig) -> Any:  # noqa: ARG002
        return DistributedDataParallel(self.module) if self.mesh is None else self.module

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        if not isinstance(self.module, FSDPModule):
            with super()._no_sync():
                yield
            return
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)


@final
class LocalSgdJob(TorchJob):
    """Training by torch's post-local SGD: ranks train alone, and their parameters are averaged ``every`` steps.

    The first ``warmup_steps`` steps are DDP's. The optimizer's state and module buffers stay each rank's own. Scores
    and fingerprints are those of the average. Source: Lin et al., "Don't use large mini-batches, use local SGD" (2020).
    """

    def __init__(
        self, config: DictConfig, workload: Workload, device: torch.device, *, every: int = 10, warmup_steps: int = 10
    ) -> None:
        self._every = every
        self._warmup_steps = warmup_steps
        super().__init__(config, workload, device)

    def _wrap(self, config: DictConfig) -> DistributedDataParallel:  # noqa: ARG002
        model = DistributedDataParallel(self.module)
        model.broadcast_buffers = False  # each forward pass would wait for rank 0; the argument for it has two names
        state = PostLocalSGDState(None, None, self._warmup_steps, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        model.register_comm_hook(state, post_localSGD_hook)
        # the averager counts from 0: it first averages after `every` steps of training alone
        averager = PeriodicModelAverager(self._every, warmup_steps=self._warmup_steps + self._every - 1)
        self.optimizer.register_step_post_hook(lambda *_: averager.average_parameters(self.module.parameters()))
        return model

    def evaluate(self) -> dict[str, float]:
        with self._averaged():
            return super().evaluate()

    def parameters_sha256(self) -> str:
        with self._averaged():
            return super().parameters_sha256()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """All ranks' mean parameters, and afterwards this rank's own again; collective."""
        assert dist.group.WORLD is not None
        own = [parameter.detach().clone() for parameter in self.module.parameters()]
        average_parameters(iter(self.module.parameters()), dist.group.WORLD)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self.module.parameters(), own, strict=True):
                    parameter.copy_(before)
