"""nanochat's base_train on four CPU ranks: rank 1 is slow, rank 3 is killed once and comes back; nobody waits for them.

In a clone of nanochat, with S the path of a checkout of straggle:

git checkout 92d63d4e && git apply --unidiff-zero $S/examples/nanochat/nanochat.patch
pip install torch numpy rustbpe tiktoken kernels wandb pyarrow filelock psutil requests
export NANOCHAT_BASE_DIR=/tmp/nanochat TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 PYTHONPATH=.:$S:$S/examples/nanochat
python $S/examples/nanochat/text.py && python -m scripts.tok_train --vocab-size 1024 --max-chars 1000000
python -m straggle launch --nproc-per-node 4 --preload nanochat.gpt,nanochat.tokenizer,wandb --module with_faults \\
    --device-type cpu --depth 4 --aspect-ratio 16 --head-dim 16 --max-seq-len 64 --device-batch-size 2 \\
    --total-batch-size 512 --window-pattern L --num-iterations 300 --eval-every -1 \\
    --core-metric-every -1 --sample-every -1

Without faults: --module scripts.base_train. nanochat has no CPU mode of several ranks; the patch makes one, with gloo.
"""

import os
import runpy
import signal
import time

from nanochat.gpt import Block
from torch.nn.modules.module import register_module_forward_pre_hook

RANK, IS_FIRST_START = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
SLOW, SLOW_S, KILLED, KILLED_AT = 1, 0.05, 3, 120  # the last counts blocks, of which a step has four
num_blocks = 0


def fault(module, _args):
    global num_blocks
    if isinstance(module, Block):
        num_blocks += 1
        if RANK == SLOW:
            time.sleep(SLOW_S)
        if RANK == KILLED and IS_FIRST_START and num_blocks == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    register_module_forward_pre_hook(fault)
    runpy.run_module("scripts.base_train", run_name="__main__")
