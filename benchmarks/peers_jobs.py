"""How `benchmarks/peers.py` starts a job of each system, and what it does to one of its ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from members_job import Job
from peers_ranks import RANKS
from slow_uplink import family

SCRIPT = str(Path(__file__).with_name("peers_ranks.py"))
MAX_STARTS = 8  # of a rank: whoever is started so often does not come up


class Failed(Exception):
    """A job did not do what it was to do."""


class Started:
    """Commands in a folder of their own; each rank says there which process it is."""

    def __init__(self):
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._processes, self._closing, self._fails = [], False, False

    def start(self, command, name, **environment):
        """One process more, whose output goes to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(self.folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def pid(self, rank):
        """The process of a rank; ``None`` while there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.folder / "pids" / f"rank{rank}").read_text())
        return None

    def running(self):
        """Whether a process of it runs."""
        return not self._fails and any(process.poll() is None for process in self._processes)

    def words(self):
        """What was said last."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))

    def close(self):
        """End what still runs, and remove the folder."""
        self._closing = True
        own = [process.pid for process in self._processes if process.poll() is None]
        for pid in [each for process in own for each in reversed(family(process))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        with contextlib.suppress(OSError):
            self._temporary.cleanup()


class OfStraggle(Job):
    """Under `straggle launch`, with what docs/members.md starts it with."""

    def __init__(self):
        super().__init__(RANKS, SCRIPT, "straggle", preload=True, spares=1)

    def running(self):
        """Whether it has not ended."""
        return self.process.poll() is None


class OfTorchrun(Started):
    """DDP under torchrun, which starts all ranks again when one has died."""

    def __init__(self):
        super().__init__()
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        # or gloo finds addresses of the processes before in torchrun's store, and no restart succeeds (torch 2.13)
        self.start([*run, "--max-restarts", "1000", SCRIPT, "ddp"], "job", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class Kept(Started):
    """A process that has an address, and one a rank that is started again as soon as it has ended."""

    def __init__(self, what, coordinator, variable):
        super().__init__()
        self.start([sys.executable, SCRIPT, coordinator], coordinator)
        until = time.monotonic() + 60
        while not (self.folder / "address").exists() and time.monotonic() < until:
            time.sleep(0.1)
        if not (self.folder / "address").exists():
            words = self.words()
            self.close()
            raise Failed(f"its {coordinator} does not start: {words[-500:]}")
        self._what, self._address = what, {variable: (self.folder / "address").read_text()}
        self._keepers = [threading.Thread(target=self._keep, args=(rank,), daemon=True) for rank in range(RANKS)]
        for keeper in self._keepers:
            keeper.start()

    def _keep(self, rank):
        start, status = 0, -1
        while status != 0 and not self._closing:
            own = {"REPLICA": str(rank), "TORCHELASTIC_RESTART_COUNT": str(start), **self._address}
            process = self.start([sys.executable, SCRIPT, self._what], f"rank{rank}", **own)
            status, start = process.wait(), start + 1
            self._fails = start > MAX_STARTS


SYSTEMS = {
    "DDP": OfTorchrun,
    "torchft": lambda: Kept("torchft", "lighthouse", "TORCHFT_LIGHTHOUSE"),
    "local SGD": lambda: Kept("local", "lighthouse", "TORCHFT_LIGHTHOUSE"),
    "hivemind": lambda: Kept("hivemind", "first_peer", "FIRST_PEER"),
    "straggle": OfStraggle,
}
NEEDS = {"torchft": "torchft", "local SGD": "torchft", "hivemind": "hivemind"}


def missing(system):
    """Why a system cannot run in this environment; nothing if it can."""
    if system not in NEEDS:
        return ""
    tried = subprocess.run([sys.executable, "-c", f"import {NEEDS[system]}"], capture_output=True, text=True)
    return tried.stderr.strip().rpartition("\n")[2]


def send(job, rank, number):
    """A signal to a rank and to all that it has started, as if its machine were concerned."""
    if (pid := job.pid(rank)) is None:
        raise Failed(f"rank {rank} has no process")
    for each in family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
