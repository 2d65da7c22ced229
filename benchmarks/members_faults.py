"""What a rank that is killed, stopped or told to end costs its peers, and its healing; see `benchmarks/members.py`.

In one run a rank is stopped and goes on, is killed and comes back, or gets SIGTERM, leaves and comes back, in turns.
So a drift of the machine meets all phases of a turn: all ranks take part; the rank is missed, which takes at most the
suspicion time; the peers are without it; it is a member again and waits for its state. In the first step of the last
phase new groups are formed, and the state is copied. Times are those of rank 0, which gives the state.
"""

import itertools
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from members_job import End, Job, Lines, digest

USUAL_STEPS = 40
STOPPED_S = 4.0  # longer than the suspicion time
HOW = ("stopped", "killed", "told")
START_AGAIN = 75  # so that the launcher starts a rank again that was told to end and has left
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "told": signal.SIGTERM}
PHASES = {
    "without it": ("without",),
    "while it heals": ("let in", "healing"),
    "of these the first, in which it is let in": ("let in",),
    "and the others": ("healing",),
}


def rank_main(folder, sleep_s, width, ballast_mb):
    """One rank: trains, and leaves when each step ended and a hash of the parameters at the end."""
    import torch
    import torch.distributed as dist
    from sleeping import sleeping_net
    from torch import nn

    import straggle
    from straggle.stop_signal import StopSignal

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
    with StopSignal() as stop:
        while not end.reached(step):
            with model.step() as current:
                stop.tell(current)
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = model.last_report
            absent = [own.rank for own in report.ranks if own.absent]
            lines.write(report.step, absent, [own.rank for own in report.ranks if own.reach == 0 and not own.absent])
            step = report.step + 1
            if stop.agreed(report):
                model.close()
                sys.exit(START_AGAIN)
    (folder / f"hash.{rank}").write_text(digest(net))
    model.close()


def faults(given):
    """Print the table; 1 where the job did not end well."""
    script = str(Path(__file__).with_name("members.py"))
    words = ["--sleep-s", str(given.sleep_s), "--width", str(given.width), "--ballast-mb", str(given.ballast_mb)]
    if given.ranks <= len(os.sched_getaffinity(0)):  # each has a core of its own
        words.append("--pin")
    job = Job(given.ranks, script, "faults-rank", *words, preload=given.preload, spares=given.spares)
    found = {how: [] for how in HOW}
    try:
        _wait_for(job, USUAL_STEPS)
        for turn in range(2 * len(given.how) if given.quick else given.turns):
            how, rank = given.how[turn % len(given.how)], 1 + turn % (given.ranks - 1)
            found[how].append(_turn(job, rank, how, given.spares))
        job.end_at(job.lines(0)[-1][1] + 40)
        status, hashes = job.wait(), set(job.hashes().values())
        if status:
            print(job.words())
    finally:
        job.close()
    for how, own in found.items():
        if own:
            _show(how, own)
    print(f"status {status}; parameters at the end: {'equal' if len(hashes) == 1 else 'DIFFERENT'}")
    return int(status != 0 or len(hashes) != 1)


def _wait_for(job, step):
    """Wait until rank 0 has made this step."""
    while not (lines := job.lines(0)) or lines[-1][1] < step:
        if job.process.poll() is not None:
            raise SystemExit(f"the job ended early, with status {job.process.returncode}: {job.words()}")
        time.sleep(0.05)


def _wait_back(job, rank, hit):
    """The first step after ``hit`` in which a rank gives gradients again, as rank 0 has it."""
    until = time.time() + 120
    while time.time() < until and job.process.poll() is None:
        was_absent = False
        for _, step, absent, silent in job.lines(0)[1:]:
            if step > hit:
                was_absent |= rank in absent
                if was_absent and rank not in absent + silent:
                    return step
        time.sleep(0.1)
    raise SystemExit(f"rank {rank} does not come back: {job.words()}")


def _seconds_to_end(pid, at):
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.002)
    return time.time() - at


def _turn(job, rank, how, spares):
    """The durations of rank 0's steps in each phase.

    "back": from when the rank was killed, or was let go on, to the end of the first step to which it has given.
    """
    begun = job.lines(0)[-1][1]
    _wait_for(job, begun + USUAL_STEPS)
    while spares and not job.spare_is_ready():
        time.sleep(0.1)
    hit = job.lines(0)[-1][1]
    at = time.time()
    pid = job.pid(rank)
    job.signal(rank, SIGNALS[how])
    exit_s = _seconds_to_end(pid, at) if how == "told" else math.nan
    if how == "stopped":
        time.sleep(STOPPED_S)
        at = time.time()
        job.signal(rank, signal.SIGCONT)
    back = _wait_back(job, rank, hit)
    lines = [line for line in job.lines(0)[1:] if begun < line[1] <= back]
    phases = {"usual": [], "missed": [], "without": [], "let in": [], "healing": [], "back": [lines[-1][0] - at]}
    phases["exit"] = [exit_s]
    for before, after in itertools.pairwise(lines):
        _, step, absent, silent = after
        if step <= hit:
            phase = "usual"
        elif rank in absent:
            phase = "without" if rank in before[2] else "missed"
        elif rank in silent and rank in before[2] + before[3]:
            phase = "healing" if rank in before[3] else "let in"
        else:
            phase = "missed"  # the last steps that it took part in, or in which it is waited for
        phases[phase].append(after[0] - before[0])
    return phases


def _show(how, turns):
    usual = [statistics.median(own["usual"]) for own in turns]
    print(f"\none rank {how}, {len(turns)} turns; the usual step takes {1000 * statistics.median(usual):.0f} ms")
    missed, back = (sorted(max(own[phase]) for own in turns) for phase in ("missed", "back"))
    print(f"  the longest step of a peer {statistics.median(missed):.2f} s ({missed[0]:.2f} to {missed[-1]:.2f})")
    ratios = sorted(second / base for second, base in zip((max(own["missed"]) for own in turns), usual, strict=True))
    print(f"  over the usual step {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    before = sorted(max(own["usual"][-len(own["missed"]) :]) / base for own, base in zip(turns, usual, strict=True))
    print(f"  and of as many before {statistics.median(before):.2f} ({before[0]:.2f} to {before[-1]:.2f})")
    if how == "told":
        ends = sorted(own["exit"][0] for own in turns)
        print(f"  its process has ended after {statistics.median(ends):.2f} s ({ends[0]:.2f} to {ends[-1]:.2f})")
    print(f"  it takes part again after {statistics.median(back):.2f} s ({back[0]:.2f} to {back[-1]:.2f})")
    for phase, names in PHASES.items():
        steps = [[second for name in names for second in own[name]] for own in turns]
        ratios = sorted(statistics.median(own) / base for own, base in zip(steps, usual, strict=True) if own)
        each = sorted(second / base for own, base in zip(steps, usual, strict=True) for second in own)
        if ratios:
            print(
                f"  {phase}: median step over the usual {statistics.median(each):.3f} ({len(each)} steps), by turn "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), longest {each[-1]:.2f}; "
                f"{statistics.median(map(len, steps)):g} steps a turn, "
                f"together {_beyond(steps, usual):.1f} ms a turn beyond the usual"
            )


def _beyond(steps, usual):
    """Milliseconds that the steps of a turn take more than as many usual ones, median over the turns that have any."""
    return 1000 * statistics.median(sum(own) - len(own) * base for own, base in zip(steps, usual, strict=True) if own)
