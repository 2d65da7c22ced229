"""What members cost, and what ranks that die, freeze and come back cost their peers: real processes.

python benchmarks/members.py overhead --ranks 2                   # members on and off, in turns, nothing happens
python benchmarks/members.py faults --runs 3                      # SIGKILL, and SIGSTOP for 5 s, of one rank of four
python benchmarks/members.py healing --turns 20                   # a step of the peers while one rank is healed
python benchmarks/members.py healing --ranks 2                    # on two cores: one for each rank
python benchmarks/members.py soak --steps 20000 --changes 200     # hundreds of changes; status 1 if anything is wrong
python benchmarks/members.py goodput --torchft-python PATH        # useful steps under random kills, beside DDP

`healing`, `soak` and `goodput` have a form of less than three minutes: --quick. The first three have four ranks, steps
of about 50 ms of which most is sleep, 3.3 million parameters with Adam: 40 MB of state.
"""

import argparse
import os
import signal
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="overhead, faults, healing, soak, goodput")
    options = kinds.add_parser("overhead")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=400, help="of each")
    options.add_argument("--sleep-s", type=float, default=0.03)
    options.add_argument("--width", type=int, default=740, help="of six square layers: 3.3 million parameters")
    options = kinds.add_parser("overhead-rank")
    options.add_argument("--folder", type=Path)
    options.add_argument("--steps", type=int)
    options.add_argument("--sleep-s", type=float)
    options.add_argument("--width", type=int)
    options = kinds.add_parser("faults")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--steps", type=int, default=40)
    options = kinds.add_parser("healing")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--sleep-s", type=float, default=0.04)
    options.add_argument("--width", type=int, default=740, help="of six square layers: 3.3 million parameters")
    options.add_argument("--ballast-mb", type=int, default=0, help="of state that is neither parameters nor Adam's")
    options.add_argument("--preload", action="store_true", help="workers are forked, and need not load torch")
    options.add_argument("--quick", action="store_true", help="4 turns")
    options = kinds.add_parser("soak")
    options.add_argument("--steps", type=int, default=20000)
    options.add_argument("--changes", type=int, default=200, help="how often a rank is put out, at least")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--variant", choices=("plain", "norm", "microbatches", "whole"), default="plain")
    options.add_argument("--preload", action="store_true", help="workers are forked, and need not load torch")
    options.add_argument("--quick", action="store_true", help="2,000 steps, 15 changes")
    options = kinds.add_parser("goodput")
    options.add_argument("--methods", default="straggle,torchrun,forking,torchft", help="those of these, in turn")
    options.add_argument("--seconds", type=float, default=240.0, help="time with kills")
    options.add_argument("--quiet-s", type=float, default=25.0, help="time without, before and after")
    options.add_argument("--start-s", type=float, default=5.0, help="from a process's start until it is up")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--torchft-python", help="a Python that has torchft")
    options.add_argument("--quick", action="store_true", help="straggle only, 60 s")
    options = kinds.add_parser("soak-rank")
    options.add_argument("--folder", type=Path)
    options.add_argument("--variant")
    options = kinds.add_parser("faults-rank")
    options.add_argument("--folder", type=Path)
    options.add_argument("--sleep-s", type=float)
    options.add_argument("--width", type=int)
    options.add_argument("--ballast-mb", type=int)
    options.add_argument("--pin", action="store_true")
    given = parser.parse_args()
    if not given.what.endswith("-rank"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a job is ended with its controller
    return COMMANDS[given.what](given)


def _overhead(given):
    from members_overhead import overhead

    return overhead(given.ranks, given.steps, given.sleep_s, given.width)


def _faults(given):
    from members_faults import faults

    return faults(given.runs, given.steps)


def _healing(given):
    from members_healing import healing

    turns = 4 if given.quick else given.turns
    return healing(given.ranks, turns, given.sleep_s, given.width, given.ballast_mb, given.preload)


def _soak(given):
    from members_soak import soak

    steps, changes = (2000, 15) if given.quick else (given.steps, given.changes)
    return soak(steps, changes, given.seed, given.variant, given.preload)


def _goodput(given):
    from members_goodput import goodput

    methods, seconds = given.methods.split(","), given.seconds
    if given.quick:
        methods, seconds = ["straggle"], 60.0
    return goodput(methods, seconds, given.quiet_s, given.start_s, given.seed, given.torchft_python)


def _soak_rank(given):
    from members_soak import rank_main

    rank_main(given.folder, given.variant)


def _faults_rank(given):
    if given.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    from members_faults import rank_main

    rank_main(given.folder, given.sleep_s, given.width, given.ballast_mb)


def _overhead_rank(given):
    from members_overhead import rank_main

    rank_main(given.folder, given.steps, given.sleep_s, given.width)


COMMANDS = {
    "overhead": _overhead,
    "faults": _faults,
    "healing": _healing,
    "soak": _soak,
    "goodput": _goodput,
    "soak-rank": _soak_rank,
    "faults-rank": _faults_rank,
    "overhead-rank": _overhead_rank,
}

if __name__ == "__main__":
    sys.exit(main())
