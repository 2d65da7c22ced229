"""The last steps in words: whom the others wait for, and what is done about it."""

import dataclasses

import pytest
from pages import a_rank, a_step

from straggle.observe.console import LastSteps
from straggle.policies.what_if.ddp_time import DdpStep

CALM = [a_rank(number) for number in range(4)]


def words(*steps, waits_for=3, **rest):
    last = LastSteps(4)
    for ranks in steps:
        last.add(a_step(0, ranks, **rest), DdpStep(1.0, waits_for, ()))
    return last.words()


def with_rank_3(**changes):
    return [*CALM[:3], dataclasses.replace(CALM[3], **changes)]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([CALM], "no rank is late"),
        ([with_rank_3(wait_s=0.0)], "no rank is late"),  # 50 ms of a step of 600
        (
            [[*(dataclasses.replace(own, wait_s=0.2) for own in CALM[:3]), dataclasses.replace(CALM[3], wait_s=0.0)]],
            "no rank is late, and the others waited 200 ms for rank 3",
        ),
        ([CALM, with_rank_3(late=True, reach=0.25), CALM], "rank 3 was stopped in 1 of 3 steps"),
        (
            [with_rank_3(late=True, reach=0.25), with_rank_3(late=True, stood_in=True, cause="data")],
            "rank 3 is stuck in data: the others go on without it",
        ),
        (
            [[dataclasses.replace(own, late=True, reach=0.5) for own in CALM]],
            "rank 0 was stopped in 1 of 1 steps, others too: 3",
        ),
    ],
)
def test_last_steps_say_whom_the_others_wait_for(steps, said):
    assert words(*steps) == said


def test_rank_with_less_to_do_is_said_to_have_that_much():
    slow = [dataclasses.replace(own, weight=weight) for own, weight in zip(CALM, (10.0, 10.0, 9.0, 3.0), strict=True)]
    assert words(slow, dealt=True) == "rank 3 is slow: it has 9% of the samples"
    assert words(slow) == "no rank is late"  # these are weights that the user gave
    assert words(slow, waits_for=0, dealt=True) == "no rank is late"
    # of those that are there: an absent rank has no samples, and its row no weight
    away = [dataclasses.replace(CALM[0], absent=True, weight=1.0), *CALM[1:]]
    less = [dataclasses.replace(own, weight=weight) for own, weight in zip(away, (1.0, 12.0, 12.0, 8.0), strict=True)]
    assert words(less, dealt=True) == "rank 3 is slow: it has 25% of the samples"
