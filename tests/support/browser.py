"""A real Chromium for tests of pages: driven over a pipe by its DevTools protocol, without a further package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repository import ROOT

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_FLAGS = (ROOT / "docs" / "chromium.flags").read_text().split()
_DRAWN = "document.documentElement.dataset.drawn || document.querySelector('#problem:not([hidden])')"


class Page:
    """A page that was opened; ``problems`` are its console errors, exceptions and refused or failed loads."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._session = 0, None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, drawn: str = _DRAWN) -> None:
        """Load a page, and wait until its charts are drawn: until the JavaScript of ``drawn`` is true."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.send("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass
        self.run(f"new Promise(done => {{ const look = () => {drawn} ? done(1) : setTimeout(look, 50); look(); }})")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _read(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser is gone"
            raw += byte
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.problems.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(event["entry"]))
        elif method == "Network.requestWillBeSent" and not (url := event["request"]["url"]).startswith("data:"):
            self.requests.append(url)


@contextmanager
def browser() -> Iterator[Page]:
    """A headless browser with an empty page."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        (command_out, command_in), (answer_out, answer_in) = os.pipe(), os.pipe()

        def wire() -> None:  # the browser reads commands from 3 and answers on 4
            ends = os.dup(command_out), os.dup(answer_in)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        process = subprocess.Popen(
            [BINARY, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=wire,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_out)
        os.close(answer_in)
        try:
            with os.fdopen(command_in, "wb") as commands, os.fdopen(answer_out, "rb") as answers:
                yield Page(commands, answers)
        finally:
            process.terminate()
            process.wait(timeout=20)


def file_url(path: Path) -> str:
    """The address of a local file."""
    return path.resolve().as_uri()
