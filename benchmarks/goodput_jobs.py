"""How `benchmarks/members.py goodput` starts a job of each system, kills a rank of it, and reads what it wrote."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from goodput_ranks import RANKS
from members_job import Job, Tail

SCRIPT = str(Path(__file__).with_name("goodput_ranks.py"))


class Started:
    """A command, or several, in a folder of its own; each rank says there which process it is."""

    def __init__(self, *commands):
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self._processes = []
        self._closing = False
        for command in commands:
            self.start(command)

    def start(self, command, name="job", **environment):
        """One process more, whose output goes to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(self.folder)],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def kill(self, rank):
        """SIGKILL; false while there is no such process."""
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int((self.folder / "pids" / f"rank{rank}").read_text()), signal.SIGKILL)
            return True
        return False

    def running(self):
        """Whether it has not ended."""
        return any(process.poll() is None for process in self._processes)

    def end_at(self, step):
        """See `members_job.End`."""
        partial = self.folder / "end.partial"
        partial.write_text(str(step))
        partial.rename(self.folder / "end")

    def words(self):
        """What was said last."""
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))

    def close(self):
        """End what still runs, and remove the folder."""
        self._closing = True
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for path in (self.folder / "pids").glob("rank*"):  # torchrun's workers have sessions of their own
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        self._temporary.cleanup()


class OfStraggle(Job):
    """Under `straggle launch`."""

    def __init__(self):
        super().__init__(RANKS, SCRIPT, "straggle")

    def kill(self, rank):
        """SIGKILL; false while there is no such process."""
        return self.signal(rank, signal.SIGKILL)

    def running(self):
        """Whether it has not ended."""
        return self.process.poll() is None


class OfTorchrun(Started):
    """Under torchrun."""

    def __init__(self):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        super().__init__([*run, "--max-restarts", "100000", SCRIPT, "ddp"])


class OfForkingAgent(Started):
    """The agent of torchrun, whose workers are forks."""

    def __init__(self):
        super().__init__([sys.executable, SCRIPT, "ddp-forked"])


class OfTorchft(Started):
    """A lighthouse, and one process a replica that is started again as soon as it has ended."""

    def __init__(self, python):
        super().__init__()
        self._python = python
        self.start([python, SCRIPT, "lighthouse"], "lighthouse")
        until = time.monotonic() + 60
        while not (self.folder / "lighthouse").exists() and time.monotonic() < until:
            time.sleep(0.1)
        self._address = (self.folder / "lighthouse").read_text()
        self._keepers = [threading.Thread(target=self._keep, args=(rank,), daemon=True) for rank in range(RANKS)]
        for keeper in self._keepers:
            keeper.start()

    def _keep(self, rank):
        start, status = 0, -1
        while status != 0 and not self._closing:
            process = self.start(
                [self._python, SCRIPT, "torchft"],
                f"replica{rank}",
                REPLICA=str(rank),
                TORCHFT_LIGHTHOUSE=self._address,
                TORCHELASTIC_RESTART_COUNT=str(start),
            )
            status, start = process.wait(), start + 1

    def running(self):
        """Whether a replica runs."""
        return any(keeper.is_alive() for keeper in self._keepers)


class Steps:
    """The steps that the ranks of a job wrote, in the order in which they ended."""

    def __init__(self, folder):
        self._folder, self._tails = folder, {}
        self.lines = []  # (when it ended, step, useful, computed, rank)

    def read(self):
        """Take in what is new; the furthest step."""
        for path in self._folder.glob("steps.*"):
            rank = int(path.name.split(".")[1])
            self.lines += [(*line, rank) for line in self._tails.setdefault(path, Tail(path)).new()]
        return max((line[1] for line in self.lines), default=0)

    def num_at_work(self):
        """Ranks that ended a step in the last seconds; and in the last of them, how many gave their gradients."""
        now = time.time()
        recent = [line for line in self.lines if line[0] > now - 3.0]
        return min(len({line[-1] for line in recent}), round(max(recent)[2]) if recent else 0)
