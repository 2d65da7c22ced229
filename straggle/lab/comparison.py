"""The results of a comparison: numbers for its file, tables, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from straggle.lab.interleaved import TimedJob, reference_losses, seconds_to, time_to_loss_ratio
from straggle.observe.console import print_table
from straggle.observe.numbers.intervals import Interval, ratio_interval
from straggle.observe.numbers.registry import NUMBERS
from straggle.schema import described

REFERENCE = "ddp"
OURS = "straggle"
TRAIN_ON = 1.25  # of DDP's seconds, beyond which no method goes on to come to DDP's final loss
_WITHOUT_FAULTS = 1.02  # of DDP's step time, at most

# of a method in compare.json
FIELDS = {
    "step_seconds_median": described("of the steps, without the first tenth of them, at most ten", stable=True),
    "step_seconds_mean": described("of all steps; includes what a rank still had to catch up with", stable=True),
    "step_seconds_p95": described("as the median"),
    "step_seconds_stdev": described("as the median"),
    "seconds": described("of this method's turns together", stable=True),
    "ddp_seconds_median": described(
        "what DDP would have taken, predicted from the steps of a method by straggle; null otherwise"
    ),
    "ddp_seconds_mean": described("the same, the mean"),
    "step_time_ratio": described("`seconds` divided by DDP's"),
    "step_time_ratio_interval": described("its 95 % bootstrap interval over turns"),
    "dropped_share": NUMBERS["dropped_share"].field(stable=False),
    "goodput": described("the useful part of the steps' time; null for a method whose steps straggle does not merge"),
    "validation_loss": described("on held-out data, after `steps` steps", stable=True),
    "validation_accuracy": NUMBERS["validation_accuracy"].field(),
    "target_loss": described("DDP's final validation loss", stable=True),
    "seconds_to_loss": described(
        "when this method first reached it, interpolated between the ends of two turns; null: not reached. Turns "
        "go on after `steps` steps, but none begins beyond 1.25 of DDP's `seconds`. Evaluating does not count",
        stable=True,
    ),
    "time_to_loss_ratio": described("`seconds_to_loss` divided by DDP's"),
    "time_to_loss_ratio_range": described(
        "the range of that ratio over the losses that DDP reached in its second half, without a tenth at each end"
    ),
    "parameters_sha256": described("of each rank's final parameters", stable=True),
    "replicas_identical": described("whether they are all equal", stable=True),
}


@dataclass(frozen=True)
class MethodResult:
    """What came of one method: its clock with its validation losses, and every rank's parameters."""

    timed: TimedJob
    parameters_sha256: Sequence[str]


@dataclass(frozen=True)
class Comparison:
    """The methods after ``steps`` steps in ``turns`` turns each, by name, ``ddp`` among them.

    ``faults``: whether ranks were made slow.
    """

    methods: Mapping[str, MethodResult]
    steps: int
    turns: int
    faults: bool = True

    @property
    def target(self) -> float:
        """The reference's final validation loss."""
        return self._last(REFERENCE)["loss"]

    def seconds_to_loss(self, name: str) -> list[float | None]:
        """This method's seconds to each of the losses by which methods are compared."""
        timed = self.methods[name].timed
        levels = reference_losses(self.methods[REFERENCE].timed.losses[: self.turns])
        return [seconds_to(timed.losses, timed.end_s, level) for level in levels]

    def time_to_loss(self, name: str, than: str = REFERENCE) -> Interval:
        """The time in which a method reaches the reference's final loss, divided by that of another."""
        return time_to_loss_ratio(self.seconds_to_loss(name), self.seconds_to_loss(than))

    def step_time(self, name: str, than: str = REFERENCE) -> Interval:
        """The mean step time of a method, divided by that of another, over the turns of the first steps."""
        return ratio_interval(*(self.methods[one].timed.turn_s[: self.turns] for one in (name, than)))

    def results(self) -> dict[str, dict[str, Any]]:
        """For each method the fields that are written: `FIELDS`."""
        results: dict[str, dict[str, Any]] = {}
        for name, one in self.methods.items():
            step_time, to_loss, last = self.step_time(name), self.time_to_loss(name), self._last(name)
            results[name] = {
                **one.timed.summary(self.steps, self.turns),
                **one.timed.ddp_seconds(self.steps),
                "step_time_ratio": step_time.value,
                "step_time_ratio_interval": [step_time.low, step_time.high],
                "dropped_share": one.timed.dropped_share(self.steps),
                "goodput": one.timed.goodput(self.steps),
                "validation_loss": last["loss"],
                **({"validation_accuracy": last["accuracy"]} if "accuracy" in last else {}),
                "target_loss": self.target,
                "seconds_to_loss": self.seconds_to_loss(name)[-1],
                "time_to_loss_ratio": _or_none(to_loss.value),
                "time_to_loss_ratio_range": [_or_none(to_loss.low), _or_none(to_loss.high)],
                "parameters_sha256": list(one.parameters_sha256),
                "replicas_identical": len(set(one.parameters_sha256)) == 1,
            }
        return results

    def verdict(self) -> str:
        """Whether straggle meets its aims: DDP's speed without faults, the first place with them."""
        if OURS not in self.methods:
            return ""
        if not self.faults:
            ratio = self.step_time(OURS)
            kept = ratio.value <= _WITHOUT_FAULTS
            return f"straggle's step time is {_text(ratio)} of DDP's: {'within' if kept else 'NOT within'} 2 %"
        seconds = {name: self.seconds_to_loss(name)[-1] for name in self.methods}
        known = {name: at for name, at in seconds.items() if at is not None and name != OURS}
        if not known:
            return f"DDP's final loss is {self.target}: there is nothing to compare by"
        best = min(known, key=lambda name: known[name])
        if seconds[OURS] is None:
            return f"straggle did NOT come to DDP's final loss in {TRAIN_ON} of DDP's time; {best} was the first"
        ratio = self.time_to_loss(OURS, best)
        first = "at least as good" if ratio.value <= 1 else "NOT as good"
        even = " (even, by the range)" if ratio.low <= 1 <= ratio.high else ""
        return f"straggle needs {_text(ratio)} of the time of {best}, the best other method: {first}{even}"

    def predicted(self) -> str:
        """DDP's step as predicted from straggle's own steps, and as measured."""
        if OURS not in self.methods:
            return ""
        said = self.methods[OURS].timed.ddp_seconds(self.steps)
        took = self.methods[REFERENCE].timed.summary(self.steps, self.turns)
        pairs = ((which, said[f"ddp_seconds_{which}"], took[f"step_seconds_{which}"]) for which in ("median", "mean"))
        return ", ".join(
            f"{which} {1e3 * own:.0f} ms of {1e3 * other:.0f} ({own / other:.2f})" for which, own, other in pairs if own
        )

    def print(self, title: str, notes: Mapping[str, Any]) -> None:
        """The table, with DDP's final validation loss as the target."""
        rows = [self._row(name, fields) for name, fields in self.results().items()]
        times = ("step, mean", "p95", "mean, over DDP's", "to DDP's loss", "over DDP's")
        columns = ("", *times, "loss", "dropped", "goodput", "replicas")
        said = {"verdict": self.verdict(), "DDP's step, predicted from straggle's, of that measured": self.predicted()}
        print_table(title, columns, rows, {**{name: note for name, note in said.items() if note}, **notes})

    def _last(self, name: str) -> Mapping[str, float]:
        return self.methods[name].timed.scores[self.turns - 1]

    def _row(self, name: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
        to_loss = fields["seconds_to_loss"]
        return (
            name,
            *(NUMBERS[own].shown(fields[own]) for own in ("step_seconds_mean", "step_seconds_p95")),
            _text(self.step_time(name)) if name != REFERENCE else "1",
            "never" if to_loss is None else f"{to_loss:.1f} s",
            _text(self.time_to_loss(name)) if name != REFERENCE else "1",
            *(NUMBERS[own].shown(fields[own]) for own in ("validation_loss", "dropped_share")),
            "" if fields["goodput"] is None else NUMBERS["goodput"].shown(fields["goodput"]),
            "identical" if fields["replicas_identical"] else "DIFFERENT",
        )


def print_summary(scenarios: Mapping[str, Comparison], notes: Mapping[str, Any]) -> None:
    """For each method and scenario, the time to DDP's final validation loss, divided by DDP's."""
    names = [name for name in next(iter(scenarios.values())).methods if name != REFERENCE]
    rows = [(name, *(_text(one.time_to_loss(name)) for one in scenarios.values())) for name in names]
    verdicts = {name: one.verdict() for name, one in scenarios.items() if one.verdict()}
    print_table("time to DDP's final validation loss, over DDP's", ("", *scenarios), rows, {**verdicts, **notes})


def draw(scenarios: Mapping[str, Comparison], path: Path) -> None:
    """For each scenario the loss over each method's own seconds, and below it the times to DDP's final loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(scenarios), 7.0), layout="constrained")
    panels = figure.subplots(2, len(scenarios), squeeze=False, height_ratios=[3, 2])
    for column, (scenario, comparison) in enumerate(scenarios.items()):
        above, below = panels[0][column], panels[1][column]
        names = list(comparison.methods)
        for index, (name, one) in enumerate(comparison.methods.items()):
            width = 2 if name == OURS else 1.2
            above.plot(one.timed.end_s, one.timed.losses, color=f"C{index}", label=name, linewidth=width)
            ratio = comparison.time_to_loss(name)
            if math.isfinite(ratio.value):
                low, high = (bound if math.isfinite(bound) else ratio.value for bound in (ratio.low, ratio.high))
                error = [[max(0.0, ratio.value - low)], [max(0.0, high - ratio.value)]]
                below.barh(index, ratio.value, color=f"C{index}", xerr=error, ecolor="0.3")
            else:
                below.text(0.02, index, f"not in {TRAIN_ON} of DDP's time", va="center", fontsize=8)
        above.axhline(comparison.target, color="0.6", linewidth=0.8, linestyle="--")
        above.set(title=scenario, xlabel="seconds of the method's own turns", ylabel="validation loss")
        below.set_yticks(range(len(names)), names)
        below.set_ylim(len(names) - 0.5, -0.5)  # the first at the top, also where a bar is missing
        below.axvline(1.0, color="0.6", linewidth=0.8, linestyle="--")
        below.set_xlabel("time to DDP's final loss, over DDP's")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _text(ratio: Interval) -> str:
    if not math.isfinite(ratio.value):
        return "never"
    low, high = ((f"{bound:.2f}" if math.isfinite(bound) else "never") for bound in (ratio.low, ratio.high))
    return f"{ratio.value:.3f} ({low} to {high})"
