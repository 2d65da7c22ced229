"""What a dropped gradient must bring: a deadline pays where it gains enough gradient per second for what it drops.

Gradient per second counts all gradients alike. But what a deadline drops are mostly those next to the input, and of the
ranks with most to do; on a machine that is busy with other work a little more per second is had for a sixth of all
gradients. So what is dropped must bring half as much again: 0.1 dropped, a gain of 0.05 at least.
"""

from __future__ import annotations

_PRICE = 0.5  # gain, for each share of the gradients that is dropped


def gain_wanted(dropped: float, least_gain: float = 0.0) -> float:
    """The gain in gradient per second (0.1: a tenth more) for which a share of ``dropped`` may be dropped."""
    return max(least_gain, _PRICE * dropped)


def pays(gain: float, dropped: float, least_gain: float = 0.0) -> bool:
    """Whether a deadline that gains so much is worth what it drops."""
    return gain >= gain_wanted(dropped, least_gain)
