"""The figures and the table of the architecture page show the tree as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from workspace import ROOT, packages

FIGURES = ROOT / "docs" / "_figures"
sys.path.insert(0, str(FIGURES))

import call  # noqa: E402
import house  # noqa: E402


@pytest.mark.parametrize("figure", [house, call], ids=lambda module: str(module.__name__))
def test_figures_are_drawn_from_the_tree(figure: object) -> None:
    """A new package or room, a dependency or a file that moved shows in the figures: run `python docs/_figures`."""
    name = figure.__name__  # type: ignore[attr-defined]
    drawn = figure.draw()  # type: ignore[attr-defined]
    assert drawn == (ROOT / "docs" / "_static" / f"{name}.svg").read_text(), "run python docs/_figures"


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


def test_the_command_draws_them_all() -> None:
    """`python docs/_figures` leaves the files as they are where the tree has not changed."""
    files = sorted((ROOT / "docs" / "_static").glob("*.svg"))
    before = [file.read_bytes() for file in files]
    subprocess.run([sys.executable, str(FIGURES)], check=True)
    assert [file.read_bytes() for file in files] == before
