"""What happened in a step: frozen records, built from the telemetry of all ranks and so the same on every rank.

Only ``seconds``, and ``network_s`` with it, are measured by each rank's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from straggle.schema import Metric, number

Phase = Literal["outside", "optimizer", "data", "forward", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Cause = Literal["outside", "optimizer", "data", "forward", "backward", "error", "skipped", "members"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_RATE = Metric("gauge", "link_bytes_per_second", "Bytes a second that this rank can send and receive, measured last.")


@dataclass(frozen=True, kw_only=True)
class RankNumbers:
    """The numbers of a rank's row that its report has unchanged.

    To add one, declare it here and set it in `merge/row.py`: the wire, the table, the report, the trace, the arrays of
    a run and, if it has a metric, the exporter follow from this declaration. ``nonfinite`` is counted during the merge
    (`merge/buffers.py`).
    """

    compute_s: float = field(
        metadata=number("seconds from entering `step()` to the end of its own work; NaN (null): it never entered")
    )
    overrun_s: float = field(
        default=0.0,
        metadata=number("seconds for which it went on with earlier steps after these had been merged without it"),
    )
    inside_wait_s: float = field(
        default=0.0,
        metadata=number(
            "seconds that it waited for the other ranks of its replica, if a model is sharded over several"
        ),
    )
    late: bool = field(default=False, metadata=number("was it late"))
    stood_in: bool = field(default=False, metadata=number("did the stand-in submit its gradients"))
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
                "Micro-batches that this rank drew from the pools of its steps and computed.",
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

    ``outside_s`` is time between two ``step()`` blocks that was spent neither on data nor in the optimizer's step
    (``optimizer_s``): clipping, evaluation, checkpoints. ``data_s`` runs from the end of the optimizer's step to the
    first forward pass. ``stages`` holds the share of each stage that the rank computed, and ``reach`` the share of the
    full model: 0.5 means that half of the gradient elements came from this rank's own backward pass. ``stage_s``: when
    each stage was complete, in seconds from entering ``step()`` (NaN if it never was). ``cause``: what a late rank was
    doing. A rank that was not late but whose gradients are missing also has a ``cause``: "error" if a backward pass
    ended in an error that the loop caught, "skipped" if the block was left without a backward pass, "members" if a
    merge in flight was lost because another rank left (`Elastic`). ``weights``: for each stage, the weight in the merge
    of what the rank submitted, including estimates. Without estimates it is ``weight`` times ``stages``.
    """

    rank: int = field(metadata=number("number"))
    outside_s: float = field(
        default=math.nan, metadata=number("seconds between two steps, for clipping, evaluation or checkpoints")
    )
    optimizer_s: float = field(default=0.0, metadata=number("seconds in the optimizer's step"))
    data_s: float = field(
        default=math.nan, metadata=number("seconds from the end of the optimizer's step to the first forward pass")
    )
    forward_s: float = field(default=math.nan, metadata=number("seconds in forward passes"))
    backward_s: float = field(default=math.nan, metadata=number("seconds in backward passes"))
    wait_s: float = field(metadata=number("seconds that it waited for the slowest rank"))
    reach: float = field(
        metadata=number(
            "share of the model's gradient elements that it computed",
            Metric("gauge", "reach_ratio", "Share of the model's gradients that this rank computed in the last step."),
        )
    )
    stages: tuple[float, ...]
    stage_s: tuple[float, ...]
    weights: tuple[float, ...] = ()
    cause: Cause | None = None
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
                "Seconds until a first byte from this rank is with a peer, as measured last.",
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

    name: str
    numel: int
    weight: float
    estimated: bool


@dataclass(frozen=True)
class ShadowReport:
    """The effect that a policy which stops no rank (`straggle.Shadow`) would have had in a step.

    ``seconds``: the step's length. ``reach``: the share of the model that each rank would have computed. ``stages``:
    the share of each stage that would have been merged, over ranks.
    """

    deadline_s: float
    seconds: float
    late_ranks: tuple[int, ...]
    reach: tuple[float, ...]
    stages: tuple[float, ...]
    dropped_share: float


@dataclass(frozen=True)
class StepReport:
    """One merged step: ``seconds`` from the end of the merge before; ``deadline_s`` is infinite without a deadline.

    ``skipped``: no rank had finite gradients, and no parameter has one now (on a device with a queue: all were zeros).
    ``counts_behind``: 0 if ``skipped`` and the ranks' ``nonfinite`` are of this step, as on the CPU. On a device with a
    queue the host does not wait for them: they are of so many steps before this one (usually 1), and so are scalars
    that were logged as tensors of the device.
    ``different_ranks``: those whose parameters
    or buffers were not those of most ranks when they entered the step (in a tie: not those of the lowest rank). Either
    they were compared and differ (`Merge.check_every`), with their names in ``different_tensors``, or the optimizers of
    these ranks did not step as often as the others' after the step before. ``None``: they were not compared, and all
    optimizers stepped equally often. ``shadow``: the effect of a policy that stops no rank. ``ranks_without_store``:
    ranks without an answer from the job's store; no deadline applies to them. ``pool_parts`` and ``pool_weight``: the
    micro-batches in the step's pool and the sum of their weights, if the ranks drew from one (``step.pull``); 0
    otherwise. ``network_s``: the rest of the step after the last rank had submitted, which is the merge on the network.
    It and a rank's own times (outside, optimizer, data, forward, backward, wait) add up to ``seconds``. ``dealt``: each
    rank gets as much work as it has time for (`Rebalance`, or a pool), and a rank's ``weight`` is how much.
    If a model is sharded over several ranks, ``ranks`` are the replicas, with the numbers of those ranks that hold the
    same shards as this one. ``slowest_ranks``: for each replica the rank that its others waited for; else empty.
    """

    step: int
    seconds: float
    deadline_s: float = field(
        metadata=number(
            metric=Metric("gauge", "deadline_seconds", "The deadline of the last step; infinite without one.")
        )
    )
    ranks: tuple[RankReport, ...]
    stages: tuple[StageReport, ...]
    scalars: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = field(
        default=False,
        metadata=number(metric=Metric("counter", "skipped_steps", "Steps in which no rank had finite gradients.")),
    )
    different_ranks: tuple[int, ...] | None = None
    different_tensors: tuple[str, ...] = ()
    shadow: ShadowReport | None = None
    ranks_without_store: tuple[int, ...] = ()
    pool_parts: int = field(
        default=0,
        metadata=number(
            metric=Metric(
                "counter",
                "pool_micro_batches",
                "Micro-batches in the pools of its steps, which all ranks together draw from.",
            )
        ),
    )
    pool_weight: float = 0.0
    network_s: float = math.nan
    dealt: bool = False
    slowest_ranks: tuple[int, ...] = ()
    counts_behind: int = 0

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
    def late_ranks(self) -> tuple[int, ...]:
        """Ranks that were late in this step."""
        return tuple(rank.rank for rank in self.ranks if rank.late)

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks that are no members at present (`Elastic`)."""
        return tuple(rank.rank for rank in self.ranks if rank.absent)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; numbers that are not finite become ``None``."""
        plain: dict[str, Any] = finite_or_none(asdict(self))
        return plain


ChangeKind = Literal["ended", "silent", "raised", "restarted", "link", "notice", "joined"]
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
# done: its loop is over; ended: its process; returns: it asks to be let in again at once; link: its link is too slow;
# notice: it was told that its process is to end
LeavingKind = Literal["done", "ended", "silent", "raised", "restarted", "returns", "link", "notice"]
LEAVING_KINDS: tuple[LeavingKind, ...] = get_args(LeavingKind)
_COUNTED_AS: dict[LeavingKind, ChangeKind] = {
    "done": "ended",
    "ended": "ended",
    "silent": "silent",
    "raised": "raised",
    "restarted": "restarted",
    "returns": "restarted",
    "link": "link",
    "notice": "notice",
}


@dataclass(frozen=True)
class MembersReport:
    """How the members of a job changed, as one rank saw it (`Elastic`).

    ``generation`` counts the changes; ``ranks`` are the members from here on, of ``world_size`` that the job was
    started with. ``left`` and ``joined``: the reasons, by rank; ``left_kinds``: the same in one word of
    `LEAVING_KINDS`. ``step``: the step that was being merged. ``seconds``: how long this rank had no members to merge
    with, from when it knew of the change.
    """

    generation: int
    step: int
    ranks: tuple[int, ...]
    world_size: int
    left: Mapping[int, str] = field(default_factory=dict)
    joined: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    left_kinds: Mapping[int, LeavingKind] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[ChangeKind, ...]:
        """The kind of each change, of `CHANGE_KINDS`, in the order of ``left`` and ``joined``."""
        kinds = [_COUNTED_AS[self.left_kinds[rank]] for rank in self.left]
        return (*kinds, *(CHANGE_KINDS[-1] for _ in self.joined))

    @property
    def at_the_end(self) -> bool:
        """Whether the only changes are ranks that came to the end of their loop."""
        return not self.joined and all(self.left_kinds[rank] == "done" for rank in self.left)

    @property
    def what(self) -> str:
        """Which ranks left and joined, and why, in words."""
        changes = [f"rank {rank} left: {reason}" for rank, reason in self.left.items()]
        changes += [f"rank {rank} joined: {reason}" for rank, reason in self.joined.items()]
        return "; ".join(changes)

    def __str__(self) -> str:
        return f"{self.what} ({len(self.ranks)} of {self.world_size} ranks)"

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        plain: dict[str, Any] = finite_or_none(asdict(self))
        return plain


@dataclass(frozen=True)
class StuckReport:
    """Where a rank's training thread was when the rank did not go on, or when it was stood in for.

    ``rank`` was in ``step``, or before it (not ``entered``), for ``seconds``. ``where``: the innermost frame of the
    user's code, in words; ``line``: its function, file and line. ``stack``: all frames, innermost first. ``waiting``:
    the ranks that waited for it, as far as was known. ``collective``: torch's last one that was not over. ``stood_in``:
    it was only stood in for, and this is the number of times in which it was there. ``over``: it goes on again.
    """

    rank: int
    step: int
    entered: bool
    seconds: float
    where: str
    line: str = ""
    stack: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()
    collective: str = ""
    stood_in: int = 0
    over: bool = False

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


def finite_or_none(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold replaced by ``None``, recursively."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value
