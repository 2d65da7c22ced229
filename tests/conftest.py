"""Each test has the marker of its folder, and files with long tests come first where several run at once."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
    if hasattr(config, "workerinput"):  # so that nobody waits for them at the end
        cluster = {item.path for item in items if item.get_closest_marker("docker")}  # the longest of all
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (item.path not in cluster, -slow[item.path], item.path))
