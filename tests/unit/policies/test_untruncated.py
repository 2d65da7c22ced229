"""What a step would have taken a rank that was stopped."""

import math

import pytest

from straggle.policies.untruncated import Mark, UntruncatedTime, untruncated_step, untruncated_time

NEVER = [math.nan] * 16


def test_step_that_no_rank_finished_takes_at_least_what_it_took():
    # as where the members change, and all that was on its way is lost: there is no peer to compare with
    times = untruncated_step([0.5, 0.25], [False, False], [1, 1], [NEVER, NEVER], [[math.nan], [0.25]])
    assert times == [UntruncatedTime(0.5, at_least=True), UntruncatedTime(0.25, at_least=True)]


@pytest.mark.parametrize(
    ("own_s", "marks", "usual_s", "is_stuck", "seconds"),
    [
        (0.5, [(0.25, 0.2)], math.nan, False, 0.8),  # at the pace that it had
        (0.5, [(0.25, 0.2), (0.5, math.nan)], math.nan, False, 1.0),  # it had not come to the half
        (0.5, [(0.25, 0.2)], 1.2, False, 0.2 + 0.75 * 1.2),
        (0.5, [(0.25, 0.2)], 1.2, True, 0.5 + 0.75 * 1.2),  # it stands still since then
        (0.5, [], 1.2, False, 1.2),
        (1.5, [(0.25, 0.2)], 1.2, False, 1.5),  # at least what it took
    ],
)
def test_late_rank_goes_on_at_its_usual_pace_from_what_it_finished(own_s, marks, usual_s, is_stuck, seconds):
    marks = [Mark(*each) for each in marks]
    assert untruncated_time(own_s, marks, usual_s, is_stuck=is_stuck).seconds == pytest.approx(seconds)
