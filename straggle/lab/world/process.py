"""What is once in a process, for processes that are threads of one: random numbers, clocks, hooks, who hears a log."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

from straggle import world
from straggle.lab.world.scheduler import Scheduler, Thread

_CLOCKS = ("time", "monotonic", "perf_counter")


class RandomNumbers:
    """The state of torch's generator, of each process; all begin with that of the caller."""

    def __init__(self) -> None:
        self._first = torch.get_rng_state()
        self._of: dict[int, torch.Tensor] = {}

    def switch(self, before: int, after: int) -> None:
        """A thread of another process runs from now on."""
        self._of[before] = torch.get_rng_state()
        torch.set_rng_state(self._of.get(after, self._first))


class HeldByProcess:
    """In the place of ``real``, a mapping of which each process of the world has its own, that ``make`` makes."""

    def __init__(self, real: Any, make: Callable[[], Any]) -> None:
        self._real, self._own = real, world.OfProcess(make)

    def _here(self) -> Any:
        return self._own.here if isinstance(threading.current_thread(), Thread) else self._real

    def __contains__(self, key: object) -> bool:
        return key in self._here()

    def __getitem__(self, key: Any) -> Any:
        return self._here()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._here()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._here()[key]

    def values(self) -> Iterable[Any]:
        """Those of the process whose thread asks."""
        found: Iterable[Any] = self._here().values()
        return found


def _in_world(own: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """What threads of the world have in the place of ``real``."""

    def chosen(*arguments: Any, **named: Any) -> Any:
        call = own if isinstance(threading.current_thread(), Thread) else real
        return call(*arguments, **named)

    return chosen


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    """A handler that a rank adds hears what is logged in its process alone."""
    if isinstance(threading.current_thread(), Thread):
        own = world.process()
        handler.addFilter(lambda _: world.process() == own)
    _real_add_handler(logger, handler)


class _OfProcess:
    """A filter that a rank adds to a logger: it is asked in its process alone."""

    def __init__(self, asked: Callable[[logging.LogRecord], Any]) -> None:
        self._own, self._asked = world.process(), asked

    def __call__(self, record: logging.LogRecord) -> Any:
        return world.process() != self._own or self._asked(record)

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._asked

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _logs_by_process() -> Iterator[None]:
    """What a rank adds to a logger hears of its process alone, and is gone with the world: a killed rank leaves it."""
    with ExitStack() as added:

        def add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
            _add_handler(logger, handler)
            if isinstance(threading.current_thread(), Thread):
                added.callback(logger.removeHandler, handler)

        def add_filter(logger: logging.Logger, asked: Any) -> None:
            if isinstance(threading.current_thread(), Thread):
                asked = _OfProcess(getattr(asked, "filter", asked))
                added.callback(logger.removeFilter, asked)
            logging.Filterer.addFilter(logger, asked)

        with patch.multiple(logging.Logger, addHandler=add_handler, addFilter=add_filter):
            yield


def _clock(scheduler: Scheduler) -> float:
    scheduler.switch()  # so that a loop which reads it until some time passes that time
    return scheduler.monotonic()


_real_add_handler = logging.Logger.addHandler


@contextmanager
def leaf_hooks_seen(see: Callable[[RemovableHandle], object]) -> Iterator[None]:
    """Tell of each hook of a tensor that is no result: it is there until it is removed."""

    def seen(register: Callable[[Tensor, Callable[..., Any]], RemovableHandle]) -> Callable[..., RemovableHandle]:
        def of_tensor(tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
            handle = register(tensor, hook)
            if tensor.is_leaf:
                see(handle)
            return handle

        return of_tensor

    names = ("register_hook", "register_post_accumulate_grad_hook")
    own: dict[str, Any] = {name: seen(getattr(Tensor, name)) for name in names}
    with patch.multiple(Tensor, **own):
        yield


@contextmanager
def entered(scheduler: Scheduler, handlers: dict[tuple[int, int], Callable[..., Any]]) -> Iterator[None]:
    """In this block a loop's own ``time.sleep`` and clocks are those of the world, and each rank hears its own log.

    So it has hooks of its own on all optimizers.

    ``handlers``: of signals, by process and signal; they are written here.
    """

    def get_handler(number: int) -> Any:
        return handlers.get((scheduler.check().process, number), signal.SIG_DFL)

    def set_handler(number: int, handler: Any) -> Any:
        before = get_handler(number)
        handlers[scheduler.check().process, number] = handler
        return before

    hooks: dict[str, Any] = {
        name: HeldByProcess(getattr(optimizer, name), dict)
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    }
    clocks: dict[str, Any] = {name: _in_world(partial(_clock, scheduler), getattr(time, name)) for name in _CLOCKS}
    with (
        patch.multiple(time, sleep=_in_world(scheduler.sleep, time.sleep), **clocks),
        patch.multiple(optimizer, **hooks),
        _logs_by_process(),
        patch.multiple(
            signal,
            signal=_in_world(set_handler, signal.signal),
            getsignal=_in_world(get_handler, signal.getsignal),
        ),
    ):
        yield
