"""What the lab shards a model with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from straggle.commands.config import load
from straggle.commands.config_schema import ConfigurationError
from straggle.lab import sharding
from straggle.lab.sharding import Sharded, WorkClock


def test_work_clock_counts_what_is_computed_and_slept_and_not_what_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"cpu": 0.0, "wall": 0.0}

    def sleep(seconds: float) -> None:
        now["wall"] += seconds + 0.125  # it lasts a little too long

    times = {"process_time": lambda: now["cpu"], "perf_counter": lambda: now["wall"], "sleep": sleep}
    monkeypatch.setattr(sharding, "time", SimpleNamespace(**times))
    clock = WorkClock()
    now["wall"] += 8.0  # for another rank
    assert clock() == 0.0
    now["cpu"] += 0.5
    clock.sleep(1.0)
    assert clock() == 1.625


@pytest.mark.parametrize(("shards", "ranks", "replicas"), [(2, 4, 2), (2, 6, 3), (4, 4, 1), (2, 0, 0)])
def test_ranks_are_dealt_out_to_replicas(shards: int, ranks: int, replicas: int) -> None:
    assert Sharded(shards).replicas(ranks) == replicas


def test_local_sgd_is_refused_for_a_sharded_model() -> None:
    load("compare", ["methods=[ddp,local_sgd]"])
    with pytest.raises(ConfigurationError, match="local_sgd and parallel=sharded exclude each other"):
        load("compare", ["methods=[ddp,local_sgd]", "parallel=sharded"])
