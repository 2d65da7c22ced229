"""The options of `straggle launch`, which are torchrun's where it has them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from straggle.commands.launching.store_host import StoreAddress

PIDS_DIR = "STRAGGLE_PIDS_DIR"
_EXAMPLES = """\
examples:
  straggle launch --nproc-per-node 4 train.py --steps 1000
  straggle launch --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500 --nproc-per-node 8 -m my.training
and for a store that outlives every node, with --external-store on all of them:
  straggle launch --store-only --port 29500
"""


def parser() -> argparse.ArgumentParser:
    """The options, with their help."""
    options = argparse.ArgumentParser(
        prog="straggle launch",
        description="Start the workers of a job, and start each that dies again, while the others go on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add(
        options,
        "--nproc-per-node",
        type=_num_workers,
        default=1,
        metavar="N",
        help="workers on this node, gpu, cpu or auto",
    )
    _add(options, "--nnodes", type=_num_nodes, default=1, metavar="M", help="nodes of the job (1)")
    _add(options, "--node-rank", type=int, default=None, metavar="K", help="this one: 0, which hosts the store, 1, ...")
    _add(
        options, "--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="where the store is; needed with --nnodes"
    )
    _add(options, "--rdzv-id", metavar="ID", help="the run's name, as TORCHELASTIC_RUN_ID")
    options.add_argument("--external-store", action="store_true", help="the store there is one of --store-only")
    options.add_argument("--standalone", action="store_true", help="one node, and any free port: the default")
    _add(options, "--max-restarts", type=_count, default=10, metavar="R", help="of each worker in a row (10)")
    _add(
        options, "--restart-delay-s", type=_seconds, default=1.0, metavar="S", help="then 2 S, 4 S, ... up to 30 s (1)"
    )
    _add(options, "--grace-s", type=_seconds, default=10.0, metavar="S", help="from SIGTERM to SIGKILL (10)")
    _add(
        options,
        "--replica-size",
        type=_positive,
        default=1,
        metavar="S",
        help="so many workers are started again together (1)",
    )
    _add(options, "--log-dir", type=Path, metavar="DIR", help="one file for each rank and start; else passed through")
    _add(options, "--run-dir", type=Path, metavar="DIR", help=f"process ids are in DIR/pids; else in ${PIDS_DIR}")
    _add(
        options,
        "--preload",
        type=_modules,
        default=(),
        metavar="MODULE,...",
        help="load these once, and fork each worker from there",
    )
    _add(
        options,
        "--spares",
        type=_spares,
        default=0,
        metavar="N",
        help="processes that wait for a worker to die (0)",
    )
    options.add_argument("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    options.add_argument("script", help="what each worker runs, by this Python")
    options.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    return options


def arguments(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Read the command line; one that is wrong ends the program with status 2 and says what is.

    The environment's PET_NNODES and so on are the options' defaults, as they are torchrun's.
    """
    options = parser()
    options.set_defaults(**_torchruns_variables(environment))
    given = options.parse_args(words)
    for option, value in vars(given).items():
        if isinstance(value, _Variable):
            setattr(given, option, value.value(options))
    if given.nnodes == 1 and given.node_rank is None:
        given.node_rank = 0
    if given.nnodes > 1 and given.standalone:
        options.error("--standalone is for one node: leave it out, or --nnodes")
    if given.nnodes > 1 and (given.node_rank is None or given.rdzv_endpoint is None):
        options.error("several nodes need --node-rank, 0 on the first, and the same --rdzv-endpoint HOST:PORT on all")
    if not 0 <= given.node_rank < given.nnodes:
        options.error(f"--node-rank {given.node_rank}: with --nnodes {given.nnodes} it is 0 to {given.nnodes - 1}")
    if given.external_store and given.rdzv_endpoint is None:
        options.error("--external-store needs --rdzv-endpoint HOST:PORT, which says where it is")
    if given.nproc_per_node % given.replica_size:
        options.error(
            f"--replica-size {given.replica_size}: a replica is on one node, so --nproc-per-node must be a multiple of "
            f"it, and is {given.nproc_per_node}"
        )
    if given.spares > given.nproc_per_node:
        options.error(f"--spares {given.spares}: more than the {given.nproc_per_node} workers of --nproc-per-node")
    if given.spares % given.replica_size:
        options.error(
            f"--spares {given.spares}: the {given.replica_size} workers of a replica are started again together, so it "
            "must be a multiple of --replica-size"
        )
    return given


@dataclass(frozen=True)
class _Variable:
    """What an option is if the command line does not have it; ``read`` makes it a value."""

    name: str
    text: str
    read: Callable[[str], Any]

    def value(self, options: argparse.ArgumentParser) -> Any:
        try:
            return self.read(self.text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            options.error(f"{self.name}={self.text}: {error}")


def _torchruns_variables(environment: Mapping[str, str]) -> dict[str, _Variable]:
    """By option; an empty variable is none."""
    kinds: dict[str, Callable[[str], Any]] = {
        "nproc_per_node": _num_workers,
        "nnodes": _num_nodes,
        "node_rank": int,
        "rdzv_endpoint": _endpoint,
        "rdzv_id": str,
        "max_restarts": _count,
        "log_dir": Path,
    }
    found = dict[str, _Variable]()
    if host := environment.get("PET_MASTER_ADDR"):
        text = f"{host}:{environment.get('PET_MASTER_PORT') or 29500}"
        found["rdzv_endpoint"] = _Variable("PET_MASTER_ADDR:PET_MASTER_PORT", text, _endpoint)
    for option, read in kinds.items():
        if text := environment.get(name := f"PET_{option.upper()}", ""):
            found[option] = _Variable(name, text, read)
    return found


def _num_nodes(text: str) -> int:
    least, _, most = text.partition(":")
    if most and most != least:
        raise argparse.ArgumentTypeError(
            f"{text}: a job has a fixed number of nodes, whose ranks may leave and come back: give the larger number"
        )
    return _positive(least)


def _add(options: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """An option that may also be written with underscores, as torchrun's may."""
    destination = options.add_argument(name, **settings).dest
    if (other := "--" + destination) != name:
        same = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        options.add_argument(other, dest=destination, **same)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: must be an integer of at least 0")
    return int(text)


def _spares(text: str) -> int:
    if sys.platform != "linux":
        raise argparse.ArgumentTypeError("needs Linux: leave it out")
    return _count(text)


def _modules(text: str) -> tuple[str, ...]:
    if sys.platform != "linux":
        raise argparse.ArgumentTypeError("needs Linux: leave it out")
    names = tuple(text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(f"{text}: must be names of modules, with commas between them")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be seconds, at least 0")
    return seconds


def _endpoint(text: str) -> StoreAddress:
    try:
        return StoreAddress.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def port_number(text: str) -> int:
    """A port; 0 is any that is free."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be a port, 1 to 65535, or 0 for any that is free")
    return int(text)


def _num_workers(text: str) -> int:
    if text not in ("gpu", "cpu", "auto"):
        return _positive(text)
    num_gpus = torch.cuda.device_count()
    if text == "gpu" and not num_gpus:
        raise argparse.ArgumentTypeError("gpu: there is none")
    return num_gpus if num_gpus and text != "cpu" else os.cpu_count() or 1
