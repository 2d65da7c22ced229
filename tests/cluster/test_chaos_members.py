"""Chaos in the network: a member is cut off while the job trains, its connections do not break, and it comes back."""

import time

import pytest
from job_loop import Loop, absent, check_equal, gives_again, left, plain, train
from members import run_forked_job
from network import made_network
from ranks import Raised


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 0])
def test_member_whose_link_was_cut_is_put_out_and_healed(cut):
    peers = [rank for rank in range(3) if rank != cut]
    with made_network(4) as network, run_forked_job(3, train, Loop(plain), network=network) as job:
        job.walk(10, limit_s=60)
        network.cut(cut)
        cut_at = time.monotonic()
        job.walk(20, peers)
        time.sleep(max(0.0, cut_at + 3.0 - time.monotonic()))
        network.heal(cut)
        job.walk(20, limit_s=60)
        job.meet()
        outcomes = job.finish()
    check_equal(outcomes)
    assert set(left(outcomes[peers[0]])) == {cut}
    assert len(absent(outcomes[peers[0]], cut)) >= 20
    assert outcomes[cut].begun == 0  # the same process
    assert gives_again(outcomes[peers[0]], cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 0])
def test_member_whose_link_is_cut_for_ever_ends_and_the_others_do_not(cut):
    """It cannot know that it is out: who does not reach the store in time ends, and says why."""
    peers = [rank for rank in range(3) if rank != cut]
    with (
        made_network(4) as network,
        run_forked_job(3, train, Loop(plain, give_up_s=10.0), network=network) as job,
    ):
        job.walk(10, limit_s=60)
        network.cut(cut)
        ended = job.result(cut, limit_s=60)
        job.walk(20, peers)
        outcomes = job.finish(peers)
    assert isinstance(ended, Raised)
    assert ended.kind in ("StoreUnreachable", "PeerFailed"), ended  # its wait and its store give up in the same moment
    assert f"rank {cut}, step" in ended.message
    assert "the job's store at" in ended.message
    check_equal(outcomes)
    assert set(left(outcomes[0])) == {cut}
