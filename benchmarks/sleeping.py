"""Layers that sleep for their work, a third of it forward: ranks which share few cores then do not contend for them."""

import time

import torch
from torch import nn


class Nap(torch.autograd.Function):
    """Sleeps for ``seconds`` of a pass, in both directions: backward computes two gradients for each output."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds / 3)
        return gradient, None


class Layer(nn.Module):
    """A linear layer whose pass takes ``seconds``, and ``sample_s`` more for each sample. Evaluations do not sleep."""

    def __init__(self, width, seconds, sample_s=0.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds, self.sample_s = seconds, sample_s

    def forward(self, x):
        if x.requires_grad:
            x = Nap.apply(x, self.seconds + self.sample_s * len(x))
        return torch.tanh(self.linear(x))


def sleeping_net(width, num_layers, seconds, sample_s=0.0):
    """A layer that does not sleep, and ``num_layers`` that share ``seconds`` and sleep ``sample_s`` for each sample."""
    layers = (Layer(width, seconds / num_layers, sample_s) for _ in range(num_layers))
    return nn.Sequential(nn.Linear(width, width), *layers)
