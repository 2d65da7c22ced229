"""What the process's allocator keeps of the memory that large gradients have had."""

import ctypes
import subprocess
import sys

import pytest

COUNTS = """
import ctypes

import torch
import torch.distributed as dist

from straggle import StagedDataParallel

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
blocks = []

def apart():
    '''How many of one more block of 20 MB have pages of their own, which go back to the system with it.'''
    before = mallinfo2().hblks
    blocks.append(torch.empty(5 * 2**20))
    return mallinfo2().hblks - before

before = apart()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = StagedDataParallel(torch.nn.Linear(4, 4))
print(before, apart())
model.close()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this is about glibc's allocator")
def test_allocator_keeps_large_blocks_for_the_next_ones_as_under_ddp(monkeypatch):
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "0"]
