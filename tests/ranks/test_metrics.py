"""Prometheus metrics: what is counted is what the reports say, and serving it never disturbs the training."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from queued_device import queued_device
from ranks import die, run_command, run_forked, run_ranks, staged
from repository import ROOT
from training import TINY, Chain, Signals, Stopper, features, mlp, random_stops
from whole_steps import LAYER_S, Net, loss_of, samples_of

from straggle import Deadline, Elastic, FixedDeadline, LastMerged, LateHandling, Merge, NextDeadline, StagedDataParallel
from straggle.backward.stages import Stage, StagePlan
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError
from straggle.lab.world.faults import Stall
from straggle.lab.world.run import run_world
from straggle.observe.metrics import MetricsExporter, stage_labels
from straggle.observe.metrics_endpoint import Endpoint, Security, Targets
from straggle.observe.numbers.goodput import Uses
from straggle.policies.what_if.ddp_time import DdpPrediction
from straggle.report import PHASES

PAGE = ROOT / "docs" / "metrics.md"


def scrape(url, *, name=None, context=None, headers=None):
    """All samples at ``url``: values by name and sorted labels without the rank's; or the text, without ``name``."""
    request = urllib.request.Request(url, headers=headers or {})
    with urllib.request.urlopen(request, context=context, timeout=10) as response:
        text = response.read().decode()
    return text if name is None else values(text, name)


def values(text, name):
    """The samples called ``name``, by the values of their labels other than ``rank``."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label != "rank"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def train(model, rank, num_steps, log=True):
    """Plain steps; gives the reports."""
    reports = []
    for number in range(num_steps):
        with model.step() as step:
            loss = model(features(rank, number)).square().mean()
            if log:
                step.log(loss=loss)
            loss.backward()
        reports.append(model.last_report)
    return reports


# -- what is counted


class Predicting(Deadline):
    """One minute, of which it has an idea."""

    def decide(self, history):  # noqa: ARG002
        return NextDeadline(60.0, predicted_drop=0.125)


def count_chaos(rank, num_steps):
    """Ranks stop at random; the text of this rank's metrics, and all reports."""
    module = Chain()
    stopper = Stopper(module)
    stops = random_stops(rank, num_steps, 5)
    reports, plans = [], []
    with staged(module, deadline=Predicting(), estimator=LastMerged(0.5), merge=Merge(check_every=4)) as model:
        model.register_step_hook(lambda record: plans.append(record.plan))
        exporter = MetricsExporter(model, port=0, samples_per_step=10)
        for number, after in enumerate(stops):
            with model.step() as step:
                step.log(loss=float(rank + number))
                stopper.arm(step, after)
                loss = model(math.inf if (rank, number) == (1, 7) else 1.0)
                loss.backward()
            reports.append(model.last_report)
        exporter.close()  # when all steps are counted
        text = generate_latest(exporter.registry).decode()
    return text, reports, plans[-1].numel, sum(stage.nbytes for stage in plans[-1].stages)


def logs_on_a_queue(rank):
    """The metrics after five steps, of which the first and the last log a loss that only the device knows."""
    with queued_device(), staged(mlp()) as model:
        exporter = MetricsExporter(model, port=0)
        for number in range(5):
            with model.step() as step:
                model(features(rank, number)).square().mean().backward()
                if number in (0, 4):
                    step.log(loss=torch.tensor(1.0 + number + rank))
        exporter.close()
        return generate_latest(exporter.registry).decode(), model.last_report.scalars["loss"]


def test_loss_that_a_device_has_yet_to_tell_is_the_last_one_that_it_told():
    for text, last in run_ranks(logs_on_a_queue, 2):
        assert values(text, "straggle_loss") == {(): 1.5}
        assert math.isnan(last)


def test_counters_are_the_sums_of_the_reports_on_every_rank():
    num_steps = 20
    for rank, (text, reports, numel, nbytes) in enumerate(run_ranks(count_chaos, 3, num_steps)):
        own = [report.ranks[rank] for report in reports]
        prediction = DdpPrediction()
        expected = {
            "steps_total": num_steps,
            "step_seconds_count": num_steps,
            "step_seconds_sum": sum(report.seconds for report in reports),
            "compute_seconds_sum": sum(part.compute_s for part in own),
            "deadline_seconds": 60.0,
            "gradient_elements_total": num_steps * numel,
            "gradient_elements_dropped_total": sum((1 - part.reach) * numel for part in own),
            "reach_ratio": own[-1].reach,
            "predicted_dropped_ratio": 0.125,
            "nonfinite_contributions_total": sum(part.nonfinite for part in own),
            "skipped_steps_total": sum(report.skipped for report in reports),
            "merged_bytes_total": num_steps * nbytes,
            "samples_total": sum(10 * part.reach for part in own),
            "loss": reports[-1].scalars["loss"],
            "replica_checks_total": 4,
            "replica_mismatches_total": 0,
            "step_wait_for_all_seconds_total": sum(prediction.add(report).seconds for report in reports),
            "lag_steps": 0,
        }
        for name, value in expected.items():
            assert values(text, f"straggle_{name}") == {(): pytest.approx(value)}, name
        uses = Uses()
        done = [uses.add(report) for report in reports]  # the last step is not over, as far as this knows
        for use, seconds in values(text, "straggle_goodput_seconds_total").items():
            assert seconds == pytest.approx(sum(step[rank].get(use[0], 0.0) for step in done if step))
        assert values(text, "straggle_made_again_steps_total") == {(): 0}
        for phase in (*PHASES, "wait"):
            seconds = sum(max(0.0, getattr(part, f"{phase}_s")) for part in own)
            assert values(text, "straggle_phase_seconds_sum")[(phase,)] == pytest.approx(seconds)
        late = {(cause,): sum(part.late and part.cause == cause for part in own) for cause in PHASES}
        assert values(text, "straggle_late_steps_total") == late
        assert sum(late.values()) > 0
        # the stages are planned again after the first step, and counted from there
        names = [stage.name for stage in reports[-1].stages]
        columns = {
            "stage_contributions_total": [sum(part.stages[i] for part in own[1:]) for i in range(len(names))],
            "estimates_total": [sum(report.stages[i].estimated for report in reports[1:]) for i in range(len(names))],
        }
        for name, column in columns.items():
            assert values(text, f"straggle_{name}") == {
                (stage,): pytest.approx(value) for stage, value in zip(names, column, strict=True)
            }
    assert sum(report.ranks[1].nonfinite for report in reports) > 0


def with_its_reports(rank, kind):
    """The metrics and reports of a rank that is stuck, has no more data, or has drawn nothing."""
    module, reports = Net(lambda: rank.work(LAYER_S)), []
    model = StagedDataParallel(module, links=False, deadline=0.1)
    exporter = MetricsExporter(model, port=None)
    model.register_step_hook(lambda record: reports.append(record.report))
    number_of_batches = 24 - 8 * (kind == "join" and rank.number == 1)
    for number in model.join(range(number_of_batches)):
        with model.step() as step:
            own = samples_of(number)
            for numbers in step.pull(own) if kind == "pool" else own[rank.number : rank.number + 1]:
                loss_of(model, numbers).backward()
        module.zero_grad()
    model.close()
    exporter.close()
    return generate_latest(exporter.registry).decode(), reports


@pytest.mark.parametrize("kind", ["own batches", "join", "pool"])
@pytest.mark.parametrize("for_s", [0.0, 0.6])
def test_what_dashboards_call_dropped_is_what_reports_do(kind, for_s):
    """A rank without data, or that had drawn nothing as it was stuck, has dropped nothing, in no stage."""
    faults = [Stall(0, 0.3, for_s)] if for_s else []
    world = run_world(lambda own: with_its_reports(own, kind), ranks=3, faults=faults)
    had_nothing = 0
    for rank, (text, reports) in enumerate(world.results):
        parts = []
        for report in reports:
            own, num_there = report.ranks[rank], sum(not one.idle for one in report.ranks)
            equal = report.pool_weight / num_there if report.pool_weight else own.weight
            parts.append(0.0 if own.idle else own.weight / equal)
            had_nothing += not parts[-1] and not own.reach
        (elements,), (dropped,) = (
            values(text, f"straggle_gradient_elements{name}_total").values() for name in ("", "_dropped")
        )
        gave = sum(part * report.ranks[rank].reach for part, report in zip(parts, reports, strict=True))
        assert dropped / elements == pytest.approx(1 - gave / sum(parts), abs=1e-6)
        for stage, came in enumerate(values(text, "straggle_stage_contributions_total").values()):
            # counted since they are planned, after the first
            pairs = zip(parts[1:], reports[1:], strict=True)
            missing = sum(part * (1 - report.ranks[rank].stages[stage]) for part, report in pairs)
            assert len(reports) - 1 - came == pytest.approx(missing, abs=1e-5)
            assert not missing or (for_s and rank == 0)
    assert (had_nothing > 0) == (kind == "join" or (kind == "pool" and for_s > 0))
    assert not for_s or any(own.stood_in for report in reports for own in report.ranks)


def count_drawn(rank, num_steps):
    """Ranks draw; the text of this rank's metrics, and what it computed."""
    module, parts, done = mlp(), [features(number, 0) for number in range(8)], 0
    with staged(module) as model:
        exporter = MetricsExporter(model, port=None)
        for _ in range(num_steps):
            with model.step() as step:
                for x in step.pull(parts):
                    model(x).square().mean().backward()
            module.zero_grad()
            done += model.last_report.ranks[rank].parts
        exporter.close()
        return generate_latest(exporter.registry).decode(), done


def test_micro_batches_that_ranks_draw_are_counted():
    ranks = run_ranks(count_drawn, 2, 4)
    assert sum(done for _, done in ranks) == 4 * 8
    for text, done in ranks:
        assert values(text, "straggle_micro_batches_total") == {(): done}
        assert values(text, "straggle_pool_micro_batches_total") == {(): 4 * 8}
        assert values(text, "straggle_micro_batches_put_back_total") == {(): 0}


def test_stages_of_one_name_are_told_apart():
    stages = [Stage(name, (), 1, 4, "", "") for name in ("a", "b", "a", "a")]
    assert stage_labels(StagePlan(tuple(stages))) == ["a", "b", "a#2", "a#3"]


def whole_text(rank, links):
    with (
        staged(mlp(), deadline=Predicting(), links=links) as model,
        MetricsExporter(model, port=0, samples_per_step=8) as exporter,
    ):
        train(model, rank, 2)
        exporter.close()  # when both steps are counted
        return generate_latest(exporter.registry).decode()


@pytest.fixture(scope="module")
def text():
    return run_forked(whole_text, 2, True)[0]


def test_job_that_does_not_measure_its_links_has_no_metrics_of_them(text):
    (without, _) = run_forked(whole_text, 2, None)
    names = [{family.name for family in text_string_to_metric_families(own)} for own in (text, without)]
    assert names[0] - names[1] == {
        "straggle_ping_bytes",
        "straggle_link_slow",
        "straggle_link_latency_seconds",
        "straggle_link_bytes_per_second",
    }


def test_names_and_help_follow_the_conventions(text):
    families = list(text_string_to_metric_families(text))
    assert len(families) > 25
    for family in families:
        assert family.name.startswith("straggle_")
        assert re.fullmatch(r"[A-Z].*\.", family.documentation), family
        assert family.samples, family.name
        assert all(sample.labels["rank"] == "0" for sample in family.samples)
        labels = {label for sample in family.samples for label in sample.labels}
        if family.name != "straggle_run_info":
            assert labels <= {
                "rank",
                "stage",
                "phase",
                "use",
                "cause",
                "le",
                "reason",
                "absent",
                "direction",
                "what",
                "where",
            }
        assert not re.search(r"_(ms|s|millis|kb|percent|share)(_|$)", family.name)
    assert not re.search(r"^\w+_created", text, re.MULTILINE)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
def test_promtool_finds_nothing_to_say_about_the_metrics(text):
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_page_lists_every_metric_with_its_type_and_labels(text):
    rows = re.findall(r"^\| `(straggle_\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exported = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"rank", "le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        exported[name] = ("info" if name == "straggle_run_info" else family.type, labels)
    assert documented == exported


# -- where it is served


def ports(rank, taken):
    with staged(mlp()) as model:
        first, second = MetricsExporter(model, port=taken), MetricsExporter(model, port=taken)
        urls = first.url, second.url
        texts = [scrape(url, name="straggle_run_info") for url in urls]
        first.close()
        first.close()
        with pytest.raises(urllib.error.URLError):
            scrape(urls[0])
        second.close()
        return [int(url.split(":")[2].split("/")[0]) for url in urls], texts


def test_taken_port_is_skipped_and_a_closed_one_is_free():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        (first, second), texts = run_ranks(ports, 1, taken)[0]
    assert taken < first < second
    assert texts[0] == texts[1]


class Unread(StagedDataParallel):
    """Calls ``read`` where its metrics ask for the predicted drop: once a step, when most of it is counted."""

    def __init__(self, module, read):
        super().__init__(module)
        self.read = read

    @property
    def predicted_drop(self):
        return self.read()


def go_without(rank, kind, folder):
    """Metrics that cannot be had; the training goes on, and says why once."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("straggle.observe.metrics").addHandler(handler)
    options = {
        "off": {"port": None},
        "address": {"host": "192.0.2.1"},
        "files": {"security": Security(certfile=f"{folder}/none", keyfile=f"{folder}/none")},
        "folder": {"targets": Targets(folder="/dev/null/targets")},
        "observer": {"port": None},
    }[kind]
    model = Unread(mlp(), (lambda: 1 / 0) if kind == "observer" else (lambda: math.nan))
    with contextlib.closing(model), MetricsExporter(model, **options) as exporter:
        reports = train(model, rank, 5)
        url = exporter.url
    return len(reports), url, warnings


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("off", None),
        ("address", "metrics are not served: "),
        ("files", "metrics are not served: "),
        ("folder", "metrics are not served"),
        ("observer", "metrics are incomplete: ZeroDivisionError"),
    ],
)
def test_training_goes_on_without_metrics(kind, message, tmp_path):
    num_steps, url, warnings = run_forked(go_without, 1, kind, str(tmp_path))[0]
    assert num_steps == 5
    assert url is None
    assert len(warnings) == (message is not None)
    assert all(message in warning for warning in warnings)


def stall_clients(rank, security):
    """Clients that connect and send nothing, while steps go on; the exporter ends though they stay."""
    with contextlib.ExitStack() as silent, staged(mlp()) as model:
        with MetricsExporter(model, port=0, security=security) as exporter:
            for _ in range(5):
                silent.enter_context(socket.create_connection((exporter.endpoint.host, exporter.endpoint.port)))
            train(model, rank, 3)
            answered = security is not None or scrape(exporter.url, name="straggle_run_info") != {}
        with pytest.raises(urllib.error.URLError):
            scrape(exporter.url)
        return answered


@pytest.mark.parametrize("tls", [False, True])
def test_silent_client_holds_neither_steps_nor_the_end_of_the_job(tls, certificates):
    security = Security(certfile=certificates / "server.pem", keyfile=certificates / "server.key") if tls else None
    assert run_ranks(stall_clients, 1, security) == [True]


TLS = {"certfile": "server.pem", "keyfile": "server.key"}
HEALTH = {
    "plain": ({}, {}),
    "TLS": (TLS, {}),
    "client's certificate": ({**TLS, "client_cafile": "ca.pem"}, {"METRICS_CLIENT_CERT": "both.pem"}),
}


@pytest.mark.parametrize("kind", HEALTH)
def test_container_is_healthy_by_its_endpoint_at_any_port_and_however_it_is_secured(
    kind, registry, certificates, tmp_path
):
    from prometheus_client import Gauge

    def in_folder(setting):
        return {key: str(certificates / name) for key, name in setting.items()}

    (certificates / "both.pem").write_text(
        "".join((certificates / f"client.{end}").read_text() for end in ("pem", "key"))
    )
    security, environment = (in_folder(setting) for setting in HEALTH[kind])
    since = Gauge("straggle_since_step_seconds", "Since.", ["rank"], registry=registry).labels(3)
    with served(registry, **security) as endpoint:
        Targets(str(tmp_path / "targets"), address=socket.gethostname()).write(3, endpoint)
        Targets(str(tmp_path / "targets"), address="another", labels={"of": "another"}).write(4, endpoint)
        for seconds, status in ((59.0, 0), (61.0, 1)):
            since.set(seconds)
            assert health(RUN_DIR=str(tmp_path), **environment) == status
        since.set(0.0)
        assert health(METRICS_URL=endpoint.url, **environment) == 0
        assert (health(METRICS_URL=endpoint.url) == 0) == (not environment)
    assert health(RUN_DIR=str(tmp_path), **environment) == 1


def health(**environment):
    command = [sys.executable, str(ROOT / "docker" / "health.py")]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60).returncode


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and certificates of a server and a client that it signed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "extra").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *key[:-2], "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


@pytest.fixture
def registry():
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    return registry


@contextlib.contextmanager
def served(registry, **security):
    endpoint = Endpoint(registry, host="127.0.0.1", port=0, security=Security(**security))
    try:
        yield endpoint
    finally:
        endpoint.close()


def test_tls_is_served_and_plain_http_is_not(registry, certificates):
    files = {"certfile": certificates / "server.pem", "keyfile": certificates / "server.key"}
    with served(registry, **files) as endpoint:
        assert endpoint.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificates / "ca.pem")
        assert scrape(endpoint.url, name="answer", context=trusting) == {(): 42.0}
        with pytest.raises(OSError):  # noqa: PT011
            scrape(endpoint.url.replace("https", "http"))
        assert scrape(endpoint.url, name="answer", context=trusting) == {(): 42.0}


def test_client_needs_a_certificate_where_an_authority_is_given(registry, certificates):
    files = {"certfile": certificates / "server.pem", "keyfile": certificates / "server.key"}
    with served(registry, **files, client_cafile=certificates / "ca.pem") as endpoint:
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        with pytest.raises(OSError):  # noqa: PT011
            scrape(endpoint.url, context=context)
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        assert scrape(endpoint.url, name="answer", context=context) == {(): 42.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"certfile": "a"}, "certfile and keyfile belong together"),
        ({"keyfile": "a"}, "certfile and keyfile belong together"),
        ({"client_cafile": "a"}, "client_cafile without certfile"),
    ],
)
def test_half_of_a_setting_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Security(**arguments)


@pytest.mark.parametrize("port", ["9640", -1, 2**16, True])
def test_exporter_refuses_what_is_no_port(port):
    with pytest.raises(ValueError, match=f"port={port}: must be"):
        MetricsExporter(None, port=port)  # before it looks at the model


# -- targets


def write_targets(rank, folder, error):
    targets = Targets(folder=folder, labels={"run": "nightly"})
    with staged(mlp()) as model:
        with contextlib.suppress(KeyError), MetricsExporter(model, targets=targets) as exporter:
            train(model, rank, 2)
            written = json.loads((Path(folder) / f"rank{rank}.json").read_text())
            answered = scrape(f"http://{written[0]['targets'][0]}/metrics", name="straggle_run_info")
            if error:
                raise KeyError
        return written, exporter.url, len(answered)


@pytest.mark.parametrize("error", [False, True])
def test_each_rank_writes_where_it_is_and_only_a_clean_end_takes_it_back(error, tmp_path):
    results = run_ranks(write_targets, 2, str(tmp_path / "targets"), error)
    for written, url, answered in results:
        assert written == [
            {"targets": [url.removeprefix("http://").removesuffix("/metrics")], "labels": {"run": "nightly"}}
        ]
        assert answered == 1
    left = sorted(path.name for path in (tmp_path / "targets").iterdir())
    assert left == (["rank0.json", "rank1.json"] if error else [])


def test_reader_never_sees_half_a_file(registry, tmp_path):
    targets = Targets(folder=str(tmp_path), address="node7", labels={"run": "x" * 100_000})
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            for path in tmp_path.glob("*.json"):
                seen.append(json.loads(path.read_text())[0]["targets"])

    with served(registry) as endpoint:
        targets.write(3, endpoint)
        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(200):
            targets.write(3, endpoint)
        done.set()
        reader.join()
        assert seen
        assert set(map(tuple, seen)) == {(f"node7:{endpoint.port}",)}
        assert [path.name for path in tmp_path.iterdir()] == ["rank3.json"]


def test_target_says_that_tls_is_served(registry, certificates, tmp_path):
    with served(registry, certfile=certificates / "server.pem", keyfile=certificates / "server.key") as endpoint:
        Targets(folder=str(tmp_path)).write(0, endpoint)
    assert json.loads((tmp_path / "rank0.json").read_text())[0]["labels"] == {"__scheme__": "https"}


def test_endpoint_at_all_addresses_is_announced_by_the_name_of_the_machine(registry, tmp_path):
    endpoint = Endpoint(registry, host="0.0.0.0", port=0, security=Security())
    Targets(folder=str(tmp_path)).write(0, endpoint)
    endpoint.close()
    written = json.loads((tmp_path / "rank0.json").read_text())
    assert written[0]["targets"] == [f"{socket.gethostname()}:{endpoint.port}"]


# -- live


def scrape_a_stuck_rank(rank, folder):
    """Rank 1 hangs in its data until rank 0 has read from rank 1's endpoint that it lags three steps."""
    module = mlp(seed=rank)
    signals = Signals()
    seen = []
    with (
        staged(module, deadline=FixedDeadline(0.05), late_handling=LateHandling(grace_s=0.0, max_lag=100)) as model,
        MetricsExporter(model, targets=Targets(folder=folder)) as exporter,
    ):
        if rank == 0:
            signals.send("begun")
        for number in range(30):
            if rank == 1 and number == 3:
                signals.wait("read")
            with model.step():
                model(features(rank, number)).square().mean().backward()
            if rank == 0 and number == 6:
                target = json.loads((Path(folder) / "rank1.json").read_text())[0]["targets"][0]
                first = ""
                while values(first, "straggle_steps_total") != {(): 3.0}:  # counted a moment after they are made
                    first = scrape(f"http://{target}/metrics")
                time.sleep(0.01)
                seen = [first, scrape(f"http://{target}/metrics")]
                signals.send("read")
        caught_up = scrape(exporter.url, name="straggle_lag_steps")
    return seen, caught_up


def test_lag_and_time_since_the_last_step_are_live_while_a_rank_is_stuck(tmp_path):
    (seen, caught_up), (_, caught_up_1) = run_ranks(scrape_a_stuck_rank, 2, str(tmp_path))
    first, second = seen
    assert values(first, "straggle_lag_steps")[()] >= 3
    assert values(first, "straggle_steps_total") == {(): 3.0}
    assert values(second, "straggle_since_step_seconds")[()] - values(first, "straggle_since_step_seconds")[()] > 0.0099
    assert caught_up == {(): 0.0}
    assert caught_up_1 == {(): 0.0}


def count_late_comers(rank):
    """A step that is over when the observer is slow is counted all the same."""
    gate = threading.Event()
    with contextlib.closing(Unread(mlp(), lambda: float(gate.wait()))) as model:
        exporter = MetricsExporter(model, port=None)
        train(model, rank, 50)
        before = exporter.registry.get_sample_value("straggle_steps_total", {"rank": str(rank)})
        gate.set()
        exporter.close()
        return before, exporter.registry.get_sample_value("straggle_steps_total", {"rank": str(rank)})


def test_no_step_is_lost_to_a_slow_observer():
    for before, after in run_ranks(count_late_comers, 2):
        assert before <= 1.0  # the observer is slow in the first step
        assert after == 50.0


def hook_steps(rank):
    with staged(mlp()) as model:
        seen = []
        handle = model.register_step_hook(lambda record: seen.append((record.step, record.report is model.last_report)))
        train(model, rank, 2)
        handle.remove()
        train(model, rank, 1)
        return seen


def test_hook_is_called_after_each_step_until_it_is_removed():
    assert run_ranks(hook_steps, 2) == [[(0, True), (1, True)]] * 2


def test_metrics_need_not_be_installed_for_the_core():
    program = "import sys; sys.modules['prometheus_client'] = None; import straggle; straggle.StagedDataParallel"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


# -- the command


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["metrics=off"], "metrics=off: choose one of none, prometheus"),
        (["metrics.prot=1"], "unknown key metrics.prot; metrics has port, host, security, targets"),
        (["+metrics.targets.to=x"], "metrics.targets: Targets.__init__() got an unexpected keyword argument 'to'"),
        (["metrics.security.certfile=x"], "certfile and keyfile belong together"),
        (["metrics.port=abc"], "port=abc: must be an integer from 0 (any that is free) to 65535"),
        (["metrics.port=1.5"], "port=1.5: must be"),
        (["metrics.port=true"], "port=True: must be"),
        (["metrics.port=-1"], "port=-1: must be"),
        (["metrics.port=65536"], "port=65536: must be"),
    ],
)
def test_wrong_setting_is_refused(keys, message):
    with pytest.raises(ConfigurationError) as error:
        load("train", keys)
    assert message in str(error.value)


@pytest.mark.parametrize("port", ["null", "0", "65535"])
def test_port_may_be_any_or_none(port):
    load("train", [f"metrics.port={port}"])


@pytest.mark.slow
def test_train_serves_its_metrics_while_it_runs_and_leaves_no_targets(tmp_path):
    # sleeps make the steps long enough to be scraped, at no cost
    keys = (*TINY, "faults=pace", "faults.pace.factor=5.0", "steps=100", "report=false", "run_dir=.")
    texts = {}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_command, "train", 2, *keys, folder=tmp_path)
        while not job.done() and len(texts) < 2:
            for path in (tmp_path / "targets").glob("rank*.json"):
                target = json.loads(path.read_text())[0]["targets"][0]
                text = scrape(f"http://{target}/metrics")
                if values(text, "straggle_steps_total")[()] > 1:
                    texts[path.stem] = text
            time.sleep(0.1)
        job.result()
    assert texts.keys() == {"rank0", "rank1"}
    for text in texts.values():
        steps = values(text, "straggle_step_seconds_count")[()]
        assert values(text, "straggle_samples_total")[()] <= 8 * (steps + 1)
        assert values(text, "straggle_loss")[()] > 0
    assert list((tmp_path / "targets").iterdir()) == []


# -- members


def lose_a_rank(rank):
    """Rank 1 is killed after step 3; what the others' metrics are then."""
    with staged(mlp(), members=Elastic(min_ranks=1, suspect_s=0.5)) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with MetricsExporter(model, port=None) as exporter:
            while True:
                with model.step():
                    model(features(rank, 0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 1 and model.last_report.step == 3:
                    die()
                if model.last_report.step > 3 and len(model.member_ranks) == 2:
                    break
            for _ in range(3):
                with model.step():
                    model(features(rank, 0)).sum().backward()
            changed = model.last_members_report
        values = {
            (
                sample.name.removeprefix("straggle_"),
                sample.labels.get("reason"),
                sample.labels.get("absent"),
            ): sample.value
            for metric in exporter.registry.collect()
            for sample in metric.samples
        }
        return changed.kinds, len(model.member_ranks), values


def test_rank_that_left_is_named_and_counted_by_reason():
    first, killed, last = run_ranks(lose_a_rank, 3, outcomes=True)
    assert killed.kind == "Killed"
    for kinds, num_members, values in (first, last):
        assert kinds == ("silent",)
        assert num_members == values["members", None, None] == 2
        assert {reason: number for (name, reason, _), number in values.items() if name == "members_changes_total"} == {
            "ended": 0,
            "silent": 1,
            "raised": 0,
            "restarted": 0,
            "slow": 0,
            "link": 0,
            "notice": 0,
            "joined": 0,
        }
        assert {absent: number for (name, _, absent), number in values.items() if name == "absent_rank"} == (
            {"0": 0, "1": 1, "2": 0} if values is first[2] else {}
        )
        assert values["reach_ratio", None, None] == 1.0
        assert values["healing_bytes_total", None, None] == 0.0
