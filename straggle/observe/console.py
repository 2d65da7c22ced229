"""What rank 0 shows while it trains: a live line in a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from straggle.observe.numbers.replicas import Replicas
from straggle.policies.what_if.ddp_time import DdpPrediction, DdpStep
from straggle.report import MembersReport, StepReport

_WIDTH = 160  # columns of a table that is written to a file
_LINES = 20  # plain lines over the run
_RANKS = 8  # whose numbers fit into a line
_LESS = 0.9  # of the mean rank's work, at most: then a rank has less to do
_WAITING = 0.1  # of the step, from which on the rank that the others wait for is named


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


class LastSteps:
    """The last ``num_steps`` of a run, in words for somebody who looks for ten seconds."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[tuple[StepReport, DdpStep]] = deque(maxlen=num_steps)

    def add(self, report: StepReport, ddp: DdpStep) -> None:
        """The next step."""
        self._steps.append((report, ddp))

    @property
    def median_s(self) -> float:
        """The median step."""
        return median(report.whole_s for report, _ in self._steps)

    @property
    def ddp_s(self) -> float:
        """The median step as DDP would have made it."""
        return median(ddp.seconds for _, ddp in self._steps)

    def words(self) -> str:
        """Whom the others wait for, and what is done about it."""
        of = Replicas.of(report for report, _ in self._steps)
        return "; ".join([*self._has_less(of), *self._late(of)] or [self._waiting(of)])

    def _has_less(self, of: Replicas) -> Iterator[str]:
        report, ddp = self._steps[-1]
        weights = [0.0 if rank.idle or rank.absent else rank.weight for rank in report.ranks]
        number = ddp.waits_for
        if not report.dealt or report.pool_weight or number is None or not (total := math.fsum(weights)):
            return
        if weights[number] <= _LESS * total / sum(not rank.absent for rank in report.ranks):
            yield f"{of.who(number)} is slow: it has {weights[number] / total:.0%} of the samples"

    def _late(self, of: Replicas) -> Iterator[str]:
        late = Counter(rank.rank for report, _ in self._steps for rank in report.ranks if rank.late)
        for number, often in late.most_common(1):
            now = self._steps[-1][0].ranks[number]
            if now.stood_in:
                where = f" in {now.cause}" if now.cause else ""
                yield f"{of.who(number)} is stuck{where}: the others go on without it"
            else:
                others = f", others too: {len(late) - 1}" if len(late) > 1 else ""
                yield f"{of.who(number)} was stopped in {often} of {len(self._steps)} steps{others}"

    def _waiting(self, of: Replicas) -> str:
        report, _ = self._steps[-1]
        there = [rank for rank in report.ranks if not rank.absent and not math.isnan(rank.wait_s)]
        if len(there) > 1:
            last = min(there, key=lambda rank: rank.wait_s)
            wait_s = fmean(rank.wait_s for rank in there if rank is not last)
            if wait_s >= _WAITING * report.seconds:
                return f"no {of.row} is late, and the others waited {1e3 * wait_s:.0f} ms for {of.who(last.rank)}"
        return f"no {of.row} is late"


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
