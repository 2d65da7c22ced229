"""Folders that are complete after a death at any moment; of those in a directory the latest counts.

A folder counts if it has a ``state.json``, with size and SHA-256 of every other file. That is written last, by the
rename of one file, and removed first. Folders are not renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

STATE = "state.json"
EARLIER = ".earlier"  # what a run that began from the start found there
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSeal:
    """What a file must be: its size in bytes and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """A folder whose ``state.json`` is not damaged; `check` finds whether its other files are."""

    directory: Path
    state: Mapping[str, Any]
    sha256: str

    @property
    def step(self) -> int:
        """The number of steps after which it was written."""
        return int(self.state["step"])

    def check(self, name: str) -> Path:
        """The path of its file ``name``. Raises ``ValueError`` if the file is not what was written."""
        path = self.directory / name
        if name not in self.state["files"]:
            raise ValueError(f"{self.directory} of step {self.step} has no {name}: another version wrote it")
        wanted = FileSeal(**self.state["files"][name])
        try:
            size = path.stat().st_size
            same = size == wanted.size and _sha256(path) == wanted.sha256
        except OSError as error:
            raise ValueError(f"{path} of step {self.step} cannot be read: {error.strerror}") from None
        if size != wanted.size:
            raise ValueError(f"{path} of step {self.step} is damaged: it has {size:,} bytes of {wanted.size:,}")
        if not same:
            raise ValueError(f"{path} of step {self.step} is damaged: its SHA-256 is not that of what was written")
        return path


def exists(directory: Path) -> bool:
    """Whether there is a folder in it, complete or damaged; an unfinished one does not count."""
    return any((folder / STATE).exists() for folder in _folders(directory))


def snapshots(directory: Path) -> tuple[list[Snapshot], list[str]]:
    """The folders in it, the latest step first, and what is wrong with those that cannot be read."""
    found, damaged = list[Snapshot](), list[str]()
    for folder in _folders(directory):
        try:
            if (folder / STATE).exists():
                found.append(_read(folder))
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return sorted(found, key=lambda snapshot: -snapshot.step), damaged


def begin(directory: Path, step: int) -> Path:
    """A new folder to write into, for the state after this step."""
    remove_unfinished(directory)
    places = (directory / (f"step{step}.{again}" if again else f"step{step}") for again in count())
    new = next(place for place in places if not place.exists())
    new.mkdir(parents=True)
    return new


def seal(path: Path) -> FileSeal:
    """Write a file through to the disk, and return what it must be from then on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileSeal(path.stat().st_size, _sha256(path))


def publish(new: Path, state: Mapping[str, Any], files: Mapping[str, FileSeal]) -> None:
    """Complete the folder from `begin`, which has these files, and remove all others.

    Raises ``OSError`` if a file is not there as it was sealed, such as another rank's on storage that is not shared.
    """
    for name, wanted in files.items():
        if (size := (new / name).stat().st_size) != wanted.size:
            raise OSError(f"{new / name} has {size:,} bytes of {wanted.size:,}")
    # the last file: from here on the folder counts
    sealed = {**state, "files": {name: asdict(wanted) for name, wanted in sorted(files.items())}}
    write_text(new / STATE, _dumps({**sealed, "sha256": _sha256_of_state(sealed)}))
    keep_only(new)


def keep_only(folder: Path) -> None:
    """Remove all other folders beside a complete one."""
    # its name is on the disk before the others are gone: a power failure leaves one of them
    _sync(folder.parent)
    _sync(folder.parent.parent)
    for other in _folders(folder.parent):
        if other != folder:
            _remove(other)


def remove_unfinished(directory: Path) -> None:
    """Remove the folders in it that are not complete, and will not be."""
    for folder in _folders(directory):
        if not (folder / STATE).exists():
            _remove(folder)


def set_aside(directory: Path) -> Path | None:
    """Rename a directory that no longer belongs to this run; returns its path, ``None`` if no folder is in it."""
    if not exists(directory):
        return None
    kept = directory.with_name(directory.name + EARLIER)
    if kept.exists():
        shutil.rmtree(kept)
    os.replace(directory, kept)
    _sync(directory.parent)
    return kept


def _remove(folder: Path) -> None:
    """Remove a folder, ``state.json`` first: without it the folder does not count."""
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete, or as it was before, after a death at any moment."""
    half = path.with_name(path.name + ".part")
    try:
        with half.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # the content before the name, or after a power failure the name may have none
        os.replace(half, path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step*") if path.is_dir()]


def _read(directory: Path) -> Snapshot:
    """A folder's state. Raises ``ValueError`` if it is not what was written."""
    path = directory / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        sha256 = state.pop("sha256")
    except (ValueError, KeyError, AttributeError):
        raise ValueError(f"{path} is damaged, or of a version that wrote no checksums") from None
    if _sha256_of_state(state) != sha256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not that of what was written")
    return Snapshot(directory, state, sha256)


def _dumps(state: Mapping[str, Any]) -> str:
    return json.dumps(state, indent=1, sort_keys=True)


def _sha256_of_state(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dumps(state).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(directory: Path) -> None:
    """Write a folder's entries through to the disk; some file systems cannot, and need not."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
