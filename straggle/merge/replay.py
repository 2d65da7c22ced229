"""What one rank decided in each step, so that a run in which ranks were late can be repeated bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from straggle.merge.members.provenance import MergedAmong


@dataclass(frozen=True)
class Decision:
    """One rank's part in one step: what of it went into the merge, and where its pass ended.

    ``num_gradients``: how many finished gradients (of parameters, over all micro-batches) were in by then; autograd
    finishes them in the same order again. ``left_at``: how often the pass had asked whether to go on before it was
    asked to leave; ``None``: it was not. ``stood_in``: the rest was submitted by the stand-in, without estimates.
    ``num_over``: how many of its backward passes were over by then; ``None`` in recordings that do not say it.
    ``idle``: it had no data for the last step that it had entered; ``None``: the loop says so. ``entered``: false where
    it was stood in for before it had entered this one. ``among``: whose gradients were merged, where members come and
    go; ``None`` on a rank that was none. ``drawn``: the micro-batches that it had drawn from the step's pool, in order;
    ``None``: it drew none. ``leaves``: the ranks that were outside of the ring, which cannot be repeated. ``had_work``:
    whether what was not computed was missing; ``None``: nothing was, or the recording does not say it. ``num_drawn``:
    how many of ``drawn`` it had when its part was submitted; ``None``: all, or the recording does not say it.
    ``joins_over``: if it was stood in for, the loops over `join` for which it was known to have no more data.
    """

    step: int
    num_gradients: int
    left_at: int | None
    stood_in: bool
    num_over: int | None = None
    idle: bool | None = None
    entered: bool = True
    among: MergedAmong | None = None
    drawn: tuple[int, ...] | None = None
    leaves: tuple[int, ...] = ()
    had_work: bool | None = None
    num_drawn: int | None = None
    joins_over: int | None = None


def no_leaves(leaf: Decision) -> str:
    """Why a recording with this step is refused."""
    return (
        f"a run with leaves (links=LinkPolicy()) cannot be replayed: from step {leaf.step} on ranks "
        f"{list(leaf.leaves)} were outside of the ring, and which of their gradients came is not recorded"
    )


@dataclass(frozen=True)
class RecordedStep:
    """Among which ranks each bucket of a step was summed, and the telemetry; ``lost`` as in `MergedAmong`.

    ``apart``: the telemetry, and with it the module's buffers, went in a message of its own (`Rounds.tells_apart`).
    """

    buckets: tuple[tuple[int, ...], ...]
    telemetry: tuple[int, ...]
    lost: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    apart: bool = False


@dataclass(frozen=True)
class Healed:
    """A rank came back with the step of this.

    ``random``: torch's random state then. ``started``: in a new process. ``giver``: the rank whose state it has;
    ``None`` in recordings that do not say it.
    """

    random: Tensor
    started: bool
    giver: int | None = None


@dataclass(frozen=True)
class RecordedMembers:
    """Who was a member in each step from 0 on, and before which steps this rank took the state of a peer.

    ``givers``: before these steps, whose state each of these ranks took, which is the same on all ranks.
    """

    steps: tuple[RecordedStep, ...]
    healed: Mapping[int, Healed] = field(default_factory=dict)
    givers: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """A rank's decisions from step 0 on, and what its stages were planned from (see `plan_stages`).

    ``members``: where they came and went.
    """

    order: tuple[int, ...]
    seconds: tuple[float, ...]
    decisions: tuple[Decision, ...]
    members: RecordedMembers | None = None


class Recorder(Protocol):
    """What is recorded before it is known to the peers, because this process may be killed right after it.

    Called by several threads.
    """

    def partial(self, decision: Decision) -> None:
        """This rank is about to submit less than all of its step."""

    def drew(self, step: int, numbers: Sequence[int]) -> None:
        """This rank has these micro-batches of its step's pool and, as far as is known now, no more."""

    def regrouped(self, generation: int, ranks: Sequence[int]) -> None:
        """From here on these ranks are the members."""

    def healed(self, step: int, *, started: bool, giver: int) -> None:
        """This rank enters ``step`` with the state of ``giver``; ``started``: it is the first step of its process."""
