"""A step's micro-batches are loaded one by one, by whoever draws them, and the next one ahead."""

import os
import threading

import pytest
import torch

from straggle import MicroBatches


class Looked(list):
    """Samples that say which of them were looked up, and by which thread."""

    def __init__(self, samples):
        super().__init__(samples)
        self.seen = []

    def __getitem__(self, number):
        self.seen.append((number, threading.current_thread() is threading.main_thread()))
        return super().__getitem__(number)


def test_only_what_is_looked_up_is_loaded():
    dataset = Looked(torch.arange(10))
    step = MicroBatches(dataset, size=3).of(range(10))
    assert len(step) == 4
    assert step.weights == [3.0, 3.0, 3.0, 1.0]
    assert step[2].tolist() == [6, 7, 8]
    assert dataset.seen == [(6, True), (7, True), (8, True)]
    assert [part.tolist() for part in step[:2]] == [[0, 1, 2], [3, 4, 5]]


def test_what_comes_next_is_loaded_by_another_thread_and_once():
    dataset = Looked(torch.arange(4))
    batches = MicroBatches(dataset, size=2)
    step = batches.of([3, 1, 0, 2])
    step.prefetch(1)
    step.prefetch(1)
    assert step[1].tolist() == [0, 2]
    assert dataset.seen == [(0, False), (2, False)]
    batches.close()


class OfProcess(list):
    """Samples that are the number of the process that looks them up."""

    def __getitem__(self, number):
        return super().__getitem__(number), os.getpid()


def test_workers_load_what_a_rank_has_drawn_and_in_any_order():
    batches = MicroBatches(OfProcess(torch.arange(6)), size=2, num_workers=2)
    step = batches.of([5, 4, 3, 2, 1, 0])
    assert step.num_ahead == 2
    step.prefetch(2)
    step.prefetch(0)
    loaded = {number: step[number] for number in (1, 0, 2)}
    assert [loaded[number][0].tolist() for number in range(3)] == [[5, 4], [3, 2], [1, 0]]
    assert all(os.getpid() not in processes.tolist() for _, processes in loaded.values())
    with pytest.raises(IndexError):
        batches.of([7])[0]
    batches.close()


def test_an_error_of_the_dataset_comes_to_who_draws():
    step = MicroBatches([1, 2], size=1).of([0, 7])
    step.prefetch(1)
    with pytest.raises(IndexError):
        step[1]


def test_stream_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"is a stream.*Rebalance"):
        MicroBatches(iter([]), size=2)
