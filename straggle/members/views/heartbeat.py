"""A rank's signs of life, which wait for no answer; and those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from straggle import world
from straggle.merge.wire.store import peek

BEAT_S = 0.1
UNANSWERED_S = 5.0  # a rank without answers from the store for so long stops its signs: no view would reach it
_NO_SIGN = "0 -1"  # of a member that has not been heard since the store was restarted


class Heartbeat:
    """A sign of life of one incarnation of a rank, ten times a second from `start` to `stop`, with its ``step()``.

    It has a thread and a connection of its own. A sign is one write, which the store does not answer. So signs keep
    their rate on a link on which an answer takes seconds, and a lost packet delays only the signs until it is sent
    again. Code that gets an answer from the store calls `answered`: without answers for 5 s a rank falls silent,
    because its link is cut in one direction.
    """

    def __init__(
        self,
        rank: int,
        incarnation: str,
        connect: Callable[[], Any],
        step: Callable[[], int],
        clock: Callable[[], float] = world.clock,
    ) -> None:
        self._key = _key(rank, incarnation)
        self._connect, self._step, self._clock = connect, step, clock
        self._answered_at = clock()
        self._stopping = world.Event()
        self._life = 0  # the number of the thread in charge: a stuck thread gets a successor
        self.threads: list[world.Thread] = []  # those that may still run

    def beat(self, store: Any) -> None:
        """Send a sign now, by this connection."""
        store.set(self._key, f"{world.monotonic()} {self._step()}")

    def start(self) -> None:
        """Start the thread."""
        self.answered()
        self._start()

    def answered(self) -> None:
        """Note that the store has answered a request just now."""
        # one assignment, by whichever thread has got an answer
        self._answered_at = self._clock()

    def connect_anew(self) -> None:
        """Go on with a new connection: the old one may be dead, which a thread that only writes cannot notice."""
        self._life += 1  # first: or the old thread could take itself for the new one
        self._start()

    def stop(self) -> None:
        """Tell the threads to end; does not wait for them."""
        self._stopping.set()

    def _start(self) -> None:
        thread = world.Thread(target=self._run, args=(self._life,), name="straggle-heartbeat", daemon=True)
        self.threads = [*(old for old in self.threads if old.is_alive()), thread]
        thread.start()

    def _run(self, life: int) -> None:
        store = None
        while not self._stopping.wait(BEAT_S) and self._life == life:
            if self._clock() - self._answered_at > UNANSWERED_S:
                continue
            try:
                store = store or self._connect()
                self.beat(store)
            except (RuntimeError, OSError):  # `FailureDetector` reports that the store is lost
                store = None
                self._stopping.wait(1.0)


def signs_of(store: Any, members: Mapping[int, str], ranks: Sequence[int], size: int = 1) -> dict[int, str]:
    """Read the last signs of life of these ranks; ``members``: their incarnations, of which each is ``size`` ranks."""
    return {rank: peek(store, _key(rank, members[rank // size])) or _NO_SIGN for rank in ranks}


def step_in(sign: str) -> int:
    """The step that the rank was in when it sent this sign."""
    return int(sign.split(" ")[1])


def _key(rank: int, incarnation: str) -> str:
    return f"beat/{rank}/{incarnation}"
