"""Faults that a person would make, each a text of the library and another one in its place; for `planted.py`.

A fault shows only in some orders of events: a wake that is missing, an order of two things, a state that is forgotten,
a rank in the place of another number, a weight that is left out. None of them ends every job at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """In ``file`` of the package, ``new`` stands in the place of ``old``, which is there once.

    A file may move: then it is the one that has the text.
    """

    name: str
    file: str
    old: str
    new: str

    def place(self, package: Path) -> Path:
        """The file of this package to plant it in. Raises ``ValueError`` unless there is one."""
        named = package / self.file
        if named.exists() and self.old in named.read_text():
            return named
        found = [path for path in sorted(package.rglob("*.py")) if self.old in path.read_text()]
        if len(found) != 1:
            raise ValueError(f"{self.name}: what it replaces is in {len(found)} files, and not in {self.file}")
        return found[0]

    def into(self, text: str) -> str:
        """The file's text with this fault. Raises ``ValueError`` unless the old one is in it once."""
        if (number := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: what it replaces is {number} times in {self.file}, and not once")
        return text.replace(self.old, self.new)


_ROW = """\
        current.buffers.write_telemetry(self._rank.replica.place, row.numbers(current.layout.columns))
"""
_SEND = "        rows = current.buffers.merge_telemetry(groups.control)\n"
_NOTED = "        self._ended_s = deadline.seconds, deadline.shadow_s\n"
_DECIDED = """\
        try:
            if table.is_usual or not table.replanning():  # which is no step of the training
                deadline.decide(table)
"""
_NEXT = (
    "            rank.merging.merged(current)  # the next step begins, and whoever waits for this one may take it\n"
    "            rank.training.merged(current)  "
    "# if it is still in this step, or an earlier one, it comes to take the merge\n"
    "            rank.stand_in.merged(current)  # by the next deadline: it may have to look earlier than it planned\n"
)
_WINGS = (
    "            for phase in self._wings.merged:  # who takes part in the next step, which must have begun\n"
    "                phase(current)\n"
)

MERGE = [
    # -- a thread is not woken, or looks too late
    Fault("merged-wakes-nobody", "merge/late/sides.py", "        self.step_merged.notify_all()\n", ""),
    Fault(
        "old-decision",
        "merge/late/stand_in.py",
        "            action = decide(now, self._situation(now), self._limits())\n",
        "            action = decide(now, self._situation(now), self._limits())\n        with self._lock:\n",
    ),
    Fault(
        "giving-nothing-wakes-nobody",
        "merge/late/stand_in.py",
        "        self._rests = self._rests and not gives_nothing\n        self._wakes.notify()\n",
        "        self._rests = self._rests and not gives_nothing\n",
    ),
    Fault(
        "stand-in-ends-unheard",
        "merge/late/stand_in.py",
        "                self._training.stops.up_to(self._merging.step)\n"
        "                self._merging.step_merged.notify_all()\n",
        "                self._training.stops.up_to(self._merging.step)\n",
    ),
    Fault(
        "end-wakes-only-the-stand-in",
        "merge/late/stand_in.py",
        "        self._wakes.notify()\n        self._merging.step_merged.notify_all()\n",
        "        self._wakes.notify()\n",
    ),
    Fault(
        "room-wakes-nobody",
        "merge/round/merged_steps.py",
        "            if merged.stood_in or merging.step > training.step:\n                self._rank.stand_in.wake()\n",
        "",
    ),
    # -- a lock is taken twice, or held over a wait
    Fault(
        "lock-taken-twice",
        "merge/round/coordinator.py",
        "            self._merge_waiting()\n        for phase in self._wings.stands_in:",
        "            self.merge_waiting()\n        for phase in self._wings.stands_in:",
    ),
    Fault(
        "failure-posted-with-the-lock",
        "merge/round/coordinator.py",
        "            self._channel.post_failure(what)\n            with self._lock:\n",
        "            with self._lock:\n                self._channel.post_failure(what)\n",
    ),
    # -- another order of two things
    Fault(
        "deadline-noted-after-the-next", "merge/round/merged_steps.py", _NOTED + _DECIDED, _DECIDED + "    " + _NOTED
    ),
    Fault("members-before-the-next-step", "merge/round/merged_steps.py", _NEXT + _WINGS, _WINGS + _NEXT),
    Fault(
        "bucket-goes-before-its-step-is-kept",
        "merge/round/round.py",
        "        if self.terms.all_or_nothing:\n            return\n        ends",
        "        ends",
    ),
    Fault(
        "buffers-free-before-it-is-known-what-is-kept",
        "merge/round/coordinator.py",
        "            if entry.kept != UNDECIDED:\n                self._rounds.free_held()",
        "            self._rounds.free_held()",
    ),
    # -- a state that is forgotten
    Fault(
        "in-a-step-between-two",
        "merge/late/sides.py",
        "return self.step == step and self.entered_at is not None and self.entry.entered",
        "return self.step == step and self.entry.entered",
    ),
    Fault(
        "round-that-was-given-up-goes-on",
        "merge/late/sides.py",
        "        if self.round is not None:\n            self.round.give_up()\n",
        "",
    ),
    Fault(
        "stall-paid-twice",
        "merge/late/sides.py",
        "merging.merged_at if self.came_late and merging.step == self.step else now",
        "now",
    ),
    Fault("taking-counts-as-behind", "merge/late/lateness.py", "return at.lag > int(at.taking)", "return at.lag > 0"),
    Fault(
        "gradients-into-a-closed-round",
        "merge/round/coordinator.py",
        "        return None if current.closed else current\n",
        "        return current\n",
    ),
    Fault(
        "finished-gradients-left-behind",
        "merge/round/coordinator.py",
        "        elif self._takes_part:  # those that are finished and wait for their group\n"
        "            self._merge_waiting()\n",
        "",
    ),
    Fault(
        "closed-round-goes-on-as-an-open-one",
        "merge/round/round.py",
        "        if self.closed:\n            self._launch_rest()\n        else:\n            self._launch_complete()",
        "        self._launch_complete()",
    ),
    Fault(
        "merged-in-groups-that-are-gone",
        "merge/round/merged_steps.py",
        "if current.abandoned or not self._completion.is_current(epoch):",
        "if current.abandoned:",
    ),
    Fault(
        "idle-rank-estimates", "merge/round/submission.py", " < 1 and (had_work := self._had_work(current)):", " < 1:"
    ),
    Fault(
        "fingerprint-of-another-step",
        "merge/round/submission.py",
        "fingerprint=entry.fingerprint if in_step else NO_FINGERPRINT",
        "fingerprint=entry.fingerprint",
    ),
    Fault(
        "sums-of-another-step",
        "merge/round/merged_steps.py",
        "if training.is_in(current.step) and training.entry.tensors is not None:",
        "if training.entry.tensors is not None:",
    ),
    Fault("back-from-long-away-and-given-up", "merge/wire/patience.py", "min(waited_s, rank.for_s)", "waited_s"),
    Fault(
        "quorum-of-the-members-before",
        "merge/late/current_deadline.py",
        "self.quorum = self.late_handling.quorum_among(number, self._policy.quorum)",
        "self.quorum = self.rules.quorum",
    ),
    Fault(
        "store-stays-lost",
        "merge/wire/store.py",
        "self._connection, self._problem = connection, None",
        "self._connection = connection",
    ),
    Fault(
        "request-that-nobody-awaits-ends-the-thread",
        "merge/wire/store.py",
        "        if not answer.set_running_or_notify_cancel():\n            continue\n",
        "",
    ),
    # -- not begun anew
    Fault(
        "finished-in-the-step-before",
        "merge/late/stand_in.py",
        "self._waited_since, self._asked_at, self._unposted = math.inf, -math.inf, False",
        "self._waited_since, self._asked_at = math.inf, -math.inf",
    ),
    Fault(
        "quorum-of-the-step-before",
        "merge/late/stand_in.py",
        "            if step != self._merging.step:\n                return\n",
        "",
    ),
    Fault(
        "times-of-the-step-before",
        "merge/late/sides.py",
        "self.cost, self.microbatch_s = math.nan, []",
        "self.cost = math.nan",
    ),
    Fault(
        "normalized-in-the-step-before",
        "merge/round/buffers.py",
        "self._merged, self._again_bytes = {}, 0",
        "self._again_bytes = 0",
    ),
    Fault(
        "not-finite-in-the-step-before",
        "merge/round/finite.py",
        "self._sums, self._bad = {}, []",
        "self._sums = {}",
    ),
    Fault("gradient-of-the-step-before", "merge/round/buffers.py", "        self._clear_absent(flat, own)\n", ""),
    # -- counted twice
    Fault(
        "overrun-counted-twice",
        "merge/late/sides.py",
        "overrun_s, self.overrun_s = self.overrun_s, 0.0",
        "overrun_s = self.overrun_s",
    ),
    Fault(
        "finished-counted-twice",
        "merge/late/stand_in.py",
        "            return True\n        self._unposted = True\n",
        "            self._unposted = True\n            return True\n        self._unposted = True\n",
    ),
    # -- off by one
    Fault(
        "one-merged-step-too-many-waits",
        "merge/late/lateness.py",
        "at.lag >= limits.max_lag",
        "at.lag > limits.max_lag",
    ),
    Fault(
        "absent-in-its-first-step",
        "merge/round/merged_steps.py",
        "if training.step < merging.takes_part_from:",
        "if training.step <= merging.takes_part_from:",
    ),
    Fault(
        "end-noted-a-step-early",
        "merge/round/merged_steps.py",
        "self._rank.channel.merged(current.step)",
        "self._rank.channel.merged(current.step - 1)",
    ),
    Fault("ended-after-the-step-and-missed-in-it", "merge/wire/channel.py", "end.merged < step", "end.merged <= step"),
    # -- a weight, or what was dropped
    Fault(
        "estimate-unweighted",
        "merge/round/round.py",
        "estimate.gradient, add=add, weight=self.passes.weight * weights[index]",
        "estimate.gradient, add=add, weight=weights[index]",
    ),
    Fault("part-unweighted", "merge/round/round.py", "Share(weight * weights[index], ", "Share(weights[index], "),
    Fault(
        "estimate-for-what-is-there-too",
        "merge/round/round.py",
        "weights[index] = estimate.weight * (1 - share)",
        "weights[index] = estimate.weight",
    ),
    Fault(
        "dropped-in-the-row-only",
        "merge/round/gradients_in.py",
        "            self.by_parameter = [0] * len(shares)\n",
        "",
    ),
    Fault(
        "not-finite-keeps-its-weight",
        "merge/round/buffers.py",
        "        flat.tail.view(2, -1).masked_fill_(bad, 0.0)\n",
        "",
    ),
    Fault(
        "moved-without-what-was-not-sent",
        "merge/round/buffers.py",
        "flat.gradients.copy_(its.gradients)",
        "flat.wire.copy_(its.wire)",
    ),
]

MEMBERS = [
    # -- views
    Fault(
        "older-view-seen-last",
        "members/views/view_chain.py",
        "if known is None or (view.generation, view.begun) > (known.generation, known.begun):",
        "if known is None or (view, view.begun) != (known, known.begun):",
    ),
    Fault(
        "view-in-which-it-gives-is-forgotten",
        "members/views/view_chain.py",
        "if view.giver == self.rank and (self.giving is None or view.step > self.giving.step):",
        "if view.giver == self.rank:",
    ),
    Fault(
        "view-overwritten",
        "members/views/view_chain.py",
        "return self._swap(store, old.encode(), new.encode())",
        "store.set(_KEY, new.encode())\n        return True",
    ),
    Fault(
        "view-followed-twice",
        "members/regrouped/regrouping.py",
        "if view.generation <= self._channel.generation:",
        "if view.generation < self._channel.generation:",
    ),
    Fault(
        "skipped-view-had-put-it-out",
        "members/regrouped/regrouping.py",
        "self._member.put_out()  # the view",
        "pass  # the view",
    ),
    Fault(
        "newer-hold-forgotten",
        "members/views/view_chain.py",
        "            if self.held is held:\n                self.held = None",
        "            self.held = None",
    ),
    Fault(
        "waits-for-a-view-that-is-there",
        "members/member.py",
        "elif admits(table) and self._lets_in.is_open(step) and not self.notes_of(current).complete:",
        "elif admits(table) and self._lets_in.is_open(step):",
    ),
    Fault("refilled-view-is-no-new-one", "members/views/refill.py", "return newest.again()", "return newest"),
    # -- who is gone
    Fault(
        "own-silence-is-theirs",
        "members/views/view.py",
        "before = {} if missed else self._signs",
        "before = self._signs",
    ),
    Fault(
        "left-to-those-without-state",
        "members/views/failure_detector.py",
        "self._have_state(view.without(gone), view)",
        "self._have_state(view, view)",
    ),
    Fault(
        "sign-of-another-process",
        "members/views/heartbeat.py",
        'return f"beat/{rank}/{incarnation}"',
        'return f"beat/{rank}"',
    ),
    Fault(
        "put-out-counted-again",
        "members/slow/put_out.py",
        "gone = frozenset() if new else view.put_out - self._put_out - self._known.out",
        "gone = view.put_out - self._put_out - self._known.out",
    ),
    # -- a round whose members change
    Fault(
        "frozen-in-the-old-epoch",
        "members/member.py",
        "        self._rank.channel.begin_epoch()\n        self._rank.rounds.merge_among_none()\n",
        "        self._rank.rounds.merge_among_none()\n",
    ),
    Fault(
        "new-groups-wake-nobody",
        "members/member.py",
        "                device.wait_for_all()\n            merging.step_merged.notify_all()\n",
        "                device.wait_for_all()\n",
    ),
    Fault(
        "put-out-wakes-nobody",
        "members/member.py",
        "                self.slow.begin_anew()\n            merging.step_merged.notify_all()\n",
        "                self.slow.begin_anew()\n",
    ),
    Fault(
        "rows-not-copied",
        "members/member.py",
        "self._last_telemetry = current.buffers.telemetry.clone()",
        "self._last_telemetry = current.buffers.telemetry",
    ),
    Fault(
        "failed-counts-as-merged",
        "members/regrouped/moved_round.py",
        "if works and all(map(succeeded, works)))",
        "if works and all(work.is_completed() for work in works))",
    ),
    Fault(
        "old-merge-still-writes",
        "members/regrouped/moved_round.py",
        "if in_flight or not all(work.is_completed() for work in chain.from_iterable(current.launched)):",
        "if in_flight:",
    ),
    Fault(
        "gradient-of-one-who-left-is-not-told",
        "members/regrouped/moved_round.py",
        "rows_tell_all=not (repair.given or repair.kept))",
        "rows_tell_all=True)",
    ),
    Fault(
        "bucket-of-a-rank-and-not-its-place",
        "members/regrouped/moved_round.py",
        "current.buffers.broadcast(bucket, groups, place_of[giver])",
        "current.buffers.broadcast(bucket, groups, giver)",
    ),
    Fault(
        "rows-of-a-rank-and-not-its-place",
        "members/regrouped/regrouping.py",
        "view.ranks.index(way.giver)",
        "way.giver",
    ),
    Fault(
        "newcomer-lacks-what-all-have",
        "members/views/view.py",
        "if len(ranks) == len(progress))",
        "if len(ranks) == len(known))",
    ),
    Fault(
        "epoch-read-after-the-wait",
        "members/regrouped/completion.py",
        'that all ranks have it", give_up_s, epoch)\n        return epoch',
        'that all ranks have it", give_up_s, epoch)\n        return channel.epoch',
    ),
    Fault(
        "not-confirmed-in-a-usual-step",
        "members/regrouped/completion.py",
        "        channel.wait(last, current.step,",
        "        if apart:\n            channel.wait(last, current.step,",
    ),
    Fault("row-behind-its-message", "members/regrouped/completion.py", _ROW + _SEND, _SEND + _ROW),
    Fault(
        "rows-of-those-who-left",
        "members/regrouped/completion.py",
        "        notes.end_with(rows, self._rank.rounds.ranks)\n",
        "        notes.end_with(rows)\n",
    ),
    Fault(
        "other-state-among-changed-members",
        "members/regrouped/completion.py",
        "        changed = current.step == self._member.changed_in or self._member.notes_of(current).complete\n",
        "        changed = self._member.notes_of(current).complete\n",
    ),
    # -- a rank comes back
    Fault(
        "merged-steps-of-one-who-was-out",
        "members/member.py",
        "            self._rank.ring.clear()\n            self._rank.stand_in.rest()\n",
        "            self._rank.stand_in.rest()\n",
    ),
    Fault(
        "step-twice-in-the-history",
        "members/member.py",
        "                if number >= history.num_steps:\n                    self._decide_again(number, table)\n",
        "                self._decide_again(number, table)\n",
    ),
    Fault(
        "deadline-not-healed", "members/member.py", "deadline.restore(history, decided)", "deadline.restore(history)"
    ),
    Fault(
        "momentum-not-healed",
        "members/healed/healing.py",
        "if value is not None and (loaders_too or not is_loader(value)):",
        "if value is not None and loaders_too:",
    ),
    Fault(
        "state-of-an-earlier-step",
        "members/healed/healing.py",
        "        if view is None or view.step > step:  #",
        "        if view is None:  #",
    ),
    Fault(
        "state-before-its-view",
        "members/healed/healing.py",
        "return self._rank.merging.takes_part_from == view.step or self._channel.generation > view.generation",
        "return self._arrival is not None",
    ),
    Fault(
        "newcomer-a-step-behind",
        "members/regrouped/regrouping.py",
        "way.step > view.step:",
        "way.step > view.step + 1:",
    ),
    Fault("asks-for-ever", "members/regrouped/regrouping.py", "                self._asked_at = None\n", ""),
    Fault(
        "is-out-and-lets-others-in",
        "members/views/membership.py",
        "if not self.chain.is_in(view):  # it was put out",
        "if not self.chain.has_view:  # it was put out",
    ),
    Fault(
        "request-of-another-rank-withdrawn",
        "members/views/join_requests.py",
        'store.delete_key(f"join/{each}")',
        'store.delete_key(f"join/{self._rank}")',
    ),
]

LOOPS_AND_POLICIES = [
    Fault(
        "nothing-left-but-what-was-put-back",
        "pools/draws.py",
        "self._is_back = self._asked_before = True",
        "self._is_back = True",
    ),
    Fault(
        "lock-held-while-it-draws",
        "pools/draws.py",
        "            more = asked.answer()\n",
        "            with self._lock:\n                more = asked.answer()\n",
    ),
    Fault(
        "put-back-and-still-settled",
        "pools/pool.py",
        'phase="draw" if self.settles else "unsettle", settles=False',
        'phase="draw", settles=False',
    ),
    Fault(
        "shares-of-those-who-left-stay-closed",
        "pools/turns.py",
        "            draws.left(self._gone())\n",
        "",
    ),
    Fault(
        "weight-of-another-step",
        "pools/pulling.py",
        "[weight if parts else 0.0 for parts, weight in weights]",
        "[weight for _, weight in weights]",
    ),
    Fault(
        "pass-over-before-its-gradients-are-in",
        "loop/open_step.py",
        "            self._merge_waiting()\n            self._coordinator.end_pass(number)\n",
        "            self._coordinator.end_pass(number)\n            self._merge_waiting()\n",
    ),
    Fault(
        "late-with-all-done",
        "loop/open_step.py",
        "truncated = cut and (self._now.idle or self.num_over < self._now.passes_with_data)",
        "truncated = cut",
    ),
    Fault(
        "last-batch-told-late",
        "loop/uneven.py",
        "                if following is _END:\n",
        "                if not own:\n",
    ),
    Fault("wrong-one-of-two-counters", "loop/uneven.py", 'self.over = state["over"]', 'self.begun = state["over"]'),
    Fault(
        "kept-without-a-copy",
        "source/kept.py",
        "self.gradients = {index: gradient.detach().clone() for index, gradient in kept.items()}",
        "self.gradients = dict(kept)",
    ),
    Fault(
        "history-counts-anew",
        "policies/history.py",
        "self._num_steps = history.num_steps - len(history.compute_s)",
        "self._num_steps = 0",
    ),
    Fault(
        "choice-of-another-history",
        "policies/auto_deadline.py",
        "if self.chosen is None or (history.num_steps - since, history.evenly) != self._chosen_at:",
        "if self.chosen is None or not since:",
    ),
]

FAULTS = [*MERGE, *MEMBERS, *LOOPS_AND_POLICIES]
