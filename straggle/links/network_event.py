"""A merge that takes many times as long as usual while all ranks have submitted: an event of the network."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

from straggle.policies.network.slow_links import MATTERS, SlowLink

TIMES = 5.0  # as long as usual
LONGER = 1.5  # times as long as usual, in a few merges: a link may have become slow
_FEW = 3
LEAST_S = 1.5  # below which no merge is long
UNEXPLAINED_S = 10.0  # from which on one is an event though no link is slow; a busy machine makes merges long, too
_REMEMBERED = 64  # merges
_ENOUGH = 5  # of them, to say what is usual


def long_after_s(usual_s: Sequence[float]) -> float:
    """From how many seconds on the network on a merge is long, if these were usual; infinite: not known."""
    return max(LEAST_S, TIMES * median(usual_s)) if len(usual_s) >= _ENOUGH else float("inf")


class LongMerge:
    """Looks now and then at the merge that is on its way, and describes each event once."""

    def __init__(self) -> None:
        self._usual_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = -1  # the step that was merged last,
        self._last_s = 0.0  # and its seconds
        self._said = -2  # the last step of the event that was described

    def merged(self, step: int, network_s: float) -> None:
        """``step`` is merged, and was so long on the network."""
        if step > self._last:
            self._last, self._last_s = step, network_s
            self._usual_s.append(network_s)

    def are_longer(self, step_s: float) -> bool:
        """Whether merges have become longer on the network, and steps of ``step_s`` with them."""
        lately, usual_s = list(self._usual_s)[-_FEW:], median(self._usual_s or [math.inf])
        return min(lately, default=0.0) > max(LONGER * usual_s, usual_s + MATTERS * step_s)

    def lasts(self, seconds: float) -> bool:
        """Whether the merge that has been on its way for so long is long, or the one before it was.

        Before it is known what is usual, as in a job that begins with a slow link, any that takes `LEAST_S` may be.
        """
        limit_s = long_after_s(self._usual_s) if len(self._usual_s) >= _ENOUGH else LEAST_S
        return max(seconds, self._last_s) >= limit_s

    def words(
        self,
        step: int,
        seconds: float,
        ask: Callable[[], Mapping[int, int | None]],
        slow: Collection[SlowLink],
    ) -> str | None:
        """What to log about the merge of ``step``, which has been on its way for ``seconds``; ``None``: nothing.

        ``ask()``: for each peer the last step that it has submitted; ``None``: it does not answer. If all answer, a
        merge that one of them has not submitted is no event of the network: that rank is waited for. If one does
        not, others may still be in the step before because of it. If no peer is given, nothing is known. Of several
        steps in a row only the first is described.
        """
        if seconds < long_after_s(self._usual_s):
            return None
        if self._said in (step, step - 1):
            self._said = step
            return None
        if not (submitted := ask()):
            return None
        if None not in submitted.values():
            if any(last is not None and last < step for last in submitted.values()):
                return None
            if not slow and seconds < UNEXPLAINED_S:
                return None
        self._said = step
        return _words(step, seconds, median(self._usual_s), submitted, slow)


def _words(
    step: int, seconds: float, usual_s: float, submitted: Mapping[int, int | None], slow: Collection[SlowLink]
) -> str:
    silent = [rank for rank, last in submitted.items() if last is None]
    if silent:
        why = f"ranks {silent} do not answer pings"
    elif slow:
        why = f"all ranks have submitted: {'; '.join(link.words() for link in slow)}"
    else:
        why = "all ranks have submitted and answer; no link is known to be slow"
    return (
        f"step {step}: the merge has been on the network for {seconds:.1f} s, where {1e3 * usual_s:.0f} ms are usual; "
        f"{why}"
    )
