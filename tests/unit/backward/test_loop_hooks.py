"""Brackets around what a loop loads and waits for: whose calls they see, and what they leave behind."""

import _thread
import functools
import multiprocessing
import threading

import pytest
from torch.utils.data import DataLoader

from straggle.backward.clocks import Stopwatch
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


def test_wrapper_of_another_program_around_a_bracket_stays_when_brackets_are_removed():
    first = CallBracket(Called, "method", counting([]))
    around_first = Called.method

    @functools.wraps(around_first)
    def theirs(self):
        return f"theirs: {around_first(self)}"

    try:
        Called.method = theirs
        first.remove()
        CallBracket(Called, "method", counting([])).remove()
        assert Called.method is theirs
        assert Called().method() == "theirs: done"
    finally:
        Called.method = BEFORE


def test_call_that_no_python_code_makes_is_done():
    done = threading.Event()
    Called.sets = lambda _own: done.set()
    bracket = CallBracket(Called, "sets", counting([]))
    _thread.start_new_thread(Called().sets, ())  # is the first frame of its thread
    assert done.wait(20)
    bracket.remove()


def report_calls(calls, sender):
    Called().method()
    sender.send(len(calls))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_calls_of_a_forked_process_are_let_through():
    calls = []
    bracket = CallBracket(Called, "method", counting(calls))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=report_calls, args=(calls, sender))
    process.start()
    assert receiver.recv() == 0
    process.join()
    bracket.remove()


@pytest.mark.parametrize("of_others", [False, True])
def test_clocks_of_two_models_see_the_same_call(of_others):
    clocks = Stopwatch(), Stopwatch()
    Called.look = lambda _own: [clock.phase for clock in clocks]
    brackets = [CallBracket(Called, "look", clock.collective, of_others=of_others) for clock in clocks]
    assert Called().look() == ["collective", "collective"]
    for bracket in brackets:
        bracket.remove()


@pytest.mark.parametrize(("of_others", "num_calls"), [(False, 1), (True, 0)])
def test_calls_by_straggle_itself_are_let_through_where_those_of_others_are_meant(of_others, num_calls):
    calls, code = ([], []), {"__name__": "straggle.merge.wire.groups", "called": Called()}
    brackets = [CallBracket(Called, "method", counting(own), of_others=of_others) for own in calls]
    exec("called.method()", code)
    assert [len(own) for own in calls] == [num_calls, num_calls]
    for bracket in brackets:
        bracket.remove()


def test_each_batch_is_loaded_once_and_the_end_of_the_loader_comes_through():
    calls = []
    brackets = around_loads(counting(calls))
    assert [int(batch) for batch in DataLoader([1, 2, 3])] == [1, 2, 3]
    assert len(calls) == 1 + 3 + 1  # the epoch begins, the batches, and there is no other
    for bracket in brackets:
        bracket.remove()
