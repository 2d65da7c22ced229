"""Brackets around what a loop loads and waits for: whose calls they see, and what they leave behind."""

import threading

import pytest
from torch.utils.data import DataLoader

from straggle.backward.loop_hooks import CallBracket, around_loads


class Called:
    def method(self):
        return "done"


BEFORE = Called.method


def counting(calls):
    def around(call):
        calls.append(1)
        return call()

    return around


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_brackets_put_back_what_was_there_in_whatever_order_they_are_removed(order):
    calls = [], []
    brackets = [CallBracket(Called, "method", counting(own)) for own in calls]
    assert (Called().method(), *map(len, calls)) == ("done", 1, 1)
    brackets[order[0]].remove()
    assert Called().method() == "done"
    assert len(calls[order[0]]) == 1
    assert len(calls[order[1]]) == 2
    brackets[order[1]].remove()
    assert Called.method is BEFORE


def test_calls_of_other_threads_are_let_through():
    calls = []
    bracket = CallBracket(Called, "method", counting(calls))
    thread = threading.Thread(target=Called().method)
    thread.start()
    thread.join()
    assert not calls
    bracket.remove()


def test_each_batch_is_loaded_once_and_the_end_of_the_loader_comes_through():
    calls = []
    brackets = around_loads(counting(calls))
    assert [int(batch) for batch in DataLoader([1, 2, 3])] == [1, 2, 3]
    assert len(calls) == 1 + 3 + 1  # the epoch begins, the batches, and there is no other
    for bracket in brackets:
        bracket.remove()
