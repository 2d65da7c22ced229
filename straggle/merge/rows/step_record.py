"""The record of a merged step, and its report: what happened in it, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from straggle.backward.stages import StagePlan, mean_over
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import COLUMN, NONFINITE, TIMES, ScalarNames
from straggle.policies.network.rank_links import RankLink
from straggle.policies.shares.cost import UsualCost
from straggle.policies.what_if.step_model import StopRules, by_stage, computed_share, simulate_step
from straggle.report import CAUSES, RankNumbers, RankReport, ShadowReport, StageReport, StepReport
from straggle.schema import numbers_of

_ROUNDING = 1e-4  # relative error of sums of weights
_KINDS = dict.fromkeys(TIMES, float) | {own.name: own.kind for own in numbers_of(RankNumbers)}
_OF_STEP = numbers_of(StepReport)
_BRIEF = ("compute_s", "overrun_s", "late", "stood_in", "idle", "absent", "weight", "nonfinite")
_AS_THEY_ARE = [(name, COLUMN[name], kind) for name, kind in _KINDS.items()]


@dataclass(frozen=True)
class StepRecord:
    """A merged step, cheap to keep: the report is built when first read, on any thread.

    ``names``: those of its scalars. ``shadow_s``: the deadline of a policy that is not enforced, by whose ``rules`` the
    step would have ended; NaN if it is enforced. ``usual_cost``, ``dealt``: those of `CurrentDeadline`. ``differing``:
    the names of tensors that differ between ranks. ``merged_weights``: the weight of each stage, if it may be more than
    the ``table`` has for the remaining ranks. ``merged_at``: when the step was merged, by this rank's clock.
    ``slowest_ranks``, ``again_s``: as in the report. ``scalars``: the means over all ranks by the hashes of their
    names, as `means_of` gives them, if the ``table`` has not all of them.
    """

    step: int
    seconds: float
    deadline_s: float
    plan: StagePlan
    table: Table
    names: ScalarNames
    shadow_s: float = math.nan
    rules: StopRules | None = None
    usual_cost: UsualCost = UsualCost()
    merged_weights: tuple[float, ...] = ()
    differing: tuple[str, ...] = ()
    dealt: bool = False
    merged_at: float = math.nan
    slowest_ranks: tuple[int, ...] = ()
    scalars: Mapping[float, float] | None = None
    again_s: float = 0.0

    @property
    def decided(self) -> dict[str, float]:
        """What a deadline policy had decided by then, for `as_decided`: the rows have nothing of it."""
        after_quorum_s = math.nan if self.rules is None else float(self.rules.after_quorum_s)
        of_step = {"deadline_s": self.deadline_s, "shadow_s": self.shadow_s, "after_quorum_s": after_quorum_s}
        return {**of_step, **vars(self.usual_cost)}

    def as_decided(self, *, deadline_s: float, shadow_s: float, after_quorum_s: float, **usual: float) -> StepRecord:
        """This record with what a peer has `decided`, or this rank now that it knows more; the quorum stays."""
        rules = None if self.rules is None else replace(self.rules, after_quorum_s=after_quorum_s)
        return replace(self, deadline_s=deadline_s, shadow_s=shadow_s, rules=rules, usual_cost=UsualCost(**usual))

    @property
    def report(self) -> StepReport:
        """What happened in the step, on all ranks."""
        # no cached_property: until Python 3.12 it has one lock for all records, and a name may be asked of the store
        if (report := self.__dict__.get("_report")) is None:
            report = self.__dict__["_report"] = self._built()
        return report

    def _built(self) -> StepReport:
        table, rows = self.table, self.table.rows.tolist()
        costs = self.usual_cost.relative_of(table.costs(), table.num_microbatches())
        ranks = enumerate(zip(rows, table.links(), costs, strict=True))
        would = None
        if self.rules is not None and not math.isnan(self.shadow_s):
            would = shadow_report(table, self.seconds, self.shadow_s, self.rules, self.plan)
        return StepReport(
            self.step,
            self.seconds,
            self.deadline_s,
            tuple(self._of_rank(rank, *each) for rank, each in ranks),
            self._of_stages(rows),
            self._scalars(),
            skipped=table.skipped_before or (any(row[NONFINITE] for row in rows) and table.skipped()),
            different_ranks=table.different_ranks(),
            different_tensors=self.differing,
            shadow=would,
            **self._of_all(),
            ranks_without_store=table.ranks_without_store(),
            network_s=table.network_s(self.seconds),
            dealt=self.dealt,
            slowest_ranks=self.slowest_ranks,
            again_s=self.again_s,
        )

    @property
    def awaited(self) -> frozenset[str]:
        """The names of scalars that are NaN in the report because only a device knows them so far."""
        later = [-key for key in self._values() if key < 0]
        known = self.names.of(later)
        return frozenset(known[key] for key in later if key in known)

    def brief(self) -> StepReport:
        """The report without stages, scalars and links, in a fraction of its time: what was dropped, and the times."""
        table, stages = self.table, self.table.of_stages
        costs = self.usual_cost.relative_of(table.costs(), table.num_microbatches())
        computed, stage_s = (table.rows[:, columns].tolist() for columns in (stages.computed, stages.stage_s))
        told = zip(*(map(_KINDS[name], table.column(name)) for name in _BRIEF), strict=True)
        waits_s = (table.last_submitted_s - busy_s for busy_s in table.column("busy_s"))
        ranks = tuple(
            RankReport(
                rank=rank,
                **dict(zip(_BRIEF, own, strict=True)),
                wait_s=wait_s,
                reach=self._reach(shares),
                stages=(),
                stage_s=at_s,
                cause=CAUSES[int(cause)] if cause >= 0 else None,
                cost=cost,
            )
            for rank, (own, wait_s, shares, at_s, cause, cost) in enumerate(
                zip(told, waits_s, computed, map(tuple, stage_s), table.column("cause"), costs, strict=True)
            )
        )
        return StepReport(
            self.step,
            self.seconds,
            self.deadline_s,
            ranks,
            (),
            network_s=table.network_s(self.seconds),
            dealt=self.dealt,
            **self._of_all(),
            slowest_ranks=self.slowest_ranks,
            again_s=self.again_s,
        )

    def reach_of(self, rank: int) -> float:
        """As its report has it."""
        return self._reach(self.table.rows[rank, self.table.of_stages.computed].tolist())

    def _of_all(self) -> dict[str, Any]:
        """Those of its numbers that are the largest of the ranks' rows."""
        table, there = self.table, self.table.columns.place
        return {own.name: own.kind(max(table.column(own.name))) for own in _OF_STEP if own.name in there}

    def _reach(self, computed: Sequence[float]) -> float:
        return mean_over(computed, [stage.numel for stage in self.plan.stages])

    def _of_rank(self, rank: int, row: Sequence[float], link: RankLink, cost: float) -> RankReport:
        computed, _, stage_s, weights = (tuple(row[columns]) for columns in self.table.of_stages)
        cause = int(row[COLUMN["cause"]])
        numbers: dict[str, Any] = {name: kind(row[column]) for name, column, kind in _AS_THEY_ARE}
        return RankReport(
            rank=rank,
            **numbers,
            wait_s=self.table.last_submitted_s - row[COLUMN["busy_s"]],
            reach=self._reach(computed),
            stages=computed,
            stage_s=stage_s,
            cause=CAUSES[cause] if cause >= 0 else None,
            weights=tuple(row[COLUMN["weight"]] * weight for weight in weights),
            cost=cost,
            latency_s=link.latency_s,
            up_bytes_per_s=link.up_bytes_per_s,
            down_bytes_per_s=link.down_bytes_per_s,
        )

    def _of_stages(self, rows: Sequence[Sequence[float]]) -> tuple[StageReport, ...]:
        of_rank, of_stages = COLUMN["weight"], self.table.of_stages
        of_ranks = ([row[of_rank] * weight for weight in row[of_stages.weights]] for row in rows)
        weights = [sum(column) for column in zip(*of_ranks, strict=True)]
        if self.merged_weights:
            weights = list(map(self._as_merged, weights, self.merged_weights))
        estimated = [max(column) > 0 for column in zip(*(row[of_stages.estimated] for row in rows), strict=True)]
        return tuple(
            StageReport(stage.name, stage.numel, weights[index], estimated[index])
            for index, stage in enumerate(self.plan.stages)
        )

    def _as_merged(self, reported: float, merged: float) -> float:
        """The weight of a stage, from its weight in the rows and its merged weight.

        The merged weight is larger if a rank gave gradients and left. If others' gradients were also left out because
        they were not finite, the rows count these too, so only the merged weight is right.
        """
        if self.table.total_weight is not None:  # it is merged as one step of each rank
            merged *= self.table.total_weight / self.table.num_ranks
        is_more = merged > (1 + _ROUNDING) * reported
        return merged if is_more or self.table.nonfinite_ranks() else reported

    def _scalars(self) -> dict[str, float]:
        values = self._values()
        known = self.names.of(map(abs, values))
        return {known[abs(key)]: value for key, value in values.items() if abs(key) in known}

    def _values(self) -> Mapping[float, float]:
        return self.table.scalars() if self.scalars is None else self.scalars


def shadow_report(table: Table, seconds: float, deadline_s: float, rules: StopRules, plan: StagePlan) -> ShadowReport:
    """The effect of a deadline of ``deadline_s`` on a step of ``seconds`` in which all ranks were waited for."""
    stage_share = torch.tensor(plan.shares)
    progress = table.progress(stage_share, "microbatch" if rules.finish_running else "stage")
    busy_s, compute_s = (torch.tensor(table.column(name)).nan_to_num(0.0) for name in ("busy_s", "compute_s"))
    # slots without a unit end with the unit before
    unit_s = progress.unit_s.where(progress.unit_share > 0, 0.0).nan_to_num(0.0).cummax(-1).values
    unit_s = torch.cat([unit_s[:, :-1], torch.maximum(unit_s[:, -1:], compute_s.unsqueeze(1))], 1)
    entered_s, has_data = progress.entered_s.nan_to_num(0.0), progress.weight > 0
    would = simulate_step(unit_s, deadline_s, rules, entered_s)
    part = computed_share(unit_s, would, rules) * has_data.unsqueeze(1)
    computed = by_stage(part, progress.unit_share, len(plan.stages), in_stages=not rules.finish_running)
    weight = progress.weight / progress.weight.sum().clamp(min=1e-12)
    stages, reach = (computed * weight.unsqueeze(1)).sum(0), (part * progress.unit_share).sum(1)
    return ShadowReport(
        deadline_s=deadline_s,
        seconds=seconds - float(busy_s.max() - would.seconds),
        late_ranks=tuple(would.late.nonzero().flatten().tolist()),
        reach=tuple(reach.tolist()),
        stages=tuple(stages.tolist()),
        dropped_share=1.0 - float(reach[has_data].mean()) if bool(has_data.any()) else 0.0,
    )
