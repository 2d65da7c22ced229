"""The job's store dies and is restarted, empty: its members train on, and may leave and come back as before."""

import pytest
from job_loop import Loop, absent, check_equal, gives_again, joined, left, plain, train
from members import run_job

AGAIN = "the job's store was restarted"


@pytest.mark.parametrize("killed", [0, 2])
def test_rank_that_dies_after_the_store_was_restarted_comes_back(killed):
    with run_job(3, train, Loop(plain)) as job:
        peers = [rank for rank in range(3) if rank != killed]
        job.walk(10)
        job.kill_store()
        job.walk(20)
        job.start_store()
        job.wait(lambda: "generation 1, ranks [0, 1, 2]" in job.log(), "the members have a view again")
        job.walk(10)
        job.kill(killed)
        job.walk(20, peers)
        job.start(killed)
        job.walk(10)
        outcomes = job.finish()
        assert job.log().count(AGAIN) == 3
    check_equal(outcomes)
    witness = outcomes[peers[0]]
    assert set(left(witness)) == joined(witness) == {killed}
    assert gives_again(witness, killed)
    assert len(absent(witness, killed)) >= 20


def test_rank_that_dies_with_the_store_is_put_out_and_comes_back():
    with run_job(3, train, Loop(plain)) as job:
        job.walk(10)
        job.kill_store()
        job.kill(1)
        job.start_store()
        job.walk(20, [0, 2])
        job.start(1)
        job.walk(10)
        outcomes = job.finish()
    check_equal(outcomes)
    assert set(left(outcomes[0])) == joined(outcomes[0]) == {1}


def test_rank_that_was_stopped_while_the_store_was_restarted_does_not_bring_back_the_old_view():
    with run_job(3, train, Loop(plain)) as job:
        job.walk(10)
        job.stop(2)
        job.walk(20, [0, 1])  # it is out, and does not know it
        job.kill_store()
        job.start_store()
        job.resume(2)
        job.wait(lambda: "rank 2 takes part again" in job.log(), "rank 2 is let in")  # until then it walks on alone
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    assert set(left(outcomes[0])) == {2}
    assert gives_again(outcomes[0], 2)
