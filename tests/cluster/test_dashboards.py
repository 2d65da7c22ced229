"""The dashboards: Grafana's are what the code builds, every query finds data in a real run, and the page draws it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Page as Tab
from browser import browser
from dashboards import PROMETHEUS, ROOT, STAGES, Page, Prometheus, backfill, missing, page, training

GRAFANA = ROOT / "deploy" / "grafana"
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
TARGETS = [
    pytest.param(name, target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    for target in panel.get("targets", [])
]
CHOSEN = {"$__rate_interval": "15s", "$job": "straggle", "$run": ".*"}
needs_prometheus = pytest.mark.skipif(bool(missing("prometheus", "promtool")), reason=str(missing("prometheus")))
needs_chromium = pytest.mark.skipif(
    bool(missing("prometheus", "promtool", "chromium")), reason=str(missing("prometheus", "chromium"))
)


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
    script = (PROMETHEUS / "assets" / "straggle.js").read_text()
    used = set(re.findall(r"straggle_\w+\w", "".join(target.values[1] for target in TARGETS)))
    calls = r"(?:rate|each|group|last)\(\"(\w+)\""
    used |= {f"straggle_{name}" for name in re.findall(calls, script)} | set(re.findall(r"straggle_\w+\w", script))
    assert len(used) > 25
    assert used - known == set()


def test_variables_of_the_queries_are_those_of_the_dashboard() -> None:
    for board in BOARDS.values():
        names = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps([board["panels"], board["templating"]])))
        assert used - {"__rate_interval"} == names == {"datasource", "job", "run", "rank"}


def test_provisioning_names_what_is_there() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/straggle.yaml").read_text())["providers"]
    assert (GRAFANA / Path(provider["options"]["path"]).name).is_dir()


# -- a real run


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a real run of three ranks for half a minute, and goes on."""
    folder = tmp_path_factory.mktemp("live")
    with training(folder, "+metrics.targets.labels.run=nightly", "merge.check_every=10"):
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
    """All ranks have been scraped for long enough, and the slow one has been noticed."""
    slow = 'ALERTS{alertname="StragglerRank", alertstate="firing", rank="2"}'
    return len(prometheus.ask("count_over_time(straggle_steps_total[30s]) > 20")) == 3 and prometheus.ask(slow) != []


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
    assert by_rank in ([set(), {"0", "1", "2"}] if board == "run.json" else [set(), {"2"}])


@pytest.mark.slow
@needs_chromium
def test_page_shows_a_real_run(tab: Tab, live: Prometheus) -> None:
    alert = "StragglerRank: Rank 2 "
    for _ in range(10):  # on a busy machine others are sometimes slow as well, and the alert pauses
        html, problems = page(tab, f"{live.url}/consoles/straggle.html?range=300&window=15")
        assert problems == []
        shown = Page(html)
        late = [float(row[4].removesuffix(" %")) for row in shown.rows]
        if alert in shown.text("alerts") and late[2] > max(late[:2]):
            break
    assert alert in shown.text("alerts")
    assert late[2] > max(late[:2])
    assert shown.text("problem") == ""
    assert shown.attribute("heat", "data-ranks") == "3"
    assert int(shown.attribute("heat", "data-cells")) >= 3
    assert int(shown.attribute("stages", "data-stages")) >= 4
    assert "straggle / nightly" in shown.text("run")
    assert [row[0] for row in shown.rows] == ["0", "1", "2"]
    assert "\N{EN DASH}" not in shown.text("tiles")  # nothing is missing
    assert "AutoDeadline" in shown.text("about")


# -- a run whose numbers are known


@pytest.fixture(scope="module", params=[1, 4, 256])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The number of ranks and the page's address."""
    folder = tmp_path_factory.mktemp("known")
    end = backfill(folder, request.param, seconds=150)
    prometheus = Prometheus(folder)
    try:
        yield request.param, f"{prometheus.url}/consoles/straggle.html?range=300&end={end}"
    finally:
        prometheus.close()


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("size", [(1400, 2000), (400, 3000)], ids=["desk", "phone"])
def test_page_shows_the_numbers_of_a_run(tab: Tab, known: tuple[int, str], size: tuple[int, int]) -> None:
    num_ranks, address = known
    html, problems = page(tab, address, size=size)
    shown = Page(html)
    assert problems == []
    assert shown.text("problem") == ""
    assert shown.attribute("heat", "data-ranks") == str(num_ranks)
    assert int(shown.attribute("heat", "data-cells")) >= 20 * num_ranks
    assert shown.attribute("stages", "data-stages") == str(len(STAGES))
    assert shown.attribute("stages", "aria-label") == f"dropped by stage and rank: {', '.join(STAGES)}"
    assert [row[0] for row in shown.rows] == [str(rank) for rank in range(num_ranks)]
    plain, slow = shown.rows[0], shown.rows[-1]
    assert slow[2:] == ["600 ms", "0 s", "50 %", "25 %", "0", "100 ms ago"]
    if num_ranks > 1:
        assert plain[2:] == ["200 ms", "100 ms", "0 %", "0 %", "0", "100 ms ago"]
        assert f"The others wait for rank {num_ranks - 1}: the median rank waits 100 ms" in shown.text("ranks-note")
    assert shown.text("alerts") == f"StragglerRank {num_ranks - 1}"
    assert "Step 500 ms" in shown.text("tiles")
    assert "Deadline 400 ms" in shown.text("tiles")
    assert "Saved 50 %" in shown.text("tiles")


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


RUN_PANELS = {panel["title"]: panel for panel in BOARDS["run.json"]["panels"]}
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


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("path", ["", "/under/this"])
def test_page_says_that_there_is_no_run(tab: Tab, tmp_path: Path, path: str) -> None:
    prometheus = Prometheus(tmp_path, path)
    try:
        html, problems = page(tab, f"{prometheus.url}/consoles/straggle.html")
    finally:
        prometheus.close()
    assert problems == []
    assert Page(html).text("problem") == "No rank of any run has been scraped in this time."
