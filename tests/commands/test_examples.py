"""The loops of `examples/`, each beside its form under DDP: with nobody late they are equal bit for bit."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from queued_device import queued_device
from ranks import run_forked
from repository import ROOT

import straggle

pytestmark = pytest.mark.slow
TINY = {
    "gpt": ("--text", ROOT / "LICENSE", "--steps", 4, "--evaluate-every", 2, "--batch-size", 2, "--context", 16),
    "images": ("--epochs", 2, "--num-images", 64, "--batch-size", 8),
}


def run_both(rank, name, folder):
    """What each prints, and saves at its end; in the ranks' own group."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    results = []
    for kind in ("ddp", "straggled"):
        out, printed = Path(folder) / f"{kind}.pt", io.StringIO()
        words = [f"{kind}.py", *map(str, TINY[name]), "--out", str(out)]
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
            mock.patch.object(straggle, "AutoDeadline", straggle.WaitForAll),  # on a busy machine a rank may be late
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(str(ROOT / "examples" / name / f"{kind}.py"), run_name="__main__")
        saved = torch.load(out, weights_only=True)
        parameters = [value for key, value in saved.get("model", saved).items() if "running" not in key]
        results.append((printed.getvalue().count("\n"), [value.double().flatten().tolist() for value in parameters]))
    return results


@pytest.mark.parametrize("name", TINY)
def test_loop_is_equal_to_that_under_ddp(name, tmp_path):
    (ddp, straggled), other = run_forked(run_both, 2, name, str(tmp_path), timeout_s=120)
    assert straggled[1] == ddp[1]  # but for BatchNorm's statistics: DDP keeps rank 0's, the merge the mean
    assert ddp[0] == straggled[0] == 2  # lines of rank 0
    assert [lines for lines, _ in other] == [0, 0]
    assert len(ddp[1]) == len(straggled[1]) > 0


def printed_on_a_queue(rank, path, words):
    """What an example prints on this rank if its device is a queue, of which the host knows a step's loss later."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    with (
        mock.patch.object(sys, "argv", [path, *map(str, words)]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        queued_device() as device,
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue(), device.copies


@pytest.mark.parametrize(
    ("example", "num_ranks"), {"ddp_loop": 2, "sharded_loop": 4, "gpt/straggled": 2, "images/straggled": 2}.items()
)
def test_example_prints_its_loss_also_on_a_device_that_tells_it_a_step_later(example, num_ranks, tmp_path):
    words = TINY.get(name := example.partition("/")[0], ())
    words = [*words, "--out", tmp_path / "out.pt"] if name in TINY else []
    results = run_forked(printed_on_a_queue, num_ranks, str(ROOT / "examples" / f"{example}.py"), words, timeout_s=120)
    assert all(copies for _, copies in results)
    assert results[0][0].count("loss") >= 2
    assert "nan" not in results[0][0]
