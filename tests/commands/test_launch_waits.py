"""A rank that can only wait for one that is done or down is ended by `straggle launch` at once, with the reason.

Rank 1 of two never comes, or ends before rank 0 does. Without an end by the launcher's word, rank 0 would wait for the
time limit of its process group, 1,800 s.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_jobs import free_port, launched, left, starts, wait_for

JOB = """
how, members, num_bad = HOW
bad = rank == "1" and count < num_bad
if bad and how == "import":
    import no_such_module
import torch, torch.distributed as dist, straggle
torch.set_num_threads(1)
dist.init_process_group("gloo")
if bad and how == "ends":
    sys.exit(0)
if bad and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
members = None if members is None else straggle.Elastic(min_ranks=members, suspect_s=30)
model = straggle.StagedDataParallel(torch.nn.Linear(8, 8), members=members)
step = 0 if members is None else model.register_state(optimizer=torch.optim.SGD(model.module.parameters(), 0.1))
while step < 8:
    if bad and how == "in its loop" and step == 4:
        sys.exit(0)
    with model.step():
        model(torch.ones(2, 8)).sum().backward()
    step = model.last_report.step + 1
leave("done", str(step))
"""
ALWAYS = 100
NOT_AGAIN = "and is not started again: "
HOW_IT_ENDED = {
    "import": "rank 1 ended with status 1, after ",
    "ends": "rank 1 ended with status 0, after ",
    "killed": "rank 1 ended by SIGKILL, after ",
    "in its loop": "rank 1 ended with status 0, after ",
}
WAYS = ["--restart-delay-s=0.1"]


def job(how: str, members: int | None, num_bad: int = ALWAYS) -> str:
    return JOB.replace("HOW", repr((how, members, num_bad)), 1)


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("how", HOW_IT_ENDED)
def test_rank_that_needs_one_that_is_done_or_down_ends_at_once_and_says_so(
    how: str, max_restarts: int, tmp_path: Path
) -> None:
    options = [*WAYS, "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    with launched(tmp_path, job(how, None), *options, loaded=True) as started:
        assert started.status() == 1
        log = started.log.read_text()
    reason = "it has done its work" if how in ("ends", "in its loop") else f"all its {max_restarts} restarts are used"
    assert "rank 0 ended with status 1, after " in log
    if how == "in its loop":  # rank 0 is there, and hears of it in its next merge
        assert "rank 0, step 4, stage " in log
        assert "rank 1 ended after step 3 (its loop was over" in log
    if how != "in its loop" or max_restarts:
        assert HOW_IT_ENDED[how] in log
        assert f"{NOT_AGAIN}{reason}" in log
    assert starts(tmp_path, 0) <= max_restarts + 1
    assert not (tmp_path / "done.0.0").exists()


def test_rank_that_is_started_again_before_its_peer_has_ended_does_not_take_its_own_first_coming_for_the_peers(
    tmp_path: Path,
) -> None:
    slowly = "del model; dist.destroy_process_group(); wait_for('environment.0.1'); time.sleep(0.5); sys.exit(0)"
    body = job("in its loop", None).replace("step == 4:\n        sys.exit(0)", f"step == 4:\n        {slowly}")
    options = [*WAYS, "--nproc-per-node=2", "--max-restarts=1"]
    with launched(tmp_path, body, *options, loaded=True) as started:
        assert started.status() == 1  # it waited for a message of the peer, for 1,800 s
        log = started.log.read_text()
    assert f"{HOW_IT_ENDED['in its loop']}" in log
    assert starts(tmp_path, 0) == 2


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("how", HOW_IT_ENDED)
def test_members_of_whom_enough_are_left_go_on_without_one_that_is_done_or_down(
    how: str, max_restarts: int, tmp_path: Path
) -> None:
    options = [*WAYS, "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    with launched(tmp_path, job(how, 1), *options, loaded=True) as started:
        done = how in ("ends", "in its loop")
        assert started.status() == (0 if done else {"import": 1, "killed": 137}[how])
        log = started.log.read_text()
    assert left(tmp_path, "done", 0) == "8"
    assert starts(tmp_path, 0) == 1
    if how != "in its loop":
        assert f"the job begins with ranks [0]: {HOW_IT_ENDED[how]}" in log


def test_members_of_whom_too_few_are_left_end_at_once_and_say_so(tmp_path: Path) -> None:
    options = [*WAYS, "--nproc-per-node=2", "--max-restarts=1"]
    with launched(tmp_path, job("killed", 2), *options, loaded=True) as started:
        assert started.status() == 1
        log = started.log.read_text()
    why = "all its 1 restarts are used, and too few ranks are left without it (Elastic.min_ranks)"
    assert f"rank 0, before step 0: {HOW_IT_ENDED['killed']}" in log
    assert log.count(why) >= 2  # the rank's error, and why its launcher does not start it again
    assert starts(tmp_path, 0) == 1


def test_ranks_that_only_meet_all_together_start_again_together(tmp_path: Path) -> None:
    """Rank 1 comes at its third start; rank 0, which has waited for the first, meets it there."""
    options = [*WAYS, "--nproc-per-node=2", "--max-restarts=3"]
    with launched(tmp_path, job("import", None, 2), *options, loaded=True) as started:
        assert started.status() == 0
    assert left(tmp_path, "done", 0, 2) == left(tmp_path, "done", 1, 2) == "8"


@pytest.mark.parametrize("members", [None, 1])
def test_launcher_of_another_node_says_in_the_store_that_its_worker_is_down(
    members: int | None, tmp_path: Path
) -> None:
    address = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = [*WAYS, "--nnodes=2", "--max-restarts=0", address]
    with (
        launched(tmp_path, job("import", members), *options, "--node-rank=0", loaded=True) as first,
        launched(tmp_path, job("import", members), *options, "--node-rank=1", loaded=True) as second,
    ):
        assert [first.status(), second.status()] == [1 if members is None else 0, 1]
        if members is None:
            assert f"rank 0, before step 0: {HOW_IT_ENDED['import']}" in first.log.read_text()
        else:
            wait_for(first, tmp_path, "done.0.0")
