#!/usr/bin/env python3
"""One worker of a cluster whose workers may be killed and come back: one node of `straggle launch`.

STORE=host:port NODES=4 NODE_RANK=2 straggle-member key=value ...

STORE is where `straggle launch --store-only` runs. NODE_RANK is this worker's number, from 0: the same one when
it comes back. KEYS may have more keys, "steps=600 members.min_ranks=2". On SIGTERM it leaves after its step, or
the run ends with a checkpoint if too few would be left; GRACE_S is the time for that.
"""

import os
import shlex
import sys


def arguments() -> list[str]:
    """Those of `straggle launch`, from the environment and the command line."""
    try:
        store, nodes, node_rank = (os.environ[name] for name in ("STORE", "NODES", "NODE_RANK"))
    except KeyError as missing:
        sys.exit(f"set {missing}: STORE is host:port of the store, NODES the number of workers, NODE_RANK this one's")
    return [
        *("--nnodes", nodes, "--node-rank", node_rank, "--nproc-per-node", os.environ.get("WORKERS_PER_NODE", "1")),
        *("--external-store", "--rdzv-endpoint", store, "--grace-s", os.environ.get("GRACE_S", "10")),
        *("-m", "straggle", "train", "members=elastic", *sys.argv[1:], *shlex.split(os.environ.get("KEYS", ""))),
    ]


if __name__ == "__main__":
    os.execvp(sys.executable, [sys.executable, "-m", "straggle", "launch", *arguments()])
