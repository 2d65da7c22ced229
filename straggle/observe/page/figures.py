"""The figures of a report, by plotly; text and grid get their colours from the page, so that dark, light and print fit.

Blue and vermillion, and the colours of the phases, are Okabe and Ito's, which colour-blind readers can distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from straggle.observe.numbers.run import Array, Run
from straggle.observe.page.points import (
    ABSENT,
    MAX_POINTS,
    MAX_ROWS,
    cells_of,
    cumulative,
    mean_of_known,
    running_mean,
    thinned,
)
from straggle.report import PHASES, RankReport, StepReport

BLUE, VERMILLION = "#0072B2", "#D55E00"
GREY = "#808080"
PHASE_COLOURS = {
    "outside": "#CC79A7",
    "optimizer": "#F0E442",
    "loop_end": "#8C564B",
    "collective": "#BBBBBB",
    "data": "#E69F00",
}
PHASE_COLOURS |= {"forward": "#56B4E9", "backward": BLUE}
WAIT_COLOUR, MERGE_COLOUR = "rgba(128,128,128,0.25)", "rgba(128,128,128,0.6)"
_RUN_COLOURS = (BLUE, VERMILLION)
_IDLE = "rgba(86,180,233,0.55)"
_WHOLE = "rgba(128,128,128,0.10)"
_ABSENT = "rgba(0,158,115,0.45)"
# from -2, absent, over -1, no data, and 0, nothing missing, to 1: everything is
_MISSING_COLOURS = (
    (0, _ABSENT),
    (0.3, _ABSENT),
    (0.3, _IDLE),
    (0.66, _IDLE),
    (0.66, _WHOLE),
    (0.667, _WHOLE),
    (0.668, "rgba(213,94,0,0.2)"),
    (1, "rgba(213,94,0,1)"),
)
_MAX_BARS = 32  # ranks in a timeline


@dataclass(frozen=True)
class Chart:
    """A figure, what a reader who cannot see it gets instead, and a note below it."""

    figure: go.Figure
    alt: str
    note: str = ""


def step_times(runs: Sequence[Run]) -> Chart:
    """The share of the steps that took at most this long: as measured, and as predicted for DDP."""
    figure = _figure(height=320, x="seconds of a step", y="share of the steps")
    for number, run in enumerate(runs):
        for seconds, is_ddp in ((run.seconds, False), (run.ddp_s, True)):
            colour = _RUN_COLOURS[number] if len(runs) > 1 or not is_ddp else VERMILLION
            x, y = cumulative(seconds[run.warmup :])
            name = _label(runs, run, "under DDP" if is_ddp else "as it was")
            hover, dash = "%{y:.0%} of the steps took at most %{x:.3f} s", "dash" if is_ddp else "solid"
            _add_line(figure, x, y, name, hover, color=colour, width=2, dash=dash, shape="hv")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    every = np.concatenate([np.concatenate([run.seconds, run.ddp_s]) for run in runs])
    if len(positive := every[every > 0]) and positive.max() > 10 * np.median(positive):
        figure.update_xaxes(type="log", title="seconds of a step (logarithmic)")
    alt = "Distribution of step times as they were and as predicted for DDP; the table has both."
    return Chart(figure, alt, "The further left a line, the faster. The first steps are left out, as in the table.")


def step_times_over_steps(runs: Sequence[Run]) -> Chart:
    """Step time, step after step; for a single run also the deadline, and what DDP would have taken."""
    figure = _figure(height=300, x="step", y="seconds")
    for number, run in enumerate(runs):
        kinds = [("as it was", run.seconds, _RUN_COLOURS[number], "solid")]
        if len(runs) == 1:
            kinds.append(("under DDP", run.ddp_s, VERMILLION, "dash"))
            kinds.append(("deadline", np.where(np.isfinite(run.deadline_s), run.deadline_s, np.nan), GREY, "dot"))
        for name, seconds, colour, dash in kinds:
            if np.isfinite(seconds).any():
                x, y = thinned(run.step, seconds)
                hover = "step %{x:.0f}: %{y:.3f} s"
                _add_line(figure, x, y, _label(runs, run, name), hover, color=colour, width=1.5, dash=dash)
    figure.update_yaxes(rangemode="tozero")
    return Chart(figure, "Step time over the steps.", _thinned_note(runs))


def lateness(run: Run) -> Chart:
    """Ranks by steps: how much of a rank's gradients is missing, and why."""
    cells = cells_of(run)
    rows, columns = cells.missing.shape
    figure = _figure(height=110 + max(90, min(30 * rows, 620 if rows > 20 else 400)), x="step", y=run.replicas.row)
    figure.add_heatmap(
        z=cells.missing.astype(np.float32),
        x0=run.step[0] + (cells.num_steps - 1) / 2,
        dx=cells.num_steps,
        y0=(cells.num_ranks - 1) / 2,
        dy=cells.num_ranks,
        zmin=ABSENT,
        zmax=1.0,
        colorscale=_MISSING_COLOURS,
        hovertext=cells.texts,
        hoverinfo="text",
        showscale=False,
        xgap=1 if columns <= 100 else 0,
        ygap=1 if rows <= 70 else 0,
    )
    figure.update_yaxes(autorange="reversed", dtick=1 if rows <= 16 else None, showgrid=False)
    figure.update_xaxes(showgrid=False)
    if cells.nonfinite:
        figure.add_scatter(
            x=[x for x, _ in cells.nonfinite],
            y=[y for _, y in cells.nonfinite],
            mode="markers",
            name="gradients that were not finite",
            marker={"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": "#000000"}},
            hoverinfo="skip",
        )
    late, of = int(np.nansum(run.ranks["late"])), run.replicas
    alt = (
        f"{of.rows.capitalize()} by steps: {late} times that a {of.row} was late; the table below has the count of "
        f"each {of.row}."
    )
    sizes = ((cells.num_steps, "steps"), (cells.num_ranks, of.rows))
    binned = " by ".join(f"{number} {what}" for number, what in sizes if number > 1)
    return Chart(figure, alt, f"A cell is the mean of {binned}." if binned else "")


def contributions(run: Run) -> Chart:
    """Stages by ranks: the share of each stage's gradients that came in."""
    share = run.stage_share
    num_stages, num_ranks = share.shape
    size = math.ceil(num_ranks / MAX_ROWS)
    if size > 1:
        share = np.array([mean_of_known(share[:, at : at + size], axis=1) for at in range(0, num_ranks, size)]).T
    labels = [_ranks_label(at * size, size, num_ranks) for at in range(share.shape[1])]
    share = np.column_stack([run.stage_came, share])
    row_noun = run.replicas.row
    called = ["all", *(f"{row_noun}{'s' * ('-' in label)} {label}" for label in labels)]
    labels = ["all", *labels]
    names = [f"stage {number}, {stage.name}" for number, stage in enumerate(run.stages)]
    hover = [
        [f"{name}<br>{label}: {value:.1%} came in" for label, value in zip(called, row, strict=True)]
        for name, row in zip(names, share, strict=True)
    ]
    shown = len(labels) <= 9 and num_stages <= 40
    figure = _figure(height=120 + min(34 * num_stages, 640), x=row_noun, y="stage")
    figure.add_heatmap(
        z=(1 - share).astype(np.float32),
        x=labels,
        y=list(range(num_stages)),
        zmin=0,
        zmax=max(0.5, float(np.nanmax(1 - share, initial=0.0))),
        colorscale=[[0, "rgba(213,94,0,0.04)"], [1, "rgba(213,94,0,0.9)"]],
        hovertext=hover,
        hoverinfo="text",
        showscale=False,
        xgap=2,
        ygap=2 if num_stages <= 60 else 0,
        **({"text": [[_percent(value) for value in row] for row in share], "texttemplate": "%{text}"} if shown else {}),
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", dtick=1 if num_stages <= 20 else None, showgrid=False)
    first, last = (float(run.stage_came[row]) for row in (0, -1))
    alt = (
        f"Stages by {row_noun}s: {_percent(first)} came in for the first stage of backward, {_percent(last)} for the "
        "last."
    )
    return Chart(figure, alt)


def timeline(report: StepReport, row: str = "rank") -> Chart:
    """One step: what each rank did when, where its deadline was, and how long it waited. ``row``: what each is of."""
    ranks = _shown_ranks(report)
    labels = _labels(ranks)
    figure = _figure(
        height=120 + max(70, (34 if len(ranks) <= 12 else 20) * len(ranks)),
        x="seconds since the merge before",
        y=row,
    )
    base = np.zeros(len(ranks))
    for phase in PHASES:
        lengths = [getattr(rank, f"{phase}_s") for rank in ranks]
        base = _add_bars(figure, ranks, row, phase, lengths, base, PHASE_COLOURS[phase])
    busy = base.copy()
    base = _add_bars(figure, ranks, row, "wait", [rank.wait_s for rank in ranks], base, WAIT_COLOUR, pattern="/")
    if math.isfinite(report.seconds):
        merging = [max(0.0, report.seconds - end) for end in base.tolist()]
        _add_bars(figure, ranks, row, "merge", merging, base, MERGE_COLOUR)
    _add_stage_ends(figure, report, ranks, row, labels, busy)
    if math.isfinite(report.deadline_s):
        entered = [_entered_s(rank, end) for rank, end in zip(ranks, busy.tolist(), strict=True)]
        figure.add_scatter(
            x=_of_members(ranks, [at + report.deadline_s for at in entered]),
            y=labels,
            mode="lines+markers",
            name="deadline",
            line={"color": VERMILLION, "dash": "dot", "width": 1.5},
            marker={"symbol": "line-ns", "size": 18, "line": {"width": 2.5, "color": VERMILLION}},
            hovertemplate=f"deadline of {row} %{{y}}: %{{x:.3f}} s<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=labels[::-1], showgrid=False)
    late = (
        ", ".join(f"{row} {rank.rank} late in {rank.cause}" for rank in report.ranks if rank.late) or f"no {row} late"
    )
    late += "".join(f", {row} {rank.rank}: {rank.cause}" for rank in report.ranks if rank.cause and not rank.late)
    cut = (
        f"{len(ranks)} of {len(report.ranks)} {row}s: those that were late, then the slowest."
        if len(ranks) < len(report.ranks)
        else ""
    )
    return Chart(figure, f"Step {report.step}, {report.seconds:.3f} seconds, {late}.", cut)


def loss(runs: Sequence[Run], *, over: str) -> Chart:
    """The loss over ``"step"`` or ``"seconds"``."""
    figure = _figure(height=300, x="step" if over == "step" else "seconds of training", y="loss")
    for number, run in enumerate(runs):
        x = run.step if over == "step" else np.nancumsum(run.seconds)
        if len(runs) == 1:
            raw_x, raw_y = thinned(x, run.loss)
            figure.add_scatter(
                x=raw_x,
                y=raw_y,
                name="loss",
                mode="lines",
                line={"color": "rgba(128,128,128,0.55)", "width": 1},
                hoverinfo="skip",
            )
        smooth_x, smooth_y = thinned(x, running_mean(run.loss, 20))
        name, dash = _label(runs, run, "mean of 20 steps"), "solid" if number == 0 else "dash"
        hover = f"{over} %{{x:,.5~g}}: %{{y:.4f}}"
        _add_line(figure, smooth_x, smooth_y, name, hover, color=_RUN_COLOURS[number], width=2, dash=dash)
    return Chart(figure, f"Training loss over {'steps' if over == 'step' else 'seconds'}.")


# -- parts of figures


def _figure(*, height: int, x: str, y: str) -> go.Figure:
    axis = {"gridcolor": "#80808040", "zeroline": False, "automargin": True, "ticks": "outside", "ticklen": 5}
    axis["tickcolor"] = "rgba(0,0,0,0)"  # ticks are there for the space between the labels of both axes
    figure = go.Figure(layout={"template": go.layout.Template()})
    figure.update_layout(
        height=height,
        margin={"l": 48, "r": 12, "t": 8, "b": 40},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#767676"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left"},
        xaxis={**axis, "title": {"text": x, "standoff": 8}},
        yaxis={**axis, "title": {"text": y, "standoff": 8}},
        dragmode=False,
        hoverlabel={"align": "left"},
    )
    return figure


def _add_line(figure: go.Figure, x: Array, y: Array, name: str, hover: str, **line: str | float) -> None:
    """A line, and its text if the reader points at it; ``line``: its colour, width and dashes."""
    figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, hovertemplate=hover + "<extra></extra>")


def _add_bars(
    figure: go.Figure,
    ranks: list[RankReport],
    row: str,
    name: str,
    seconds: list[float],
    base: Array,
    colour: str,
    pattern: str = "",
) -> Array:
    """One phase of all ranks, from the end of the phases before it; returns where it ends."""
    lengths = np.nan_to_num(np.array(_of_members(ranks, seconds), dtype=float))
    if (lengths > 0).any():
        figure.add_bar(
            x=lengths,
            y=_labels(ranks),
            base=base,
            orientation="h",
            name=name,
            marker={"color": colour, "pattern": {"shape": pattern, "fgcolor": GREY, "size": 6, "solidity": 0.2}},
            customdata=lengths,
            hovertemplate=f"{row} %{{y}}<br>{name}: %{{customdata:.3f}} s<extra></extra>",
        )
    return np.asarray(base + lengths)


def _add_stage_ends(
    figure: go.Figure, report: StepReport, ranks: list[RankReport], row: str, labels: list[str], busy: Array
) -> None:
    ends = [
        (_entered_s(rank, end) + at, label, f"{stage.name} complete")
        for rank, label, end in zip(ranks, labels, busy.tolist(), strict=True)
        for stage, at in zip(report.stages, rank.stage_s, strict=False)
        if math.isfinite(at) and not math.isnan(rank.compute_s)
    ]
    if ends and len(ends) <= 2000:
        figure.add_scatter(
            x=[at for at, _, _ in ends],
            y=[label for _, label, _ in ends],
            mode="markers",
            name="a stage is complete",
            marker={"symbol": "line-ns", "size": 9, "line": {"width": 1.2, "color": "#ffffff"}, "color": "#ffffff"},
            text=[text for _, _, text in ends],
            hovertemplate=f"{row} %{{y}}, %{{x:.3f}} s<br>%{{text}}<extra></extra>",
            showlegend=False,
        )


def _of_members(ranks: list[RankReport], seconds: list[float]) -> list[float]:
    """The same, and NaN for each rank that was absent: it waits for nobody, merges nothing and has no deadline."""
    return [math.nan if rank.absent else own for rank, own in zip(ranks, seconds, strict=True)]


def _entered_s(rank: RankReport, busy_s: float) -> float:
    """When the rank entered ``step()``; if it has not, its deadline counts from the merge before."""
    return 0.0 if math.isnan(rank.compute_s) else max(0.0, busy_s - rank.compute_s)


def _shown_ranks(report: StepReport) -> list[RankReport]:
    if len(report.ranks) <= _MAX_BARS:
        return list(report.ranks)
    order = sorted(report.ranks, key=lambda rank: (not rank.late, math.inf if math.isnan(rank.wait_s) else rank.wait_s))
    return sorted(order[:_MAX_BARS], key=lambda rank: rank.rank)


def _labels(ranks: list[RankReport]) -> list[str]:
    return [f"{rank.rank}{_state(rank)}" for rank in ranks]


def _state(rank: RankReport) -> str:
    if rank.absent:
        return " absent"
    if rank.idle:
        return " no data"
    if rank.stood_in:
        return " stood in for"
    return " late" if rank.late else ""


def _ranks_label(first: int, size: int, num_ranks: int) -> str:
    last = min(first + size, num_ranks) - 1
    return f"{first}" if last == first else f"{first}-{last}"


def _label(runs: Sequence[Run], run: Run, text: str) -> str:
    """A line's name in the legend, which must fit a phone."""
    name = run.name if len(run.name) <= 22 else f"{run.name[:12]}…{run.name[-9:]}"
    return f"{name}:<br>{text}" if len(runs) > 1 else text


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.0%}"


def _thinned_note(runs: Sequence[Run]) -> str:
    size = max(math.ceil(run.num_steps / MAX_POINTS) for run in runs)
    return f"Each point is the mean of {size} steps." if size > 1 else ""
