"""Prometheus metrics of one rank, from the report of each step: ``with MetricsExporter(model):`` around the loop.

The training thread only puts the step's record into a queue; another thread does the rest. Needs ``prometheus-client``:
the extra ``metrics``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter as Count
from collections.abc import Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

from straggle.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
    from prometheus_client.metrics_core import Metric

from straggle.backward.stages import StagePlan
from straggle.merge.telemetry import StepRecord
from straggle.observe.fairness import Contributions
from straggle.observe.metrics_endpoint import Endpoint, Push, Security, Targets, check_port
from straggle.observe.wait_for_all import WaitForAllPrediction
from straggle.parallel import StagedDataParallel
from straggle.policies.rank_links import links_of
from straggle.policies.slow_links import SlowLinks
from straggle.report import (
    CAUSES,
    CHANGE_KINDS,
    PHASES,
    HealingReport,
    MembersReport,
    RankReport,
    StageReport,
    StepReport,
)
from straggle.version import __version__

_log = logging.getLogger(__name__)
PORT = 9640
_DECAY = 0.98  # of the steps in fairness: the last 50, about
_REST_S = 0.1  # waking a thread for each step costs the training thread more than handing over the step
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


@final
class MetricsExporter:
    """Serves the metrics of this rank while it trains: ``with MetricsExporter(model): ...``.

    The port is ``port`` plus this rank's number on its machine, or the next one that is free; ``None`` serves nothing.
    ``security``: TLS and a password. ``targets``: files from which Prometheus learns where the endpoints are. ``push``:
    to a Pushgateway. ``samples_per_step``: this rank's samples in a step of weight 1, for ``straggle_samples_total``.

    Raises ``ValueError`` for what is no port, and for an empty file of a password. Beyond that it never fails a job:
    where no port is free, or nothing takes what is pushed, it logs a warning and training goes on.
    """

    def __init__(
        self,
        model: StagedDataParallel,
        *,
        port: int | None = PORT,
        host: str = "127.0.0.1",
        security: Security | None = None,
        targets: Targets | None = None,
        push: Push | None = None,
        samples_per_step: int | None = None,
    ) -> None:
        check_port(port)
        self._rank = model.rank
        self._targets, self._push = targets or Targets(), push or Push()
        self._metrics = StepMetrics(model, samples_per_step=samples_per_step)
        self.registry = self._metrics.registry
        self._records: SimpleQueue[StepRecord | None] = SimpleQueue()
        self._closing = threading.Event()
        self._failed: set[str] = set()
        self.endpoint = self._serve(host, port, security or Security())
        self._threads = [threading.Thread(target=self._observe_all, name="straggle-metrics", daemon=True)]
        if self._push.url is not None:
            self._threads.append(threading.Thread(target=self._push_often, name="straggle-metrics-push", daemon=True))
        for thread in self._threads:
            thread.start()
        self._hook = model.register_step_hook(self._records.put)
        self._members_hook = model.register_members_hook(self._metrics.count_change)

    @property
    def url(self) -> str | None:
        """Where this rank's metrics are; ``None`` where they are not served."""
        return None if self.endpoint is None else self.endpoint.url

    def close(self, *, clean: bool = True) -> None:
        """Count what is still in the queue, push for the last time, and free the port.

        If the run ended with an error (``clean`` is false), the target's file stays, so that Prometheus misses this
        rank.
        """
        if self._closing.is_set():
            return
        self._hook.remove()
        self._members_hook.remove()
        self._closing.set()
        self._records.put(None)
        for thread in self._threads:
            thread.join()
        if self._push.url is not None:
            self._push_once()
        if self.endpoint is not None:
            if clean:
                self._targets.remove(self._rank)
            self.endpoint.close()

    def _serve(self, host: str, port: int | None, security: Security) -> Endpoint | None:
        if port is None:
            return None
        try:
            local_rank = dist.get_node_local_rank(fallback_rank=self._rank) if port else 0
            endpoint = Endpoint(self.registry, host=host, port=port + local_rank, security=security)
            self._targets.write(self._rank, endpoint)
        except OSError as error:
            self._warn("serve", f"rank {self._rank}: metrics are not served: {error}")
            return None
        _log.log(logging.INFO if self._rank == 0 else logging.DEBUG, "metrics of rank %d: %s", self._rank, endpoint.url)
        return endpoint

    def _observe_all(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._metrics.observe(record)
            except Exception as error:  # metrics are no reason to end a job
                self._warn("observe", f"rank {self._rank}, step {record.step}: metrics are incomplete: {error!r}")
            if self._records.empty():
                self._closing.wait(_REST_S)
            else:
                time.sleep(0)  # lets the training thread have the interpreter

    def _push_often(self) -> None:
        while not self._closing.wait(self._push.every_s):
            self._push_once()

    def _push_once(self) -> None:
        try:
            self._push.push(self.registry, self._rank)
        except (OSError, ValueError) as error:  # the file of the password may have become empty
            self._warn("push", f"rank {self._rank}: metrics were not pushed to {self._push.url}: {error}")

    def _warn(self, what: str, message: str) -> None:
        """Once for each thing that can go wrong."""
        if what not in self._failed:
            self._failed.add(what)
            _log.warning(message)

    def __enter__(self) -> MetricsExporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(clean=kind is None)


class StepMetrics:
    """The metrics of one rank: counted step by step by one thread, read by others at any time.

    Those of stages belong to the stages as they are planned now, and start again where these change.
    """

    def __init__(self, model: StagedDataParallel, *, samples_per_step: int | None = None) -> None:
        self.registry = _Registry()
        self._rank = model.rank
        self._model = model
        self._samples_per_step = samples_per_step
        self._prediction = WaitForAllPrediction()
        self._contributions = Contributions(_DECAY)
        self._slow_links = SlowLinks()
        self._pinged = 0  # bytes that were counted
        self._counted = HealingReport()  # of what this rank took to take part again
        self._plan: StagePlan | None = None
        self._stages: list[tuple[Counter, Gauge, Counter]] = []  # contributions, weight and estimates of each
        self._describe(model)
        self._define()
        self._live(model)

    def observe(self, record: StepRecord) -> None:
        """Count one step."""
        report = record.report
        own = report.ranks[self._rank]
        self._show_absent(report)
        self._count_healing()
        if own.absent:  # it had no part in the step, and knows nothing of it
            self._absent_steps.inc()
            return
        if record.plan is not self._plan:
            self._use(record.plan)
        self._count_times(report, own)
        self._count_gradients(record.plan, own)
        self._count_stages(report.stages, own, sum(rank.weight for rank in report.ranks if not rank.absent))
        self._count_contributions(report)
        self._micro_batches.inc(own.parts)
        self._put_back.inc(own.put_back)
        self._pool.inc(report.pool_parts)
        self._show_link(record.plan, report, own)
        self._steps.inc()
        self._skipped.inc(report.skipped)
        self._dropped_ratio.set(report.dropped_share)
        if report.different_ranks is not None:
            self._replica_checks.inc()
            self._replica_mismatches.inc(self._rank in report.different_ranks)
        if "loss" in report.scalars:
            self._loss.labels(self._rank).set(report.scalars["loss"])
        self._predicted_dropped_ratio.labels(self._rank).set(self._model.predicted_drop)

    def count_change(self, report: MembersReport) -> None:
        """Count a change of the members, other than that a rank comes to the end of its loop."""
        if report.at_the_end:
            return
        for kind in report.kinds:
            self._changes[kind].inc()

    def _show_absent(self, report: StepReport) -> None:
        """Say of each rank whether it is absent: on the lowest member only, because all members know the same."""
        if self._rank == min((rank.rank for rank in report.ranks if not rank.absent), default=None):
            for rank in report.ranks:
                self._absent_rank.labels(self._rank, rank.rank).set(rank.absent)
        else:
            self._absent_rank.clear()

    def _count_healing(self) -> None:
        before, self._counted = self._counted, self._model.healing_report
        self._healing_seconds.inc(self._counted.seconds - before.seconds)
        self._healing_bytes.inc(self._counted.nbytes - before.nbytes)

    def _count_times(self, report: StepReport, own: RankReport) -> None:
        self._step_seconds.observe(report.seconds)
        for phase in PHASES:
            self._phase_seconds[phase].observe(max(0.0, getattr(own, f"{phase}_s")))
        self._phase_seconds["wait"].observe(max(0.0, own.wait_s))
        self._phase_seconds["network"].observe(max(0.0, report.network_s))
        if not math.isnan(own.compute_s):
            self._compute_seconds.observe(own.compute_s / own.cost)
        self._deadline_seconds.set(report.deadline_s)
        self._wait_for_all.inc(max(0.0, self._prediction.seconds(report)))
        whole_s = self._prediction.compute_s(report)[self._rank]
        if not math.isnan(whole_s):
            self._whole_compute.inc(whole_s / own.cost + own.overrun_s)
        if own.cause is not None:
            (self._late if own.late else self._incomplete)[own.cause].inc()
            self._stood_in[own.cause].inc(own.stood_in)

    def _show_link(self, plan: StagePlan, report: StepReport, own: RankReport) -> None:
        """This rank's link: as measured, and whether it is slow."""
        num_bytes = sum(stage.nbytes for stage in plan.stages)
        self._slow_links.add(report.step, links_of(report), num_bytes=num_bytes, step_s=report.seconds)
        slow = [what for link in self._slow_links.now if link.rank == self._rank for what in link.slow]
        pinged, self._pinged = self._pinged, self._model.ping_bytes
        self._ping_bytes.inc(self._pinged - pinged)
        self._link_latency.set(own.latency_s)
        for direction, rate in (("up", own.up_bytes_per_s), ("down", own.down_bytes_per_s)):
            self._link_rate[direction].set(rate)
        for what, gauge in self._link_slow.items():
            gauge.set(what in slow)

    def _count_gradients(self, plan: StagePlan, own: RankReport) -> None:
        self._reach.set(own.reach)
        self._merged_bytes.inc(sum(stage.nbytes for stage in plan.stages))
        self._nonfinite.inc(own.nonfinite)
        if not own.idle:
            self._elements.inc(plan.numel)
            self._elements_dropped.inc(max(0.0, 1.0 - own.reach) * plan.numel)
        if self._samples_per_step is not None:
            self._samples.labels(self._rank).inc(own.reach * own.weight * self._samples_per_step)

    def _count_contributions(self, report: StepReport) -> None:
        own = report.ranks[self._rank]
        self._weight.set(0.0 if own.idle else own.weight)
        self._contributed.inc(0.0 if own.idle else own.weight * own.reach)
        self._contributions.add(report)
        fairness = self._contributions.fairness()
        self._depth_bias.set(fairness.depth_bias)
        self._fairness.set(fairness.index)
        self._input_fairness.set(fairness.input_index)
        self._least_contribution.set(fairness.least)
        self._input_least_contribution.set(fairness.input_least)

    def _count_stages(self, stages: tuple[StageReport, ...], own: RankReport, total_weight: float) -> None:
        for (contributions, weight, estimates), stage, share in zip(self._stages, stages, own.stages, strict=True):
            contributions.inc(share)
            weight.set(stage.weight / total_weight)
            estimates.inc(stage.estimated)

    def _use(self, plan: StagePlan) -> None:
        """The stages are these now."""
        for metric in (self._stage_contributions, self._stage_weight, self._estimates, self._stage_position):
            metric.clear()
        self._plan = plan
        self._stages = [
            (
                self._stage_contributions.labels(self._rank, name),
                self._stage_weight.labels(self._rank, name),
                self._estimates.labels(self._rank, name),
            )
            for name in stage_labels(plan)
        ]
        if self._rank == 0:  # the same on all ranks: one series for each stage is enough
            for position, name in enumerate(stage_labels(plan)):
                self._stage_position.labels(self._rank, name).set(position)

    # -- what there is

    def _describe(self, model: StagedDataParallel) -> None:
        info = {
            "world_size": str(model.world_size),
            "backend": dist.get_backend(),
            "version": __version__,
            "torch_version": str(torch.__version__),
            "deadline": type(model.deadline).__name__,
            "estimator": type(model.estimator).__name__,
        }
        Info("straggle_run", "What runs: versions, world size and policies.", ["rank"], registry=self.registry).labels(
            self._rank
        ).info(info)

    def _live(self, model: StagedDataParallel) -> None:
        """Read at the time of the scrape, so that they show a training thread that is stuck."""
        lag = self._gauge("lag_steps", "Merged steps that this rank has not yet applied, now.")
        lag.labels(self._rank).set_function(lambda: model.lag)
        since = self._gauge("since_step_seconds", "Seconds since this rank's training thread last finished a step.")
        since.labels(self._rank).set_function(lambda: model.since_step_s)
        store = self._gauge("store_reachable", "Whether the job's store answers this rank, 1 or 0, now.")
        store.labels(self._rank).set_function(lambda: float(model.store_reachable))
        members = self._gauge("members", "Ranks that are members now, as far as this rank knows.")
        members.labels(self._rank).set_function(lambda: float(len(model.member_ranks)))

    def _define(self) -> None:
        rank = self._rank
        self._steps = self._counter("steps", "Merged steps that this rank has applied.").labels(rank)
        self._step_seconds = self._histogram("step_seconds", "Seconds of a step, from merge to merge.").labels(rank)
        phases = self._histogram("phase_seconds", "Seconds that this rank spent in each phase of a step.", "phase")
        self._phase_seconds = {phase: phases.labels(rank, phase) for phase in (*PHASES, "wait", "network")}
        self._compute_seconds = self._histogram(
            "compute_seconds", "Seconds of this rank's own work in a step, which the deadline is compared with."
        ).labels(rank)
        self._deadline_seconds = self._gauge(
            "deadline_seconds", "The deadline of the last step; infinite without one."
        ).labels(rank)
        self._wait_for_all = self._counter(
            "step_wait_for_all_seconds", "Seconds that the steps would have taken had all ranks been waited for."
        ).labels(rank)
        self._whole_compute = self._counter(
            "whole_compute_seconds",
            "Seconds of this rank's own work in all steps, with what it would have taken to finish those it left.",
        ).labels(rank)
        late = self._counter("late_steps", "Steps in which this rank was late, by what it was doing.", "cause")
        self._late: dict[str, Any] = {cause: late.labels(rank, cause) for cause in PHASES}
        incomplete = self._counter(
            "incomplete_steps",
            "Steps in which this rank's gradients are missing though it was not late, by why.",
            "cause",
        )
        self._incomplete = {cause: incomplete.labels(rank, cause) for cause in CAUSES if cause not in PHASES}
        stood_in = self._counter(
            "stood_in_steps", "Late steps that the stand-in submitted, because this rank was stuck.", "cause"
        )
        self._stood_in = {cause: stood_in.labels(rank, cause) for cause in CAUSES}
        self._define_members()
        self._define_links()
        self._define_gradients()
        self._define_pools()

    def _define_members(self) -> None:
        rank = self._rank
        changes = self._counter("members_changes", "Ranks that left or joined while this rank was a member.", "reason")
        self._changes = {kind: changes.labels(rank, kind) for kind in CHANGE_KINDS}
        self._absent_rank = self._gauge(
            "absent_rank", "Whether each rank was absent in the last step, 1 or 0; of the lowest member only.", "absent"
        )
        self._absent_steps = self._counter(
            "absent_steps", "Steps of this rank's loop in which it was no member itself."
        ).labels(rank)
        self._healing_seconds = self._counter(
            "healing_seconds", "Seconds from when this rank was let in until it had the state of its peers."
        ).labels(rank)
        self._healing_bytes = self._counter(
            "healing_bytes", "Bytes of state that this rank took to take part again."
        ).labels(rank)

    def _define_links(self) -> None:
        rank = self._rank
        self._link_latency = self._gauge(
            "link_latency_seconds", "Seconds until a first byte from this rank is with a peer, as measured last."
        ).labels(rank)
        self._ping_bytes = self._counter("ping_bytes", "Bytes that this rank has sent to measure links.").labels(rank)
        rate = self._gauge(
            "link_bytes_per_second",
            "Bytes a second that this rank can send and receive, measured last.",
            "direction",
        )
        self._link_rate = {direction: rate.labels(rank, direction) for direction in ("up", "down")}
        slow = self._gauge("link_slow", "Whether this rank's link is slow, and costs the job time, 1 or 0.", "what")
        self._link_slow = {what: slow.labels(rank, what) for what in ("up", "down", "latency")}

    def _define_gradients(self) -> None:
        rank = self._rank
        self._elements = self._counter(
            "gradient_elements", "Gradient elements that this rank would have contributed, had it never been late."
        ).labels(rank)
        self._elements_dropped = self._counter(
            "gradient_elements_dropped", "Gradient elements of this rank that did not come in time."
        ).labels(rank)
        self._stage_contributions = self._counter(
            "stage_contributions", "Sum over steps of the share of the stage that this rank computed.", "stage"
        )
        self._stage_weight = self._gauge(
            "stage_weight_ratio", "Merged weight of the stage in the last step; 1 when all ranks computed it.", "stage"
        )
        self._stage_position = self._gauge(
            "stage_position", "Place of the stage in the order of the backward pass, from 0; of rank 0 only.", "stage"
        )
        self._estimates = self._counter("estimates", "Steps in which an estimate was used in the stage.", "stage")
        self._reach = self._gauge(
            "reach_ratio", "Share of the model's gradients that this rank computed in the last step."
        ).labels(rank)
        self._dropped_ratio = self._gauge(
            "dropped_ratio", "Share of all ranks' gradients that did not come in time in the last step."
        ).labels(rank)
        self._predicted_dropped_ratio = self._gauge(
            "predicted_dropped_ratio", "Share of all ranks' gradients that the deadline policy expects to be dropped."
        )
        self._weight = self._gauge("step_weight", "Weight of this rank's last step; 0 without data.").labels(rank)
        self._contributed = self._counter(
            "contributed_weight", "Sum over steps of the weight times the share of the model that this rank computed."
        ).labels(rank)
        self._depth_bias = self._gauge(
            "depth_bias_ratio",
            "Share of the gradients that came in for the first stage of backward, less that of the last; recent steps.",
        ).labels(rank)
        self._fairness = self._gauge(
            "fairness_ratio", "Jain's index of what the ranks contributed, 1 when all gave alike; recent steps."
        ).labels(rank)
        self._input_fairness = self._gauge(
            "input_fairness_ratio", "The same of the stage at the input alone; recent steps."
        ).labels(rank)
        self._least_contribution = self._gauge(
            "least_contribution_ratio", "What the rank that gave least contributed over the mean rank; recent steps."
        ).labels(rank)
        self._input_least_contribution = self._gauge(
            "input_least_contribution_ratio", "The same of the stage at the input alone; recent steps."
        ).labels(rank)
        self._nonfinite = self._counter(
            "nonfinite_contributions", "Parameters' gradients of this rank left out because they were not finite."
        ).labels(rank)
        self._skipped = self._counter("skipped_steps", "Steps in which no rank had finite gradients.").labels(rank)
        self._merged_bytes = self._counter("merged_bytes", "Bytes of gradients that this rank has merged.").labels(rank)
        self._samples = self._counter("samples", "Samples whose gradients this rank computed in time.")
        self._loss = self._gauge("loss", "Mean over ranks of the scalar that was logged as loss, last step.")
        self._replica_checks = self._counter(
            "replica_checks", "Steps in which the ranks compared their parameters."
        ).labels(rank)
        self._replica_mismatches = self._counter(
            "replica_mismatches", "Comparisons in which this rank's parameters were not those of the others."
        ).labels(rank)

    def _define_pools(self) -> None:
        rank = self._rank
        self._micro_batches = self._counter(
            "micro_batches", "Micro-batches that this rank drew from the pools of its steps and computed."
        ).labels(rank)
        self._put_back = self._counter(
            "micro_batches_put_back", "Micro-batches that this rank had drawn and gave back, because it was stuck."
        ).labels(rank)
        self._pool = self._counter(
            "pool_micro_batches", "Micro-batches in the pools of its steps, which all ranks together draw from."
        ).labels(rank)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"straggle_{name}", text, ["rank", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"straggle_{name}", text, ["rank", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"straggle_{name}", text, ["rank", *labels], registry=self.registry, buckets=_BUCKETS)


def stage_labels(plan: StagePlan) -> list[str]:
    """The names of the stages; where a name occurs twice, the stage's number is added."""
    seen: Count[str] = Count()
    labels = []
    for stage in plan.stages:
        seen[stage.name] += 1
        labels.append(stage.name if seen[stage.name] == 1 else f"{stage.name}#{seen[stage.name]}")
    return labels


class _Registry(CollectorRegistry):
    """Leaves out when each series was created: a second series for each, and the process's start time says it."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
