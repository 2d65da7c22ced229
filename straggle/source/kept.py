"""Gradients that the loop did not zero: the merged gradients are added to them, as with DDP.

They are known when the first backward pass of a step begins: until then a loop may still zero them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from torch import Tensor

from straggle.backward.hooks import HasGradient, put_gradients, take_gradient
from straggle.backward.passes import SeenGradients

UNDECIDED, NONE = -1, 0


class KeptGradients:
    """The gradients in ``p.grad`` of these parameters, from entering a step until its first backward pass begins.

    They lie in the buffers of the step before, which must not be used again before `decide`: ``merged`` are those of
    that step. Others were put there by the loop, which may be other ones on each rank: they count as if it had done so
    in the block. ``is_queued``: they are on a device that the host does not wait for, to see which of those that the
    loop wrote to are zeros.
    """

    def __init__(
        self, parameters: Sequence[HasGradient], merged: Sequence[Tensor | None] = (), *, is_queued: bool = False
    ) -> None:
        self._parameters, self._is_queued = parameters, is_queued
        there = zip(count(), (parameter.grad for parameter in parameters), merged, strict=False)
        self._entered = SeenGradients((index, gradient) for index, gradient, own in there if gradient is own)
        self._aside: dict[int, Tensor] | None = None
        self._unseen: dict[int, tuple[Tensor, Tensor]] = {}  # copies that may be zeros, and what they are copies of
        self.was_open = bool(self._entered)  # there was something to decide
        self.decided = not self.was_open
        self.gradients: dict[int, Tensor] = {}

    @property
    def mark(self) -> int:
        """A number for the set of kept gradients, exact in float32; `UNDECIDED` before it is known."""
        return mark_of(self.gradients) if self.decided else UNDECIDED

    def of_last_step(self) -> dict[int, Tensor]:
        """On entering: those that are still there of the step before, and may be kept."""
        there = ((index, parameter.grad) for index, parameter in enumerate(self._parameters))
        return {index: own for index, own in there if own is not None and self._entered.was_there(index, own)}

    def exchange(self, given: Mapping[int, Tensor]) -> list[Tensor | None]:
        """On entering: a peer's take the place of those `of_last_step`; as ``merged`` for the next one of these."""
        for index in self.of_last_step():
            take_gradient(self._parameters[index])
        self._put(given)
        return [own.grad if index in given else None for index, own in enumerate(self._parameters)]

    def set_aside(self) -> None:
        """A backward pass begins: the gradients present now are kept, if the pass has one for any parameter."""
        if not self.decided and self._aside is None:
            self._aside = self._take(looks=not self._is_queued)

    def put_back(self, put: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Undo `set_aside`, and `take_put`: the pass had no gradient, and the loop may still zero those present."""
        self._put(self._aside or {})
        self._put(put)
        self._put({index: own for index, (copy, own) in self._unseen.items() if self._parameters[index].grad is copy})
        self._aside, self._unseen = None, {}

    def decide(self, first: int) -> bool:
        """Parameter ``first`` is the first with a gradient in this step; false if that is not a new gradient.

        Raises ``RuntimeError`` if it was added to a gradient that may have been kept or zeroed.
        """
        if self._aside is None:  # the pass did not come through the model's output
            parameter = self._parameters[first]
            own = parameter.grad
            if own is None and not self._entered.had(first):
                return False
            if own is not None and self._entered.was_there(first, own):
                if self._entered.is_as_it_was(first, own):  # the pass has no gradient for it
                    return False
                raise RuntimeError(
                    "a backward pass that was not seen to come through the output of model(...) added to a gradient "
                    "that was there before: call the wrapped model itself, with tensors, tuples, lists, mappings or "
                    "dataclasses as its output, or zero_grad(set_to_none=True) before the block"
                )
            # out of the way: it is the pass's own, and must not count as one that was there before
            take_gradient(parameter)
            self._aside = self._take(looks=not self._is_queued)
            put_gradients([(parameter, own)])
        # a gradient that was zeroed in place is not kept, as if it had been set to None
        self._settle({index: grad for index, grad in self._aside.items() if self._entered.is_as_it_was(index, grad)})
        return True

    def take_put(self) -> dict[int, Tensor]:
        """A backward pass begins, and others are set aside: take those that the loop has put there before it."""
        there = self._take_all()
        self._put({index: there.pop(index) for index in self._unseen.keys() & there.keys()})
        return there

    def put_by_loop(self, is_whole: Callable[[int], bool] | None = None) -> dict[int, Tensor]:
        """At the end of the step, take the gradients in ``p.grad`` that the loop, not a backward pass, has put there.

        If there was no backward pass and the loop has put or changed any gradient, all gradients present are this
        rank's own, as they would be without a merge: none is kept.

        ``is_whole``: the step was cut before its first backward pass. Only what the loop has put there so far is the
        rank's own then, but for what is not whole, because a pass would have added to it: that is dropped. What is
        kept of the rest is still to be decided, as the peers do.
        """
        if self.decided:
            return {index: own for index, own in self._take_all().items() if not self._is_unseen_zero(index, own)}
        self.put_back()
        aside = self._take(looks=True)
        by_loop = self._take_all()
        if is_whole is not None:
            by_loop = {index: own for index, own in by_loop.items() if is_whole(index)}
        self._put(aside)
        if not by_loop or is_whole is not None:
            return by_loop
        copies = {index: gradient.detach().clone() for index, gradient in self._take_all().items()}
        self._settle({})
        return by_loop | copies

    def follow(self, decision: int, last: Iterable[int]) -> bool:
        """This rank had no backward pass, and keeps the gradients that its peers kept: ``decision`` is their `mark`.

        ``last``: those that this rank itself kept when it last decided. False if it cannot know which ones they kept.
        """
        self.put_back()
        there = self._take(looks=True)
        for choice in ([], list(there), [index for index in last if index in there]):
            if mark_of(choice) == decision:
                self._settle({index: there[index] for index in choice})
                return True
        self._settle(there)
        return False

    def drop_decided(self) -> None:
        """What this rank has decided to keep is not kept: no peer knows of it, and they keep none."""
        if self.decided:
            self.gradients = {}

    def _take(self, *, looks: bool) -> dict[int, Tensor]:
        """Take the gradients that are as they were on entering, or were zeroed in place since.

        A gradient that the loop has put there or written to is this rank's own, such as that of a penalty. It stays, as
        a copy outside of the buffers of the step before: the pass adds to it, and it is merged. So do zeros if this
        does not look: the sum is the same, and what is left of them if no pass adds to them is found at the end.
        """
        aside = {}
        for index, parameter in enumerate(self._parameters):
            if (gradient := parameter.grad) is None:
                continue
            was_entered = self._entered.was_there(index, gradient)
            if self._entered.is_as_it_was(index, gradient) or (looks and was_entered and not gradient.any()):
                take_gradient(parameter)
                aside[index] = gradient
            elif was_entered:
                copy = gradient.detach().clone()
                put_gradients([(parameter, copy)])
                if not looks:
                    self._unseen[index] = copy, gradient
        return aside

    def _is_unseen_zero(self, index: int, own: Tensor) -> bool:
        """Whether it was zeroed in place before the pass, which had no gradient for it."""
        return own is self._unseen.get(index, (None,))[0] and not own.any()

    def _take_all(self) -> dict[int, Tensor]:
        there = ((index, take_gradient(parameter)) for index, parameter in enumerate(self._parameters))
        return {index: own for index, own in there if own is not None}

    def _put(self, gradients: Mapping[int, Tensor]) -> None:
        put_gradients((self._parameters[index], gradient) for index, gradient in gradients.items())

    def _settle(self, kept: dict[int, Tensor]) -> None:
        self.gradients = {index: gradient.detach().clone() for index, gradient in kept.items()}
        self.decided = True
        # references would keep the buffers of the step before from being used again
        self._entered, self._aside = SeenGradients(), None  # from here on the loop has the gradients


def mark_of(kept: Iterable[int]) -> int:
    """A number for a set of parameters, exact in float32; `NONE` for the empty set."""
    numbers = sorted(kept)
    if not numbers:
        return NONE
    content = repr(numbers).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=3).digest(), "big") | 1
