"""Torch's random numbers by micro-batch, so that they are the same whichever rank computes it, and how often."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_numbers_of(seed: int, number: int, part: int = 0) -> Iterator[None]:
    """In this context torch's generators begin from a step's ``seed`` and a micro-batch's ``number``; then as before.

    ``part``: of that micro-batch's samples, if the ranks of a replica have some each. The generators are those of the
    CPU and, if CUDA is in use, of its present device.
    """
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []):
        own = _mixed(seed, number, part)
        torch.default_generator.manual_seed(own)
        if on_cuda:
            torch.cuda.manual_seed(own)
        yield


def _mixed(seed: int, number: int, part: int) -> int:
    """A seed of 63 bits: neighbouring ones would have generators that begin alike."""
    words = hashlib.sha256(f"{seed} {number} {part}".encode()).digest()
    return int.from_bytes(words[:8], "big") >> 1
