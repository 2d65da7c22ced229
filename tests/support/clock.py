"""Layers whose backward pass takes a known time, by a clock that only they move."""

import torch
from torch import nn


class Paced(nn.Module):
    """A linear layer whose backward pass takes ``seconds`` of a clock that stands still otherwise."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda _: self.clock.advance(self.seconds))
        return y


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def paced(seconds):
    """Linear layers that take these times, in the order of the forward pass, and the clock that they move."""
    clock = Clock()
    torch.manual_seed(0)
    return nn.Sequential(*(Paced(clock, s) for s in seconds)), clock
