"""Prometheus metrics of one rank, from the report of each step: ``with MetricsExporter(model):`` around the loop.

The training thread only puts the step's record into a queue; another thread does the rest. Needs ``prometheus-client``:
the extra ``metrics``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from queue import SimpleQueue
from typing import final

import torch
import torch.distributed as dist

from straggle.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import Info

from straggle.backward.stages import StagePlan
from straggle.merge.rows.step_record import StepRecord
from straggle.merge.wire.groups import backend_of
from straggle.observe.metric_series import LABELS, Series
from straggle.observe.metrics_endpoint import Endpoint, Security, Targets, check_port
from straggle.observe.numbers.goodput import Uses
from straggle.parallel import StagedDataParallel
from straggle.policies.network.rank_links import links_of
from straggle.policies.network.slow_links import SlowLinks
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import (
    PHASES,
    HealingReport,
    MembersReport,
    RankReport,
    StageReport,
    StepReport,
    StuckReport,
    told_apart,
)
from straggle.version import __version__

_log = logging.getLogger(__name__)
PORT = 9640
_REST_S = 0.1  # waking a thread for each step costs the training thread more than handing over the step


@final
class MetricsExporter:
    """Serves the metrics of this rank while it trains: ``with MetricsExporter(model): ...``.

    The port is ``port`` plus this rank's number on its machine, or the next one that is free; ``None`` serves nothing.
    ``security``: TLS. ``targets``: files from which Prometheus learns where the endpoints are.
    ``samples_per_step``: this rank's samples in a step of weight 1, for ``straggle_samples_total``.

    Raises ``ValueError`` for what is no port. Beyond that it never fails a job: if no port is free, it logs a warning
    and training goes on.
    """

    def __init__(
        self,
        model: StagedDataParallel,
        *,
        port: int | None = PORT,
        host: str = "127.0.0.1",
        security: Security | None = None,
        targets: Targets | None = None,
        samples_per_step: int | None = None,
    ) -> None:
        check_port(port)
        self._rank = model.job_rank
        self._targets = targets or Targets()
        self._metrics = StepMetrics(model, samples_per_step=samples_per_step)
        self.registry = self._metrics.registry
        self._records: SimpleQueue[StepRecord | None] = SimpleQueue()
        self._closing = threading.Event()
        self._failed: set[str] = set()
        self.endpoint = self._serve(host, port, security or Security())
        self._thread = threading.Thread(target=self._observe_all, name="straggle-metrics", daemon=True)
        self._thread.start()
        self._hook = model.register_step_hook(self._records.put)
        self._members_hook = model.register_members_hook(self._metrics.count_change)
        self._stuck_hook = model.register_stuck_hook(self._metrics.show_stuck)

    @property
    def url(self) -> str | None:
        """Where this rank's metrics are; ``None`` if they are not served."""
        return None if self.endpoint is None else self.endpoint.url

    def close(self, *, clean: bool = True) -> None:
        """Count what is still in the queue, and free the port.

        If the run ended with an error (``clean`` is false), the target's file stays, so that Prometheus misses this
        rank.
        """
        if self._closing.is_set():
            return
        # the hooks first: what would be put behind the end of the queue is never counted
        self._hook.remove()
        self._members_hook.remove()
        self._stuck_hook.remove()
        self._closing.set()
        self._records.put(None)
        self._thread.join()  # then the endpoint: a scrape until now has the last steps
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

    def _warn(self, what: str, message: str) -> None:
        """Once for each thing that can go wrong."""
        if what not in self._failed:
            self._failed.add(what)
            _log.warning(message)

    def __enter__(self) -> MetricsExporter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(clean=kind is None)


class StepMetrics:
    """The metrics of one rank: counted step by step by one thread, read by others at any time.

    Those of stages belong to the stages as they are planned now, and start again if these change.
    """

    def __init__(self, model: StagedDataParallel, *, samples_per_step: int | None = None) -> None:
        self._series = Series(model.job_rank, links=model.measures_links)
        self._of, self.registry = self._series.of, self._series.registry
        self._rank = model.rank
        self._model = model
        self._samples_per_step = samples_per_step
        self._prediction = DdpPrediction()
        self._uses = Uses()
        self._slow_links = SlowLinks()
        self._pinged = 0  # bytes that were counted
        self._counted = HealingReport()  # of what this rank took to take part again
        self._plan: StagePlan | None = None
        self._stages: list[str] = []  # by their labels
        self._describe(model)
        self._live(model)

    def observe(self, record: StepRecord) -> None:
        """Count one step."""
        report = record.report
        own = report.ranks[self._rank]
        self._show_absent(report)
        self._count_healing()
        self._count_uses(report)
        if own.absent:  # it had no part in the step, and knows nothing of it
            return
        if record.plan is not self._plan:
            self._use(record.plan)
        self._count_times(report, own)
        part = report.parts[self._rank]
        self._count_gradients(record.plan, own, part)
        self._count_stages(report.stages, own, part)
        self._series.add(report)
        self._series.add(own)
        if self._model.measures_links:
            self._show_link(record.plan, report)
        self._of("steps").inc()
        if report.different_ranks is not None:
            self._of("replica_checks").inc()
            self._of("replica_mismatches").inc(self._rank in report.different_ranks)
        if "loss" in report.scalars.keys() - record.awaited:
            self._of("loss").set(report.scalars["loss"])
        self._of("predicted_dropped_ratio").set(self._model.predicted_drop)

    def count_change(self, report: MembersReport) -> None:
        """Count a change of the members, other than that a rank comes to the end of its loop."""
        if report.at_the_end:
            return
        for kind in report.kinds:
            self._of("members_changes", kind).inc()

    def show_stuck(self, report: StuckReport) -> None:
        """Show where this rank is stuck, or that it waits for one which cannot speak; or that it goes on."""
        if report.stood_in:
            return
        self._series.clear("stuck_info")
        where = "" if report.over else report.line or f"rank {report.rank}: {report.where}"
        self._of("stuck_info", where).set(not report.over)

    def _show_absent(self, report: StepReport) -> None:
        """Say of each rank whether it is absent: on the lowest member only, because all members know the same."""
        if self._rank == report.lowest_rank:
            for rank in report.ranks:
                self._of("absent_rank", rank.rank).set(rank.absent)
        else:
            self._series.clear("absent_rank")

    def _count_healing(self) -> None:
        before, self._counted = self._counted, self._model.healing_report
        self._of("healing_seconds").inc(self._counted.seconds - before.seconds)
        self._of("healing_bytes").inc(self._counted.nbytes - before.nbytes)

    def _count_uses(self, report: StepReport) -> None:
        if uses := self._uses.add(report):
            for use, seconds in uses[self._rank].items():
                self._of("goodput_seconds", use).inc(seconds)
        self._of("made_again_steps").inc(max(0, report.pool_attempts - 1))

    def _count_times(self, report: StepReport, own: RankReport) -> None:
        self._of("step_seconds").observe(report.seconds)
        for phase in PHASES:
            self._of("phase_seconds", phase).observe(max(0.0, getattr(own, f"{phase}_s")))
        self._of("phase_seconds", "wait").observe(max(0.0, own.wait_s))
        self._of("phase_seconds", "network").observe(max(0.0, report.network_s))
        if not math.isnan(own.compute_s):
            self._of("compute_seconds").observe(own.compute_s / own.cost)
        ddp = self._prediction.add(report)
        self._of("step_wait_for_all_seconds").inc(max(0.0, ddp.seconds))
        whole_s = ddp.own_s[self._rank]
        if not math.isnan(whole_s):
            self._of("untruncated_compute_seconds").inc(whole_s / own.cost + own.overrun_s)
        if own.cause is not None:
            self._of("late_steps" if own.late else "incomplete_steps", own.cause).inc()
            self._of("stood_in_steps", own.cause).inc(own.stood_in)
        if own.late and report.slowest_ranks:
            self._of("made_late_steps").inc(report.slowest_ranks[self._rank] == self._model.job_rank)

    def _show_link(self, plan: StagePlan, report: StepReport) -> None:
        """Whether this rank's link is slow, and what was sent to measure it."""
        num_bytes = sum(stage.nbytes for stage in plan.stages)
        self._slow_links.add(report.step, links_of(report), num_bytes=num_bytes, step_s=report.seconds)
        slow = [what for link in self._slow_links.now if link.rank == self._rank for what in link.slow]
        pinged, self._pinged = self._pinged, self._model.ping_bytes
        self._of("ping_bytes").inc(self._pinged - pinged)
        for what in LABELS["link_slow"][1]:
            self._of("link_slow", what).set(what in slow)

    def _count_gradients(self, plan: StagePlan, own: RankReport, part: float) -> None:
        self._of("merged_bytes").inc(sum(stage.nbytes for stage in plan.stages))
        self._of("gradient_elements").inc(part * plan.numel)
        self._of("gradient_elements_dropped").inc(max(0.0, part * (1.0 - own.reach)) * plan.numel)
        if self._samples_per_step is not None:
            self._of("samples").inc(own.reach * own.weight * self._samples_per_step)

    def _count_stages(self, stages: tuple[StageReport, ...], own: RankReport, part: float) -> None:
        for label, stage, share in zip(self._stages, stages, own.stages, strict=True):
            self._of("stage_contributions", label).inc(max(0.0, 1.0 - part * (1.0 - share)))
            self._of("estimates", label).inc(stage.estimated)

    def _use(self, plan: StagePlan) -> None:
        """The stages are these now."""
        self._series.clear("stage_contributions", "estimates")
        self._plan, self._stages = plan, stage_labels(plan)

    # -- what there is

    def _describe(self, model: StagedDataParallel) -> None:
        info = {
            "replica": str(model.rank),
            "world_size": str(model.world_size),
            "backend": backend_of(),
            "version": __version__,
            "torch_version": str(torch.__version__),
            "deadline": type(model.deadline).__name__,
            "estimator": type(model.estimator).__name__,
        }
        Info("straggle_run", "What runs: versions, world size and policies.", ["rank"], registry=self.registry).labels(
            model.job_rank
        ).info(info)

    def _live(self, model: StagedDataParallel) -> None:
        """Read at the time of the scrape, so that they show a training thread that is stuck."""
        self._of("lag_steps").set_function(lambda: model.lag)
        self._of("since_step_seconds").set_function(lambda: model.since_step_s)
        self._of("store_reachable").set_function(lambda: float(model.store_reachable))
        self._of("members").set_function(lambda: float(len(model.member_ranks)))


def stage_labels(plan: StagePlan) -> list[str]:
    """The names of the stages, told apart."""
    return told_apart(stage.name for stage in plan.stages)
