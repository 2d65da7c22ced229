#!/usr/bin/env bash
# Set up on first use, then train on this machine or as one node of a cluster. ./launch.sh --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv

usage() {
  cat <<'HELP'
./launch.sh [key=value ...]           train: 4 workers, one always slow, one at times, on real text (a minute)
./launch.sh members=elastic faults=kill  one of them is killed; the others go on, and it comes back
./launch.sh parallel=sharded          the workers are two replicas of two shards; one is always slow, so its replica is late;
                                      with members=elastic faults=kill one is killed, and its replica comes back
./launch.sh compare [key=value ...]   the same job under DDP and straggle, or other methods=[...], in turns
./launch.sh simulate [key=value ...]  many ranks under a deadline, without a cluster
./launch.sh report RUN_DIR            a run as one HTML page; with compare=RUN_DIR two, side by side
./launch.sh test [pytest options]     run the tests that this machine can run, in parallel; or those of a folder or file
./launch.sh test fast [options]       the inner loop: tests of one process and light ones of ranks, about a minute
./launch.sh test coverage [options]   tests of one process and of ranks, and the lines and branches that they run
./launch.sh test sweep [key=value]    schedules of the simulated world: seeds=N, minutes=M (default: 1), first=SEED
./launch.sh test times [FILE]         what the tests of the last complete run took, or of one whose junit XML is FILE
./launch.sh COMMAND --help            the keys and their values

Environment
  WORKERS=4      workers on this machine (on a machine with GPUs: one for each)
  PYTHON=python3 the interpreter that the virtual environment .venv is made with
On a cluster, start it on every node; it takes torchrun's rendezvous from
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT     one node is the master, or
  NNODES, RDZV_ENDPOINT, RDZV_ID                  c10d rendezvous at host:port
  PET_NNODES, PET_NPROC_PER_NODE, ...             torchrun's own names for these, as Kubeflow sets them
and under `srun` (one task a node) the same from Slurm's variables.
HELP
}

# install EXTRA: the package with an extra, pinned, into .venv; does nothing if that is already there
install() {
  local stamp pins python=$venv/bin/python
  pins=$(cat "$here/pyproject.toml" "$here/constraints.txt" | cksum | cut -d' ' -f1)
  stamp=$venv/.installed-$1-$pins
  if [ -e "$stamp" ] || [ -e "$venv/.installed-dev-$pins" ]; then return; fi # dev has all extras
  if ! [ -x "$python" ]; then
    echo "setting up $venv (once, a minute or two)" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    # the one that comes with Python works too, and takes twice as long
    pip_install --upgrade pip || echo "going on with the pip that is there" >&2
  fi
  # torch first and by itself: a range in another package then never fetches a second build of it
  pip_install torch
  compile & # beside what follows, which leaves the other cores idle
  pip_install --editable "${here}[$1]"
  wait
  compile
  touch "$stamp"
}

# pip_install WHAT...: pinned, into .venv
pip_install() {
  "$venv/bin/python" -m pip install --quiet --no-compile --constraint "$here/constraints.txt" "$@" >&2
}

# what was installed, on all cores; pip would do it on one. Some packages have files that are no Python of this version
compile() {
  "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >&2 || true
}

# torchrun reads PET_NNODES and so on only for options that it is not given, and launch.sh gives it all of them
from_torchruns_variables() {
  local name given
  for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ENDPOINT RDZV_ID; do
    given=PET_$name
    if [ -z "${!name:-}" ] && [ -n "${!given:-}" ]; then declare -g "$name=${!given}"; fi
  done
  case ${PET_NPROC_PER_NODE:-auto} in *[!0-9]*) ;; *) WORKERS=${WORKERS:-$PET_NPROC_PER_NODE} ;; esac
}

# torchrun's arguments: this machine alone, or this node of a cluster
rendezvous() {
  if [ -n "${SLURM_STEP_ID:-}" ] && [ -z "${NNODES:-}" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  fi
  if [ "${NNODES:-1}" = 1 ]; then
    echo --standalone
  elif [ -n "${RDZV_ENDPOINT:-}" ]; then
    echo "--nnodes $NNODES --rdzv-backend c10d --rdzv-endpoint $RDZV_ENDPOINT --rdzv-id ${RDZV_ID:-straggle}"
  else
    : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR (the first node) or RDZV_ENDPOINT}" "${NODE_RANK:?0 on the master, then 1, 2, ...}"
    echo "--nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port ${MASTER_PORT:-29500}"
  fi
}

# launch_options WHERE: the same for straggle launch, which knows one form of rendezvous, an address
launch_options() {
  local address='' port=''
  while [ $# -gt 0 ]; do
    case $1 in
      --standalone) echo "$1" && return ;;
      --nnodes | --node-rank | --rdzv-endpoint) echo "$1 $2" ;;
      --master-addr) address=$2 ;;
      --master-port) port=$2 ;;
    esac
    shift 2
  done
  if [ "$address" ]; then
    echo "--rdzv-endpoint $address:$port"
  else
    echo "--node-rank ${NODE_RANK:?straggle launch needs it: 0 where the store is, then 1, 2, ...}"
  fi
}

# must_be WHAT NAME PATTERN: end with a sentence if the variable is set, and is something else
must_be() {
  local value=${!2:-}
  if [ -n "$value" ] && ! [[ $value =~ ^($3)$ ]]; then echo "$2=$value: give $1" >&2 && exit 2; fi
}

# checks the keys and starts the workers, so that Ctrl-C ends them in order: SIGINT is blocked before torch is loaded
at_terminal='import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
sys.stderr.write(f"{sys.argv[4]} with {sys.argv[1]} workers: they load torch, and then connect\n"); sys.stderr.flush()
from straggle.commands.launching.at_terminal import main; raise SystemExit(main(sys.argv[1:]))'

# run MODULE key=value ...: check the configuration once, and start the workers
run() {
  local name=$1 workers cores where nodes ranks='' word folder='' preload='' shards=''
  shift
  install train
  must_be "the number of workers on this machine, 1 or more" PET_NPROC_PER_NODE "[1-9][0-9]*|auto|cpu|gpu"
  from_torchruns_variables
  must_be "the number of nodes, or a range such as 1:4" NNODES "[1-9][0-9]*(:[1-9][0-9]*)?"
  must_be "this node's number, 0 to NNODES - 1" NODE_RANK "[0-9]+"
  must_be "a port, 1 to 65535" MASTER_PORT "[1-9][0-9]{0,4}"
  must_be "HOST:PORT, such as node0:29500" RDZV_ENDPOINT "[^/ ]+:[0-9]+"
  must_be "the number of workers on this machine, 1 or more" WORKERS "[1-9][0-9]*"
  nodes=${NNODES:-1}
  case " $* " in *" --"* | *" -h "*) exec "$venv/bin/python" -m straggle "$name" "$@" ;; esac
  workers=$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c . || true)
  workers=${WORKERS:-$((workers > 0 ? workers : 4))}
  if [ -n "${SLURM_STEP_ID:-}" ] && [ -z "${NNODES:-}" ]; then nodes=${SLURM_NNODES:-1}; fi
  case $workers$nodes in *[!0-9]*) ;; *) ranks=$((workers * nodes)) ;; esac # not known where torchrun finds them
  cores=$(getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > workers ? cores / workers : 1))}
  where=$(rendezvous)
  if [ "$where" = --standalone ] && [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  fi
  case " $* " in
    *" members=elastic "*) # each worker with an agent of its own: torchrun ends all of them when one dies
      folder=$(sed -n 's/^run_dir: *\([^ #]*\).*/\1/p' "$here/conf/$name.yaml") # for the workers' process ids
      for word in "$@"; do
        case $word in
          run_dir=*) folder=${word#run_dir=} ;;
          parallel=sharded) shards=${shards:-$(sed -n 's/^  shards: *\([0-9]*\).*/\1/p' "$here/conf/parallel/sharded.yaml")} ;;
          parallel.shards=*) shards=${word#parallel.shards=} ;;
        esac
      done
      if [ "$(uname)" = Linux ]; then preload=straggle.commands.$name; fi
      # shellcheck disable=SC2046,SC2086
      exec "$venv/bin/python" -c "$at_terminal" "$workers" "$ranks" $# "$name" "$@" \
        launch $(launch_options $where) --nproc-per-node "$workers" \
        ${shards:+--replica-size "$shards"} ${folder:+--run-dir "$folder"} ${preload:+--preload "$preload"} -m straggle "$name" "$@"
      ;;
  esac
  # shellcheck disable=SC2086  # several arguments on purpose
  exec "$venv/bin/python" -c "$at_terminal" "$workers" "$ranks" $# "$name" "$@" \
    torchrun $where --nproc-per-node "$workers" -m straggle "$name" "$@"
}

# run_tests [fast|coverage|times|sweep] [pytest options]: of pytest's options the last counts, so -n0 runs all in one process
run_tests() {
  local word cores files light level=${1:-} parallel=yes
  case $level in
    fast | coverage) shift ;;
    sweep)
      shift
      export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
      cd "$here" && exec "$venv/bin/python" tests/support/schedules.py "$@"
      ;;
    times)
      shift
      cd "$here" && exec "$venv/bin/python" tests/support/times.py "$@"
      ;;
  esac
  for word in "$@"; do
    case $word in *.py | *.py::*) parallel= ;; esac # one file runs in one process
  done
  cores=$(getconf _NPROCESSORS_ONLN)
  files=$((cores + 2)) # at once: tests wait for processes half of their time, and two more keep the cores busy
  case $level in
    fast)
      files=$cores
      # of ranks only the files with light ones: to import the others takes seconds, in each of the processes
      mapfile -t light < <(cd "$here" && grep -l 'mark\.light' tests/ranks/test_*.py)
      set -- tests/unit "${light[@]}" tests/docs/test_house.py -m "not slow and (not ranks or light)" "$@"
      ;;
    coverage) set -- tests/unit tests/ranks --cov --cov-report=term:skip-covered "$@" ;;
  esac
  if [ "$parallel" ]; then
    set -- --numprocesses $((files < 8 ? files : 8)) --dist loadfile --no-loadscope-reorder --junitxml .pytest_cache/junit.xml "$@"
  fi
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export PYTHONDONTWRITEBYTECODE= # else each of some two hundred processes compiles the package again, a second of CPU
  cd "$here" && exec "$venv/bin/python" -m pytest "$@"
}

case "${1:-}" in
  -h | --help | help) usage ;;
  test)
    shift
    install dev
    run_tests "$@"
    ;;
  report)
    shift
    install train
    exec "$venv/bin/python" -m straggle report "$@"
    ;;
  simulate)
    shift
    install train
    exec "$venv/bin/python" -m straggle simulate "$@"
    ;;
  compare | train) run "$@" ;;
  *) run train "$@" ;;
esac
