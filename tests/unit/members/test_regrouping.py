"""How a rank follows the views of its members."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from straggle.members.regrouped.regrouping import MembershipEvents, Regrouping
from straggle.members.views.in_replica import ALONE
from straggle.members.views.join_requests import JoinRequests
from straggle.members.views.view import Leaving, MergeProgress, View
from straggle.members.views.view_chain import Hold


class FollowedOnce:
    """A rank whose members have changed to ``view``, and what the thread that follows them does with it."""

    def __init__(self, view, *, is_out, has_left=False):
        self.done = []
        self.over = threading.Event()
        chain = SimpleNamespace(held=None, changes={}, wait_newer=lambda generation, _: generation < view.generation)
        chain.release = lambda _: setattr(chain, "held", None)
        membership = SimpleNamespace(
            view=view,
            is_member=True,
            least=1,
            chain=chain,
            detector=SimpleNamespace(num_looks=0, num_turns=0, put_out_silent=lambda: None),
            joins=SimpleNamespace(ask=lambda _: None),
            connections=SimpleNamespace(own=lambda: None),
            check_done=lambda: None,
            inside=ALONE,
        )
        self.channel = SimpleNamespace(membership=membership, generation=0, rank=1, give_up_s=60.0, form=self._form)
        self.channel.close_soon, self.channel.pass_over = lambda: None, self._pass_over
        self.channel.leave_groups, self.channel.revoke = self._pass_over, lambda: None
        notice = SimpleNamespace(look=lambda _: None, has_left=has_left, asked=has_left)
        self.member = SimpleNamespace(is_out=is_out, put_out=self._put_out, freeze=self._freeze, notice=notice)
        self.regrouping = Regrouping(self.channel, self.member, MembershipEvents(), max_buckets=1)

    def _put_out(self):
        self.done.append("put out")
        self.member.is_out = True

    def _freeze(self):
        self.done.append("freeze")
        return MergeProgress(-1 if self.member.is_out else 7)

    def _pass_over(self, view):
        self.channel.generation = view.generation

    def _form(self, view):
        self.channel.generation = view.generation
        self.over.set()
        return False

    def follow(self):
        self.regrouping.start()
        assert self.over.wait(10.0)
        self.regrouping.close()
        return self.done


OF_BOTH = View(0, {0: "a", 1: "b"})
AGAIN = OF_BOTH.without({1: Leaving("silent", "gone")}).with_joined({1: "b"}, step=9, giver=0)


@pytest.mark.parametrize(("is_out", "done"), [(False, ["put out", "freeze"]), (True, ["freeze"])])
def test_rank_that_was_put_out_and_let_in_at_once_goes_on_as_a_newcomer(is_out, done):
    # what it has begun is of a step that its peers have left behind
    rank = FollowedOnce(AGAIN, is_out=is_out)
    rank.regrouping.ask()
    assert rank.follow() == done


def test_rank_that_has_not_asked_goes_on_with_what_it_has_begun():
    assert FollowedOnce(OF_BOTH.again(), is_out=False).follow() == ["freeze"]


def test_rank_that_has_left_follows_no_view_any_more():
    rank = FollowedOnce(OF_BOTH.again(), is_out=False, has_left=True)
    rank.regrouping.start()
    until = time.monotonic() + 10.0
    while rank.channel.generation == 0 and time.monotonic() < until:
        time.sleep(0.01)
    rank.regrouping.close()
    assert (rank.channel.generation, rank.done) == (1, [])


def holds(rank, held):
    """The members wait for a view: the thread that follows them begins with that."""
    membership = rank.channel.membership
    membership.chain.held = held
    membership.chain.wait_newer = lambda generation, _: (
        membership.chain.held is not None or generation < membership.view.generation
    )
    membership.look = lambda: None
    return membership


def test_rank_whose_connection_broke_with_the_store_lets_newcomers_in_by_another_one():
    """Its first use of it after the store was started again is in a step before which all members wait for its view."""
    rank = FollowedOnce(OF_BOTH, is_out=False)
    membership = holds(rank, Hold(9, leads=True))
    membership.connections.forget_own = lambda: rank.done.append("another connection")

    def admit(step):
        rank.done.append(f"admit before {step}")
        if len(rank.done) == 1:
            raise dist.DistNetworkError("connection reset by peer")
        membership.view = OF_BOTH.again()

    membership.admit = admit
    assert rank.follow() == ["admit before 9", "another connection", "admit before 9", "freeze"]
    assert membership.chain.held is None


def test_rank_lets_newcomers_in_though_the_members_have_changed_meanwhile():
    rank = FollowedOnce(OF_BOTH.again(), is_out=False)  # which it has not followed yet
    membership = holds(rank, Hold(9, leads=True))
    membership.admit = lambda step: rank.done.append(f"admit before {step}")
    assert rank.follow() == ["admit before 9", "freeze"]


@pytest.mark.slow
def test_members_go_on_if_the_view_that_they_wait_for_does_not_come():
    rank = FollowedOnce(OF_BOTH, is_out=False)
    membership = holds(rank, Hold(9, leads=False))

    def go_on():
        rank.done.append("go on")
        membership.view = OF_BOTH.again()

    membership.go_on = go_on
    assert rank.follow() == ["go on", "freeze"]
    assert membership.chain.held is None


def test_request_is_taken_again_if_the_connection_breaks():
    class Broken:
        def delete_key(self, _):
            raise dist.DistNetworkError("connection reset by peer")

    joins = JoinRequests(0, 2, "a")
    joins.wanted = {1: "c"}
    with pytest.raises(dist.DistNetworkError):
        joins.take(Broken(), OF_BOTH)
    assert joins.take(SimpleNamespace(delete_key=lambda _: True), OF_BOTH) == {1: "c"}
    assert joins.wanted == {}
