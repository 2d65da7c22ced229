"""Policies that decide when a rank is late: they see the telemetry of all ranks and return seconds."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, SupportsFloat, final, get_args

import torch
from torch import Tensor

from straggle.policies.history import History

Granularity = Literal["stage", "microbatch", "step"]
LateBy = Literal["host", "device"]

# The stand-in looks every 2 ms, and a thread may wait 5 ms for the interpreter's lock.
_LEAST_GRACE_S, _MOST_GRACE_S, _GRACE_SHARE = 0.005, 0.05, 0.1


@dataclass(frozen=True)
class NextDeadline:
    """A policy's decision: the ``seconds`` of the next step, infinite to wait for all ranks.

    ``predicted_drop``: the share of the gradients that it expects to be dropped in it; NaN if unknown.
    ``after_quorum_s``: seconds that a rank has in any case after a quorum has finished, if that is more than the
    policy's ``grace_s``.
    """

    seconds: float
    predicted_drop: float = math.nan
    after_quorum_s: float = 0.0


class Deadline(ABC):
    """Seconds that a rank may use for a step, counted from entering ``step()``.

    A policy is a function of the history alone. So every rank gets the same answer, and a resumed run the same one as
    an uninterrupted run. ``window``: how many steps of history it needs. ``wants_progress``: whether it uses more than
    times (`History.progress`).

    ``quorum``: how many ranks must have finished before another is late, instead of `LateHandling.quorum`. ``grace_s``:
    seconds from then until it is late. ``enforced``: whether ranks are stopped; if not, the report has what would have
    happened.
    """

    window: int = 1
    wants_progress: bool = False
    quorum: int | None = None
    grace_s: float = 0.0
    enforced: bool = True

    def prepare(self, late_handling: LateHandling, parts: Sequence[int] = ()) -> None:  # noqa: B027
        """Learn how late ranks are treated; called before any rank can be late, and when the stages are planned again.

        ``parts``: the number of gradients, of about the same size, in which each stage comes.
        """

    @abstractmethod
    def decide(self, history: History) -> NextDeadline | float:
        """The deadline of the next step; a plain number is its seconds, infinite to wait for all ranks."""


@final
class FixedDeadline(Deadline):
    """The same ``budget_s`` seconds for every step after ``warmup_steps``."""

    def __init__(self, budget_s: float, *, warmup_steps: int = 1) -> None:
        if not is_number(budget_s) or not budget_s > 0:
            raise ValueError(f"budget_s={budget_s}: a deadline needs a positive number of seconds (or deadline=None)")
        check_count("warmup_steps", warmup_steps)
        self.budget_s = float(budget_s)
        self.warmup_steps = warmup_steps

    def decide(self, history: History) -> float:
        return math.inf if history.num_steps < self.warmup_steps else self.budget_s


@final
class QuantileDeadline(Deadline):
    """``slack`` times the ``q`` quantile of all ranks' compute times over the last ``window`` steps.

    ``q=0.9, slack=1.2`` means: of all ranks and steps, nine in ten would be in time with a fifth to spare. With one
    slow rank among four, a quarter of all times is slow: ``q`` must lie below 0.75 for that rank ever to be late.
    A stopped rank counts with the time at which it was stopped. ``slack`` is at least 1, so a deadline that has become
    too tight for all ranks widens by itself.
    """

    def __init__(self, q: float, slack: float = 1.2, *, window: int = 50, warmup_steps: int = 10) -> None:
        if not is_number(q) or not 0 <= q <= 1:
            raise ValueError(f"q={q}: a quantile lies between 0 and 1, such as 0.5 for the median")
        check_number("slack", slack, least=1, such_as="1.2; with less the deadline shrinks from step to step")
        check_count("window", window, least=1)
        check_count("warmup_steps", warmup_steps, least=1)
        self.q = q
        self.slack = slack
        self.window = window
        self.warmup_steps = warmup_steps

    def decide(self, history: History) -> float:
        if history.num_steps < self.warmup_steps:
            return math.inf
        return self.slack * quantile_of(history.compute_s, self.q)


@final
class FirstK(Deadline):
    """A rank is late ``grace_s`` seconds after ``k`` ranks have finished the step.

    The rule of backup workers (Chen et al. 2016, "Revisiting distributed synchronous SGD", section 3) and, with ``k``
    just above half of the ranks, of eager-SGD's majority (PPoPP 2020, section 4); here a late rank keeps what it has.
    Every rank reports to the job's store that it has finished, and a running rank asks the store every few
    milliseconds. It begins to ask after 0.8 of the shortest time in which ``k`` ranks finished one of the last steps.
    """

    window = 10

    def __init__(self, k: int, *, grace_s: float = 0.0, warmup_steps: int = 1) -> None:
        check_count("k", k, least=1)
        check_count("warmup_steps", warmup_steps, least=1)
        check_number("grace_s", grace_s, least=0, such_as="0.05 for seconds")
        self.quorum = k
        self.grace_s = grace_s
        self.warmup_steps = warmup_steps

    def decide(self, history: History) -> float:
        if history.num_steps < self.warmup_steps:
            return math.inf
        own_s = history.compute_s.where(history.finished, math.inf).nan_to_num(math.inf, posinf=math.inf)
        finished_s = float(own_s.kthvalue(min(self.quorum or 1, own_s.shape[1]), dim=1).values.min())
        return 0.8 * finished_s if finished_s < math.inf else 0.0


@final
class WaitForAll(Deadline):
    """No deadline: no rank is ever late, as with DDP."""

    def decide(self, history: History) -> float:  # noqa: ARG002
        return math.inf


@dataclass(frozen=True)
class LateHandling:
    """How a late rank is treated.

    No rank is late before ``quorum`` ranks have finished the step (default: half of them, at least one). A late rank
    that does not submit its gradients within another ``grace_s`` seconds is stood in for (default: a tenth of its
    deadline, from 5 to 50 ms; with micro-batches 50 ms). At most ``max_lag`` merged steps wait for a rank that is
    stuck, each with one copy of the gradients in memory; beyond that its peers wait or, with members that come and go
    (`Elastic`), it takes a peer's state when it is back. With 0 its peers always wait.

    A rank that is in a step, or gives no sign of life, is given up after ``give_up_s`` seconds, and the job ends. One
    that works outside of a step, such as on an evaluation, is waited for as long as the time limit of the process group
    is, if that is more; one in `StagedDataParallel.pause` without a limit.

    ``granularity`` is what a late rank drops: the stages that it has not finished ("stage"), the micro-batches that
    it has not begun ("microbatch", as DropCompute does; give a micro-batch's time as ``grace_s`` then, because a rank
    that is stood in for submits what it has of the running one), or all that it has ("step", as backup workers do; the
    merge then begins only when a rank has finished, and does not overlap with its backward pass).

    ``late_by``: whose clock decides that a rank is late; on the CPU both are the same. With "host" its host never waits
    for a CUDA device, and a rank is late if its loop is. With "device" it is late if its device is: times are the
    device's, and the host of a rank that is expected to be late stays at most one stage ahead, so that there is
    something to stop.

    ``stuck_after_s``: a rank that has not gone on for so long, and is waited for, is reported with the line of code
    that it is in; infinite: none is.
    """

    quorum: int | None = None
    grace_s: float | None = None
    max_lag: int = 8
    give_up_s: float = 300.0
    granularity: Granularity = "stage"
    late_by: LateBy = "host"
    stuck_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.quorum is not None:
            check_count("quorum", self.quorum, least=1)
        check_count("max_lag", self.max_lag)
        if self.grace_s is not None and (not is_number(self.grace_s) or not self.grace_s >= 0):
            raise ValueError(f"grace_s={self.grace_s}: must be a number of seconds, and seconds cannot be negative")
        if not is_number(self.give_up_s) or not 1 <= self.give_up_s < math.inf:
            raise ValueError(f"give_up_s={self.give_up_s}: must be a finite number of seconds, at least 1")
        check_granularity(self.granularity)
        if self.late_by not in get_args(LateBy):
            raise ValueError(f"late_by={self.late_by!r}: choose one of {', '.join(get_args(LateBy))}")
        if not is_number(self.stuck_after_s) or not self.stuck_after_s > 0:
            raise ValueError(
                f"stuck_after_s={self.stuck_after_s}: must be a positive number of seconds, such as 10 (infinite: no "
                "rank is reported as stuck)"
            )

    @property
    def fixed_grace_s(self) -> float | None:
        """The grace that is no share of a deadline: the one that was given, or that of micro-batches; or ``None``.

        A micro-batch is what a late rank may finish, and a deadline does not say how long one takes.
        """
        return _MOST_GRACE_S if self.grace_s is None and self.granularity == "microbatch" else self.grace_s

    def grace_of(self, deadline_s: float) -> float:
        """The seconds after a deadline of ``deadline_s`` in which a late rank can still submit its gradients."""
        fixed_s = self.fixed_grace_s
        return min(max(_GRACE_SHARE * deadline_s, _LEAST_GRACE_S), _MOST_GRACE_S) if fixed_s is None else fixed_s

    def quorum_of(self, world_size: int, wanted: int | None = None) -> int:
        """The number of ranks that must have finished; ``wanted``: a policy's quorum, which takes precedence.

        Raises ``ValueError`` if there are not that many.
        """
        quorum = wanted or self.quorum
        if quorum is not None and quorum > world_size:
            raise ValueError(f"quorum={quorum}: there are only {world_size} ranks")
        return quorum or max(1, world_size // 2)

    def quorum_among(self, members: int, wanted: int | None = None) -> int:
        """`quorum_of`, if so many of the job's ranks are members: at most all of those."""
        quorum = wanted or self.quorum
        return max(1, members // 2) if quorum is None else min(quorum, members)


def next_deadline(policy: Deadline, history: History) -> NextDeadline:
    """The policy's decision. Raises ``ValueError``, with the policy's name, if it is not a number of seconds."""
    decided = as_next(policy.decide(history))
    seconds = _number(decided.seconds)
    if seconds >= 0:
        return NextDeadline(seconds, decided.predicted_drop, max(policy.grace_s, decided.after_quorum_s))
    raise ValueError(
        f"{name_of(policy)}.decide() gave {decided.seconds!r} for step {history.num_steps}: give a number of seconds "
        "of at least 0, or math.inf to wait for all ranks"
    )


def as_next(decided: NextDeadline | float) -> NextDeadline:
    """A policy's decision, which may be plain seconds, as a `NextDeadline`."""
    return decided if isinstance(decided, NextDeadline) else NextDeadline(decided)


def grace_after(deadline_s: Tensor, fixed_s: float | None) -> Tensor:
    """`LateHandling.grace_of` of many deadlines, of the same shape; ``fixed_s``: `LateHandling.fixed_grace_s`."""
    if fixed_s is None:
        return (_GRACE_SHARE * deadline_s).clamp(_LEAST_GRACE_S, _MOST_GRACE_S)
    return torch.full_like(deadline_s, fixed_s)


def _number(value: object) -> float:
    """A number of any kind, also a tensor of one element, as a float; NaN for anything else."""
    if type(value) is float:  # as in nearly every step; asking for a protocol takes 30 times as long
        return value
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
        return math.nan


def as_deadline(deadline: Deadline | float | None) -> Deadline:
    """The policy for a user's argument: a policy, a number of seconds, or ``None`` to wait for all ranks."""
    if deadline is None:
        return WaitForAll()
    if isinstance(deadline, Deadline):
        return deadline
    if isinstance(deadline, (int, float)) and not isinstance(deadline, bool):
        return FixedDeadline(float(deadline))
    raise TypeError(f"deadline={deadline!r}: give a straggle.Deadline, a number of seconds, or None")


def check_granularity(granularity: str, valid: Sequence[str] = get_args(Granularity)) -> None:
    """Raise ``ValueError`` for a granularity that is not in ``valid``."""
    if granularity not in valid:
        raise ValueError(f"granularity={granularity!r}: choose one of {', '.join(valid)}")


def quantile_of(values: Tensor, q: float) -> float:
    """The ``q`` quantile of the values that are not NaN, interpolated linearly; infinite if there are none.

    As ``torch.nanquantile``, in a quarter of its time: every step of every rank waits for this.
    """
    ordered: list[float] = values.flatten().sort().values.tolist()  # NaN comes last
    while ordered and math.isnan(ordered[-1]):
        ordered.pop()
    if not ordered:
        return math.inf
    index, part = divmod(q * (len(ordered) - 1), 1)
    below, above = ordered[int(index)], ordered[min(int(index) + 1, len(ordered) - 1)]
    return below + part * (above - below)


def name_of(policy: object) -> str:
    """A policy's class, with the class of the policy that it wraps, if any: ``DropBudget(QuantileDeadline)``."""
    inner = getattr(policy, "inner", None)
    return type(policy).__name__ if inner is None else f"{type(policy).__name__}({name_of(inner)})"


def is_number(value: object) -> bool:
    """Whether this is an int or a float; NaN counts, and a bool does not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_count(name: str, value: int, least: int = 0) -> None:
    """Raise ``ValueError`` for what is no integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value}: must be an integer of at least {least}")


def check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf, such_as: str) -> None:
    """Raise ``ValueError`` for what is no finite number of at least ``least`` that is more than ``above``."""
    if not is_number(value) or not (max(least, -sys.float_info.max) <= value < math.inf and value > above):
        where = f"above {above}" if above > -math.inf else f"from {least} on"
        raise ValueError(f"{name}={value}: must be a number {where}, such as {such_as}")
