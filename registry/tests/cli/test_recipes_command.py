"""`octavo recipes`: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import octavo


def test_recipes_list(run: Any) -> None:
    """Every preset, with the fingerprint that files and checkpoints carry."""
    listed = run("recipes", "list", "--json").json
    assert {row["name"]: row["fingerprint"] for row in listed} == {
        name: recipe.fingerprint for name, recipe in octavo.PRESETS.items()
    }
    plain = run("recipes", "list")
    assert len(plain.out.splitlines()) == len(octavo.PRESETS) + 2
    assert plain.code == 0


def test_recipes_show_prints_a_recipe_file(run: Any, tmp_path: Path) -> None:
    """What --json prints is read back as the same recipe."""
    for name, recipe in octavo.PRESETS.items():
        ran = run("recipes", "show", name, "--json")
        assert octavo.Recipe.from_json(ran.out) == recipe
        assert recipe.fingerprint in run("recipes", "show", name).out
    assert re.search(r"^  w +e2m1 +e4m3 +16x16 +both +nearest$", run("recipes", "show", "nvfp4").out, re.MULTILINE)


def test_recipes_show_prints_a_toml_file(run: Any) -> None:
    """TOML is for people, and this is how they get one to change."""
    for name, recipe in octavo.PRESETS.items():
        assert octavo.Recipe.from_toml(run("recipes", "show", name, "--toml").out) == recipe
    both = run("recipes", "show", "mxfp8", "--toml", "--json")
    assert (both.code, both.out) == (2, "")
    assert "--toml and --json" in both.err


def test_recipes_diff(run: Any) -> None:
    """The fields that differ; equal recipes say so with their fingerprint."""
    answer = run("recipes", "diff", "mxfp8", "mxfp8-square", "--json").json
    assert answer["differences"] == [{"field": "square_weights", "left": False, "right": True}]
    printed = run("recipes", "diff", "mxfp8", "mxfp8-square").out
    assert re.search(r"square_weights +False +True", printed)
    assert re.search(r"  w +one scale per +1x32 +32x32", printed)
    folded = run("recipes", "diff", "mxfp8", "mxfp8-folded", "--json").json
    assert folded["differences"] == [{"field": "products", "left": "exact", "right": "folded"}]
    assert re.search(r"products +exact", run("recipes", "show", "mxfp8").out)
    assert "computed as block" in run("recipes", "show", "mxfp8-folded").out
    rounded = run("recipes", "diff", "fp8-block", "mxfp4").out
    assert re.search(r"^  w +rounding +nearest +to MXFP4, then nearest$", rounded, re.MULTILINE)
    other = run("recipes", "diff", "mxfp8", "nvfp4").out  # in the words of `recipes show`
    assert re.search(r"^  fast_accumulation +none +\(no such field\)$", other, re.MULTILINE)
    same = run("recipes", "diff", "row", "fp8-row")
    assert same.code == 0
    assert "row and fp8-row mean the same" in same.out
