"""A TorchX component: the training of ``straggle train`` on any scheduler that TorchX knows.

torchx run --scheduler local_cwd deploy/torchx/component.py:train --j 1x4 steps=100
torchx run --scheduler slurm deploy/torchx/component.py:train --j 4x8 run_dir=/a/shared/folder/run steps=10000
"""

from torchx import specs
from torchx.components.dist import ddp


def train(
    *keys: str, j: str = "1x4", image: str = "straggle", cpu: int = 2, gpu: int = 0, memory_mb: int = 4096
) -> specs.AppDef:
    """Train with straggle.

    Args:
        keys: key=value for straggle train
        j: nodes x workers on each
        image: of the container, where the scheduler uses one
        cpu: cores of a node
        gpu: GPUs of a node
        memory_mb: memory of a node
    """
    return ddp(
        "train",
        "resume=auto",
        *keys,
        m="straggle",
        name="straggle",
        j=j,
        image=image,
        cpu=cpu,
        gpu=gpu,
        memMB=memory_mb,
        env={"OMP_NUM_THREADS": str(max(1, cpu // int(j.rpartition("x")[2])))},
    )
