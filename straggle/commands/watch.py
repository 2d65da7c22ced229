"""Run a training script as it is, and record where each rank's time goes, without a changed line.

torchrun --nproc-per-node 4 -m straggle watch train.py --epochs 1
python -m straggle advise runs/watch
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from straggle.observe.watch import Watch, watch
from straggle.observe.watch_file import watched_files

_USAGE = """\
torchrun ... -m straggle watch [run_dir=DIR] SCRIPT ...
  SCRIPT ...    your script and its own words, as after torchrun; it is not changed
  run_dir=DIR   where each rank's times go; default: runs/watch. A second DDP model has DIR-2, and so on
                If DDP has several process groups, those without rank 0 have DIR/group1 (their lowest rank), and so on
Without DDP, the first model that is called with gradients is watched: a plain one, or what fully_shard() has sharded.
then: python -m straggle advise DIR

torchrun --nproc-per-node 4 -m straggle watch train.py --epochs 1
"""


def arguments(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder, and the script with its words; raises ``ValueError`` if there is no such script."""
    run_dir, rest = Path("runs/watch"), list(words)
    while rest and rest[0].startswith("run_dir="):
        run_dir = Path(rest.pop(0).partition("=")[2])
    if not rest:
        raise ValueError("which script? straggle watch [run_dir=DIR] SCRIPT ...")
    if not Path(rest[0]).is_file():
        raise ValueError(f"{rest[0]} is no file: give the script that torchrun would run")
    return run_dir, rest


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
    """Run the script as ``python SCRIPT ...`` does."""
    run_dir, script = arguments(words)
    end = watching(run_dir)
    sys.argv[:], before = script, list(sys.argv)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        end()
        sys.argv[:] = before
    if os.environ.get("RANK", "0") == "0":
        made = bool(watched_files(run_dir))
        found = f"python -m straggle advise {run_dir}" if made else "the script trained no model"
        sys.stderr.write(f"straggle watch: {found}\n")
    return 0


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
