"""`straggle watch`: a DDP script as it is, whose times can be asked about afterwards."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks
from repository import ROOT
from torch.nn.parallel import DistributedDataParallel

from straggle.commands import watch
from straggle.commands.advise import advise


def watched(rank, folder):
    """Runs the example in the ranks' own group; how many steps this rank recorded."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    made = DistributedDataParallel.__init__
    script = str(ROOT / "examples" / "images" / "ddp.py")
    tiny = ["--epochs", "1", "--num-images", "512", "--batch-size", "8", "--out", f"{folder}/out.pt"]
    words = ["straggle", f"run_dir={folder}/run", script, *tiny]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        assert watch.main() == 0
    assert DistributedDataParallel.__init__ is made
    return len(Path(folder, "run", "watch", f"rank{rank}.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_it_is_recorded(tmp_path, capsys):
    assert run_ranks(watched, 2, str(tmp_path), timeout_s=120) == [33, 33]  # a line for each step, and the first
    assert advise([str(tmp_path / "run")]) == 0
    assert "steps of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "run_dir=DIR"),
        ([], 2, "SCRIPT"),
        (["none.py"], 2, "none.py is no file"),
        (["run_dir=x"], 2, "which script?"),
    ],
)
def test_words_that_are_wrong_are_refused(words, status, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["straggle", *words])
    assert watch.main() == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_the_script_has_its_own_words_and_errors(tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--help', 'run_dir=mine']\nraise SystemExit(7)\n")
    monkeypatch.setattr(sys, "argv", ["straggle", str(script), "--help", "run_dir=mine"])
    with pytest.raises(SystemExit) as end:
        watch.main()
    assert end.value.code == 7
    assert sys.argv[0] == "straggle"
