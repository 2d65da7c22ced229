"""Sees that this rank does not go on, and for whom it waits: an optional part with a thread that mostly sleeps.

Nothing here runs on the training thread in a step. Ranks tell each other in the store, under ``stuck/RANK``, that they
do not go on; in a job in which all do, nothing is written there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from straggle import world
from straggle.loop.model_parts import HookRegisters
from straggle.members.agents import post_silent
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.wing import Wing
from straggle.merge.wire.last_words import words_under
from straggle.merge.wire.long_wait import LONG_S
from straggle.merge.wire.store import StoreUnreachable
from straggle.report import MembersReport, StuckReport
from straggle.stuck.collectives import newest_open, own_dump
from straggle.stuck.frames import Frame, Kind, Place, frames_of_thread, place_of, text_of
from straggle.stuck.states import SILENT, Finding, RankState, blind_words, duration, finding, paused_words, silent_words

_KEY = "stuck"
_LOOK_S = 1.0
_STALE_S = 3 * LONG_S  # a state that is not reported again for so long is of a rank that cannot speak
_AGAIN = 2  # times as long a rank must be stuck at the same line until that is logged again

_log = logging.getLogger(__name__)


class StuckWatch(Wing):
    """Of one model, from its first step on until `close`, on a thread of its own; the other threads only read.

    ``stuck_after_s``: infinite: it watches nothing.
    """

    def __init__(self, rank: RankParts, registers: HookRegisters, stuck_after_s: float) -> None:
        self._rank, self._channel = rank, rank.channel
        self._limit_s = stuck_after_s
        self._speak_s = min(LONG_S, stuck_after_s / 2)  # from then on the peers are told, so that they know in time
        self._hooks = weakref.ref(registers)  # a user's hooks may refer to the model, which ends this thread
        self._ident = threading.get_ident()
        self._closing = world.Event()
        self._debug_server = DebugServer(self.described)
        self._thread: world.Thread | None = None
        # by the thread
        self._posted = 0  # states in a row
        self._posted_in = -1  # the step of the last one
        self._heard: dict[int, tuple[int, float]] = {}  # the number of each rank's state, and since when it is that
        self._silent: dict[int, float] = {}  # ranks that are waited for and have said nothing, and since when
        self._open: StuckReport | None = None  # that was reported and is not over
        self._opened_at = 0.0
        self._blind_s = 0.0  # for which this thread could not run while the rank did not go on
        self._known = False  # what there is to say of this rank now has been said
        self._logged: dict[str, float] = {}  # by line, for how long a rank was stuck there when that was logged
        self._stood_in: tuple[int, tuple[Frame, ...]] | None = None  # by the stand-in, as a whole
        self._times: Counter[str] = Counter()  # that it was stood in for, by line

    # -- phases

    def built(self) -> None:
        """The thread that wraps the model is the one that trains."""
        self._ident = threading.get_ident()
        if self._limit_s == math.inf or self._channel.world_size == 1:
            return
        self._rank.stand_in.say_where(self._where_now)
        self._thread = world.Thread(target=self._run, name="straggle-stuck", daemon=True)
        self._thread.start()

    def stands_in(self) -> None:
        """Note where the training thread is; this reads no file."""
        if self._thread is not None and self._rank.stand_in.watches:
            self._stood_in = self._rank.training.step, frames_of_thread(self._ident)

    def close(self) -> None:
        """Watch no more; the thread ends by itself."""
        self._closing.set()
        if self._posted:  # the thread may post once more: peers forget what is not said again
            self._post("")
        self._debug_server.close()

    # -- any thread

    def described(self) -> dict[str, object]:
        """Where this rank is now, for `torch.distributed.debug`."""
        frames = frames_of_thread(self._ident)
        state, place = self._state(), place_of(frames)
        return {
            "rank": self._channel.name,
            "step": self._rank.training.step,
            "goes_on": state is None or state.quiet_s < self._limit_s,
            "kind": None if place is None else self._kind(place),
            "for_s": 0.0 if state is None else state.quiet_s,
            "where": "" if place is None else place.words(text_of(place.own)),
            "stack": list(map(str, frames)),
        }

    def members_changed(self, report: MembersReport) -> None:
        """Members have left: one that fell silent is looked at by its agent, which the lowest member asks.

        If members are replicas, each rank of the lowest one asks for the rank with its own shard.
        """
        if self._channel.rank == min(report.ranks, default=-1):
            silent = [member for member, kind in report.left_kinds.items() if kind == "silent"]
            self._ask_agents(list(self._channel.named(silent)), "no sign of life")

    def _where_now(self) -> str:
        place = place_of(frames_of_thread(self._ident))
        return "" if place is None else f", {place.words()}"

    # -- the thread

    def _run(self) -> None:
        every_s = min(_LOOK_S, self._limit_s / 4)
        slept_at = world.monotonic()
        while not self._closing.wait(every_s):
            late_s = world.monotonic() - slept_at - every_s
            if late_s >= self._limit_s / 2:
                self._blind_s = late_s
            self._debug_server.offer()
            self._report_stood_in()
            with contextlib.suppress(StoreUnreachable):  # which others say
                self._look()
            slept_at = world.monotonic()

    def _look(self) -> None:
        state = self._paused() or self._state()
        if state is None or (self._posted and state.step != self._posted_in):  # it has gone on since the last look
            self._goes_on()
        if state is None:
            return
        if state.kind == "paused":  # its peers would take its silence for that of a process that is stopped
            self._posted_in = state.step
            self._post(replace(state, number=self._posted + 1).as_json())
            return
        place = place_of(frames_of_thread(self._ident))
        if place is None:
            return
        kind = self._kind(place)
        state = replace(
            state,
            kind=kind,
            where=place.words(text_of(place.own)) + (blind_words(self._blind_s) if self._blind_s else ""),
            line=str(place.own),
            collective=self._open_collective() if kind == "collective" else "",
            number=self._posted + 1,
        )
        self._posted_in = state.step
        self._post(state.as_json())
        if kind == "waits":
            self._look_for_silent(state)
        elif kind != "inside" and state.quiet_s >= self._limit_s and not self._known:
            self._look_at_own(state)

    def _kind(self, place: Place) -> Kind:
        if self._rank.training.taking:
            return "waits"
        if place.kind == "collective" and self._rank.replica.vote is not None:
            return "inside"  # it may be one of its replica, of which the ranks of this channel know nothing
        return place.kind

    def _state(self) -> RankState | None:
        """What is known of this rank without its frames; ``None`` if it goes on, or nobody should wait for it."""
        training, merging = self._rank.training, self._rank.merging
        if not self._rank.stand_in.watches or merging.takes_part_from > training.step:
            return None
        now, entered_at = training.stopwatch.now(), training.entered_at
        busy_s = training.since_step_s if entered_at is None else now - entered_at
        quiet_s = min(busy_s, now - training.stopwatch.moved_at)
        if busy_s < self._speak_s:
            return None
        lag = self._rank.lag - int(training.taking)
        return RankState("stuck", training.step, entered_at is not None, busy_s, quiet_s, lag=max(0, lag))

    def _paused(self) -> RankState | None:
        """The state of a rank whose loop pauses, once that is long."""
        place, seconds = self._rank.training.place()
        if place != "paused" or seconds < self._speak_s:
            return None
        return RankState("paused", self._rank.training.step, False, seconds, seconds)

    def _goes_on(self) -> None:
        if self._posted:
            self._post("")
        self._posted, self._known, self._blind_s = 0, False, 0.0
        self._heard.clear()
        self._silent.clear()
        if self._open is not None:
            seconds = round(self._open.seconds + world.monotonic() - self._opened_at, 3)
            self._report(replace(self._open, over=True, seconds=seconds))
            self._open = None

    def _post(self, word: str) -> None:
        self._posted += 1
        key = f"{_KEY}/{self._channel.rank}"
        self._channel.store.post(lambda store: store.set(key, word))

    def _states(self) -> dict[int, RankState]:
        """Those of all ranks that do not go on and can say so, by their names."""
        awaited = self._channel.awaited
        words = self._channel.store.ask(lambda store: words_under(store, _KEY, awaited))
        now, fresh = world.monotonic(), dict[int, RankState]()
        for rank, word in words.items():
            if not word:
                continue
            state = RankState.of_json(word)
            if self._heard.get(rank, (-1, 0.0))[0] != state.number:
                self._heard[rank] = state.number, now
            if now - self._heard[rank][1] < _STALE_S + self._limit_s:
                fresh[self._channel.names[rank]] = state
        return fresh

    def _look_at_own(self, state: RankState) -> None:
        states = {**self._states(), self._channel.name: state}
        awaited = self._channel.named(self._channel.awaited)
        left = sorted({*self._channel.names} - {*awaited})
        found = finding(self._channel.name, states, awaited, self._limit_s, left)
        if found is None:
            return
        self._known = True
        if not found.is_waited_for:  # all ranks alike, perhaps in an evaluation
            self._log(found, state, logging.INFO)
            return
        self._log(found, state, logging.WARNING)
        self._begin(
            StuckReport(
                self._channel.name,
                state.step,
                state.entered,
                round(state.quiet_s, 3),
                state.where,
                state.line,
                tuple(map(str, frames_of_thread(self._ident))),
                found.waiting,
                state.collective,
            )
        )

    def _log(self, found: Finding, state: RankState, level: int) -> None:
        """Once for each time; at the same line again if it lasts twice as long."""
        if found.words and state.quiet_s >= _AGAIN * self._logged.get(state.line, 0.0):
            self._logged[state.line] = state.quiet_s
            _log.log(level, found.words)

    def _look_for_silent(self, state: RankState) -> None:
        """This rank waits: is it for ranks that cannot say anything, and not for some that have just gone on?"""
        waits_s, now = self._rank.merging.on_its_way()[1], world.monotonic()
        if waits_s < self._limit_s / 2 or self._known:
            return
        states = {**self._states(), self._channel.name: state}
        awaited = self._channel.named(self._channel.awaited)
        names = [name for name in awaited if name not in states]
        self._silent = {name: self._silent.get(name, now) for name in names}
        silent = [name for name, since in self._silent.items() if now - since >= self._limit_s / 2]
        waiting = sorted(name for name, other in states.items() if other.kind == "waits")
        if waits_s < self._limit_s or waiting[0] != self._channel.name:
            return
        paused = {name: states[name] for name in awaited if name in states and states[name].kind == "paused"}
        self._known = bool(silent or (paused and not names))
        if not silent:
            if self._known:
                _log.info(paused_words(paused, waiting, state.step, waits_s))
            return
        _log.warning(silent_words(silent, waiting, state.step, waits_s))
        self._ask_agents(silent, f"rank {self._channel.name} has waited for it for {duration(waits_s)}")
        self._begin(StuckReport(silent[0], state.step, False, round(waits_s, 3), SILENT, waiting=tuple(waiting)))

    def _ask_agents(self, ranks: list[int], why: str) -> None:
        for rank in ranks:
            self._channel.store.post(partial(post_silent, rank=rank, why=why))

    def _report_stood_in(self) -> None:
        """Report where it was when it was stood in for: the 1st, 2nd, 4th, 8th time and so on at each line."""
        if (noted := self._stood_in) is None:
            return
        self._stood_in = None
        step, frames = noted  # one assignment of the stand-in's: both are of the same moment
        if (place := place_of(frames)) is None or place.kind == "inside":
            return
        self._times[line := str(place.own)] += 1
        if (times := self._times[line]) & (times - 1):
            return
        training = self._rank.training
        entered, where = training.entered_at is not None, place.words(text_of(place.own))
        stack = tuple(map(str, frames))
        self._report(StuckReport(self._channel.name, step, entered, 0.0, where, line, stack, stood_in=times))

    def _begin(self, report: StuckReport) -> None:
        self._open, self._opened_at = report, world.monotonic()
        self._report(report)

    def _report(self, report: StuckReport) -> None:
        registers = self._hooks()
        for hook in () if registers is None else tuple(registers.stuck.values()):
            try:
                hook(report)
            except Exception as error:  # what others do with it is no reason to look no more
                _log.warning("rank %d: a hook of register_stuck_hook raised %r", self._channel.name, error)

    def _open_collective(self) -> str:
        """The last collective of the user's that is not over, as torch's Flight Recorder has it."""
        try:
            dump: Mapping[str, object] = own_dump()
            return newest_open(dump)
        except (RuntimeError, ValueError, KeyError, TypeError, ImportError):  # it is torch's, and private
            return ""


NAME = "straggle_stuck"
_MODULE = "torch.distributed.debug"


class DebugServer:
    """Has `torch.distributed.debug`'s server answer ``POST /handler/straggle_stuck`` with ``described()`` as JSON.

    A process has one handler of a name: it answers for the last model.
    """

    def __init__(self, described: Callable[[], Mapping[str, object]]) -> None:
        self._described: Callable[[], Mapping[str, object]] | None = described
        self._offered = False

    def offer(self) -> None:
        """Register the handler, if a server runs in this process and it is not registered yet."""
        debug = sys.modules.get(_MODULE)
        if self._offered or getattr(debug, "_WORKER_SERVER", None) is None:
            return
        from torch._C import _distributed_c10d as c10d

        if (register := getattr(c10d, "_register_handler", None)) is not None:
            answer = self._answer
            # torch lets go of it when the process ends, without the GIL: if it were freed then, Python would abort
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))
            register(NAME, answer)
        self._offered = True

    def close(self) -> None:
        """Answer no more."""
        self._described = None

    def _answer(self, _request: Any, response: Any) -> None:
        described = self._described
        words = {"closed": True} if described is None else dict(described())
        response.set_content(json.dumps(words), "application/json")
        response.set_status(200)
