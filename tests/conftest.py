"""Files with long tests come first where several run at once, so that the others do not wait for them at the end."""

from collections import Counter


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        cluster = {item.path for item in items if item.get_closest_marker("docker")}  # the longest of all
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (item.path not in cluster, -slow[item.path], item.path))
