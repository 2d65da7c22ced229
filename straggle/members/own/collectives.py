"""What each collective of `torch.distributed` does among those that are there, and on a rank that is no member.

Results come into tensors of its own, and into the caller's when they are certain: gloo cannot abort a collective, and
one that was given up may write for a long time; and a tensor that is as it was can be given again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from straggle import world
from straggle.members.own.participants import Number, Ranks


class Place(NamedTuple):
    """A rank's ``own`` place among ``size`` ranks, and that of the ``root``, if the collective has one."""

    own: int
    size: int
    root: int = -1


class Begun(NamedTuple):
    """What was launched, and pairs of what comes and where it goes. ``misfits``: how many ranks cannot take part."""

    works: Sequence[dist.Work]
    results: Sequence[tuple[Tensor, Tensor]]
    misfits: Tensor | None = None


@dataclass(frozen=True)
class Collective:
    """One call of a collective, with its tensors.

    ``begin(group, place)`` launches it in a gloo group. ``fits(size)``: whether its tensors are for so many ranks, as
    far as this rank has them. ``root``: the place of its source or destination, among the ranks that it was called for.
    ``alone(place)`` writes what comes if all ranks have what this one has; false if that is not known.
    """

    name: str
    begin: Callable[[Any, Place], Begun]
    alone: Callable[[Place], bool]
    fits: Callable[[int], bool] = field(default=lambda _: True)
    root: int = -1


class Key(NamedTuple):
    """Which group: of which generation, and of which ranks."""

    generation: int
    ranks: tuple[int, ...]


class Attempt(NamedTuple):
    """A collective that was launched among these ranks; ``last`` is over when it is, on all of them."""

    key: Key
    begun: Begun
    last: dist.Work
    fits: bool


class Call:
    """One collective of the loop: when it was called, for whom, and what has become of it."""

    def __init__(self, collective: Collective, number: Number, ranks: Ranks | None) -> None:
        self.collective, self.number, self.ranks = collective, number, ranks
        self.attempt: Attempt | None = None
        self.is_over = False
        self.error: BaseException | None = None
        self.is_taken = False  # the caller has its results, or its error

    @property
    def before(self) -> tuple[int, ...]:
        """The ranks that it was called for."""
        return tuple(rank for rank, _ in self.ranks or ())

    def launched(self, attempt: Attempt) -> None:
        """It is on its way among the ranks of ``attempt``."""
        self.attempt = attempt

    def given_up(self) -> None:
        """Its attempt is of members that have changed: it is made again, or not any more."""
        self.attempt = None

    def ended(self, error: BaseException | None = None) -> None:
        """It is over, on all ranks or with this error."""
        self.is_over, self.error = True, error

    def take(self) -> Attempt | None:
        """The caller takes what came, once: what is there for it."""
        self.is_taken = True
        return self.attempt

    def taken(self, error: BaseException | None) -> None:
        """The results are where they belong, unless there is an error; what it was made in is free."""
        self.error, self.attempt = error, None


def all_reduce(tensors: Sequence[Tensor], options: Any) -> Collective:
    """Of all ranks, in place."""

    def begin(group: Any, _: Place) -> Begun:
        own = _copies(tensors)
        return Begun([group.allreduce(own, options)], _pairs(own, tensors))

    return Collective("all_reduce", begin, lambda place: _as_if_all(tensors, options, place.size))


def reduce(tensors: Sequence[Tensor], options: Any) -> Collective:
    """Of all ranks, on one."""

    def begin(group: Any, place: Place) -> Begun:
        own = _copies(tensors)
        work = group.reduce(own, _at(place, options))
        return Begun([work], _pairs(own, tensors) if place.own == place.root else [])

    def alone(place: Place) -> bool:
        return place.own != place.root or _as_if_all(tensors, options, place.size)

    return Collective("reduce", begin, alone, root=options.rootRank)


def broadcast(tensors: Sequence[Tensor], options: Any) -> Collective:
    """That of one rank."""

    def begin(group: Any, place: Place) -> Begun:
        own = _copies(tensors)
        return Begun(
            [group.broadcast(own, _at(place, options))], _pairs(own, tensors) if place.own != place.root else []
        )

    return Collective("broadcast", begin, lambda place: place.own == place.root, root=options.rootRank)


def all_gather(outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Collective:
    """For each of these tensors, that of each rank in one of its outputs."""

    def begin(group: Any, _: Place) -> Begun:
        came = [[torch.empty_like(to) for to in own] for own in outputs]
        works = [group.allgather([own], [tensor]) for own, tensor in zip(came, tensors, strict=True)]
        return Begun(works, [pair for own, to in zip(came, outputs, strict=True) for pair in _pairs(own, to)])

    def alone(_: Place) -> bool:
        for own, tensor in zip(outputs, tensors, strict=True):
            for to in own:
                to.copy_(tensor)
        return True

    return Collective("all_gather", begin, alone, lambda size: all(len(own) == size for own in outputs))


def all_gather_single(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Collective:
    """The same, one after the other in one output each."""
    return all_gather([_parts(output, tensor) for output, tensor in zip(outputs, tensors, strict=True)], tensors)


def reduce_scatter(outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], options: Any) -> Collective:
    """For each of these outputs, the sum of the parts that all ranks have for this one's place."""
    of_sum = world.dist.AllreduceOptions()
    of_sum.reduceOp = options.reduceOp

    def begin(group: Any, place: Place) -> Begun:
        # by a sum of all parts, as gloo itself does it
        flats = [torch.cat([part.detach().reshape(-1) for part in own]) for own in parts]
        works = [group.allreduce([flat], of_sum) for flat in flats]
        sums = [
            torch.split(flat, [part.numel() for part in own])[place.own] for flat, own in zip(flats, parts, strict=True)
        ]
        return Begun(works, [(own.view_as(to), to) for own, to in zip(sums, outputs, strict=True)])

    def alone(place: Place) -> bool:
        for to, own in zip(outputs, parts, strict=True):
            to.copy_(own[min(place.own, len(own) - 1)].view_as(to))
        return _as_if_all(outputs, options, place.size)

    return Collective("reduce_scatter", begin, alone, lambda size: all(len(own) == size for own in parts))


def reduce_scatter_single(outputs: Sequence[Tensor], tensors: Sequence[Tensor], options: Any) -> Collective:
    """The same, of parts one after the other in one tensor each."""
    parts = [_parts(tensor, output) for output, tensor in zip(outputs, tensors, strict=True)]
    return reduce_scatter(outputs, parts, options)


def gather(outputs: Sequence[Sequence[Tensor]], tensor: Tensor, options: Any) -> Collective:
    """That of each rank, on one."""
    to = list(outputs[0]) if outputs else []

    def begin(group: Any, place: Place) -> Begun:
        came = [torch.empty_like(tensor) for _ in range(place.size)] if place.own == place.root else []
        work = group.gather([came] if came else [], [tensor], _at(place, options))
        misfits = torch.tensor([int(bool(came) and len(to) != place.size)])
        return Begun([work, group.allreduce([misfits])], list(zip(came, to, strict=False)), misfits)

    def alone(place: Place) -> bool:
        for own in to if place.own == place.root else ():
            own.copy_(tensor)
        return True

    return Collective("gather", begin, alone, root=options.rootRank)


def scatter(output: Tensor, parts: Sequence[Sequence[Tensor]], options: Any) -> Collective:
    """What one rank has for each place."""
    given = list(parts[0]) if parts else []

    def begin(group: Any, place: Place) -> Begun:
        gives = place.own == place.root
        misfits = torch.tensor([int(gives and len(given) != place.size)])
        # whoever gives too few gives something all the same: nobody else knows of that before
        sent = given if len(given) == place.size else [torch.zeros_like(output) for _ in range(place.size)]
        own = torch.empty_like(output)
        work = group.scatter([own], [sent] if gives else [], _at(place, options))
        return Begun([work, group.allreduce([misfits])], [(own, output)], misfits)

    def alone(place: Place) -> bool:
        if place.own == place.root:
            output.copy_(given[min(place.own, len(given) - 1)])
        return place.own == place.root

    return Collective("scatter", begin, alone, root=options.rootRank)


def all_to_all_single(output: Tensor, tensor: Tensor, to: Sequence[int], of: Sequence[int], options: Any) -> Collective:
    """What each rank has for this one. ``to``, ``of``: rows of each in output and input, if they are not all equal."""

    def begin(group: Any, _: Place) -> Begun:
        came = torch.empty_like(output)
        return Begun([group.alltoall_base(came, tensor, list(to), list(of), options)], [(came, output)])

    def fits(size: int) -> bool:
        rows = output.shape[0] if output.dim() else 0
        return len(to) == len(of) == size if to and of else rows % size == 0

    return Collective("all_to_all", begin, lambda _: False, fits)


def barrier() -> Collective:
    """Ends when all ranks have come to it."""
    return Collective("barrier", lambda _group, _place: Begun([], []), lambda _: True)


def _at(place: Place, options: Any) -> Any:
    """The options, with the root where it is among those that are there."""
    options.rootRank = place.root
    return options


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _pairs(came: Sequence[Tensor], to: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(came, to, strict=True))


def _parts(whole: Tensor, part: Tensor) -> list[Tensor]:
    """A tensor in parts of this shape, as views; what is left over is one more, so that it fits no number of ranks."""
    if not part.numel():
        return list(whole.chunk(max(1, whole.shape[0])))
    return [
        own.view_as(part) if own.numel() == part.numel() else own for own in torch.split(whole.view(-1), part.numel())
    ]


def _as_if_all(tensors: Sequence[Tensor], options: Any, size: int) -> bool:
    """Reduce as if so many ranks had these."""
    by = options.reduceOp.op.name
    ways: dict[str, Callable[[Tensor], object]] = {
        "SUM": lambda tensor: tensor.mul_(size),
        "PRODUCT": lambda tensor: tensor.pow_(size),
        "BXOR": lambda tensor: tensor.mul_(size % 2),
    }
    for tensor in tensors:
        ways.get(by, partial(torch.clone))(tensor)
    return True
