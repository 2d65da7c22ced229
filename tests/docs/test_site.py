"""The site is built without a warning; every page is in its list, and every public name in the reference."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from browser import BINARY, browser, file_url
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


ADDRESS = "https://repository.example/straggle"


def test_link_to_a_file_of_the_repository_needs_its_address():
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="loop.md"))
    text = "[an `example`](../examples/ddp_loop.py), [a part](start.md#1-is-a-rank-slow)"
    for address, first in (
        ("", "an `example`"),
        (ADDRESS, f"[an `example`]({ADDRESS}/blob/main/examples/ddp_loop.py)"),
    ):
        changed = hooks["on_page_markdown"](text, page, {"repo_url": address})
        assert changed == f"{first}, [a part](start.md#1-is-a-rank-slow)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built without a warning."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": ADDRESS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_site_has_its_pages_and_leads_to_files_of_the_repository(site):
    first = (site / "index.html").read_text()
    assert 'href="who-is-slow/"' in first  # a page
    assert f"{ADDRESS}/blob/main/examples/ddp_loop.py" in first  # a file of the repository
    assert "step.svg" in first
    assert 'id="straggle.StagedDataParallel.pause"' in (site / "reference" / "index.html").read_text()


@pytest.mark.slow
def test_each_page_is_there_as_markdown_and_listed_for_programs(site):
    listed = re.findall(r"^- \[.+\]\((\S+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert set(listed) == PAGES | {"index.md"}
    for name in listed:
        assert (site / name).read_text().startswith("# "), name
    assert "](start.md)" in (site / "index.md").read_text()


# what a reader would have to scroll the page for: tables and code scroll by themselves
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(each => {
  for (let box = each; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX !== 'visible') return false;
  return each.getBoundingClientRect().right > innerWidth + 1; }).map(each => each.outerHTML.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
def test_no_page_is_wider_than_a_phone(site):
    pages = sorted(site.rglob("index.html"))
    assert len(pages) == len(PAGES) + 1
    with browser() as page:
        for path in pages:
            page.open(file_url(path), width=390, drawn="true")
            name = path.relative_to(site)
            assert page.run("document.styleSheets.length") > 0, name
            assert page.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390], (
                name,
                page.run(TOO_WIDE),
            )
