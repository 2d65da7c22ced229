"""The metrics that a rank has: their names, texts, and series in a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from straggle.extras import needs_extra

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.metrics_core import Metric

from straggle.observe.numbers.goodput import LOST, USES
from straggle.report import CAUSES, CHANGE_KINDS, PHASES, RankReport, StepReport
from straggle.schema import numbers_of

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)

# of one number of a step, or of a rank in it, that is declared with its metric
_DECLARED = [own.metric for report in (StepReport, RankReport) for own in numbers_of(report) if own.metric]
COUNTERS = {own.name: own.text for own in _DECLARED if own.kind == "counter"} | {
    "steps": "Merged steps that this rank has applied.",
    "step_wait_for_all_seconds": "Predicted seconds of the same steps under DDP, with equal shares.",
    "untruncated_compute_seconds": "Seconds of this rank's own work in all steps, with the predicted time that "
    "it would have needed to finish those in which it was late.",
    "goodput_seconds": "Seconds of this rank's steps, by what they were used for; useful over all is its goodput. "
    + "; ".join(f"{name}: {text.replace('`', '')}" for name, text in LOST.items() if name != "no_step")
    + ".",
    "made_again_steps": "Attempts at steps that were discarded and made again, because micro-batches of their pools "
    "were lost (step.pull with a seed).",
    "late_steps": "Steps in which this rank was late, by what it was doing then.",
    "made_late_steps": "Steps in which this rank's replica was late and waited for this rank; 0 if it is one rank.",
    "incomplete_steps": "Steps in which this rank's gradients are missing though it was not late. error: in a backward "
    "pass, and the loop caught it; skipped: the block was left without a backward pass; members: another rank left "
    "during the merge.",
    "stood_in_steps": "Late steps that the stand-in submitted, because this rank was stuck.",
    "members_changes": "Ranks that left or joined while this rank was a member. ended: its process; silent: no sign of "
    "life; raised: an error in its code; restarted: it asks to be let in again; slow: its work takes "
    "too long; link: its link is too slow; notice: it was told to end.",
    "healing_seconds": "Seconds from when this rank was let in until it had the state of its peers.",
    "healing_bytes": "Bytes of the state that this rank took from its peers.",
    "ping_bytes": "Bytes that this rank has sent to measure links.",
    "gradient_elements": "Gradient elements that this rank would have contributed if it had never been late; of a pool "
    "what it had drawn.",
    "gradient_elements_dropped": "Gradient elements of this rank that did not come in time.",
    "stage_contributions": "Sum over steps of the share of the stage that this rank computed; 1 if it had no data.",
    "estimates": "Steps in which an estimate was used in the stage.",
    "merged_bytes": "Bytes of gradients that this rank has merged.",
    "samples": "Samples times the share of their gradients that came in time; only with samples_per_step, the "
    "samples of a step of weight 1.",
    "replica_checks": "Steps in which the ranks compared their parameters (merge.check_every).",
    "replica_mismatches": "Comparisons in which this rank's parameters differed from those of most ranks, or its "
    "optimizer had not stepped as often as theirs.",
}
GAUGES = {own.name: own.text for own in _DECLARED if own.kind == "gauge"} | {
    "absent_rank": "Whether each rank was absent in the last step, 1 or 0; of the lowest member only.",
    "link_slow": "Whether this rank's link is slower than the others' and makes steps longer, 1 or 0.",
    "predicted_dropped_ratio": "Share of all ranks' gradients that the deadline policy expects to be dropped in the "
    "next step; NaN: no prediction.",
    "loss": "Mean over ranks of the scalar that was logged as loss, last step.",
    "lag_steps": "Merged steps that this rank has not yet applied, now.",
    "since_step_seconds": "Seconds since this rank's training thread last finished a step, now.",
    "store_reachable": "Whether the job's store answers this rank now, 1 or 0; at 0 the rank cannot be late, and all "
    "ranks wait for it.",
    "members": "Ranks that are members now, as far as this rank knows; all if none can leave.",
    "stuck_info": "Whether this rank is stuck and waited for, or waits for one that cannot speak, 1 or 0.",
}
HISTOGRAMS = {
    "step_seconds": "Seconds of a step, from merge to merge.",
    "phase_seconds": "Seconds in each phase of a step, which sum to the step. outside: evaluation, clipping; wait: for "
    "peers; network: the merge, after the last rank has submitted.",
    "compute_seconds": "Seconds of this rank's own work in a step, which is compared with the deadline; without "
    "steps that the rank never entered.",
}
# the label that a metric has beside the rank, and the values that are there from the beginning
LABELS: dict[str, tuple[str, tuple[str, ...]]] = {
    own.name: (own.label[0], tuple(other.label[1] for other in _DECLARED if other.label and other.name == own.name))
    for own in _DECLARED
    if own.label
} | {
    "goodput_seconds": ("use", tuple(use for use in USES if use != "no_step")),
    "phase_seconds": ("phase", (*PHASES, "wait", "network")),
    "late_steps": ("cause", PHASES),
    "incomplete_steps": ("cause", tuple(cause for cause in CAUSES if cause not in PHASES)),
    "stood_in_steps": ("cause", CAUSES),
    "members_changes": ("reason", CHANGE_KINDS),
    "link_slow": ("what", ("up", "down", "latency")),
    "absent_rank": ("absent", ()),
    "stage_contributions": ("stage", ()),
    "estimates": ("stage", ()),
    "stuck_info": ("where", ("",)),
}
# which a rank has only if it measures its links
OF_LINKS = ("ping_bytes", "link_slow", "link_latency_seconds", "link_bytes_per_second")
# which have no series before their first value
_LATER = ("samples", "loss", "predicted_dropped_ratio")


class Series:
    """The series of one rank, in a registry of their own: written by one thread, read by others at any time.

    ``links``: those of links, too.
    """

    def __init__(self, rank: int, *, links: bool = True) -> None:
        self.registry = _Registry()
        self._rank = rank
        self._families: dict[str, Any] = {}
        histogram = partial(Histogram, buckets=_BUCKETS)
        kinds: dict[Callable[..., Any], dict[str, str]] = {Counter: COUNTERS, Gauge: GAUGES, histogram: HISTOGRAMS}
        for kind, texts in kinds.items():
            for name, text in texts.items():
                labels = ["rank", LABELS[name][0]] if name in LABELS else ["rank"]
                if not links and name in OF_LINKS:
                    continue
                self._families[name] = kind(f"straggle_{name}", text, labels, registry=self.registry)
        self._found: dict[str, dict[object, Any]] = {name: {} for name in self._families}
        for name in self._families.keys() - set(_LATER):
            for value in LABELS[name][1] if name in LABELS else (None,):
                self.of(name, value)

    def of(self, name: str, value: object = None) -> Any:
        """The series of a metric, to be moved; ``value``: of its label, where it has one."""
        found = self._found[name]
        if value not in found:
            found[value] = self._families[name].labels(*((self._rank,) if value is None else (self._rank, value)))
        return found[value]

    def add(self, report: StepReport | RankReport) -> None:
        """One step more: its numbers that are declared with a metric."""
        declaring: type = type(report)
        for own in numbers_of(declaring):
            if (metric := own.metric) is not None and metric.name in self._families:
                series = self.of(metric.name, None if metric.label is None else metric.label[1])
                (series.inc if metric.kind == "counter" else series.set)(getattr(report, own.name))

    def clear(self, *names: str) -> None:
        """These metrics have no series from here on."""
        for name in names:
            self._families[name].clear()
            self._found[name].clear()


class _Registry(CollectorRegistry):
    """Leaves out when each series was created: a second series for each, and the process's start time is known."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
