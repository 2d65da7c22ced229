"""In a process that a watched script started: if it becomes one of several ranks, its model is watched, too.

`straggle watch` puts this folder on ``PYTHONPATH`` while a script runs, so Python imports this module when it starts a
child. It loads neither torch nor straggle; what is there is done when the child makes its process group.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_FOLDER = str(Path(__file__).resolve().parent)
_GROUPS = "torch.distributed.distributed_c10d"


class _WhenLoaded(MetaPathFinder):
    """Wraps torch's ``init_process_group`` as soon as its module is loaded, before others import it from there."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        if name != _GROUPS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            module.init_process_group = _then_watched(module)

        spec.loader.exec_module = load_and_wrap
        return spec


def _then_watched(groups: Any) -> Any:
    make = groups.init_process_group

    @wraps(make)
    def made(*args: Any, **words: Any) -> None:
        make(*args, **words)
        if groups.get_world_size() > 1 and "STRAGGLE_WATCH" in os.environ:
            run_dir = Path(os.environ.pop("STRAGGLE_WATCH"))  # once; what this process starts is not watched
            _watch(run_dir)

    return made


def _watch(run_dir: Path) -> None:
    try:
        if importlib.util.find_spec("straggle") is None:  # the command was started in a checkout
            sys.path.append(str(Path(_FOLDER).parents[2]))
        from straggle.commands.watch import watching

        watching(run_dir)
    except ImportError as error:  # training goes on
        sys.stderr.write(f"straggle watch: a process that the script started cannot import straggle: {error}\n")


def _import_hidden() -> None:
    """Python imports one ``sitecustomize``, the first on the path: import the one that this one hides."""
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if "STRAGGLE_WATCH" in os.environ:
        sys.meta_path.insert(0, _WhenLoaded())
    _import_hidden()
