"""What the documentation says is true of the code: blocks run, keys and fields exist, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import runpy
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch_jobs import loaded_launch
from pages import slow_run, write_run
from ranks import run_forked
from repository import ROOT
from torch import nn
from torchrun import started_torchrun

import straggle
from straggle.commands.advise import arguments as advise_arguments
from straggle.commands.configuration.config import load
from straggle.commands.launching.launch_options import arguments as launch_arguments
from straggle.commands.report import arguments as report_arguments
from straggle.commands.watch import arguments as watch_arguments

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NUM_BATCHES = 3


def blocks(language: str) -> list[Any]:
    """All blocks of a language, each with a name that says where it is."""
    return [
        pytest.param(match[1], id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in PAGES
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def commands() -> list[Any]:
    """All command lines; what several pages have is one."""
    lines = [line for block in blocks("bash") for line in block.values[0].splitlines()]
    words = {tuple(shlex.split(line, comments=True)): line for line in lines if line and not line.startswith("#")}
    return [pytest.param(list(own), id=line) for own, line in words.items()]


# -- blocks of Python


def run_block(rank: int, block: str) -> tuple[int, list[bool]]:
    """Runs a block as a reader would, in a program that has a model, data and an optimizer; what it left."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    names: dict[str, Any] = {
        "straggle": straggle,
        "torch": torch,
        "model": net,
        "loader": [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(NUM_BATCHES)],
        "dataset": [(torch.randn(4), torch.randn(1)) for _ in range(16)],  # of 8 for each rank in an epoch
        "criterion": nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW(net.parameters()),
    }
    exec(compile(block, "block", "exec"), names)
    model = names["model"]
    model.close()
    assert model.last_report is not None
    now = [own.full_tensor() if hasattr(own, "full_tensor") else own for own in net.parameters()]
    changed = [not torch.equal(old, new) for old, new in zip(before, now, strict=True)]
    return model.last_report.step + 1, changed


# the blocks of staged-backward.md are complete programs of one process, which another test runs
@pytest.mark.parametrize("block", [block for block in blocks("python") if "staged-backward" not in str(block.id)])
def test_python_block_trains_on_two_ranks(block: str) -> None:
    steps, changed = (one := run_forked(run_block, 2, block))[0]
    assert one[1] == one[0]
    assert changed == [True] * 4
    expected = -(-NUM_BATCHES // 2) if "islice(batches" in block else NUM_BATCHES  # with two batches in each step
    if "zip(*2 * [iter(loader)])" in block:  # the same, without what is left over at the end
        expected = NUM_BATCHES // 2
    # what a rank was too late to bring is dealt again, and on a busy machine that takes one more step
    assert steps - expected in ((0, 1) if "DealtLoader" in block else (0,))


def test_readme_loop_is_the_one_in_the_package_docstring() -> None:
    lines = (straggle.__doc__ or "").strip().splitlines()[2:]
    assert "\n".join(lines) in "\n".join(block.values[0] for block in blocks("python"))


# -- commands


def check_command(words: list[str]) -> None:
    """Raises what a wrong command line would meet, without starting it."""
    while re.match(r"[A-Z_]+=", words[0]):
        assert words[0].partition("=")[0] in re.findall(r"\w+", (ROOT / "launch.sh").read_text())
        words = words[1:]
    if words[0] == "srun":
        words = words[next(i for i, word in enumerate(words) if not word.startswith("-") and i > 0) :]
    program, arguments = words[0], words[1:]
    if program == "straggle" and arguments[0] != "launch":
        program, arguments = "python", ["-m", "straggle", *arguments]
    elif program == "straggle":
        if arguments[1] == "--store-only":
            return
        given = launch_arguments(arguments[1:], {})
        program, arguments = "torchrun", [*(["-m"] if given.module else []), given.script, *given.arguments]
    if program == "./launch.sh":
        assert os.access(ROOT / program, os.X_OK)
        name = arguments[0] if arguments and "=" not in arguments[0] else "train"
        if name == "report":
            report_arguments(arguments[1:])
        elif name == "test":
            assert all((ROOT / word).exists() for word in arguments[1:] if word.endswith(".py"))
        elif not name.startswith("-"):
            load(name, arguments[name != "train" :])
    elif "-m" in arguments:
        module, keys = arguments[arguments.index("-m") + 1], arguments[arguments.index("-m") + 2 :]
        assert module == "straggle", module
        word, keys = keys[0], keys[1:]
        if word == "report":
            report_arguments(keys)
        elif word == "advise":
            advise_arguments(keys)
        elif word == "watch":
            watch_arguments(keys)
        else:
            load(*((keys[0], keys[1:]) if word == "check" else (word, keys)))
    else:
        script = next((word for word in arguments if word.endswith(".py")), program)
        own = script == "train.py"  # the reader's
        assert own or (ROOT / script).exists() or program.startswith(".venv/bin/"), script


@pytest.mark.parametrize("words", commands())
def test_command_exists_and_its_keys_are_valid(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in ROOT.iterdir():
        if entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    for folder in ("checkpoint/step1", "decisions"):  # what resume=true and replay= look for
        (tmp_path / "runs" / "latest" / folder).mkdir(parents=True)
    (tmp_path / "runs" / "latest" / "checkpoint" / "step1" / "state.json").touch()
    write_run(tmp_path / "runs" / "latest", slow_run())
    monkeypatch.chdir(tmp_path)
    check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "./launch.sh faults=slow",
        "./launch.sh compare stepps=3",
        "./launch.sh report runs/latest comprae=runs/other",
        "NODES=2 ./launch.sh",
        "srun --nodes=2 ./launch.sh deadline.r=1",
        "torchrun -m straggle train workload.widht=8",
        "torchrun examples/none.py",
        "straggle launch --nproc-per-node 4 examples/none.py",
        "straggle launch --nproc 4 examples/ddp_loop.py",
        "straggle launch -m straggle train workload.widht=8",
    ],
)
def test_command_check_refuses_what_does_not_exist(line: str) -> None:
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check_command(shlex.split(line))


# -- names


def test_every_name_of_the_package_in_the_pages_exists() -> None:
    used = {name for page in PAGES for name in re.findall(r"\bstraggle\.([A-Z]\w+)", page.read_text())}
    assert used
    assert used <= set(straggle.__all__)


def test_every_policy_is_on_the_page_that_chooses() -> None:
    policies = {
        name
        for name in straggle.__all__
        if isinstance(kind := getattr(straggle, name), type)
        and issubclass(kind, (straggle.Deadline, straggle.Estimator))
        and not inspect.isabstract(kind)
    }
    assert {name for name in policies if f"`{name}(" not in (ROOT / "docs" / "choose.md").read_text()} == set()


# -- links


FOLDERS = ("docs", "results", "docker", "deploy", "tests", "examples", "benchmarks", "straggle")
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md")))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page ends with, as GitHub makes it of the title."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    broken = []
    for target in targets:
        if not re.match(r"https?:", target):
            file, _, anchor = target.partition("#")
            leads_to = page.parent / file if file else page
            if not leads_to.exists() or (anchor and anchor not in anchors(leads_to)):
                broken.append(target)
    assert broken == []


# -- examples


STAGED_PAGE = (ROOT / "docs" / "staged-backward.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", STAGED_PAGE, re.MULTILINE | re.DOTALL)


def printed_by(rank: int, program: str) -> str:
    """What a program prints on this rank; its process group is the one that there is."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        exec(program, {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize(("program", "text"), PROGRAMS)
def test_program_of_the_page_prints_what_stands_under_it(program: str, text: str) -> None:
    """In a process of its own, as a reader runs it."""
    assert run_forked(printed_by, 1, program) == [text]


def test_every_python_block_of_the_page_has_its_text_under_it() -> None:
    assert 0 < len(PROGRAMS) == STAGED_PAGE.count("```python") == STAGED_PAGE.count("```text")


def run_script(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def test_ddp_loop_runs_under_torchrun_and_the_slow_rank_is_late(tmp_path: Path) -> None:
    with started_torchrun(run_script, ROOT / "examples" / "ddp_loop.py", folder=tmp_path) as agent:
        assert agent.status(120.0) == 0, agent.log.read_text()
    printed = agent.log.read_text()
    assert "(1,)" in printed
    assert printed.count("identical") == 2


def test_example_with_own_policies_runs_on_two_ranks_and_the_slow_one_is_late() -> None:
    printed, _ = run_forked(printed_by, 2, (ROOT / "examples" / "own_policy.py").read_text())
    assert "late (1,)" in printed


@pytest.mark.slow
def test_sharded_example_runs_on_four_ranks_and_the_replica_of_the_slow_one_is_late() -> None:
    printed = run_forked(printed_by, 4, (ROOT / "examples" / "sharded_loop.py").read_text())
    assert "late: ['1 by rank 3']" in printed[0]
    assert all("shards identical" in words for words in printed)


def sizes_of(printed: str) -> dict[str, str]:
    """Of each rank that has trained to the end, the size of its shards.

    ``print`` writes a line and its end one after the other, so the line of another rank may come in between.
    """
    return dict(re.findall(r"rank (\d): trained from step \d+ on, size of its shards (\d+\.\d{6})", printed))


@pytest.mark.parametrize("between", ["\n", ""])
def test_line_of_a_rank_counts_also_if_another_one_writes_before_it_has_ended(between: str) -> None:
    lines = [f"rank {rank}: trained from step 90 on, size of its shards {rank}.500000" for rank in (3, 2)]
    assert sizes_of(between.join(lines) + "\n\n") == {"3": "3.500000", "2": "2.500000"}


@pytest.mark.slow
def test_replicas_example_goes_on_without_the_replica_whose_rank_dies(tmp_path: Path) -> None:
    words = ["--nproc-per-node=4", "--replica-size=2", ROOT / "examples" / "replicas_loop.py"]
    with loaded_launch(*words, folder=tmp_path) as job:
        assert job.status(240.0) == 0, job.log.read_text()
    printed = job.log.read_text()
    assert "replica 1 left: rank 3 of it: its process ended by SIGKILL" in printed
    assert "replica 1 joined: came back (2 of 2 replicas)" in printed
    assert re.search(r"goodput \d+\.\d%; lost to: ", printed)
    sizes = sizes_of(printed)
    assert (sizes["0"], sizes["1"]) == (sizes["2"], sizes["3"])


def test_ddp_loop_runs_as_a_single_process() -> None:
    (printed,) = run_forked(printed_by, 1, (ROOT / "examples" / "ddp_loop.py").read_text())
    assert "step 59" in printed
    assert "(0,)" not in printed


def test_examples_name_the_command_that_runs_them() -> None:
    names = ["ddp_loop.py", "own_policy.py", "replicas_loop.py", "sharded_loop.py"]  # each runs above
    assert [example.name for example in EXAMPLES] == names
    for example in EXAMPLES:
        assert f"examples/{example.name}" in (ast.get_docstring(ast.parse(example.read_text())) or ""), example
