"""What launch.sh starts for someone at a terminal: it checks the keys, starts the workers, and ends them on Ctrl-C.

A terminal sends SIGINT to every process. It is blocked here from the start, and by that in all that is started here; a
thread looks for it. The workers of `train` look for a file before each step (`workers_signs`); those of other commands
are killed. `straggle launch` hears SIGINT by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from straggle.commands.launching.workers_signs import END, SIGNS, STEPPED

_LOOK_S = 0.1
_SAY_EVERY_S = 10.0


def main(words: Sequence[str]) -> int:
    """Start what the words say, SIGINT being blocked already; returns the exit status.

    ``words``: the number of workers, the number of ranks (empty: not known), how many keys follow, ``train`` or
    ``compare``, its keys, ``torchrun`` or ``launch``, and what that is given.
    """
    _, ranks, count, command, *rest = words
    keys, (by, *options) = rest[: int(count)], rest[int(count) :]
    signs = Path(tempfile.mkdtemp(prefix="straggle-"))
    atexit.register(shutil.rmtree, signs, ignore_errors=True)
    os.environ[SIGNS] = str(signs)
    threading.Thread(target=_say_until_a_step, args=(signs,), daemon=True).start()
    ctrl_c = _CtrlC(signs, hears=command == "train")
    ctrl_c.start()
    environment = {**os.environ, "WORLD_SIZE": ranks}
    checked = subprocess.run([sys.executable, "-m", "straggle", "check", command, *keys], env=environment, check=False)
    with ctrl_c.acts:  # Ctrl-C ends the check, and then this process: not with its status, nor without a word
        if not checked.returncode and by == "torchrun":
            ctrl_c.workers_begin()
    if checked.returncode:
        return checked.returncode
    return _torchrun(options) if by == "torchrun" else _launch(options, ctrl_c)


def _torchrun(options: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(list(options))
    except SignalException as error:
        _say(f"{signal.Signals(error.sigval).name}: the workers have ended")
        return 128 + int(error.sigval)
    except ChildFailedError as error:  # torchrun's table says which worker ended first, and how
        _say(str(error))
        return 1
    return 0


def _launch(options: Sequence[str], ctrl_c: _CtrlC) -> int:
    from straggle.commands import launch

    ctrl_c.over.set()
    ctrl_c.join()
    sys.argv[1:] = options
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return launch.main()


class _CtrlC(threading.Thread):
    """Looks for Ctrl-C until ``over``; ``hears``: the workers end after a step if asked.

    ``acts`` is held while it does what Ctrl-C asks for, and by whoever says that the workers begin.
    """

    def __init__(self, signs: Path, *, hears: bool) -> None:
        super().__init__(daemon=True)
        self._begun = False
        self.over = threading.Event()
        self.acts = threading.Lock()
        self._signs, self._hears = signs, hears

    def workers_begin(self) -> None:
        """From here on there may be workers, which Ctrl-C ends, too; with ``acts`` held."""
        self._begun = True

    def run(self) -> None:
        """The thread's loop; macOS cannot wait for a signal with a time limit."""
        while not self.over.wait(_LOOK_S):
            if signal.SIGINT in signal.sigpending():
                signal.sigwait({signal.SIGINT})
                with self.acts:
                    self._pressed()

    def _pressed(self) -> None:
        if self._begun and self._hears:
            self._hears = False
            with contextlib.suppress(OSError):  # a full disk, say: then as if it had been pressed twice
                (self._signs / END).touch()
                _say("Ctrl-C: the run ends after the step that it is in, and is saved; again: it ends at once")
                return
        for child in _children():  # torchrun would give each half a minute
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if not self._begun:
            _say("stopped before it began")
            shutil.rmtree(self._signs, ignore_errors=True)
            os._exit(128 + signal.SIGINT)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # what it would say of each worker
        os.kill(os.getpid(), signal.SIGTERM)


def _say_until_a_step(signs: Path) -> None:
    """A line every ten seconds, until a worker has made a step."""
    seconds, ever = 0.0, threading.Event()
    while not (signs / STEPPED).exists() and signs.exists():
        ever.wait(1.0)
        seconds += 1.0
        if seconds % _SAY_EVERY_S == 0:
            _say(f"no step yet after {seconds:.0f} s")


def _children() -> list[int]:
    """The processes that this one has started; none where the system has no list of them."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(number) for own in lists for number in own.read_text().split()]


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
