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
