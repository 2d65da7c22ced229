"""What bash offers at a TAB, by the script that `straggle completion bash` prints, in a real bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from straggle.commands.completion import keys_of, script
from straggle.commands.config import config_dir, load

# as bash calls it at a TAB after the line; where its words end is told apart by COMP_WORDBREAKS
ASK = 'COMP_LINE=$1 COMP_POINT=${#1}; _straggle 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
CHOICES = {
    "train": {"deadline=auto", "deadline=budget", "deadline.q=", "steps=", "resume=true", "resume=false"},
    "launch": {"--nproc-per-node", "--nnodes"},
    "report": set(),
}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("straggle tr", {"train"}),
        ("straggle ", {"train", "launch", "report"}),
        ("straggle train dead", {"deadline=auto", "deadline=budget", "deadline.q="}),
        ("straggle train deadline=", {"auto", "budget"}),  # the word is what stands after the "="
        ("straggle train steps=5 resume=", {"true", "false"}),
        ("straggle launch --nn", {"--nnodes"}),
        ("straggle report ", {""}),  # then bash offers files
        ("straggle nosuch ", {""}),
    ],
)
def test_bash_offers_what_fits(line: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "straggle.bash").write_text(script(CHOICES))
    command = ["bash", "--norc", "-c", f"source {tmp_path}/straggle.bash; {ASK}", "bash", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == offered


def test_keys_are_those_of_the_configuration_and_of_each_option() -> None:
    keys = keys_of(config_dir(), "compare")
    assert {"block=", "steps=", "late_handling.grace_s=", "faults=none", "deadline.budget_s=", "resume=true"} <= keys
    assert not any("_target_" in key or key.startswith("hydra") for key in keys)
    options = {key for key in keys if key.startswith("deadline=")}
    assert options == {f"deadline={path.stem}" for path in (config_dir() / "deadline").glob("*.yaml")}
    for option in options:  # the configuration takes each
        load("train", [option])
