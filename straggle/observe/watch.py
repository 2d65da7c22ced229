"""`watch(ddp_model)`: where the time of each rank goes under plain DDP, without changing what it does.

It reads clocks: hooks before the forward pass, at the model's output, on each finished gradient, and callbacks of the
autograd engine on both sides of DDP's own, which waits for the allreduce there. So the end of a rank's own work is
known before any waiting. Nothing is sent but pings now and then: each rank writes its own file. The ranks' steps can be
aligned because all ranks take part in a step's allreduce.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from straggle.backward.clocks import moment, seconds_between
from straggle.backward.hooks import ModuleHook, tensors_in
from straggle.backward.optimizer_hooks import around_steps
from straggle.backward.stages import StagePlan, plan_stages, trainable
from straggle.observe.lines import LineWriter
from straggle.observe.pauses import PauseDetector
from straggle.observe.stage_ends import StageEnds
from straggle.observe.watched_links import WatchedLinks
from straggle.report import PHASES

FOLDER = "watch"


def watched_files(run_dir: Path) -> list[Path]:
    """What was written into ``run_dir``, in the order of the ranks."""
    return sorted((run_dir / FOLDER).glob("rank*.jsonl"), key=lambda file: (len(file.name), file.name))


def watch(model: DistributedDataParallel, run_dir: str | Path = "runs/watch") -> Watch:
    """Record this rank's times in each step of ``model``, for ``python -m straggle advise RUN_DIR``.

    Gradients, parameters and collectives do not change. The file ``run_dir/watch/rank<r>.jsonl`` is closed when the
    process ends, or by ``close()``; an older file of this name is overwritten. A thread measures the links between
    the ranks by pings.

    Raises ``TypeError`` if ``model`` is not a ``DistributedDataParallel``, such as one that ``fully_shard`` shards.
    """
    return Watch(model, run_dir)


class Watch:
    """What `watch` returns: ``close()`` ends it, as does a ``with`` statement around the loop.

    ``clock`` gives seconds; it is used if the model is on the CPU.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        run_dir: str | Path = "runs/watch",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            _refuse_sharded(model)
            raise TypeError(
                f"watch({type(model).__name__}): give the model that DistributedDataParallel wraps; "
                "StagedDataParallel has reports of its own (model.last_report)"
            )
        rank, world_size = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
        self.path = Path(run_dir) / FOLDER / f"rank{rank}.jsonl"
        num_bytes = sum(parameter.numel() * parameter.element_size() for _, parameter in trainable(model.module))
        links = WatchedLinks(rank, world_size, merged_bytes=num_bytes)
        recorder = _Recorder(model, _File(self.path, rank, world_size), links, clock)
        self._finalizer = weakref.finalize(model, recorder.close)

    def close(self) -> None:
        """Remove all hooks and close the file; the model goes on as before."""
        self._finalizer()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_sharded(model: nn.Module) -> None:
    """Ranks of FSDP2 wait in the middle of their passes, and clocks around these do not tell that from work."""
    from torch.distributed.fsdp import FSDPModule  # takes most of a second, which others do not need

    if isinstance(model, FSDPModule):
        raise TypeError(
            f"watch({type(model).__name__}): ranks of fully_shard() wait for one another inside of a pass, and that "
            'is not measured: write StagedDataParallel(model, mesh=mesh["dp_replicate"], deadline=WaitForAll()), which '
            "trains as FSDP2 does, and model.last_report.slowest_ranks names the rank that the others wait for"
        )


class _Recorder:
    """The hooks and the state of one watch. It does not hold the model, which is freed as without it."""

    def __init__(
        self, model: DistributedDataParallel, file: _File, links: WatchedLinks, clock: Callable[[], float]
    ) -> None:
        self._named = trainable(model.module)  # until there is a plan of them: some may be frozen by then
        parameters = [parameter for _, parameter in self._named]
        self._module = weakref.ref(model.module)
        self._now = partial(moment, parameters[0].device, clock)
        self._seconds: dict[str, list[tuple[Any, Any]]] = {}
        self._phase, self._since = "outside", self._now()
        self._detector = PauseDetector()
        self._detector.start()
        self._ends = StageEnds(self._now)
        self._began: Any = None  # the step's first forward pass
        self._microbatches: list[Any] = []
        self._in_pass = self._synced = False
        self._merged = self._since
        self._step = 0
        self._plan: StagePlan | None = None
        self._file, self._links = file, links
        self._removers: list[Callable[[], None]] = [
            handle.remove
            for handle in (
                model.register_forward_pre_hook(ModuleHook(self._enter)),
                model.module.register_forward_pre_hook(ModuleHook(self._enter_module)),
                model.register_forward_hook(ModuleHook(self._leave)),
                *(p.register_post_accumulate_grad_hook(partial(self._gradient, i)) for i, p in enumerate(parameters)),  # type: ignore[no-untyped-call]
                *around_steps(parameters, partial(self._optimizer, "optimizer"), partial(self._optimizer, "data")),
            )
        ]

    def close(self) -> None:
        """Remove the hooks and close the file."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._detector.close()
        self._links.close()
        self._file.close()

    # -- hooks

    def _enter(self, model: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation
            self._mark("outside")
            return
        assert isinstance(model, DistributedDataParallel)
        self._synced = model.require_backward_grad_sync
        self._in_pass = False
        self._mark("wait")  # DDP copies rank 0's buffers here, for which ranks wait

    def _enter_module(self, _module: nn.Module, _args: Any) -> None:
        if self._phase == "wait" and torch.is_grad_enabled():
            self._mark("forward")
            if self._began is None:
                self._began = self._since

    def _leave(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _gradient: Tensor | None) -> None:
        if not self._in_pass:
            self._in_pass = True
            self._ends.begin()
            self._mark("backward")
            # callbacks run in their order when the graph is done: this one before DDP's, which is queued later
            _queue_callback(self._computed)

    def _gradient(self, index: int, _parameter: Tensor) -> None:
        if self._began is not None:
            self._backward_begins(None)
            self._ends.gradient(index)

    def _computed(self) -> None:
        """This rank's own work of the pass is done."""
        if not self._in_pass:
            return
        self._in_pass = False
        self._ends.over()
        self._mark("wait")
        self._microbatches.append(self._since)
        if self._synced:
            _queue_callback(self._merge_ended)  # after DDP's
        else:
            self._mark("data")

    def _merge_ended(self) -> None:
        """The allreduce is over, and so is the step."""
        computed = self._since
        self._mark("outside")
        self._write(computed)
        self._seconds = {}
        self._merged, self._began, self._microbatches, self._synced = self._since, None, [], False

    def _optimizer(self, phase: str, _optimizer: Optimizer) -> None:
        if self._phase in ("outside", "optimizer"):
            self._mark(phase)

    # -- what they gather

    def _mark(self, phase: str) -> None:
        """End the running phase and begin another."""
        now = self._now()
        self._seconds.setdefault(self._phase, []).append((self._since, now))
        self._detector.credit(self._phase)
        self._phase, self._since = phase, now

    def _write(self, computed: Any) -> None:
        if self._plan is None:  # as this rank finished its gradients
            module = self._module()
            assert module is not None
            self._plan = _plan(module, self._named, [index for index, _ in self._ends.moments])
            self._named = []
            self._file.write_header(self._plan)
            self._ends.follow(self._plan)
        pauses = self._detector.take()
        parts = (
            self._seconds,
            self._merged,
            self._since,
            self._began,
            computed,
            self._microbatches,
            self._ends.moments,
        )
        ways = self._links.words()
        self._file.write(self._since, partial(_record, self._step, self._plan, parts, pauses, ways))
        self._links.merged(self._step)
        self._step += 1


def _record(
    step: int,
    plan: StagePlan,
    parts: Any,
    pauses: Mapping[str, Mapping[str, float]],
    ways: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """A step's line; ``parts`` are moments, or events that the device has already reached."""
    seconds, merged_before, merged, began, computed, microbatches, finished = parts
    at = {index: seconds_between(began, when) for index, when in finished}
    stage_s, reached_s = list[float](), 0.0
    for stage in plan.stages:
        reached_s = max([reached_s, *(at[index] for index in stage.parameters if index in at)])
        stage_s.append(reached_s)
    return {
        "step": step,
        "seconds": seconds_between(merged_before, merged),
        **{f"{name}_s": sum(seconds_between(*pair) for pair in seconds.get(name, ())) for name in (*PHASES, "wait")},
        "compute_s": seconds_between(began, computed),
        "merge_s": seconds_between(computed, merged),
        "microbatch_s": [seconds_between(began, when) for when in microbatches],
        "stage_s": stage_s,
        "pauses": pauses,
        **({"ways": ways} if ways else {}),
    }


def _plan(module: nn.Module, named: list[tuple[str, nn.Parameter]], finished: list[int]) -> StagePlan:
    """Stages in the order in which the gradients were finished; parameters without one come last."""
    seen = list(dict.fromkeys(finished))
    order = [*seen, *sorted(set(range(len(named))) - set(seen), reverse=True)]
    return plan_stages(module, None, order, named=named)


def _queue_callback(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _is_over(end: Any) -> bool:
    return not isinstance(end, torch.cuda.Event) or bool(end.query())  # type: ignore[no-untyped-call]


class _File:
    """One rank's lines. On a device, a step is written when the device has come to its end; no thread waits for it."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._file = LineWriter(path)
        self._head = {"watch": 1, "rank": rank, "world_size": world_size}
        self._due: deque[tuple[Any, Callable[[], dict[str, Any]]]] = deque()

    def write_header(self, plan: StagePlan) -> None:
        """The first line."""
        stages = [{"name": stage.name, "numel": stage.numel} for stage in plan.stages]
        self._line({**self._head, "stages": stages})

    def write(self, end: Any, record: Callable[[], dict[str, Any]]) -> None:
        """A step that is over when ``end`` is."""
        self._due.append((end, record))
        while self._due and _is_over(self._due[0][0]):
            self._line(self._due.popleft()[1]())

    def close(self) -> None:
        """Write what is left."""
        while self._due:
            self._line(self._due.popleft()[1]())
        self._file.close()

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record))
