"""The site is built without a warning; every page is in its list, and every public name in the reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from repository import ROOT

import straggle

PAGES = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_every_page_is_in_the_list_of_the_site():
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == PAGES | {"index.md"}


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: straggle\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(straggle.__all__)


def test_the_repository_has_one_address():
    (address,) = re.findall(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert f'Repository = "{address}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "index.html").read_text()
    assert 'href="advice/"' in first  # a page
    assert "/blob/main/examples/ddp_loop.py" in first  # a file of the repository
    assert "step.svg" in first
    assert 'id="straggle.StagedDataParallel.pause"' in (tmp_path / "reference" / "index.html").read_text()
