"""The page of a run in a real browser: what is drawn, what is read, what is printed."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import BINARY, Page, browser, file_url
from pages import ODD, pulled_run, slow_run, write_run

from straggle.observe.page.page import write_report

needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of each kind of run, written when it is first drawn."""

    @functools.cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        if name == "compare":
            runs = [write_run(folder / part, slow_run()) for part in ("a_run_with_quite_a_long_name_of_its_own", "b")]
            return write_report(runs[0], compare=runs[1])
        odd = {"slow": slow_run, "many ranks": lambda: slow_run(150, 64), "pulled": pulled_run}
        return write_report(write_run(folder, odd[name]() if name in odd else ODD[name]))

    return write


OVERLAPS = """[...document.querySelectorAll('.chart')].flatMap(chart => {
  const boxes = [...chart.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .legendtext')]
    .map(text => ({ text: text.textContent, box: text.getBoundingClientRect() })).filter(each => each.box.width);
  return boxes.flatMap((one, at) => boxes.slice(at + 1).filter(other =>
    one.box.left < other.box.right - 1 && other.box.left < one.box.right - 1 &&
    one.box.top < other.box.bottom - 2 && other.box.top < one.box.bottom - 2)
    .map(other => chart.id + ': ' + one.text + ' / ' + other.text)); })"""


OUTSIDE = """[...document.querySelectorAll('.chart .main-svg text')].filter(text => {
  const box = text.getBoundingClientRect(), chart = text.closest('.chart').getBoundingClientRect();
  return box.width && (box.right > chart.right + 1 || box.left < chart.left - 1); }).map(text => text.textContent)"""


# lanes of which more than a tenth of the page's width has a colour, and all lanes
LANES = """[...document.querySelectorAll('.picture svg')].filter(svg => [...svg.querySelectorAll('path')].some(
  path => path.getBoundingClientRect().width > innerWidth / 10)).length"""
NUM_LANES = "document.querySelectorAll('.picture svg').length"
# numbers of steps that touch each other
NEAR = """[...document.querySelectorAll('.picture .steps')].flatMap(steps => {
  const boxes = [...steps.children].map(tick => tick.getBoundingClientRect());
  return boxes.slice(1).filter((box, at) => box.left < boxes[at].right + 2).map(box => box.left); })"""


def opened(page: Page, path: Path, **how: Any) -> Page:
    page.problems.clear()
    page.requests.clear()
    page.open(file_url(path), **how)
    return page


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "name"),
    [(390, name) for name in ("slow", "compare", "many ranks", "pulled", *ODD)]
    + [(1280, name) for name in ("compare", "many ranks")],
)
def test_page_draws_fits_and_loads_nothing(width: int, name: str, page: Page, written: Callable[[str], Path]) -> None:
    path = written(name)
    opened(page, path, width=width)
    assert page.problems == []
    assert page.requests == [file_url(path)]
    assert page.run("innerWidth") == width
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelectorAll('.chart .main-svg').length") > 0
    assert page.run("[...document.querySelectorAll('.chart')].filter(chart => !chart.data).length") == 0
    assert page.run(OVERLAPS) == []
    assert page.run(OUTSIDE) == []
    assert page.run(LANES) == {"no times": 0, "compare": 8, "many ranks": 64}.get(name, page.run(NUM_LANES))
    assert page.run(NEAR) == []


@needs_browser
@pytest.mark.slow
def test_picture_is_above_all_numbers_and_its_colours_can_be_told_from_the_page_in_light_and_in_dark(
    page: Page, written: Callable[[str], Path]
) -> None:
    for dark in (False, True):
        opened(page, written("slow"), dark=dark)
        colours = page.run("[...document.querySelectorAll('.picture path')].map(path => getComputedStyle(path).fill)")
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert len(set(colours)) >= 4
        assert min(_contrast(colour, paper) for colour in set(colours)) > 1.15
        assert _contrast(colours[0], paper) > 3, "work"
        below = page.run("document.querySelector('#headline').getBoundingClientRect().top")
        assert page.run("document.querySelector('.picture').getBoundingClientRect().bottom") < min(below, 900)


def _contrast(one: str, other: str) -> float:
    """As WCAG 2.1 defines it: 1 to 21."""
    lights = []
    for colour in (one, other):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@needs_browser
@pytest.mark.slow
def test_pointing_at_a_cell_tells_the_cause(page: Page, written: Callable[[str], Path]) -> None:
    opened(page, written("slow"))
    x, y = page.run(
        """(() => { const chart = [...document.querySelectorAll('.chart')].find(c => c.data[0].type === 'heatmap');
        chart.scrollIntoView({ block: 'center' });
        const { xaxis, yaxis } = chart._fullLayout, box = chart.getBoundingClientRect();
        return [box.left + xaxis._offset + xaxis.d2p(22), box.top + yaxis._offset + yaxis.d2p(1)]; })()"""
    )
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = page.run(
        "new Promise(done => { const look = () => { const text = document.querySelector('.hovertext');"
        "text ? done(text.textContent) : setTimeout(look, 20); }; look(); })"
    )
    assert "rank 1, step 22: late in data, stood in for" in told


@needs_browser
@pytest.mark.slow
def test_text_can_be_read_in_light_in_dark_and_on_paper(page: Page, written: Callable[[str], Path]) -> None:
    path = written("slow")
    ink = "[...new Set([...document.querySelectorAll('.chart .xtick text')].map(t => getComputedStyle(t).fill))]"
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for dark in (False, True):
        opened(page, path, dark=dark)
        seen[dark] = page.run(ink), page.run(paper)
    assert seen[False] == (["rgb(27, 31, 36)"], "rgb(255, 255, 255)")
    assert seen[True] == (["rgb(232, 234, 237)"], "rgb(20, 23, 27)")
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert (page.run(ink), page.run(paper)) == seen[False]


@needs_browser
@pytest.mark.slow
def test_printed_charts_fit_the_paper_and_fit_the_screen_again(page: Page, written: Callable[[str], Path]) -> None:
    opened(page, written("slow"))
    page.run(
        "window.printed = []; addEventListener('beforeprint', () => { printed ="
        "[...document.querySelectorAll('.chart .main-svg')].map(svg => svg.width.baseVal.value); })"
    )
    before = page.run("document.querySelector('.chart .main-svg').width.baseVal.value")
    pdf = base64.b64decode(page.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert 0 < max(page.run("printed")) <= 660
    assert page.run("document.querySelector('.chart .main-svg').width.baseVal.value") == before
    assert page.problems == []
