"""Ranks as processes of this machine: their results come back, and so do their errors."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from straggle.lab.local_ranks import run_on_ranks


def add_up(rank, start):
    number = torch.tensor([float(start + rank)])
    dist.all_reduce(number)
    return rank, number


def fail_or_wait(rank, seconds):
    if seconds is None and rank == 1:
        raise ValueError("no such thing")
    time.sleep(seconds or 60)


def test_each_rank_s_result_comes_back_in_the_order_of_ranks():
    assert run_on_ranks(add_up, 2, 3) == [(0, torch.tensor([7.0])), (1, torch.tensor([7.0]))]


def test_error_on_one_rank_ends_them_all():
    with pytest.raises(Exception, match="no such thing"):
        run_on_ranks(fail_or_wait, 2, None)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RuntimeError, match=r"did not end within 1 s"):
        run_on_ranks(fail_or_wait, 2, 30, timeout_s=1)
