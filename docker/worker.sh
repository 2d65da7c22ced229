#!/bin/sh
# One worker of a cluster: torchrun in place of this shell, so that it gets the container's signals.
#
#   RENDEZVOUS=host:port NODES=4 straggle-worker key=value ...
#
# RENDEZVOUS names the worker that hosts the rendezvous, whichever starts first; ranks are given out as workers come.
set -eu
: "${RENDEZVOUS:?host:port of the worker that hosts the rendezvous}" "${NODES:?how many workers take part}"
exec torchrun \
  --nnodes $((NODES)) --nproc-per-node "${WORKERS_PER_NODE:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RENDEZVOUS_ID:-straggle}" \
  --rdzv-conf "join_timeout=${JOIN_TIMEOUT_S:-600},read_timeout=${JOIN_TIMEOUT_S:-600}" \
  -m straggle.train "$@"
