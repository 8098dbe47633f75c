"""Recipes are frozen values: what they hold, how they are written down, how they fail."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import octavo
from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, HighPrecision, Recipe, RowScaling
from octavo.recipe_base import GEMMS

ALL = [HighPrecision, DelayedScaling, CurrentScaling, RowScaling, BlockScaling, MXFP8, NVFP4]
QUANTIZED = ALL[1:]

slots = st.sampled_from(["quantized", "high_precision"])
formats = st.sampled_from(["e4m3", "e5m2"])
epsilons = st.floats(min_value=0, max_value=1e30)
common = {"fprop": slots, "dgrad": slots, "wgrad": slots}
fp8 = {
    **common,
    "forward_format": formats,
    "gradient_format": formats,
    "fast_accumulation": st.frozensets(st.sampled_from(GEMMS)),
}
scaled = {**fp8, "power_of_two": st.booleans(), "amax_epsilon": epsilons}
recipes = st.one_of(
    st.builds(HighPrecision, output_dtype=st.sampled_from([None, "float32"])),
    st.builds(DelayedScaling, **fp8, history=st.integers(2, 4096), margin=st.integers(-8, 8)),
    st.builds(CurrentScaling, **scaled),
    st.builds(RowScaling, **scaled),
    st.builds(BlockScaling, **scaled),
    st.builds(MXFP8, **fp8, square_weights=st.booleans()),
    st.builds(
        NVFP4, **common, square_weights=st.booleans(), stochastic_gradients=st.booleans(), hadamard=st.booleans()
    ),
)


@given(recipe=recipes)
def test_json_returns_the_same_recipe(recipe: Recipe) -> None:
    """A recipe in a checkpoint is the recipe that trained: equal, same hash, same fingerprint."""
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert type(again) is type(recipe)
    assert hash(again) == hash(recipe)
    assert again.fingerprint == recipe.fingerprint


@given(left=recipes, right=recipes)
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


def test_a_recipe_cannot_be_changed() -> None:
    """A frozen value can be shared between layers, used as a key, and closed over by a jitted function."""
    with pytest.raises(ValidationError, match="frozen"):
        MXFP8().fprop = "high_precision"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: MXFP8(fprop="int8"), ["MXFP8.fprop", "'int8'", "'quantized'"]),
        (lambda: MXFP8(scale=2), ["MXFP8.scale", "no such field"]),
        (lambda: DelayedScaling(history=1), ["DelayedScaling.history", "1", "2"]),
        (lambda: BlockScaling(amax_epsilon=-1.0), ["BlockScaling.amax_epsilon", "-1.0", "0"]),
        (lambda: BlockScaling(amax_epsilon=float("nan")), ["BlockScaling.amax_epsilon", "nan", "finite"]),
        (lambda: HighPrecision(fprop="quantized"), ["HighPrecision.fprop", "'quantized'", "'high_precision'"]),
        (lambda: RowScaling(fast_accumulation=frozenset({"bprop"})), ["fast_accumulation", "'bprop'", "'fprop'"]),
        (lambda: NVFP4(output_dtype="int8"), ["NVFP4.output_dtype", "'int8'", "'bfloat16'"]),
    ],
)
def test_a_bad_value_names_the_field_the_value_and_the_fix(make: Any, names: list[str]) -> None:
    """Whoever made a typing error in a config file reads one line and knows what to write."""
    with pytest.raises(octavo.RecipeError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "got list"),
        ("{}", "schema_version: got None"),
        ('{"schema_version": 2, "kind": "mxfp8"}', "schema_version: got 2"),
        ('{"schema_version": 1}', "kind: got None"),
        ('{"schema_version": 1, "kind": ["mxfp8"]}', r"kind: got \['mxfp8'\]"),
        ('{"schema_version": 1, "kind": "mxfp9"}', "kind: got 'mxfp9'; known kinds are"),
        ('{"schema_version": 1, "kind": "mxfp8", "fprop": 3}', "MXFP8.fprop: got 3"),
    ],
)
def test_a_corrupt_recipe_is_refused_with_the_reason(text: str, reason: str) -> None:
    """A truncated or foreign file is a typed refusal, never a default recipe."""
    with pytest.raises(octavo.RecipeError, match=reason):
        Recipe.from_json(text)


@given(data=st.data(), recipe=recipes)
def test_a_damaged_recipe_is_refused_or_equal(data: st.DataObject, recipe: Recipe) -> None:
    """A flipped bit in a stored recipe never escapes as another exception type."""
    raw = bytearray(recipe.to_json().encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(octavo.RecipeError):
        Recipe.from_json(bytes(raw))


def test_a_recipe_of_another_kind_is_refused_where_one_is_asked_for() -> None:
    """`MXFP8.from_json` promises an MXFP8."""
    with pytest.raises(octavo.RecipeError, match="MXFP8 was asked for"):
        MXFP8.from_json(NVFP4().to_json())


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


@pytest.mark.parametrize("cls", QUANTIZED)
def test_a_slot_takes_away_exactly_the_planes_its_gemm_read(cls: type[Recipe]) -> None:
    """Quantized forward with high-precision backward must not pay for column data that nobody reads."""
    full = cls()
    assert {op: full.quantizer(op).orientation for op in ("x", "w", "dy")} == dict.fromkeys(("x", "w", "dy"), "both")
    forward = cls(dgrad="high_precision", wgrad="high_precision")
    assert forward.quantizer("x").orientation == "rowwise"
    assert forward.quantizer("w").orientation == "rowwise"
    assert forward.quantizer("dy") is None
    no_wgrad = cls(wgrad="high_precision")
    assert no_wgrad.quantizer("w").orientation == "both"
    assert no_wgrad.quantizer("dy").orientation == "rowwise"
    assert isinstance(no_wgrad.for_gemm("wgrad"), HighPrecision)
    assert no_wgrad.for_gemm("fprop") is no_wgrad


def test_operands_follow_the_definition() -> None:
    """Formats and block shapes of each operand are those of the numerics document's table."""
    assert DelayedScaling().quantizer("dy").format == "e5m2"
    assert CurrentScaling().quantizer("x").format == "e4m3"
    assert BlockScaling().quantizer("w").square
    assert not BlockScaling().quantizer("x").square
    assert not MXFP8().quantizer("w").square
    assert MXFP8(square_weights=True).quantizer("w").square
    assert NVFP4().quantizer("dy").stochastic
    assert not NVFP4().quantizer("x").stochastic
    assert NVFP4().quantizer("x").hadamard
    assert not NVFP4(square_weights=False).quantizer("w").hadamard
    assert HighPrecision().quantizer("x") is None


def test_only_recipes_that_round_stochastically_need_a_seed() -> None:
    """A seed is asked for where bits depend on it, and nowhere else."""
    assert NVFP4().stochastic
    assert not NVFP4(stochastic_gradients=False).stochastic
    assert not NVFP4(dgrad="high_precision", wgrad="high_precision").stochastic
    assert not any(cls().stochastic for cls in ALL if cls is not NVFP4)
    assert [cls for cls in ALL if cls().stateful] == [DelayedScaling]


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
