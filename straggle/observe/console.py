"""What rank 0 shows while it trains: a live line in a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from straggle.observe.waited_for import LastSteps
from straggle.policies.ddp_time import DdpPrediction
from straggle.report import MembersReport, StepReport

_WIDTH = 160  # columns of a table that is written to a file
_LINES = 20  # plain lines over the run
_RANKS = 8  # whose numbers fit into a line


class LiveView:
    """Follows the steps of a run. ``clock`` gives seconds."""

    def __init__(
        self,
        steps: int,
        *,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._left: dict[int, tuple[float, str]] = {}  # when a rank left, and why; each entry is set as a whole
        self._steps = steps
        self._progress = Progress(
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            TimeRemainingColumn(),
            expand=True,  # so that the line has what the other columns leave
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, line="")
        self._prediction = DdpPrediction()
        self._last = LastSteps(max(1, steps // _LINES))

    def show(self, report: StepReport) -> None:
        """A step is over."""
        self._last.add(report, self._prediction.add(report))
        line = self._line(report)
        self._progress.update(self._task, completed=report.step + 1, line=line)
        if not self._console.is_terminal and (report.step + 1) % max(1, self._steps // _LINES) == 0:
            number = f"step {report.step + 1:>{len(str(self._steps))}}/{self._steps}"
            self._console.print(f"{number}  {line}", highlight=False, soft_wrap=True)

    def changed(self, report: MembersReport) -> None:
        """Members have left or come in; from any thread. That ranks come to the end of the run is not shown."""
        if report.at_the_end:
            return
        for rank, why in report.left.items():
            self._left[rank] = self._clock(), why
        self._console.print(f"members: {report}", highlight=False, soft_wrap=True)

    def _line(self, report: StepReport) -> str:
        step, ddp = (f"{1e3 * seconds:.0f} ms" for seconds in (self._last.median_s, self._last.ddp_s))
        loss = report.scalars.get("loss", math.nan)
        line = f"step {step} (DDP: ~{ddp})  {self._last.words()}  loss {loss:.3f}"  # a narrow terminal cuts its end
        line += f"  drew {_drawn(report)}" if report.pool_parts else ""
        absent = "; ".join(map(self._absence, report.absent_ranks))
        return f"{line}  absent: {absent}" if absent else line

    def _absence(self, rank: int) -> str:
        """A rank that is away; since when and why is known of those that left while this view was shown."""
        if (left := self._left.get(rank)) is None:
            return str(rank)
        since, why = left
        return f"{rank} for {self._clock() - since:.0f} s ({why})"

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _drawn(report: StepReport) -> str:
    """How many micro-batches each rank computed; of many ranks the fewest and the most."""
    parts = [rank.parts for rank in report.ranks if not rank.absent]
    if len(parts) > _RANKS:
        return f"{min(parts)} to {max(parts)}"
    again = f", attempt {report.pool_attempts}" if report.pool_attempts > 1 else ""
    return ",".join(map(str, parts)) + f" of {report.pool_parts}{again}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Mapping[str, Any] | None = None
) -> None:
    """A table on standard output, with ``notes`` as lines below it."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(*columns, title=title, title_justify="left", show_header=any(columns))
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)
    for name, note in (notes or {}).items():
        console.print(f"{name}: {note}", highlight=False, soft_wrap=True)
