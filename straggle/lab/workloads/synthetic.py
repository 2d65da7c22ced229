"""A network of any width and depth on made-up data: for measurements where only the sizes matter.

The targets come from a fixed random linear map, so that training can be seen to work, too.
"""

import torch
from torch import Tensor, nn

from straggle.lab.workloads.workload import LabelledSamples, require_positive

_FEATURES = 32
_NUM_VALIDATION = 512


class Synthetic(LabelledSamples):
    """``depth`` residual blocks with ``8 * width**2`` parameters each; the defaults make about 10 million."""

    def __init__(self, *, width: int = 320, depth: int = 12, classes: int = 10, num_samples: int = 8192) -> None:
        require_positive(width=width, depth=depth, num_samples=num_samples)
        if classes < 2:
            raise ValueError(f"classes is {classes}; there must be at least 2 to tell apart")
        self.width = width
        self.depth = depth
        self.classes = classes
        generator = torch.Generator().manual_seed(0)
        teacher = torch.randn(_FEATURES, classes, generator=generator)
        x = torch.randn(_NUM_VALIDATION + num_samples, _FEATURES, generator=generator)
        y = (x @ teacher).argmax(-1)
        held, rest = slice(_NUM_VALIDATION), slice(_NUM_VALIDATION, None)
        super().__init__(training=(x[rest], y[rest]), validation=(x[held], y[held]))

    def model(self) -> nn.Module:
        blocks = [Block(self.width) for _ in range(self.depth)]
        model = nn.Sequential()
        model.add_module("embedding", nn.Linear(_FEATURES, self.width))
        model.add_module("blocks", nn.Sequential(*blocks))
        model.add_module("norm", nn.LayerNorm(self.width))
        model.add_module("head", nn.Linear(self.width, self.classes))
        return model


class Block(nn.Module):
    """A two-layer network whose output is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out
