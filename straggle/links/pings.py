"""The thread that pings: now and then, off the critical path, and never waited for by a step.

What it measures goes into this rank's next row of telemetry, so that all ranks know all links. A ping begins when a
merge has just ended, because the network is idle then, and the ranks take turns. While a merge takes many times as long
as usual they do not wait for its end.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from straggle import world
from straggle.links.network_event import LongMerge
from straggle.links.ping import RESOLUTION_S, PingServer, ask_progress, measure
from straggle.links.ping_plan import DISTANCES, PingPlaces, every_s, is_turn, largest_bytes, own_address, peers_of
from straggle.merge.wire.store import JobStore, StoreUnreachable, default_store
from straggle.policies.network.merge_time import Link
from straggle.policies.network.rank_links import ROUNDS, RankLink, Way, best_ways, others_link, others_links, rank_links
from straggle.policies.network.slow_links import SlowLinks, slow_in

_LOOK_S = 0.5
_BEGINS_S = 2.0  # a job that is over sooner opens no port
_LONGEST_WAIT_S = 60.0  # for a merge to end
_LONG_EVERY_S = 1.5  # between the beginnings of two pings while a merge is long
_IN_VAIN_S = 300.0  # for which no merge is pinged in its middle, if that has found nothing: a rank is waited for
_PAUSE_S = 60.0  # and if it has, but merges are as long as before: pings have a part of a narrow link
_TWICE = 2  # so often a way is measured in a long merge before that means anything
_DOUBTED = 4  # times as many bytes if a way looks slow, to be sure

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """A merged step as the pings need it: its seconds, those on the network, and the ways that all ranks know.

    ``out``: ranks that were put out of the members because they are slow, which are pinged all the same.
    """

    step: int
    seconds: float
    network_s: float
    members: tuple[int, ...]
    ways: Sequence[Way]
    out: tuple[int, ...] = ()


@dataclass
class _Round:
    """One round of pings: what was found, whether a way looked slow, and whether this machine was busy."""

    found: list[tuple[float, Way]] = field(default_factory=list)
    doubted: bool = False
    is_busy: bool = False
    asks_out: bool = False  # the peers were pinged, and the ranks that were put out are to be

    def add(self, way: Way, *, looks_slow: bool, as_slow_itself: bool) -> None:
        """A way was measured; ``as_slow_itself``: that from this rank to itself is so, too, and the machine is busy."""
        if looks_slow and as_slow_itself:
            self.is_busy = True
            return
        self.doubted |= looks_slow
        self.found.append((world.monotonic(), way))

    def goes_on_with_out(self) -> None:
        """The peers were pinged: the ranks that were put out are next."""
        self.asks_out = True


class _Turn:
    """When this rank pings: once that is due, behind a merge after which it is its turn. Shared by two threads.

    The thread that pings says that it is due, and the training thread that the turn has come.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.is_due, self._due_at = False, math.inf  # whether a ping waits for a merge to end, and since when
        self._place, self._count = rank, world_size  # among the members
        self._come = world.Event()  # a merge has just ended after which this rank pings

    def merged(self, step: int) -> None:
        """``step`` has just been merged; by the training thread."""
        # without a lock: set by the other thread after place and count, which are read here
        if self.is_due:
            overdue_s = world.monotonic() - self._due_at
            if is_turn(step, self._place, self._count, overdue_s, _LOOK_S * self._count):
                self._come.set()

    def wait(self) -> None:
        """Until it has come, or for a moment."""
        self._come.wait(_LOOK_S)

    def end(self) -> None:
        """Who waits waits no longer."""
        self._come.set()

    def forget(self) -> None:
        """What has come so far was for another ping."""
        self._come.clear()

    def is_due_among(self, members: Sequence[int], rank: int) -> None:
        """A ping is due, and these take turns."""
        # before it is due: from then on the training thread reads them
        self._count = max(1, len(members))
        self._place = members.index(rank) if rank in members else 0
        self.is_due_now()

    def is_due_now(self) -> None:
        """A ping is due."""
        self.is_due, self._due_at = True, world.monotonic()

    def has_come(self, seconds: float) -> bool:
        """Whether it has, or none will for longer than steps of so many seconds explain: a merge may hang."""
        patience_s = min(_LONGEST_WAIT_S, 2 * _LOOK_S * self._count + 1.5 * seconds)
        return self._come.is_set() or world.monotonic() - self._due_at >= patience_s

    def is_taken(self) -> None:
        """This rank pings now."""
        self.is_due = False
        self._come.clear()


class Pings:
    """Of one rank, until `close`; from the first merge on that comes ``begins_s`` seconds after it was made.

    ``sink`` is given when each way was measured last, and the best of it in the last `ROUNDS` of pings. ``on_long`` is
    given each rank's link by what this rank has measured in as many rounds during merges that take many times as long
    as usual, of ranks that have submitted all of their part.
    ``merged_bytes``: what a step merges. ``on_its_way()``: the step that is being merged, and for how many seconds all
    of this rank's part has been on its way (0: it is not).
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: JobStore,
        *,
        merged_bytes: int,
        sink: Callable[[tuple[tuple[float, Way], ...]], None],
        on_its_way: Callable[[], tuple[int, float]],
        on_long: Callable[[Sequence[RankLink]], None] | None = None,
        begins_s: float = _BEGINS_S,
    ) -> None:
        self.num_bytes = 0  # that were sent
        self.slow = SlowLinks()
        self._rank, self._world_size = rank, world_size
        self._places = PingPlaces(rank, store)
        self._merged_bytes = merged_bytes
        self._sink, self._on_its_way, self._on_long, self._begins_s = sink, on_its_way, on_long, begins_s
        self._last: Callable[[], Merged] | None = None  # by the training thread
        self._turn = _Turn(rank, world_size)
        self._looked_at = world.monotonic()
        self._pinged_at = self._began_at = -math.inf  # the last ping was over, and began
        self._quickest_s = math.inf  # of the steps
        self._rounds: deque[tuple[tuple[float, Way], ...]] = deque(maxlen=ROUNDS)  # the newest first
        self._round: _Round | None = None  # that is not over
        self._number = 0  # of rounds
        self._doubted = 0  # how many of the last rounds, one after another, had a way that looked slow
        self._long = LongMerge()
        self._num_long = 0  # rounds of pings since merges are long
        self._pauses_until = -math.inf  # no merge is pinged in its middle
        self._submitted: dict[int, bool] = {}  # whether a peer that was pinged had, when this rank had
        self._closing = world.Event()
        self._thread: world.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it has begun, and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Answer pings from now on; by the training thread. The first merge begins it, too."""
        if self._thread is None and not self._closing.is_set():
            self._thread = world.Thread(target=self._run, name="straggle-ping", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ping no more. A ping that is on its way is not waited for."""
        self._closing.set()
        self._turn.end()  # after it: the thread that wakes sees that it is to end

    def merged(self, step: int, of: Callable[[], Merged]) -> None:
        """``step`` is merged; by the training thread. ``of`` is called by the thread that pings, if at all."""
        self._last = of  # one assignment: the thread that pings has the step before, or all of this one
        if self._thread is None and world.monotonic() - self._looked_at > self._begins_s:
            self.begin()
        self._turn.merged(step)

    # -- the thread

    def _run(self) -> None:
        server: PingServer | None = None
        try:
            # the word, then who answers by it, then where: a peer that finds the place is answered
            self._places.agree()
            server = PingServer(own_address(default_store()), self._places.token, self._progress)
            self._places.publish(server.host, server.port)
            while not self._closing.is_set():
                self._turn.wait()
                with contextlib.suppress(StoreUnreachable):  # which others report
                    self._turn_of_the_loop()
        except (OSError, StoreUnreachable) as error:
            if not self._closing.is_set():
                _log.warning("rank %d does not measure its links: %s", self._rank, error)
        finally:
            if server is not None:
                server.close()

    def _turn_of_the_loop(self) -> None:
        if (last := self._last) is None or not (merged := last()).members:  # this rank is none
            self._turn.forget()
            self._forget()
            return
        self._quickest_s = min(self._quickest_s, merged.seconds)
        self._long.merged(merged.step, merged.network_s)
        is_long = self._long.lasts(self._on_its_way()[1]) and world.monotonic() >= self._pauses_until
        self._num_long = self._num_long if is_long else 0
        if self._pings_now(merged, is_long=is_long):
            self._began_at = world.monotonic()
            self._ping(merged, is_long=is_long)
            # after the ping: one that takes long is not followed by another at once
            self._pinged_at = world.monotonic()
            if is_long:
                self._num_long += 1
                self._judge_long_merge()
        self._judge(merged)
        self._look_at_the_merge(merged)

    def _pings_now(self, merged: Merged, *, is_long: bool) -> bool:
        """Whether a ping is due, and a merge has just ended in this rank's turn; or none has for long: one may hang."""
        if is_long:
            self._turn.is_taken()
            return world.monotonic() - self._began_at >= _LONG_EVERY_S and not self._closing.is_set()
        if not self._turn.is_due:
            self._turn.forget()  # the training thread may have said so as the last ping began
            if self._overdue_s(merged) < 0:
                return False
            self._turn.is_due_among(merged.members, self._rank)
        if not self._turn.has_come(merged.seconds):
            return False
        self._turn.is_taken()
        return not self._closing.is_set()

    def _overdue_s(self, merged: Merged) -> float:
        """For how long a ping has been due. A network that has become slow is no reason to look less often."""
        interval_s = every_s(
            self._merged_bytes,
            self._quickest_s,
            max(1, len(merged.members)),
            is_slow=bool(self._doubted or self.slow.now or merged.out) or self._long.are_longer(merged.seconds),
            in_doubt=0 < self._doubted < ROUNDS or len(self._rounds) < ROUNDS,
        )
        return world.monotonic() - self._pinged_at - interval_s

    def _progress(self) -> int:
        """The last step of which all of this rank's part was on its way."""
        step, seconds = self._on_its_way()
        return step if seconds > 0 else step - 1

    # -- one round of pings

    def _ping(self, merged: Merged, *, is_long: bool) -> None:
        """Ping two peers or, in the next turn of the round, the ranks that were put out; a round is over with these.

        One after another, so that a ping is over before the next merge begins. ``is_long``: in the middle of a long
        merge, if a ping takes long, all peers are asked, and each once.
        """
        hosts = self._places.hosts(merged.members)
        others = others_link(rank_links(merged.ways, self._world_size), self._rank)
        out = tuple(self._places.hosts(merged.out))
        now = self._round = self._round or _Round()
        if now.asks_out:
            peers = out
        else:
            numbers = range(DISTANCES) if is_long else (self._number,)
            peers = tuple(dict.fromkeys(peer for number in numbers for peer in peers_of(self._rank, hosts, number)))
        for peer in peers:
            link = self._measured(peer, others, both_ways=peer in out, doubts=not is_long)
            if link is None:
                continue
            slow = _looks_slow(link, others)
            itself = slow and self._is_as_slow_itself(link)
            now.add(Way(self._rank, peer, link), looks_slow=slow, as_slow_itself=itself)
        if out and not (now.asks_out or is_long):
            now.goes_on_with_out()
            self._turn.is_due_now()
            return
        self._round = None
        self._number += 1
        if now.is_busy and not now.found:
            return
        self._doubted = self._doubted + 1 if now.doubted else 0
        self._rounds.appendleft(tuple(now.found))
        if len(self._rounds) == ROUNDS:
            self._sink(best_ways(self._rounds))

    def _is_as_slow_itself(self, link: Link) -> bool:
        """Whether the way from this rank to itself looks no better: then the machine is busy, and no link is slow."""
        own = self._once(self._rank, largest_bytes(self._merged_bytes), both_ways=False)
        return own is None or not _looks_slow(link, RankLink(own.latency_s, own.bytes_per_s, own.bytes_per_s))

    def _forget(self) -> None:
        """This rank is no member. When it is one again its link may be another, and its peers have measured that."""
        self._round = None
        if self._rounds:
            self._rounds.clear()
            self._sink(())

    def _measured(self, peer: int, others: RankLink, *, both_ways: bool, doubts: bool) -> Link | None:
        """The way to a peer; if it looks slow and that ``doubts``, measured again with more bytes.

        ``None``: the peer did not answer.
        """
        largest = largest_bytes(self._merged_bytes)
        if (first := self._once(peer, largest, both_ways)) is None:
            return None
        if not doubts or not _looks_slow(first, others):
            return first
        again = self._once(peer, _DOUBTED * largest, both_ways)
        if again is None:
            return first
        limit = largest / RESOLUTION_S  # as high as a rate can be of those that are measured with fewer bytes
        return Link(min(first.latency_s, again.latency_s), min(limit, max(first.bytes_per_s, again.bytes_per_s)))

    def _once(self, peer: int, largest: int, both_ways: bool) -> Link | None:
        try:
            measured = measure(*self._places.of(peer), self._places.token, largest, both_ways=both_ways)
        except OSError as error:
            _log.debug("rank %d: no ping to rank %d: %s", self._rank, peer, error)
            if peer != self._rank:
                self._places.forget(peer)
            return None
        self.num_bytes += measured.num_bytes
        self._submitted[peer] = measured.progress >= self._on_its_way()[0]
        return measured.link

    def _judge_long_merge(self) -> None:
        """Tell what was measured in long merges, if that is enough; a rank that has not submitted is waited for."""
        if self._num_long < ROUNDS:
            return
        times = Counter(way.target for one in self._rounds for _, way in one)
        ways = [way for _, way in best_ways(self._rounds) if times[way.target] >= _TWICE]
        links = rank_links(ways, self._world_size)
        if not any(map(slow_in, links, others_links(links))):
            self._pauses_until = world.monotonic() + _IN_VAIN_S
        elif self._num_long > 2 * ROUNDS:
            self._pauses_until = world.monotonic() + _PAUSE_S
        elif self._on_long is not None:
            self._on_long(rank_links((way for way in ways if self._submitted[way.target]), self._world_size))

    # -- what is logged

    def _look_at_the_merge(self, merged: Merged) -> None:
        step, seconds = self._on_its_way()
        words = self._long.words(step, seconds, lambda: self._ask(merged.members), self.slow.now)
        if words is not None:
            _log.log(self._level(merged), words)

    def _ask(self, members: Sequence[int]) -> dict[int, int | None]:
        """For each peer the last step that it has submitted; ``None``: it does not answer. Without those that may.

        None of them if no ping has ever been answered: then pings do not come through, as behind a firewall.
        """
        submitted = dict[int, int | None]()
        if not self.num_bytes:
            return submitted
        for rank in self._places.hosts(members):
            if rank != self._rank:
                try:
                    submitted[rank] = ask_progress(*self._places.of(rank), self._places.token)
                except ConnectionResetError:  # it is there, and this rank had to wait for a processor meanwhile
                    continue
                except OSError:
                    submitted[rank] = None
        return submitted

    def _judge(self, merged: Merged) -> None:
        """Log once whose link is slow, or is not any more; the lowest member does."""
        before, now = {slow.rank for slow in self.slow.now}, world.monotonic()
        links = rank_links(merged.ways, self._world_size)
        passed_s, self._looked_at = now - self._looked_at, now
        self.slow.add(merged.step, links, num_bytes=self._merged_bytes, step_s=merged.seconds, passed_s=passed_s)
        level = self._level(merged)
        for slow in self.slow.now:
            if slow.rank not in before:
                _log.log(level, "step %d: %s", merged.step, slow.words())
        for rank in before - {slow.rank for slow in self.slow.now}:
            how = "is not known any more" if math.isnan(links[rank].latency_s) else "is as the others' again"
            _log.log(level, "step %d: rank %d's link %s", merged.step, rank, how)

    def _level(self, merged: Merged) -> int:
        return logging.WARNING if self._rank == min(merged.members, default=0) else logging.DEBUG


def _looks_slow(way: Link, others: RankLink) -> bool:
    return bool(slow_in(RankLink(way.latency_s, way.bytes_per_s), others))
