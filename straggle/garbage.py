"""`CollectGarbage`: all ranks collect Python's cyclic garbage after the same step, while its merge is on the way."""

from __future__ import annotations

import gc
import time
import weakref
from typing import final

from straggle.parallel import StagedDataParallel
from straggle.policies.deadline import check_count


@final
class CollectGarbage:
    """Python's cyclic garbage is collected after every ``every``-th step, on all ranks together, and at no other time.

    >>> garbage = straggle.CollectGarbage(model, every=100)

    Left to itself, Python collects when enough objects were made. Each rank does so in another step, and in each of
    them all ranks wait. Here a rank collects when it has submitted its part of the step, while the others' parts are on
    the way; one that was late or stood in for collects in the next step that it submits. What lives when the second
    collection ends is never looked at again (``gc.freeze``), which makes later ones short. Between two collections,
    cycles of objects stay in memory: lower ``every`` where that is too much.

    ``seconds``: what all collections took; ``count``: how many there were. `close` gives garbage back to Python when
    training is over; so does the end of the model's life.
    Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section
    5.4, "planned GC"; that it is done while the merge is on the way is ours.

    Raises ``ValueError`` for an ``every`` below 1.
    """

    def __init__(self, model: StagedDataParallel, *, every: int = 100) -> None:
        check_count("every", every, least=1)
        self._every = every
        self._collected_in = 0  # which stretch of ``every`` steps had its collection
        self.count = 0
        self.seconds = 0.0
        self._hook = model.register_submit_hook(self._submitted)
        self._finalizer = weakref.finalize(model, _collect_as_before, gc.isenabled())
        gc.disable()

    def close(self) -> None:
        """Collect as Python does it from here on."""
        self._hook.remove()
        self._finalizer()

    def _submitted(self, step: int) -> None:
        if (step + 1) // self._every == self._collected_in and self.count > 0:
            return
        self._collected_in = (step + 1) // self._every
        began_at = time.perf_counter()
        gc.collect()
        if self.count == 1:  # all that a training loop keeps has been made by then
            gc.freeze()
        self.count += 1
        self.seconds += time.perf_counter() - began_at


def _collect_as_before(was_enabled: bool) -> None:
    gc.unfreeze()
    if was_enabled:
        gc.enable()
