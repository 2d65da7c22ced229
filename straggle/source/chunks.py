"""Groups of gradients that are merged by one call, which costs Python about as much as for one gradient.

A group is a run of a bucket's gradients, or of a stage's on a CUDA device, in the order in which backward finishes
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from straggle.backward.device import device_of
from straggle.backward.stages import Stage, StagePlan
from straggle.source.source import Slot

GROUP_BYTES = 2**20  # on the CPU: gradients of a larger group have left the cache before they are copied


class GradientChunks:
    """The groups of the gradients of these slots.

    ``ends``: the parameters that complete a group; if there are none, each gradient is merged by itself.
    ``stage_ends``: those that complete a stage.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots, self._device = slots, device_of(slots[0].device)
        self._streams: set[object] = set()
        self.ends: frozenset[int] = frozenset()
        self.stage_ends: frozenset[int] = frozenset()

    def note_stream(self) -> None:
        """Note the current stream, on which a gradient came while the plan is learned."""
        self._streams.add(self._device.queue())

    def follow(self, plan: StagePlan) -> None:
        """Form the groups of this plan; for a device with a queue one for each bucket, because few kernels matter most.

        A group may have several stages that share a message, because nothing can be sent before all of it is complete.
        Gradients on several devices or streams cannot be merged by one call: they form no groups.
        """
        self.stage_ends = frozenset(stage.parameters[-1] for stage in plan.stages)
        devices = {slot.device for slot in self._slots}
        if len(devices) == 1 and len(self._streams) <= 1:
            nbytes = [slot.nbytes for slot in self._slots]
            self.ends = group_ends(plan.buckets(), nbytes, math.inf if self._device.is_queued else GROUP_BYTES)


def group_ends(runs: Iterable[Sequence[Stage]], nbytes: Sequence[int], group_bytes: float) -> frozenset[int]:
    """The parameters that complete a group: the last of each run, and those that bring a group to ``group_bytes``.

    ``nbytes``: the bytes of each parameter.
    """
    ends = set()
    for run in runs:
        size = 0
        for index in (index for stage in run for index in stage.parameters):
            size += nbytes[index]
            if size >= group_bytes or index == run[-1].parameters[-1]:
                ends.add(index)
                size = 0
    return frozenset(ends)
