"""Charts and pages: complete without a script, and in a browser they answer, fit a phone, a dark room and paper."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from chromium import ask, needs_chromium

from octavo_cli.page.charts import Chart, Series, draw, grid_of, tick_text, ticks, with_text
from octavo_cli.page.document import document, section, table

LOSS = Chart(
    "Loss <of> one",
    "It falls from 4 to 1.",
    "step",
    "nats",
    [Series("a", [(step, 4 / step) for step in range(1, 101)]), Series("b & c", [(1, 3.0), (50, None), (100, 2.0)], 1)],
    lines=[("even", 2.5)],
)


def probe(name: str) -> str:
    """The body of a function that a page is asked."""
    return (Path(__file__).parent / "probes" / f"{name}.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two charts and a wide table."""
    rows = [["a recipe", *("0.123456 of something" for _ in range(5))] for _ in range(3)]
    header = ["recipe", *(f"column {number}" for number in range(5))]
    body = section("t", "Table", table("Told", header, rows, (1,))) + section("c", "Charts", grid_of([LOSS, LOSS]))
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(document("A title", "A lead.", body), encoding="utf-8")
    return path


def test_a_chart_has_all_of_its_points_without_a_script() -> None:
    """The drawing, the labels, the text for people who do not see it, and the data, escaped."""
    text = draw(LOSS)
    first, second = re.findall(r'<g data-series="\d" class="[^"]*"><path class="line" d="M([^"]*)"', text)
    assert len(first.split("L")) == 100
    assert len(second.split("L")) == 2  # a value that is not there is left out
    assert first.startswith("0.0 ")
    assert "1000.0 " in first.split("L")[-1]
    assert "Loss &lt;of&gt; one" in text
    assert 'aria-label="It falls from 4 to 1."' in text
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', text)[0])
    assert data["series"][1] == {"name": "b & c", "points": [[1, 3.0], [100, 2.0]]}
    assert ">even</span>" in text


def test_logarithms_leave_out_what_has_none_and_nothing_is_a_sentence() -> None:
    """Zeros and NaN are no points; a chart of nothing says so."""
    points = [(1, 0.0), (2, 1e-6), (3, 1e2), (4, math.nan), (5, math.inf)]
    text = draw(Chart("t", "s", "x", "y", [Series("a", points)], log=True))
    assert "(logarithmic)" in text
    assert json.loads(re.findall(r"json\">(.*?)</script>", text)[0])["series"][0]["points"] == [[2, 1e-6], [3, 1e2]]
    assert "Nothing to draw" in draw(Chart("t", "s", "x", "y", [Series("a", [(1, None)])]))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 7.9), (31.501, 31.507), (1e-9, 3e-9), (0.0, 12345.0)])
def test_ticks_are_few_inside_and_told_apart(low: float, high: float) -> None:
    """Two to six, each with its own text."""
    found = with_text(ticks(low, high))
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= value <= high + 1e-9 for value, _ in found)
    assert len({text for _, text in found}) == len(found)
    assert tick_text(0) == "0"


def test_a_page_fetches_nothing(page: Path) -> None:
    """No address but anchors, one style, scripts of ours alone, and Octavo's name with the way to its documentation."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|srcset|poster|data)=["']|url\(|@import|<link|<iframe|https?://""", text)
    assert "<strong>Octavo</strong>" in text
    assert "documentation" in text


@needs_chromium
def test_a_reader_hovers_zooms_and_hides(page: Path) -> None:
    """In a browser: values at the pointer, a part of x after a drag, all of it again, a series off and on, and keys."""
    answer = ask(
        page,
        probe("hover"),
    )
    assert answer["tip"].split("\n")[0] == "step 1"
    assert re.search(r"a\s+4", answer["tip"])
    assert re.search(r"b & c\s+3", answer["tip"])
    left, _, width, _ = map(float, answer["view"].split())
    assert left == pytest.approx(500, abs=1)
    assert width == pytest.approx(250, abs=1)
    assert answer["button"]
    assert answer["zoomed"] != answer["before"] == answer["after"]
    assert answer["reset"].split()[0::2] == ["0", "1000"]
    assert (answer["off"], answer["pressed"]) == ("none", "false")
    assert answer["keyed"].startswith("step 1")
    assert "\na" not in answer["keyed"]


@needs_chromium
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_cut_off_at_this_width(page: Path, width: int) -> None:
    """No sideways scrolling, each cell of the table within the page, and text of a readable size."""
    answer = ask(
        page,
        probe("fits"),
        width,
    )
    assert answer["width"] == width
    assert answer["content"] <= width
    assert answer["outside"] == 0
    assert min(answer["charts"]) > 250
    assert answer["text"] >= 12


@needs_chromium
def test_light_and_dark_rooms_have_their_own_colours(page: Path) -> None:
    """Contrast of text with its background of at least 4.5 to 1 in both, and lines of at least 3 to 1."""
    for dark, extra in ((False, ()), (True, ("--force-dark-mode", "--blink-settings=preferredColorScheme=0"))):
        answer = ask(page, probe("colours"), 1200, *extra)
        assert answer["dark"] is dark
        assert min(answer["text"]) >= 4.5
        assert min(answer["lines"]) >= 3
