#!/usr/bin/env python3
"""One worker of a cluster: torchrun that waits for the others, and that ends quickly and quietly when it is told to.

RENDEZVOUS=host:port NODES=4 straggle-worker key=value ...

RENDEZVOUS names the worker that hosts the rendezvous, whichever starts first; ranks are given out as workers come.
KEYS may have more of them, "steps=600 deadline.q=0.6".
"""

import os
import shlex
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main

try:
    endpoint, nodes = os.environ["RENDEZVOUS"], sum(map(int, os.environ["NODES"].split("+")))
except KeyError as missing:
    sys.exit(f"set {missing}: RENDEZVOUS to host:port of the worker that hosts the rendezvous, NODES to their number")
patience_s = os.environ.get("JOIN_TIMEOUT_S", "600")
arguments = [
    *("--nnodes", str(nodes), "--nproc-per-node", os.environ.get("WORKERS_PER_NODE", "1")),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", os.environ.get("RENDEZVOUS_ID", "straggle")),
    *("--rdzv-conf", f"join_timeout={patience_s},read_timeout={patience_s}"),
    *("-m", "straggle.train", *sys.argv[1:], *shlex.split(os.environ.get("KEYS", ""))),
]
try:
    main(arguments)
except SignalException as end:  # the training process has ended by now
    sys.stderr.flush()
    os._exit(128 + end.sigval)  # freeing what torch has loaded would take longer than training took to end
