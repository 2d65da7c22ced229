"""What is said in the log about a step that was merged, and about the loop around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from straggle.loop.open_step import OpenStep
from straggle.merge.checks import left_out, meets_in_block, no_gradient_at_first, no_gradient_of_passes, too_few_passes
from straggle.merge.options import Merge
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.round.round import Round
from straggle.merge.wire.channel import Channel

_AT_FIRST = 3  # steps in which no rank has a gradient, after which that is no choice of the loop's
_MOST_LOOKS = 3  # for collectives of the loop's own

_log = logging.getLogger(__name__)


class StepWarnings:
    """Of one model, on its training thread; most are said once, by the first of the ranks that merge together.

    ``called_in``: the lines that began these collectives; empty: none of this thread, ``None``: it is not known.
    """

    def __init__(
        self,
        channel: Channel,
        merge: Merge,
        opened: OpenStep,
        coordinator: Coordinator,
        called_in: Callable[[Mapping[str, range]], list[str] | None],
    ) -> None:
        self._channel, self._merge, self._opened = channel, merge, opened
        self._coordinator, self._training, self._called_in = coordinator, coordinator.training, called_in
        self._looks_left = _MOST_LOOKS
        self._is_first = channel.rank == 0
        self._warned: set[str] = set()
        self._num_empty = 0  # steps without a gradient of any rank; negative: there was one that had some

    def once(self, what: str, words: str) -> None:
        """Say this, unless something was said of ``what`` before."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(words)

    def merged(self, merged: Round) -> None:
        """A step is merged: were there as many passes as announced, and are all gradients finite?"""
        if self._opened.passes_came_short(merged) and (
            words := too_few_passes(self._opened.last.num_announced, self._opened.num_over)
        ):
            self.once("passes", f"rank {self._channel.name}, step {merged.step}: {words}")
        fruitless = self._opened.num_fruitless
        if fruitless and merged.gradients.number == 0 and self._opened.passes_came_short(merged):
            words = no_gradient_of_passes(fruitless)
            self.once("fruitless", f"rank {self._channel.name}, step {merged.step}: {words}")
        if self._num_empty >= 0:
            self._count_empty(merged)
        if self._training.collectives.number and self._is_first and self._looks_left:
            self._tell_collectives(merged.step)
        if self._is_first and not merged.table.is_usual and (nonfinite := merged.table.nonfinite_ranks()):
            step = merged.step - int(max(merged.table.column("counts_behind")))
            skipped = merged.table.skipped() or any(merged.table.column("skipped_before"))
            words = left_out(self._channel.named(nonfinite), skipped=skipped, zeros=merged.buffers.is_queued)
            self.once("nonfinite", f"step {step}: {words}")

    def _tell_collectives(self, step: int) -> None:
        """Say which call of the loop's own makes ranks wait; one in the first step only may have prepared something."""
        if not self._coordinator.is_planned or self._coordinator.deadline.waits_for_all:
            return
        self._looks_left -= 1
        if (lines := self._called_in(self._training.collectives.has_begun.begun)) != []:
            self._looks_left = 0
            self.once("collectives", f"step {step}: {meets_in_block(lines or ())}")

    def _count_empty(self, merged: Round) -> None:
        self._num_empty = self._num_empty + 1 if merged.table.all_skipped() else -1
        if self._num_empty == _AT_FIRST and self._is_first and "fruitless" not in self._warned:
            self.once("empty", no_gradient_at_first(_AT_FIRST))

    def of_different_replicas(self, current: Round) -> None:
        """Warn if ranks have, or will have, other parameters than the rest."""
        record = current.record
        level = logging.WARNING if self._is_first else logging.DEBUG
        if unlike := record.table.stepped_unlike():
            _log.log(
                logging.WARNING if self._channel.rank in unlike else level,
                "step %d: the optimizers of ranks %s have not stepped as often as those of the others since step %d, "
                "and their parameters are others from here on: look for `continue`, `break` or `return` that skips "
                "optimizer.step() on some ranks only, and resume from a checkpoint",
                record.step,
                self._channel.named(unlike),
                record.step - 1,
            )
        elif self._merge.checks(record.step) and (different := record.table.different_ranks()):
            _log.log(
                level,
                "step %d: the parameters of ranks %s, or their buffers, are not those of the others: %s; look for code "
                "that changes them on some ranks only, and resume from a checkpoint",
                record.step,
                self._channel.named(different),
                _some(record.differing),
            )


def _some(names: Sequence[str], most: int = 5) -> str:
    """The first of these, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
