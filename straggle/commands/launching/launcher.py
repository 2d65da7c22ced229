"""The launcher of one node: its agents, the signals that it gets, and the status that it ends with."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from straggle.commands.launching.agent import Agent, say
from straggle.members.agents import DO_NOT_RESTART, WRONG_CONFIGURATION
from straggle.merge.wire.store import JobStore, StoreUnreachable

# those that torchrun passes on; a terminal that is closed sends SIGHUP, and Slurm SIGUSR1, by --signal
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
BEAT_S = 5.0
LOST_S = 60.0
_POLL_S = 0.5
_KILLED_S = 5.0  # a process that SIGKILL has not ended by then hangs in the kernel

Events = SimpleQueue[Agent | signal.Signals]


@contextlib.contextmanager
def signals_into(events: SimpleQueue[Agent | signal.Signals]) -> Iterator[None]:
    """Have the main thread find `SIGNALS` in a queue, where it also finds the agents that have ended.

    SIGHUP stays ignored if it is, as under nohup.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda got, _: events.put(signal.Signals(got)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def next_event(events: Events, timeout_s: float) -> Agent | signal.Signals | None:
    """What comes within this time."""
    try:
        return events.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        return None


class Launcher:
    """Waits for its agents, and tells them when the launcher itself is told to end; ``before_stop()`` comes first."""

    def __init__(
        self,
        agents: Sequence[Agent],
        events: Events,
        nodes: Nodes,
        *,
        grace_s: float,
        before_stop: Callable[[], object] = lambda: None,
    ) -> None:
        self._agents = agents
        self._running = set(agents)
        self._events = events
        self._nodes = nodes
        self._grace_s, self._before_stop = grace_s, before_stop

    def run(self, *, serves: bool) -> int:
        """Start all workers, and wait until they stay down; returns the launcher's exit status.

        One that ``serves`` the job's store also waits for the workers of the other nodes.
        """
        for agent in self._agents:
            agent.start()
        while self._running:
            self._nodes.beat()
            event = next_event(self._events, BEAT_S)
            if isinstance(event, signal.Signals):
                return self._stop(event)
            if event is not None:
                self._running.discard(event)
        self._nodes.end()
        status = status_of(self._agents)
        if serves:
            self._wait_for_others()
        return status

    def _wait_for_others(self) -> None:
        if others := self._nodes.others():
            say(f"its workers have ended; it serves the store until those of nodes {others} have")
        while self._nodes.others() and not isinstance(next_event(self._events, _POLL_S), signal.Signals):
            pass

    def _stop(self, number: signal.Signals) -> int:
        say(f"{number.name}: its workers get SIGTERM, and SIGKILL after {self._grace_s:g} s")
        self._before_stop()
        for agent in self._agents:
            agent.stop()
        until = time.monotonic() + self._grace_s
        self._wait(until)
        for agent in self._running:
            agent.kill()
        self._wait(time.monotonic() + _KILLED_S)
        self._nodes.end()
        return 128 + number

    def _wait(self, until: float) -> None:
        """Until all have ended, the time is over, or another signal comes."""
        while self._running:
            event = next_event(self._events, until - time.monotonic())
            if not isinstance(event, Agent):
                break
            self._running.discard(event)


def status_of(agents: Sequence[Agent]) -> int:
    """0 if all have done their work, `DO_NOT_RESTART` if a rank ended the job; else that of the first that has not."""
    failed = [agent for agent in agents if agent.why]
    if failed:
        say(f"ranks {[agent.rank for agent in failed]} have not done their work")
    statuses = [agent.exited.status if agent.exited else 1 for agent in failed]
    if DO_NOT_RESTART in statuses and WRONG_CONFIGURATION not in statuses:  # one that died may not be started again
        return DO_NOT_RESTART
    if WRONG_CONFIGURATION in statuses:  # the others have ended because of that one
        return WRONG_CONFIGURATION
    return statuses[0] if statuses else 0


def serve_until_signal(events: Events) -> int:
    """Wait for SIGTERM or SIGINT; returns the exit status, 0: it was told to end, and that is its work."""
    while not isinstance(next_event(events, threading.TIMEOUT_MAX), signal.Signals):
        pass
    return 0


_PREFIX = "straggle/launch"


class Nodes:
    """What this node's launcher says to the others, and what it knows of them: the one that hosts the store stays last.

    Each beats in the store, so that one which dies with its machine is not waited for.
    """

    def __init__(
        self, store: JobStore, *, node_rank: int, num_nodes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._node_rank = store, node_rank
        self._clock = clock
        now = clock()
        self._beats = {node: (0, now) for node in range(num_nodes) if node != node_rank}  # the last number, and when

    def beat(self) -> None:
        """Say that this launcher is there."""
        self._store.post(lambda store: store.add(f"{_PREFIX}/beat/{self._node_rank}", 1))

    def end(self) -> None:
        """Say that all workers of this node have ended."""
        with contextlib.suppress(StoreUnreachable):
            self._store.ask(lambda store: store.set(f"{_PREFIX}/ended/{self._node_rank}", ""))

    def others(self) -> list[int]:
        """The nodes that have not ended; one that has not beaten for a minute is left out."""
        with contextlib.suppress(StoreUnreachable):
            self._store.ask(self._look)
        now = self._clock()
        return [node for node, (_, since) in self._beats.items() if now - since < LOST_S]

    def _look(self, store: Any) -> None:
        for node, (last, _) in list(self._beats.items()):
            if store.check([f"{_PREFIX}/ended/{node}"]):
                del self._beats[node]
            elif (number := store.add(f"{_PREFIX}/beat/{node}", 0)) != last:
                self._beats[node] = (number, self._clock())
