"""Peers that wait long say for whom and why, once; in the end they give up with the same words."""

import contextlib
import logging
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import run_forked, run_ranks, staged
from repository import ROOT
from stores import store_server
from training import Signals, features, mlp

import straggle
from straggle import Abstain, Elastic, LateHandling, Merge, PeerFailed, WaitForAll
from straggle.building import all_columns
from straggle.merge.alike import Wrapped, check_alike
from straggle.merge.wire import arrivals
from straggle.merge.wire.channel import Channel

ENDS = ROOT / "tests" / "support" / "ends.py"


class Lines(logging.Handler):
    """Keeps what is logged; a line that says for whom a rank waits releases the one that is stuck."""

    def __init__(self, signals):
        super().__init__()
        self.lines = []
        self._signals = signals

    def emit(self, record):
        self.lines.append(record.getMessage())
        if "waiting for" in record.getMessage():
            self._signals.send("logged")


def hang_in_step_3(rank, released_by, give_up_s):
    """Rank 2 hangs until it is released; what this rank logged, and how far it came."""
    module, signals = mlp(), Signals()
    handler = Lines(signals)
    logging.getLogger("straggle").addHandler(handler)
    hanging = [False]

    def hang(*_):
        if hanging[0]:
            hanging[0] = False
            signals.wait(released_by)

    module[2].register_forward_pre_hook(hang)
    late_handling = LateHandling(grace_s=0.0, max_lag=2, give_up_s=give_up_s)
    with staged(module, deadline=0.1, late_handling=late_handling) as model:
        for number in range(8):
            hanging[0] = (rank, number) == (2, 3)
            try:
                with model.step():
                    model(features(rank, number)).sum().backward()
            except PeerFailed:
                signals.send("given up")
                raise
        return handler.lines, model.last_report.step


def test_beyond_max_lag_one_peer_logs_once_for_whom_it_waits_and_why():
    results = run_ranks(hang_in_step_3, 3, "logged", 60.0)
    assert [step for _, step in results] == [7, 7, 7]
    waiting = [line for lines, _ in results for line in lines if "waiting for" in line]
    assert len(waiting) == 1
    assert "step 5, stage" in waiting[0]
    assert "waiting for ranks [2]; rank 2 has been in forward of step 3 (2 merged steps behind) for" in waiting[0]


@pytest.mark.slow
def test_after_give_up_s_the_error_names_rank_step_and_what_it_was_doing():
    ends = run_forked(hang_in_step_3, 3, "given up", 5.0, outcomes=True, timeout_s=40)
    for end in ends[:2]:
        assert end.kind == "PeerFailed"
        assert "step 5, stage" in end.message
        assert "no answer from ranks [2]; rank 2 has been in forward of step 3 (2 merged steps behind)" in end.message
    assert ends[2].kind == "PeerFailed"  # when it comes back it hears of it, too


class EndsWithItsWait:
    """A collective that ends at the very moment when the wait for it is over."""

    def __init__(self):
        self.ended = False

    def wait(self, _timeout=None):
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.ended


def wait_for_it(rank):
    Channel(None, give_up_s=30.0).wait(EndsWithItsWait(), 0, "the merge")
    return rank


def test_collective_that_ends_just_when_the_wait_for_it_is_over_did_not_fail():
    assert run_ranks(wait_for_it, 1) == [0]


class NeverEnds:
    """A collective that waits for a rank that lives, which itself waits no more."""

    def wait(self, _timeout):
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


_silent = []  # of a rank that is there and says nothing; one whose channel is gone says that it has ended


class EndsAfter:
    """A collective that needs this number of waits."""

    def __init__(self, num_waits):
        self._left = num_waits

    def wait(self, _timeout):
        self._left -= 1
        if self._left > 0:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


def lose_rank_2(rank):
    channel = Channel(None, give_up_s=300.0)
    _silent.append(channel)
    if rank == 0:  # its connection to rank 2 broke
        return channel.explain("the merge")
    if rank == 1:
        with pytest.raises(PeerFailed) as failure:
            channel.wait(NeverEnds(), 0, "the merge")
        return str(failure.value)
    return "the merge: no answer from ranks [2]"


def test_rank_whose_own_connections_hold_learns_from_another_that_one_is_gone():
    assert set(run_forked(lose_rank_2, 3)) == {"the merge: no answer from ranks [2]"}


def ask_after_rank_0_gave_up(rank, wait_s):
    """The lost rank 2 is back, and not stuck any more, when ranks 1 and 2 ask."""
    channel, signals = Channel(None, give_up_s=300.0), Signals()
    if rank == 2:
        channel.post_doing("rank 2 has been in forward")
        signals.send("stuck")
    signals.wait("stuck" if rank == 0 else "given up")
    if rank == 2:
        channel.post_doing("")
    words = channel.explain("the merge", wait_s=wait_s if rank else 0.1)
    signals.send("given up")
    return words


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
def test_who_asks_last_learns_whom_the_first_gave_up_and_why(wait_s):
    words = run_ranks(ask_after_rank_0_gave_up, 3, wait_s)
    assert set(words) == {"the merge: no answer from ranks [1, 2]; rank 2 has been in forward"}


# -- ranks that end while their peers wait


class Broken(Exception):
    pass


def end_early(rank, how, world_size):
    """The last rank ends between two steps, but its process lives until its peers have ended, too."""
    signals = Signals()
    with staged(mlp()) as model:
        for number in range(6):
            if number == 3 and rank == world_size - 1:
                if how == "raises":
                    raise Broken("of the user")
                if how == "sys.exit":
                    sys.exit(3)
                break
            with model.step():
                model(features(rank, number)).sum().backward()
    signals.send("closed")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "raised after step 2, outside of a step: Broken('of the user')"),
        ("sys.exit", "raised after step 2, outside of a step: SystemExit(3)"),
        ("loop is over", "ended after step 2 (its loop was over, or it called sys.exit; use model.join(loader) for"),
    ],
)
def test_rank_that_ends_between_two_steps_tells_its_peers_why(how, words, world_size):
    *peers, _ = run_ranks(end_early, world_size, how, world_size, outcomes=True)
    for peer in peers:
        assert peer.kind == "PeerFailed"
        assert "step 3, stage" in peer.message
        assert f"rank {world_size - 1} {words}" in peer.message


def end_while_wrapping(rank, when):
    """Rank 1 has its process groups, and does not come to what all do then."""
    if rank == 0:
        with staged(mlp()):
            return
    channel = Channel(None, give_up_s=300.0)
    if when == "broadcast":
        build = {"straggle": f"{straggle.__version__} with rows of {all_columns()}"}
        options = {
            **build,
            "stages": None,
            "deadline": WaitForAll(),
            "estimator": Abstain(),
            "members": None,
            "links": False,
        }
        check_alike(Wrapped.of(mlp(), {**options, "late_handling": LateHandling(), "merge": Merge()}), channel)
    raise Broken("of the user")


@pytest.mark.parametrize(
    ("when", "what"), [("comparison", "the ranks' models"), ("broadcast", "rank 0's parameter 0.weight")]
)
def test_rank_that_ends_while_peers_wrap_the_model_tells_them(when, what):
    peer, _ = run_ranks(end_while_wrapping, 2, when, outcomes=True)
    assert peer.kind == "PeerFailed"
    assert "rank 0, before step 0" in peer.message
    assert what in peer.message
    assert "rank 1 ended before its first step was merged" in peer.message


def wrap_without_rank_1(rank):
    group = dist.new_group([0, 1], timedelta(seconds=0.6))
    if rank == 0:
        Channel(group, give_up_s=0.5)


def test_ranks_that_do_not_come_to_wrap_the_model_are_named():
    end, _ = run_ranks(wrap_without_rank_1, 2, outcomes=True)
    assert end.kind == "PeerFailed"
    assert (
        "rank 0, before step 0: ranks [1] have not come; each of ranks [0, 1] has to wrap the model, within 0.6 s, the"
        in end.message
    )


def wrap_when_peers_have_reported_that_they_wait(rank, members):
    """Ranks 1 and 2 come when a rank has reported that it waits for them; what this rank logged."""
    arrivals.LONG_ARRIVAL_S = 0.2
    signals = Signals()
    handler = Lines(signals)
    logging.getLogger("straggle").addHandler(handler)
    if rank in (1, 2):
        signals.wait("logged")
    with staged(mlp(), members=Elastic() if members else None):
        return handler.lines


@pytest.mark.parametrize("members", [False, True])
def test_ranks_that_are_long_in_coming_to_wrap_the_model_are_named_once_by_one_rank(members):
    first, *others = run_forked(wrap_when_peers_have_reported_that_they_wait, 4, members)
    assert [line for line in first if "waiting" in line] == [
        "rank 0: waiting for ranks [1, 2], which have not wrapped the model yet"
    ]
    assert not [line for lines in others for line in lines if "waiting" in line]


def train_to_the_end(rank):
    """Rank 1 is through, and gone, while rank 0 is still in the last step's merge."""
    signals, channel = Signals(), Channel(None, give_up_s=30.0)
    channel.merged(2)
    dist.barrier()  # both have formed their groups: one that ends while its peer forms them is another case
    if rank == 1:
        channel.close()
        signals.send("closed")
    else:
        signals.wait("closed")
        channel.store.look()
        channel.store.ask(lambda store: store.check(["ended"]))  # what it is to see is there by now
        channel.wait(EndsAfter(4), 2, "the merge of the last step")
        with pytest.raises(PeerFailed, match=r"rank 1 ended after step 2"):
            channel.wait(NeverEnds(), 3, "a step that rank 1 does not have")


def test_rank_that_has_ended_does_not_end_the_steps_that_it_was_in():
    run_forked(train_to_the_end, 2)


# -- evidence that peers wait


def train_and_count(rank, deadline_s, num_steps):
    """How many ranks reported that they had finished each step; rank 0 hangs in step 2 until rank 1 has merged it."""
    module, signals = mlp(), Signals()
    with staged(module, deadline=deadline_s, late_handling=LateHandling(grace_s=0.0)) as model:
        for number in range(num_steps):
            if (rank, number, deadline_s) == (0, 2, 0.1):
                signals.wait("merged")
            with model.step():
                model(features(rank, number)).sum().backward()
            if (rank, number) == (1, 2):
                signals.send("merged")
        dist.barrier()
        return [model._channel.num_finished(step) for step in range(num_steps)]


def test_nobody_tells_that_it_has_finished_where_nobody_comes_near_the_deadline():
    assert run_forked(train_and_count, 3, 60.0, 6) == [[0] * 6] * 3


def test_those_that_finished_a_step_tell_so_when_another_is_late():
    for told in run_forked(train_and_count, 3, 0.1, 6):
        assert told[2] >= 1


def post_many(rank):
    channel = Channel(None, give_up_s=30.0)
    for step in range(100):
        channel.post_finished(step)
    return [channel.num_finished(step) for step in (0, 67, 68, 99)]


def test_counters_of_steps_long_ago_are_removed():
    assert run_forked(post_many, 1) == [[0, 0, 1, 1]]


# -- processes that end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", 'rank 1 raised after step 2, outside of a step: ValueError("of the user\'s loop")'),
        ("sys.exit", "rank 1 ended after step 2 (its loop was over, or it called sys.exit; use model.join(loader)"),
        ("loop is over", "rank 1 ended after step 2 (its loop was over, or it called sys.exit; use model.join(loader)"),
        (
            "wraps",
            'rank 1 raised before its first step was merged, outside of a step: ValueError("of the user\'s policy")',
        ),
    ],
)
def test_process_that_ends_between_two_steps_tells_its_peers_why(how, words):
    with store_server() as server, contextlib.ExitStack() as stack:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, ENDS, how], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE
            )
            for rank in range(2)
        ]
        for process in ranks:  # one that hangs would outlive the test
            stack.callback(process.kill)
        said = [process.communicate(timeout=60)[1].decode() for process in ranks]
    assert "PeerFailed: rank 0, " in said[0]
    assert words in said[0]
    assert "PeerFailed" not in said[1]
    assert ranks[0].returncode == 1
