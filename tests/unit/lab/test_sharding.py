"""What the lab shards a model with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError
from straggle.lab import sharding
from straggle.lab.build import build_members
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


@pytest.mark.parametrize("key", ["methods=[ddp,local_sgd]", "members=elastic"])
def test_what_is_compared_for_whole_models_only_is_refused_for_a_sharded_one(key: str) -> None:
    load("compare", [key])
    with pytest.raises(
        ConfigurationError, match=f"{key.partition(',')[2].strip(']') or key} and parallel=sharded excl"
    ):
        load("compare", [key, "parallel=sharded"])


def test_half_of_the_replicas_go_on_if_nothing_else_is_said() -> None:
    both = ["members=elastic", "parallel=sharded"]
    given = {2: 1, 3: 2, 4: 2}
    assert {number: build_members(load("train", both), number).min_ranks for number in given} == given
    assert build_members(load("train", [*both, "members.min_ranks=2"]), 2).min_ranks == 2
    assert build_members(load("train", both[:1]), 2).min_ranks is None
