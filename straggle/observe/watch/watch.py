"""`watch(model)`: where the time of each rank goes in a job as it is, without changing what it does.

It reads clocks in hooks and in callbacks of the autograd engine, so that the end of a rank's own work is known before
any waiting. Nothing is sent: each rank writes its own file. The ranks' steps can be aligned
because all ranks take part in a step's merge.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from straggle import world
from straggle.backward.clocks import moment
from straggle.backward.hooks import ModuleHook
from straggle.backward.loop_hooks import around_collectives, around_loads, around_steps
from straggle.backward.stages import StagePlan, plan_stages, trainable
from straggle.observe.watch.file import ALL, FOLDER, WatchFile
from straggle.observe.watch.job import Job, job_of, units_of
from straggle.observe.watch.pauses import PauseDetector
from straggle.observe.watch.steps import Recorder, StepTimes


def watch(model: nn.Module, run_dir: str | Path = "runs/watch") -> Watch:
    """Record this rank's times in each step of ``model``, for ``python -m straggle advise RUN_DIR``.

    ``model``: as the loop calls it, a plain module, a ``DistributedDataParallel``, or what ``fully_shard`` or
    ``parallelize_module`` has sharded. Gradients, parameters and collectives do not change. The file
    ``run_dir/watch/rank<r>.jsonl`` is closed when the process ends, or by ``close()``; an older file of this name is
    overwritten. If groups of ranks have a
    ``DistributedDataParallel`` each, the folder of one without rank 0 is ``run_dir/group<r>``, with its lowest rank r.

    Raises ``TypeError`` if ``model`` cannot be watched, such as a `StagedDataParallel`, which has reports of its own.
    """
    return Watch(model, run_dir)


class Watch:
    """What `watch` returns: ``close()`` ends it, as does a ``with`` statement around the loop.

    ``clock`` gives seconds; it is used if the model is on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        run_dir: str | Path = "runs/watch",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        job = job_of(model)
        of_group = f"group{lowest}" if (lowest := min(job.group, default=0)) else ""
        self.path = Path(run_dir) / of_group / FOLDER / f"rank{job.rank}.jsonl"
        watched = _Watched(model, job, WatchFile(self.path, job.head), clock)
        self._recorder = watched.recorder
        self._finalizer = weakref.finalize(model, watched.close)

    def forward_begins(self) -> None:
        """For a loop that does not call the model itself: its forward pass begins, or an evaluation without gradients.

        Others need neither this nor `forward_ends`.
        """
        self._recorder.forward()

    def forward_ends(self, loss: Tensor) -> None:
        """The forward pass gave this loss, whose backward pass comes next."""
        self._recorder.leave(loss)

    def close(self) -> None:
        """Remove all hooks and close the file; the model goes on as before."""
        self._finalizer()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Watched:
    """The hooks of one watch, and its steps. It does not hold the model, which is freed as without it."""

    def __init__(self, model: nn.Module, job: Job, file: WatchFile, clock: Callable[[], float]) -> None:
        if units := units_of(job.module):
            from straggle.source.fsdp2 import UnitStates

            UnitStates(
                units
            ).reshard()  # after an evaluation, other objects than the optimizer's are the model's parameters
        self._named = trainable(job.module)  # until there is a plan of them: some may be frozen by then
        parameters = [parameter for _, parameter in self._named]
        self._numel = sum(own.numel() for own in parameters)
        self._module, self._file = weakref.ref(job.module), file
        self._sharded, self._has_header = job.is_sharded, False
        self._plan: StagePlan | None = None
        # pauses are the process's own, by its clock: by another one none is known
        detector = PauseDetector() if clock is time.monotonic else PauseDetector(clock, clock)
        self.recorder = Recorder(partial(moment, parameters[0].device, clock), self._written, job.merge, detector)
        self._handles = [
            *_around_passes(model, job.module, self.recorder),
            *around_steps(parameters, self.recorder.optimizer_begins, self.recorder.optimizer_ends),
            *around_loads(self.recorder.load),
            *around_collectives(self.recorder.collective),
        ]
        if self._sharded:
            self._named = []
            self._handles += bracket_waits(job.module, self.recorder.wait)
        else:
            gradient = self.recorder.gradient
            self._handles += [
                p.register_post_accumulate_grad_hook(partial(gradient, i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(parameters)
            ]

    def close(self) -> None:
        """Remove the hooks and close the file."""
        for handle in self._handles:  # before the file is closed: a hook may end a step, and write it
            handle.remove()
        self._handles.clear()
        self.recorder.close()
        self._file.close()

    def _written(self, times: StepTimes) -> None:
        if not self._has_header:
            self._write_header()
        self._file.write(times, self._plan)

    def _write_header(self) -> None:
        self._has_header = True
        if self._sharded:
            self._file.write_header([(ALL, self._numel)])
            return
        module, ends = self._module(), self.recorder.ends
        assert module is not None
        self._plan = _plan(module, self._named, [index for index, _ in ends.moments])  # as this rank finished them
        self._named = []
        self._file.write_header([(stage.name, stage.numel) for stage in self._plan.stages])
        ends.follow(self._plan)


def _around_passes(model: nn.Module, module: nn.Module, recorder: Recorder) -> list[Any]:
    """Hooks on the call of the model; before all others, which may wait or compute."""
    if not isinstance(model, DistributedDataParallel):
        return [
            module.register_forward_pre_hook(ModuleHook(lambda *_: recorder.forward()), prepend=True),
            module.register_forward_hook(ModuleHook(lambda _module, _args, output: recorder.leave(output))),
        ]

    def before(ddp: DistributedDataParallel, _args: Any) -> None:
        recorder.before_ddp(synced=ddp.require_backward_grad_sync)

    def before_module(_module: nn.Module, _args: Any) -> None:
        if recorder.phase == "wait" and torch.is_grad_enabled():  # DDP calls it
            recorder.forward()

    return [
        model.register_forward_pre_hook(ModuleHook(before)),
        module.register_forward_pre_hook(ModuleHook(before_module)),
        model.register_forward_hook(ModuleHook(lambda _model, _args, output: recorder.leave(output))),
    ]


def _plan(module: nn.Module, named: list[tuple[str, nn.Parameter]], finished: list[int]) -> StagePlan:
    """Stages in the order in which the gradients were finished; parameters without one come last."""
    seen = list(dict.fromkeys(finished))
    order = [*seen, *sorted(set(range(len(named))) - set(seen), reverse=True)]
    return plan_stages(module, None, order, named=named)


Around: TypeAlias = Callable[[Callable[[], Any]], Any]


def bracket_waits(module: nn.Module, around: Around) -> list[Bracket]:
    """From here on each such function is called by ``around``, until the brackets are removed."""
    from torch.distributed import _functional_collectives

    places: list[tuple[Any, str]] = [(_functional_collectives, "wait_tensor")]
    if units := units_of(module):
        from straggle.source.fsdp2 import waits_of  # imports what FSDP2 does

        places += waits_of(units)
    return [Bracket(owner, name, around) for owner, name in places]


class Bracket:
    """Stands in the place of the attribute ``name`` of a module or an object, which it does not keep alive."""

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._around: Around | None = around
        self._process = world.process()
        self._before: Any = vars(owner).get(name)  # None: what its class has
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._before or getattr(type(self._owner()), self._name).__get__(self._owner())
        if self._around is None or torch.compiler.is_compiling() or world.process() != self._process:
            return call(*args, **kwargs)
        return self._around(lambda: call(*args, **kwargs))

    def remove(self) -> None:
        """Put back what was there; if another bracket stands around this one, let this one do nothing."""
        self._around = None
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return
        before = self._before
        while isinstance(before, Bracket) and before._around is None:  # it was removed earlier
            before = before._before
        if before is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, before)
