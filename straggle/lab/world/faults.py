"""What goes wrong in a simulated world, at which time.

``turns``: so many turns of the rank's threads later; most turns are where threads and ranks meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from straggle.lab.world.run import Job


@dataclass(frozen=True)
class Stall:
    """A rank's training thread stands still for so long, wherever it is then; its other threads go on."""

    rank: int
    at_s: float
    for_s: float
    turns: int = 0

    def begin(self, job: Job) -> None:
        """Set its timers."""

        def begins() -> None:
            job.scheduler.pause(job.training[self.rank], self.for_s)

        job.at(self.at_s, self.rank, self.turns, begins)


@dataclass(frozen=True)
class Freeze:
    """None of a rank's threads runs for so long, as after SIGSTOP, or while one holds the interpreter's lock."""

    rank: int
    at_s: float
    for_s: float
    turns: int = 0

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.at(self.at_s, self.rank, self.turns, lambda: job.scheduler.pause(self.rank, self.for_s))


@dataclass(frozen=True)
class Kill:
    """A rank's process is gone, and its peers' connections to it close; ``back_s``: another one is started then."""

    rank: int
    at_s: float
    back_s: float | None = None
    turns: int = 0

    def begin(self, job: Job) -> None:
        """Set its timers."""

        def ends() -> None:
            job.kill(self.rank)
            if self.back_s is not None:
                job.start_later(self.rank, self.back_s)

        job.at(self.at_s, self.rank, self.turns, ends)


@dataclass(frozen=True)
class Cut:
    """Nothing comes from a rank or to it for so long, the store's answers included; then all of it comes."""

    rank: int
    at_s: float
    for_s: float
    turns: int = 0

    def begin(self, job: Job) -> None:
        """Set its timers."""

        def begins() -> None:
            job.network.cut_off(self.rank)
            job.scheduler.after(self.for_s, lambda: job.network.mend(self.rank))

        job.at(self.at_s, self.rank, self.turns, begins)


@dataclass(frozen=True)
class StoreAway:
    """The job's store answers nobody for so long; ``empties``: it was started again, and has lost all that it had."""

    at_s: float
    for_s: float
    empties: bool = False

    def begin(self, job: Job) -> None:
        """Set its timers."""

        def returns() -> None:
            if self.empties:
                job.server.data.clear()
            job.server.come_back()

        job.scheduler.at(self.at_s, job.server.go_away)
        job.scheduler.at(self.at_s + self.for_s, returns)


@dataclass(frozen=True)
class Notice:
    """A rank's process is told to end soon, as by SIGTERM: `Rank.is_told`."""

    rank: int
    at_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: job.told.add(job.training[self.rank].process))


@dataclass(frozen=True)
class Clock:
    """A rank's clock shows ``first_s`` when the world begins, and goes ``rate`` seconds a second from then on."""

    rank: int
    first_s: float
    rate: float = 1.0

    def begin(self, job: Job) -> None:
        """Set it."""
        job.scheduler.clocks[self.rank] = self.first_s, self.rate
