"""What a rank that is killed or stopped costs its peers; see `benchmarks/members.py`."""

import itertools
import os
import signal
import statistics
import time
from pathlib import Path

from members_job import End, Job, Lines, digest

RANKS = 4
WIDTH = 740  # of six square layers: 3.3 million parameters, 40 MB with Adam's state
WARMUP = 10


def rank_main(folder, sleep_s, width, ballast_mb):
    """One rank: trains, and leaves when each step ended and a hash of the parameters at the end."""
    import torch
    import torch.distributed as dist
    from sleeping import sleeping_net
    from torch import nn

    import straggle

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = sleeping_net(width, 5, sleep_s)
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    lines = Lines(folder, rank)
    lines.write(-1, [], [])  # it is up
    ballast = nn.Module()
    ballast.register_buffer("zeros", torch.zeros(ballast_mb << 18))
    step = model.register_state(optimizer=optimizer, ballast=ballast)
    inputs = torch.ones(2, width)
    end = End(folder)
    while not end.reached(step):
        with model.step():
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert report is not None
        absent = [own.rank for own in report.ranks if own.absent]
        lines.write(report.step, absent, [own.rank for own in report.ranks if own.reach == 0 and not own.absent])
        step = report.step + 1
    (folder / f"hash.{rank}").write_text(digest(net))
    model.close()


def start(steps=None, *, ranks=RANKS, sleep_s=0.03, width=WIDTH, ballast_mb=0, preload=False):
    """A job of such ranks; without ``steps`` until `Job.end_at`. Each has a core of its own, if there are enough."""
    script = str(Path(__file__).with_name("members.py"))
    words = ("--sleep-s", str(sleep_s), "--width", str(width), "--ballast-mb", str(ballast_mb))
    if ranks <= len(os.sched_getaffinity(0)):
        words += ("--pin",)
    return Job(ranks, script, "faults-rank", *words, end=steps, preload=preload)


def wait_for(job, rank, step):
    """Wait until a rank has made this step."""
    while not (lines := job.lines(rank, job.starts(rank))) or lines[-1][1] < step:
        if job.process.poll() is not None:
            raise SystemExit(f"the job ended early, with status {job.process.returncode}: {job.words()}")
        time.sleep(0.05)


def wait_back(job, rank, hit, *, of):
    """The first step after ``hit`` in which a rank gives gradients again, as rank ``of`` has it."""
    until = time.time() + 120
    while time.time() < until and job.process.poll() is None:
        was_absent = False
        for _, step, absent, silent in job.lines(of)[1:]:
            if step > hit:
                was_absent |= rank in absent
                if was_absent and rank not in absent + silent:
                    return step
        time.sleep(0.1)
    raise SystemExit(f"rank {rank} does not come back: {job.words()}")


def end(job):
    """Wait for the job; "equal" where all ranks have the same parameters."""
    status = job.wait()
    hashes = set(job.hashes().values())
    if status:
        print(job.words())
    job.close()
    return f"status {status}" if status else "equal" if len(hashes) == 1 else "DIFFERENT"


def durations(lines):
    """Seconds of each step."""
    return [after[0] - before[0] for before, after in itertools.pairwise(lines[1 + WARMUP :])]


def faults(runs, steps):
    """SIGKILL, and SIGSTOP for 5 s, of one rank of four; ``steps`` more when it is back."""
    for name, sent, away_s in (("SIGKILL", signal.SIGKILL, 0.0), ("SIGSTOP for 5 s", signal.SIGSTOP, 5.0)):
        for rank in [2, 0, 3, 1][:runs]:
            job, peer = start(), (rank + 1) % RANKS
            wait_for(job, rank, 40)
            pid, at = job.pid(rank), time.time()
            os.kill(pid, sent)
            if away_s:
                time.sleep(away_s)
                os.kill(pid, signal.SIGCONT)
            last = wait_back(job, rank, 40, of=peer) + steps
            job.end_at(last)
            wait_for(job, peer, last - 1)
            of_peer = job.lines(peer)
            longest = max(durations(of_peer))
            usual = statistics.median(durations(of_peer[:40]))
            back = next((own[0] for own in of_peer[1:] if own[0] > at + 1 and rank not in own[2]), float("nan"))
            during = [after[0] - before[0] for before, after in itertools.pairwise(of_peer[1:]) if rank in after[2]]
            began = job.lines(rank, 1)[0][0] if not away_s else at + away_s
            print(
                f"{name} of rank {rank}: its peers' longest step {longest:.2f} s (usual {usual:.3f} s, without it "
                f"{statistics.median(during):.3f} s); it takes part again {back - began:.2f} s after it was up; "
                f"parameters {end(job)}",
                flush=True,
            )
    return 0
