"""Exit status 0 while this container's workers train: their endpoints answer, and their last steps are not long ago.

Where they are, and whether by TLS, stands in the run's target files (RUN_DIR/targets); METRICS_URL says it instead.
METRICS_CLIENT_CERT: a file with a client's certificate and its key, for endpoints that want one.
"""

import json
import os
import re
import socket
import ssl
import urllib.request
from pathlib import Path

LIMIT_S = float(os.environ.get("HEALTHY_S", "60"))  # a step, or an evaluation between two, takes less


def urls():
    """Of all workers of this container, which go by its name in the files of the run."""
    if "METRICS_URL" in os.environ:
        return {os.environ["METRICS_URL"]}
    found = set()
    for path in Path(os.environ.get("RUN_DIR", "/runs/latest"), "targets").glob("rank*.json"):
        for entry in json.loads(path.read_text()):
            scheme = entry["labels"].get("__scheme__", "http")
            places = (target.rpartition(":") for target in entry["targets"])
            found |= {
                f"{scheme}://127.0.0.1:{port}/metrics" for host, _, port in places if host == socket.gethostname()
            }
    return found or {"http://127.0.0.1:9640/metrics"}


def page(url):
    """The metrics. Whose certificate it is does not matter here: this container asks itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "METRICS_CLIENT_CERT" in os.environ:
        context.load_cert_chain(os.environ["METRICS_CLIENT_CERT"])
    with urllib.request.urlopen(url, timeout=5, context=context) as answer:
        return answer.read().decode()


def trains(url):
    found = re.search(r"^straggle_since_step_seconds\{[^}]*\} (\S+)", page(url), re.MULTILINE)
    return found is not None and float(found[1]) < LIMIT_S


if __name__ == "__main__":
    raise SystemExit(not all(trains(url) for url in urls()))
