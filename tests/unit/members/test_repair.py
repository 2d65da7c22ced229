"""A step that some members had finished and others not: every way in which three ranks can be caught in it.

The groups here are in one process: a collective ends when the test lets it. A gradient says whose it is and of which
step, and a merge that was on its way leaves NaN, so a merged gradient tells what was counted, and how often.
"""

import random
from itertools import chain, combinations, product

import pytest
import torch
from training import Chain

from straggle.backward.stages import BUCKET_BYTES, Stage, StagePlan
from straggle.members.regrouped.moved_round import RoundNotes, freeze, go_on, travels
from straggle.members.views.view import MergeProgress, Repair, progress_length, repair
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.round import Layout, Round, RoundTerms
from straggle.policies.network import merge_time
from straggle.source.replicated import slots_of

OLD = (0, 1, 2)
NEWCOMER = 3
WORLD_SIZE = 4
SMALL = 8  # bytes of a segment of a message
BUCKETS = range(3)
ALL = frozenset(BUCKETS)
FRESH = MergeProgress(-1)


def at(step, launched=0, merged=(), *, complete=False):
    return MergeProgress(step, launched, frozenset(merged), complete)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        # nobody had begun
        ({0: at(5), 1: at(5)}, Repair(5)),
        ({0: at(5), 1: at(5), 2: FRESH}, Repair(5)),
        # launched, and merged by none: lost
        ({0: at(5, 2), 1: at(5, 1)}, Repair(5, num_launched=2)),
        # merged by one: given to the other, by the lowest that has it
        ({0: at(5, 1), 1: at(5, 1, {0})}, Repair(5, given={0: 1}, num_launched=1)),
        ({0: at(5, 3), 1: at(5, 3, {0, 2}), 2: at(5, 3, {2})}, Repair(5, given={0: 1, 2: 1}, num_launched=3)),
        # merged by all: kept, but given where one has just joined
        ({0: at(5, 2, {0}), 1: at(5, 3, {0})}, Repair(5, kept=frozenset({0}), num_launched=3)),
        ({0: at(5, 2, {0}), 1: at(5, 3, {0}), 3: FRESH}, Repair(5, given={0: 0}, num_launched=3)),
        # all gradients merged by all, and no telemetry: once more
        ({0: at(5, 3, ALL), 1: at(5, 3, ALL)}, Repair(5, kept=ALL, num_launched=3)),
        # complete on one: the others have all but its telemetry
        ({0: at(5, 3, ALL), 1: at(5, 3, ALL, complete=True)}, Repair(6, 5, 1)),
        ({0: at(5, 3, ALL, complete=True), 1: at(5, 3, ALL, complete=True), 3: FRESH}, Repair(6, 5, 0)),
        # one is a step further
        ({0: at(5, 3, ALL), 1: at(6)}, Repair(6, 5, 1)),
        ({0: at(6, 2), 1: at(5, 3, ALL), 2: at(6, 1)}, Repair(6, 5, 0, num_launched=2)),
        ({0: at(6, 2), 1: at(5, 3, ALL, complete=True)}, Repair(6, 5, 0, num_launched=2)),
    ],
)
def test_repair(progress, expected):
    assert repair(progress) == expected


def test_members_that_all_have_only_just_joined_know_no_step():
    with pytest.raises(ValueError, match="no member knows a step"):
        repair({0: FRESH, 1: FRESH})


def test_progress_is_read_as_it_was_written():
    for progress in (FRESH, at(7, 2, {1}), at(7, 3, ALL, complete=True)):
        numbers = progress.encode(3)
        assert len(numbers) == progress_length(3)
        assert MergeProgress.decode(numbers) == progress


# -- every case, by the rounds that carry the repair out


class Work:
    """A collective, over when ``done``."""

    def __init__(self, kind="", tensor=None, source=-1):
        self.call, self.tensor, self.source, self.done = (kind, source), tensor, source, False

    def is_completed(self):
        return self.done

    def wait(self, _timeout=None):
        if not self.done:
            raise RuntimeError("timed out")
        return True


class Place:
    """One rank's place in a group, by which both data and control go."""

    def __init__(self):
        self.works = []
        self.data = self.control = self

    def all_reduce(self, tensor):
        return self._launch(Work("all_reduce", tensor))

    def broadcast(self, tensor, source):
        return self._launch(Work("broadcast", tensor, source))

    def _launch(self, work):
        self.works.append(work)
        return work


def run(places):
    """All collectives of a group: each is called by all, in the same order, or they would wait for ever."""
    calls = [[(work.call, work.tensor.numel()) for work in place.works] for place in places]
    assert all(own == calls[0] for own in calls), calls
    for works in zip(*(place.works for place in places), strict=True):
        source = works[0].source
        result = works[source].tensor.clone() if source >= 0 else sum(work.tensor for work in works)
        for work in works:
            work.tensor.copy_(result)
            work.done = True


def run_partly(places, chance):
    """Some collectives that all have called end for some of them; the others leave what is on its way."""
    for works in zip(*(place.works for place in places), strict=False):
        source = works[0].source
        result = works[source].tensor.clone() if source >= 0 else sum(work.tensor for work in works)
        for work in works:
            work.done = chance.random() < 0.5
            if work.done:
                work.tensor.copy_(result)
            elif source < 0 or not torch.equal(work.tensor, result):  # who has the bucket is sent the same bits
                work.tensor.fill_(torch.nan)


PARAMETERS = list(Chain(3).parameters())
PLAN = StagePlan(
    tuple(
        Stage(name := f"layers.{index}", (index,), PARAMETERS[index].numel(), BUCKET_BYTES, name, name)
        for index in reversed(BUCKETS)
    )
)
SLOTS = slots_of((str(index), own) for index, own in enumerate(PARAMETERS))
LAYOUT = Layout(PLAN, SLOTS)
INDEX = tuple(reversed(BUCKETS))  # the one parameter of each bucket


def new_buffers():
    return StageBuffers(PLAN, SLOTS, WORLD_SIZE)


class Member:
    """One rank's rounds, and how far they had come."""

    def __init__(self, rank, progress):
        self.rank, self.progress = rank, progress
        self.old, self.new = Place(), Place()
        self.done = None  # the round of the step before
        self.given = 0  # gradients of the round that are in
        self._notes = RoundNotes()
        self.open_round(max(progress.step, 0), self.old)
        if progress.step >= 0:
            self.compute(progress.launched)
            if progress.launched == 2:  # the last bucket waits for the end of the step, though it is complete
                self.compute(3, closes=False)

    def open_round(self, step, group, generation=0):
        self.round = Round(step, LAYOUT, new_buffers(), RoundTerms(group, generation))
        self.given = 0

    def compute(self, up_to, *, closes=True):
        """Finish the gradients of so many buckets; the block ends with the last."""
        for index in INDEX[self.given : up_to]:
            gradient = torch.full_like(PARAMETERS[index], (self.round.step + 1) * 8.0**self.rank)
            assert self.round.accumulate([(index, gradient, 0.0)]) == [(index, 0.0)]
            assert self.round.parameter_complete(index, 0.0)
        self.given = max(self.given, up_to)
        if up_to == 3 and closes and not self.round.closed:
            own = self.round.own_part("backward", truncated=False, failed=False)
            self.round.close(own, self.round.weights(own))

    @property
    def notes(self):
        return self._notes.of(self.round, OLD)

    def frozen(self):
        return as_sent(freeze(self.round, self.notes))

    def stand_in(self):
        """Submit nothing, as for a rank that waits for its state."""
        own = self.round.finished_part("outside")
        self.round.close(own, self.round.weights(own))

    def left_in_flight(self):
        """What the old merges may do to their tensors at any time."""
        for bucket in set(BUCKETS) - self.progress.merged:
            for work in works_of(self, bucket):
                work.tensor.fill_(torch.nan)

    def regroup(self, way, place_of, generation=1):
        """As `Member.regroup` does."""
        if self.progress.step < 0:
            self.open_round(way.step, None if way.num_launched else self.new, generation)
            if way.num_launched:
                self.go_on(way, place_of, new=True, generation=generation)
        elif self.round.step == way.completed:
            self.done = self.round
            self.open_round(way.step, self.new, generation)
        else:
            assert self.round.step == way.step
            self.go_on(way, place_of, new=False, generation=generation)

    def go_on(self, way, place_of, *, new, generation):
        go_on(self.round, self.notes, self.new, way, place_of, new_buffers, new=new, generation=generation)

    def finish(self):
        if self.rank != NEWCOMER:
            self.compute(3)
        elif not self.round.closed:
            self.stand_in()


def test_gradients_travel_from_the_first_that_is_launched_until_the_last_is_there():
    peers = [Member(rank, MergeProgress(0, 0)) for rank in OLD]
    member = peers[0]
    assert not travels(member.round, member.notes)
    for peer in peers:
        peer.compute(1)
    assert travels(member.round, member.notes)
    run([peer.old for peer in peers])
    assert not travels(member.round, member.notes), "between two buckets"
    for peer in peers:
        peer.compute(3)
    assert travels(member.round, member.notes)
    run([peer.old for peer in peers])
    member.notes.last_message = Work()
    assert travels(member.round, member.notes), "the sign that all have it"
    member.notes.last_message.done = True
    assert not travels(member.round, member.notes)


def subsets(of):
    return [frozenset(s) for s in chain.from_iterable(combinations(of, size) for size in range(len(of) + 1))]


def reachable():
    """How far three members can be: a step needs all of them, a merge all that launch it."""
    for launched in product(range(4), repeat=3):
        for merged_by in product(subsets(OLD), repeat=min(launched)):
            merged = [frozenset(b for b, ranks in enumerate(merged_by) if rank in ranks) for rank in OLD]
            everywhere = all(own == ALL for own in merged)
            for complete in subsets(OLD) if everywhere else [frozenset()]:
                yield tuple(MergeProgress(0, launched[r], merged[r], r in complete) for r in OLD)
    behind = [MergeProgress(0, 3, ALL, complete) for complete in (False, True)]
    for states in product([*behind, *(MergeProgress(1, launched) for launched in range(4))], repeat=3):
        if len({state.step for state in states}) == 2:
            yield states


def distinct(leaves):
    """Of cases that differ only in which of the others is which, one."""
    seen = {}
    for states in reachable():
        order = sorted((r for r in OLD if r != leaves), key=lambda r: repr((states[r].step, states[r].encode(3))))
        states = [states[r] for r in order] + ([states[leaves]] if leaves is not None else [])
        survivors = tuple(repr(state.encode(3)) for state in states[: len(order)])
        seen.setdefault(survivors, states)
    return list(seen.values())


@pytest.mark.parametrize("meanwhile", [False, True], ids=["computes-later", "computes-while-members-change"])
@pytest.mark.parametrize("joins", [False, True], ids=["", "one-joins"])
@pytest.mark.parametrize("leaves", [None, 2], ids=["none-leaves", "one-leaves"])
def test_members_end_the_step_with_the_same_bits_and_count_nothing_twice(leaves, joins, meanwhile, monkeypatch):
    if joins:  # and each bucket goes in several messages
        monkeypatch.setattr(merge_time, "SEGMENT_BYTES", SMALL)
        assert new_buffers().num_messages(0) > 1
    cases = distinct(leaves)
    assert len(cases) > 90
    for states in cases:
        members = [Member(rank, progress) for rank, progress in enumerate(states)]
        merge_what_was_merged(members)
        stay = [member for member in members if member.rank != leaves]
        check(stay, [Member(NEWCOMER, FRESH)] if joins else [], meanwhile=meanwhile)


def merge_what_was_merged(members):
    """Let the old merges end where they did."""
    for bucket in BUCKETS:
        if any(bucket in member.progress.merged for member in members):
            launched = {m.rank: works_of(m, bucket) for m in members if m.progress.step == 0}
            # who is a step further has it behind it
            further = [works_of(Member(m.rank, MergeProgress(0, 3)), bucket) for m in members if m.progress.step == 1]
            totals = [sum(work.tensor for work in own) for own in zip(*launched.values(), *further, strict=True)]
            for member in members:
                if bucket in member.progress.merged:
                    for work, total in zip(launched[member.rank], totals, strict=True):
                        work.tensor.copy_(total)
                        work.done = True
    for member in members:
        if member.progress.merged == ALL:
            member.notes.last_message = Work()
            member.notes.last_message.done = member.progress.complete
        member.left_in_flight()


@pytest.mark.parametrize("joins", [False, True], ids=["", "one-joins"])
@pytest.mark.parametrize("leaves", [None, 2], ids=["none-leaves", "one-leaves"])
def test_members_may_change_again_before_a_step_is_repaired(leaves, joins, monkeypatch):
    if joins:
        monkeypatch.setattr(merge_time, "SEGMENT_BYTES", SMALL)
    chance = random.Random(0)
    for states in distinct(leaves):
        members = [Member(rank, progress) for rank, progress in enumerate(states)]
        merge_what_was_merged(members)
        stay = [member for member in members if member.rank != leaves]
        wanted = stay + ([Member(NEWCOMER, FRESH)] if joins else [])
        came = regroup_some(wanted, chance)
        again = came if chance.random() < 0.5 else came[1:]  # the lowest, who may have given a bucket, leaves
        progress = {member.rank: member.frozen() for member in again}
        way = repair(progress)
        for member in again:
            member.progress, member.old, member.new = progress[member.rank], member.new, Place()
        for member in again:
            member.regroup(way, {member.rank: place for place, member in enumerate(again)}, generation=2)
        for work in (work for member in again for work in member.old.works if not work.done):
            work.tensor.fill_(torch.nan)  # it may end at any time, when its step is merged and its buffer another's
        for member in again:
            member.finish()
        run([member.new for member in again])
        assert len({tuple(view.sum().item() for view in member.round.buffers.views) for member in again}) == 1
        ranks = [counted(member.round) for member in again]
        assert all(own == ranks[0] for own in ranks)
        for member in (member for member in again if member.rank != NEWCOMER):
            assert {bucket for bucket in BUCKETS if member.rank not in ranks[0][bucket]} == member.notes.lost
        have_left = set(OLD) - {member.rank for member in again}
        if any(own & have_left for own in ranks[0]):
            assert not any(member.round.terms.rows_tell_all for member in again)


def regroup_some(members, chance):
    """A first repair, to which not all come; the members of the view after it: who was let in has to have come."""
    progress = {member.rank: member.frozen() if member.progress.step >= 0 else FRESH for member in members}
    way = repair(progress)
    place_of = {member.rank: place for place, member in enumerate(members)}
    come = [member for member in members if chance.random() < 0.8]
    for member in come:
        member.regroup(way, place_of)
        member.left_in_flight()
    for member in come:
        if chance.random() < 0.5:
            member.finish()
    if len(come) == len(members):
        run_partly([member.new for member in members], chance)
    return [member for member in members if member in come or member.rank != NEWCOMER]


def works_of(member, bucket):
    """Those of a bucket, which may be several messages; of one that was not launched, none."""
    counts = [member.round.buffers.num_messages(before) for before in range(bucket + 1)]
    return member.old.works[sum(counts[:bucket]) : sum(counts)]


def check(stay, newcomers, *, meanwhile):
    """Carry the repair out, and compare what is in each bucket with who had launched what."""
    progress = {member.rank: member.frozen() for member in stay}
    assert progress == {member.rank: member.progress for member in stay}
    way = repair(progress | {member.rank: FRESH for member in newcomers})
    if meanwhile:
        for member in stay:
            member.compute(3)
    everyone = stay + newcomers
    place_of = {member.rank: place for place, member in enumerate(everyone)}
    for member in everyone:
        member.regroup(way, place_of)
        member.left_in_flight()
    for member in everyone:
        member.finish()
    run([member.new for member in everyone])

    if way.completed is not None:
        assert progress[way.giver].complete or progress[way.giver].step > way.completed
    for member in stay:
        if member.done is not None:
            assert counted(member.done) == [set(OLD)] * 3
    here = {rank: own.launched if own.step == way.step else 0 for rank, own in progress.items()}
    merged = {bucket for own in progress.values() if own.step == way.step for bucket in own.merged}
    expected = [
        set(OLD) if bucket in merged else {rank for rank, launched in here.items() if launched <= bucket}
        for bucket in BUCKETS
    ]
    buckets = [[view.tolist() for view in member.round.buffers.views] for member in everyone]
    assert all(own == buckets[0] for own in buckets)
    for member in everyone:
        assert member.round.merged_weights() == tuple(map(len, expected))
        assert counted(member.round) == expected
        if member in stay:
            assert member.notes.lost == frozenset(range(here[member.rank])) - merged


def as_sent(progress):
    return MergeProgress.decode(progress.encode(3))


def counted(current):
    """The ranks whose gradients are in each bucket of a merged round."""
    shares = current.buffers.normalize()
    return [ranks_in(current.buffers.views[index], shares[index], current.step) for index in INDEX]


def ranks_in(gradient, share, step):
    assert gradient.min() == gradient.max()
    assert share.present == (share.weight > 0)
    total = round(gradient.flatten()[0].item() * share.weight)  # a mean over three is not exact
    ranks = {rank for rank in range(WORLD_SIZE) if total // 8**rank % 8 == step + 1}
    assert total == sum((step + 1) * 8**rank for rank in ranks)
    assert share.weight == len(ranks)
    return ranks


def test_of_a_step_that_is_dropped_as_a_whole_nothing_is_merged_before_it_is_whole():
    member, place = Member(0, at(0)), Place()
    terms = RoundTerms(None, 0, all_or_nothing=True)  # the members change when the step begins
    member.round = Round(0, LAYOUT, new_buffers(), terms)
    member.compute(2)
    notes = member.notes
    go_on(member.round, notes, place, Repair(0), {0: 0}, new_buffers, new=False, generation=1)
    assert place.works == []
    member.stand_in()
    assert len(place.works) == len(ALL)
    assert member.round.gradients.number == 2
    assert not any(sum(member.round.buffers.weights_in(bucket)) for bucket in BUCKETS)


@pytest.mark.parametrize(
    ("progress", "giver"),
    [
        ({0: MergeProgress(6, is_first=True), 1: MergeProgress(6), 2: at(5, complete=True)}, 1),
        ({0: MergeProgress(6, is_first=True), 2: at(5, complete=True), 3: at(5)}, 2),
        ({0: MergeProgress(6), 1: MergeProgress(6, is_first=True), 2: at(5)}, 0),
    ],
)
def test_telemetry_of_a_step_is_given_by_a_member_that_has_it(progress, giver):
    """One that was let in at the step after it has none, and what it has in its place are zeros, or older rows."""
    found = repair(progress)
    assert (found.completed, found.giver) == (5, giver)
