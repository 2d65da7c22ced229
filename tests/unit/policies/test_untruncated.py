"""What a step would have taken a rank that was stopped."""

import math

from straggle.policies.untruncated import UntruncatedTime, untruncated_step

NEVER = [math.nan] * 16


def test_step_that_no_rank_finished_takes_at_least_what_it_took():
    # as where the members change, and all that was on its way is lost: there is no peer to compare with
    times = untruncated_step([0.5, 0.25], [False, False], [1, 1], [NEVER, NEVER], [[math.nan], [0.25]])
    assert times == [UntruncatedTime(0.5, at_least=True), UntruncatedTime(0.25, at_least=True)]
