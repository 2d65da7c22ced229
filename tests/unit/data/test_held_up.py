"""Which rank is slow whatever it is given, and what is said of it."""

import pytest

from straggle.data.held_up import HeldUp, held_up
from straggle.policies.sample_time import RankTime

QUICK = RankTime(0.05, 0.0125, is_known=True)
DELAYED = RankTime(0.45, 0.0125, is_known=True)
PHASES = {"outside": (0.0,) * 4, "data": (0.01, 0.41, 0.01, 0.01), "forward": (0.05,) * 4}


def found(slow, shares=(8, 8, 8, 8), *, quick=QUICK, **options):
    ranks = dict(enumerate((quick, slow, quick, quick)[: len(shares)]))
    return held_up(ranks, shares, PHASES, **{"least": 1, **options})


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fixed_delay_is_found_with_its_seconds_and_its_place(world_size):
    assert found(DELAYED, (8,) * world_size) == HeldUp(1, pytest.approx(0.4), "data", by_samples=False)


def test_alone_no_rank_is_slow():
    assert found(QUICK, (8,)) is None


@pytest.mark.parametrize(
    ("slow", "shares"),
    [
        (QUICK, (8, 8, 8, 8)),
        (RankTime(0.08, 0.0125, is_known=True), (8, 8, 8, 8)),  # a fifth longer
        (RankTime(0.45, 0.0125), (8, 8, 8, 8)),  # its share has not changed yet
        (RankTime(0.05, 0.08, is_known=True), (8, 8, 8, 8)),  # fewer samples help
    ],
)
def test_nothing_is_said_of_a_rank_that_is_not_slow_or_that_fewer_samples_may_help(slow, shares):
    assert found(slow, shares) is None


def test_rank_that_has_its_least_share_and_is_still_slow_is_found_too():
    slow = RankTime(0.0, 0.5)
    assert found(slow, (10, 1, 10, 11)) == HeldUp(1, pytest.approx(0.5 - 0.175), "data", by_samples=True)
    assert found(slow, (10, 2, 10, 10)) is None
    assert found(slow, (10, 2, 10, 10), least=2) is not None


def test_rank_that_was_found_stays_so_until_it_is_clearly_none():
    now = RankTime(0.09, 0.0125, is_known=True)
    before = found(DELAYED)
    assert (found(now) is None, found(now, before=before) is None) == (True, False)
    assert found(QUICK, before=before) is None


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("loads_missed", [True, False])
@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_words_say_what_does_help(waits, loads_missed, phase):
    words = HeldUp(1, 0.4, phase, by_samples=False).words(waits=waits, loads_missed=loads_missed)
    assert words.startswith("rank 1 takes 400 ms longer than the others in each step, however few samples it has, most")
    assert {"data": "loading data", "optimizer": "in the optimizer"}[phase] in words
    assert ("deadline=straggle.AutoDeadline()" in words) == waits
    assert ("straggle.LateLoader(model, loader)" in words) == (loads_missed and phase == "data")
    assert words.endswith("leave it out")
