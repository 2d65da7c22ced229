"""What Accelerate knows of a job whose ranks leave and come back: those that are `There`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from straggle.extras import needs_extra

with needs_extra("accelerate"):
    from accelerate.state import AcceleratorState, PartialState


def know_members(there: Sequence[int], own: int) -> None:
    """From now on these ranks are the job's processes, in their order.

    ``own``: this rank. One that is not among them is behind them, and is no main process; it may know none.
    """
    _know({"process_index": there.index(own) if own in there else max(1, len(there))})
    if there:
        _know({"num_processes": len(there)})


@contextmanager
def as_if_alone() -> Iterator[None]:
    """In the block this is the only process of the job: what is prepared is not dealt out."""
    known = {name: PartialState._shared_state[name] for name in ("num_processes", "process_index")}
    _know({"num_processes": 1, "process_index": 0})
    try:
        yield
    finally:
        _know(known)


def _know(known: dict[str, int]) -> None:
    PartialState._shared_state.update(known)
    AcceleratorState._shared_state.update(known)
