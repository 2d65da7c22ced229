"""Marks, by which each rank reports changes of its module's other state, and the marks that require an exchange."""

from __future__ import annotations

from collections.abc import Sequence

UNCHANGED = 0  # a forward pass was complete and changed nothing
UNFINISHED = -1  # no forward pass was complete, and its changes can be restored
UNSETTLED = -2  # the changes cannot be restored: a peer must send the old tensors


def must_exchange(marks: Sequence[int]) -> bool:
    """Whether state differs between ranks with these marks, and some of them cannot restore it alone."""
    return any(mark not in (UNCHANGED, UNFINISHED) for mark in marks) and len(set(marks)) > 1
