"""What goes wrong in a simulated world, at which time."""

from __future__ import annotations

from dataclasses import dataclass

from straggle.lab.world.run import Job


@dataclass(frozen=True)
class Stall:
    """A rank's training thread stands still for so long, wherever it is then; its other threads go on."""

    rank: int
    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: job.scheduler.pause(job.training[self.rank], self.for_s))


@dataclass(frozen=True)
class Freeze:
    """None of a rank's threads runs for so long, as after SIGSTOP, or while one holds the interpreter's lock."""

    rank: int
    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: job.scheduler.pause(self.rank, self.for_s))


@dataclass(frozen=True)
class Kill:
    """A rank's process is gone, and its peers' connections to it close; ``back_s``: another one is started then."""

    rank: int
    at_s: float
    back_s: float | None = None

    def begin(self, job: Job) -> None:
        """Set its timers."""

        def start() -> None:
            job.num_to_start -= 1
            job.scheduler.may_be_over = True
            if not job.lives(self.rank):
                job.start(self.rank)

        job.scheduler.at(self.at_s, lambda: job.kill(self.rank))
        if self.back_s is not None:
            job.num_to_start += 1
            job.scheduler.at(self.at_s + self.back_s, start)


@dataclass(frozen=True)
class Cut:
    """Nothing comes from a rank or to it for so long, the store's answers included; then all of it comes."""

    rank: int
    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: job.network.cut_off(self.rank))
        job.scheduler.at(self.at_s + self.for_s, lambda: job.network.mend(self.rank))


@dataclass(frozen=True)
class StoreAway:
    """The job's store answers nobody for so long."""

    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, job.server.go_away)
        job.scheduler.at(self.at_s + self.for_s, job.server.come_back)
