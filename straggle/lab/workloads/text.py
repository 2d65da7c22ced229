"""A small GPT that reads bytes: language modelling without a download and without a tokenizer.

It trains on any text; without a path, on the Python sources of the standard library, which every machine has.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from straggle.lab.workloads.workload import (
    Batch,
    Workload,
    classification_loss,
    classification_scores,
    require_positive,
)

_VOCABULARY = 256
_STANDARD_LIBRARY_BYTES = 8_000_000
_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
_EVALUATION_BATCH = 64


class Text(Workload):
    """Next-byte prediction by a GPT of ``depth`` blocks over windows of ``context`` bytes.

    The last ``validation_share`` of the files is held out (of the bytes, when there is one file) and scored on at most
    ``validation_windows`` windows of it, evenly spaced. The standard library differs between Python versions: for a
    comparison across machines, or ranks with different Pythons, give a path.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        context: int = 64,
        width: int = 64,
        depth: int = 6,
        heads: int = 4,
        validation_share: float = 0.05,
        validation_windows: int = 256,
    ) -> None:
        require_positive(context=context, width=width, depth=depth, heads=heads, validation_windows=validation_windows)
        if width % heads:
            raise ValueError(f"width {width} is not divisible by heads {heads}; use a multiple, such as {heads * 16}")
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share is {validation_share}; it must be between 0 and 1, such as 0.05")
        self.context = context
        self.width = width
        self.depth = depth
        self.heads = heads
        self.validation_windows = validation_windows
        training, validation = _split(_standard_library() if path is None else _texts(Path(path)), validation_share)
        self._training = _windows(training, context, "training", "more text or a smaller context")
        self._validation = _windows(validation, context, "validation", "a larger validation_share or more text")

    def model(self) -> nn.Module:
        return GPT(context=self.context, width=self.width, depth=self.depth, heads=self.heads)

    @property
    def num_samples(self) -> int:
        return len(self._training)

    def batch(self, indices: Tensor) -> Batch:
        return _shifted(self._training[indices])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return classification_loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        available = len(self._validation)
        count = min(self.validation_windows, available)
        windows = self._validation[torch.arange(count) * available // count]
        parts = (windows[start : start + _EVALUATION_BATCH] for start in range(0, count, _EVALUATION_BATCH))
        return classification_scores(model, map(_shifted, parts))


class GPT(nn.Module):
    """Transformer decoder with pre-norm blocks and learned positions: bytes (batch, time) to logits (batch, time, 256).

    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout, with a separate head
    instead of the transposed embedding, and with torch's initialization, from which a model of this size learns faster:
    a training loss of 1.9 instead of 2.5 after 300 steps of 32 windows.
    """

    def __init__(self, *, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each added to its normalized input's stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # batch, time, 3, heads, width / heads
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


def _shifted(windows: Tensor) -> Batch:
    """Inputs and, one byte later, targets, from windows of ``context + 1`` bytes."""
    windows = windows.long()
    return windows[:, :-1], windows[:, 1:]


def _windows(text: bytes, context: int, name: str, remedy: str) -> Tensor:
    """A uint8 view (windows, context + 1): each window's last byte is only a target, and the next one's first input."""
    if len(text) <= context:
        raise ValueError(f"the {name} text has {len(text)} bytes; context={context} needs {context + 1}: give {remedy}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def _split(texts: list[bytes], validation_share: float) -> tuple[bytes, bytes]:
    """Training and validation text, cut between files if there are several."""
    if len(texts) == 1:
        cut = round(len(texts[0]) * (1 - validation_share))
        return texts[0][:cut], texts[0][cut:]
    held_out = min(max(1, round(len(texts) * validation_share)), len(texts) - 1)
    return b"".join(texts[:-held_out]), b"".join(texts[-held_out:])


def _texts(path: Path) -> list[bytes]:
    """All text files at or below the path; files with NUL bytes are not text."""
    path = path.expanduser()
    if not path.exists():
        raise ValueError(f"text path not found: {path}; give a file or a folder, or none for Python's own sources")
    files = [path] if path.is_file() else _files(path)
    texts = [text for text in map(_read, files) if text and b"\0" not in text]
    if not texts:
        raise ValueError(f"no text in {path}: what it has is empty, hidden or binary; give another file or folder")
    return texts


def _standard_library() -> list[bytes]:
    """Python's own sources in the order of their paths, up to about 8 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, total = [], 0
    for file in _files(root, excluded=_NOT_STANDARD_LIBRARY, suffix=".py"):
        text = _read(file)
        total += len(text)
        if total > _STANDARD_LIBRARY_BYTES:
            break
        texts.append(text)
    if not texts:
        raise ValueError(f"this Python has no sources in {root}; give the path of a text file or folder")
    return texts


def _files(root: Path, *, excluded: frozenset[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    """Files below the root in the order of their relative paths, hidden ones and excluded folders left out."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        here = Path(folder).relative_to(root)
        found += [(here / name).as_posix() for name in names if name.endswith(suffix) and not name.startswith(".")]
    return (root / name for name in sorted(found))


def _read(file: Path) -> bytes:
    """The file's bytes, or none if it cannot be read, such as a broken link or a pipe."""
    try:
        return file.read_bytes() if file.is_file() else b""  # reading a pipe would wait for ever
    except OSError:
        return b""
