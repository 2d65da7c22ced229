"""A run's file of lines that one rank at a time writes, and another goes on with while that one is away.

The lines are numbered, and every member has them. Who becomes the writer moves the complete lines into a new file of
the same name, and goes on after the last of them with what it still has. So a writer that died loses no line, and one
that was frozen, and writes on before it knows, writes into a file that has no name any more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from straggle.observe.lines import LineWriter, is_cut

_KEPT = 256  # lines that a rank has ready for when it becomes the writer: more than wait for a rank that is stuck
_PATIENCE_S = 5.0  # for the writer before to write what only it has
_TAIL_BYTES = 1 << 16

Line = Callable[[], Mapping[str, Any]]


class HandedOnLines:
    """Lines of JSON in ``path``, each with its number as ``key``; any thread may add one.

    ``begins``: the job begins, with this rank as the writer. Of what an earlier run has left, the lines below number
    ``first`` are kept. Who becomes the writer later waits for at most ``patience_s`` for lines that it lacks.
    """

    def __init__(
        self, path: Path, *, key: str, first: int = 0, begins: bool = False, patience_s: float = _PATIENCE_S
    ) -> None:
        self._path, self._key = path, key
        self._patience_s = patience_s
        self._pending: deque[tuple[int, Line]] = deque(maxlen=_KEPT)
        self._floor = self._last = first - 1  # the last is in the file, as far as this rank knows
        self._file: LineWriter | None = None
        self._inode = -1  # of the file that it has
        self._waits_since: float | None = None
        self._lock = threading.Lock()
        if begins:
            self._take(lambda line: self._number(line) < first)

    def add(self, number: int, line: Line, *, writes: bool) -> None:
        """One more line, which is built when it is written; ``writes``: this rank is the writer at present."""
        with self._lock:
            self._pending.append((number, line))  # whoever writes it: the writer may die before it has
            if not writes:
                self._close()
            elif self._has_file() or self._take_over():
                self._write_pending()

    def close(self) -> None:
        """Close the file, if this rank has it."""
        with self._lock:
            self._close()

    def _write_pending(self) -> None:
        assert self._file is not None
        for number, line in self._pending:
            if number > self._last:
                self._file.write(json.dumps({self._key: number, **line()}))
                self._last = number

    def _take_over(self) -> bool:
        """Become the writer; false if the one before has lines that this rank lacks, and may still write them."""
        # by what is in the file, not by what was heard: the writer may have died between the two
        now, last = time.monotonic(), max(self._floor, self._last_written())
        self._waits_since = now if self._waits_since is None else self._waits_since
        following = next((number for number, _ in self._pending if number > last), last + 1)
        if following > last + 1 and now - self._waits_since < self._patience_s:
            return False
        self._waits_since = None
        self._take(lambda line: not is_cut(line))
        return True

    def _take(self, keeps: Callable[[str], bool]) -> None:
        """Move the complete lines that it keeps into a file of this rank's own."""
        try:
            size = self._move(keeps)
        except OSError:  # as on a full disk: without a file of its own, this rank goes on in the one that there is
            size = self._path.stat().st_size if self._path.exists() else 0
        # what this rank wrote last may have gone into a file that was taken over
        self._last = max(self._floor, self._last_written())
        self._close()
        self._file = LineWriter(self._path, keep_bytes=size)
        self._inode = self._inode_now()

    def _has_file(self) -> bool:
        """Whether this rank has the file of that name; another may have taken it over while this one was frozen."""
        return self._file is not None and self._inode == self._inode_now()

    def _inode_now(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return -1

    def _move(self, keeps: Callable[[str], bool]) -> int:
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        try:
            with part.open("wb") as copy, self._path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n") and keeps(line.decode(errors="replace")):
                        copy.write(line)
            size = part.stat().st_size
            os.replace(part, self._path)
        finally:
            # after an error in the middle: another writer may come, and would find a part of no use
            part.unlink(missing_ok=True)
        return size

    def _last_written(self) -> int:
        """The number of the last complete line in the file; below all of them if there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines(keepends=True)
        except OSError:
            lines = []
        whole = [line for line in lines if line.endswith("}\n")]
        return self._number(whole[-1]) if whole else -1

    def _number(self, line: str) -> int:
        try:
            return int(json.loads(line)[self._key])
        except (ValueError, TypeError, LookupError):
            return -1

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
