"""Where a thread is: its frames, innermost first, and the innermost one of the user's own code."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

import torch

from straggle import world
from straggle.waits import end_of

Kind = Literal["stuck", "collective", "inside", "waits", "paused"]

_TEXT_S = 1.0  # the file system of the source may hang, too
_LONGEST = 100  # characters of a line of code
_DEEPEST = 200  # frames
_TYPED = ("<stdin", "<ipython")  # the user's, too
_PACKAGES = ("site-packages", "dist-packages")
_TRAINERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "transformers")
_USER, _INSTALLED, _STRAGGLE, _LIBRARY = range(4)  # whose code a frame is of; the lower, the more it says
_OF_STRAGGLE = str(Path(__file__).parents[1]) + "/"
_PROGRAMS = (f"{_OF_STRAGGLE}lab/", f"{_OF_STRAGGLE}commands/")  # these use straggle as a user does
_OF_TORCH = str(Path(torch.__file__).parent) + "/"
_OF_PYTHON = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_BRACKET = f"{_OF_STRAGGLE}backward/loop_hooks.py", "bracketed"
_LOADERS = tuple(f"{_OF_STRAGGLE}{name}.py" for name in ("data/late_loader", "data/epochs", "loop/uneven"))
_MEMBERS_GROUP = f"{_OF_STRAGGLE}members/own/"  # it stands in the place of torch's own
_COLLECTIVES = f"{_OF_TORCH}distributed/distributed_c10d.py"


class Frame(NamedTuple):
    """One frame of a thread."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({short_path(self.file)}:{self.line})"


class Place(NamedTuple):
    """Where a thread is: the innermost frame of the user's code, and inside of that the innermost of torch, or of all.

    ``kind``: it is ``inside`` of straggle, is in a ``collective`` of torch's that the user's code called (with this
    name), or is stuck in neither.
    """

    own: Frame
    inner: Frame
    kind: Kind = "stuck"
    collective: str = ""

    @property
    def waits_in_straggle(self) -> bool:
        """Whether the code that runs is straggle's own, as in a step, and not what the user's calls through it."""
        return _whose(self.inner.file) == _STRAGGLE

    def words(self, text: str = "") -> str:
        """For people; ``text`` is the source line of the user's frame."""
        code = f": {text}" if text else ""
        own = f"in {self.own.function} ({short_path(self.own.file)}:{self.own.line}{code})"
        return own if self.inner == self.own else f"{own}, inside of {self.inner}"


def frames_of_thread(ident: int) -> tuple[Frame, ...]:
    """The frames of a running thread, innermost first; of the main thread if there is no such thread any more."""
    frames = sys._current_frames()
    return frames_of(frames.get(ident) or frames.get(threading.main_thread().ident or 0))


def frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """This frame and those that called it; reads no file."""
    found = list[Frame]()
    while frame is not None and len(found) < _DEEPEST:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def place_of(frames: Sequence[Frame]) -> Place | None:
    """Where a thread with these frames is; ``None`` without frames.

    Code of the user's own comes first, then installed packages other than torch, then straggle.
    """
    frames = _of_the_loop(frames)
    return _place(frames, [_whose(frame.file) for frame in frames])


def _place(frames: Sequence[Frame], kinds: Sequence[int]) -> Place | None:
    """``kinds``: whose code each frame is of."""
    if not frames:
        return None
    at = min(range(len(frames)), key=lambda index: (kinds[index], index))
    inner = next((frame for frame in frames[:at] if frame.file.startswith(_OF_TORCH)), frames[0])
    if _STRAGGLE in kinds[:at]:
        return Place(frames[at], inner, "inside")
    names = [frame.function for frame in frames[:at] if frame.file == _COLLECTIVES]
    return Place(frames[at], inner, "collective" if names else "stuck", names[-1] if names else "")


def place_in_block(frames: Sequence[Frame]) -> Place | None:
    """The same for code of a step: what straggle has called, as a trainer's loss, comes before what calls straggle.

    Of installed packages, those that derive from a general trainer come before it.
    """
    frames = _of_the_loop(frames)
    kinds = [_whose(frame.file) for frame in frames]
    inside = len(kinds) - 1 - kinds[::-1].index(_STRAGGLE) if _STRAGGLE in kinds else 0
    if min(kinds[:inside], default=_LIBRARY) >= _STRAGGLE:
        return _place(frames, kinds)
    frames, kinds = frames[:inside], kinds[:inside]
    special = [_LIBRARY if _is_of_trainer(frame.file) else kind for frame, kind in zip(frames, kinds, strict=True)]
    return _place(frames, special if min(special) < _STRAGGLE else kinds)


def _of_the_loop(frames: Sequence[Frame]) -> list[Frame]:
    """Without those that call torch for the user's code, to time it or as loaders: they wait for nothing themselves."""
    found = list[Frame]()
    for frame in frames:
        if frame.file.startswith(_MEMBERS_GROUP):
            found.clear()
            continue
        if (frame.file, frame.function) != _BRACKET:
            if frame.file not in _LOADERS:
                found.append(frame)
            continue
        while found and _whose(found[-1].file) == _STRAGGLE:  # called by the bracket
            found.pop()
    return found


def _is_of_trainer(file: str) -> bool:
    return any(f"/{folder}/{name}/" in file for folder in _PACKAGES for name in _TRAINERS)


def _whose(file: str) -> int:
    if file.startswith("<") and not file.startswith(_TYPED):
        return _LIBRARY  # frozen modules, and what torch compiles
    if file.startswith(_OF_STRAGGLE) and not file.startswith(_PROGRAMS):
        return _STRAGGLE
    if file.startswith(_OF_TORCH):
        return _LIBRARY
    if any(f"/{name}/" in file for name in _PACKAGES) or file.startswith(_PROGRAMS):
        return _INSTALLED
    return _LIBRARY if file.startswith(_OF_PYTHON) else _USER


def short_path(file: str) -> str:
    """A path as people know it: from the working folder or, for a library, from where its packages are."""
    for name in _PACKAGES:
        if f"/{name}/" in file:
            return file.rpartition(f"/{name}/")[2]
    for folder in (*_working_folder(), *_OF_PYTHON):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file


def _working_folder() -> tuple[str, ...]:
    """The folder as the start of a path; nothing if it was removed while the job runs."""
    try:
        return (f"{Path.cwd()}/",)
    except OSError:
        return ()


def text_of(frame: Frame) -> str:
    """The source line of a frame; empty if there is none, or if it cannot be read within a second."""
    found = list[str]()
    reads = world.Thread(target=lambda: found.append(linecache.getline(frame.file, frame.line)), daemon=True)
    reads.start()
    end_of([reads], _TEXT_S)
    text = found[0].strip() if found else ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
