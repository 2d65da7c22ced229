"""Each test has the marker of its folder, says when it is slow, and comes early if it is."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from cpu_time import slowness, used_s
from times import FIXTURE

TESTS = Path(__file__).parent
LEVELS = ("unit", "ranks", "commands", "cluster", "docs")
# a busy machine may starve what waits for a network, a browser or an engine: tried a second time, and listed. So it may
# ranks of which a clock decides something: theirs, as members give signs of life, or the test's own
BY_CLOCK = re.compile(r"\bsleep\(|\b(monotonic|perf_counter)\(|^from members import", re.MULTILINE)
_SHOWN = 4000  # characters of a failure that was tried again; its end says what was wrong
_FIXTURE_S = 0.05  # a shorter setup is not listed
LIMIT_S = 5.0  # of a nominal core's CPU: who takes more, and is not slow, is listed at the end
# who takes this fails: the same test was seen to take 1.8 times as much on a busy host, and 4 s more where it is the
# first to load a part of torch
FAILS_S = 2 * LIMIT_S
HEAVY = "heavy_s"  # a test's property

# each connection of a TCPStore asks a name server who 127.0.0.1 is, and an answer that is lost would cost 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# large pages: a rank, which is forked from a process that has torch loaded, begins and ends in half the time
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


@cache
def _is_by_clock(path: Path) -> bool:
    """Whether a file of ``ranks/`` has processes that a clock decides: they wait for the simulated world."""
    text = path.read_text()
    return path.parent.name == "ranks" and "forked" in text and BY_CLOCK.search(text) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        level = item.path.relative_to(TESTS).parts[0]
        if level not in LEVELS:
            raise pytest.UsageError(f"{item.path}: a test lies in one of the folders {', '.join(LEVELS)} of tests/")
        item.add_marker(level)
        if (level == "cluster" or _is_by_clock(item.path)) and config.pluginmanager.hasplugin("rerunfailures"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):  # so that nothing long is left for the end, when the other processes are idle
        cluster = {item.path for item in items if item.get_closest_marker("docker")}  # the longest of all
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        starts = ("commands", "docs")  # processes of their own, each of which loads torch
        items.sort(
            key=lambda item: (
                item.path not in cluster,
                not (slow[item.path] and item.path.relative_to(TESTS).parts[0] in starts),
                -slow[item.path],
                item.path,
            )
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = max(used_s(), used_s())  # one that misses a process which ends just then says too little
    result = yield
    seconds = used_s() - before
    item.user_properties.append(("cpu_s", round(seconds, 2)))
    may_be_slow = any(item.get_closest_marker(name) for name in ("slow", "docker", "gpu"))
    may_be_slow |= item.config.pluginmanager.hasplugin("_cov")  # which takes as long again
    if seconds > LIMIT_S and not may_be_slow:
        if seconds > FAILS_S * (times := slowness()):
            pytest.fail(
                f"took {seconds:.1f} s of CPU of a core {times:.1f} times as slow as a nominal one, and a test that is "
                f"not slow takes at most {LIMIT_S:.0f} of that: make it lighter (fewer ranks or steps, one run for "
                "several tests), or mark it slow",
                pytrace=False,
            )
        item.user_properties.append((HEAVY, round(seconds / times, 2)))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    begin = time.monotonic()
    result = yield
    if (seconds := time.monotonic() - begin) >= _FIXTURE_S:
        request._pyfuncitem.user_properties.append((f"{FIXTURE}{fixturedef.argname}", round(seconds, 2)))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tests are to be made lighter; why one was tried again: no more is known of it where it has passed then."""
    passed = terminalreporter.stats.get("passed", ())
    heavy = [(dict(report.user_properties).get(HEAVY, 0.0), report.nodeid) for report in passed]
    if heavy := sorted((one for one in heavy if one[0] > LIMIT_S), reverse=True):
        terminalreporter.section(f"over {LIMIT_S:.0f} s of CPU, and not marked slow")
        for seconds, name in heavy:
            terminalreporter.line(f"{seconds:5.1f}  {name}")
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.line(report.longreprtext[-_SHOWN:])
