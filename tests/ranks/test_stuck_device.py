"""A device that never finishes what is queued on it: what its rank and its peers say, and that their processes end."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from queued_device import RecordingDevice, queued_device
from ranks import Raised, rank_environment, run_forked, staged
from repository import ROOT
from stores import serve_store
from training import features, mlp

from straggle import LateHandling, PeerFailed
from straggle.merge.late import device_watch
from straggle.merge.late.device_watch import DeviceWatch
from straggle.merge.wire.channel import Channel
from straggle.merge.wire.groups import QueuedGroup

GIVE_UP_S = 2.0
groups_of_torch = vars(dist.distributed_c10d)["_world"]


class HangingQueue(RecordingDevice):
    """A device of which no mark becomes ready that is made while it ``hangs``, until it is ``freed``."""

    hangs = freed = False

    def mark(self, again=None):
        return not self.hangs, super().mark(again)

    def ready(self, mark):
        return (mark[0] or self.freed) and super().ready(mark[1])

    def wait(self, mark):
        while not self.ready(mark):
            time.sleep(0.01)

    def seconds_between(self, before, after):
        return super().seconds_between(before[1], after[1])


class Told:
    """The error that the training thread raises with its next call."""

    def __init__(self):
        self.came = threading.Event()

    def __call__(self, error):
        self.error = error
        self.came.set()


def queue_steps(watch, hangs):
    """Two steps on a device that ``hangs`` in this part of the second one."""
    watch.start(queue=watch.device.queue)
    for step in range(2):
        queued = watch.begin(step, ["c", "a, b"])
        watch.device.hangs = step == 1 and hangs == "own"
        for bucket in range(2):
            time.sleep(0.01)  # so that each has a mark
            queued.launches(bucket)
        queued.submitted()
        watch.device.hangs = step == 1
        queued.comes_after()


def wait_in_the_driver(rank, stuck, folder):
    """Rank ``stuck`` never comes back from its device; its peers do, once their collectives are aborted."""
    device_watch.LEAVE_S = 1.0
    told, channel = Told(), Channel(None, give_up_s=GIVE_UP_S)
    watch = DeviceWatch(HangingQueue(), channel, told)
    channel.abort = lambda: setattr(watch.device, "freed", rank != stuck)
    if rank == stuck:
        os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT), 2)
    queue_steps(watch, "own" if rank == stuck else "merged")
    told.came.wait()
    if rank == stuck:
        threading.Event().wait()
    raise told.error


@pytest.mark.slow
def test_peers_of_a_stuck_device_end_with_its_rank_step_and_stage_and_its_own_process_ends(tmp_path):
    ends = run_forked(wait_in_the_driver, 3, 1, str(tmp_path), outcomes=True, timeout_s=40)
    words = "rank 1, step 1, stage c: its device has not finished these gradients in "
    for rank in (0, 2):
        assert ends[rank].kind == "PeerFailed"
        assert f"rank {rank}, step 1, stage c, a, b, not merged by this rank's device: {words}" in ends[rank].message
    assert ends[1] == Raised("Killed", "the process ended without a word")
    assert words in (tmp_path / "log").read_text()
    assert "this process ends: its device is stuck" in (tmp_path / "log").read_text()


def train_until_a_device_hangs(rank, stuck, folder):
    """In step 3 rank ``stuck``'s device hangs, and rank 0 waits for its own in a call of the driver."""
    device_watch.LEAVE_S = 1.0
    module, freed = mlp(), threading.Event()
    Channel.abort = lambda _channel: freed.set()
    late_handling = LateHandling(give_up_s=GIVE_UP_S)
    with queued_device(HangingQueue()) as device, staged(module, late_handling=late_handling) as model:
        model.register_submit_hook(lambda step: setattr(device, "hangs", step == 3))
        if rank == stuck:
            os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT), 2)
        for step in range(10):
            device.hangs = rank == stuck and step == 3
            with model.step():
                model(features(rank, step)).sum().backward()
            if step == 3 and rank == stuck:
                threading.Event().wait()
            elif step == 3 and rank == 0:
                freed.wait()
                device.freed = True


@pytest.mark.slow
def test_training_ends_on_all_ranks_with_the_rank_step_and_stage_of_a_stuck_device(tmp_path):
    ends = run_forked(train_until_a_device_hangs, 3, 1, str(tmp_path), outcomes=True, timeout_s=40)
    words = "rank 1, step 3, stage 4, 2, 0: its device has not finished these gradients in "
    assert [ends[rank].kind for rank in (0, 2)] == ["PeerFailed", "PeerFailed"]
    assert f"rank 0, step 3, stage 4, 2, 0, not merged by this rank's device: {words}" in ends[0].message
    assert f"rank 2, step 4, stage rows of all ranks: {words}" in ends[2].message
    assert ends[1] == Raised("Killed", "the process ended without a word")
    assert words in (tmp_path / "log").read_text()


def explain_what_hangs_here(rank):
    channel = Channel(None, give_up_s=30.0)
    channel.device_is_watched(lambda: f"rank {rank}: its device hangs")
    return channel.explain("rows")


def test_rank_that_gives_up_says_first_that_its_own_device_is_stuck():
    assert run_forked(explain_what_hangs_here, 1) == ["rows: rank 0: its device hangs"]


def leave_rows_that_wait_for_a_peer():
    dist.init_process_group("gloo")
    channel = Channel(None, give_up_s=200.0)
    if channel.rank == 1:
        channel.post_failure("rank 1 failed")
        sys.stdin.read()
        os._exit(0)
    work = channel.groups.control.all_reduce(torch.ones(1))
    with pytest.raises(PeerFailed, match="rank 1 failed"):
        channel.wait(work, 0, "rows")
    dist.destroy_process_group()
    vars(sys.modules["__main__"])["kept"] = channel, work  # as a script has its model until the interpreter ends


@pytest.mark.slow
def test_no_destructor_waits_for_the_rows_of_a_peer_that_has_failed():
    server = serve_store()
    with (
        begun("leave_rows_that_wait_for_a_peer()", rank=1, server=server) as peer,
        begun("leave_rows_that_wait_for_a_peer()", rank=0, server=server) as rank,
    ):
        rank.communicate(timeout=100)  # and not give_up_s, for which its peer is there
        assert rank.returncode == 0
        peer.communicate()


def abort_while_a_peer_is_awaited(rank):
    """Whether torch still knows of the group, which would wait for its collective as it is destroyed."""
    group = QueuedGroup.formed([0, 1], 30.0, "gloo")
    known = set(groups_of_torch.pg_map)
    if rank == 0:
        group.all_reduce(torch.ones(4))
    group.abort(wait_s=20.0)
    group.abort()
    return len(known - set(groups_of_torch.pg_map))


def test_aborted_group_is_no_more_there_to_be_destroyed():
    assert run_forked(abort_while_a_peer_is_awaited, 2) == [1, 1]


class SlowQueue(RecordingDevice):
    """A device that comes to each mark only shortly before ranks give up."""

    def ready(self, mark):
        return time.monotonic() - mark[0] > 0.9 and super().ready(mark)


def pause_and_be_slow(rank):
    """After two of the steps there is a pause that is longer than ranks wait for each other."""
    late_handling = LateHandling(give_up_s=1.0)
    with queued_device(SlowQueue()), staged(mlp(), late_handling=late_handling) as model:
        for step in range(6):
            with model.step():
                model(features(rank, step)).sum().backward()
            if step in (1, 3):
                time.sleep(2.5)
        return model.last_report.step


@pytest.mark.slow
def test_device_that_is_slow_and_a_long_pause_are_no_failure():
    assert run_forked(pause_and_be_slow, 2) == [5, 5]


@contextlib.contextmanager
def begun(call, rank, server, world_size=2):
    """This call of a function of this file, in a process that ends as any does."""
    paths = os.pathsep.join(str(ROOT / "tests" / folder) for folder in ("ranks", "support"))
    environment = {**os.environ, **rank_environment(rank, world_size, server.port), "PYTHONPATH": paths}
    script = f"import test_stuck_device; test_stuck_device.{call}"
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def hang_alone(comes_back):
    device_watch.LEAVE_S = 60.0 if comes_back else 0.5
    dist.init_process_group("gloo")
    told = Told()
    watch = DeviceWatch(HangingQueue(), Channel(None, give_up_s=1.0), told)
    queue_steps(watch, "own")
    told.came.wait()
    if not comes_back:
        threading.Event().wait()
    raise told.error


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_process_whose_device_is_stuck_ends_with_status_1_and_the_error(comes_back):
    server = serve_store()
    with begun(f"hang_alone({comes_back})", rank=0, server=server, world_size=1) as process:
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 0, step 1, stage c: its device has not finished these gradients in" in printed
    assert "this process ends: its device is stuck" in printed
    assert ("PeerFailed: rank 0" in printed) == comes_back
