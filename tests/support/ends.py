"""python tests/support/ends.py HOW: a rank of a job that torchrun started; rank 1 ends after its third step.

HOW: "raises", "sys.exit", "loop is over", or "wraps" (it raises while it wraps its model).
"""

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from training import features, mlp

import straggle


class OfTheUser(straggle.Deadline):
    """Waits for all ranks, and fails on rank 1 when the model is wrapped."""

    @property
    def window(self) -> int:
        if dist.get_rank() == 1:
            raise ValueError("of the user's policy")
        return 1

    def decide(self, history: straggle.History) -> float:  # noqa: ARG002
        return math.inf


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = straggle.StagedDataParallel(mlp(), deadline=OfTheUser() if how == "wraps" else None)
    for number in range(6):
        if (rank, number) == (1, 3):
            if how == "raises":
                raise ValueError("of the user's loop")
            if how == "sys.exit":
                sys.exit(3)
            return
        with model.step():
            model(features(rank, number)).sum().backward()


if __name__ == "__main__":
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    main(sys.argv[1])
