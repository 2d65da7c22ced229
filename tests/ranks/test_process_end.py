"""How a process ends in which a collective of gloo is still on its way."""

import subprocess
import sys

import pytest
from stores import serve_store

from straggle.merge.wire.groups import GlooGroup

ENDS = """
import sys

import torch
import torch.distributed as dist

from straggle.merge.wire.groups import GlooGroup

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]))
group = GlooGroup(store, 1, 2, 20.0, 600.0)
work = group.all_reduce(torch.ones(4))
if sys.argv[2] == "dropped":
    group.drop()
print("ends", flush=True)
"""


@pytest.mark.parametrize("how", ["dropped", "in use"])
def test_process_ends_though_a_collective_waits_for_a_rank_that_does_not_come(how):
    server = serve_store()
    command = [sys.executable, "-c", ENDS, str(server.port), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        here = GlooGroup(server, 0, 2, 20.0, 600.0)  # lives on, and launches nothing
        try:
            assert other.communicate(timeout=60)[0] == "ends\n"
        finally:
            other.kill()
    assert other.returncode == 0
    here.drop()
