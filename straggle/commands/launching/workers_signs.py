"""What a worker and the terminal that it was started from tell each other: two files in a folder of this run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SIGNS = "STRAGGLE_SIGNS"  # the folder, in the workers' environment
END = "end"  # made by the launcher: end after this step
STEPPED = "stepped"  # made by a worker: it has made a first step


def end_file() -> Path | None:
    """The file that asks this worker to end; ``None`` if nobody would make it."""
    return Path(os.environ[SIGNS], END) if os.environ.get(SIGNS) else None


def asked_at_terminal() -> bool:
    """Whether somebody pressed Ctrl-C, who can wait for the run's page."""
    file = end_file()
    return file is not None and file.exists()


def first_step_is_made() -> None:
    """Let the terminal know, which says until then that there is none yet."""
    if (folder := os.environ.get(SIGNS)) and not os.path.exists(os.path.join(folder, STEPPED)):
        with contextlib.suppress(OSError):
            Path(folder, STEPPED).touch()
