"""What Accelerate knows of a job whose ranks leave and come back: those that made the last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from straggle.extras import needs_extra
from straggle.report import StepReport

with needs_extra("accelerate"):
    from accelerate.state import AcceleratorState, PartialState


def know_members(report: StepReport, own: int) -> None:
    """From now on they are the job's processes, in their order; the same on all that make this step.

    ``own``: this rank. One that did not make the step keeps its number.
    """
    present = [rank.rank for rank in report.ranks if not rank.absent]
    known = {"num_processes": len(present)} if present else {}
    if own in present:
        known["process_index"] = present.index(own)
    _know(known)


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
