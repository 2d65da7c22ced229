"""What members cost, and what a rank that is killed or stopped costs its peers: real processes under `straggle launch`.

python benchmarks/members.py overhead --runs 5    # members on and off, in turns, nothing happens
python benchmarks/members.py faults --runs 3      # SIGKILL, and SIGSTOP for 5 s, of one rank of four

Four ranks, steps of about 50 ms of which most is sleep, 3.3 million parameters with Adam: 40 MB of state.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
WIDTH = 740  # six square layers of it: 3.3 million parameters
SLEEP_S = 0.03
WARMUP = 10


def work(steps: int, members: bool, folder: Path) -> None:
    """One rank: trains, and leaves when each step ended and a hash of the parameters at the end."""
    import hashlib

    import torch
    import torch.distributed as dist
    from torch import nn

    import straggle

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    model = straggle.StagedDataParallel(net, members=straggle.Elastic() if members else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    up_at = time.time()
    first = model.register_state(optimizer=optimizer)
    inputs = torch.ones(2, WIDTH)
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with (folder / f"steps.{rank}.{start}").open("w") as file:
        print(json.dumps([up_at, first]), file=file)
        for step in range(first, steps):
            with model.step():
                time.sleep(SLEEP_S)
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.last_report is not None
            absent = [own.rank for own in model.last_report.ranks if own.absent]
            print(json.dumps([time.time(), step, absent]), file=file, flush=True)
    content = hashlib.sha256()
    for parameter in net.parameters():
        content.update(parameter.detach().numpy().tobytes())
    (folder / f"hash.{rank}").write_text(content.hexdigest())
    model.close()


class Job:
    """A job under `straggle launch`, in a folder of its own."""

    def __init__(self, steps: int, *, members: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        command = [sys.executable, "-m", "straggle", "launch", "--nproc-per-node", str(RANKS), "--run-dir"]
        command += [str(self.folder), "--restart-delay-s", "0.1", __file__, "work", "--steps", str(steps)]
        command += ["--folder", str(self.folder), "--members", str(int(members))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._words = (self.folder / "words").open("w+")
        self.process = subprocess.Popen(command, env=environment, stderr=self._words)

    def pid(self, rank: int) -> int:
        return int((self.folder / "pids" / f"rank{rank}").read_text())

    def steps(self, rank: int, start: int = 0) -> list[list]:
        """When this rank came up and where it began, and then its steps."""
        path = self.folder / f"steps.{rank}.{start}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, rank: int, count: int) -> None:
        while len(self.steps(rank)) < count:
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended early, with status {self.process.returncode}")
            time.sleep(0.05)

    def end(self) -> str:
        """Wait for the job; "equal" where all ranks have the same parameters."""
        status = self.process.wait(timeout=300)
        if status:
            self._words.seek(0)
            print(self._words.read(), file=sys.stderr)
        hashes = {path.read_text() for path in self.folder.glob("hash.*")}
        self._folder.cleanup()
        return f"status {status}" if status else "equal" if len(hashes) == 1 else "DIFFERENT"


def durations(steps: list[list]) -> list[float]:
    ends = [step[0] for step in steps[1 + WARMUP :]]
    return [after - before for before, after in itertools.pairwise(ends)]


def overhead(runs: int, steps: int) -> None:
    medians: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(runs):
        for members in random.sample([True, False], 2):
            job = Job(steps, members=members)
            job.wait_for(0, steps + 1)
            medians[members].append(statistics.median(durations(job.steps(0))))
            job.end()
    ratios = sorted(on / off for on, off in zip(medians[True], medians[False], strict=True))
    for members, own in medians.items():
        print(f"members {'on ' if members else 'off'} {1000 * statistics.median(own):7.1f} ms, median of {runs} runs")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def faults(runs: int, steps: int) -> None:
    for name, sent, away_s in (("SIGKILL", signal.SIGKILL, 0.0), ("SIGSTOP for 5 s", signal.SIGSTOP, 5.0)):
        for rank in [2, 0, 3, 1][:runs]:
            job, peer = Job(steps), (rank + 1) % RANKS
            job.wait_for(rank, 40)
            pid, at = job.pid(rank), time.time()
            os.kill(pid, sent)
            if away_s:
                time.sleep(away_s)
                os.kill(pid, signal.SIGCONT)
            job.wait_for(peer, steps + 1)
            of_peer = job.steps(peer)
            longest = max(durations(of_peer))
            usual = statistics.median(durations(of_peer[:40]))
            back = next((end for end, _, absent in of_peer[1:] if end > at + 1 and rank not in absent), float("nan"))
            during = [after[0] - before[0] for before, after in itertools.pairwise(of_peer[1:]) if rank in after[2]]
            began = job.steps(rank, 1)[0][0] if not away_s else at + away_s
            print(
                f"{name} of rank {rank}: its peers' longest step {longest:.2f} s (usual {usual:.3f} s, without it "
                f"{statistics.median(during):.3f} s); it takes part again {back - began:.2f} s after it was up; "
                f"parameters {job.end()}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "faults", "work"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--members", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "work":
        work(options.steps, bool(options.members), options.folder)
    else:
        {"overhead": overhead, "faults": faults}[options.what](options.runs, options.steps)


if __name__ == "__main__":
    main()
