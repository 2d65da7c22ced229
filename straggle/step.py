"""`Step`: the passes of one optimizer step, as a block or begun and ended by calls; `Pause`: time outside of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from straggle.backward.compiled import not_compiled
from straggle.backward.hooks import DeadlineReached
from straggle.merge.checks import check_weight
from straggle.merge.round.coordinator import Coordinator
from straggle.merge.rows.telemetry import MAX_SCALARS, ScalarNames
from straggle.merge.wing import Departure
from straggle.policies.deadline import check_count
from straggle.policies.shares.cost import check_cost, relative_costs

Part = TypeVar("Part")
LOG_AFTER_MERGE = (
    "step.log() after the loop over step.pull(seed=...): the step is merged by then; call it inside of that loop"
)
SEED_BESIDE_OPTIMIZER = (
    "step.pull(seed=...) in model.step(optimizer=...): parameters would be stepped before it is known whether the step "
    "is to be made again; leave out optimizer=, and call optimizer.step() after the block"
)


class Step:
    """One optimizer step, as a context manager: leaving it merges the gradients of all ranks.

    In a loop of a framework, use calls instead: `begin`, a `microbatch` around each forward and backward pass, and
    `end`. If this rank is late, the rest of its micro-batches end at their first forward pass.

    Made by `StagedDataParallel.step`. ``enter`` and ``leave`` are called at the two ends of its block; ``leave``
    returns whether the error, if any, was only the deadline. ``release`` frees the memory of a pass that was left late.
    ``optimizer`` is stepped as the gradients are merged. ``draw(weights, costs, seed)`` yields the numbers of this
    rank's micro-batches, of shared ones with these weights, each with those after it. ``expect`` is called with the
    number of passes of an open step. ``departure``: how this rank may end before the others, if it may.
    """

    def __init__(
        self,
        num_microbatches: int,
        coordinator: Coordinator,
        names: ScalarNames,
        *,
        enter: Callable[[Step], None],
        leave: Callable[[Step, BaseException | None], bool],
        release: Callable[[DeadlineReached], None],
        draw: Callable[[tuple[float, ...], tuple[float, ...], int | None], Generator[tuple[int, Sequence[int]]]],
        expect: Callable[[int], None],
        optimizer: Optimizer | None = None,
        departure: Departure | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._names = names
        self._enter, self._leave, self._release = enter, leave, release
        self._draw, self._expect = draw, expect
        self._is_open = self._pulls = False
        self._drawn: Generator[tuple[int, Sequence[int]]] | None = None
        self._num_microbatches = num_microbatches
        self.optimizer, self.departure = optimizer, departure
        self.scalars: dict[str, float] = {}
        self.on_device: dict[str, Tensor] = {}  # scalars that the host does not wait for
        self._is_merged = False  # inside of the block
        self.late = False  # whether this rank has been stopped in this step so far
        self.between = False  # between two calls of `microbatch`, where the model's passes belong to no step
        # as the loop has set them, in the block or before it
        self._weight: float | None = None
        self._cost: float | None = None

    @not_compiled
    def begin(self) -> Step:
        """Enter the step. Raises ``RuntimeError`` if this or another step is open."""
        self._enter(self)
        self._is_open = True
        try:
            if self._weight is not None:
                self._coordinator.weigh(self._weight)
            if self._cost is not None:
                self._coordinator.set_cost(self._cost)
        except BaseException as error:  # a ``with`` statement does not leave what it could not enter
            self.end(error)
            raise
        return self

    @not_compiled
    def end(self, error: BaseException | None = None) -> bool:
        """Merge; every ``p.grad`` then holds the same merged gradient on every rank.

        ``error``: what the step's passes raised. It is reported to the peers, and the caller must raise it again.
        Returns true if it was only the deadline, so that there is nothing to raise. A step that has ended with an error
        is not ended again. Raises `PeerFailed` as leaving the block does.
        """
        if not self._is_open:
            return False
        self._is_open = False
        if self._drawn is not None:
            self._drawn.close()
        return self._leave(self, error)

    def pull(
        self,
        parts: Sequence[Part],
        *,
        weights: Sequence[float] | None = None,
        costs: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> Iterator[Part]:
        """The step's micro-batches that this rank has time for: ``for x, y in step.pull(parts)``.

        ``parts``: all micro-batches of the step, the same on every rank; only those that this rank computes are
        accessed. Each has one forward and backward pass, and the loss is its own mean. The merged gradient is the mean
        over all of them, by ``weights`` (such as their numbers of samples or tokens; default: ``parts.weights`` if it
        exists, as in `MicroBatches`, or else equal weights), whichever rank computed which. A rank for which nothing is
        left has an empty loop.

        ``costs``: what each micro-batch takes, in any unit, such as its tokens, the same on every rank (default:
        ``parts.costs`` if it exists, or else all take as long as each other). The longest are computed first, so that
        what is left at the end is small.

        ``seed``: a number of this step, the same on every rank. Torch's random numbers in a micro-batch then follow
        from it and from the micro-batch's number alone, and a step that has lost micro-batches with a rank is made
        again in the same block, by those that are left.

        A sharded replica draws as one, and ``parts`` are each rank's own parts of the micro-batches. Raises
        ``ValueError``, on all of its ranks, if they have not as many, with equal weights, costs and seed.

        Raises ``ValueError`` for invalid parts, weights, costs or seed, and ``RuntimeError`` outside of the block, for
        a second call in it, and together with ``num_microbatches`` or ``step.weight``, or a ``seed`` with
        ``step(optimizer=...)``.
        """
        weights = getattr(parts, "weights", None) if weights is None else weights
        own = tuple(map(float, weights)) if weights is not None else (1.0,) * len(parts)
        self._check_pull(len(parts), own)
        costs = getattr(parts, "costs", None) if costs is None else costs
        of_mean = () if costs is None else relative_costs(costs, len(parts))
        if seed is not None:
            check_count("step.pull: seed", seed)
            if self.optimizer is not None:
                raise RuntimeError(SEED_BESIDE_OPTIMIZER)
        self._pulls = True
        self._drawn = self._draw(own, of_mean, seed)
        return self._looked_up(parts, self._drawn)

    def _looked_up(self, parts: Sequence[Part], numbers: Iterator[tuple[int, Sequence[int]]]) -> Iterator[Part]:
        prefetch: Callable[[int], None] | None = getattr(parts, "prefetch", None)
        num_ahead: int = getattr(parts, "num_ahead", 1)
        for number, ahead in numbers:
            if prefetch is not None and num_ahead > 1:  # several threads load it while this rank waits
                prefetch(number)
            part = parts[number]
            if prefetch is not None:
                for later in ahead[:num_ahead]:
                    prefetch(later)
            yield part

    def _check_pull(self, num_parts: int, weights: tuple[float, ...]) -> None:
        if not num_parts:
            raise ValueError("step.pull(parts): there are no micro-batches; a step has at least one")
        if len(weights) != num_parts or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(
                f"step.pull(weights=...): {num_parts} micro-batches need as many positive weights, such as samples"
            )
        if not self._is_open or self._pulls:
            raise RuntimeError("step.pull() comes inside of `with model.step() as step:`, once in each step")
        if self.num_microbatches != 1 or self.weight != 1.0:
            raise RuntimeError(
                "step.pull() counts the backward passes and weighs them: leave out num_microbatches=... and "
                "step.weight, and give step.pull(parts, weights=...)"
            )

    def microbatch(self) -> Microbatch:
        """A context manager for one forward and backward pass; if this rank is late, it ends the pass and goes on."""
        if not self._is_open:
            raise RuntimeError("this step is not open: begin() it, or use it as `with model.step()`")
        return Microbatch(self)

    @not_compiled
    def enter_microbatch(self) -> None:
        """A pass begins: what the model computes belongs to the step again."""
        self.between = False

    def merged(self) -> None:
        """It is merged, and its block is open still."""
        self._is_merged = True

    def has_passes(self, number: int) -> None:
        """The step has so many, which no loop has announced: they are drawn."""
        self._num_microbatches = number

    def end_microbatch(self, error: BaseException | None) -> bool:
        """End a pass, with its error if any; true if that was only the deadline. Any other error ends the step."""
        self.between = True
        if isinstance(error, DeadlineReached):
            self.late = True
            self._release(error)
            return True
        return False if error is None else self.end(error)

    __enter__ = begin

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return self.end(error)

    @property
    def num_microbatches(self) -> int:
        """How many backward passes the step has. A loop may set it until the last pass begins.

        Raises ``ValueError`` for fewer passes than have begun, and ``RuntimeError`` if all of them have.
        """
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, number: int) -> None:
        if self._is_open and number != self._num_microbatches:
            self._expect(number)
        self._num_microbatches = number

    @property
    def weight(self) -> float:
        """The weight of this rank's step in the merge, such as its number of samples or tokens; 1 if not set.

        Set it before the first backward pass. The loss is still this rank's own mean.
        """
        return 1.0 if self._weight is None else self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if self._pulls:
            raise RuntimeError("step.weight beside step.pull(): give step.pull(parts, weights=...)")
        check_weight(weight)
        if self._is_open:
            self._coordinator.weigh(weight)
        self._weight = weight

    def weigh_if_unset(self, weight: float) -> None:
        """The step begins: this is its weight, unless one was set before it."""
        if self._weight is None:
            self.weight = weight

    @property
    def cost(self) -> float:
        """Expected compute of this rank's step, in any unit, such as tokens; NaN if not set.

        Set it before the block, or as soon as that begins. A step's seconds should be in proportion to it: a rank's
        deadline is scaled by its cost over the mean cost, and its times are scaled to those of a step of the mean cost.
        The default cost is the number of micro-batches, unless work is dealt out by speed.
        """
        return math.nan if self._cost is None else self._cost

    @cost.setter
    def cost(self, cost: float) -> None:
        check_cost(cost)
        if self._is_open:
            self._coordinator.set_cost(cost)
        self._cost = cost

    def log(self, **scalars: float | Tensor) -> None:
        """Scalars that ride along with the merge; `StepReport.scalars` has the means over ranks that gave them.

        Of a name that is logged again, as in each micro-batch, the last value counts: log the mean so far. At most 8
        in a step of each rank (in a sharded job of all ranks: what is more is left out). The names may differ between
        ranks: every rank's report has them all. A tensor on a device is not waited for: its value is in the report of
        the next step (`StepReport.counts_behind`), and until then it is NaN. Raises ``RuntimeError`` after the loop
        over `pull` with a ``seed``.
        """
        if self._is_merged:
            raise RuntimeError(LOG_AFTER_MERGE)
        for name, value in scalars.items():
            if isinstance(value, Tensor) and self.leaves_on_device(value):
                self.on_device[name] = _copied(value)
                self.scalars.pop(name, None)
            else:
                self.scalars[name] = float(value.detach() if isinstance(value, Tensor) else value)
                self.on_device.pop(name, None)
        if (number := len(self.scalars) + len(self.on_device)) > MAX_SCALARS:
            raise ValueError(f"{number} scalars in one step: at most {MAX_SCALARS}")
        self._names.log(scalars)

    def leaves_on_device(self, value: Tensor) -> bool:
        """Whether the value of this scalar comes in a later report, because the host would wait for its device."""
        return self._coordinator.leaves_on_device(value)

    def stop(self) -> None:
        """Stop this rank's pass at its next stage, as if its deadline were over; from any thread."""
        self._coordinator.training.stop()


def _copied(value: Tensor) -> Tensor:
    """One number on a device as it is now: the loop may go on to change it, and it may be one of several ranks."""
    own = value.detach()
    if (gather := getattr(own, "full_tensor", None)) is not None:
        own = gather()
    return own.reshape(()).to(torch.float32, copy=True)


@final
class Microbatch:
    """One forward and backward pass of a step: ``with step.microbatch(): ...``."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __enter__(self) -> Step:
        self._step.enter_microbatch()
        return self._step

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return self._step.end_microbatch(error)


@final
class Pause:
    """Time between two steps that belongs to none; see `StagedDataParallel.pause`."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        """Do nothing: the pause has begun already."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._end()
