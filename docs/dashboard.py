"""Draws a dashboard of deploy/grafana from a real Prometheus, as Grafana would: docs/dashboard.svg

python docs/dashboard.py --rows Now Time Lateness -- steps=600       # the picture; what follows -- is for ./launch.sh
python docs/dashboard.py --prometheus http://127.0.0.1:9090 --board rank --set rank=3 --out rank.svg

Without --prometheus one of its own (Debian's package prometheus) scrapes ./launch.sh, and the entire run is drawn.
It prints the panels without data.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import yaml
from dashboard_panels import Picture

ROOT = Path(__file__).parents[1]
GRAFANA = ROOT / "deploy" / "grafana"
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


class Source:
    """A Prometheus, and the time to draw: from ``start`` to ``end``, in seconds since 1970."""

    def __init__(self, url, start, end):
        self.url, self.start, self.end = url, math.ceil(start), int(end)
        (provided,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
        self.scrape_s = int(provided["jsonData"]["timeInterval"].removesuffix("s"))

    def ask(self, path, **what):
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(what)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def series(self, target, values, points):
        """A list of (labels, [(time, value), ...]) for a target of a panel; ``points``: pixels of the panel's width."""
        step = max(self.scrape_s, math.ceil((self.end - self.start) / points))
        windows = {"__rate_interval": max(step + self.scrape_s, 4 * self.scrape_s), "__range": self.end - self.start}
        expr = replaced(target["expr"], {**values, **{name: f"{window:.0f}s" for name, window in windows.items()}})
        if target["instant"]:
            found = self.ask("query", query=expr, time=self.end)["result"]
            return [(own["metric"], [(self.end, float(own["value"][1]))]) for own in found]
        found = self.ask("query_range", query=expr, start=self.start, end=self.end, step=step)["result"]
        times = [self.start + step * number for number in range(int((self.end - self.start) / step) + 1)]
        return [(own["metric"], at_each(times, own["values"])) for own in found]


def at_each(times, values):
    """The values at these times, NaN where there is none: a line has a gap there."""
    known = {round(at): float(value) for at, value in values}
    return [(at, known.get(round(at), math.nan)) for at in times]


def replaced(text, values):
    """With Grafana's variables replaced."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], found[0]), text)


def chosen(board, source, given):
    """The variables' values when a dashboard is opened for the first time: All, or the first of the list."""
    values = dict(given)
    for variable in board["templating"]["list"]:
        if variable["name"] in given or variable["type"] != "query":
            continue
        if variable.get("includeAll"):
            values[variable["name"]] = variable["allValue"]
            continue
        of, label = LABEL_VALUES.fullmatch(replaced(variable["query"], values)).groups()
        found = source.ask(f"label/{label}/values", **{"match[]": of, "start": source.start, "end": source.end})
        if not found:
            sys.exit(f"no values for ${variable['name']} ({variable['query']}): was a run scraped in this time?")
        values[variable["name"]] = sorted(found)[0]
    return values


def placed(board, rows):
    """The panels of these rows, or of all, each with its place, which moves up if rows above it are left out."""
    shift, last, shown = 0, 0, True
    for panel in board["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            shown, shift = not rows or panel["title"] in rows, last - place["y"]
        if shown:
            last = max(last, place["y"] + shift + place["h"])
            yield panel, {**place, "y": place["y"] + shift}


def draw(board, source, given, rows, path):
    values = chosen(board, source, given)
    panels = list(placed(board, rows))
    picture = Picture(max(place["y"] + place["h"] for _, place in panels), source.start, source.end)
    for panel, place in panels:
        targets = panel.get("targets", [])
        found = [(target, source.series(target, values, picture.width_of(place))) for target in targets]
        if targets and not any(series for _, series in found):
            print(f"no data: {panel['title']} ({'; '.join(target['expr'] for target in targets)})")
        picture.add(panel, place, found)
    picture.save(path, board["title"])


def of_run(arguments):
    """Run ./launch.sh beside a Prometheus; yields it with the time of the run, and ends it after that."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from dashboards import Prometheus

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prometheus = Prometheus(folder, every_s=5)
        try:
            job = subprocess.Popen([ROOT / "launch.sh", f"run_dir={folder}/run", *arguments])
            seen = []
            while job.poll() is None:
                if prometheus.ask("straggle_steps_total > 0"):
                    seen.append(time.time())
                time.sleep(1)
            if job.returncode or not seen:
                sys.exit("the run failed, or was not scraped: nothing is drawn")
            yield Source(prometheus.url, seen[0], seen[-1])
        finally:
            prometheus.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--board", choices=[path.stem for path in sorted(GRAFANA.glob("dashboards/*.json"))], default="run"
    )
    parser.add_argument("--rows", nargs="+", default=[], help="titles of the rows to draw; otherwise all")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="variables of the dashboard")
    parser.add_argument("--prometheus", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15, help="of --prometheus: the last 15")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("dashboard.svg"))
    parser.add_argument("keys", nargs="*", help="of ./launch.sh, after --")
    own = parser.parse_args()
    board = json.loads((GRAFANA / "dashboards" / f"{own.board}.json").read_text())
    titles = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    if unknown := [row for row in own.rows if row not in titles]:
        parser.error(f"no row {unknown[0]!r} in {own.board}; it has {', '.join(titles)}")
    if wrong := [each for each in own.set if "=" not in each]:
        parser.error(f"--set {wrong[0]}: wants NAME=VALUE, such as rank=3")
    if not own.prometheus and shutil.which("prometheus") is None:
        parser.error("prometheus is not installed (Debian's package prometheus); --prometheus takes one that runs")
    now = time.time()
    try:
        for source in [Source(own.prometheus, now - 60 * own.minutes, now)] if own.prometheus else of_run(own.keys):
            draw(board, source, dict(each.split("=", 1) for each in own.set), own.rows, own.out)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url.partition('?')[0]}: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"{own.prometheus}: {error.reason}")


if __name__ == "__main__":
    main()
