"""A rank's time by phases, under a clock that only the test moves."""

from functools import partial

import pytest

from straggle.backward.clocks import Stopwatch


class FakeClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def stopwatch(clock):
    return Stopwatch(clock)


def run(stopwatch, clock, *events):
    """Seconds pass, phases begin, and "gradient" finishes one."""
    for event in events:
        if isinstance(event, float):
            clock.now_s += event
        elif event == "gradient":
            stopwatch.last_gradient_at = stopwatch.now()
        else:
            stopwatch.enter(event)
    return stopwatch.read()


def passed(seconds):
    return {phase: s for phase, s in seconds.items() if s}


def test_time_counts_for_the_phase_that_runs(stopwatch, clock):
    seconds = run(stopwatch, clock, 1.0, "data", 2.0, "forward", 4.0, "backward", 8.0, "gradient", "outside", 16.0)
    assert passed(seconds) == {"outside": 17.0, "data": 2.0, "forward": 4.0, "backward": 8.0}


def test_reading_changes_nothing(stopwatch, clock):
    run(stopwatch, clock, "forward", 1.0)
    assert stopwatch.read() == stopwatch.read() == run(stopwatch, clock)
    assert run(stopwatch, clock, 1.0)["forward"] == 2.0


def test_backward_ends_with_its_last_gradient_and_the_rest_is_data(stopwatch, clock):
    seconds = run(stopwatch, clock, "backward", 1.0, "gradient", 1.0, "gradient", 5.0, "forward", 3.0)
    assert passed(seconds) == {"data": 5.0, "forward": 3.0, "backward": 2.0}


def test_what_the_block_does_after_its_passes_is_none_of_them(stopwatch, clock):
    run(stopwatch, clock, "backward", 2.0, "gradient", 5.0)
    stopwatch.pass_over()
    assert passed(stopwatch.read()) == {"backward": 2.0, "outside": 5.0}


def test_loading_is_told_from_the_rest_of_the_loop_once_a_loader_is_known(stopwatch, clock):
    stopwatch.enter("optimizer")
    for _ in range(2):
        stopwatch.stepped()
        clock.now_s += 2.0  # logging; in the first step nothing tells it from loading
        stopwatch.load(partial(run, stopwatch, clock, 4.0))
        run(stopwatch, clock, 8.0, "forward", 1.0)
        stopwatch.load(partial(run, stopwatch, clock, 16.0))  # a batch that is fetched ahead
        run(stopwatch, clock, 32.0, "optimizer")
    assert passed(stopwatch.read()) == {"data": 2.0 + 2 * (4.0 + 8.0 + 16.0), "loop_end": 2.0, "forward": 66.0}


def test_batch_that_is_fetched_between_passes_of_a_block_is_loaded_and_prepared(stopwatch, clock):
    stopwatch.load(int)
    run(stopwatch, clock, "forward", 1.0, "backward", 2.0, "gradient", 4.0)
    stopwatch.load(partial(run, stopwatch, clock, 8.0))
    run(stopwatch, clock, 16.0, "forward", 1.0, "backward", 2.0, "gradient")
    assert passed(stopwatch.read()) == {"forward": 2.0, "backward": 4.0, "outside": 4.0, "data": 24.0}


def test_loader_that_is_at_its_end_gives_back_to_the_end_of_the_loop(stopwatch, clock):
    stopwatch.load(int)
    stopwatch.enter("forward")
    stopwatch.stepped()
    with pytest.raises(StopIteration):
        stopwatch.load(partial(next, iter(())))
    assert passed(run(stopwatch, clock, 3.0)) == {"loop_end": 3.0}


def test_loader_of_an_evaluation_does_not_make_other_loading_the_end_of_the_loop(stopwatch, clock):
    for _ in range(2):
        run(stopwatch, clock, "optimizer")
        stopwatch.stepped()
        stopwatch.load(int)
        with pytest.raises(StopIteration):
            stopwatch.load(partial(next, iter(())))
        run(stopwatch, clock, 4.0, "forward", 1.0)  # a batch of what is no DataLoader
    assert passed(stopwatch.read()) == {"data": 8.0, "forward": 2.0}


def test_collectives_of_the_loops_own_are_no_work(stopwatch, clock):
    run(stopwatch, clock, "optimizer", 1.0)
    stopwatch.collective(partial(run, stopwatch, clock, 4.0))
    assert passed(run(stopwatch, clock, 2.0)) == {"optimizer": 3.0, "collective": 4.0}


def test_backward_that_finishes_no_gradient_has_its_own_time(stopwatch, clock):
    seconds = run(stopwatch, clock, "forward", 1.0, "gradient", 1.0, "outside", 1.0, "backward", 4.0, "outside")
    assert sum(seconds.values()) == 7.0


def test_phases_sum_to_the_time_that_passed(stopwatch, clock):
    events = ["data", 0.5, "forward", 0.25, "backward", 1.0, "gradient", 0.125, "forward", 0.25, "gradient", "outside"]
    assert sum(run(stopwatch, clock, 2.0, *events).values()) == clock.now_s - 100.0
