"""Where ranks of a sharded model wait for one another inside of their passes: in functions of torch, put in brackets.

FSDP2 gathers parameters before a unit and reduces gradients behind it; layers that are split over ranks wait where a
functional collective's result is used. On a device these calls queue kernels, and marks before and behind them are
apart by what the device waits there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from straggle import world
from straggle.observe.watch.job import units_of

Around: TypeAlias = Callable[[Callable[[], Any]], Any]


def bracket_waits(module: nn.Module, around: Around) -> list[Bracket]:
    """From here on each such function is called by ``around``, until the brackets are removed."""
    from torch.distributed import _functional_collectives

    places: list[tuple[Any, str]] = [(_functional_collectives, "wait_tensor")]
    if units := units_of(module):
        from straggle.source.fsdp2 import waits_of  # imports what FSDP2 does

        places += waits_of(units)
    return [Bracket(owner, name, around) for owner, name in places]


class Bracket:
    """Stands in the place of the attribute ``name`` of a module or an object, which it does not keep alive."""

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._around: Around | None = around
        self._process = world.process()
        self._before: Any = vars(owner).get(name)  # None: what its class has
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._before or getattr(type(self._owner()), self._name).__get__(self._owner())
        if self._around is None or torch.compiler.is_compiling() or world.process() != self._process:
            return call(*args, **kwargs)
        return self._around(lambda: call(*args, **kwargs))

    def remove(self) -> None:
        """Put back what was there; if another bracket stands around this one, let this one do nothing."""
        self._around = None
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return
        before = self._before
        while isinstance(before, Bracket) and before._around is None:  # it was removed earlier
            before = before._before
        if before is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, before)
