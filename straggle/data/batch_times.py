"""What each rank took from batch to batch: from the end of a merge to the end of its own work in the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from straggle.merge.table import Table
from straggle.policies.untruncated import UntruncatedTime


class BatchTimes:
    """Follows the merged steps. Loading counts, and so does what a loop does between two steps.

    A rank that misses steps, as it is not there when these are merged, has loaded meanwhile: one batch or, as its loop
    is, one for each step. What it does between two steps it has done for each.
    """

    def __init__(self, world_size: int) -> None:
        # since the last step in which the rank took part
        self._data_s = [0.0] * world_size
        self._rest_s = [0.0] * world_size
        self._missed = [0] * world_size  # steps

    def of(self, table: Table, *, loads_missed: bool) -> list[UntruncatedTime]:
        """Of the next step, NaN for a rank that did not enter it; ``loads_missed``: a batch for each missed step."""
        away = table.missed_ranks()
        own_s = zip(table.column("busy_s"), table.column("data_s"), table.compute_s(), strict=True)
        times = []
        for rank, (whole, (busy_s, data_s, in_step_s)) in enumerate(zip(table.untruncated_times(), own_s, strict=True)):
            before_s = busy_s if rank in away else max(0.0, busy_s - in_step_s)
            self._data_s[rank] += min(data_s, before_s)
            self._rest_s[rank] += before_s - min(data_s, before_s)
            if rank in away:
                self._missed[rank] += 1
                times.append(UntruncatedTime(math.nan))
            else:
                times.append(UntruncatedTime(self._take(rank, loads_missed) + whole.seconds, whole.at_least))
        return times

    def _take(self, rank: int, loads_missed: bool) -> float:
        """Seconds before the step in which the rank takes part again."""
        each = 1 + self._missed[rank]
        seconds = self._data_s[rank] / (each if loads_missed else 1) + self._rest_s[rank] / each
        self._data_s[rank], self._rest_s[rank], self._missed[rank] = 0.0, 0.0, 0
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"data_s": list(self._data_s), "rest_s": list(self._rest_s), "missed": list(self._missed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._data_s, self._rest_s, self._missed = (list(state[name]) for name in ("data_s", "rest_s", "missed"))
