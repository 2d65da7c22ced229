"""How soon the alert StragglerRank names a rank that becomes slow while the job runs, and how soon it ends afterwards.

python benchmarks/alert.py                 # needs the program `prometheus`; about five minutes

Four ranks of this machine train a model that sleeps for its work; rank 2 takes ``--factor`` times as long for a while.
Prometheus scrapes them with the rules and alerts of deploy/prometheus.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from chaos import Net

from straggle import QuantileDeadline, StagedDataParallel
from straggle.lab.local_ranks import run_on_ranks
from straggle.observe.metrics import MetricsExporter
from straggle.observe.metrics_endpoint import Targets

RULES = Path(__file__).parent.parent / "deploy" / "prometheus"
SLOW = 2
FIRING = f'ALERTS{{alertname="StragglerRank",alertstate="firing",rank="{SLOW}"}}'


def train(rank, options, folder, factor, ended):
    """Trains until ``ended``; `SLOW` takes ``factor`` times as long as the others."""
    torch.manual_seed(0)
    net = Net(compute_s=options.compute_s)
    model = StagedDataParallel(net, deadline=QuantileDeadline(0.5, slack=1.3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    usual = [(block.forward_s, block.backward_s) for block in net]
    with MetricsExporter(model, port=options.port, targets=Targets(folder=str(folder / "targets"))):
        while True:
            for block, (forward_s, backward_s) in zip(net, usual, strict=True):
                times = factor.value if rank == SLOW else 1.0
                block.forward_s, block.backward_s = times * forward_s, times * backward_s
            with model.step() as step:
                step.log(ended=float(ended.is_set()))
                model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.last_report.scalars.get("ended", 0.0) > 0:  # the same step on all ranks
                break
    model.close()


def serve_prometheus(folder):
    """Starts Prometheus over the ranks' targets; gives the process and its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = (RULES / "prometheus.yml").read_text().replace("../../runs/latest", str(folder))
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(RULES / name, folder / name)
    (folder / "prometheus.yml").write_text(config)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    log = (folder / "prometheus.log").open("w")
    return subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log), address


def fires(address):
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': FIRING})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.load(answer)["data"]["result"])
    except OSError:
        return False


def seconds_until(address, wanted, limit_s):
    began = time.monotonic()
    while fires(address) is not wanted:
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(0.25)
    return time.monotonic() - began


def in_words(seconds):
    return "never" if seconds is None else f"{seconds:.1f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--port", type=int, default=19700)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("needs the program prometheus")
    context = multiprocessing.get_context("forkserver")
    factor, ended = context.Value("d", 1.0), context.Event()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        ranks = pool.submit(run_on_ranks, train, 4, options, folder, factor, ended)
        prometheus, address = serve_prometheus(folder)
        try:
            time.sleep(60)
            print(
                print(f"4 ranks, {1000 * options.compute_s:.0f} ms of work; the alert fires at first: {fires(address)}")
            )
            for _ in range(options.times):
                factor.value = options.factor
                named = seconds_until(address, True, 120)
                time.sleep(30)
                factor.value = 1.0
                print(
                    f"rank {SLOW} takes {options.factor} times as long: named after {in_words(named)}, "
                    f"resolved {in_words(seconds_until(address, False, 180))} after its recovery",
                    flush=True,
                )
        finally:
            ended.set()
            ranks.result()
            prometheus.terminate()
            prometheus.wait()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
