"""A Prometheus that scrapes a soak's ranks, and what it has of them at the end."""

import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

EVERY_S = 1  # between scrapes


class Scraped:
    """The server of the tests of dashboards, for the targets in ``folder``/run; none if it is not installed."""

    def __init__(self, folder):
        self._server, self._began_at = None, time.monotonic()
        (folder / "run" / "targets").mkdir(parents=True)
        if shutil.which("prometheus") is None:
            print("prometheus is not installed (Debian's package prometheus): nothing is scraped")
            return
        from dashboards import Prometheus

        self._server = Prometheus(folder)

    def problems(self, minutes, ranks):
        """Print what was scraped; what is not as wanted. Each rank is down while its process is started again."""
        if self._server is None:
            return []
        window = f"[{round(time.monotonic() - self._began_at)}s]"
        scrapes = self._by_rank(f"count_over_time(straggle_steps_total{window})")
        most_samples = self._by_rank(f"max_over_time(scrape_samples_scraped{window})")
        print(f"\nscraped by Prometheus every {EVERY_S} s: " + ", ".join(f"{n:.0f}" for n in scrapes.values()), end="")
        print(f" times by rank; at most {max(most_samples.values(), default=0):.0f} samples in a scrape")
        wanted = 0.5 * 60 * minutes / EVERY_S
        few = [rank for rank in range(ranks) if scrapes.get(str(rank), 0) < wanted]
        alerts = self._server.ask(f"count by (alertname) (count_over_time(ALERTS{{alertstate='firing'}}{window}))")
        print("alerts that fired: " + (", ".join(sorted(own["metric"]["alertname"] for own in alerts)) or "none"))
        return [f"ranks {few} were scraped fewer than {wanted:.0f} times"] if few else []

    def _by_rank(self, expr):
        found = {}
        for own in self._server.ask(expr):
            rank = own["metric"].get("rank", own["metric"].get("instance", "?"))
            found[rank] = found.get(rank, 0.0) + float(own["value"][1])
        return dict(sorted(found.items()))

    def close(self):
        if self._server is not None:
            self._server.close()
