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
from pathlib import Path

import yaml
from repository import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
STEP_S = 0.5  # of the known run
EVERY_S = 5


def missing(*programs: str) -> str | None:
    """Why a test cannot run here, or ``None``."""
    absent = [program for program in programs if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (Debian's package prometheus)" if absent else None


class Prometheus:
    """A real one, for runs in ``folder``/run, asked through its API; it scrapes every ``every_s``."""

    def __init__(self, folder: Path, every_s: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
        discovery.update(files=[str(folder / "run" / "targets" / "*.json")], refresh_interval="1s")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        arguments = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
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


@contextlib.contextmanager
def training(folder: Path, *keys: str, num_ranks: int = 3) -> Iterator[None]:
    """A real run of ``straggle train`` whose last rank is slow, with its files in ``folder``/run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    command += ["straggle", "train", "workload=digits", "steps=100000", "faults.pace.factor=12"]
    last = num_ranks - 1
    command += [
        f"run_dir={folder}/run",
        "faults=slow_rank",
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


def backfill(folder: Path, num_ranks: int, seconds: int) -> None:
    """Put a run that ends now into ``folder``/data; its last rank draws half as much, and its link is slow."""
    now = int(time.time())
    (folder / "history").write_text("".join(known_run(num_ranks, now - seconds, now)) + "# EOF\n")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "history"), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def known_run(num_ranks: int, start: int, end: int) -> Iterator[str]:
    """In the format OpenMetrics."""

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

    ranks = [f'job="straggle",run="known",instance="a:{rank}",rank="{rank}"' for rank in range(num_ranks)]
    plain, slow = ranks[:-1], ranks[-1]
    yield from rising("steps", dict.fromkeys(ranks, 1.0))
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
