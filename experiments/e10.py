"""E10: the predicted slowdown of the job because of one slow rank, at three strengths, against the measured one."""

from __future__ import annotations

from experiments._watched import BACKWARD_S, FORWARD_S, LAYERS, SLOW, run_watched
from experiments.result import Line, Result
from straggle.advise.slow import slowdown

STRENGTHS = (0.0, 0.2, 0.4, 1.0)  # of a step's work, that rank 1's backward pass takes more
TOLERANCE = 0.05
BLOCK = 10


def run(quick: bool) -> Result:
    """All strengths in one run, in turns, so that a drift of the machine's speed meets them all."""
    whole_s = LAYERS * (FORWARD_S + BACKWARD_S)
    steps = BLOCK * len(STRENGTHS) * (3 if quick else 12)
    timings, _ = run_watched(steps, BLOCK, "sleep", [share * whole_s for share in STRENGTHS])
    strength = (timings.step // BLOCK % len(STRENGTHS)).astype(int)
    mean_s = [float(timings.seconds[strength == number].mean()) for number in range(len(STRENGTHS))]
    predicted = [slowdown(timings.select(strength == number), SLOW) for number in range(1, len(STRENGTHS))]
    measured = [seconds / mean_s[0] for seconds in mean_s[1:]]
    lines = tuple(
        Line(
            f"rank {SLOW} takes {share:.0%} more: slowdown of the job",
            f"predicted = measured +- {TOLERANCE:.0%}",
            f"predicted {one.value:.3f} ({one.low:.3f} to {one.high:.3f}), measured {real:.3f}: "
            f"{one.value / real - 1:+.1%}",
            abs(one.value / real - 1) <= TOLERANCE,
        )
        for share, one, real in zip(STRENGTHS[1:], predicted, measured, strict=True)
    )
    notes = (
        f"{timings.num_steps} steps of {timings.num_ranks} ranks under DDP, gloo, in turns of {BLOCK} steps; a step "
        f"without a slow rank took {1e3 * mean_s[0]:.0f} ms, and the additional seconds are sleeps. A prediction sees "
        "only the steps of its own strength, a measurement compares with the steps in which no rank was slow.",
    )
    return Result("E10: what one slow rank costs the job", lines, notes)
