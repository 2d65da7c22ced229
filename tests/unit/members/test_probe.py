"""When a rank that is out times steps of its own, and what it says then: by a clock that is an argument."""

from __future__ import annotations

import pytest

from straggle.members.slow.probe import AFTER_S, NEAR, NUM_STEPS, Probes


class Loop:
    """A loop whose rank is out: ``data_s`` between two steps and ``pass_s`` in the block of a step in full."""

    def __init__(self, data_s: float = 0.3, pass_s: float = 0.1) -> None:
        self.now, self.said = 100.0, list[float]()
        self.data_s, self.pass_s = data_s, pass_s
        self.probes = Probes(lambda: self.now, self.said.append)
        self.full = list[float]()  # when it began steps in full

    def step(self, waits_s: float = 0.0, lag: int = 0) -> bool:
        """``waits_s``: for its peers to have made the step, before it enters it, and again when it has left it."""
        self.now += self.data_s
        own_s = self.probes.came()
        self.now += waits_s
        goes = self.probes.enter(own_s, lag)
        if goes:
            self.full.append(self.now)
            self.now += self.pass_s
        self.probes.leave()
        self.now += waits_s
        self.probes.left()
        return goes

    def until(self, seconds: float, **how: float) -> None:
        while self.now < 100.0 + seconds:
            self.step(**how)  # type: ignore[arg-type]


@pytest.mark.parametrize("waits_s", [0.0, 0.5])
def test_a_probe_says_the_mean_of_its_steps_after_the_first_without_waits_for_peers(waits_s: float) -> None:
    loop = Loop()
    loop.until(AFTER_S + 10, waits_s=waits_s)
    assert len(loop.full) == NUM_STEPS
    assert loop.said == [pytest.approx(0.4)]


def test_what_was_loaded_while_nothing_was_computed_does_not_count() -> None:
    loop = Loop(data_s=1.0)
    while not loop.step():
        pass
    loop.data_s = 0.2
    while not loop.said:
        loop.step()
    assert loop.said == [pytest.approx(0.3)]


def test_a_rank_probes_first_after_five_seconds_and_then_for_a_tenth_of_its_time_at_most() -> None:
    loop = Loop()
    loop.until(2000)
    assert loop.full[0] >= 100.0 + AFTER_S
    assert 0.05 < len(loop.full) * 0.4 / 2000 < 0.11
    quick = Loop(0.001, 0.001)
    quick.until(60)
    between = [
        later - earlier
        for earlier, later in zip(quick.full[::NUM_STEPS], quick.full[NUM_STEPS::NUM_STEPS], strict=False)
    ]
    assert min(between) >= AFTER_S


def test_a_loop_that_cannot_walk_along_is_not_probed_until_it_can() -> None:
    loop = Loop()
    loop.until(60, lag=NEAR + 1)
    assert loop.full == loop.said == []
    loop.until(70, lag=NEAR)
    assert len(loop.said) == 1


def test_a_probe_ends_with_being_out_and_begins_anew() -> None:
    loop = Loop()
    while not loop.step():
        pass
    loop.probes.forget()
    assert not loop.probes.runs
    assert not loop.step()
    began = loop.now
    while not loop.said:
        loop.step()
    assert loop.said == [pytest.approx(0.4)]
    assert loop.full[1] >= began + AFTER_S - 0.31
