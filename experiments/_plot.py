"""The pictures of the experiments: lines over an axis that is mostly logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]


def save_lines(
    path: Path,
    lines: Mapping[str, Points],
    *,
    markers: Mapping[str, Points] | None = None,
    log_x: bool = True,
    **axes: Any,
) -> Path:
    """A picture of ``lines``, and of ``markers``, which are points without a line; ``axes``: labels and limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), "-o", markersize=3, label=name)
    for mark, (name, points) in zip(cycle("x+1s"), (markers or {}).items(), strict=False):
        axis.plot(*zip(*points, strict=True), f"k{mark}", markersize=8, fillstyle="none", label=name)
    if log_x:
        axis.set_xscale("log")
    axis.set(**axes)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    return path
