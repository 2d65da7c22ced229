"""A folder that is complete after a death at any moment: written beside the old one, sealed by checksums, then renamed.

``X.new`` is being written, ``X.old`` was there before; a death between the two renames leaves both and no ``X``. A
folder counts if it has a ``state.json``, with size and SHA-256 of every other file. It is written last, by a rename,
and removed first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATE = "state.json"
EARLIER = ".earlier"  # what a run found there that does not go on from it
_FORMS = ("", ".new", ".old")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Seal:
    """What a file must be: its size in bytes and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """A folder whose ``state.json`` is not damaged; `check` says whether its other files are."""

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
        wanted = Seal(**self.state["files"][name])
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
    """Whether there is a folder, complete or damaged, in any of its places; an unfinished one does not count."""
    return any((place / STATE).exists() for place in _places(directory))


def snapshots(directory: Path) -> tuple[list[Snapshot], list[str]]:
    """The existing folders, the latest step first, and what is wrong with those that cannot be read."""
    found, damaged = list[Snapshot](), list[str]()
    for place in _places(directory):
        try:
            if (place / STATE).exists():
                found.append(_read(place))
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return sorted(found, key=lambda snapshot: -snapshot.step), damaged


def being_written(directory: Path) -> Path:
    """The folder that takes the place of ``directory`` once it is complete."""
    return _beside(directory, ".new")


def begin(directory: Path) -> Path:
    """An empty folder to write into: `being_written`."""
    new = being_written(directory)
    remove(new)
    new.mkdir(parents=True, exist_ok=True)
    return new


def seal(path: Path) -> Seal:
    """Write a file through to the disk, and return what it must be from then on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return Seal(path.stat().st_size, _sha256(path))


def publish(directory: Path, state: Mapping[str, Any], files: Mapping[str, Seal]) -> None:
    """Put the folder from `begin`, with these files, in the place of ``directory``.

    Raises ``OSError`` if a file is not there as it was sealed, such as another rank's on storage that is not shared.
    """
    new, old = being_written(directory), _beside(directory, ".old")
    for name, wanted in files.items():
        if (new / name).stat().st_size != wanted.size:
            raise OSError(f"{new / name} has {(new / name).stat().st_size:,} bytes of {wanted.size:,}")
    sealed = {**state, "files": {name: asdict(wanted) for name, wanted in sorted(files.items())}}
    write_text(new / STATE, _dumps({**sealed, "sha256": _sha256_of_state(sealed)}))
    if (directory / STATE).exists():
        remove(old)
        os.replace(directory, old)
    else:
        remove(directory)  # what there is of it is not complete; ``old`` may be
    os.replace(new, directory)
    _sync(directory.parent)
    remove(old)


def adopt(snapshot: Snapshot, directory: Path) -> None:
    """Move ``snapshot``, which is in one of the places, to ``directory``, and remove what is in the other places."""
    if snapshot.directory != directory:
        remove(directory)
        os.replace(snapshot.directory, directory)
        _sync(directory.parent)
    for place in _places(directory)[1:]:
        remove(place)


def set_aside(directory: Path) -> Path | None:
    """Rename the latest folder, which no longer belongs to this run; returns its path, ``None`` if there is none."""
    found, _ = snapshots(directory)
    kept = _beside(directory, EARLIER)
    for place in _places(directory):
        if not found or place != found[0].directory:
            remove(place)
    if not found:
        return None
    remove(kept)
    os.replace(found[0].directory, kept)
    _sync(directory.parent)
    return kept


def remove(directory: Path) -> None:
    """Remove a folder of files, ``state.json`` first: a folder without it does not count."""
    if not directory.exists():
        return
    (directory / STATE).unlink(missing_ok=True)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete, or as it was before, after a death at any moment."""
    half = path.with_name(path.name + ".part")
    try:
        with half.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _places(directory: Path) -> list[Path]:
    return [_beside(directory, form) for form in _FORMS]


def _beside(directory: Path, form: str) -> Path:
    return directory.with_name(directory.name + form)


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
