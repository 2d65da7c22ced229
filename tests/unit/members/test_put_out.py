"""Who is put out in the middle of a merge, and that all members have the same places after the view that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from straggle.members.healed.state_wire import decode, encode
from straggle.members.slow.put_out import PutOut
from straggle.members.views.view import Elastic, Leaving, View
from straggle.merge.rows.telemetry import Column
from straggle.policies.network.rank_links import RankLink

FAST, NARROW = RankLink(0.0002, 20e6, 20e6), RankLink(0.0002, 1e6, 1e6)
FIRST = View(0, dict.fromkeys(range(4), "a"))
SLOW = Leaving("link", "its link is slow")


class Members:
    """What is asked of `Membership` and its `Watch`."""

    def __init__(self, rank: int, least: int = 3) -> None:
        self.rank, self.least, self.view = rank, least, FIRST
        self.elastic = Elastic()
        self.detector = self
        self.kept_out: Mapping[int, Leaving] = {}

    @property
    def is_member(self) -> bool:
        return self.rank in self.view.members

    def keep_out(self, ranks: Mapping[int, Leaving]) -> None:
        self.kept_out = ranks


class Merged:
    """What is asked of a table: no member has ever measured a slow link. Other columns than these are zeros."""

    def __init__(self, absent: Sequence[int] = (), **columns: tuple[float, ...]) -> None:
        self._absent, self._columns = frozenset(absent), {"busy_s": (0.1,) * 4, **columns}

    def absent_ranks(self) -> frozenset[int]:
        return self._absent

    last_submitted_s, is_usual = 1.0, True

    def column(self, name: str) -> tuple[float, ...]:
        return self._columns.get(name, (0.0,) * 4)

    def told(self, column: Column) -> tuple[float, ...]:
        return self.column(column.name)

    def weight(self) -> list[float]:
        return [1.0] * 4

    def given(self, shares: Sequence[float]) -> list[float]:  # noqa: ARG002
        return [1.0] * 4

    def links(self) -> list[RankLink]:
        return [RankLink() if rank in self._absent else FAST for rank in range(4)]


def put_out(rank: int, least: int = 3) -> tuple[PutOut, Any]:
    members: Any = Members(rank, least)
    own = PutOut(members, num_bytes=5_100_000)
    merge(own, 0)
    return own, members


def merge(own: PutOut, step: int, absent: Sequence[int] = ()) -> None:
    table: Any = Merged(absent)
    own.merged(step, table, 1)


@pytest.mark.parametrize(
    ("rank", "slow", "gone"),
    [
        (0, 3, {3}),
        (1, 0, {0}),  # the lowest of those that are left
        (1, 3, set()),  # which rank 0 proposes
        (3, 3, set()),  # that its own link is slow is what others find
    ],
)
def test_the_member_that_proposes_the_next_view_puts_out_whose_link_is_slow(
    rank: int, slow: int, gone: set[int]
) -> None:
    own, members = put_out(rank)
    own.long_merge([NARROW if other == slow else FAST for other in range(4)])
    assert set(members.kept_out) == gone
    assert own.out == frozenset()  # not before the members have changed
    merge(own, 1)
    assert set(members.kept_out) == gone


@pytest.mark.parametrize(
    ("links", "least"),
    [
        ([FAST] * 4, 3),
        ([NARROW] * 4, 3),
        ([FAST, FAST, FAST, NARROW], 4),
        ([FAST, RankLink(), RankLink(), RankLink()], 3),
    ],
)
def test_nobody_is_put_out_where_that_does_not_help_or_may_not_be(links: list[RankLink], least: int) -> None:
    own, members = put_out(0, least)
    own.long_merge(links)
    assert not members.kept_out


def test_all_members_have_the_same_places_after_a_view_whoever_had_merged_what() -> None:
    made = [put_out(rank) for rank in range(3)]
    merge(made[0][0], 1)  # rank 0 is a step further as rank 3 is put out
    view = FIRST.without({3: SLOW})
    for own, members in made:
        members.view = view
        own.follow(view, 2, new=False)
        assert set(members.kept_out) == {3}
    for own, _ in made[1:]:
        merge(own, 1)
        assert own.out == frozenset()
    for own, _ in made:
        merge(own, 2, absent=[3])
        assert own.out == {3}
    assert len({str(own.state_dict()) for own, _ in made}) == 1


def test_who_may_return_is_not_put_out_again_by_the_next_view_and_who_left_otherwise_is_not_kept_out() -> None:
    own, members = put_out(0)
    members.view = view = FIRST.without({3: SLOW})
    own.follow(view, 1, new=False)
    for step in range(1, 12):  # ten steps after which it may come back
        merge(own, step)
    assert own.out == frozenset()
    assert not members.kept_out
    own.follow(view.without({2: Leaving("silent", "no sign of life")}), 12, new=False)
    merge(own, 12, absent=[2, 3])
    assert own.out == frozenset()
    assert not members.kept_out

    own, members = put_out(0)
    own.long_merge([FAST, FAST, FAST, NARROW])
    assert set(members.kept_out) == {3}
    own.follow(FIRST.without({3: Leaving("ended", "its process ended")}), 1, new=False)
    assert not members.kept_out


def test_a_newcomer_takes_the_places_of_the_members() -> None:
    giver, _ = put_out(0)
    out = FIRST.without({3: SLOW})
    giver.follow(out, 1, new=False)
    merge(giver, 1, absent=[3])
    joined = out.without({2: Leaving("ended", "its process ended")}).with_joined({2: "b"}, step=3, giver=0)
    own, newcomer = put_out(2)
    own.begin_anew()
    newcomer.view = joined
    own.follow(joined, 3, new=True)
    own.load_state_dict(giver.state_dict())
    assert set(newcomer.kept_out) == {3}
    for step in range(2, 6):
        merge(giver, step, absent=[3])
        merge(own, step, absent=[3])
    assert own.state_dict() == giver.state_dict()


@pytest.mark.parametrize(
    ("phase", "words"), [("data", "loading data"), ("backward", "in backward"), ("optimizer", "in the optimizer")]
)
def test_a_member_whose_work_is_slow_is_put_out_and_it_is_said_in_what_and_what_that_brings(
    phase: str, words: str
) -> None:
    own, members = put_out(0)
    columns = {"busy_s": (0.1, 0.5, 0.1, 0.1), f"{phase}_s": (0.02, 0.42, 0.02, 0.02), "forward_s": (0.05,) * 4}
    slow: Any = Merged(**columns)
    for step in range(1, 70):
        own.merged(step, slow, 1)
    why = members.kept_out[1]
    assert (set(members.kept_out), why.kind) == ({1}, "slow")
    brings = 3 / 4 * (0.5 + 6 * 5.1e6 / 4 / 20e6) / (0.1 + 4 * 5.1e6 / 3 / 20e6)  # rings of four and of three
    assert why.reason == (
        f"it is slow: done or cut short after 0.50 s of a step, the others after 0.10 s; {words} 0.42 s, the others "
        f"20 ms; it gave 100% of its gradients, and without it the others merge {brings:.2f} times as many gradients a "
        "second"
    )


def test_a_newcomer_goes_on_in_the_middle_of_what_is_seen_of_a_slow_member() -> None:
    (giver, members), (own, newcomer) = put_out(0), put_out(2)
    slow: Any = Merged(busy_s=(0.1, 0.5, 0.1, 0.1))
    for step in range(1, 40):
        giver.merged(step, slow, 1)
    encoded = encode(giver.state_dict())
    own.load_state_dict(decode(encoded.header, encoded.data))
    for step in range(40, 70):
        giver.merged(step, slow, 1)
        own.merged(step, slow, 1)
        assert own.state_dict() == giver.state_dict()
    assert set(members.kept_out) == set(newcomer.kept_out) == {1}


@pytest.mark.parametrize(("seconds", "out"), [(0.1, set()), (0.5, {1})])
def test_a_rank_that_is_out_returns_by_the_probes_that_any_member_has_heard_of(seconds: float, out: set[int]) -> None:
    own, members = put_out(0)
    slow: Any = Merged(busy_s=(0.1, 0.5, 0.1, 0.1))
    for step in range(1, 70):
        own.merged(step, slow, 1)
    assert own.out == {1}
    members.view = FIRST.without(members.kept_out)
    own.follow(members.view, 70, new=False)
    for step, number in ((70, 60.0), (71, 60.0), (72, 71.0)):  # two probes; rank 2 leads, and has heard of them
        heard = {"probed": 2.0, "probe_number": number, "probe_s": seconds}
        columns = {name: (0.0, 0.0, value, 0.0) for name, value in heard.items()}
        table: Any = Merged([1], busy_s=(0.1,) * 4, **columns)
        assert own.out == {1}
        own.merged(step, table, 1)
    assert own.out == set(members.kept_out) == out


@pytest.mark.parametrize("name", ["gathers", "pool_parts"])
def test_no_member_is_put_out_for_its_work_if_all_are_needed_or_a_slow_one_draws_less(name: str) -> None:
    own, members = put_out(0)
    slow: Any = Merged(**{"busy_s": (0.1, 0.5, 0.1, 0.1), name: (0.0, 0.0, 1.0, 0.0)})
    for step in range(1, 70):
        own.merged(step, slow, 1)
    assert not members.kept_out
