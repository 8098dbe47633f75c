"""Tables that list everything of a kind have everything, and figures beside a record are the record's."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase

import pytest
from workspace import ROOT

import octavo
from octavo import Recipe

RECORDS = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.json"))
MEASUREMENTS = re.findall(r"`([\w*-]+\.json)`", (ROOT / "benchmarks" / "README.md").read_text())
RECIPES = {type(octavo.recipe(name)) for name in octavo.PRESETS}


@pytest.mark.parametrize("recipe", sorted(RECIPES, key=lambda recipe: recipe.__name__))
def test_the_page_of_recipes_has_every_field(recipe: type[Recipe]) -> None:
    """A field that the table leaves out is one that a reader does not know of."""
    table = (ROOT / "docs" / "guide" / "recipes.md").read_text().partition("## Fields")[2]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, flags=re.MULTILINE))))
    assert set(recipe.model_fields) - {"kind"} <= named


@pytest.mark.parametrize("record", RECORDS)
def test_every_record_has_a_row(record: str) -> None:
    """The table of measurements says what a file holds and which command makes it."""
    assert [pattern for pattern in MEASUREMENTS if fnmatchcase(record, pattern)], f"{record} has no row"


@pytest.mark.parametrize("pattern", MEASUREMENTS)
def test_every_row_has_a_record(pattern: str) -> None:
    """A row of files that are gone sends a reader looking for them."""
    assert [record for record in RECORDS if fnmatchcase(record, pattern)], f"no record is called {pattern}"


def test_the_lean_form_has_the_gaps_of_the_last_gates() -> None:
    """The page of MoE layers names the newest record of training gates, and its figures are that record's."""
    page = (ROOT / "docs" / "guide" / "torch-moe.md").read_text()
    (sentence,) = re.findall(r"The lean form was tested.*?\.json`\)", page, flags=re.DOTALL)
    newest = max(record for record in RECORDS if record.startswith("training-gates-"))
    assert newest in sentence
    gates = json.loads((ROOT / "benchmarks" / "results" / newest).read_text())["gates"]
    lean = [f"{gate['percent']:+.2f} % ± {gate['spread_percent']:.2f}" for gate in gates if "lean" in gate["recipe"]]
    assert re.findall(r"[+-][\d.]+ % ± [\d.]+", sentence) == lean


def test_interleaved_weights_take_what_their_record_says() -> None:
    """The page of layers has the range of both shapes, and names the recipe that is slower with many small experts."""
    page = (ROOT / "docs" / "guide" / "torch-layers.md").read_text()
    (sentence,) = re.findall(
        r"They take\s+([\d.]+) to ([\d.]+) of the time for two\s+halves, and with\s+128 small\s+experts up to ([\d.]+)",
        page,
    )
    rows = json.loads((ROOT / "benchmarks" / "results" / "interleaved-h200-2026-11-27.json").read_text())["rows"]
    slower = ("128 small experts", "quantize current")
    ratios = [
        ((row["shape"], row["what"]), row["microseconds"]["turns"] / row["microseconds"]["halves"])
        for row in rows
        if row["what"].startswith("quantize")
    ]
    others = [ratio for of, ratio in ratios if of != slower]
    expected = min(others), max(others), max(ratio for of, ratio in ratios if of == slower)
    assert sentence == tuple(f"{value:.2f}" for value in expected)
