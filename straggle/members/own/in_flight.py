"""Collectives of the loop that are not over: each is made again among those that are left when the members change.

A collective is over when a barrier behind it is: all have its result then. When the members change, each says which
collective is the first that it has not over. What another has over is over on all, and the rest is made again.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from straggle import world
from straggle.members.own.collectives import Attempt, Begun, Call, Collective, Key, Place
from straggle.members.own.participants import NOWHERE, MembersChanged, Number, Participants
from straggle.members.views.membership import Membership
from straggle.members.views.view import View
from straggle.merge.wire.channel import PeerFailed
from straggle.merge.wire.groups import GlooGroup, is_of_peer, is_over, succeeded
from straggle.merge.wire.store import ANSWER_S
from straggle.waits import NowAndThen, end_of, until

_SLICE_S = 0.1  # each slice that ends before its collective costs 0.2 ms of CPU
_LAST = "last-own"  # under which a rank whose loop is over says what it has
_MOST_IN_VAIN = 20
_LOOK_S = 0.002
_SLOWEST_LOOK_S = 0.05  # for others to come
_NAME_S = 1.0  # between two looks who has not come
_FORM_S = 20.0  # for those that are there to connect

_log = logging.getLogger(__name__)


class InFlight:
    """Those of one rank. Any thread may call all of it; ``ended()`` is what ended the job for this rank.

    ``limit_s``: how long the others are waited for. ``drop`` lets go of groups on another thread. Its lock is held
    while a collective is launched, and never while anything is waited for.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        name: int,
        limit_s: float,
        give_up_s: float,
        ended: Callable[[], BaseException | None],
        drop: Callable[[Sequence[GlooGroup]], None],
    ) -> None:
        self._membership, self._name = membership, name
        self._limit_s, self._give_up_s = limit_s, give_up_s
        self._ended, self._drop = ended, drop
        self._participants = Participants(membership.rank)
        self._changed = world.Condition()
        self._generation, self._frozen, self._closed = -1, False, False
        self._next = NOWHERE
        self._open: deque[Call] = deque()
        self._groups: dict[Key, GlooGroup | None] = {}  # `None`: it is being formed
        self._missing: dict[Key, list[int]] = {}  # who has not come to a group that is being formed
        self._num_in_vain = 0  # since the last step, on a rank that is no member
        self.count = 0  # of those that were begun

    # -- what the loop sees

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that make the next one, in order of their places; ``None``: this rank is in none."""
        with self._changed:
            here = self._participants.here
            return None if here is None else tuple(rank for rank, _ in here)

    def begin(self, collective: Collective) -> Call:
        """The loop calls a collective."""
        with self._changed:
            self.count += 1
            call = Call(collective, self._next, None if self._closed else self._participants.here)
            self._next = self._next._replace(place=self._next.place + 1)
            if call.ranks is None:
                call.ended()
                return call
            self._open.append(call)
            for group in self._groups.values():
                if group is not None:
                    group.forget_ended()
            self._launch()
            if call.error is not None:  # of this rank's tensors
                raise call.error
        return call

    def wait(self, call: Call, limit_s: float = 0.0) -> None:
        """Wait until it is over, and put its results where they belong.

        Raises `MembersChanged`, what ended the job, or `PeerFailed` if not all come in time.
        """
        until_s = world.monotonic() + (limit_s or self._limit_s)
        broke_at: float | None = None
        while not self._settled(call):
            if (end := self._ended()) is not None:
                raise end
            now = world.monotonic()
            if now > until_s:
                raise PeerFailed(f"{self._where(call)}: {self._who_is_missing()} within {limit_s or self._limit_s:g} s")
            if (first := self._first()) is None or (attempt := first.attempt) is None:
                self._pause(first, None)
                continue
            try:
                # without the lock: `Regrouping` may freeze and follow meanwhile, which makes another attempt
                is_over(attempt.last, min(_SLICE_S, until_s - now))
                broke_at = None
            except RuntimeError as error:
                if not is_of_peer(error):
                    self._fail(first, error)
                    continue
                if broke_at is None:
                    broke_at = now
                    self._membership.detector.connection_broke(generation=attempt.key.generation)
                if now > broke_at + self._give_up_s:
                    raise PeerFailed(f"{self._where(call)}: {error}") from error
                self._pause(first, attempt)
        self._take(call)
        if call.error is not None:
            raise call.error

    def has_ended(self, call: Call) -> bool:
        """Whether it is over by now; its results are where they belong then."""
        if not self._settled(call):
            return False
        self._take(call)  # `wait` raises its error
        return True

    def _settled(self, call: Call) -> bool:
        with self._changed:
            self._settle()
            return call.is_over

    def _first(self) -> Call | None:
        """The one that is over first; ``None`` while the members change."""
        with self._changed:
            return self._open[0] if self._open and not self._frozen else None

    def _pause(self, first: Call | None, attempt: Attempt | None) -> None:
        """Wait a moment, unless there is another attempt by now."""

        def is_another() -> bool:
            return bool(
                not self._frozen and self._open and (self._open[0] is not first or first.attempt is not attempt)
            )

        with self._changed:
            self._changed.wait_for(is_another, _SLICE_S)

    def _fail(self, call: Call, error: BaseException) -> None:
        with self._changed:
            if call in self._open:
                self._open.remove(call)
            call.ended(error)

    def _take(self, call: Call) -> None:
        """Give the caller what came, on its own thread: what it knows of the members changes here, and not before."""
        with self._changed:
            if call.is_taken:
                return
            attempt = call.take()
            if call.error is None and call.ranks is not None and attempt is not None:
                left, step = attempt.key.ranks, call.number.step
                self._participants.forget(tuple(own for own in call.ranks if own[0] not in left), step)
        error = call.error
        if error is None:
            with torch.no_grad():
                error = self._write(call, attempt)
        call.taken(error)

    def _write(self, call: Call, attempt: Attempt | None) -> Exception | None:
        """Put the results where they belong, or say why not."""
        if attempt is None:
            return self._take_alone(call)
        misfits = attempt.begun.misfits
        if not attempt.fits or (misfits is not None and int(misfits)):
            return self._changed_error(call, attempt.key.ranks)
        for came, to in attempt.begun.results:
            to.copy_(came)
        return None

    def _take_alone(self, call: Call) -> Exception | None:
        size = self._membership.world_size
        before = call.before or tuple(range(size))
        root = call.collective.root
        at_root = before[root] if 0 <= root < len(before) else root
        known = call.collective.alone(Place(self._name, size, at_root))
        return None if known else self._changed_error(call, ())

    def _changed_error(self, call: Call, left: tuple[int, ...]) -> Exception:
        with self._changed:
            may_be_old = self._participants.may_be_old(call.number.step)
        if left and left == call.before and not may_be_old:
            return ValueError(f"{self._where(call)}: its tensors are for another number of ranks than {len(left)}")
        if not left:
            self._num_in_vain += 1
            if self._num_in_vain > _MOST_IN_VAIN:  # a loop that repeats it would never come to the next step
                return PeerFailed(f"{self._where(call)}: this rank is no member, and has asked {_MOST_IN_VAIN} times")
        what = (
            f"the members have changed, and its tensors or its root are not for ranks {list(left)}, which are left: "
            f"it is to be repeated, torch.distributed.get_world_size() is {len(left)} now"
            if left
            else "this rank is no member now, and what the others have is not known here"
        )
        return MembersChanged(f"{self._where(call)}: {what}", self._name, call.number.step, call.before, left)

    def _where(self, call: Call) -> str:
        step = call.number.step
        when = f"after step {step}" if step >= 0 else "before its first step"
        return f"rank {self._name}, {when}, {call.collective.name} of the loop's own"

    def _who_is_missing(self) -> str:
        with self._changed:
            call = self._open[0] if self._open else None
            key = self._key(call) if call is not None else None
            missing = self._missing.get(key) if key is not None else None
            return f"ranks {missing} have not come" if missing else "not all ranks have come"

    # -- the members change; by the thread of `Regrouping`

    def built(self, view: View) -> None:
        """The model is wrapped by the members of the first view."""
        with self._changed:
            self._participants.begin(view)
            self._generation, self._next = view.generation, Number(-1, 0)

    def freeze(self, view: View) -> Sequence[int]:
        """The members change: nothing is over before `follow`. What this rank tells the others of itself."""
        with self._changed:
            # before it is frozen, which ends that: what is over by now is not made again
            self._settle()
            self._frozen = True
            self._changed.notify_all()
            first = self._open[0].number if self._open else self._next
            gone = self._participants.gone(self._open[0].ranks or (), view) if self._open else []
            if self._participants.here is None:
                first, gone = NOWHERE, []
            numbers = self._participants.numbers(self._membership.world_size)
        # without the lock, because the store may take long
        for incarnation in gone:  # one whose loop was over has said what it had
            if (word := self._membership.published(f"{_LAST}/{incarnation}")) is not None:
                first = max(first, Number(*json.loads(word)))
        return [*first, *numbers]

    def follow(self, view: View, told: Sequence[Sequence[int]]) -> None:
        """``told``: what `freeze` gave each member, in order."""
        with self._changed:
            self._participants.follow(view, [own[2:] for own in told])
            first = max(Number(*own[:2]) for own in told)
            while self._open and self._open[0].number < first:
                self._resolve(self._open.popleft())
            for call in self._open:
                call.given_up()
            self._generation, self._frozen = view.generation, False
            self._let_go()
            self._launch()
            self._changed.notify_all()

    def put_out(self) -> None:
        """This rank is no member: what is in flight ends, with nobody else."""
        with self._changed:
            self._participants.put_out()
            self._frozen = False
            self._give_back()

    def _give_back(self) -> None:
        for call in self._open:
            call.given_up()
            call.ended()
        self._open.clear()
        self._generation = -1
        self._let_go()
        self._changed.notify_all()

    def close(self) -> None:
        """The model is closed. What this rank has over is over on all, also if they see that later than its end."""
        with self._changed:
            self._settle()
            first = self._open[0].number if self._open else self._next
            takes_part = self._participants.here is not None and first.place > 0
        if takes_part:
            with suppress(RuntimeError):  # the interpreter is about to end, and starts no thread
                # without the lock, because the store may take long
                end_of([self._membership.spawn(self._say_last, first)], ANSWER_S)
        with self._changed:
            self._closed = True
            self._give_back()

    def _say_last(self, first: Number) -> None:
        with suppress(RuntimeError, OSError), self._membership.connection(_LAST) as store:
            store.set(self._membership.incarnation, json.dumps(first))

    # -- steps

    def merged(self, step: int, present: frozenset[int], stood_in: frozenset[int]) -> None:
        """A step is merged."""
        with self._changed:
            self._participants.merged(step, present, stood_in)

    def left(self, step: int) -> None:
        """The training thread has left a step."""
        with self._changed:
            self._participants.left(step)
            self._next, self._num_in_vain = Number(step, 0), 0

    # -- with the lock held

    def _settle(self) -> None:
        """Collectives are over in the order in which they were called."""
        while not self._frozen and self._open and (attempt := self._open[0].attempt) is not None:
            if not succeeded(attempt.last):
                return
            self._resolve(self._open.popleft())

    def _resolve(self, call: Call) -> None:
        if (attempt := call.attempt) is not None and all(succeeded(work) for work in attempt.begun.works):
            call.ended()
            return
        call.ended(
            PeerFailed(f"{self._where(call)}: the others have ended it, and this rank has not begun it with them")
        )

    def _key(self, call: Call) -> Key:
        assert call.ranks is not None
        return Key(self._generation, self._participants.alive(call.ranks))

    def _launch(self) -> None:
        """Launch what is not, in order; the first one whose group is not there waits for it."""
        if self._frozen or self._closed:
            return
        for call in self._open:
            if call.attempt is not None:
                continue
            if (group := self._group(self._key(call))) is None:
                return
            try:
                call.launched(self._begun(call, group))
            except (RuntimeError, ValueError, TypeError) as error:
                call.ended(error)
        self._open = deque(call for call in self._open if not call.is_over)

    def _begun(self, call: Call, group: GlooGroup) -> Attempt:
        key, collective = self._key(call), call.collective
        root = call.before[collective.root] if collective.root >= 0 else None
        fits = collective.fits(len(key.ranks)) and (root is None or root in key.ranks)
        begun = Begun([], [])
        if fits:
            place = key.ranks.index(root) if root is not None else -1
            at = Place(key.ranks.index(self._membership.rank), len(key.ranks), place)
            begun = group.launch(lambda gloo: collective.begin(gloo, at))
        return Attempt(key, begun, group.barrier(), fits)

    def _group(self, key: Key) -> GlooGroup | None:
        if key not in self._groups:
            self._groups[key] = None
            self._membership.spawn(self._form, key, self._membership.view.job)
        return self._groups[key]

    def _let_go(self) -> None:
        old = [group for key, group in self._groups.items() if key.generation != self._generation]
        self._groups = {key: group for key, group in self._groups.items() if key.generation == self._generation}
        self._missing.clear()
        if made := [group for group in old if group is not None]:
            self._drop(made)

    # -- on a thread of its own

    def _form(self, key: Key, job: str) -> None:
        """Meet these ranks, as soon as all have called a collective, and launch what waits for that."""
        place, size = key.ranks.index(self._membership.rank), len(key.ranks)
        here, is_due = [f"here/{at}" for at in range(size)], NowAndThen(_NAME_S, after_s=_NAME_S)
        corner = f"own/{job}/{key.generation}/{'-'.join(map(str, key.ranks))}"

        def is_over() -> bool:
            return self._membership.is_closed or key not in self._groups or self._frozen

        try:
            with self._membership.connection(corner) as store:
                store.set(here[place], "")

                def are_here() -> bool:
                    if is_due.is_due():
                        self._missing[key] = [rank for at, rank in enumerate(key.ranks) if not store.check([here[at]])]
                    return bool(store.check(here))

                until(lambda: is_over() or are_here(), every_s=_LOOK_S, most_s=_SLOWEST_LOOK_S)
                if is_over():
                    return
                group = GlooGroup(store, place, size, _FORM_S, self._limit_s)
        except (RuntimeError, OSError) as error:
            _log.info("rank %d: its group of generation %d was not formed: %s", self._name, key.generation, error)
            return
        with self._changed:
            # the members may have changed while it was formed: then nobody uses it
            if key in self._groups:
                self._groups[key] = group
                self._launch()
                self._changed.notify_all()
                return
        self._drop([group])
