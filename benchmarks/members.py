"""What ranks that die, freeze and come back cost their peers: real processes under `straggle launch`.

python benchmarks/members.py faults --turns 20                    # SIGSTOP for 4 s, SIGKILL, SIGTERM of a rank in turns
python benchmarks/members.py faults --how told                    # SIGTERM alone: it leaves, and comes back
python benchmarks/members.py faults --ranks 2                     # on two cores: one for each rank
python benchmarks/members.py soak --minutes 180 --ranks 8         # thousands of faults; status 1 if anything is wrong
python benchmarks/members.py replicas --steps 500 --kills 10      # 3 replicas of 2 ranks, of which ranks are killed

The first two have a form of less than three minutes: faults --quick, soak --minutes 1.

`faults` has steps of about 50 ms of which most is sleep, 3.3 million parameters with Adam: 40 MB of state.
`benchmarks/step_time.py --members` has what members cost if nothing happens.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import members_faults
import members_replicas
import members_soak
import members_soak_rank


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="faults, soak, replicas")
    options = kinds.add_parser("faults")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--turns", type=int, default=20)
    options.add_argument("--quick", action="store_true", help="two turns of each")
    options.add_argument("--how", nargs="+", choices=members_faults.HOW, default=members_faults.HOW, help="in turns")
    options.add_argument("--preload", action="store_true", help="workers are forked, and need not load torch")
    options.add_argument("--spares", type=int, default=0, help="processes that take the place of one that was killed")
    for_ranks = kinds.add_parser("faults-rank")
    for_ranks.add_argument("--folder", type=Path)
    for_ranks.add_argument("--pin", action="store_true")
    for either in (options, for_ranks):
        either.add_argument("--sleep-s", type=float, default=0.04)
        either.add_argument("--width", type=int, default=740, help="of six square layers: 3.3 million parameters")
        either.add_argument("--ballast-mb", type=int, default=0, help="of state that is neither parameters nor Adam's")
    options = kinds.add_parser("replicas")
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--kills", type=int, default=10, help="processes that are killed, at least")
    options.add_argument("--replicas", type=int, default=3)
    options.add_argument("--shards", type=int, default=2, help="ranks of a replica")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--no-preload", action="store_true", help="each worker loads torch by itself")
    for_ranks = kinds.add_parser("replicas-rank")
    for_ranks.add_argument("--folder", type=Path)
    for either in (options, for_ranks):
        either.add_argument("--sleep-s", type=float, default=0.02)
    options = kinds.add_parser("soak")
    options.add_argument("--minutes", type=float, default=12.0)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument(
        "--changes", type=float, default=15.0, help="how often a rank is put out in a minute, at least"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--preload", action="store_true", help="workers are forked, and need not load torch")
    for_ranks = kinds.add_parser("soak-rank")
    for_ranks.add_argument("--folder", type=Path)
    for either in (options, for_ranks):
        either.add_argument("--variant", choices=("plain", "norm", "microbatches", "whole"), default="plain")
        either.add_argument(
            "--pace-s", type=float, default=0.003, help="of sleep in a step; more leaves cores to others"
        )
    return parser.parse_args()


def main():
    given = arguments()
    if given.what == "faults-rank":
        if given.pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
        return members_faults.rank_main(given.folder, given.sleep_s, given.width, given.ballast_mb)
    if given.what == "soak-rank":
        return members_soak_rank.rank_main(given)
    if given.what == "replicas-rank":
        return members_replicas.rank_main(given.folder, given.sleep_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a job is ended with its controller
    if given.what == "faults":
        return members_faults.faults(given)
    if given.what == "replicas":
        return members_replicas.replicas(given)
    return members_soak.soak(given)


if __name__ == "__main__":
    sys.exit(main())
