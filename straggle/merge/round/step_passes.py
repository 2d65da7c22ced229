"""The backward passes of one rank's step: how many they are, what each counts in the merge, and what ends their part.

``num_microbatches`` equal ones by default (`EqualPasses`). A wing may have passes of another kind, such as some that
become more while the step runs. Objects of these classes do not change: other passes are another object, and the
training thread and the stand-in exchange them under the lock of the merge.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from typing import TypeVar, final

from straggle.merge.rows.telemetry import Row

AnyPasses = TypeVar("AnyPasses", bound="Passes")


class Passes(ABC):
    """``number`` of them so far; ``is_open``: there may be more. A parameter is complete after ``most``.

    ``weight``: what the rank's gradient counts in the merge; ``own_weight``: the same in the unit of its telemetry.
    ``may_end_early``: what is complete may be known only when the rank's part is submitted. ``parts``: the numbers of
    the micro-batches, if they are some of those that all ranks share; ``None``: they are the loop's own.
    ``num_submitted``: how many of them the rank had when its part was submitted, if that is known already; otherwise
    ``number``.
    ``usual_number``: the number that the rank's deadline is in proportion to; NaN: it is that of any step.
    """

    follow_loop = True  # how many they are, what they count and when their data end is for the loop to say
    are_owed = False  # one that the loop leaves out is missing from the merge; otherwise its gradients are zeros
    parts: tuple[int, ...] | None = None

    def __init__(self, number: int, weight: float, *, is_open: bool = False, may_end_early: bool = False) -> None:
        self.number = self.num_submitted = number
        self.is_open, self.most = is_open, sys.maxsize if is_open else number
        self.weight = self.own_weight = weight
        self.may_end_early = may_end_early
        self.usual_number: float = number

    def weighed(self, weight: float) -> Passes:  # noqa: ARG002
        """The same with ``step.weight``."""
        return self

    def of_number(self, number: int) -> Passes:  # noqa: ARG002
        """As many as the loop says now."""
        return self

    def with_data(self, number: int) -> Passes:  # noqa: ARG002
        """Those that the loop has data for, at least one."""
        return self

    @abstractmethod
    def weight_of(self, number: int) -> float:
        """What the gradients of pass ``number`` count in the merge."""

    @abstractmethod
    def share(self, num_in: int, num_expected: int) -> float:
        """Which share of the step ``num_in`` gradients of a parameter are, of which ``num_expected`` may come."""

    def as_submitted(self) -> Passes:
        """The first ``num_submitted`` of them."""
        return self

    def check_none_by_hand(self) -> None:  # noqa: B027
        """Raise ``RuntimeError`` if gradients that the loop computes by hand cannot be weighed."""

    @property
    def give_back_at(self) -> float:
        """When the rank has been in a pass for so long that others may have those not begun; infinite: never."""
        return math.inf

    def give_back(self) -> Passes:
        """Give away those that are not begun; what is left."""
        return self

    def tell(self, row: Row, num_over: int) -> Row:  # noqa: ARG002
        """The rank's row with what only passes that have ``parts`` tell; ``num_over`` of them came."""
        return row


@final
class EqualPasses(Passes):
    """Passes that the loop announces, each with the weight of the step.

    ``data_share``: of those announced, if the loop's data end within the step: the rank gives less than its passes
    weigh, by so much.
    """

    def __init__(self, number: int = 1, pass_weight: float = 1.0, data_share: float = 1.0) -> None:
        super().__init__(number, pass_weight * data_share, may_end_early=data_share != 1.0)
        self.pass_weight, self.data_share = pass_weight, data_share

    def weighed(self, weight: float) -> EqualPasses:
        """Each counts so much."""
        return EqualPasses(self.number, weight, self.data_share)

    def of_number(self, number: int) -> EqualPasses:
        """More or fewer of them."""
        return EqualPasses(number, self.pass_weight, self.data_share)

    def with_data(self, number: int) -> EqualPasses:
        """The first ones: together they count less than all would have."""
        return EqualPasses(number, self.pass_weight, self.data_share * number / self.number)

    def weight_of(self, number: int) -> float:  # noqa: ARG002
        """That of the step."""
        return self.pass_weight

    def share(self, num_in: int, num_expected: int) -> float:
        """Those that are in, of those in which the parameter has a gradient."""
        return min(1.0, num_in / num_expected)


class StopRule:
    """Asked by the open step; the two answers depend on nothing else of it.

    ``by_clock``: lateness is that of the step itself. ``abstains``: what is finished is submitted, and nothing is
    estimated. ``stops_idle``: a rank without data goes on until the rule stops it.
    """

    by_clock, abstains, stops_idle = True, False, False

    def accepts(self, num_gradients: int) -> bool:  # noqa: ARG002
        """Whether a gradient may still go into the merge, as ``num_gradients`` did before it."""
        return True

    def stops(self, num_checks: int) -> bool:
        """Whether to leave the step now; it was asked ``num_checks`` times before."""
        raise NotImplementedError
