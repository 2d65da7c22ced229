"""Ratios of times that were taken in turns: each to its neighbour, so that a drift of the machine meets both."""

import statistics


def median_ratio(times, base):
    """The median of the ratios and their quartiles, as text."""
    ordered = sorted(a / b for a, b in zip(times, base, strict=True))
    quartiles = f"{ordered[len(ordered) // 4]:.3f} to {ordered[-1 - len(ordered) // 4]:.3f}"
    return f"{statistics.median(ordered):.3f}", quartiles
