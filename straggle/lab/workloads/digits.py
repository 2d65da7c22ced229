"""Handwritten digits and a small convolutional network: a real task that trains in seconds on a CPU.

The data are the 1,797 images of 8 x 8 pixels that come with scikit-learn.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from straggle.extras import needs_extra
from straggle.lab.workloads.workload import Batch, LabelledSamples, require_positive

_NORM_GROUPS = 4
_IMAGE_SIZE = 8
_CLASSES = 10


class Digits(LabelledSamples):
    """Digits by ``depth`` convolutions of ``channels`` channels; ``seed`` chooses the held-out samples."""

    def __init__(self, *, channels: int = 16, depth: int = 6, validation_share: float = 0.2, seed: int = 0) -> None:
        require_positive(channels=channels, depth=depth)
        if channels % _NORM_GROUPS:
            raise ValueError(f"channels is {channels}; it must be a multiple of {_NORM_GROUPS}, such as 16")
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share is {validation_share}; it must be between 0 and 1, such as 0.2")
        self.channels = channels
        self.depth = depth
        x, y = _load()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held_out = min(max(1, round(len(x) * validation_share)), len(x) - 1)
        held, rest = order[:held_out], order[held_out:]
        super().__init__(training=(x[rest], y[rest]), validation=(x[held], y[held]))

    def model(self) -> nn.Module:
        blocks = [_block(self.channels if i else 1, self.channels) for i in range(self.depth)]
        model = nn.Sequential()
        model.add_module("blocks", nn.Sequential(*blocks))
        model.add_module("pool", nn.MaxPool2d(2))
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(self.channels * (_IMAGE_SIZE // 2) ** 2, _CLASSES))
        return model


def _block(channels_in: int, channels_out: int) -> nn.Module:
    # Not BatchNorm: its statistics would depend on how many ranks share a batch.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.GroupNorm(_NORM_GROUPS, channels_out),
        nn.ReLU(),
    )


def _load() -> Batch:
    """Images (samples, 1, 8, 8) with values from 0 to 1, and their digits."""
    numbers = _from_file()
    images, digits = (numbers[:, :-1], numbers[:, -1]) if numbers is not None else _from_library()
    return images.view(-1, 1, _IMAGE_SIZE, _IMAGE_SIZE) / 16, digits.to(torch.int64)


def _from_file() -> Tensor | None:
    """What `load_digits` reads, a digit after each image; importing scikit-learn takes two seconds in each process."""
    if (library := find_spec("sklearn")) is None or not library.submodule_search_locations:
        return None
    path = Path(library.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.exists():
        return None
    import numpy as np

    return torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))


def _from_library() -> tuple[Tensor, Tensor]:
    with needs_extra("train"):
        from sklearn.datasets import load_digits
    images, digits = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32), torch.tensor(digits)
