"""Recipes are frozen and validated values: what they refuse, in one line that names field, value and fix."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from recipe_draws import recipes

import octavo
from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    QuantizerSpec,
    Recipe,
    RecipeError,
    RowScaling,
)


@given(recipes, st.text() | st.none() | st.integers())
def test_only_operands_have_quantizers(recipe: Recipe, name: Any) -> None:
    """`quantizer` of anything else names the three operands that there are."""
    assume(name not in ("x", "w", "dy"))
    with pytest.raises(RecipeError, match="the operands of a layer are x, w, dy"):
        recipe.quantizer(name)


def test_a_recipe_cannot_be_changed() -> None:
    """A frozen value can be shared between layers, used as a key, and closed over by a jitted function."""
    recipe = MXFP8()
    with pytest.raises(RecipeError, match=r"recipe.replace\(fprop='high_precision'\) makes another one"):
        recipe.fprop = "high_precision"
    with pytest.raises(RecipeError, match=r"QuantizerSpec\.format: cannot be set to 'e5m2'"):
        QuantizerSpec(scaling="block", format="e4m3").format = "e5m2"
    with pytest.raises(ValidationError, match="frozen"):
        del recipe.fprop
    assert recipe == MXFP8()


def test_a_text_in_the_place_of_a_set_is_shown_as_one() -> None:
    """Field, value and fix: what a user would have to look up is written out."""
    with pytest.raises(RecipeError, match=r"fast_accumulation: got 'fprop'; needs a set, such as \{'fprop'\}$"):
        BlockScaling(fast_accumulation="fprop")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"fast_accumulation: got True; needs a set$"):
        BlockScaling(fast_accumulation=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "field"),
    [("delayed", "margin"), ("delayed", "history"), ("row", "amax_epsilon"), ("block", "amax_epsilon")],
)
def test_a_truth_value_is_no_number(kind: str, field: str) -> None:
    """Python takes True for 1: as an amax_epsilon it would give all that is smaller one scale."""
    for value in (True, False):
        with pytest.raises(RecipeError, match=rf"\.{field}: got {value}, a truth value; give a number$"):
            octavo.recipe(kind, **{field: value})
        text = octavo.recipe(kind).to_json()
        was = json.loads(text)[field]
        with pytest.raises(RecipeError, match=rf"\.{field}: got {value}"):
            Recipe.from_json(text.replace(f'"{field}":{json.dumps(was)}', f'"{field}":{json.dumps(value)}'))


def test_another_value_of_a_field_is_validated() -> None:
    """`replace`, a preset with changes and pydantic's own copy make what the class would make, or refuse as it does."""
    recipe = DelayedScaling(history=4, fast_accumulation={"fprop"})
    assert recipe.fingerprint  # computed values do not travel
    assert not recipe.stochastic
    wanted = DelayedScaling(history=8, fast_accumulation={"fprop"})
    for other in (recipe.replace(history=8), recipe.model_copy(update={"history": 8})):
        assert (other, other.fingerprint) == (wanted, wanted.fingerprint)
    assert recipe.replace() == recipe == recipe.model_copy() == recipe.model_copy(deep=True)
    assert octavo.recipe("mxfp8", wgrad="high_precision") == MXFP8(wgrad="high_precision")
    assert octavo.recipe("row", gradient_format="e5m2") == RowScaling(gradient_format="e5m2")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"wgrad": "int8"}, "MXFP8.wgrad: got 'int8'; needs 'quantized'"),
        ({"wgard": "quantized"}, "MXFP8.wgard: there is no such field"),
        ({"kind": "row"}, "MXFP8.kind: got 'row'"),
    )
    for changes, words in wrong:
        for change in (
            MXFP8().replace,
            lambda **update: MXFP8().model_copy(update=update),
            lambda **update: octavo.recipe("mxfp8", **update),
        ):
            with pytest.raises(RecipeError, match=words):
                change(**changes)


def test_fields_are_given_by_name() -> None:
    """`MXFP8("quantized")` could mean any of them: the message lists their names."""
    with pytest.raises(TypeError, match="MXFP8 was given 'quantized' by position; give fields by name: kind, fprop, "):
        MXFP8("quantized")  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: MXFP8(fprop="int8"), ["MXFP8.fprop", "'int8'", "'quantized'"]),
        (lambda: MXFP8(scale=2), ["MXFP8.scale", "no such field"]),
        (lambda: DelayedScaling(history=1), ["DelayedScaling.history", "1", "2"]),
        (lambda: BlockScaling(amax_epsilon=-1.0), ["BlockScaling.amax_epsilon", "-1.0", "0"]),
        (lambda: BlockScaling(amax_epsilon=float("nan")), ["BlockScaling.amax_epsilon", "nan", "finite"]),
        (lambda: CurrentScaling(amax_epsilon=1e39), ["CurrentScaling.amax_epsilon", "1e+39", "34028234663852886"]),
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
        ("[" * 60_000, "not valid JSON"),
        ("[]", "got list"),
        ("{}", "schema_version: got None"),
        ('{"schema_version": 2, "kind": "mxfp8"}', "schema_version: got 2"),
        ('{"schema_version": 1}', "kind: missing; known kinds are"),
        ('{"schema_version": 1, "kind": ["mxfp8"]}', r"kind: got \['mxfp8'\]"),
        ('{"schema_version": 1, "kind": "mxfp9"}', "kind: got 'mxfp9'; did you mean mxfp8"),
        ('{"schema_version": 1, "kind": "mxfp8", "kind": "mxfp8"}', "'kind' stands twice"),
        (5, "got int; give the text of a JSON document"),
        (None, "got NoneType"),
        (" " * 70_000, "larger than 65536 bytes"),
        ('{"schema_version": 1, "kind": "mxfp8", "fprop": 3}', "MXFP8.fprop: got 3"),
    ],
)
def test_a_corrupt_recipe_is_refused_with_the_reason(text: Any, reason: str) -> None:
    """A truncated or foreign file is a typed refusal, never a default recipe."""
    with pytest.raises(octavo.RecipeError, match=reason):
        Recipe.from_json(text)


def test_a_small_toml_file_does_not_take_hours() -> None:
    """A parser of TOML needs time in the square of a dotted key's depth: 100 KB of it took minutes."""
    start = time.process_time()
    for depth in (150, 5_000, 30_000, 500_000):
        with pytest.raises(octavo.RecipeError, match=r"dots|larger than"):
            Recipe.from_toml("a" + ".a" * depth + " = 1")
    assert time.process_time() - start < 1


@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_message_is_one_line_that_people_can_read(count: int) -> None:
    """However much is wrong, and however long it is."""
    fields = {f"field{number}": 1 for number in range(count)} | {"fprop": "x" * 10_000, "y" * 10_000: 1}
    with pytest.raises(octavo.RecipeError) as caught:
        MXFP8(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1_500
    if count == 500:
        assert message.endswith("and 497 more")


def test_a_typing_error_in_a_field_is_named_with_what_was_meant() -> None:
    """In a config file no editor completes."""
    with pytest.raises(octavo.RecipeError, match=r"MXFP8.wgard: there is no such field; did you mean wgrad\?"):
        MXFP8(wgard="quantized")
    with pytest.raises(octavo.RecipeError, match=r"its fields are kind, fprop, dgrad, .*square_weights"):
        MXFP8(qqqq=1)


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


def test_an_epsilon_is_an_fp32_number_without_a_sign() -> None:
    """amaxes are fp32, and so is their lower bound; -0.0 equals 0.0, so it has one hash and one fingerprint with it."""
    largest = 3.4028234663852886e38
    assert CurrentScaling(amax_epsilon=largest).amax_epsilon == largest
    negative, zero = BlockScaling(amax_epsilon=-0.0), BlockScaling()
    assert negative == zero
    assert negative.fingerprint == zero.fingerprint
    assert Recipe.from_json(negative.to_json().replace("0.0", "-0.0")).fingerprint == zero.fingerprint
    for epsilon in (1e39, -1e-300):
        with pytest.raises(octavo.RecipeError, match="amax_epsilon"):
            octavo.QuantizerSpec(format="e4m3", scaling="block", amax_epsilon=epsilon)
