"""The handler ``straggle_stuck`` of `torch.distributed.debug`'s server, where a job has started that."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

NAME = "straggle_stuck"
_MODULE = "torch.distributed.debug"


class DebugServer:
    """Answers ``POST /handler/straggle_stuck`` with ``described()`` as JSON, from when there is a server on.

    A process has one handler of a name: it answers for the last model.
    """

    def __init__(self, described: Callable[[], Mapping[str, object]]) -> None:
        self._described: Callable[[], Mapping[str, object]] | None = described
        self._offered = False

    def offer(self) -> None:
        """Register the handler, if a server runs in this process and it is not registered yet."""
        debug = sys.modules.get(_MODULE)
        if self._offered or getattr(debug, "_WORKER_SERVER", None) is None:
            return
        from torch._C import _distributed_c10d as c10d

        if (register := getattr(c10d, "_register_handler", None)) is not None:
            answer = self._answer
            # torch lets go of it when the process ends, without the GIL: if it were freed then, Python would abort
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))
            register(NAME, answer)
        self._offered = True

    def close(self) -> None:
        """Answer no more."""
        self._described = None

    def _answer(self, _request: Any, response: Any) -> None:
        described = self._described
        words = {"closed": True} if described is None else dict(described())
        response.set_content(json.dumps(words), "application/json")
        response.set_status(200)
