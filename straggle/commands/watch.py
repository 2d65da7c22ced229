"""Run a training script as it is, and record where each rank's time goes, without a changed line.

torchrun --nproc-per-node 4 -m straggle watch train.py --epochs 1
python -m straggle advise runs/watch
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from straggle.observe.watch.file import watched_files
from straggle.observe.watch.watch import Watch, watch

_USAGE = """\
torchrun ... -m straggle watch [run_dir=DIR] SCRIPT ...
torchrun ... -m straggle watch [run_dir=DIR] -m MODULE ...
  SCRIPT ...    your script, or module, and its own words, as after torchrun; it is not changed
  run_dir=DIR   where each rank's times go; default: runs/watch. A second DDP model has DIR-2, and so on
                If DDP has several process groups, those without rank 0 have DIR/group1 (their lowest rank), and so on
Without DDP, the first model that is called with gradients is watched: a plain one, or what fully_shard() has sharded.
Ranks that the script starts itself, as torch.multiprocessing.spawn and Lightning do, are watched too.
then: python -m straggle advise DIR

torchrun --nproc-per-node 4 -m straggle watch train.py --epochs 1
"""
_NOTHING = (
    "no model was trained in this process, nor in ranks that it started; start ranks by torchrun, "
    "or write straggle.watch(model) in the script, behind DistributedDataParallel(...)"
)


@dataclass(frozen=True)
class Program:
    """What is watched: a script, or with ``is_module`` a module's name, and its own words behind it."""

    words: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """As ``python SCRIPT ...`` or ``python -m MODULE ...`` does."""
        name = self.words[0]
        sys.argv[:], before = list(self.words), list(sys.argv)
        try:
            if self.is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(name).resolve().parent))
                runpy.run_path(name, run_name="__main__")
        finally:
            sys.argv[:] = before


def arguments(words: Sequence[str]) -> tuple[Path, Program]:
    """The folder, which stays where it is if the script changes its own, and what is to be run.

    Raises ``ValueError`` if there is no such script or module.
    """
    run_dir, rest = Path("runs/watch"), list(words)
    while rest and rest[0].startswith("run_dir="):
        run_dir = Path(rest.pop(0).partition("=")[2])
    if is_module := rest[:1] == ["-m"]:
        del rest[0]
    if not rest:
        raise ValueError("which script? straggle watch [run_dir=DIR] SCRIPT ..., or -m MODULE ...")
    if is_module and not _can_be_found(rest[0]):
        raise ValueError(f"-m {rest[0]}: there is no such module here; give the one that torchrun would run")
    if not is_module and not Path(rest[0]).is_file():
        raise ValueError(f"{rest[0]} is no file: give the script that torchrun would run, or -m and a module")
    return run_dir.absolute(), Program(tuple(rest), is_module)


def _can_be_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its package is not there; the name is none
        return False


def watching(run_dir: Path) -> Callable[[], None]:
    """Have each ``DistributedDataParallel`` of this process watched from its making on, and if there is none, the first
    model that is called; gives how to end that.
    """
    wrapper: Any = DistributedDataParallel
    make, numbers, first = wrapper.__init__, count(1), list[Watch]()
    lazy, within = WeakSet[nn.Module](), WeakSet[nn.Module]()  # models without sizes yet, and their parts

    @wraps(make)
    def made(model: DistributedDataParallel, *positional: Any, **words: Any) -> None:
        make(model, *positional, **words)
        called.remove()
        while first:
            first.pop().close()  # it was called before it was wrapped
        number = next(numbers)
        try:
            watch(model, run_dir if number == 1 else run_dir.with_name(f"{run_dir.name}-{number}"))
        except (TypeError, ValueError) as error:  # training goes on
            sys.stderr.write(f"straggle watch: {error}\n")

    def before_call(module: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled() or module in within or not any(own.requires_grad for own in module.parameters()):
            return
        if module not in lazy and any(map(is_lazy, module.parameters())):  # this call gives them: the next is watched
            lazy.add(module)
            within.update(child for child in module.modules() if child is not module)
            return
        called.remove()
        try:
            first.append(watch(module, run_dir))
        except (TypeError, ValueError) as error:  # training goes on
            sys.stderr.write(f"straggle watch: {error}\n")
        else:
            first[0].forward_begins()  # the hooks of a running call are known already

    called = register_module_forward_pre_hook(before_call)
    wrapper.__init__ = made

    def end() -> None:
        called.remove()
        wrapper.__init__ = make

    return end


def run_watched(words: Sequence[str]) -> int:
    """Run the program, and say what was recorded if it comes to its end."""
    run_dir, program = arguments(words)
    before, end = _written(run_dir), watching(run_dir)
    try:
        with _children_watched(run_dir):
            program.run()
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            _say_what_was_recorded(run_dir, _written(run_dir) - before)
        raise
    finally:
        end()
    _say_what_was_recorded(run_dir, _written(run_dir) - before)
    return 0


@contextmanager
def _children_watched(run_dir: Path) -> Iterator[None]:
    """Processes that are started here are watched if they become ranks; not those of a rank, whose file there is."""
    if "RANK" in os.environ:
        yield
        return
    before = dict(os.environ)
    hook = str(Path(__file__).parent / "watched_children")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, before.get("PYTHONPATH")]))
    os.environ["STRAGGLE_WATCH"] = str(run_dir)
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "STRAGGLE_WATCH"):
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})


def _written(run_dir: Path) -> set[tuple[str, int]]:
    """The ranks' files with their times, so that an earlier run's are known."""
    return {(str(file), file.stat().st_mtime_ns) for file in watched_files(run_dir)}


def _say_what_was_recorded(run_dir: Path, files: set[tuple[str, int]]) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    found = f"python -m straggle advise {shown}" if files else _NOTHING
    sys.stderr.write(f"straggle watch: {found}\n")


def main() -> int:
    """The command; returns its exit status."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0 if words else 2
    try:
        arguments(words)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return run_watched(words)  # what the script raises is its own
