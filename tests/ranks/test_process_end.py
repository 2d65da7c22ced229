"""How a process ends in which a collective of gloo, or a request to the store, is still on its way."""

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

# the answer comes while what is left of the interpreter is freed
ASKS = """
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from straggle.waits import end_before_exit

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]))

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

slow = sys.modules["slow"] = Slow()
asks = threading.Thread(target=store.wait, args=(["never"], timedelta(seconds=1.0)), daemon=True)
asks.start()
end_before_exit([asks], 0.2)
print("ends", flush=True)
"""


def test_process_ends_though_a_request_is_answered_only_when_it_ends():
    server = serve_store()
    done = subprocess.run([sys.executable, "-c", ASKS, str(server.port)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


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
