"""The figures and the table of the architecture page show the tree as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from workspace import ROOT, packages, tracked

FOLDER, STATIC = ROOT / "docs" / "_figures", ROOT / "docs" / "_static"
sys.path.insert(0, str(FOLDER))

import bars  # noqa: E402
import call  # noqa: E402
import lines  # noqa: E402
import roofline  # noqa: E402
import training_runs  # noqa: E402
from all_figures import FIGURES  # noqa: E402
from sketch import Sketch  # noqa: E402

from octavo_cli.ranks.published import figures  # noqa: E402


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_from_the_tree(name: str) -> None:
    """A new package or room, a dependency, a file that moved, or a measurement shows: run `python docs/_figures`."""
    assert FIGURES[name]() == (STATIC / f"{name}.svg").read_text(), "run python docs/_figures"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_read_everywhere(name: str) -> None:
    """Each has a title for screen readers, colours of a dark scheme, and text that is text of at least 11 px."""
    drawing = ElementTree.fromstring(FIGURES[name]())
    title, style = (drawing.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "style"))
    assert title is not None
    assert title.text
    assert style is not None
    assert "prefers-color-scheme: dark" in str(style.text)
    assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", str(style.text))) >= 11


def test_figures_of_the_guide_are_on_a_page() -> None:
    """A figure that no page shows is not drawn."""
    pages = "".join(page.read_text() for page in tracked("docs/**/*.md"))
    assert [name for name in FIGURES if f"_static/{name}.svg)" not in pages] == []


def test_text_that_leaves_the_sheet_is_refused() -> None:
    """A longer caption does not run out of a figure unseen."""
    with pytest.raises(ValueError, match=r"reaches from 10 to .* of 720; make it shorter"):
        Sketch(title="A sketch").say(10, 10, "too long " * 20)


def test_bars_are_as_long_as_their_values() -> None:
    """Bars start at zero and share one scale, so that twice the value is twice the length."""
    values = {"model": {"a": 2.0, "b": 1.0}}
    drawing = bars.draw(bars.Chart("Title", "Source", {"a": "base", "b": "jax"}, values, "{:.1f}"))
    lengths = [float(width) for width in re.findall(rf'x="{bars.LEFT}" y="[\d.]+" width="([\d.]+)"', drawing)]
    assert lengths == [bars.LONGEST, bars.LONGEST / 2]


def test_lines_rise_with_their_values() -> None:
    """Lines share one scale from zero, and names that would lie on one another are refused."""
    values = {"a": ("base", [1.0, 2.0]), "b": ("jax", [0.0, 1.0])}
    drawing = lines.draw(lines.Lines("Title", "Source", [1, 2], values, 1, ("x", "y")))
    heights = [
        [float(y) for y in re.findall(r",([\d.]+)", path)] for path in re.findall(r'-line" d="([^"]+)"', drawing)
    ]
    (low, high), (zero, one) = ([lines.BOTTOM - y for y in line] for line in heights)
    written = 1e-3  # coordinates have six digits
    assert zero == 0
    assert low == one
    assert high == pytest.approx(2 * low, abs=2 * written)
    with pytest.raises(ValueError, match="'b' and 'a' end too close"):
        lines.draw(lines.Lines("T", "S", [1, 2], {**values, "b": ("jax", [0.0, 1.99])}, 1, ("x", "y")))


def test_points_of_the_roofline_lie_under_it_and_on_the_sheet() -> None:
    """A point above a limit would be a wrong count of bytes, or a rate of other work."""
    copy = roofline.record(roofline.BATCHED)["copy_tb_per_s"]
    found = roofline.points()
    shapes = {tuple(row["shape"]) for row in roofline.record(roofline.BATCHED)["rows"]}
    assert len(found) == len(shapes) * 2 * 4  # bf16 and blocks: three GEMMs, and the wgrad that is added to
    for label, intensity, rate in found:
        assert rate < min(copy * intensity, roofline.CHIP.bf16 if "bf16" in label else roofline.CHIP.fp8)
        assert all(low < value < high for value, (low, high) in (
            (intensity, roofline.INTENSITIES), (rate, roofline.RATES),
        ))  # fmt: skip
    (x, y), (further, lower) = roofline.place(128, 512), roofline.place(256, 256)
    assert (further - x, lower - y) == (roofline.OCTAVE, roofline.OCTAVE)


def test_curves_of_training_are_of_the_same_seeds() -> None:
    """A recipe that has one more seed is not drawn apart by that seed's text."""
    rows = [
        {"recipe": recipe, "seed": seed, "train_loss": [loss, loss / 2]}
        for recipe, seed, loss in (("bf16", 0, 4.0), ("bf16", 1, 2.0), ("bf16", 2, 9.0), ("a", 1, 3.0), ("a", 0, 5.0))
    ]
    assert training_runs.mean_losses(rows) == {"a": [4.0, 2.0], "bf16": [3.0, 1.5]}


def test_a_value_that_the_line_would_cross_stands_behind_it() -> None:
    """0.95 of a bar that is compared with 1 is written past the line, 0.5 and 1.2 at the ends of their bars."""
    values = {"model": {"a": 0.95, "b": 0.5, "c": 1.2}}
    series = {"a": "base", "b": "jax", "c": "torch"}
    drawing = bars.draw(bars.Chart("Title", "Source", series, values, "{:.2f}x", (1.0, "one")))
    places = {text: float(x) for x, text in re.findall(r'x="([\d.]+)"[^>]*>([\d.]+x)<', drawing)}
    unit = bars.LONGEST / 1.2
    expected = {"0.95x": 1.0, "0.50x": 0.5, "1.20x": 1.2}
    for text, value in expected.items():
        assert places[text] == pytest.approx(bars.LEFT + value * unit + bars.APART, abs=1e-2)


def test_differences_of_curves_are_per_cent_of_bf16() -> None:
    """Means of as many points as are asked for, each relative to bf16's at the same steps; bf16 itself has none."""
    losses = {"bf16": [2.0, 4.0, 1.0], "a": [2.02, 4.08, 0.5]}
    found = training_runs.differences(losses, 2)
    assert found.keys() == {"a"}
    assert found["a"] == pytest.approx([1.5, -50.0])


def test_names_of_curves_do_not_lie_on_one_another() -> None:
    """Names that would are moved apart, around the middle of theirs; one that stands alone keeps its place."""
    line = training_runs.LINE
    places = {"a": 100.0, "b": 101.0, "c": 300.0}
    assert training_runs._spread(places) == {"a": 100.5 - line / 2, "b": 100.5 + line / 2, "c": 300.0}
    found = training_runs._spread({name: 5.0 * number for number, name in enumerate("abcdef")})
    heights = list(found.values())
    assert list(found) == list("abcdef")
    assert all(lower - upper == pytest.approx(line) for upper, lower in pairwise(heights))


def test_no_line_runs_through_text() -> None:
    """In no figure: neither an arrow, nor a rule of a chart, nor the line that bars are compared with."""
    for name in FIGURES:
        drawing = ElementTree.fromstring(FIGURES[name]())
        boxes = list(_texts(drawing))
        for start, end in _lines(drawing):
            (x, to_x), (y, to_y) = (sorted(pair) for pair in zip(start, end, strict=True))
            for left, top, right, bottom, text in boxes:
                crossed = x < right and to_x > left and y < bottom and to_y > top
                assert not crossed, f"{name}: a line runs through {text!r}"


def _texts(drawing: ElementTree.Element) -> Iterator[tuple[float, float, float, float, str]]:
    """Left, top, right and bottom of each text, and the text."""
    sizes = {"prose": 11.5, "chip": 11, "name": 13, "say": 14, "head1": 15, "title": 15, "step": 12}
    for text in drawing.iter("{http://www.w3.org/2000/svg}text"):
        kind, said = text.get("class", ""), str(text.text)
        width = call.width_of(said, sizes.get(kind, 13), mono=kind in ("chip", "name", "code")) * 0.9
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        x -= {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        yield x, y - 9, x + width, y + 2, said


def _lines(drawing: ElementTree.Element) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Both ends of every rule that stands or lies, and of every piece of an arrow."""
    for line in drawing.iter("{http://www.w3.org/2000/svg}line"):
        x, y, to_x, to_y = (float(line.get(each, 0)) for each in ("x1", "y1", "x2", "y2"))
        if x == to_x or y == to_y:
            yield (x, y), (to_x, to_y)
    for path in drawing.iter("{http://www.w3.org/2000/svg}path"):
        if path.get("class") == "arrow":
            corners = re.findall(r"[ML]([-\d.]+),([-\d.]+)", path.get("d", ""))
            yield from pairwise((float(x), float(y)) for x, y in corners)


def test_published_figures_are_in_the_table() -> None:
    """The page of the model over ranks shows each figure with what the model says now."""
    page = (ROOT / "docs" / "guide" / "experts-over-hosts.md").read_text()
    for figure in figures():
        published, predicted = (
            f"{value:.{0 if value >= 20 else 1}f}" for value in (figure.published, figure.predicted)
        )
        ratio = f"{figure.ratio:.2f}{' (fitted)' if figure.calibrates else ''}"
        row = (
            f"| {figure.source} | {figure.what} | {figure.ranks} | {published} {figure.unit} | {predicted} | {ratio} |"
        )
        assert row in page


def test_text_stays_inside_its_box() -> None:
    """Every line of text of a box is shorter than the box, in the widest of the usual fonts."""
    for steps in call.LANES.values():
        for step in steps:
            title = call.width_of(step.title, 12)
            assert title <= call.COLUMN, step.title


def test_a_file_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of a call cannot name a file that was renamed."""
    gone = call.Step("torch", "A step", "Text.", call.TORCH, ("linear/no_such_file.py",))
    monkeypatch.setattr(call, "LANES", {"torch": (gone,)})
    with pytest.raises(ValueError, match=r"linear/no_such_file\.py, which does not exist"):
        call.draw()


def test_every_package_is_in_the_table() -> None:
    """The page names the folder, distribution and import name of each package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    for package in packages().values():
        folder = package.directory.relative_to(ROOT).as_posix()
        assert f"| `{folder}` | {package.distribution} | `{package.import_name}` |" in page


def test_the_command_draws_them_all(tmp_path: Path) -> None:
    """`python docs/_figures` draws every figure that is in the tree, as it is there."""
    subprocess.run([sys.executable, str(FOLDER), str(tmp_path)], check=True)
    drawn, there = ({file.name: file.read_bytes() for file in folder.glob("*.svg")} for folder in (tmp_path, STATIC))
    assert drawn == there
