"""Which view is the job's again where its store was restarted: a pure decision, and the words in an empty store."""

import pytest
import torch.distributed as dist

from straggle.members.views.refill import GATHER_S, Refill, following
from straggle.members.views.view import Change, Leaving, View
from straggle.merge.wire.store import peek

FIRST = View(0, {0: "a", 1: "b", 2: "c", 3: "d"}, job="j")
SECOND = FIRST.without({3: Leaving("silent", "no sign of life")})
THIRD = SECOND.with_joined({3: "e"}, step=7, giver=0)


@pytest.mark.parametrize(
    ("known", "waited_s", "expected"),
    [
        ({}, 60.0, None),
        # all members of the newest one are there
        ({0: FIRST, 1: FIRST, 2: FIRST, 3: FIRST}, 0.0, FIRST),
        ({0: SECOND, 1: SECOND, 2: SECOND}, 0.0, SECOND),
        # some had not come to it yet
        ({0: FIRST, 1: FIRST, 2: SECOND}, 0.0, SECOND),
        # who was out knows an old one, and is no member of the newest
        ({0: SECOND, 1: SECOND, 3: FIRST}, 0.0, None),
        ({0: SECOND, 1: SECOND, 2: SECOND, 3: FIRST}, 0.0, SECOND),
        # one is not waited for for ever
        ({0: FIRST, 1: FIRST, 2: FIRST}, 0.9 * GATHER_S, None),
        ({0: FIRST, 1: FIRST, 2: FIRST}, GATHER_S, FIRST),
        # but fewer than the job goes on with do not decide
        ({3: FIRST}, 60.0, None),
        ({0: FIRST, 3: FIRST}, 60.0, None),
        ({0: SECOND, 1: SECOND, 3: FIRST}, GATHER_S, None),
        ({0: THIRD, 1: SECOND, 3: THIRD}, GATHER_S, THIRD),
    ],
)
def test_view_to_go_on_with(known, waited_s, expected):
    again = following(known, waited_s, least=3)
    assert again == (None if expected is None else expected.again())


def test_rank_whose_loop_is_over_is_not_needed_for_it():
    view = View(4, {0: "a", 1: "b", 2: "c"}, ended=frozenset({3}), job="j")
    assert following({0: view, 1: view}, GATHER_S, least=4) is None
    assert following({0: view, 1: view, 2: view}, 0.0, least=4) == view.again()


def test_view_that_follows_has_the_same_members_and_nobody_joins_in_it():
    again = THIRD.again()
    assert (again.generation, again.members, again.step, again.giver, again.job) == (3, THIRD.members, 7, 0, "j")
    assert THIRD.joined == {3}
    assert again.changes == ()
    assert again.joined == frozenset()


def test_members_fill_an_empty_store_with_one_view_and_their_words():
    store = dist.HashStore()
    ranks = [Refill(rank, 2, 2) for rank in range(2)]
    view = View(5, {0: "a", 1: "b"}, (Change(1, True, "came back"),), job="j")
    ranks[0].note("plan", "the plan")
    ranks[1].note("name/7", "loss")
    ranks[0].fill(store, view)
    assert peek(store, "view") is None
    ranks[1].fill(store, view)
    expected = view.again().encode()
    assert peek(store, "view") == expected
    ranks[0].fill(store, view)  # it has not seen it yet
    assert peek(store, "view") == expected
    assert (peek(store, "plan"), peek(store, "name/7")) == ("the plan", "loss")


def test_word_of_another_job_counts_for_nothing():
    store = dist.HashStore()
    store.set("known/1", View(9, {0: "a", 1: "b"}, job="another").encode())
    Refill(0, 2, 2).fill(store, View(5, {0: "a", 1: "b"}, (Change(1, True, "came back"),), job="j"))
    assert peek(store, "view") is None


@pytest.mark.parametrize("kind", ["HashStore", "FileStore", "TCPStore"])
def test_look_at_a_key_changes_nothing_and_waits_for_nobody(kind, tmp_path):
    store = {
        "HashStore": dist.HashStore,
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store")),
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    corner = dist.PrefixStore("corner", store)
    assert peek(corner, "key") is None
    assert not corner.check(["key"])
    corner.set("key", "")
    assert peek(corner, "key") == ""
    corner.set("key", "word")
    assert peek(corner, "key") == "word"
    assert corner.get("key") == b"word"
