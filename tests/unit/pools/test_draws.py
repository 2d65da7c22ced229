"""What the store's thread asks for a rank, over a store in memory."""

import pytest
from torch.distributed import HashStore

from straggle.pools.draws import StoreCounters
from straggle.pools.pool import SETTLED, Claim, Count, Release, Seize


def test_who_has_a_share_is_decided_by_who_comes_first_in_each_step():
    store, owner, other = HashStore(), StoreCounters(0), StoreCounters(1)
    assert owner.ask(store, 3, Claim(0, "own")) == "own"
    assert other.ask(store, 3, Claim(0, "open")) == "own"
    assert other.ask(store, 4, Claim(0, "open")) == "open"
    assert owner.ask(store, 4, Claim(0, "own")) == "open"
    assert owner.ask(store, 5, Claim(0, "own")) == "own"
    assert owner.num_requests == 3  # it knows who had it in the step before


def test_what_is_put_back_is_what_all_find_however_often_they_look():
    store, owner, other = HashStore(), StoreCounters(0), StoreCounters(1)
    owner.ask(store, 3, Claim(0, "own"))
    assert other.ask(store, 3, Claim(0, "open")) == "own"
    assert owner.ask(store, 3, Release(0, (5, 6))) == (5, 6)
    for _ in range(3):
        assert other.ask(store, 3, Claim(0, "open")) == (5, 6)
        assert owner.ask(store, 3, Claim(0, "open")) == (5, 6)
        assert other.ask(store, 3, Seize(0)) == (5, 6)


def test_a_share_that_was_opened_is_not_put_back():
    store, owner, other = HashStore(), StoreCounters(0), StoreCounters(1)
    owner.ask(store, 3, Claim(0, "own"))
    assert other.ask(store, 3, Seize(0)) == "open"
    assert owner.ask(store, 3, Release(0, (5, 6))) == "open"
    assert other.ask(store, 3, Seize(0)) == "open"


@pytest.mark.parametrize("rank", [None, 2])
def test_a_counter_belongs_to_its_step_and_is_removed_when_that_is_long_over(rank):
    store, counters = HashStore(), StoreCounters(0)
    before = store.num_keys()
    assert [counters.ask(store, 3, Count(rank, 1)) for _ in range(2)] == [1, 2]
    assert counters.ask(store, 4, Count(rank, 1)) == 1
    assert store.num_keys() == before + 2
    counters.ask(store, 40, Count(rank, 1))
    assert store.num_keys() == before + 1


def test_two_steps_that_share_a_key_count_apart_and_are_removed_by_one_request():
    store, counters = HashStore(), StoreCounters(0)
    before = store.num_keys()
    own = [(6, 1 + SETTLED), (7, 1), (6, 1), (7, 1 + 8191 * SETTLED), (6, -SETTLED), (7, 1)]  # and as many as may be
    answers = [counters.ask(store, step, Count(None, amount)) for step, amount in own]
    assert answers == [1 + SETTLED, 1, 2 + SETTLED, 2 + 8191 * SETTLED, 2, 3 + 8191 * SETTLED]
    assert store.num_keys() == before + 1
    counters.ask(store, 39, Count(None, 1))
    assert (store.num_keys(), counters.num_requests) == (before + 1, len(own) + 2)


def test_late_answer_of_a_lost_store_beside_a_new_request_removes_no_counter_that_is_in_use():
    """The thread of the old connection comes back in the middle of what the new one's does."""
    store = HashStore()

    class Counters(StoreCounters):
        meets, requests = False, 0

        @property
        def num_requests(self):
            return self.requests

        @num_requests.setter
        def num_requests(self, number):
            self.requests = number
            if self.meets and number == self.meets:
                self.meets = False
                assert super().ask(store, 80, Count(None, 1)) == 1

    counters = Counters(0)
    counters.ask(store, 4, Count(None, 1))
    counters.meets = counters.num_requests + 2  # when the old counter is about to be removed
    assert counters.ask(store, 40, Count(None, 1)) == 1
    assert counters.ask(store, 80, Count(None, 1)) == 2


@pytest.mark.parametrize("request_", [Claim(0, "own"), Release(0, (1, 2)), Seize(0)])
def test_share_whose_store_was_started_again_and_is_empty_has_no_owner(request_):
    store, counters = HashStore(), StoreCounters(0)
    counters.ask(store, 4, Claim(0, "own"))
    store.delete_key("pool/owner/0")
    assert counters.ask(store, 5, request_) == StoreCounters(0).ask(HashStore(), 5, request_)
    assert store.get("pool/owner/0").startswith(b"5 ")
