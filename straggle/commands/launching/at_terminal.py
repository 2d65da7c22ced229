"""torchrun for someone at a terminal: Ctrl-C ends the run after a step, and not each process where it is.

A terminal sends SIGINT to every process. It is blocked here and, by that, in all that torchrun starts; a thread waits
for it. The workers of `train` look for a file before each step (`workers_signs`); those of other commands are killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from straggle.commands.launching.workers_signs import END, SIGNS


def main(words: Sequence[str]) -> int:
    """Run torchrun with these words, SIGINT being blocked already; returns its exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    signs = Path(os.environ[SIGNS])
    threading.Thread(target=_wait_for_ctrl_c, args=(signs, "train" in words), daemon=True).start()
    try:
        torchrun(list(words))
    except SignalException as error:
        _say(f"{signal.Signals(error.sigval).name}: the workers have ended")
        return 128 + int(error.sigval)
    return 0


def _wait_for_ctrl_c(signs: Path, hears: bool) -> None:
    """The first asks the workers to end after a step, if they hear that; the next ends them."""
    if hears:
        signal.sigwait({signal.SIGINT})
        (signs / END).touch()
        _say("Ctrl-C: the run ends after the step that it is in, and is saved; again: it ends at once")
    signal.sigwait({signal.SIGINT})
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # what it would say of each worker
    for worker in _children():  # torchrun would give each half a minute
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)


def _children() -> list[int]:
    """The processes that this one has started; none where the system has no list of them."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(number) for own in lists for number in own.read_text().split()]


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
