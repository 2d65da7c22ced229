"""Chaos: real ranks are paused, stalled, stopped, throttled, poisoned and killed while they train.

Every layer's gradient is known, and the ranks' inputs are such that the mean over any set of ranks tells which ranks
these are. So what a report says was dropped is compared with what the merged gradients hold.
"""

import ctypes
import math
import os
import random
import re
import signal
import statistics
import threading
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, groupby

import pytest
import torch
import torch.distributed as dist
from network import enter, made_network
from ranks import die, digest, run_forked, staged
from training import Chain, shared

from straggle import FixedDeadline, LateHandling, PeerFailed, StepReport
from straggle.backward import stages

LINK_DELAY_S = 0.04  # one way
WORK_S = 0.02
PHASE = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "outside"}


@dataclass(frozen=True)
class Hit:
    """What happens to a rank, once: ``action(*arguments)`` in this place of this step.

    The places are "data", "forward", "backward" (both in the middle), "optimizer" and, after it, "evaluation".
    """

    rank: int
    step: int
    place: str
    action: Callable
    arguments: tuple = ()

    @property
    def reported_in(self):
        """The step whose report has it: what comes after a merge counts to the next."""
        return self.step + (self.place in ("optimizer", "evaluation"))


@dataclass(frozen=True)
class Merged:
    """What one rank saw of a step: when it had the merge, the report, the mean input of each layer, and parameters."""

    at: float
    report: StepReport
    means: tuple[float | None, ...]
    parameters: str


class Chaos:
    """Hits a rank where its step has come to; make it before the module is wrapped."""

    def __init__(self, module, hits):
        self.hits = hits
        self.step = 0
        module.layers[0].register_forward_pre_hook(lambda *_: time.sleep(WORK_S))  # a rank's own work
        middle = module.layers[2]
        middle.register_forward_pre_hook(lambda *_: self.reach("forward"))
        middle.weight.register_post_accumulate_grad_hook(lambda _: self.reach("backward"))

    def due(self, place):
        return [hit for hit in self.hits if (hit.step, hit.place) == (self.step, place)]

    def reach(self, place):
        for hit in self.due(place):
            hit.action(*hit.arguments)


def number_of(rank):
    """A rank's input; the means over any two sets of ranks differ."""
    return 4.0**rank


def train(rank, num_steps, hits, deadline_s, late_handling, bad=(), bucket_bytes=1):
    """Trains the chain under ``hits``; (rank, step) pairs in ``bad`` get a batch of NaNs. Gives a `Merged` per step."""
    stages.BUCKET_BYTES = bucket_bytes
    dist.distributed_c10d._get_default_store().set(f"process/{rank}", str(os.getpid()))
    dist.barrier()
    module = Chain()
    chaos = Chaos(module, [hit for hit in hits if hit.rank == rank])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    records = []
    with staged(module, deadline=FixedDeadline(deadline_s), late_handling=late_handling) as model:
        for chaos.step in range(num_steps):
            chaos.reach("data")
            with model.step():
                model(math.nan if (rank, chaos.step) in bad else number_of(rank)).backward()
            at, means = time.monotonic(), tuple(mean_of(layer) for layer in module.layers)
            chaos.reach("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            if chaos.due("evaluation"):
                model(0.0)
                chaos.reach("evaluation")
            records.append(Merged(at, model.last_report, means, digest(module.parameters())))
    return records


def mean_of(layer):
    """The mean of the inputs that went into a layer's merged gradient."""
    if (gradient := layer.weight.grad) is None:
        return None
    assert gradient.min() == gradient.max()
    return gradient[0].item() / layer.scale


def ranks_in(mean, world_size):
    """The ranks whose inputs have this mean."""
    if mean is None:
        return set()
    sets = [chosen for size in range(1, world_size + 1) for chosen in combinations(range(world_size), size)]
    (found,) = [s for s in sets if math.isclose(sum(map(number_of, s)) / len(s), mean, rel_tol=1e-5)]
    return set(found)


def check_replicas_and_counters(results, bad=()):
    """Equal parameters and reports on all ranks, and reports that say what the merged gradients hold."""
    world_size, sizes = len(results), [layer.weight.numel() for layer in Chain().layers]
    for records in zip(*results, strict=True):
        assert len({record.parameters for record in records}) == 1
        assert len({shared(record.report) for record in records}) == 1
        assert len({record.means for record in records}) == 1
        report = records[0].report
        inside = [ranks_in(mean, world_size) for mean in records[0].means]
        for rank in report.ranks:
            if (rank.rank, report.step) in bad:
                assert not any(rank.rank in ranks for ranks in inside)
                assert rank.nonfinite == sum(share > 0 for share in rank.stages)
                continue
            held = sum(size for size, ranks in zip(sizes, inside, strict=True) if rank.rank in ranks)
            assert rank.reach == pytest.approx(held / sum(sizes), abs=1e-6)
            assert rank.late == (rank.cause is not None) == (held < sum(sizes))
            assert rank.nonfinite == 0
        weights = sum(stage.weight * stage.numel for stage in report.stages)
        assert report.dropped_share == pytest.approx(1 - weights / world_size / sum(sizes), abs=1e-6)


def reports_of(results, rank=0):
    return [record.report for record in results[rank]]


def stood_in_longest(reports, rank):
    """The longest run of steps in which the rank did not hand in itself: the first step, and how many."""
    runs = groupby(reports, key=lambda report: report.ranks[rank].stood_in)
    steps = max(([report.step for report in run] for stood_in, run in runs if stood_in), key=len)
    return steps[0], len(steps)


def waits_s(reports, quorum):
    """For each step, how long the ranks that made its quorum waited for the last rank's word."""
    waits = [sorted(r.wait_s for r in report.ranks if not r.late and not r.stood_in) for report in reports]
    return [wait[-quorum] if len(wait) >= quorum else 0.0 for wait in waits]


def check_waits(reports, quorum, bound_s):
    """No peer waited longer, but for two steps on a busy machine; if peers waited for stalled ranks, many would."""
    longer = [seconds for seconds in waits_s(reports, quorum) if seconds >= bound_s]
    assert len(longer) <= 2, longer


def largest_lag(results):
    """How many merged steps a rank was behind the foremost at most."""
    times = [[record.at for record in records] for records in results]
    return max(bisect(own, at) - bisect(other, at) for own in times for at in own for other in times)


# -- pauses between two steps


def pause_together(seconds):
    """A validation by all ranks, which ends with a collective of its own."""
    time.sleep(seconds)
    dist.barrier()


@pytest.mark.slow
def test_pause_of_all_ranks_together_makes_nobody_late():
    hits = [Hit(rank, 5, "evaluation", pause_together, (1.5,)) for rank in range(4)]
    results = run_forked(train, 4, 10, hits, 0.3, LateHandling(grace_s=0.0))
    check_replicas_and_counters(results)
    report = reports_of(results)[6]
    assert report.seconds > 1.4
    assert all(rank.outside_s > 1.4 for rank in report.ranks)
    assert report.late_ranks == ()
    assert not any(rank.stood_in for rank in report.ranks)


@pytest.mark.slow
def test_peers_go_on_while_rank_0_evaluates_alone():
    deadline_s, pause_s = 0.2, 2.0
    hits = [Hit(0, 9, "evaluation", time.sleep, (pause_s,))]
    results = run_forked(train, 4, 64, hits, deadline_s, LateHandling(grace_s=0.02, max_lag=128))
    check_replicas_and_counters(results)
    reports = reports_of(results, rank=1)
    first, length = stood_in_longest(reports, 0)
    assert first == 10
    assert length >= 10  # where the peers wait, it is one step
    assert reports[first].ranks[0].cause == "outside"
    assert reports[first].seconds > deadline_s  # no rank is judged before
    # whoever waits for it waits for nearly all of the pause; half of it is room for a busy machine
    assert max(waits_s(reports, quorum=2)) < pause_s / 2
    assert max(report.seconds for report in reports) < pause_s / 2


# -- stalls anywhere


def random_stalls(world_size, num_steps, seed):
    """Stalls of up to half a second, one step in five; in one step most ranks at once, so that there is no quorum."""
    draw = random.Random(seed)
    hits = []
    for rank in range(world_size):
        step = 3
        while (step := step + draw.randint(2, 8)) < num_steps - 1:  # not in two steps in a row
            hits.append(Hit(rank, step, draw.choice(list(PHASE)), time.sleep, (draw.uniform(0.0, 0.5),)))
    together = num_steps // 2
    hits = [hit for hit in hits if abs(hit.step - together) > 1]
    return hits + [Hit(rank, together, "forward", time.sleep, (0.4,)) for rank in range(world_size - 1)]


def missed_stalls(reports, hits):
    """The stalls that are neither in the telemetry nor the cause of a rank's lateness, with its part in that step."""
    return [
        (hit, reports[hit.reported_in].ranks[hit.rank])
        for hit in hits
        if hit.arguments[0] > 0.2 and not stall_is_reported(reports, hit)
    ]


def stall_is_reported(reports, hit):
    (seconds,) = hit.arguments
    rank = reports[hit.reported_in].ranks[hit.rank]
    was_behind = reports[hit.reported_in - 1].ranks[hit.rank].stood_in
    in_telemetry = getattr(rank, f"{PHASE[hit.place]}_s") > 0.9 * seconds
    return rank.stood_in or was_behind or in_telemetry or rank.cause == PHASE[hit.place]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "max_lag", "grace_s"),
    [(0, 2, 0.02), (1, 64, 0.02), (2, 64, 0.35)],
    ids=["little lag", "stood in for soon", "much grace"],
)
def test_random_stalls_anywhere_on_any_rank_are_all_in_the_reports(seed, max_lag, grace_s):
    deadline_s, hits = 0.1, random_stalls(4, 40, seed)
    results = run_forked(train, 4, 40, hits, deadline_s, LateHandling(grace_s=grace_s, max_lag=max_lag))
    check_replicas_and_counters(results)
    reports = reports_of(results)
    assert missed_stalls(reports, hits) == []
    late = [rank for report in reports for rank in report.ranks if rank.late]
    assert {rank.rank for rank in late} == {0, 1, 2, 3}
    assert any(not rank.stood_in for rank in late) or grace_s < 0.1  # it stopped by itself
    if max_lag == 2:
        assert 2 <= largest_lag(results) <= 3  # one more, because a rank notes a little later that it has a merge
    else:
        check_waits(reports, 2, deadline_s + grace_s + 0.15)


# -- ranks that go on with their backward pass when it is too late


# -- a process in which nothing runs: the stand-in cannot run either, and the peers wait


def hold_interpreter(seconds):
    """A call into C that keeps the interpreter's lock, as some extensions do."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def stop(victim, seconds):
    """Stops another rank's process for so long, from a thread."""
    process = process_of(victim)

    def stop_and_continue():
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)

    threading.Thread(target=stop_and_continue).start()


def process_of(rank):
    return int(dist.distributed_c10d._get_default_store().clone().get(f"process/{rank}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hit", "seconds"),
    [
        (Hit(1, 5, "forward", hold_interpreter, (1.0,)), 1.0),
        (Hit(1, 5, "backward", hold_interpreter, (1.0,)), 1.0),
        (Hit(0, 5, "data", stop, (1, 1.5)), 1.5),
    ],
    ids=["held interpreter, forward", "held interpreter, backward", "stopped process"],
)
def test_peers_of_a_rank_in_which_nothing_runs_wait_as_long_as_that_lasts_and_go_on(hit, seconds):
    late_handling = LateHandling(grace_s=0.02, max_lag=64, give_up_s=30.0)
    results = run_forked(train, 3, 30, [hit], 0.1, late_handling)
    check_replicas_and_counters(results)
    reports = reports_of(results, rank=2)
    held = max(reports, key=lambda report: report.seconds)
    # the wait is bounded by the pause itself (and by give_up_s, see below), not by the deadline
    assert 0.6 * seconds < held.seconds < 2 * seconds
    assert 5 <= held.step <= 7
    after = reports[held.step + 5 :]
    assert sum(report.seconds for report in after) < len(after) * seconds / 2
    # the rank takes part again; on a busy machine any rank may be late in a single step
    assert sum(not report.ranks[1].late for report in after) > len(after) / 2


def train_until_failure(rank, *arguments):
    """The words with which training failed, and when."""
    with pytest.raises(PeerFailed) as failure:
        train(rank, *arguments)
    return str(failure.value), time.monotonic()


@pytest.mark.slow
def test_process_that_is_stopped_for_longer_than_give_up_s_is_named_while_it_is():
    late_handling = LateHandling(grace_s=0.02, max_lag=64, give_up_s=1.0)
    ends = run_forked(train_until_failure, 3, 10**6, [Hit(0, 5, "data", stop, (1, 5.0))], 0.1, late_handling)
    for words, at in (ends[0], ends[2]):
        assert "no answer from ranks [1]" in words
        assert at < ends[1][1] - 1.0  # the stopped rank hears of it, too, when it runs again


# -- a rank that runs, but slowly


_released = threading.Event()


def throttle(victim, on_s, off_s):
    """Lets another rank's process run for ``on_s`` and stops it for ``off_s`` in turns, until `release`."""
    process = process_of(victim)

    def stop_and_continue():
        until = time.monotonic() + 30.0
        while not _released.is_set() and time.monotonic() < until:
            os.kill(process, signal.SIGSTOP)
            time.sleep(off_s)
            os.kill(process, signal.SIGCONT)
            time.sleep(on_s)

    threading.Thread(target=stop_and_continue).start()


def release():
    """Ends `throttle`; on the rank that began it."""
    _released.set()


def compute(seconds):
    """Work in small pieces: a process that is stopped makes no progress, and one that shares its CPU still does."""
    for _ in range(round(1000 * seconds)):
        time.sleep(0.001)


@pytest.mark.slow
def test_rank_with_a_quarter_of_a_cpu_hands_in_what_it_has():
    work = [Hit(1, step, "forward", compute, (0.02,)) for step in range(30)]
    work += [Hit(1, step, "backward", compute, (0.10,)) for step in range(30)]
    quota = [Hit(0, 6, "data", throttle, (1, 0.025, 0.075)), Hit(0, 14, "data", release)]
    results = run_forked(train, 3, 30, [*work, *quota], 0.25, LateHandling(grace_s=0.05, max_lag=64))
    check_replicas_and_counters(results)
    reports = reports_of(results)
    victim = [report.ranks[1] for report in reports]
    assert sum(rank.late for rank in victim[:6]) <= 2  # its work alone is no reason
    assert all(rank.late for rank in victim[6:10])
    assert victim[6].cause in {"forward", "backward"}
    assert any(0 < rank.reach < 1 for rank in victim)
    assert not victim[-1].late
    throttled = [report.seconds for report in reports if report.ranks[1].late]
    assert statistics.mean(throttled) < 0.75 * 4 * (0.02 + 0.10)


# -- a slow link


@pytest.fixture
def slow_network():
    """Three network namespaces; what the third one sends and gets is slow. Gives their names."""
    with made_network(3, {2: {"delay": LINK_DELAY_S, "rate": 20e6}}) as network:
        yield network.names


def train_in(rank, namespaces, folder, *arguments):
    """Trains with a process group inside of the rank's network namespace."""
    dist.destroy_process_group()
    enter(namespaces[rank])
    store = dist.FileStore(f"{folder}/store")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(namespaces))
    return train(rank, *arguments, bucket_bytes=stages.BUCKET_BYTES)


@pytest.mark.slow
def test_slow_link_makes_merges_slow_and_nobody_late(slow_network, tmp_path):
    deadline_s = 0.2
    results = run_forked(train_in, 3, slow_network, tmp_path, 14, [], deadline_s, LateHandling(grace_s=0.0))
    check_replicas_and_counters(results)
    reports = reports_of(results)[2:]
    assert all(report.seconds > deadline_s for report in reports)
    late = [report.step for report in reports if report.late_ranks]
    assert len(late) <= len(reports) // 2  # on a busy machine; if merging counted, it would be late in all of them


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [1, 2], ids=["on a fast link", "on the slow link"])
def test_peers_go_on_at_the_pace_of_a_slow_link_while_a_rank_is_stuck(slow_network, tmp_path, stuck):
    hits = [Hit(stuck, 3, "forward", time.sleep, (2.0,))]
    results = run_forked(train_in, 3, slow_network, tmp_path, 10, hits, 0.1, LateHandling(grace_s=0.02, max_lag=64))
    check_replicas_and_counters(results)
    reports = reports_of(results)
    first, length = stood_in_longest(reports, stuck)
    assert first == 3
    assert length >= 3  # where the peers wait, it is one step
    # whoever waits for it waits for nearly 2 s; the rest is room for a busy machine
    assert max(waits_s(reports, quorum=1)) < 1.0
    assert max(report.seconds for report in reports) < 1.5


# -- bad numbers, errors and death, while others are late


@pytest.mark.slow
def test_bad_numbers_among_stalls_are_left_out_counted_and_named():
    draw = random.Random(0)
    bad = {(draw.randrange(4), step) for step in range(3, 40, 2)} | {(rank, 20) for rank in range(4)}
    hits = [hit for hit in random_stalls(4, 40, seed=2) if hit.reported_in < 18 or hit.step > 20]
    results = run_forked(train, 4, 40, hits, 0.1, LateHandling(grace_s=0.02), bad)
    check_replicas_and_counters(results, bad)
    reports = reports_of(results)
    found = {(rank.rank, report.step) for report in reports for rank in report.ranks if rank.nonfinite}
    late = {(rank, report.step) for report in reports for rank in report.late_ranks}
    assert bad - late <= found <= bad
    assert late - bad
    assert [report.step for report in reports if report.skipped] == [20]
    assert results[0][20].parameters == results[0][19].parameters


class Broken(Exception):
    pass


def fail():
    raise Broken("of the user")


def sleep_and_fail(seconds):
    time.sleep(seconds)
    fail()


def sleep_and_die(seconds):
    time.sleep(seconds)
    die()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_raises_while_another_is_stuck_ends_both_others_with_its_name(rank):
    hits = [Hit(2, 5, "forward", time.sleep, (1.0,)), Hit(rank, 8, "backward", fail)]
    ends = run_forked(train, 3, 10**6, hits, 0.1, LateHandling(grace_s=0.02, max_lag=64), outcomes=True, timeout_s=30.0)
    assert (ends[rank].kind, ends[rank].message) == ("Broken", "of the user")
    for end in (ends[1 - rank], ends[2]):
        assert end.kind == "PeerFailed"
        assert f"rank {rank} raised in step 8" in end.message


def test_rank_that_raises_in_a_step_that_was_merged_without_it_ends_the_others_with_its_name():
    hits = [Hit(1, 5, "forward", sleep_and_fail, (1.0,))]
    ends = run_forked(train, 3, 10**6, hits, 0.1, LateHandling(grace_s=0.02, max_lag=64), outcomes=True, timeout_s=30.0)
    assert (ends[1].kind, ends[1].message) == ("Broken", "of the user")
    for end in (ends[0], ends[2]):
        assert end.kind == "PeerFailed"
        assert "rank 1 raised in step 5" in end.message
        assert "step 5, stage" not in end.message  # they had gone on


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_rank_that_is_killed_while_it_is_stood_in_for_ends_the_others_with_its_name(victim):
    give_up_s = 60.0
    hits = [Hit(victim, 5, "forward", sleep_and_die, (1.0,))]
    late_handling = LateHandling(grace_s=0.02, max_lag=64, give_up_s=give_up_s)
    ends = run_forked(train, 3, 10**6, hits, 0.1, late_handling, outcomes=True, timeout_s=give_up_s / 3)
    assert ends.pop(victim).kind == "Killed"
    for end in ends:
        assert end.kind == "PeerFailed"
        assert f"no answer from ranks [{victim}]" in end.message
        (step,) = re.findall(r"step (\d+), stage", end.message)
        assert int(step) > 8  # it was stood in for until then
