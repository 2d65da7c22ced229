"""Whether a worker is started again, and when: pure functions of how its processes ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from straggle.members.agents import DO_NOT_RESTART, WRONG_CONFIGURATION, Exited

MAX_DELAY_S = 30.0
RECOVERED_S = 60.0  # a worker that ran so long has all its restarts again
QUICK_S = 10.0


@dataclass(frozen=True)
class RestartRules:
    """How often a worker is started again, and after how long the first time."""

    max_restarts: int = 10
    delay_s: float = 1.0


@dataclass(frozen=True)
class StartAgain:
    """After ``delay_s``; it is the worker's restart number ``restarts`` since it last ran for a minute."""

    delay_s: float
    restarts: int


@dataclass(frozen=True)
class StaysDown:
    """The worker is not started again; ``why`` is empty if it has done its work."""

    why: str = ""


def next_start(exited: Exited, restarts: int, rules: RestartRules) -> StartAgain | StaysDown:
    """What becomes of a worker whose process ended so, after so many ``restarts``.

    The delay doubles with each restart: s, 2 s, 4 s, ... at most 30 s.
    """
    if exited.code == 0:
        return StaysDown()
    if exited.code == DO_NOT_RESTART:
        return StaysDown("it said that the job is over")
    if exited.code == WRONG_CONFIGURATION:
        return StaysDown("its configuration is wrong, as it said")
    restarts = 0 if exited.ran_s >= RECOVERED_S else restarts
    if restarts >= rules.max_restarts:
        return StaysDown(f"all its {rules.max_restarts} restarts are used")
    return StartAgain(min(rules.delay_s * 2.0**restarts, MAX_DELAY_S), restarts + 1)


def job_ends(exited: Exited) -> bool:
    """Whether the others need not wait for a worker that stays down: it was refused before the job began."""
    return exited.code == WRONG_CONFIGURATION and exited.count == 0


def failed_again(last: Sequence[Exited | None]) -> bool:
    """Whether starting again has shown to be of no use: no rank runs, and all have failed twice in the same way.

    ``last`` is how each rank's last process ended, ``None`` for one that runs. The second time none has come far, so
    what is wrong is not one worker or one machine: a script with an error in it, data that are not there. A signal is
    no such sign. It comes from outside, and may hit all.
    """
    codes = {exited.code for exited in last if exited is not None}
    return (
        len(codes) == 1
        and not codes & {None, 0, DO_NOT_RESTART}
        and all(exited is not None and exited.count > 0 and exited.ran_s < QUICK_S for exited in last)
    )
