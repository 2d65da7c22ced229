"""What a dropped gradient must bring: a deadline pays where it gains enough gradient per second for what it drops.

Gradient per second counts all gradients alike. But what a deadline drops are mostly those next to the input, and of the
ranks with most to do; on a machine that is busy with other work a little more per second is had for a sixth of all
gradients. So there is a price: the gain, for each share of the gradients that is dropped. With a price of 0.5, 0.1 is
dropped for a gain of 0.05 at least.
"""

from __future__ import annotations

EACH_FOR_ITSELF = 0.5  # where ranks have equal shares of the work
DEALT = 3.0  # where they have what they have time for: a stall brings eight times what is dropped of it, noise once
AFTER_QUORUM = 3.0  # of what is dropped because of the moment at which a quorum had finished


def pays(gain: float, dropped: float, price: float) -> bool:
    """Whether a ``gain`` (0.1: a tenth more gradient per second) is worth the share that is dropped for it."""
    return gain >= price * dropped
