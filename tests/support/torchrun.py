"""torchrun's own agent over a function, forked with its workers from the server that has torch loaded.

What is left out is loading: some two seconds of CPU of the agent, and three of each worker at each start. What ends by
``os._exit``, as a run that is told to end does, is not for this: the agent waits for what the function returns.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import Started, started
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser
from torch.distributed.run import main as torchrun

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Torchrun(Started):
    """The agent; its workers leave their process ids in ``pids``."""

    pids: Path

    def workers(self) -> dict[int, int]:
        """The process of each rank that runs."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        left = {int(path.name): path.read_text() for path in self.pids.iterdir()}
        return {rank: int(pid) for rank, pid in left.items() if pid in children}


def torchrun_main(*options: str) -> None:
    """torchrun itself, whose workers are processes as those of any command."""
    torchrun(options)


@contextlib.contextmanager
def started_torchrun(
    function: Callable[..., object], *args: Any, folder: Path, num_ranks: int = 2, max_restarts: int = 0
) -> Iterator[Torchrun]:
    """``torchrun --standalone``, started in ``folder`` and killed at the end; each worker runs ``function(*args)``."""
    options = [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=test"]  # which --standalone stands for
    with started_agent(options, function, *args, folder=folder) as agent:
        yield agent


@contextlib.contextmanager
def started_agent(
    options: Sequence[str], function: Callable[..., object], *args: Any, folder: Path
) -> Iterator[Torchrun]:
    """``torchrun`` with these options, started in the same way; the agent of one node."""
    with tempfile.TemporaryDirectory() as pids:
        words = (tuple(options), Path(pids), function, args)
        with started(_agent, *words, folder=folder, environment=ENVIRONMENT) as agent:
            yield Torchrun(agent.process, agent.log, Path(pids))


def _agent(options: Sequence[str], pids: Path, function: Callable[..., object], args: Any) -> None:
    config, _, _ = config_from_args(get_args_parser().parse_args(["--start-method=fork", *options, "script"]))
    elastic_launch(config, _worker)(pids, function, args)


def _worker(pids: Path, function: Callable[..., object], args: Any) -> None:
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    if status := function(*args):
        raise SystemExit(status)
