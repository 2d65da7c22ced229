"""The command that simulates, and how much memory it needs."""

import json
import subprocess
import sys

import pytest
from ranks import run_command


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


@pytest.mark.slow
def test_a_hundred_thousand_ranks_stay_within_four_gibibytes():
    script = (
        "import resource, torch; torch.set_num_threads(1)\n"
        "from straggle import AutoDeadline; from straggle.lab.simulate.delays import DropCompute\n"
        "from straggle.lab.simulate.ranks import simulate; from straggle.lab.simulate.units import Work\n"
        "simulate(100, 100_000, Work(1.0), DropCompute(), AutoDeadline())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 2**20  # kibibytes
