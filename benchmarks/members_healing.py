"""What a step costs the peers while one rank is healed; see `benchmarks/members.py`.

In one run a rank is stopped and goes on, or is killed and comes back, in turns. So a drift of the machine meets all
phases of a turn: all ranks take part; the rank is missed (one long step, left out here); the peers are without it; it
is a member again and waits for its state. In the first step of the last phase new groups are formed, and the state is
copied. Times are those of rank 0, which gives the state.
"""

import itertools
import signal
import statistics
import time

from members_faults import end, start, wait_back, wait_for

USUAL_STEPS = 40
STOPPED_S = 4.0  # longer than the suspicion time
HOW = ("stopped", "killed")
PHASES = {
    "without it": ("without",),
    "while it heals": ("let in", "healing"),
    "of these the first, in which it is let in": ("let in",),
    "and the others": ("healing",),
}


def healing(ranks, turns, sleep_s, width, ballast_mb, preload):
    """Print the table; 1 where the job did not end well."""
    job = start(ranks=ranks, sleep_s=sleep_s, width=width, ballast_mb=ballast_mb, preload=preload)
    found = {how: [] for how in HOW}
    try:
        wait_for(job, 0, USUAL_STEPS)
        for turn in range(turns):
            how, rank = HOW[turn % 2], 1 + turn % (ranks - 1)
            found[how].append(_turn(job, rank, how))
        job.end_at(job.lines(0)[-1][1] + 40)
        parameters = end(job)
    finally:
        job.close()
    for how, own in found.items():
        if own:
            _show(how, own)
    print(f"parameters at the end: {parameters}")
    return int(parameters != "equal")


def _turn(job, rank, how):
    """The durations of rank 0's steps in the usual phase, without this rank, and while it is healed.

    And the time from when it was killed, or was let go on, to the end of the first step to which it has given.
    """
    begun = job.lines(0)[-1][1]
    wait_for(job, 0, begun + USUAL_STEPS)
    hit = job.lines(0)[-1][1]
    at = time.time()
    job.signal(rank, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "stopped":
        time.sleep(STOPPED_S)
        at = time.time()
        job.signal(rank, signal.SIGCONT)
    back = wait_back(job, rank, hit, of=0)
    lines = [line for line in job.lines(0)[1:] if begun < line[1] <= back]
    phases = {"usual": [], "without": [], "let in": [], "healing": [], "back": [lines[-1][0] - at]}
    for before, after in itertools.pairwise(lines):
        _, step, absent, silent = after
        if rank in absent and rank in before[2]:  # the first such step is the one in which it was missed
            phases["without"].append(after[0] - before[0])
        elif rank in silent and rank in before[2] + before[3]:
            phases["healing" if rank in before[3] else "let in"].append(after[0] - before[0])
        elif step <= hit:
            phases["usual"].append(after[0] - before[0])
    return phases


def _show(how, turns):
    usual = [statistics.median(own["usual"]) for own in turns]
    print(f"\none rank {how}, {len(turns)} turns; the usual step takes {1000 * statistics.median(usual):.0f} ms")
    back = sorted(own["back"][0] for own in turns)
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
