"""Results: each entry answers one question in few words, and numbers are the same in entry, page and README."""

import re

import pytest
from repository import ROOT

FOLDER = ROOT / "results"
SHORT = (ROOT / "docs" / "results.md").read_text()
PAGES = [SHORT, (FOLDER / "promises.md").read_text()]
ENTRIES = sorted(FOLDER.glob("20*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.,])(?<!\w-)\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")


def numbers(text):
    """Those of a text, but for what stands in code and for where links lead."""
    return NUMBER.findall(re.sub(r"`[^`]*`", " ", LINK.sub("]", text)))


def rows_with_their_entries():
    """Each row of the pages' tables with the entries that it, or else the last row before it, links."""
    linked = []
    for line in "\n".join(PAGES).splitlines():
        names = (target.rpartition("/")[2] for target in LINK.findall(line))
        found = [FOLDER / name for name in names if name.startswith("20")]
        linked = found or linked
        if line.startswith("| ") and not line.startswith(("| ---", "| | ")) and "| measured |" not in line:
            yield pytest.param(line, linked, id=re.sub(r"\W+", "-", line[:40]).strip("-"))


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_entry_has_a_date_a_question_and_its_four_parts_in_at_most_150_words(path):
    text = path.read_text()
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d-[a-z0-9-]+", path.stem)
    assert re.match(r"# .*\?\n\n", text)
    assert re.findall(r"^- (Command|Machine|Result|What follows)\b", text, re.MULTILINE) == [
        "Command",
        "Machine",
        "Result",
        "What follows",
    ]
    assert len(text.split()) <= 150


def test_scripts_that_entries_name_exist():
    named = {script for path in ENTRIES for script in re.findall(r"benchmarks/\w+\.py", path.read_text())}
    assert named
    assert [script for script in sorted(named) if not (ROOT / script).exists()] == []


def test_every_entry_is_in_the_list_with_its_date_and_question():
    listed = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("- ")]
    questions = [path.read_text().partition("\n")[0].removeprefix("# ") for path in ENTRIES]
    expected = [f"- {path.name[:10]}: [{own}]({path.name})" for path, own in zip(ENTRIES, questions, strict=True)]
    assert sorted(listed) == sorted(expected)


@pytest.mark.parametrize(("row", "entries"), list(rows_with_their_entries()))
def test_number_of_a_row_is_in_the_entry_that_it_links(row, entries):
    known = {number for path in entries for number in NUMBER.findall(path.read_text())}
    measured = row.split(" | ")[1]
    assert numbers(measured), row
    assert set(numbers(measured)) - known == set()


def test_pages_of_results_are_short():
    assert len(SHORT.split()) <= 500
    assert len(PAGES[1].split()) <= 1500


def test_number_of_the_readme_beside_a_link_to_results_is_there():
    prose = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\n|\n(?=- )", prose)
    measured = [number for own in paragraphs if "docs/results.md" in own for number in numbers(own)]
    assert measured
    assert set(measured) - set(NUMBER.findall(SHORT)) == set()
