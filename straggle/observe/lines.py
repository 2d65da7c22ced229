"""Lines appended to a file of a run: one that cannot be written is left out, with one warning, and training goes on."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


class LineWriter:
    """Appends lines to ``path``, each at once; of a file that there is, the first ``keep_bytes`` stay.

    ``num_lost`` lines could not be written. The file has whole lines only, but for one that could not be removed again:
    that one ends in a question mark.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self.num_lost = 0
        self._path = path
        self._end = keep_bytes  # of the last whole line
        self._torn = False
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._rewind()
        except OSError as error:
            self._warn(error)

    def write(self, line: str) -> bool:
        """Append a line; whether that worked."""
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
        self._end += len(data)
        self._torn = False
        return True

    def close(self) -> None:
        """Close the file, and say what it lacks."""
        try:
            if self._file is not None:
                os.close(self._file)
        except OSError as error:  # NFS tells so late
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
        """Remove what comes after the last whole line."""
        assert self._file is not None
        os.truncate(self._file, self._end)
        os.lseek(self._file, self._end, os.SEEK_SET)

    def _warn(self, error: OSError) -> None:
        _log.warning("%s cannot be written (%s): training goes on, and lines are left out", self._path, error)


def is_cut(line: str) -> bool:
    """Whether this, of a file of JSON objects, is the beginning of a line after which a `LineWriter` went on."""
    return line.startswith("{") and line.endswith("\n") and not line.endswith("}\n")


def bytes_before(path: Path, step: int) -> int:
    """How many bytes a file has before its first line of ``step`` or a later one, or one that is no line of it."""
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
