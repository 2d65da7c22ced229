"""The command that simulates, and how much memory it needs."""

import json
import resource
from pathlib import Path

import pytest
from ranks import run_command, started

from straggle import AutoDeadline
from straggle.lab.simulate.delays import DropCompute
from straggle.lab.simulate.ranks import simulate
from straggle.lab.simulate.units import Work


@pytest.mark.slow
def test_command_writes_numbers_that_agree_with_each_other_and_a_picture(tmp_path):
    keys = ("ranks=32", "steps=60", "deadline=quantile", "run_dir=.")
    assert "effective speedup" in run_command("simulate", 1, *keys, folder=tmp_path)
    numbers = json.loads((tmp_path / "simulation.json").read_text())
    ratio = numbers["wait_for_all_seconds"]["mean"] / numbers["step_seconds"]["mean"]
    assert numbers["effective_speedup"] == pytest.approx((1 - numbers["dropped_share"]) * ratio)
    assert sum(numbers["ranks_dropped"]) / 32 == pytest.approx(numbers["dropped_share"], rel=1e-4)
    assert sum(numbers["dropped_by_stage"]) / 12 == pytest.approx(numbers["dropped_share"], rel=1e-4)
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_for_hydra_is_left_to_it(tmp_path):
    keys = ("ranks=4", "steps=5")
    run_command("simulate", 1, *keys, "hydra.output_subdir=kept", folder=tmp_path)  # its keys
    assert "ranks: 4" in (tmp_path / "kept" / "config.yaml").read_text()
    assert "ranks: 4" in run_command("simulate", 1, *keys, "--cfg", "job", folder=tmp_path)  # and its flags


def memory_of_many_ranks():
    simulate(100, 100_000, Work(1.0), DropCompute(), AutoDeadline())
    Path("kibibytes").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


@pytest.mark.slow
def test_a_hundred_thousand_ranks_stay_within_four_gibibytes(tmp_path):
    with started(memory_of_many_ranks, folder=tmp_path) as process:
        assert process.status(200.0) == 0, process.log.read_text()
    assert int((tmp_path / "kibibytes").read_text()) < 4 * 2**20
