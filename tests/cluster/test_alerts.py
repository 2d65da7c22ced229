"""The rules and alerts for Prometheus, as promtool sees them; and that they, the metrics and the pages agree."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from repository import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RULES, ALERTS = (
    [rule for group in yaml.safe_load((FOLDER / name).read_text())["groups"] for rule in group["rules"]]
    for name in ("rules.yml", "alerts.yml")
)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yml", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_use_only_metrics_and_rules_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    metrics = dict(re.findall(r"^\| `(straggle_\w+)` \| (\w+) \|", page, re.MULTILINE))
    known = set(metrics) | {rule["record"] for rule in RULES}
    known |= {f"{name}_{part}" for name, kind in metrics.items() if kind == "histogram" for part in ("sum", "count")}
    used = {name for rule in RULES + ALERTS for name in re.findall(r"(?<![\w:])(?:\w+:)?straggle_[\w:]+", rule["expr"])}
    assert used - known == set()


def test_every_alert_has_its_runbook_and_unit_tests() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = {name.lower(): text for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)}
    tests = (FOLDER / "rules_test.yml").read_text()
    assert len(ALERTS) == 10
    for alert in ALERTS:
        assert {"summary", "description", "runbook"} == alert["annotations"].keys()
        section = sections[alert["annotations"]["runbook"].removeprefix("docs/alerts.md#")]
        assert all(part in section for part in ("**Means.**", "**Look at.**", "**Do.**")), alert["alert"]
        assert alert["alert"] in tests
