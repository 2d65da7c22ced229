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

        def stand() -> None:
            thread = job.training[self.rank]
            job.scheduler.paused.add(thread)
            job.scheduler.after(self.for_s, lambda: job.scheduler.paused.discard(thread))

        job.scheduler.at(self.at_s, stand)


@dataclass(frozen=True)
class Freeze:
    """None of a rank's threads runs for so long, as after SIGSTOP, or while one holds the interpreter's lock."""

    rank: int
    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: job.scheduler.paused.add(self.rank))
        job.scheduler.at(self.at_s + self.for_s, lambda: job.scheduler.paused.discard(self.rank))


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

        def cut() -> None:
            job.network.cut.add(self.rank)
            job.server.cut.add(self.rank)

        def mend() -> None:
            job.network.mend()
            job.server.mend()

        job.scheduler.at(self.at_s, cut)
        job.scheduler.at(self.at_s + self.for_s, mend)


@dataclass(frozen=True)
class StoreAway:
    """The job's store answers nobody for so long."""

    at_s: float
    for_s: float

    def begin(self, job: Job) -> None:
        """Set its timers."""
        job.scheduler.at(self.at_s, lambda: setattr(job.server, "is_away", True))
        job.scheduler.at(self.at_s + self.for_s, job.server.come_back)
