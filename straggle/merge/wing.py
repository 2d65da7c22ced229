"""What an optional part of a wrapped model may do in each phase of a step: the core calls phases, and names no part.

| phase | when | thread | lock |
| --- | --- | --- | --- |
| `built` | the model is wrapped | training | no |
| `enter` | between two steps, before anything of the next one; it may wait | training | no |
| `entry` | this rank is about to enter a step with this | training | no |
| `plan` | the stages are planned after the first step, all ranks together | training | no |
| `stands_in` | the stand-in is about to submit what the training thread has finished | stand-in | yes |
| `submit` | this rank's row is written, and what is left of its part is launched next | either | yes |
| `leave` | the training thread's work for its step is over, and not yet submitted | training | yes |
| `rows_merged` | all ranks' rows are merged, and nobody has read them | either | yes |
| `rows_read` | they are read, the step was not usual (`Table.is_usual`), and no deadline is decided | either | yes |
| `merged` | the step is merged, and the next one has begun | either | yes |
| `taken` | the training thread takes a merged step | training | yes |
| `left` | gradients are in place, before the user's hooks | training | no |
| `last` | after them; it may wait | training | no |
| `failed` | code of the user's raised on this rank, or its estimator did | training | no |
| `close` | the model is closed | any | no |

`MergedSteps._publish` has the order of what the core does around those of a merge, and `building.py` that around
`left`. No phase is called for each gradient, and
none for a wing that does nothing in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol


class Departure(ABC):
    """How this rank's process ends while its peers go on, or with all of them if they cannot."""

    @abstractmethod
    def ask(self) -> None:
        """Note that this rank is to end soon; from any thread, also from a signal handler."""

    @property
    @abstractmethod
    def peers_go_on(self) -> bool:
        """Whether this rank has left, and its peers train on."""

    @abstractmethod
    def ends_after(self, step: int) -> bool:
        """Whether this rank's loop ends after this step, alone or with all others."""


if TYPE_CHECKING:
    from straggle.merge.late.sides import Entry
    from straggle.merge.round.round import Round
    from straggle.merge.rows.telemetry import Row
    from straggle.merge.wire.groups import ProcessGroups


class WaitsForMerge(Protocol):
    """When a closed round is merged; `Completion` waits for its messages and for nothing else."""

    def wait(self, current: Round, give_up_s: float | None, on_merged: Callable[[Round], None] | None) -> int | None:
        """Wait for all of it; the epoch that it was merged in, or ``None`` if the rank has given it up."""

    def is_current(self, epoch: int) -> bool:
        """Whether what was merged in this epoch may be published; with the lock held."""

    def groups_for(self, current: Round, epoch: int) -> ProcessGroups | None:
        """Among whom more may be sent of it before it is published; ``None``: nothing. With the lock held."""


class Wing:
    """An optional part: it overrides the phases in which it has something to do.

    ``option``: the argument that asked for it, for errors. ``completion``: what waits for the merge of a round, if that
    is more than for its messages. ``departure``: how this rank may end before the others. ``goes_on``: the peers go on
    without a rank that fails. ``keeps_stages``: while it is there, the stages stay as they were planned.
    """

    option = ""
    completion: WaitsForMerge | None = None
    departure: Departure | None = None
    goes_on = False
    keeps_stages = False

    def built(self) -> None:
        """The model is wrapped."""

    def enter(self) -> None:
        """Between two steps."""

    def entry(self, entry: Entry) -> Entry:
        """What this rank enters its step with."""
        return entry

    def plan(self) -> tuple[list[int], list[float]] | None:
        """What the stages are to be planned from, as `Planning.learned` has it; ``None``: from this run."""
        return None

    def stands_in(self) -> None:
        """Before the stand-in submits."""

    def submit(self, current: Round, row: Row) -> Row:  # noqa: ARG002
        """The row that goes with this rank's part, with the wing's own fields."""
        return row

    def leave(self) -> None:
        """Before the training thread submits."""

    def rows_merged(self, current: Round) -> None:
        """Before the rows are read."""

    def rows_read(self, current: Round) -> None:
        """Before anything follows from the rows, if they tell anything unusual."""

    def merged(self, current: Round) -> None:
        """The step is merged."""

    def taken(self) -> None:
        """The training thread takes a merged step."""

    def left(self, current: Round) -> None:
        """The training thread has left a step."""

    def last(self, current: Round) -> None:
        """The same, after the user's hooks."""

    def failed(self, what: str, error: BaseException) -> None:
        """This rank cannot go on with its step because of ``error``, as ``what`` explains."""

    def close(self) -> None:
        """The model is closed."""


class Wings:
    """Those of one model: for each phase, the methods of those that do something in it."""

    def __init__(self, *wings: Wing) -> None:
        self.built = _of(wings, Wing.built)
        self.enter = _of(wings, Wing.enter)
        self.entry = _of(wings, Wing.entry)
        self.plan = _of(wings, Wing.plan)
        self.stands_in = _of(wings, Wing.stands_in)
        self.submit = _of(wings, Wing.submit)
        self.leave = _of(wings, Wing.leave)
        self.rows_merged = _of(wings, Wing.rows_merged)
        self.rows_read = _of(wings, Wing.rows_read)
        self.merged = _of(wings, Wing.merged)
        self.taken = _of(wings, Wing.taken)
        self.left = _of(wings, Wing.left)
        self.last = _of(wings, Wing.last)
        self.failed = _of(wings, Wing.failed)
        self.close = _of(wings, Wing.close)
        self.completion = next((wing.completion for wing in wings if wing.completion is not None), None)
        self.departure = next((wing.departure for wing in wings if wing.departure is not None), None)
        self.go_on = any(wing.goes_on for wing in wings)
        self.keeps_stages = next((wing.option for wing in wings if wing.keeps_stages), "")


def _of(wings: tuple[Wing, ...], phase: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    name = phase.__name__
    return tuple(getattr(wing, name) for wing in wings if getattr(type(wing), name) is not phase)
