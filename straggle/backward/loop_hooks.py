"""Where a loop loads data, and where it waits for other ranks in collectives of its own: calls of torch, in brackets.

torch has no hooks there. The brackets stand in its classes as long as somebody wants to know, and let the calls of
other threads through.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeAlias

from torch import distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as _dataloader

Around: TypeAlias = Callable[[Callable[[], Any]], Any]
_OURS = __name__.partition(".")[0]


def around_loads(around: Around) -> list[CallBracket]:
    """Have a ``DataLoader`` of this thread begin an epoch, and fetch a batch, by ``around``, until they are removed."""
    places = (DataLoader, "__iter__"), (_dataloader._BaseDataLoaderIter, "__next__")
    return [CallBracket(owner, name, around) for owner, name in places]


def around_collectives(around: Around) -> list[CallBracket]:
    """Have this thread wait by ``around`` for collectives of others than straggle, until they are removed."""
    return [CallBracket(dist.Work, "wait", around)] if dist.is_available() else []


class CallBracket:
    """A class's method is called by ``around`` on this thread, unless by straggle, or inside of another such call."""

    def __init__(self, owner: type, name: str, around: Around) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._thread, self._inside = threading.get_ident(), False
        self.before: Any = getattr(owner, name)
        self.removed = False

        @wraps(self.before)
        def bracketed(own: Any, *args: Any, **words: Any) -> Any:
            call = partial(self.before, own, *args, **words)
            return self._call(call) if self._counts(sys._getframe(1).f_globals) else call()

        bracketed.__dict__["bracket"] = self
        self._bracketed = bracketed
        setattr(owner, name, bracketed)

    def remove(self) -> None:
        """Put back what was there; if another bracket stands around this one, let this one do nothing."""
        self.removed = True
        if getattr(self._owner, self._name) is not self._bracketed:
            return
        before = self.before
        while (bracket := getattr(before, "bracket", None)) is not None and bracket.removed:
            before = bracket.before
        setattr(self._owner, self._name, before)

    def _counts(self, caller: dict[str, Any]) -> bool:
        if self.removed or self._inside or threading.get_ident() != self._thread:
            return False
        return str(caller.get("__name__", "")).partition(".")[0] != _OURS

    def _call(self, call: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return self._around(call)
        finally:
            self._inside = False
