"""A job under `straggle launch` in a folder of its own, and what its ranks write there: one line of JSON a step."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class Job:
    """``script`` with ``arguments`` on so many ranks, which find the folder in ``--folder``; see `Lines`.

    ``end`` is the step before which all loops end, if it is known already. Workers load torch themselves, or are forked
    from a process that has (``preload``).
    """

    def __init__(self, ranks, script, *arguments, end=None, preload=False, spares=0, replica_size=1):
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        command = [sys.executable, "-m", "straggle", "launch", "--nproc-per-node", str(ranks), "--run-dir"]
        command += [str(self.folder), "--restart-delay-s", "0", "--max-restarts", "100000"]
        command += ["--preload", "torch,straggle"] if preload else []
        command += ["--spares", str(spares)] if spares else []
        command += ["--replica-size", str(replica_size)]
        command += ["--log-dir", str(self.folder / "logs"), script, *arguments, "--folder", str(self.folder)]
        if end is not None:
            self.end_at(end)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._words = (self.folder / "words").open("w+")
        self.process = subprocess.Popen(command, env=environment, stderr=self._words)

    def pid(self, rank):
        """The process of a rank; ``None`` between two."""
        try:
            return int((self.folder / "pids" / f"rank{rank}").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def signal(self, rank, number):
        """Whether there was a process to send a signal to."""
        pid = self.pid(rank)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def starts(self, rank):
        """How often this rank was started again."""
        return max((int(path.suffix[1:]) for path in self.folder.glob(f"steps.{rank}.*")), default=0)

    def lines(self, rank, start=0):
        """What a rank has written until now."""
        return read(self.folder / f"steps.{rank}.{start}")

    def end_at(self, step):
        """Where all loops end, see `End`; far enough ahead that no rank is there already."""
        partial = self.folder / "end.partial"
        partial.write_text(str(step))
        partial.rename(self.folder / "end")

    def words(self):
        """What the launcher said."""
        return (self.folder / "words").read_text()

    def spare_is_ready(self):
        """Whether one more has been ready than has taken a place."""
        return self.words().count("a spare is ready") > self.words().count("a spare takes its place")

    def logs(self):
        """What each rank's processes said, by name of the file."""
        return {path.name: path.read_text() for path in sorted((self.folder / "logs").rglob("*.log"))}

    def wait(self, limit_s=300):
        """The job's status; it is ended after ``limit_s``."""
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return self.stop()

    def hashes(self):
        """What the ranks that came to their end had there."""
        return {path.suffix[1:]: path.read_text() for path in self.folder.glob("hash.*")}

    def stop(self):
        """End what still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()  # which takes its workers with it
                self.process.wait()
        return self.process.returncode

    def close(self):
        """End what still runs, and remove the folder."""
        self.stop()
        self._words.close()
        self._folder.cleanup()


class End:
    """The step before which a loop ends, once the controller has said so."""

    def __init__(self, folder):
        self._path, self._step = folder / "end", None

    def reached(self, step):
        if self._step is None and step % 5 == 0 and self._path.exists():
            self._step = int(self._path.read_text())
        return self._step is not None and step >= self._step


class Lines:
    """What a rank writes: a line for each step, by this process."""

    def __init__(self, folder, rank):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._file = (folder / f"steps.{rank}.{start}").open("w")

    def write(self, *values):
        print(json.dumps([time.time(), *values]), file=self._file, flush=True)


class Tail:
    """The lines of a file that grows, each read once."""

    def __init__(self, path):
        self._path, self._place = path, 0

    def new(self):
        """Lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._place)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._place += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def read(path):
    """Its complete lines."""
    return Tail(path).new()


def digest(module):
    """A hash of all parameters and buffers."""
    import hashlib

    content = hashlib.sha256()
    for value in module.state_dict().values():
        own = value.to_local() if hasattr(value, "to_local") else value  # this rank's shard
        content.update(own.numpy().tobytes())
    return content.hexdigest()[:16]
