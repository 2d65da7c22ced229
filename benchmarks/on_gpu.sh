#!/usr/bin/env bash
# All that only a GPU can show, in at most 15 minutes: its tests, then steps beside DDP's in two runs of turns.
#
# benchmarks/on_gpu.sh [FOLDER]        # writes one log for each part into FOLDER (default: runs/on_gpu)
#
# PYTHON names the interpreter (default: .venv/bin/python, or else python). GPT-2 needs transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/on_gpu}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=()

# part NAME SECONDS WORDS...: run it for at most so long, and go on
part() {
  local name=$1 limit_s=$2 began=$SECONDS status
  shift 2
  echo "== $name"
  timeout --kill-after 10 "$limit_s" "$python" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  echo "== $name: status $status after $((SECONDS - began)) s"
  [ "$status" = 0 ] || failed+=("$name ($status)")
}

part machine 30 -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())"
tests=(-m pytest -q -n0 -rs -p no:cacheprovider)
part sharded 180 "${tests[@]}" tests/cluster/test_gpu_sharded.py
part tests 240 "${tests[@]}" -m "not slow" tests/cluster/test_gpu.py tests/cluster/test_gpu_late.py
part members 60 "${tests[@]}" tests/cluster/test_gpu_members.py
workloads=(text)
"$python" -c "import transformers" 2>/dev/null && workloads+=(gpt2)
part turns-1 150 benchmarks/gpu.py "${workloads[@]}" --watched --rounds 12
part turns-2 150 benchmarks/gpu.py "${workloads[@]}" --watched --rounds 12
part waits 60 benchmarks/gpu.py text --rounds 4 --profile
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
