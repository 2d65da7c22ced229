"""Where a step's host reads a device's tensors back, counted on the CPU: a mode that follows tensors.

Tensors that are given to `HostReads` count as the device's, and so does all that is computed from them or is made with
``device=`` a `torch.device`; the host is the string "cpu", and what is made without a device. Threads without the mode,
such as the stand-in, are not followed.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from straggle.merge.round.memory import PlainNumbers

_UNIQUE = {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
_DATA_DEPENDENT = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount", *_UNIQUE}


class HostReads(TorchDispatchMode):
    """In its block each wait of the host for a tensor of the device is in ``reads``: its kind, and the calls that led
    there, innermost first.
    """

    _open: ClassVar[list[HostReads]] = []

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.reads: list[str] = []
        self._device, self._host = set[StorageWeakRef](), set[StorageWeakRef]()
        self._patches = contextlib.ExitStack()
        self.add(tensors)

    def __enter__(self) -> HostReads:
        assert not self._open, "its patches are the process's: ranks that use it have one each (run_forked)"
        self._open.append(self)
        super().__enter__()
        for owner, names, noted in self._calls():
            for name in names:
                self._patches.enter_context(patch.object(owner, name, noted(getattr(owner, name))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)
        self._open.remove(self)

    def add(self, tensors: Iterable[Any], *, on_host: bool = False) -> None:
        """These are the device's, or the host's, from here on."""
        refs = {_storage(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
        (self._host if on_host else self._device).update(refs)
        (self._device if on_host else self._host).difference_update(refs)

    def has(self, tensor: Any) -> bool:
        """Whether it is the device's."""
        return isinstance(tensor, Tensor) and _storage(tensor) in self._device

    def is_of_host(self, tensor: Any) -> bool:
        """Whether the host made it in the block; of what is older, and not the device's, that is not known."""
        return isinstance(tensor, Tensor) and _storage(tensor) in self._host

    def note(self, kind: str) -> None:
        stack = [one for one in traceback.extract_stack() if "torch" not in one.filename and one.filename != __file__]
        where = " < ".join(f"{one.filename.rpartition('/')[2]}:{one.lineno} {one.name}" for one in stack[:-7:-1])
        self.reads.append(f"{kind}: {where}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func._schema.name.partition("::")[2], tree_leaves((args, kwargs))
        on_device = any(map(self.has, given))
        if on_device and (kind := self._wait(name, args, kwargs)):
            self.note(kind)
        result = func(*args, **kwargs)
        if on_device and not (name == "copy_" and self.is_of_host(args[0])):
            pairs = zip(args, func._schema.arguments, strict=False)
            written = [own for own, how in pairs if how.alias_info and how.alias_info.is_write]
            self.add(tree_leaves((result, written)))
        elif not any(isinstance(one, Tensor) for one in given):
            self.add(tree_leaves(result), on_host=True)
        return result

    def _wait(self, name: str, args: Any, kwargs: Any) -> str:
        """The kind of the wait that this operation is for the host; empty: it is none."""
        if name in _DATA_DEPENDENT or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return name if self.has(args[0]) else ""
        if name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            return "copy to the host" * self.is_of_host(args[0]) or "copy to the device" * self.is_of_host(args[1])
        if name in ("index", "index_put_", "_index_put_impl_"):
            return f"{name} by a mask" * any(self.has(one) and one.dtype is torch.bool for one in args[1])
        return ""

    # -- what the dispatcher does not see: calls that read memory by themselves, or name a device

    def _calls(self) -> Iterable[tuple[Any, Iterable[str], Callable[[Any], Any]]]:
        yield PlainNumbers, ("copy", "tolist"), partial(self._reading, tensor_of=attrgetter("_tensor"))
        yield Tensor, ("tolist", "numpy", "__array__", "data_ptr"), self._reading
        yield Tensor, ("to", "cpu"), self._moving
        yield torch, ("zeros", "ones", "full", "empty", "arange", "tensor", "as_tensor"), self._making

    def _reading(self, method: Any, tensor_of: Callable[[Any], Tensor] = lambda tensor: tensor) -> Any:
        def noted(one: Any, *args: Any, **kwargs: Any) -> Any:
            if self.has(tensor_of(one)) and (method.__name__ != "data_ptr" or _makes_memory(sys._getframe(1))):
                self.note(method.__name__)
            return method(one, *args, **kwargs)

        return noted

    def _moving(self, method: Any) -> Any:
        def noted(tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Any:
            result = method(tensor, *args, **kwargs)
            given = (*args, *kwargs.values())
            to_host = method.__name__ == "cpu" or any(isinstance(one, str) and one == "cpu" for one in given)
            if to_host and self.has(tensor):
                self.note(method.__name__)
                self.add([result := result.detach().clone()], on_host=True)
            elif not to_host and self.is_of_host(tensor) and any(isinstance(one, torch.device) for one in given):
                self._to_device(result, blocks=not non_blocking)
            return result

        return noted

    def _making(self, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(kwargs.get("device"), torch.device):
                self._to_device(result, blocks=function.__name__ in ("tensor", "as_tensor"))
            elif function.__name__ == "tensor":
                # of what Python has; the dispatcher sees a tensor that is there already
                self.add([result], on_host=True)
            return result

        return noted

    def _to_device(self, made: Tensor, *, blocks: bool) -> None:
        self.add([made])
        if blocks:
            self.note("copy to the device")


def _makes_memory(frame: Any) -> bool:
    """Whether the line of a call reads there: an address by itself is no read, and `PlainNumbers` reads later."""
    called = traceback.extract_stack(frame, 1)[0]
    return "from_address" in (called.line or "") and not called.filename.endswith("merge/round/memory.py")


def _storage(tensor: Tensor) -> StorageWeakRef:
    with _disable_current_modes():
        return StorageWeakRef(tensor.untyped_storage())
