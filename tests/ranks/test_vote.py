"""A replica leaves a step at one boundary: its vote decides, and what this rank's own rule says is one word in it."""

import math
import threading
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import logged, run_ranks, staged
from training import Chain, Stopper

from straggle import world
from straggle.merge.late.replica import Agreed, Replica, UnitVote
from straggle.merge.wire.channel import Channel

pytestmark = pytest.mark.light


def step_of_a_replica(rank, asked_after, voted_at):
    """This rank's words in a step, and the gradients that it gave; its replica leaves at ask number ``voted_at``."""
    words, module = [], Chain(4)

    class Vote:
        def begin(self, _step, **_):
            words.clear()

        def forget_waits(self):
            pass

        def __call__(self, own, _at):
            words.append(own)
            return len(words) == voted_at

        def agree(self, present, _waited_s, _weights, _scalars, _tells):
            return Agreed(present, ())

        def close(self):
            pass

    stopper = Stopper(module)
    of_one_rank = staticmethod(lambda channel: Replica(channel.rank, channel.world_size, Vote()))
    with mock.patch.object(Replica, "of_one_rank", of_one_rank), staged(module) as model:
        with model.step() as step:
            stopper.arm(step, asked_after)
            model(1.0).backward()
        return words, [layer.weight.grad is not None for layer in module.layers], model.last_report.ranks[0].late


FORWARD = [False] * 5  # a rank is asked before the model, before each of its four layers, and after the first gradients


def test_rank_leaves_as_its_replica_does_though_its_own_rule_would_go_on():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, None, 7)
    assert words == [*FORWARD, False, False]
    assert given == [False, False, True, True]
    assert late


def test_rank_goes_on_until_its_replica_leaves_though_its_own_rule_would_not():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, 1, 8)
    assert words == [*FORWARD, True, True, True]
    assert given == [False, True, True, True]
    assert late


def test_rank_finishes_its_step_if_its_replica_does():
    ((words, given, late),) = run_ranks(step_of_a_replica, 1, 1, None)
    assert words == [*FORWARD, True, True, True]
    assert given == [True] * 4
    assert not late


def test_copies_on_a_device_are_averaged_there():
    groups = SimpleNamespace(data=SimpleNamespace(all_reduce=lambda _sent: None))
    channel = SimpleNamespace(rank=0, name=0, world_size=2, groups=groups, wait=lambda *_: None, close=lambda: None)
    vote = UnitVote(channel, str, Inside(), [[0], [1]], print)
    copies = [torch.empty(2, 3, device="meta"), torch.empty(4, device="meta")]  # with a CPU tensor they are refused
    vote.average(copies, [1.0, 2.0])
    vote.close()
    assert [own.shape for own in copies] == [(2, 3), (4,)]


class Inside:
    """What a rank does inside of its replica; it never waits."""

    factor = 1.0

    def begin(self, *, goes_on):
        self.factor = 1.0 + goes_on

    def weigh(self, factor):
        self.factor = factor


def votes_of_two(rank):
    """The ranks of a replica, of two replicas: ranks 0 and 1, 2 and 3, ask three times, weigh and agree."""
    channel, inside = Channel(None, give_up_s=20.0), Inside()
    vote = UnitVote(channel, str, inside, [[0, 2], [1, 3]], tell=channel.post_failure)
    vote.begin(0, stood_in=False)
    answers = [vote(rank == 1 and number == 1, at=number) for number in range(3)]
    vote.begin(1, stood_in=False)
    again = vote(own=False, at=0)
    mean = vote.weigh(2.0 * rank + 1)
    scalars = {7.0: 1.0 + rank} | ({9.0: 5.0} if rank else {})
    agreed = vote.agree([True, rank == 0, False], [0.5 if rank else 0.1, 0.0], [], scalars)
    alike = vote.agree([True, False], [0.0, 0.0], [1.0], {})
    copies = [torch.full((3,), float(rank)), torch.zeros(2)]
    vote.average(copies, [1.0 + 2 * rank, 1.0])
    vote.close()
    return answers, again, mean, inside.factor, agreed, alike, [own.tolist() for own in copies]


def test_ranks_of_a_replica_are_told_the_same_at_the_next_unit():
    first, second = run_ranks(votes_of_two, 2)
    for answers, again, mean, _, agreed, alike, copies in (first, second):
        assert answers == [False, False, True]
        assert not again  # what was asked last in the step before is not an answer in this one
        assert mean == 2.0
        assert list(agreed.present) == [True, True, False]
        assert (agreed.slowest, agreed.alike) == ((0, -1), False)
        assert dict(agreed.scalars) == {7.0: 1.5, 9.0: 5.0}
        assert (list(alike.present), alike.alike) == ([True, False], True)
        assert copies == [[0.75] * 3, [0.0] * 2]
    assert (first[3], second[3]) == (0.5, 1.5)


def votes_on_scalars(rank, of_ranks):
    """What the ranks of a replica agree on, if the merges of their shards have these scalars; and what they warn of."""
    channel = Channel(None, give_up_s=20.0)
    vote = UnitVote(channel, str, Inside(), [[0], [1]], tell=channel.post_failure)
    with logged("straggle") as said:
        agreed = [vote.agree([True], [0.0], [], own[rank], tells=[5.0 + rank]) for own in of_ranks]
    vote.close()
    return [(dict(one.scalars), one.told) for one in agreed], said


def test_scalar_that_no_shard_has_yet_stays_one_that_is_to_come():
    later = {-7.0: math.nan}
    cases = list(product([{}, {7.0: 2.0}, {7.0: 4.0}, later], repeat=2))
    for results, said in run_ranks(votes_on_scalars, 2, cases):
        for (agreed, told), own in zip(results, cases, strict=True):
            values = [one[7.0] for one in own if 7.0 in one]
            expected = {7.0: sum(values) / len(values)} if values else later if later in own else {}
            assert repr(agreed) == repr(expected)
            assert told == [[5.0], [6.0]]
        assert said == []


def test_scalars_of_all_ranks_for_which_a_vote_has_no_room_are_left_out_and_it_is_said_once():
    many = {float(key): float(key) for key in range(1, 12)} | {-20.0: math.nan}
    for results, said in run_ranks(votes_on_scalars, 2, [[many, many], [many, {}], [{}, {3.0: 1.0}]]):
        first_eight = {float(key): float(key) for key in range(1, 9)}
        assert [agreed for agreed, _ in results] == [first_eight, first_eight, {3.0: 1.0}]
        assert [told for _, told in results] == [[[5.0], [6.0]]] * 3
        assert len(said) <= 1
        assert all("room for 8 scalars of all ranks, and step 0 has 12: the others are left out" in one for one in said)
    assert said


def places_while_stuck(rank):
    """What each rank reports of its replica's other one if it goes into a unit, and never comes to the next one."""
    channel, told, words = Channel(None, give_up_s=20.0), world.Event(), []

    def tell(why):
        words.append(why)
        told.set()

    vote = UnitVote(channel, "before unit {}".format, Inside(), [[0, 2], [1, 3]], tell)
    for step in range(4):
        vote.begin(step, stood_in=False)
        vote(own=False, at=5)
    vote.begin(4, stood_in=False)
    vote(own=False, at=6 + rank)
    assert told.wait(20.0)
    with pytest.raises(RuntimeError, match="is before unit"):
        vote(own=False, at=8)
    vote.close()
    return words


def test_rank_at_another_place_is_reported_though_the_thread_that_trains_is_stuck_in_its_unit():
    for rank, (words,) in enumerate(run_ranks(places_while_stuck, 2)):
        what = f"rank {rank}, step 4, before unit {6 + rank}, the vote of its replica: rank {1 - rank} is before unit"
        assert words.startswith(f"{what} {7 - rank}. All ranks")


WORDS = [(7, 7), (7, 8), (0, 0), (7, 0), (2**20, 2**20)]


def questions_of_two(rank):
    """What the ranks of a replica hear when they say `WORDS` beside what they have merged."""
    vote, heard = UnitVote(Channel(None, give_up_s=20.0), str, Inside(), [[0], [1]], print), []

    class Question:
        def __call__(self):
            return WORDS[len(heard)][rank], len(heard) > rank, rank == 0

        def answered(self, *, agreed, num_yes):
            heard.append((agreed, *num_yes))

    vote.ask_too(Question())
    for _ in WORDS:
        vote.agree([True], [0.0], [], {})
    vote.close()
    return heard


def test_ranks_of_a_replica_agree_if_all_say_the_same_and_none_says_no():
    assert (
        run_ranks(questions_of_two, 2)
        == [[(True, 0, 1), (False, 1, 1), (False, 2, 1), (False, 2, 1), (True, 2, 1)]] * 2
    )


def threads_of_votes(_rank):
    """Names of the threads that launched a vote, a weight and an agreement, in their order."""
    channel, threads = Channel(None, give_up_s=20.0), []

    class Control:
        def all_reduce(self, tensor):
            threads.append(threading.current_thread().name.partition("_")[0])
            return channel.groups.control.all_reduce(tensor)

    watched = SimpleNamespace(groups=SimpleNamespace(control=Control()), wait=channel.wait, close=channel.close)
    watched.rank, watched.world_size, watched.name = 0, 1, 0
    vote = UnitVote(watched, str, Inside(), [[0]], tell=channel.post_failure)
    vote.begin(0, stood_in=False)
    vote(own=False, at=0)
    vote.weigh(1.0)
    vote.agree([True], [0.0], [], {})
    vote.close()
    return threads


def test_no_vote_is_launched_by_the_thread_that_trains_as_its_record_would_break_up_the_memory_of_units():
    assert run_ranks(threads_of_votes, 1) == [["straggle-votes"] * 3]
