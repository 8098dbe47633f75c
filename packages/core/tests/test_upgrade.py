"""Recipe files that earlier releases read mean the same today, down to the fingerprint (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import Recipe

GOLDEN = Path(__file__).parent / "golden"
UNRELEASED = GOLDEN / "unreleased.json"
RELEASES = sorted(GOLDEN.glob("*.json"))


def entries(file: Path) -> list[dict[str, Any]]:
    """What a release made of recipe files."""
    return list(json.loads(file.read_text()))


@pytest.mark.parametrize("file", RELEASES, ids=lambda file: file.stem)
def test_a_recipe_of_an_earlier_release_is_the_same_recipe(file: Path) -> None:
    """A job that resumes compares fingerprints: one that moves is refused, or starts a second experiment."""
    assert len(entries(file)) > (0 if file == UNRELEASED else 100)
    for entry in entries(file):
        stored = Recipe.from_json(entry["json"])
        assert stored == Recipe.from_toml(entry["toml"]), entry["toml"]
        assert stored.fingerprint == entry["fingerprint"], entry["toml"]
        assert json.loads(stored.to_json()).items() >= json.loads(entry["json"]).items()


def test_every_field_had_two_values_in_this_release() -> None:
    """A field that a later release forgets is then seen. `python packages/core/tests/golden/write.py` writes files."""
    files = [GOLDEN / f"{octavo.__version__}.json", *([UNRELEASED] if UNRELEASED.exists() else [])]
    written = [json.loads(entry["json"]) for file in files for entry in entries(file)]
    for recipe in octavo.PRESETS.values():
        for field in set(type(recipe).model_fields) - {"kind"}:
            absent = type(recipe).ADDED_FIELDS.get(field)
            values = {json.dumps(each.get(field, absent)) for each in written if each["kind"] == recipe.kind}
            fixed = len(getattr(type(recipe).model_fields[field].annotation, "__args__", ())) == 1
            assert len(values) > 1 or fixed, f"{recipe.kind}.{field}: write down a new field"
