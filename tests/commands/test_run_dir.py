"""A command in a run's folder that another uses touches nothing there."""

import pytest
from ranks import run_command

from straggle.commands.saved.run_dir import one_run


@pytest.mark.slow
def test_train_in_a_folder_that_is_in_use_touches_nothing_there(tmp_path):
    with one_run(tmp_path / "run"):
        printed = run_command("train", 1, "workload=digits", "steps=2", "run_dir=run", folder=tmp_path, status=2)
    assert printed.startswith("run_dir=run is in use by process")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
