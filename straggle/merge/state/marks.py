"""What a rank says with each step of its module's other state: a mark, and which marks ask for an exchange."""

from __future__ import annotations

from collections.abc import Sequence

UNCHANGED = 0  # by a forward pass that came to its end
UNFINISHED = -1  # no forward pass came to its end, and what it changed can be set back
UNSETTLED = -2  # it cannot: a peer has to say what the tensors were


def must_exchange(marks: Sequence[int]) -> bool:
    """Whether ranks with these marks hold something different that some of them cannot set back alone."""
    return any(mark not in (UNCHANGED, UNFINISHED) for mark in marks) and len(set(marks)) > 1
