"""What a launcher says of ranks that will not come, and what a process that waits for them makes of it."""

import pytest
from torch.distributed import HashStore, PrefixStore

from straggle.merge.wire.launcher_words import down, needs_all, post_down, post_needs_all, post_started, will_not_come


def words(down=(), started=()):
    store = HashStore()
    for rank, count in started:
        post_started(store, rank, count)
    for rank in down:
        post_down(store, rank, f"rank {rank} ended")
    return store


@pytest.mark.parametrize(
    ("store", "missing", "count", "why"),
    [
        (words(), [1], 0, ""),
        (words(started=[(0, 0), (1, 0)]), [1], 0, ""),
        (words(down=[1]), [1], 0, "rank 1 ended"),
        (words(down=[1, 2]), [1], 0, "rank 1 ended; rank 2 ended"),
        (words(down=[1]), [2], 0, "rank 1 ended"),  # it had come, and has ended since
        (words(down=[3]), [1], 0, ""),  # of another model
        (words(started=[(1, 2)]), [1], 2, ""),
        (words(started=[(1, 3)]), [], 2, ""),
        (words(started=[(1, 3)]), [1], 2, "rank 1 was started again, as number 3, and this process is number 2 of its"),
    ],
)
def test_a_process_waits_in_vain_for_ranks_that_are_down_or_meet_elsewhere(store, missing, count, why):
    said = will_not_come(PrefixStore("attempt", store), range(3), missing, count)
    assert said.startswith(why) if why else not said


def test_a_rank_that_is_started_is_not_down_any_more():
    store = words(down=[1])
    post_started(store, 1, 0)
    assert down(store, range(2)) == {}


def test_a_job_says_that_it_needs_all_of_its_ranks():
    store = words()
    assert not needs_all(store)
    post_needs_all(store)
    assert needs_all(PrefixStore("attempt", store))
