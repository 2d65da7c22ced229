"""What the tests of the dashboards share: a Prometheus of their own, and a run in it whose numbers are known."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import yaml
from browser import BINARY
from browser import Page as Tab
from repository import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
STAGES = ("head", "blocks.1", "blocks.0", "embedding")
STEP_S = 0.5  # of the known run; its deadline is 0.4, and waiting for all ranks would take 0.75
EVERY_S = 5


def missing(*programs: str) -> str | None:
    """Why a test cannot run here, or ``None``."""
    found = {program: shutil.which(program) for program in programs} | {"chromium": BINARY}
    absent = [program for program in programs if found[program] is None]
    return f"not installed: {', '.join(absent)} (Debian's packages prometheus and chromium)" if absent else None


class Prometheus:
    """A real one, for runs in ``folder``/run, asked through its API; it answers under ``path``."""

    def __init__(self, folder: Path, path: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}{path}"
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
        discovery.update(files=[str(folder / "run" / "targets" / "*.json")], refresh_interval="1s")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        arguments = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            f"--web.external-url={self.url}",
            f"--web.console.templates={PROMETHEUS}/consoles",
            f"--web.user-assets={PROMETHEUS}/assets",
        ]
        with open(folder / "prometheus.log", "w") as log:
            self.process = subprocess.Popen(["prometheus", *arguments], stdout=log, stderr=log)
        self._wait(folder / "prometheus.log")

    def _wait(self, log: Path) -> None:
        for _ in range(300):
            assert self.process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    def ask(self, expr: str) -> list[dict[str, object]]:
        """What a query gives now."""
        body = urllib.parse.urlencode({"query": expr}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", body, timeout=30) as response:
                return json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from None

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def page(opened: Tab, url: str, *, size: tuple[int, int] = (1400, 2000)) -> tuple[str, list[str]]:
    """The page as Chromium has drawn it, and what went wrong in it; it is left, so that it asks no more.

    Chromium ends all requests when an interface of the machine comes or goes, such as a container's: then once more.
    """
    drawn = "document.body.dataset.shown || document.querySelector('#problem:not([hidden])')"
    for _ in range(5):
        opened.problems.clear()
        opened.open(url, width=size[0], height=size[1], drawn=drawn)
        html, problems = opened.run("document.documentElement.outerHTML"), list(opened.problems)
        opened.open("about:blank", drawn="true")
        if ">Failed to fetch<" not in html:
            break
    return html, problems


class Page(HTMLParser):
    """What stands in each element that has an id, and in the table of ranks."""

    EMPTY = ("meta", "link", "input", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self._open: list[str | None] = []
        self._texts: dict[str, list[str]] = {}
        self._attributes: dict[str, dict[str, str | None]] = {}
        self.rows: list[list[str]] = []
        self._in_row = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if name := attributes.get("id"):
            self._attributes[name] = attributes
            self._texts[name] = []
        if tag not in self.EMPTY:
            self._open.append(name)
        if tag == "tr" and (in_row := "data-rank" in attributes):
            self._in_row = in_row
            self.rows.append([])
        if tag in ("th", "td") and self._in_row:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            self._open.pop()
        self._in_row = self._in_row and tag != "tr"

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._open):
            self._texts[name].append(data)
        if self._in_row:
            self.rows[-1][-1] += data

    def text(self, name: str) -> str:
        return " ".join(" ".join(self._texts[name]).split())

    def attribute(self, name: str, attribute: str) -> str:
        return self._attributes[name][attribute] or ""


@contextlib.contextmanager
def training(folder: Path, *keys: str, num_ranks: int = 3) -> Iterator[None]:
    """A real run of ``straggle train`` whose last rank is slow, with its files in ``folder``/run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    command += ["straggle", "train", "workload=digits", "steps=100000", "faults.pace.factor=12"]
    last = num_ranks - 1
    command += [
        f"run_dir={folder}/run",
        f"faults.slow.ranks=[{last}]",
        "faults.slow.factor=4",
        f"faults.stall.rank={last}",
        *keys,
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    with open(folder / "train.log", "w") as log:
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield
        assert job.poll() is None, (folder / "train.log").read_text()
    finally:
        job.terminate()
        job.wait(timeout=60)


def backfill(folder: Path, num_ranks: int, seconds: int) -> int:
    """Put a run into ``folder``/data whose last rank is late in half of its steps; the time at which it ends: now."""
    now = int(time.time())
    (folder / "history").write_text("".join(known_run(num_ranks, now - seconds, now)) + "# EOF\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "history"), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return now


def known_run(num_ranks: int, start: int, end: int) -> Iterator[str]:
    """In the format OpenMetrics. Ranks work for 0.2 s, the last one 0.4 s of 0.6; it drops stages 2 and 3 when late."""

    def rising(name: str, slope: dict[str, float]) -> Iterator[str]:
        yield f"# TYPE straggle_{name} counter\n"
        for labels, each_step in slope.items():
            for at in range(start, end + 1, EVERY_S):
                yield f"straggle_{name}_total{{{labels}}} {each_step * (at - start) / STEP_S} {at}\n"

    def steady(name: str, values: dict[str, float]) -> Iterator[str]:
        yield f"# TYPE straggle_{name} gauge\n"
        for labels, value in values.items():
            for at in range(start, end + 1, EVERY_S):
                yield f"straggle_{name}{{{labels}}} {value} {at}\n"

    last = num_ranks - 1
    ranks = [f'job="straggle",run="known",instance="a:{rank}",rank="{rank}"' for rank in range(num_ranks)]
    plain, slow = ranks[:last] if num_ranks > 1 else ranks, ranks[-1]
    half = dict.fromkeys(plain, 0.0) | {slow: 0.5}
    yield from rising("steps", dict.fromkeys(ranks, 1.0))
    yield from rising("late_steps", {f'{labels},cause="backward"': share for labels, share in half.items()})
    yield from rising("whole_compute_seconds", dict.fromkeys(plain, 0.2) | {slow: 0.6})
    yield from rising("step_wait_for_all_seconds", dict.fromkeys(ranks, 0.75))
    yield from rising("gradient_elements", dict.fromkeys(ranks, 1000.0))
    yield from rising("gradient_elements_dropped", {labels: 500 * share for labels, share in half.items()})
    yield from rising("samples", dict.fromkeys(ranks, 8.0))
    computed = {
        f'{labels},stage="{stage}"': 1 - share * (number >= 2)
        for labels, share in half.items()
        for number, stage in enumerate(STAGES)
    }
    yield from rising("stage_contributions", computed)
    # as gauges, because promtool wants all parts of a histogram
    waits = {f'{labels},phase="wait"': 0.1 for labels in plain} | {f'{slow},phase="wait"': 0.0}
    for name, slope in (
        ("step_seconds_sum", dict.fromkeys(ranks, STEP_S)),
        ("step_seconds_count", dict.fromkeys(ranks, 1.0)),
        ("phase_seconds_sum", waits),
    ):
        yield f"# TYPE straggle_{name} gauge\n"
        for labels, each_step in slope.items():
            for at in range(start, end + 1, EVERY_S):
                yield f"straggle_{name}{{{labels}}} {each_step * (at - start) / STEP_S} {at}\n"
    yield "# TYPE ALERTS gauge\n"
    firing = 'alertname="StragglerRank",alertstate="firing",severity="warning"'
    for at in range(end - 60, end + 1, EVERY_S):
        yield f"ALERTS{{{slow},{firing}}} 1 {at}\n"
    # of a pool of four for each rank the slow one draws half as many as it would, and puts one back in each step
    yield from rising("micro_batches", dict.fromkeys(plain, 4.0) | {slow: 2.0})
    yield from rising("pool_micro_batches", dict.fromkeys(ranks, 4.0 * num_ranks))
    yield from rising("micro_batches_put_back", dict.fromkeys(plain, 0.0) | {slow: 1.0})
    yield from steady("link_slow", {f'{labels},what="up"': float(labels == slow) for labels in ranks})
    for direction, narrow in (("up", 1e6), ("down", 20e6)):
        rates = dict.fromkeys(plain, 20e6) | {slow: narrow}
        named = {f'{labels},direction="{direction}"': own for labels, own in rates.items()}
        yield from steady("link_bytes_per_second", named)
    yield from steady("link_latency_seconds", dict.fromkeys(plain, 0.001) | {slow: 0.004})
    yield from steady("deadline_seconds", dict.fromkeys(ranks, 0.4))
    yield from steady("lag_steps", dict.fromkeys(ranks, 0))
    yield from steady("since_step_seconds", dict.fromkeys(ranks, 0.1))
    yield from steady("loss", dict.fromkeys(ranks, 1.5))
    yield from steady("stage_position", {f'{ranks[0]},stage="{stage}"': at for at, stage in enumerate(STAGES)})
