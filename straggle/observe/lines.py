"""Lines appended to a run's file: a line that cannot be written is left out, with one warning, and training goes on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


class LineWriter:
    """Appends lines to ``path``, each at once; of an existing file the first ``keep_bytes`` are kept.

    ``num_lost`` lines could not be written. The file has complete lines only, except if a part of a line could not
    be removed again: that part ends in a question mark.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self.num_lost = 0
        self._path = path
        self._end = keep_bytes  # of the last complete line
        self._torn = False
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._rewind()
        except OSError as error:
            self._warn(error)

    def write(self, line: str) -> bool:
        """Append a line; returns whether that worked."""
        try:
            if self._file is None:
                raise OSError(f"{self._path} is not open")
            data = (("?\n" if self._torn else "") + line + "\n").encode()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._leave_out(error)
            return False
        self._end += len(data)  # after all of it: a line that failed half way is cut off at the end before it
        self._torn = False
        return True

    def close(self) -> None:
        """Close the file, and log what it lacks."""
        try:
            if self._file is not None:
                os.close(self._file)
        except OSError as error:  # NFS reports some write errors only here
            self._warn(error)
        self._file = None
        if self.num_lost:
            _log.warning("%s lacks %d lines, which could not be written", self._path, self.num_lost)

    def _leave_out(self, error: OSError) -> None:
        if self.num_lost == 0 and self._file is not None:
            self._warn(error)
        self.num_lost += 1
        if self._file is None or self._torn:
            return
        try:
            self._rewind()
        except OSError:
            self._torn = True

    def _rewind(self) -> None:
        """Remove what comes after the last complete line."""
        assert self._file is not None
        os.truncate(self._file, self._end)
        os.lseek(self._file, self._end, os.SEEK_SET)

    def _warn(self, error: OSError) -> None:
        _log.warning("%s cannot be written (%s): training goes on, and lines are left out", self._path, error)


def is_cut(line: str) -> bool:
    """Whether this line, in a file of JSON objects, is incomplete, and a `LineWriter` went on after it."""
    return line.startswith("{") and line.endswith("\n") and not line.endswith("}\n")


def bytes_before(path: Path, step: int) -> int:
    """The number of bytes before a file's first line of ``step`` or a later one, or before an unreadable line."""
    size = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                cut = is_cut(line.decode(errors="replace"))
                if not line.endswith(b"\n") or (not cut and json.loads(line).get("step", -1) >= step):
                    break
                size += len(line)
    except (OSError, ValueError, AttributeError):  # there is no file, or a power failure has left something else in it
        pass
    return size
