"""What one rank sends another so that it can go on from there: a training state, without pickle's dangers.

The header is what `torch.save` makes of the state without its tensors, and `torch.load` with ``weights_only`` reads it:
it can name no class and no function but those that torch holds to be safe. The tensors' bytes follow in one piece.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from straggle import world

Path: TypeAlias = "tuple[str | int, ...]"
Form: TypeAlias = "tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]"  # of a tensor: its shape and its strides

MAX_DEPTH = 50  # lists in dicts in tuples
CHUNK_BYTES = 2**18, 2**24  # size of the first chunks, and the largest size; each chunk may take the group's time limit

_PAGE_BYTES = 4096  # the smallest page of a system
_NUM_CHUNKS = 256  # chunks of a state if the network's latency is short beside a chunk
_OUTWEIGHS = 4.0  # a chunk is to take so many times the latency

_MAGIC = int.from_bytes(b"straggl\x05", "big")  # the last byte is the version
_TAG, _NEVER_TAG = 0x5747, 0x5748


@dataclass(frozen=True)
class Encoded:
    """A state as it was at `encode`: ``header`` is of `torch.save`, ``data`` one flat uint8 tensor on the CPU."""

    header: bytes
    data: Tensor


def encode(state: Any, room: Tensor | None = None) -> Encoded:
    """A snapshot of nested dicts, lists and tuples of dense tensors, on any device, and of what torch loads safely.

    ``room``: flat uint8 memory on the CPU for ``data``, used if it is large enough.
    Parameters become plain tensors, an ``OrderedDict`` becomes a dict: the versions of modules, an attribute of
    ``module.state_dict()``, are not sent. Raises ``TypeError`` for a value that cannot be sent, with its place:
    ``optimizer.state[3].hook``.
    """
    tree, tensors, plain = _taken_apart(state)
    known = dict[Form, Form]()  # of equal forms one is pickled
    forms = [known.setdefault(form, form) for form in map(_form, tensors)]
    places, num_bytes = _places(forms)
    if room is None or len(room) < num_bytes:
        room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    for tensor, (dtype, shape, stride), place in zip(tensors, forms, places, strict=True):
        room[place].view(dtype).as_strided(shape, stride).copy_(tensor)
    return Encoded(_saved((tree, forms, plain)), room[:num_bytes])


def check_sendable(state: Any) -> None:
    """Raise the ``TypeError`` that `encode` would raise; copies no tensor."""
    _taken_apart(state)


def decode(header: bytes, data: Tensor) -> Any:
    """The state that `encode` was given. Its tensors are new, on the CPU, and share no memory with ``data``.

    They have the strides of ``clone()``: one that is ``channels_last`` stays so. Raises ``ValueError`` if torch does
    not load the header, or if it describes other data.
    """
    try:
        tree, forms, plain = _loaded(header)
        places, num_bytes = _places(forms)
        if num_bytes != len(data):
            raise ValueError(f"{num_bytes} bytes are described, and {len(data)} came")
        pieces = zip(forms, places, strict=True)
        made = (data[place].clone().view(dtype).as_strided(shape, stride) for (dtype, shape, stride), place in pieces)
        tensors, values = iter(list(made)), iter(plain)
        return _mapped(tree, lambda is_tensor, _: next(tensors if is_tensor else values))
    except Exception as error:  # torch.load raises errors of many kinds
        raise ValueError(f"the state that came cannot be read, because of a {type(error).__name__}") from error


def send(
    encoded: Encoded,
    group: Any,
    peer: int,
    pause: Callable[[int, float], None] = lambda *_: None,
    *,
    now: Callable[[], float] = world.clock,
) -> None:
    """Send a state to the other member of a ``ProcessGroupGloo``, which must call `receive`.

    ``pause(num_bytes, seconds)`` is called after each chunk but the last, with the seconds until the peer had it.
    Raises ``RuntimeError`` if the peer is gone, or takes no chunk within the group's time limit: then drop the group.
    """
    has_it = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def took_s(*messages: Tensor) -> float:
        began_at = now()
        for message in messages:
            group.send([message], peer, _TAG).wait()
        group.recv([has_it], peer, _TAG).wait()  # until then, sent bytes may wait in the system
        return now() - began_at

    header = torch.frombuffer(bytearray(encoded.header), dtype=torch.uint8)
    sizes = torch.tensor([_MAGIC, len(header), len(encoded.data)], dtype=torch.int64, device="cpu")
    chunk_size, left = _ChunkSize(len(encoded.data), took_s(sizes)), len(header) + len(encoded.data)
    for flat in (header, encoded.data):
        while len(flat):
            chunk, flat = flat[: chunk_size.num_bytes], flat[chunk_size.num_bytes :]
            seconds = took_s(torch.tensor([len(chunk)], dtype=torch.int64, device="cpu"), chunk)
            chunk_size.took(len(chunk), seconds)
            left -= len(chunk)
            if left:
                pause(len(chunk), seconds)


def receive(group: Any, peer: int, *, max_bytes: int) -> Any:
    """The state that the other member of a ``ProcessGroupGloo`` sends. Memory is taken after the size is checked.

    Raises ``ValueError`` if the peer announces more than ``max_bytes``, or no state of this version, and
    ``RuntimeError`` if it is gone. After either, drop the group, so that the peer's `send` ends too.
    """
    sizes, size = torch.zeros(3, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    group.recv([sizes], peer, _TAG).wait()
    magic, header_bytes, data_bytes = sizes.tolist()
    announced = f"rank {peer} announced a header of {header_bytes} bytes and data of {data_bytes} bytes"
    if magic != _MAGIC:
        raise ValueError(f"rank {peer} sends no state of this version: it began with {magic:#x}, not {_MAGIC:#x}")
    if header_bytes < 1 or data_bytes < 0:
        raise ValueError(f"{announced}, which no state has")
    if header_bytes + data_bytes > max_bytes:
        raise ValueError(f"{announced}, more than max_bytes={max_bytes}")
    header, data = bytearray(header_bytes), torch.empty(data_bytes, dtype=torch.uint8, device="cpu")
    has_it = torch.ones(1, dtype=torch.uint8, device="cpu")
    group.send([has_it], peer, _TAG).wait()
    for flat in (torch.frombuffer(header, dtype=torch.uint8), data):
        begin = 0
        while begin < len(flat):
            group.recv([size], peer, _TAG).wait()
            end = begin + int(size)
            if not begin < end <= len(flat):
                raise ValueError(f"{announced}, and a chunk of {int(size)} bytes where {len(flat) - begin} are left")
            group.recv([flat[begin:end]], peer, _TAG).wait()
            group.send([has_it], peer, _TAG).wait()
            begin = end
    return decode(bytes(header), data)


class StateRoom:
    """Memory for a copy of this rank's state, taken before a newcomer is let in: that takes six times as long as the
    copy, for which the peers wait.

    The training thread asks for it and takes it over; a thread of its own fills it, and others ask whether it is there.
    """

    def __init__(self) -> None:
        self._room: _Room | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether it is there, or about to be."""
        return self._room is not None

    @property
    def is_taken(self) -> bool:
        """Whether it is there, or cannot be had: then the copy takes its own."""
        return (room := self._room) is not None and room.is_taken

    def ask(self, num_bytes: int) -> Callable[[], None]:
        """Begin it; what is returned takes the memory, on another thread."""
        self._room = room = _Room(num_bytes)
        return room.take

    def take_over(self) -> torch.Tensor | None:
        """The memory, if there is any; from now on there is none here."""
        room, self._room = self._room, None
        return None if room is None else room.memory

    def forget(self) -> None:
        """No rank comes: free it."""
        self._room = None


class _Room:
    """One piece of memory."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.memory: torch.Tensor | None = None  # all of it
        self.is_taken = False  # also if there is not enough

    def take(self) -> None:
        try:
            memory = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu")
            memory[::_PAGE_BYTES].zero_()
            self.memory = memory
        finally:
            self.is_taken = True


def break_off(group: Any, peer: int) -> None:
    """End what is sent to the other member, or received from it, with an error there and here; by another thread.

    gloo cannot abort a message, but it closes the connection when one that is waited for is late.
    """
    with suppress(RuntimeError):
        never = torch.zeros(1, dtype=torch.uint8, device="cpu")
        group.recv([never], peer, _NEVER_TAG).wait(timedelta(milliseconds=1))


class _ChunkSize:
    """The size of the next chunk: small, so that gradients get their turn, and larger if the latency would outweigh it.

    ``latency_s``: the seconds until an empty message was answered; gradients may have delayed it.
    """

    def __init__(self, num_bytes: int, latency_s: float) -> None:
        least, most = CHUNK_BYTES
        self.num_bytes = min(max(least, num_bytes // _NUM_CHUNKS), most)
        self._latency_s, self._most = latency_s, most

    def took(self, num_bytes: int, seconds: float) -> None:
        """Note the seconds until the peer had a chunk."""
        self._latency_s = min(self._latency_s, seconds)
        if num_bytes == self.num_bytes and seconds < _OUTWEIGHS * self._latency_s:
            self.num_bytes = min(2 * self.num_bytes, self._most)


def _taken_apart(state: Any) -> tuple[Any, list[Tensor], list[Any]]:
    """The state with ``True`` instead of each tensor and ``False`` instead of each other value, and all of these."""
    tensors, plain = list[Tensor](), list[Any]()

    def take(value: Any, path: Path) -> bool:
        if is_tensor := isinstance(value, Tensor):
            _check_dense(value, path)
            tensors.append(value.detach())
        else:
            value = float(value) if isinstance(value, float) else value  # numpy's float64, which schedulers compute
            _check_loads(value, path)
            plain.append(value)
        return is_tensor

    return _mapped(state, take), tensors, plain


def _mapped(value: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A state with each value changed that is no dict, list or tuple."""
    kind = type(value)
    if kind not in (dict, OrderedDict, list, tuple):
        return change(value, path)
    if len(path) >= MAX_DEPTH:
        raise TypeError(f"{_place(path)} is more than {MAX_DEPTH} deep, which cannot be sent: is the state in itself?")
    if kind in (list, tuple):
        return kind(_mapped(item, change, (*path, index)) for index, item in enumerate(value))
    if wrong := [key for key in value if type(key) not in (str, int)]:
        raise TypeError(f"{_place(path)} has the key {wrong[0]!r}, which cannot be sent: let its keys be str or int")
    return {key: _mapped(item, change, (*path, key)) for key, item in value.items()}


def _check_dense(tensor: Tensor, path: Path) -> None:
    kind = type(tensor)
    dense = kind in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    if not dense or tensor.is_meta or tensor.is_quantized:
        what = f"a {kind.__qualname__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise TypeError(f"{_place(path)} is {what}, which cannot be sent: let its state_dict() give a dense tensor")


def _check_loads(value: Any, path: Path) -> None:
    """Raise ``TypeError`` for a value that torch does not load safely."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() < 64):
        return
    try:
        _loaded(_saved(value))
    except Exception as error:  # pickle and torch.load raise errors of many kinds
        raise TypeError(
            f"{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: give the object that "
            "keeps it a state_dict() of None, bool, int, float, str, list, tuple, dict and tensors"
        ) from error


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)


def _form(tensor: Tensor) -> Form:
    """With the dimensions in memory order, without gaps."""
    return tensor.dtype, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride()


def _places(forms: Sequence[Form]) -> tuple[list[slice], int]:
    """Where tensors lie, and the bytes of all: large items first, so each begins at a multiple of its item's size."""
    places, end = [slice(0)] * len(forms), 0
    for index in sorted(range(len(forms)), key=lambda index: -forms[index][0].itemsize):
        dtype, shape, _ = forms[index]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        places[index] = slice(begin, end)
    return places, end


def _place(path: Path) -> str:
    """The place of a value as text, such as ``optimizer.state[3].exp_avg``."""
    plain = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path)
    return "".join(plain).removeprefix(".") or "the state"
