"""How recipes are written down and read again: JSON, TOML, and fingerprints that are the same everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import example, given
from recipe_draws import ALL, recipes

import octavo
from octavo import MXFP8, BlockScaling, HighPrecision, Recipe, RecipeError


@given(recipe=recipes)
def test_json_returns_the_same_recipe(recipe: Recipe) -> None:
    """A recipe in a checkpoint is the recipe that trained: equal, same hash, same fingerprint."""
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert type(again) is type(recipe)
    assert hash(again) == hash(recipe)
    assert again.fingerprint == recipe.fingerprint


@given(left=recipes, right=recipes)
@example(left=HighPrecision(), right=HighPrecision(output_dtype="float32"))
def test_fingerprints_are_equal_exactly_where_contents_are(left: Recipe, right: Recipe) -> None:
    """Two jobs compare recipes by fingerprint, so it may neither split equals nor merge others."""
    assert (left.fingerprint == right.fingerprint) == (left == right)
    assert (not octavo.diff(left, right)) == (left == right)


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Hash seeds and set order differ between processes; a fingerprint in a checkpoint may not."""
    code = "import octavo; print(octavo.CurrentScaling(fast_accumulation={'wgrad', 'dgrad', 'fprop'}).fingerprint)"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(runs) == 1


def test_published_fingerprints_do_not_move() -> None:
    """Fingerprints are written into checkpoints: a change here is a change of schema version."""
    assert {cls.__name__: cls().fingerprint for cls in ALL} == {
        "HighPrecision": "873897a2f7f59a3d",
        "DelayedScaling": "de6029ae04be715c",
        "CurrentScaling": "2f2411081372de4f",
        "RowScaling": "824636efe5d803fd",
        "BlockScaling": "9d6a3bd7ae24f564",
        "MXFP4Weights": "719037e397c52754",
        "MXFP8": "12b0ca96130177b0",
        "NVFP4": "bad61c8a63a179e6",
    }


@pytest.mark.parametrize("cls", ALL)
def test_toml_needs_only_a_kind(cls: type[Recipe]) -> None:
    """A config file names a recipe in one line and changes what it wants in others."""
    assert Recipe.from_toml(f'kind = "{cls().kind}"') == cls()


def test_toml_sets_fields() -> None:
    """Every field of a recipe can be set from TOML."""
    text = 'kind = "block"\nwgrad = "high_precision"\namax_epsilon = 1e-12\nfast_accumulation = ["fprop"]'
    assert Recipe.from_toml(text) == BlockScaling(
        wgrad="high_precision", amax_epsilon=1e-12, fast_accumulation=frozenset({"fprop"})
    )


@given(recipe=recipes)
def test_toml_returns_the_same_recipe(recipe: Recipe) -> None:
    """TOML is for people: what Octavo writes, it reads."""
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_a_third_party_kind_round_trips_and_cannot_take_a_name() -> None:
    """A plugin's own recipe is written and read like ours; two classes cannot share a kind."""

    class Acme(BlockScaling):
        kind: Literal["acme-test"] = "acme-test"
        knob: int = 3

    acme = Acme(knob=5)
    assert Recipe.from_json(acme.to_json()) == acme
    assert octavo.recipe("acme-test").kind == "acme-test"
    with pytest.raises(octavo.RecipeError, match=r"'mxfp8' belongs to octavo\.recipes\.MXFP8"):

        class Other(BlockScaling):
            kind: Literal["mxfp8"] = "mxfp8"

    assert Recipe.kinds()["mxfp8"] is MXFP8


def test_numerics_do_not_come_from_the_environment() -> None:
    """Promise 6: a recipe is what was written, whatever the environment holds (faults.md, env-var injection)."""
    code = "import octavo; print([octavo.recipe(n).fingerprint for n in octavo.PRESETS])"
    hostile = {f"OCTAVO_{name}": "high_precision" for name in ("FPROP", "RECIPE", "KIND", "FORMAT", "POWER_OF_TWO")}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **extra}, capture_output=True, check=True
        ).stdout
        for extra in ({}, hostile)
    ]
    assert runs[0] == runs[1]


def test_core_imports_no_framework() -> None:
    """Schemas are read by launchers and config tools that have neither torch, jax, numpy nor pluggy."""
    code = "import sys, octavo; print({'torch', 'jax', 'numpy', 'pluggy', 'octavo_registry'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_json_is_canonical() -> None:
    """Other languages can recompute the fingerprint: sorted keys, no white space, kind and version inside."""
    text = MXFP8().to_json()
    content = json.loads(text)
    assert list(content) == sorted(content)
    assert content["schema_version"] == 1
    assert text == json.dumps(content, sort_keys=True, separators=(",", ":"))


def test_a_file_from_before_a_field_means_its_absence() -> None:
    """`products` came after 0.1.0: a recipe of that release is exact, and keeps its JSON and its fingerprint."""
    before = MXFP8().to_json()
    assert "products" not in json.loads(before)
    assert Recipe.from_json(before) == MXFP8(products="exact")
    folded = MXFP8(products="folded")
    assert json.loads(folded.to_json())["products"] == "folded"
    assert [str(row) for row in octavo.diff(MXFP8(), folded)] == ["products: exact -> folded"]
    with pytest.raises(RecipeError, match=r"MXFP8.products: got 'bf16'; needs 'exact' or 'folded'"):
        MXFP8(products="bf16")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"^MXFP8: square_weights=True .* leave square_weights"):
        MXFP8(products="folded", square_weights=True)


def test_iterating_gives_the_fields_alone() -> None:
    """Flax's `nn.jit` walks through what it iterates over: what a recipe computed and kept, itself too, has no end."""
    used = MXFP8()
    assert used.computed_as is used
    assert used.fingerprint
    assert not used.stochastic
    assert dict(used) == dict(MXFP8()) == {name: getattr(used, name) for name in MXFP8.model_fields}
