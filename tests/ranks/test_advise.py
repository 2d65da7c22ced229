"""What the advice prints runs on real ranks, and real ranks under DDP have the advice that they need."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
from ranks import run_forked
from training import features, mlp
from watched import when, write_watch

from benchmarks.advise import named
from straggle.advise.answer import answer


def printed_code(text: str) -> list[str]:
    """The indented lines, those that belong together as one."""
    return [textwrap.dedent(block) for block in re.findall(r"(?:^  .*\n)+", text, re.MULTILINE)]


def run_printed(rank: int, code: str) -> tuple[bool, str]:
    names: dict[str, Any] = {"model": mlp()}  # what the user's program has
    exec(code, names)
    model = names["model"]
    with model.step():
        model(features(rank, 0)).square().mean().backward()
    model.close()
    return model.last_report is not None, type(model.deadline).__name__


@pytest.mark.parametrize("ranks", [2, 3])
def test_printed_code_runs_in_a_program_that_has_a_model(ranks, tmp_path):
    given = answer(write_watch(tmp_path, ranks=ranks, extra=when(1, range(1000), backward=0.2)))
    dealt, use, shadow, drawn = printed_code(str(given))
    compile(dealt, "the loader that deals", "exec")
    compile(drawn, "the loop that draws", "exec")
    assert given.best is not None
    assert (
        run_forked(run_printed, ranks, use)
        == [(True, given.best.code.partition("(")[0].removeprefix("straggle."))] * ranks
    )
    assert run_forked(run_printed, ranks, shadow) == [(True, "Shadow")] * ranks
    assert "launch.sh" not in str(given)  # the user's program knows nothing of it


@pytest.mark.slow
def test_real_ranks_under_ddp_name_the_one_that_is_busy():
    who, _, phase, share, *_ = named(quick=True)  # what they have of the excess, to a tenth, is for an idle machine
    assert who[3], who
    assert phase[3], phase
    assert float(share[2].rstrip("%")) > 50, share
