"""What happened in a step: frozen records, built from the telemetry of all ranks and so the same on every rank.

Only ``seconds``, and ``network_s`` with it, are measured by each rank's own clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from straggle.schema import Metric, described, number

Phase = Literal["outside", "optimizer", "loop_end", "collective", "data", "forward", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Cause = Literal[
    "outside", "optimizer", "loop_end", "collective", "data", "forward", "backward", "error", "skipped", "members"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
CAUSE_WORDS: Mapping[Cause, str] = {
    "outside": "between steps",
    "optimizer": "in the optimizer",
    "loop_end": "at the loop's end",
    "collective": "in a collective of its own",
    "data": "loading data",
    "forward": "in forward",
    "backward": "in backward",
    "error": "after errors",
    "skipped": "without a backward pass",
    "members": "as members changed",
}
_RATE = Metric(
    "gauge",
    "link_bytes_per_second",
    "Bytes a second that this rank can send (up) and receive (down), measured last; NaN: not measured.",
)


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """The numbers of a rank's row that its report has unchanged.

    To add one, declare it here and set it in `merge/round/submission.py`: the wire, the table, the report, the trace,
    the arrays of a run and, if it has a metric, the exporter follow from this declaration. ``nonfinite`` is counted
    during the merge (`merge/round/buffers.py`).
    """

    compute_s: float = field(
        metadata=number(
            "seconds from entering `step()` to the end of its own work; NaN (null): it never entered", stable=True
        )
    )
    overrun_s: float = field(
        default=0.0,
        metadata=number("seconds in or before earlier steps, after these had been merged without it"),
    )
    inside_wait_s: float = field(
        default=0.0,
        metadata=number(
            "seconds that it waited for the other ranks of its replica, if a model is sharded over several"
        ),
    )
    late: bool = field(default=False, metadata=number("was it late", stable=True))
    stood_in: bool = field(default=False, metadata=number("did the stand-in submit its gradients", stable=True))
    idle: bool = field(default=False, metadata=number("it had no more data (`model.join`), or found its pool empty"))
    absent: bool = field(
        default=False, metadata=number("it was no member of the job: it was not late, and dropped nothing")
    )
    weight: float = field(default=1.0, metadata=number("what `step.weight` was set to; 1 otherwise"))
    nonfinite: int = field(
        default=0,
        metadata=number(
            "number of parameters whose gradients had elements that are not finite, and were left out; on a CUDA "
            "device those that were in one bucket with such a gradient count too",
            Metric(
                "counter",
                "nonfinite_contributions",
                "Parameters' gradients of this rank left out because they were not finite.",
            ),
        ),
    )
    parts: int = field(
        default=0,
        metadata=number(
            "micro-batches of the step's pool that it computed, with `step.pull`; 0 otherwise",
            Metric(
                "counter",
                "micro_batches",
                "Micro-batches that this rank drew from the pools of its steps and computed; 0 if ranks do not draw.",
            ),
        ),
    )
    put_back: int = field(
        default=0,
        metadata=number(
            "micro-batches that it had drawn and not begun, and gave back because it was stuck",
            Metric(
                "counter",
                "micro_batches_put_back",
                "Micro-batches that this rank had drawn and gave back, because it was stuck.",
            ),
        ),
    )
    sent_bytes: int = field(
        default=0,
        metadata=number(
            "bytes that it handed to collectives for its gradients, their weights, averaged buffers and telemetry, to "
            "seven digits; what was merged again as members changed counts twice, and what ranks send beside that or "
            "a collective makes of it on the network does not count",
            Metric("counter", "sent_bytes", "Bytes that this rank handed to collectives for gradients and telemetry."),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RankReport(RankNumbers):
    """One rank's part in one step: its `RankNumbers`, and numbers that follow from the rows of all ranks.

    Each field's text is in its declaration. ``outside_s`` has neither data loading nor the optimizer's step. ``reach``:
    0.5 means that half of the model's gradient elements came from this rank's own backward pass. ``weights``: without
    estimates, ``weight`` times ``stages``. Times that are unknown are NaN.
    """

    rank: int = field(metadata=number("number", stable=True))
    outside_s: float = field(
        default=math.nan,
        metadata=number("seconds between backward and the optimizer's step (clipping), and in evaluations"),
    )
    optimizer_s: float = field(default=0.0, metadata=number("seconds in the optimizer's step"))
    loop_end_s: float = field(
        default=0.0,
        metadata=number(
            "seconds from the optimizer's step until the `DataLoader` is asked for the next batch (logging, saving)"
        ),
    )
    collective_s: float = field(
        default=0.0, metadata=number("seconds that it waited in collectives of the loop's own between two steps")
    )
    data_s: float = field(
        default=math.nan,
        metadata=number(
            "seconds in which the `DataLoader` fetched a batch, and from then to the first forward pass; for another "
            "loader, all from the end of the optimizer's step on"
        ),
    )
    forward_s: float = field(default=math.nan, metadata=number("seconds in forward passes"))
    backward_s: float = field(default=math.nan, metadata=number("seconds in backward passes"))
    wait_s: float = field(metadata=number("seconds that it waited for the slowest rank", stable=True))
    reach: float = field(
        metadata=number(
            "share of the model's gradient elements that it computed",
            Metric("gauge", "reach_ratio", "Share of the model's gradients that this rank computed in the last step."),
            stable=True,
        )
    )
    stages: tuple[float, ...] = field(metadata=described("share of each stage that it computed"))
    stage_s: tuple[float, ...] = field(
        metadata=described("when each stage was complete, in seconds from entering `step()`; null: never")
    )
    weights: tuple[float, ...] = field(
        default=(),
        metadata=described(
            "for each stage, the weight in the merge of all that the rank submitted, including estimates"
        ),
    )
    cause: Cause | None = field(
        default=None,
        metadata=described(
            "what a late rank was doing: one of the phases, from `outside` to `backward`. If a rank was not late and "
            "lacks gradients: `error` (a backward pass ended in an error that the loop caught), `skipped` (the block "
            "was left without a backward pass) or `members` (a merge was lost when another rank left)",
            stable=True,
        ),
    )
    cost: float = field(
        default=1.0,
        metadata=number(
            "what `step.cost` was set to, over the mean cost of the first step that had any; without one the same of "
            "its micro-batches, or 1 if work is dealt out. Its deadline was longer by that factor"
        ),
    )
    latency_s: float = field(
        default=math.nan,
        metadata=number(
            "seconds each way of its link, as the ranks measured it last; NaN (null): they did not",
            Metric(
                "gauge",
                "link_latency_seconds",
                "Seconds until a first byte from this rank is with a peer, as measured last; NaN: not measured.",
            ),
        ),
    )
    up_bytes_per_s: float = field(
        default=math.nan,
        metadata=number("bytes a second that it can send, as measured last", replace(_RATE, label=("direction", "up"))),
    )
    down_bytes_per_s: float = field(
        default=math.nan,
        metadata=number(
            "bytes a second that it can receive, as measured last", replace(_RATE, label=("direction", "down"))
        ),
    )


@dataclass(frozen=True)
class StageReport:
    """One stage: ``weight`` is the sum over ranks, by default ``world_size`` when all ranks computed it.

    Gradients that were left out because they were not finite still count in it. So do the gradients of a rank that left
    in this step (`Elastic`), although it has no row. If both happened, only merged gradients count.
    """

    name: str = field(metadata=described("its first and last module", stable=True))
    numel: int = field(metadata=described("number of its gradient elements", stable=True))
    weight: float = field(
        metadata=described(
            "sum of the weights over ranks; the number of ranks if all of them computed the complete stage", stable=True
        )
    )
    estimated: bool = field(default=False, metadata=described("whether an estimate is in it"))


@dataclass(frozen=True)
class ShadowReport:
    """The effect that a policy which stops no rank (`straggle.Shadow`) would have had in a step."""

    deadline_s: float = field(
        metadata=described("the deadline that would have been enforced; null: none yet", null=math.inf)
    )
    seconds: float = field(metadata=described("how long the step would have taken"))
    late_ranks: tuple[int, ...] = field(metadata=described("ranks that would have been late"))
    reach: tuple[float, ...] = field(
        metadata=described("for each rank, the share of the model that it would have computed")
    )
    stages: tuple[float, ...] = field(metadata=described("for each stage, the share that would have been merged"))
    dropped_share: float = field(metadata=described("share of all gradient elements that would have been missing"))


@dataclass(frozen=True)
class StepReport:
    """One merged step: ``seconds`` from the end of the merge before; ``deadline_s`` is infinite without a deadline.

    Each field's text is in its declaration. If ``skipped``, no parameter has a gradient now (on a device with a queue:
    all were zeros). ``different_ranks``: in a tie, those that differ from the lowest rank. ``network_s`` and a rank's
    own times (the phases, and wait) add up to ``seconds``. If a model is sharded over
    several ranks, ``ranks`` are the replicas, with the numbers of those ranks that hold the same shards as this one.
    """

    step: int = field(metadata=described("number", stable=True))
    seconds: float = field(metadata=described("seconds since the end of the merge before", stable=True))
    deadline_s: float = field(
        metadata=number(
            "null: no deadline in this step",
            Metric("gauge", "deadline_seconds", "The deadline of the last step; infinite without one."),
            stable=True,
            null=math.inf,
        )
    )
    ranks: tuple[RankReport, ...] = field(metadata=described("one entry for each rank", stable=True))
    stages: tuple[StageReport, ...] = field(metadata=described("one entry for each stage", stable=True))
    scalars: Mapping[str, float] = field(
        default_factory=dict,
        metadata=described("scalars that the loop logged, as means over the ranks that logged them", stable=True),
    )
    skipped: bool = field(
        default=False,
        metadata=number(
            "no rank had finite gradients, and no gradient was applied",
            Metric("counter", "skipped_steps", "Steps in which no rank had finite gradients."),
        ),
    )
    different_ranks: tuple[int, ...] | None = field(
        default=None,
        metadata=described(
            "ranks whose parameters or buffers differed from those of most ranks, or whose optimizers did not step as "
            "often as theirs after the step before; null: not compared in this step"
        ),
    )
    different_tensors: tuple[str, ...] = field(
        default=(), metadata=described("the names of parameters and buffers that were not the same on all ranks")
    )
    shadow: ShadowReport | None = field(
        default=None, metadata=described("with `deadline=shadow`: what would have happened; null otherwise")
    )
    ranks_without_store: tuple[int, ...] = field(
        default=(), metadata=described("ranks that the job's store did not answer: no deadline holds for them")
    )
    pool_parts: int = field(
        default=0,
        metadata=number(
            "micro-batches in the step's pool; 0 without one",
            Metric(
                "counter",
                "pool_micro_batches",
                "Micro-batches in the pools of its steps, which all ranks together draw from.",
            ),
        ),
    )
    pool_weight: float = field(default=0.0, metadata=described("the sum of their weights; 0 without a pool"))
    pool_attempts: int = field(
        default=0,
        metadata=described(
            "how often the pool was begun, because micro-batches were lost, with `step.pull(seed=...)`; 0 without"
        ),
    )
    network_s: float = field(
        default=math.nan,
        metadata=described("the rest of the step after the last rank had submitted: the merge on the network"),
    )
    dealt: bool = field(
        default=False,
        metadata=described(
            "each rank has as much of a step as it has time for (`Rebalance`, or a pool), and its `weight` is how much"
        ),
    )
    slowest_ranks: tuple[int, ...] = field(
        default=(),
        metadata=described(
            "if a model is sharded over several ranks: for each replica, the rank that its others waited for, as far "
            "as FSDP2's collectives show it (-1: none); else empty"
        ),
    )
    counts_behind: int = field(
        default=0,
        metadata=described(
            "0: `skipped` and `nonfinite` are of this step; n: on a GPU, of the step n before (usually 1), and so are "
            "scalars that were logged as its tensors (NaN if nothing has come)"
        ),
    )
    again_s: float = field(
        default=0.0,
        metadata=described("with `step.pull(seed=...)`: seconds of earlier attempts at it, which are not in `seconds`"),
    )

    @property
    def dropped_share(self) -> float:
        """Share of all gradient elements, over members with data, that did not come in time: 0 to 1; NaN: not known.

        For a pool, it is the share of all micro-batches, including those lost with a rank that had drawn them.
        """
        if self.pool_weight:
            there = sum(rank.weight * rank.reach for rank in self.ranks if not rank.absent)
            return min(1.0, max(0.0, 1.0 - there / self.pool_weight))
        reached = [rank.reach for rank in self.ranks if not (rank.idle or rank.absent)]
        known = [reach for reach in reached if not math.isnan(reach)]
        return 1.0 - sum(known) / len(known) if known else math.nan if reached else 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """What each rank had of the step, over an equal part: 1, or if they drew by what it drew; 0 without data."""
        has_data = [float(not (rank.idle or rank.absent)) for rank in self.ranks]
        if not self.pool_weight:
            return tuple(has_data)
        equal = self.pool_weight / max(1.0, sum(has_data))
        return tuple(own * rank.weight / equal for own, rank in zip(has_data, self.ranks, strict=True))

    @property
    def whole_s(self) -> float:
        """Seconds from the end of the step before, with those of the attempts that were discarded."""
        return self.seconds + self.again_s

    @property
    def late_ranks(self) -> tuple[int, ...]:
        """Ranks that were late in this step."""
        return tuple(rank.rank for rank in self.ranks if rank.late)

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks that are no members at present (`Elastic`)."""
        return tuple(rank.rank for rank in self.ranks if rank.absent)

    @property
    def lowest_rank(self) -> int | None:
        """The lowest member, which says and saves what all know; ``None`` on a rank that is none itself."""
        return min((rank.rank for rank in self.ranks if not rank.absent), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; numbers that are not finite become ``None``."""
        plain: dict[str, Any] = finite_or_none(asdict(self))
        return plain


ChangeKind = Literal["ended", "silent", "raised", "restarted", "slow", "link", "notice", "joined"]
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
# done: its loop is over; ended: its process; returns: it asks to be let in again at once; slow: its work takes too
# long; link: its link is too slow; notice: it was told that its process is to end
LeavingKind = Literal["done", "ended", "silent", "raised", "restarted", "returns", "slow", "link", "notice"]
LEAVING_KINDS: tuple[LeavingKind, ...] = get_args(LeavingKind)
_COUNTED_AS: Mapping[str, ChangeKind] = {kind: kind for kind in CHANGE_KINDS} | {
    "done": "ended",
    "returns": "restarted",
}


@dataclass(frozen=True)
class MembersReport:
    """How the members of a job changed, as one rank saw it (`Elastic`)."""

    generation: int = field(
        metadata=described("counts the changes; one may lack if two came in quick succession", stable=True)
    )
    step: int = field(metadata=described("the step that was being merged", stable=True))
    ranks: tuple[int, ...] = field(metadata=described("the members from here on", stable=True))
    world_size: int = field(metadata=described("how many ranks the run was started with", stable=True))
    left: Mapping[int, str] = field(default_factory=dict, metadata=described("by rank, why it left", stable=True))
    joined: Mapping[int, str] = field(default_factory=dict, metadata=described("by rank, why it joined", stable=True))
    seconds: float = field(
        default=0.0,
        metadata=described(
            "how long the rank that wrote this had no members to merge with, once it knew of the change"
        ),
    )
    left_kinds: Mapping[int, LeavingKind] = field(
        default_factory=dict,
        metadata=described(
            "`left` in one word: `done` (its loop is over), `ended` (its process), `silent` (no sign of life), "
            "`raised` (an error in its code), `restarted`, `returns` (it asks to be let in again at once), `slow` (its "
            "work takes too long), `link` (its link is too slow), `notice` (it was told to end)",
            stable=True,
        ),
    )
    of: str = field(
        default="rank",
        metadata=described(
            "what a member is: `rank`, or `replica` if several ranks have one copy; then all of this is by its number"
        ),
    )

    @property
    def kinds(self) -> tuple[ChangeKind, ...]:
        """The kind of each change, of `CHANGE_KINDS`, in the order of ``left`` and ``joined``."""
        joined: ChangeKind = "joined"
        return (*(_COUNTED_AS[self.left_kinds[rank]] for rank in self.left), *(joined for _ in self.joined))

    @property
    def at_the_end(self) -> bool:
        """Whether the only changes are ranks that came to the end of their loop."""
        return not self.joined and all(self.left_kinds[rank] == "done" for rank in self.left)

    @property
    def what(self) -> str:
        """Which ranks left and joined, and why, in words."""
        changes = [f"{self.of} {rank} left: {reason}" for rank, reason in self.left.items()]
        changes += [f"{self.of} {rank} joined: {reason}" for rank, reason in self.joined.items()]
        return "; ".join(changes)

    def __str__(self) -> str:
        return f"{self.what} ({len(self.ranks)} of {self.world_size} {self.of}s)"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        plain: dict[str, Any] = finite_or_none(asdict(self))
        return plain


@dataclass(frozen=True)
class StuckReport:
    """Where a rank's training thread was when the rank did not go on, or when it was stood in for."""

    rank: int = field(metadata=described("which rank", stable=True))
    step: int = field(metadata=described("in which step", stable=True))
    entered: bool = field(metadata=described("false: it was before that step"))
    seconds: float = field(metadata=described("for how long it had not gone on", stable=True))
    where: str = field(metadata=described("the innermost frame of your code, with its source, in words", stable=True))
    line: str = field(default="", metadata=described("the same frame: function, file and line"))
    stack: tuple[str, ...] = field(default=(), metadata=described("all frames, innermost first"))
    waiting: tuple[int, ...] = field(
        default=(), metadata=described("the ranks that waited for it, as far as was known")
    )
    collective: str = field(
        default="",
        metadata=described(
            "if it is in a collective of your own: the last one that is not over, by torch's Flight Recorder"
        ),
    )
    stood_in: int = field(
        default=0,
        metadata=described("the number of times that it was stood in for there; 0: it was stuck"),
    )
    over: bool = field(default=False, metadata=described("true: it goes on again, after `seconds`"))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class HealingReport:
    """The states that this rank has taken from its peers until now: their number, bytes, and seconds of waiting."""

    num_states: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StageTime:
    """One stage of a step: its size, its backward seconds over all passes, and how many passes finished it."""

    name: str
    numel: int
    nbytes: int
    seconds: float
    passes: int


@dataclass(frozen=True)
class BackwardReport:
    """What a step's backward passes computed: ``stages`` in the order of the plan, the order of backward.

    ``seconds`` is the sum over the stages: the first begins with the backward pass itself, or, for ``loss.backward()``,
    with the gradient's arrival at the model's output. ``passes``: for each parameter, how many backward passes are in
    its gradient. ``truncated``: the step was left early. ``missing``: the parameters that some pass did not reach, in a
    truncated step or if the loop caught a pass's error and kept its gradients.
    """

    stages: tuple[StageTime, ...]
    passes: Mapping[str, int]
    truncated: bool
    missing: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds of backward."""
        return math.fsum(stage.seconds for stage in self.stages)

    def __str__(self) -> str:
        total_s = self.seconds or math.nan
        rows = [("stage", "parameters", "bytes", "ms", "share")]
        rows += [
            (s.name, f"{s.numel:,}", f"{s.nbytes:,}", f"{1000 * s.seconds:.2f}", f"{s.seconds / total_s:.1%}")
            for s in self.stages
        ]
        return text_table(rows)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def in_words(ranks: Collection[int], of: str = "rank") -> str:
    """As in "ranks 1, 2 and 5"; ``of``: what they are."""
    *first, last = map(str, sorted(ranks))
    return f"{of}s {', '.join(first)} and {last}" if first else f"{of} {last}"


def told_apart(names: Iterable[str]) -> list[str]:
    """The names; one that has occurred before gets a number: ``head``, ``head#2``."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def finite_or_none(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold replaced by ``None``, recursively."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value
