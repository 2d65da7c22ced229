"""Whose clock a rank's deadline counts by, for every way in which it comes to its step. No threads, no ranks."""

import pytest
from rounds import merged_round

from straggle.backward.clocks import Stopwatch
from straggle.merge.late.sides import Entry, MergeSide, TrainingSide

ENTERS_AT, MERGED_AT = 107.0, 104.0


def sides(clock):
    stopwatch = Stopwatch(lambda: clock[0])
    return TrainingSide(stopwatch), MergeSide(stopwatch)


def at_end_of_step(*, merges):
    """Both sides in step 1, whose step 0 was merged at `MERGED_AT`."""
    clock = [100.0]
    training, merging = sides(clock)
    training.enter(Entry(), 100.0, merging)
    training.leave(merges=merges)
    clock[0] = MERGED_AT
    with merging.lock:
        merging.merged(merged_round(merged_at=MERGED_AT, late=not merges))
    clock[0] = ENTERS_AT
    training.take(merged_round(merged_at=MERGED_AT, stood_in=not merges), ENTERS_AT)
    return training, merging


@pytest.mark.parametrize(
    ("merges", "clock_from"),
    [
        (True, ENTERS_AT),  # it took part in the merge, and was slow between two steps
        (False, MERGED_AT),  # its last step was ended without it
    ],
)
def test_clock_begins_with_the_peers_where_the_last_step_was_ended_without_the_rank(merges, clock_from):
    training, merging = at_end_of_step(merges=merges)
    training.enter(Entry(), ENTERS_AT, merging)
    assert (training.clock_from, training.entered_at) == (clock_from, ENTERS_AT)


def test_clock_of_a_rank_that_came_back_in_an_earlier_step_than_its_peers_is_its_own():
    training, merging = at_end_of_step(merges=False)
    with merging.lock:
        merging.merged(
            merged_round(1, merged_at=MERGED_AT + 1, late=True)
        )  # the next one, too: it has this step to walk through
    training.enter(Entry(), ENTERS_AT, merging)
    assert training.clock_from == ENTERS_AT


def test_clock_begins_anew_after_a_pause():
    training, merging = at_end_of_step(merges=False)
    training.begin_now(ENTERS_AT)
    merging.begin_now(ENTERS_AT)
    training.enter(Entry(), ENTERS_AT + 1, merging)
    assert training.clock_from == ENTERS_AT


def test_rank_that_is_let_in_has_its_peers_clock_in_its_first_step():
    clock = [100.0]
    training, merging = sides(clock)  # of a new process
    with merging.lock:
        merging.restore(5)
        merging.merged(merged_round(merged_at=MERGED_AT))
    training.restore(6)
    training.enter(Entry(), ENTERS_AT, merging)
    assert training.clock_from == MERGED_AT
