"""The last collective that is not over, from a dump of torch's Flight Recorder."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from straggle.stuck.collectives import lines_of, newest_open, own_dump

# as torch 2.13 wrote it: gloo notes that a collective is retired, and leaves its state
GLOO = json.loads("""{"comm_lib_version":"","entries":[
{"collective_seq_id":1,"input_dtypes":["Float"],"input_sizes":[[3]],"is_p2p":false,"op_id":1,"output_dtypes":["Float"],
 "output_sizes":[[3]],"p2p_seq_id":0,"pg_id":0,"process_group":["0","default_pg"],"profiling_name":"gloo:all_reduce",
 "record_id":0,"retired":true,"state":"scheduled","time_created_ns":1795801957532195665,"timeout_ms":1800000},
{"collective_seq_id":1,"input_dtypes":["Float"],"input_sizes":[[5,7]],"is_p2p":false,"op_id":1,"output_dtypes":["Float"],
 "output_sizes":[[5,7]],"p2p_seq_id":0,"pg_id":1,"process_group":["1","evaluation"],"profiling_name":"gloo:all_reduce",
 "record_id":1,"retired":false,"state":"scheduled","time_created_ns":1795801957543077454,"timeout_ms":1800000},
{"collective_seq_id":9,"input_dtypes":["Float"],"input_sizes":[[370]],"is_p2p":false,"op_id":9,"output_dtypes":["Float"],
 "output_sizes":[[370]],"p2p_seq_id":0,"pg_id":2,"process_group":["",""],"profiling_name":"gloo:all_reduce",
 "record_id":2,"retired":false,"state":"scheduled","time_created_ns":1795801957553077454,"timeout_ms":1800000}],
"nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"","ranks":"[]"}},
"pg_status":{"0":{"last_completed_collective":"1","last_enqueued_collective":"1","last_started_collective":"-1"},
"1":{"last_completed_collective":"-1","last_enqueued_collective":"1","last_started_collective":"-1"}},"version":"2.10"}""")


def entry(**changed):
    """One of nccl's, by the fields in torch's documentation of the Flight Recorder."""
    own = {
        "record_id": 5,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 42,
        "p2p_seq_id": 0,
        "retired": False,
    }
    own |= {"profiling_name": "nccl:all_reduce", "state": "started", "is_p2p": False, "input_sizes": [[3, 4]]}
    return own | changed


def test_lines_are_those_of_the_calls_in_question_by_this_thread_or_by_its_backward_pass():
    frames = [{"filename": "/home/me/train.py", "line": 7, "name": "loss"}]
    calls = [
        entry(collective_seq_id=41),
        entry(frames=frames, thread_id="5"),
        entry(collective_seq_id=43, frames=frames, thread_id="5"),
        entry(collective_seq_id=44, thread_id="6", thread_name="pt_autograd_0"),
        entry(collective_seq_id=45, thread_id="6"),
        entry(collective_seq_id=44, is_p2p=True, profiling_name="nccl:recv"),
        entry(process_group=["1", "straggle"]),
    ]
    begun = {"0": range(42, 46)}
    assert lines_of({"entries": calls}, begun, "5") == ["all_reduce in loss (/home/me/train.py:7)", "all_reduce"]
    assert lines_of({"entries": [calls[4]]}, begun, "5") == []
    assert lines_of({"entries": calls[:1]}, begun, "5") is lines_of({}, begun, "5") is None


def test_the_newest_of_the_users_that_is_not_over_is_named():
    assert newest_open(GLOO) == "gloo:all_reduce number 1 of group evaluation ([5, 7], scheduled)"


def test_what_is_over_and_what_is_straggles_own_is_left_out():
    over = entry(record_id=6, state="completed")
    own = [entry(record_id=7, process_group=["7", "straggle"]), entry(record_id=8, process_group=["", ""])]
    assert newest_open({"entries": [entry(), over, *own]}) == (
        "nccl:all_reduce number 42 of group default_pg ([3, 4], started)"
    )
    assert newest_open({"entries": [over, *own]}) == newest_open({}) == ""
    assert newest_open({"entries": GLOO["entries"][:1]}) == ""
    assert newest_open({"entries": [entry(), entry(record_id=4, collective_seq_id=41)]}).startswith(
        "nccl:all_reduce number 42"
    )


def test_sends_have_numbers_of_their_own_and_groups_without_a_description_their_name():
    sends = entry(profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=3, process_group=["4", "undefined"])
    assert newest_open({"entries": [sends]}) == "nccl:send 0->1 number 3 of group 4 ([3, 4], started)"


def test_the_recorder_of_this_process_is_read(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    try:
        dist.all_reduce(torch.ones(3))
        assert any(one["profiling_name"] == "gloo:all_reduce" for one in own_dump()["entries"])
    finally:
        dist.destroy_process_group()
