#!/usr/bin/env python3
"""One worker of a cluster: torchrun that waits for the others, and that ends quickly and quietly when it is told to.

RENDEZVOUS=host:port NODES=4 straggle-worker key=value ...

RENDEZVOUS names the worker that hosts the rendezvous, whichever starts first; ranks are given out as workers come.
KEYS may have more of them, "steps=600 late_handling.quorum=2".
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

STOPPED = 128 + signal.SIGTERM


def end_on_sigterm() -> None:
    """Have a thread see to SIGTERM too.

    torchrun does so in its main thread, and only where Python runs: not while it waits for another node, such as one
    that was stopped a moment earlier. And process 1 of a container has no default action for the signal.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # until torchrun sets its own
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_end, args=(reader,), daemon=True).start()


def _end(signals: int) -> None:
    while os.read(signals, 1) != bytes([signal.SIGTERM]):
        pass
    for process in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)  # a second one changes nothing
    while _children():
        time.sleep(0.05)
    _leave(STOPPED)


def _children() -> list[int]:
    """The training processes that are alive."""
    alive = []
    for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                alive.append(int(process))
    return alive


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # freeing what torch has loaded would take longer than training took to end


def arguments() -> list[str]:
    """torchrun's, from the environment and the command line."""
    try:
        endpoint, nodes = os.environ["RENDEZVOUS"], sum(map(int, os.environ["NODES"].split("+")))
    except KeyError as missing:
        sys.exit(f"set {missing}: RENDEZVOUS is host:port of the worker that hosts the rendezvous, NODES their number")
    patience_s = os.environ.get("JOIN_TIMEOUT_S", "600")
    rendezvous_id = os.environ.get("RENDEZVOUS_ID", "straggle")
    return [
        *("--nnodes", str(nodes), "--nproc-per-node", os.environ.get("WORKERS_PER_NODE", "1")),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", rendezvous_id),
        *("--rdzv-conf", f"join_timeout={patience_s},read_timeout={patience_s}"),
        *("-m", "straggle", "train", *sys.argv[1:], *shlex.split(os.environ.get("KEYS", ""))),
    ]


if __name__ == "__main__":
    end_on_sigterm()
    try:
        main(arguments())
    except SignalException:  # the training processes have ended by now
        _leave(STOPPED)
    _leave(0)
