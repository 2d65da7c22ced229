"""torchrun's own agent over a function, forked with its workers from the server that has torch loaded.

What is left out is loading: some two seconds of CPU of the agent, and three of each worker at each start. What ends by
``os._exit``, as a run that is told to end does, is not for this: the agent waits for what the function returns.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import Started, started
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

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


@contextlib.contextmanager
def started_torchrun(
    function: Callable[..., object], *args: Any, folder: Path, num_ranks: int = 2, max_restarts: int = 0
) -> Iterator[Torchrun]:
    """``torchrun --standalone``, started in ``folder`` and killed at the end; each worker runs ``function(*args)``."""
    with tempfile.TemporaryDirectory() as pids:
        words = (Path(pids), num_ranks, max_restarts, function, args)
        with started(_agent, *words, folder=folder, environment=ENVIRONMENT) as agent:
            yield Torchrun(agent.process, agent.log, Path(pids))


def _agent(pids: Path, num_ranks: int, max_restarts: int, function: Callable[..., object], args: Any) -> None:
    options = [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}", "--start-method=fork"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=test"]  # which --standalone stands for
    config, _, _ = config_from_args(get_args_parser().parse_args([*options, "script"]))
    elastic_launch(config, _worker)(pids, function, args)


def _worker(pids: Path, function: Callable[..., object], args: Any) -> None:
    (pids / os.environ["RANK"]).write_text(str(os.getpid()))
    if status := function(*args):
        raise SystemExit(status)
