"""What the agents of `straggle launch` report in the job's store: which workers were started, which ended, and how.

A process that is killed reports nothing itself. Its agent waits for it, and posts within milliseconds how it ended.
What they say of ranks that will not come is in `merge/wire/launcher_words.py`, and all keys lie where those do.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from typing import Any

from straggle.merge.wire.launcher_words import PREFIX as PREFIX
from straggle.merge.wire.launcher_words import at_root, said
from straggle.merge.wire.launcher_words import post_started as post_started
from straggle.merge.wire.launcher_words import started as started

# in a worker's environment: when its process before ended, by this machine's monotonic clock; and that it was a spare
ENDED_AT, IS_SPARE = "STRAGGLE_ENDED_AT", "STRAGGLE_SPARE"
# exit status of a worker for which the job is over, and which must not be restarted; EX_PROTOCOL of sysexits.h
DO_NOT_RESTART = 76
# exit status of a worker whose command line or configuration is wrong, as in `argparse`
WRONG_CONFIGURATION = 2


@dataclass(frozen=True)
class Exited:
    """How a process of a worker ended: with an exit ``code``, or by the ``signal`` of this name.

    ``count`` is the ``TORCHELASTIC_RESTART_COUNT`` of that process, 0 for the first. A newer process may run by now.
    ``ran_s`` is how long it ran.
    """

    count: int
    ran_s: float
    code: int | None = None
    signal: str | None = None

    @staticmethod
    def of(status: int, *, count: int, ran_s: float) -> Exited:
        """From a status of `subprocess`, in which a signal is negative."""
        if status >= 0:
            return Exited(count, ran_s, code=status)
        return Exited(count, ran_s, signal=_name(-status))

    @property
    def status(self) -> int:
        """The status as a shell gives it: the code, or 128 plus the number of the signal."""
        return 128 + _number(self.signal) if self.code is None else self.code

    def __str__(self) -> str:
        how = f"by {self.signal}" if self.code is None else f"with status {self.code}"
        return f"{how}, after {self.ran_s:.1f} s"


def last_count(store: Any, rank: int) -> int:
    """The number of this rank's last process that the store knows, -1 if it knows none.

    A store that was restarted may know the end of a process but not its start.
    """
    ended = exited(store, rank)
    return max(-1 if ended is None else ended.count, -1 if (count := started(store, rank)) is None else count)


def post_exited(store: Any, rank: int, exited: Exited) -> None:
    """Report how a process of this rank ended; replaces the report on the process before."""
    words = {name: value for name, value in asdict(exited).items() if value is not None}
    at_root(store).set(f"{PREFIX}/exited/{rank}", json.dumps(words))


def post_over(store: Any, why: str) -> None:
    """Report that the job is over, and why: no worker is restarted."""
    at_root(store).set(f"{PREFIX}/over", why)


def over(store: Any) -> str | None:
    """Why the job is over; ``None`` while it runs."""
    return said(store, "over")


def post_all_told(store: Any) -> None:
    """Report that all ranks of the job are to end: those that get SIGTERM do not leave alone."""
    at_root(store).set(f"{PREFIX}/told", "")


def all_told(store: Any) -> bool:
    """Whether all ranks of the job are to end."""
    return bool(at_root(store).check([f"{PREFIX}/told"]))


def post_silent(store: Any, rank: int, why: str) -> None:
    """Ask this rank's agent to look at its process, which gives no word of itself."""
    at_root(store).set(f"{PREFIX}/silent/{rank}", why)


def take_silent(store: Any, rank: int) -> str | None:
    """Why the agent is to look at this rank's process, once; ``None``: it is not."""
    if (why := said(store, f"silent/{rank}")) is not None:
        at_root(store).delete_key(f"{PREFIX}/silent/{rank}")
    return why


def post_stopped(store: Any, rank: int, *, is_stopped: bool) -> None:
    """Report that a signal has stopped this rank's process, or that it no longer is."""
    if is_stopped:
        at_root(store).set(f"{PREFIX}/stopped/{rank}", "")
    else:
        at_root(store).delete_key(f"{PREFIX}/stopped/{rank}")


def stopped(store: Any, rank: int) -> bool:
    """Whether this rank's process is stopped, as its agent has seen."""
    return bool(at_root(store).check([f"{PREFIX}/stopped/{rank}"]))


def exited(store: Any, rank: int) -> Exited | None:
    """How the last ended process of this rank ended; ``None`` if none has.

    ``store`` is any connection to the job's store, or a `PrefixStore` over one. This sends two requests, and a store
    may not answer: use a connection with a time limit, as `JobStore` does.
    """
    word = said(store, f"exited/{rank}")
    return None if word is None else Exited(**json.loads(word))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has only a number
        return f"SIG{number}"


def _number(name: str | None) -> int:
    known = {one.name: int(one) for one in signal.Signals}
    return known.get(name or "") or int((name or "SIG0")[3:])
