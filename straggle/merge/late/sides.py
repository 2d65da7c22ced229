"""The two sides of a rank: where its training thread is, and where its merge is.

Both are in the same step or, if the rank was stood in for, the merge is in a later one. Two threads are at work: the
training thread, and the stand-in, which merges in its place when it is late or stuck. One lock, `MergeSide.lock`,
guards both sides. They are written by their methods only, with the lock held if nothing else is said.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from straggle import world
from straggle.backward.clocks import Stopwatch
from straggle.merge.round.round import Round
from straggle.merge.round.step_passes import EqualPasses, Passes, StopRule
from straggle.merge.rows.telemetry import NO_FINGERPRINT
from straggle.merge.wire.contents import Fingerprint
from straggle.merge.wire.loop_collectives import LoopCollectives
from straggle.merge.wire.patience import PlaceFor
from straggle.source.kept import NONE, UNDECIDED


class Entry(NamedTuple):
    """What the training thread enters a step with.

    ``idle``: it has no data for it. ``fingerprint``: of what it holds, and of each of these
    ``tensors``, if the ranks compare them in this step.
    ``stepped``: how often its optimizers stepped since the merge before. ``kept``: the mark of the gradients that it
    keeps, if that is decided. ``joins_over``: the loops over `join` for which it has no more data, as far as it knew
    then. ``frozen``: a number for the merged parameters that need no gradient. ``replans``: its parameters are others,
    and it gives nothing but that word.
    ``rule``: what ends its part in the step, if not the clock. By such a rule, ``max_over``: as many of its passes are
    taken for over; ``entered``: whether it had entered the step when it was submitted; ``had_work``: whether what it
    did not compute is missing.
    """

    num_microbatches: int = 1
    idle: bool = False
    fingerprint: int = NO_FINGERPRINT
    tensors: Fingerprint | None = None
    stepped: float = math.nan
    kept: int = NONE
    max_over: int | None = None
    entered: bool = True
    had_work: bool | None = None
    rule: StopRule | None = None
    joins_over: int = 0
    frozen: int = NONE
    replans: bool = False


class Stops:
    """Which steps the training thread is to leave.

    ``step``: every one up to this; by whoever merges, with the lock. ``asked_step``: the same, by any thread, a signal
    handler included: it cannot take the lock, and must not lose what is in ``step``. ``probes``: the thread takes no
    part in its step, and goes through it all the same, to time its own work.
    """

    def __init__(self) -> None:
        self.step = self.asked_step = -1
        self.probes = False

    def ask(self, step: int) -> None:
        """Ask it to leave this step; by any thread."""
        self.asked_step = step  # one number, set at once

    def up_to(self, step: int) -> None:
        """Ask it to leave every step up to this one."""
        # only upwards: the other thread may have asked for a later one
        self.step = max(self.step, step)

    def only_up_to(self, step: int) -> None:
        """It may go on with the steps after this one."""
        self.step = self.asked_step = step

    def not_in(self, step: int) -> None:
        """It is to go on with this step, whatever it was asked by a merge of that."""
        self.step = min(self.step, step - 1)

    def probe(self, step: int) -> None:
        """This step is none of its peers', and it is to go through it."""
        self.only_up_to(step - 1)  # what it was asked before is about steps of its peers
        self.probes = True

    def taken(self) -> None:
        """It has left a step, and comes to the next one."""
        if self.probes:
            self.probes = False
            self.up_to(sys.maxsize)

    def has(self, step: int) -> bool:
        """Whether it was asked to leave this step by whoever merges."""
        return self.step >= step


class OwedCollectives:
    """The loop's own collectives: those that this rank ``has_begun``, and those that its peers have.

    A step is not left before the rank has begun those of its peers: they would wait for it, and its next ones would
    meet those. ``number``: in the last step; ``gathers``: there were some in any step.
    """

    def __init__(self, has_begun: LoopCollectives) -> None:
        self.has_begun = has_begun  # in the open step
        self.number = 0
        self.gathers = False
        self._usual = 0  # in the last step that was not cut short
        self._owed: dict[int, int] = {}  # by step, those of peers who have finished it; by the stand-in

    def left(self, *, complete: bool) -> None:
        """The training thread's work for its step is over; ``complete``: it went through all of it."""
        self.number = self.has_begun.number
        if self.number:
            self.gathers = True
        if complete:
            self._usual = self.number

    def owe(self, step: int, number: int) -> None:
        """Peers that have finished the step have begun so many in it."""
        if number:
            self._owed[step] = number

    def taken(self, step: int) -> None:
        """The step is over."""
        self._owed.pop(step, None)  # otherwise it would grow by one for each step in which this rank was late

    def forget(self) -> None:
        """The rank goes on in another step."""
        self._owed.clear()

    def has_those_of_peers(self, step: int) -> bool:
        """Whether this rank has begun those that its peers have."""
        return step not in self._owed or self.has_begun.number >= self._owed[step]

    def has_usual(self) -> bool:
        """Whether this rank has begun those of its last step, for want of a word of its peers."""
        return not self._usual or self.has_begun.number >= self._usual


class TrainingSide:
    """Where the training thread is. It alone writes here, but for what the comments name.

    ``step`` is the one that it is in, or will enter next.
    """

    def __init__(self, stopwatch: Stopwatch, collectives: LoopCollectives | None = None) -> None:
        self.step = 0
        self.entry = Entry(kept=UNDECIDED)
        self.entered_at: float | None = None  # `None` between two steps
        self.clock_from = -math.inf  # what its deadline counts from
        self.applied_at = -math.inf  # when it took the last merged step
        self.paused_at: float | None = None  # the loop has said that it pauses
        self.taking = False  # it has merged its step itself, and is about to take it
        self.came_late = True  # it has not submitted its last step itself: the next one may have begun without it
        self.failed = False  # its own code raised
        self.passes: Passes = EqualPasses()  # of its step; also by the stand-in
        self.weight = 1.0  # that the loop gave the step
        # seconds after the last merge, after which no rank waits for one that has not entered the step
        self.unentered_s = math.inf
        self.joins_over = 0  # loops over `join` for which it has no more data; set without the lock
        self.cost = math.nan  # what its step takes by right, in the user's unit
        # appended to without the lock, which costs too much for each micro-batch: a reader may see one less
        self.microbatch_s: list[float] = []  # when each was finished
        self.overrun_s = 0.0  # emptied by whoever submits
        self.collectives = OwedCollectives(collectives or LoopCollectives())
        self.stopwatch = stopwatch
        self._made_at = stopwatch.now()
        self.stops = Stops()

    # -- the training thread

    def enter(self, entry: Entry, now: float, merging: MergeSide) -> None:
        """It enters its step.

        Where the last step was ended without it, its peers began this one at the end of that merge, and its deadline
        counts from there: otherwise a stall is paid twice.
        """
        self.entry, self.entered_at, self.paused_at = entry, now, None
        self.clock_from = merging.merged_at if self.came_late and merging.step == self.step else now
        self.passes, self.weight = EqualPasses(entry.num_microbatches), 1.0
        self.cost, self.microbatch_s = math.nan, []
        self.collectives.has_begun.begin()

    def keep(self, kept: int) -> None:
        """The mark of the gradients that it keeps is decided."""
        self.entry = self.entry._replace(kept=kept)

    def weigh(self, weight: float) -> None:
        """Its step has this weight."""
        self.weight, self.passes = weight, self.passes.weighed(weight)

    def use(self, passes: Passes) -> None:
        """Its step has these passes from here on; by the stand-in, too."""
        self.passes = passes

    def no_data_for(self, joins_over: int) -> None:
        """It has no more data for so many loops over `join`. Needs no lock: one number, that others only read."""
        self.joins_over = joins_over

    def set_cost(self, cost: float) -> None:
        """Its step costs this much."""
        self.cost = cost

    def end_data(self) -> None:
        """It has no data for any of its step's passes."""
        self.entry = self.entry._replace(idle=True)

    def microbatch_finished(self) -> None:
        """It has finished a micro-batch of its step. Needs no lock."""
        if len(self.microbatch_s) < max(1, self.passes.number):  # a loop may call the model more often
            self.microbatch_s.append(self.stopwatch.now() - (self.entered_at or 0.0))

    def leave(self, *, merges: bool, truncated: bool = False) -> None:
        """Its work for its step is over; ``merges``: it has submitted that itself, and merges it."""
        self.taking = merges
        self.collectives.left(complete=not (truncated or self.entry.idle))

    def fail(self) -> None:
        """Its own code raised, or the estimator's."""
        self.failed = True

    def take(self, current: Round, now: float) -> None:
        """It takes its step's merge, and goes on to the next step."""
        if current.stood_in:
            self.overrun_s += now - max(current.record.merged_at, self.applied_at)
        self.applied_at = now
        self.came_late = not self.taking
        self.collectives.taken(self.step)
        self.step += 1
        self.entered_at = None
        self.taking = False
        self.stops.taken()

    def pause(self, now: float) -> None:
        """The loop pauses, between two steps."""
        self.paused_at = now

    def begin_now(self, now: float) -> None:
        """Its time between two steps begins now."""
        self.applied_at, self.paused_at = now, None

    def restore(self, step: int) -> None:
        """It goes on from another run, or from another rank's state, with ``step``."""
        self.step = step
        self.collectives.forget()

    def make_again(self, step: int) -> None:
        """What was merged as ``step`` was none: it is still to be made, and not to be left because of that merge."""
        self.step = step
        self.stops.not_in(step)

    def is_in(self, step: int) -> bool:
        """Whether it is in this step, or by its rule was when the step was submitted."""
        return self.step == step and self.entered_at is not None and self.entry.entered

    def passes_in(self, step: int) -> Passes:
        """Those of this step; if it has not entered it, nothing is known but the weight of its last one."""
        if self.step == step and self.entered_at is not None:
            return self.passes
        return EqualPasses(1, self.weight)

    def no_more_after(self, step: int, *, stood_in: bool) -> int:
        """For how many loops over `join` it has no more data after ``step``; its last batch is of its own step."""
        if stood_in and self.step == step and self.entered_at is not None:
            return self.entry.joins_over  # it may take more batches
        return self.joins_over if self.step <= step else 0

    @property
    def leaves(self) -> bool:
        """Whether it may leave its step here, which it is late in or was asked to leave; needs no lock.

        Not before it has begun the collectives that its peers have begun. A rank that was only asked has no word of its
        peers, but has those of its last step.
        """
        if self.stops.has(self.step):
            return self.collectives.has_those_of_peers(self.step)
        return self.collectives.has_usual()

    # -- any thread

    @property
    def since_step_s(self) -> float:
        """Seconds since it last took a merged step, or since it could have."""
        return self.stopwatch.now() - max(self.applied_at, self._made_at)

    def place(self) -> PlaceFor:
        """Where it is, for its peers, and for how many seconds."""
        now, entered_at, paused_at = self.stopwatch.now(), self.entered_at, self.paused_at
        if paused_at is not None:
            return "paused", now - paused_at
        return ("outside", self.since_step_s) if entered_at is None else ("inside", now - entered_at)

    def wait_unentered(self, seconds: float) -> None:
        """So long after a merge no rank waits for one that has not entered the step; with the lock held."""
        self.unentered_s = seconds

    def stop(self) -> None:
        """Ask it to leave the step that it is in or enters next."""
        self.stops.ask(self.step)

    # -- whoever merges

    def merged(self, current: Round) -> None:
        """A step is merged: it is to leave that, and comes to take it."""
        self.stops.up_to(current.step)

    def take_overrun_s(self) -> float:
        """Seconds that it was still in steps that were merged without it, since this was last asked."""
        overrun_s, self.overrun_s = self.overrun_s, 0.0
        return overrun_s


class MergeSide:
    """Where the merge is. Whoever merges writes here: the training thread, or the stand-in in its place.

    ``step`` is the one that is being merged, ``round`` what this rank has for it so far. ``lock`` guards both sides,
    the round, and what the coordinator and the stand-in keep. ``step_merged`` is notified when the merge goes on to
    the next step, and when it never will.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.lock = world.Lock()
        self.step_merged = world.Condition(self.lock)
        self.step = 0
        self.round: Round | None = None  # `None` until a thread has something for it
        self.takes_part_from = 0  # the step from which on this rank takes part; `sys.maxsize`: it is not known
        self.merged_at = stopwatch.now()  # the step before
        self.any_late = False  # in the step before
        self.merge_s = 0.0  # of the step before, from the end of this rank's own work on
        self.times_at_merge = stopwatch.read()  # of the phases
        self._stopwatch = stopwatch
        self._submitted_at = self.merged_at
        self._on_its_way = -1, self.merged_at  # the step that was submitted last, and when; set as a whole

    @property
    def submitted(self) -> bool:
        """Whether all of this rank's part is on its way."""
        return self.round is not None and self.round.closed

    def take_part_from(self, step: int) -> None:
        """This rank takes part from this step on; ``sys.maxsize``: nobody knows from which on."""
        self.takes_part_from = step

    def begin(self, current: Round) -> None:
        """This rank has something for the step."""
        self.round = current

    def submit(self, now: float) -> None:
        """All of this rank's part is on its way."""
        self._submitted_at = now
        # in one assignment: another thread reads both without the lock
        self._on_its_way = self.step, now

    def on_its_way(self) -> tuple[int, float]:
        """The step that is being merged, and for how long all of this rank's part has been on its way; 0: it is not.

        By any thread, without the lock.
        """
        (submitted, at), step = self._on_its_way, self.step
        return step, max(1e-9, self._stopwatch.now() - at) if submitted == step else 0.0

    def merged(self, current: Round) -> None:
        """The step is merged: on to the next one."""
        # the record's own moment, so that what ranks report adds up to what the step took
        now = current.record.merged_at
        self.merge_s = now - self._submitted_at
        self.any_late = not current.table.is_usual and current.table.any_late()
        self.step += 1
        self.round = None
        self.merged_at, self.times_at_merge = now, self._stopwatch.read()
        # last: who wakes sees the next step begun
        self.step_merged.notify_all()

    def begin_now(self, now: float) -> None:
        """The time of the next step begins now."""
        self.merged_at, self.times_at_merge = now, self._stopwatch.read()

    def restore(self, step: int) -> None:
        """The rank goes on from another run, or comes to a job that is in ``step``; what it has begun is given up."""
        # another thread may be waiting for it, and must not publish it as a merged step
        if self.round is not None:
            self.round.give_up()
        self.step, self.round = step, None
        self._on_its_way = -1, self.merged_at
