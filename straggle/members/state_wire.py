"""What one rank sends another so that it can go on from there: a training state as JSON and bytes, without pickle.

The header describes the state. What JSON can express stands for itself; everything else is a list that begins with its
kind: ``["tuple", ...]``, ``["dict", [key, value], ...]``, ``["tensor", dtype, shape, stride, offset, nbytes]``. The
receiver builds only the kinds in `_build`: a header can name no class and no function.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from reprlib import repr as in_short
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Node: TypeAlias = Any  # of JSON
Path: TypeAlias = "tuple[str | int, ...]"

MAX_DEPTH = 50  # lists in dicts in tuples
CHUNK_BYTES = 2**18, 2**24  # size of the first chunks, and the largest size; each chunk may take the group's time limit

_NUM_CHUNKS = 256  # chunks of a state if the network's latency is short beside a chunk
_OUTWEIGHS = 4.0  # a chunk is to take so many times the latency

_MAGIC = int.from_bytes(b"straggl\x03", "big")  # the last byte is the version
_TAG = 0x5747
_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SEQUENCES: dict[Any, str] = {list: "list", tuple: "tuple", torch.Size: "tuple"}
# for MultiStepLR, which keeps a Counter and fails with a plain dict
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "dict", Counter: "counter"}


@dataclass(frozen=True)
class Encoded:
    """A state as it was at `encode`: ``header`` is JSON in UTF-8, ``data`` one flat uint8 tensor on the CPU."""

    header: bytes
    data: Tensor


def encode(state: Any, room: Tensor | None = None) -> Encoded:
    """A snapshot of nested dicts (keys: str, int), lists, tuples, plain values and dense tensors on any device.

    ``room``: flat uint8 memory on the CPU for ``data``, used if it is large enough.
    Parameters become plain tensors, an ``OrderedDict`` becomes a dict: the versions of modules, an attribute of
    ``module.state_dict()``, are not sent. Raises ``TypeError`` for a value that cannot be sent, with its place:
    ``optimizer.state[3].hook``.
    """
    tensors: list[tuple[Tensor, list[Node]]] = []
    tree = _describe(state, (), tensors)
    tensors.sort(key=lambda pair: -pair[0].itemsize)  # so each begins at a multiple of its item's size, without gaps
    num_bytes, end = sum(tensor.nbytes for tensor, _ in tensors), 0
    if room is None or len(room) < num_bytes:
        room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    data = room[:num_bytes]
    for tensor, node in tensors:
        begin, end = end, end + tensor.nbytes
        node += begin, tensor.nbytes
        data[begin:end].view(tensor.dtype).as_strided(tensor.shape, node[3]).copy_(tensor)
    return Encoded(json.dumps(tree, separators=(",", ":")).encode(), data)


def check_sendable(state: Any) -> None:
    """Raise the ``TypeError`` that `encode` would raise; copies nothing."""
    _describe(state, (), [])


def decode(header: bytes, data: Tensor) -> Any:
    """The state that `encode` was given. Its tensors are new, on the CPU, and share no memory with ``data``.

    They have the strides of ``clone()``: one that is ``channels_last`` stays so. Raises ``ValueError`` if the header is
    inconsistent.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
        raise ValueError(f"the data is {data.dtype} {tuple(data.shape)} on {data.device}, not flat uint8 on the CPU")
    try:
        tree = json.loads(header.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of a state cannot be read as JSON: {error}") from error
    return _build(tree, (), data)


def send(
    encoded: Encoded,
    group: Any,
    peer: int,
    pause: Callable[[int, float], None] = lambda *_: None,
    *,
    now: Callable[[], float] = time.monotonic,
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


def _describe(value: Any, path: Path, tensors: list[tuple[Tensor, list[Node]]]) -> Node:
    """The node of a value; collects its tensors, whose nodes lack offset and nbytes until later."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() < 64 else ["int", hex(value)]  # Python parses no decimal of 4301 digits
    if isinstance(value, float):  # also numpy's float64, which schedulers compute
        return float(value) if math.isfinite(value) else ["float", str(float(value))]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, Tensor):
        strided = kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_nested
        if not strided or value.is_meta or value.dtype not in _DTYPE_NAMES:
            what = f"a {kind.__qualname__} of {value.dtype}, {value.layout}, on {value.device}"
            raise TypeError(f"{_place(path)} is {what}, which cannot be sent: let its state_dict() give a dense tensor")
        stride = torch.empty_like(value, device="meta").stride()  # the dimensions in memory order, without gaps
        tensors.append((value.detach(), ["tensor", _DTYPE_NAMES[value.dtype], list(value.shape), list(stride)]))
        return tensors[-1][1]
    if kind not in _SEQUENCES and kind not in _MAPPINGS:
        raise TypeError(
            f"{_place(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent: give the object that "
            "keeps it a state_dict() of None, bool, int, float, str, bytes, list, tuple, dict and tensors"
        )
    if len(path) >= MAX_DEPTH:
        raise TypeError(f"{_place(path)} is more than {MAX_DEPTH} deep, which cannot be sent: is the state in itself?")
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(_describe(item, (*path, index), tensors) for index, item in enumerate(value))]
    if wrong := [key for key in value if type(key) not in (str, int)]:
        raise TypeError(f"{_place(path)} has the key {wrong[0]!r}, which cannot be sent: let its keys be str or int")
    pairs = ([_describe(key, path, tensors), _describe(item, (*path, key), tensors)] for key, item in value.items())
    return [_MAPPINGS[kind], *pairs]


def _build(node: Node, path: Path, data: Tensor) -> Any:
    """The value that a node describes."""
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{_place(path)} is more than {MAX_DEPTH} deep, which no state is")
    match node:
        case None | bool() | int() | float() | str():
            return node
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["float", "nan" | "inf" | "-inf" as name]:
            return float(name)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case ["tensor", str(dtype), [*shape], [*stride], offset, nbytes] if dtype in _DTYPES:
            numbers = (*shape, *stride, offset, nbytes)
            sizes = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            if not sizes or offset + nbytes > len(data) or not _fits(shape, stride, nbytes, _DTYPES[dtype].itemsize):
                raise ValueError(f"{_place(path)} is no tensor within {len(data)} bytes of data: {in_short(node)}")
            return data[offset : offset + nbytes].clone().view(_DTYPES[dtype]).as_strided(shape, stride)
        case ["list" | "tuple" as kind, *items]:
            built = [_build(item, (*path, index), data) for index, item in enumerate(items)]
            return built if kind == "list" else tuple(built)
        case ["dict" | "counter" as kind, *pairs] if all(type(pair) is list and len(pair) == 2 for pair in pairs):
            keys = [_build(key, path, data) for key, _ in pairs]
            if all(type(key) in (str, int) for key in keys) and len(set(keys)) == len(keys):
                values = (_build(item, (*path, key), data) for key, (_, item) in zip(keys, pairs, strict=True))
                mapping = dict(zip(keys, values, strict=True))
                return Counter(mapping) if kind == "counter" else mapping
    raise ValueError(f"{_place(path)} is described by {in_short(node)}, which is nothing that a state has")


def _fits(shape: list[int], stride: list[int], nbytes: int, itemsize: int) -> bool:
    """Whether the elements fill the bytes, each once: from the innermost dimension out, each steps over the last."""
    numel, reach = 1, 1
    for step, size in sorted(zip(stride, shape, strict=False)):
        if size > 1 and step != numel and nbytes:
            return False
        numel, reach = numel * size, reach * (size or 1)
    return len(shape) == len(stride) and numel * itemsize == nbytes and reach < 2**63  # also for an empty tensor


def _place(path: Path) -> str:
    """The place of a value as text, such as ``optimizer.state[3].exp_avg``."""
    plain = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path)
    return "".join(plain).removeprefix(".") or "the state"
