"""The dashboards are what the code builds, and every query, also of the page on them, finds data in a real run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from dashboards import PROMETHEUS, ROOT, Prometheus, backfill, missing, training

GRAFANA = ROOT / "deploy" / "grafana"
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels_of(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All of them, those in closed rows too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


TARGETS = [
    pytest.param(name, target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, board in BOARDS.items()
    for panel in panels_of(board)
    for target in panel.get("targets", [])
]
ASKED = re.findall(r"`([^`]+)`", (ROOT / "docs" / "see.md").read_text().split("Ask first")[1].split("## Grafana")[0])
CHOSEN = {"$__rate_interval": "15s", "$__range": "1h", "$job": "straggle", "$run": ".*"}
needs_prometheus = pytest.mark.skipif(bool(missing("prometheus", "promtool")), reason=str(missing("prometheus")))


def substituted(expr: str, **more: str) -> str:
    """As Grafana would send it."""
    for name, value in {**CHOSEN, **{f"${name}": value for name, value in more.items()}}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


# -- Grafana


def test_dashboards_are_what_the_code_builds() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk (Python 3.11) is not installed")
    program = "import json, build; print(json.dumps(build.dashboards()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=GRAFANA, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made.keys() == BOARDS.keys()
    for name, text in made.items():
        assert (GRAFANA / "dashboards" / name).read_text() == text, f"run deploy/grafana/build.py: {name} is old"


@needs_prometheus
def test_promtool_is_content_with_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": substituted(target.values[1], rank="1")}
        for number, target in enumerate(TARGETS)
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "panels.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TARGETS)} rules found" in done.stdout


def test_queries_use_only_metrics_that_exist() -> None:
    metrics = dict(re.findall(r"^\| `(straggle_\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    known = {name for name, kind in metrics.items() if kind != "histogram"}
    known |= {f"{name}_{part}" for name in metrics for part in ("sum", "count", "bucket")}
    used = set(re.findall(r"straggle_\w+\w", "".join(target.values[1] for target in TARGETS)))
    assert len(used) > 25
    assert used - known == set()


def test_variables_of_the_queries_are_those_of_the_dashboard() -> None:
    for board in BOARDS.values():
        names = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps([board["panels"], board["templating"]])))
        assert used - {"__rate_interval", "__range"} == names == {"datasource", "job", "run", "rank"}


def test_provisioning_names_what_is_there() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/straggle.yaml").read_text())["providers"]
    assert (GRAFANA / Path(provider["options"]["path"]).name).is_dir()


# -- a real run


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a real run of three ranks, of which the last is slow and sometimes hangs."""
    folder = tmp_path_factory.mktemp("live")
    hangs = ("faults.stall.seconds=3", "late_handling.stuck_after_s=1")
    with training(folder, "+metrics.targets.labels.run=nightly", "merge.check_every=10", "links=true", *hangs):
        prometheus = Prometheus(folder)
        try:
            begun = time.monotonic()
            while not has_settled(prometheus):
                assert time.monotonic() - begun < 120, (folder / "train.log").read_text()
                time.sleep(1)
            yield prometheus
        finally:
            prometheus.close()


def has_settled(prometheus: Prometheus) -> bool:
    """All ranks have been scraped for long enough, and the last one has been slow and has been stuck."""
    slow = 'ALERTS{alertname="StragglerRank", alertstate="firing", rank="2"}'
    stuck = 'max_over_time(straggle_stuck_info{rank="2", where!=""}[1h])'
    enough = len(prometheus.ask("count_over_time(straggle_steps_total[30s]) > 20")) == 3
    return enough and prometheus.ask(slow) != [] and prometheus.ask(stuck) != []


def drawable(result: list[dict[str, Any]]) -> list[float]:
    return [value for value in (float(series["value"][1]) for series in result) if value == value]


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize(("board", "expr"), TARGETS)
def test_every_query_finds_data_in_a_real_run(live: Prometheus, board: str, expr: str) -> None:
    rank = ".*" if board == "run.json" else "2"
    found = live.ask(substituted(expr, rank=rank))
    assert drawable(found) != [], expr
    by_rank = {series["metric"]["rank"] for series in found if "rank" in series["metric"] and "ALERTS" not in expr}
    if "straggle_stuck_info" in expr:
        assert "2" in by_rank  # on a busy machine another one may stand still for a second, too
    else:
        assert by_rank in ([set(), {"0", "1", "2"}] if board == "run.json" else [set(), {"2"}])


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("expr", ASKED)
def test_every_query_that_the_page_of_dashboards_names_finds_data_in_a_real_run(live: Prometheus, expr: str) -> None:
    assert drawable(live.ask(expr)) != []


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("name", BOARDS)
def test_command_draws_every_panel_of_a_dashboard_with_data(live: Prometheus, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "board.svg"
    command = [sys.executable, str(ROOT / "docs" / "dashboard.py"), "--prometheus", live.url]
    command += ["--board", name.removesuffix(".json"), "--out", str(picture)]
    command += ["--set", "rank=2"] if name == "rank.json" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "No data" not in drawn
    for panel in BOARDS[name]["panels"]:
        assert panel["title"] in drawn
    assert "faults.py:" in drawn  # where the rank hung


# -- a run whose numbers are known


@pytest.mark.slow
@needs_prometheus
def test_queries_of_draws_and_of_links_find_the_numbers_of_a_run(tmp_path: Path) -> None:
    backfill(tmp_path, 4, seconds=150)
    prometheus = Prometheus(tmp_path)
    try:
        panels = {name: values_by_rank(prometheus, expr) for name, expr in DRAWS.items()}
        drawn = values_by_rank(prometheus, rule("rules.yml", "rank:straggle_drawn:ratio1m"))
        ((_, dropped),) = values_by_rank(prometheus, rule("rules.yml", "job:straggle_pool_dropped:ratio1m"))
        slow = values_by_rank(prometheus, rule("alerts.yml", "SlowLink"))
        links = {name: values_by_rank(prometheus, RUN_PANELS[name]["targets"][0]["expr"]) for name in LINKS}
    finally:
        prometheus.close()
    assert panels["drawn"] == [("0", 4.0), ("1", 4.0), ("2", 4.0), ("3", 2.0)]
    assert [rank for rank, _ in panels["put back"]] == ["0", "1", "2", "3"]
    assert panels["put back"][3][1] > panels["put back"][0][1] == 0.0
    assert drawn == [("0", 1.143), ("1", 1.143), ("2", 1.143), ("3", 0.571)]
    assert dropped == 0.125
    assert slow == [("3", 1.0)]
    assert links == {
        "Latency of links": [("0", 0.001), ("1", 0.001), ("2", 0.001), ("3", 0.004)],
        "Links, up": [("0", 20e6), ("1", 20e6), ("2", 20e6), ("3", 1e6)],
        "Links, down": [("0", 20e6), ("1", 20e6), ("2", 20e6), ("3", 20e6)],
        "Slow links": [("0", 0.0), ("1", 0.0), ("2", 0.0), ("3", 1.0)],
    }


RUN_PANELS = {panel["title"]: panel for panel in panels_of(BOARDS["run.json"])}
LINKS = ("Latency of links", "Links, up", "Links, down", "Slow links")
DRAWS = {
    "drawn": next(own.values[1] for own in TARGETS if "straggle_micro_batches_total" in own.values[1]),
    "put back": next(own.values[1] for own in TARGETS if "put_back" in own.values[1]),
}


def rule(file: str, name: str) -> str:
    groups = yaml.safe_load((PROMETHEUS / file).read_text())["groups"]
    found = [own for group in groups for own in group["rules"] if name in (own.get("record"), own.get("alert"))]
    return str(found[0]["expr"])


def values_by_rank(prometheus: Prometheus, expr: str) -> list[tuple[str, float]]:
    found = prometheus.ask(substituted(expr, rank=".*"))
    return sorted((own["metric"].get("rank", ""), round(float(own["value"][1]), 3)) for own in found)
