"""The end of a command's process, without the second of CPU in which Python frees what torch has loaded."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from straggle.waits import exit_frees_nothing

_NOT_WRITTEN = 120  # Python's own status where standard output takes nothing more


def end_process(status: int = 0) -> NoReturn:
    """End as Python does, but free nothing: threads that are no daemons come to their end, then what `atexit` has.

    A job is over when the last of its processes is. On a busy machine, or for a worker with a small share of a core,
    freeing takes ten seconds and more: once in a worker, and once in what has started it.
    """
    exit_frees_nothing()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a pipe that nobody reads, or a closed file
            status = status or _NOT_WRITTEN
    os._exit(status)
