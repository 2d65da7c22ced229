"""What ends a rank's part in a step."""

from __future__ import annotations


class StopRule:
    """Asked by the open step; the two answers depend on nothing else of it.

    ``by_clock``: lateness is that of the step itself. ``abstains``: what is finished is submitted, and nothing is
    estimated. ``stops_idle``: a rank without data goes on until the rule stops it.
    """

    by_clock, abstains, stops_idle = True, False, False

    def accepts(self, num_gradients: int) -> bool:  # noqa: ARG002
        """Whether a gradient may still go into the merge, as ``num_gradients`` did before it."""
        return True

    def stops(self, num_checks: int) -> bool:
        """Whether to leave the step now; it was asked ``num_checks`` times before."""
        raise NotImplementedError
