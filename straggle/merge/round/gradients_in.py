"""Which gradients of a step are in, of which passes, and what is missing: counts, without a tensor.

Nothing here is thread-safe: the coordinator's lock guards it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

from straggle.merge.round.step_passes import Passes


class Usage:
    """In which backward passes of a step, by their number, each parameter has ever had a gradient.

    So a head that belongs to the second loss of a step is not counted as missing, or as a zero, in the first.
    """

    def __init__(self) -> None:
        self._over = 0  # passes that were over in any step, as a set of bits
        self._all = 0  # those that gave every parameter a gradient
        self._some: dict[int, int] = {}  # for each of the others' parameters
        self._placed: set[int] = set()  # parameters to which the loop has given gradients by itself

    def place(self, indices: Iterable[int]) -> None:
        """The loop has computed the gradients of these parameters by itself."""
        self._placed.update(indices)

    def awaits(self, index: int) -> bool:
        """Whether the loop gives parameter ``index`` its gradient, after all passes: until then it is no zero."""
        return index in self._placed and not (self._all or self._some.get(index))

    def add_all(self, number: int) -> None:
        """Pass ``number`` is over, and had a gradient for every parameter."""
        self._over |= 1 << number
        self._all |= 1 << number

    def add(self, indices: Iterable[int], number: int) -> None:
        """Pass ``number`` is over, and had gradients for these parameters and no others."""
        self._over |= 1 << number
        for index in indices:
            self._some[index] = self._some.get(index, 0) | 1 << number

    def by_hand(self, index: int) -> bool | None:
        """Whether a loop computes the gradient of parameter ``index`` by itself; ``None``: no pass was over so far."""
        return not (self._all or self._some.get(index)) if self._over else None

    def passes(self, index: int, num_passes: int) -> int:
        """The passes of a step in which parameter ``index`` may have a gradient, as a set of bits.

        One that was never over may have one, and all may if none ever had.
        """
        every, used = (1 << num_passes) - 1, self._all | self._some.get(index, 0)
        return (used | ~self._over) & every or every if used else every


class GradientsIn:
    """Those of one rank in one step. ``stage_parameters``: how many each stage has; ``max_over`` passes count as over.

    ``by_parameter``: for each the gradients that are in, one for each pass; ``last``: the number of the last of these
    passes. ``stage_s``: when each stage was complete. ``num_over``: passes that are over.
    """

    def __init__(
        self, num_parameters: int, stage_parameters: Sequence[int], usage: Usage, max_over: int | None
    ) -> None:
        self.by_parameter = [0] * num_parameters
        self.last = [-1] * num_parameters
        self.complete: set[int] = set()  # parameters of which all is in
        self.stage_s = [math.nan] * len(stage_parameters)
        self.num_over = 0
        self._usage = usage
        self._max_over = sys.maxsize if max_over is None else max_over
        self._num_in_pass = 0  # parameters whose gradient of the running pass is in
        self._num_dropped = 0  # gradients that were in, and are dropped with the whole step
        self._unused: dict[int, int] = {}  # for some parameters, the passes that are over without a gradient: bits
        self._missing = [*stage_parameters]  # how many of each stage are not complete

    @property
    def number(self) -> int:
        """Gradients that came in, over all passes, also if a whole step was dropped with them."""
        return sum(self.by_parameter) + self._num_dropped

    def taken(self, number: int) -> None:
        """So many gradients of the running pass are in the buffers and counted."""
        self._num_in_pass += number

    def begin_pass(self) -> None:
        """A pass begins; the one before it may have failed."""
        self._num_in_pass = 0

    def end_pass(self, number: int) -> None:
        """Pass ``number`` is over: what it gave no gradient to is a computed zero."""
        num_in, self._num_in_pass = self._num_in_pass, 0
        if self.num_over >= self._max_over:
            return
        self.num_over += 1
        if num_in == len(self.last):
            self._usage.add_all(number)
            return
        self._usage.add((index for index, last in enumerate(self.last) if last == number), number)
        for index, last in enumerate(self.last):
            if last != number:
                self._unused[index] = self._unused.get(index, 0) | 1 << number

    def placed(self, indices: Iterable[int]) -> None:
        """The loop has given these parameters their gradients of the entire step by itself."""
        self._usage.place(indices)

    def awaited(self) -> list[int]:
        """Parameters to which the loop has yet to give gradients, as it did in other steps."""
        return [index for index, count in enumerate(self.by_parameter) if not count and self._usage.awaits(index)]

    def given_by_hand(self, index: int) -> bool | None:
        """Whether no pass gives parameter ``index`` its gradient; ``None``: that is not known so far."""
        return self._usage.by_hand(index)

    def parameter_complete(self, index: int, stage: int, after_s: float) -> bool:
        """All of a parameter of this stage is in, ``after_s`` seconds into the step; true if all of the stage is."""
        self.complete.add(index)
        self._missing[stage] -= 1
        if self._missing[stage] > 0:
            return False
        self.stage_s[stage] = after_s
        return True

    def is_complete(self, num_stages: int) -> bool:
        """Whether nothing is missing of so many first stages."""
        return not any(self._missing[:num_stages])

    def shares(self, passes: Passes, *, all_or_nothing: bool) -> list[float]:
        """For each parameter the share of its passes that are in, or over without a gradient for it.

        ``all_or_nothing``: if anything is missing, what is in is dropped.
        """
        if not any(self._missing) and any(self.by_parameter):
            return [1.0] * len(self.by_parameter)
        shares = [self._share(passes, index, count) for index, count in enumerate(self.by_parameter)]
        if all_or_nothing and min(shares) < 1:
            self._num_dropped += sum(self.by_parameter)
            self.by_parameter = [0] * len(shares)
            shares = [0.0] * len(shares)
        return shares

    def _share(self, passes: Passes, index: int, num_in: int) -> float:
        if not num_in and self._usage.awaits(index):
            return 0.0
        may = self._usage.passes(index, passes.number)
        zeros = self._unused.get(index, 0) & may
        return passes.share(num_in + zeros.bit_count(), may.bit_count())
