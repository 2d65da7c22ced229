"""What happens when a step ends, in order: two tables, of which each line is called with the step's round.

`MergedSteps` goes through the first when a round is merged, with the lock held, on whichever thread has waited for it.
`StagedDataParallel` goes through the second on the training thread, when that has left the step.
Parts of the core come first, each for the reason beside it, and wings (`wing.py`) after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from straggle.merge.round.round import Round

Phase = Callable[["Round"], object]


def when_merged(
    *,
    read: Phase,
    decide: Phase,
    record: Phase,
    keep: Phase,
    begin_next: Phase,
    stop_training: Phase,
    watch_next: Phase,
    wings: tuple[Phase, ...],
    links: tuple[Phase, ...] = (),
) -> tuple[Phase, ...]:
    """Of `MergedSteps`, under the lock."""
    return (
        read,  # the rows of all ranks: all that follows goes by them
        decide,  # the deadline of the next step; its own is noted first, for the report
        record,  # what happened: its seconds end now, and no part of the next step is in it
        keep,  # for the training thread to take, whatever `decide` raised
        begin_next,  # the merge is in the next step from here on, and whoever waits for this one may take it
        stop_training,  # if it is still in this step, or an earlier one, it comes to take the merge
        watch_next,  # by the deadline of the next step: the stand-in may have to look earlier than it planned
        *wings,  # who takes part in the next step, which must have begun
        *links,  # by which group it is merged
    )


def when_left(
    *,
    warn: Phase,
    count_drops: tuple[Phase, ...],
    say_drops: tuple[Phase, ...],
    end_loops: Phase,
    check_alike: Phase,
    plan_stages: Phase,
    compare: Phase,
    hooks: Phase,
    wings: tuple[Phase, ...],
    last: tuple[Phase, ...],
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Of `StagedDataParallel`, on the training thread: gradients are in place, and `last_report` is of this step.

    All of them, and those of a usual step (`Table.is_usual`), in which replicas are the same.
    """
    phases = (
        warn,  # what the loop seems to do wrong, before anything of the step may raise
        *count_drops,  # what ranks did not give, on the rank that says it
        *say_drops,  # in the log
        end_loops,  # over `join`, if no rank has data any more
        *wings,  # what they learn from the step
        check_alike,  # raises on all ranks alike, before they plan together
        plan_stages,  # all ranks together, before code of the user's may raise on one of them
        compare,  # whether replicas are the same, in words
        hooks,  # the user's
        *last,  # of wings: whether this rank's loop goes on, which may take long
    )
    return phases, tuple(phase for phase in phases if phase not in (check_alike, compare, *say_drops))
