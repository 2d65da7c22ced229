"""What a dropped gradient must bring: a deadline pays where it gains enough gradient per second for what it drops.

Gradient per second counts all gradients alike. But what a deadline drops are mostly those next to the input, and of the
ranks with most to do; on a machine that is busy with other work a little more per second is had for a sixth of all
gradients. So there is a price: the gain, for each share of the gradients that is dropped. With a price of 0.3, 0.1 is
dropped for a gain of 0.03 at least.
"""

from __future__ import annotations

LOW = 0.3  # where the ranks' times are independent, and their work is equal
# Where ranks have what they have time for, or share a busy machine: what is dropped of a slow rank, or a stalled one,
# brings five to eight times as much, the noise of such a machine 0.2 to 0.8 times, and less when it is tried.
HIGH = 3.0
EVEN = 1.0  # where much is gained: as much as is dropped
# Where ranks clearly share a machine and none stands out: what is late there now and then brings 3.1 to 4.8 times what
# is dropped. Random stalls of all ranks on such a machine bring 4.3 to 6 times.
HIGHEST = 5.0
CLEARLY = 0.25  # of a rank's own variance is common to all of them


def pays(gain: float, dropped: float, price: float) -> bool:
    """Whether a ``gain`` (0.1: a tenth more gradient per second) is worth the share that is dropped for it."""
    return gain >= price * dropped
