"""Recipes are frozen values: what they hold, how they are written down, how they fail."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import octavo
from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    MXFP4Weights,
    QuantizerSpec,
    Recipe,
    RecipeError,
    RowScaling,
)
from octavo.recipe_base import GEMMS

ALL = [HighPrecision, DelayedScaling, CurrentScaling, RowScaling, BlockScaling, MXFP4Weights, MXFP8, NVFP4]
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
rounded = {name: fp8[name] for name in ("dgrad", "wgrad", "gradient_format", "fast_accumulation")}
recipes = st.one_of(
    st.builds(HighPrecision, output_dtype=st.sampled_from([None, "float32"])),
    st.builds(DelayedScaling, **fp8, history=st.integers(2, 4096), margin=st.integers(-8, 8)),
    st.builds(CurrentScaling, **scaled),
    st.builds(RowScaling, **scaled),
    st.builds(BlockScaling, **scaled),
    st.builds(MXFP8, **fp8, square_weights=st.booleans()),
    st.builds(MXFP8, **fp8, products=st.sampled_from(["exact", "folded"])),
    st.builds(MXFP4Weights, **rounded),
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


@given(recipe=recipes)
def test_toml_returns_the_same_recipe(recipe: Recipe) -> None:
    """TOML is for people: what Octavo writes, it reads."""
    assert Recipe.from_toml(recipe.to_toml()) == recipe


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
    assert no_wgrad.for_gemm("fprop") is no_wgrad.computed_as


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


def test_scales_that_span_rows_are_known() -> None:
    """y of a row depends on its batch where x's scale does: in current scaling, and by NVFP4's second level."""
    depend = {name for name, recipe in octavo.PRESETS.items() if not recipe.batch_invariant}
    assert depend == {name for name in octavo.PRESETS if name.startswith(("fp8-current", "nvfp4"))}
    assert NVFP4(fprop="high_precision").batch_invariant
    assert DelayedScaling().batch_invariant  # the scales are those of earlier steps


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
    with pytest.raises(RecipeError, match=r"'folded' gives weights one scale for 128x128; leave square_weights"):
        MXFP8(products="folded", square_weights=True)


@given(recipe=st.builds(MXFP8, **fp8, products=st.just("folded"), output_dtype=st.sampled_from([None, "float32"])))
def test_folded_products_are_those_of_blocks(recipe: MXFP8) -> None:
    """Backends are asked for BlockScaling with the same slots and formats, so whoever serves that serves folding."""
    blocks = recipe.computed_as
    assert isinstance(blocks, BlockScaling)
    assert blocks.power_of_two
    assert not blocks.amax_epsilon
    shared = set(MXFP8.model_fields) & set(BlockScaling.model_fields) - {"kind"}
    assert {name: getattr(blocks, name) for name in shared} == {name: getattr(recipe, name) for name in shared}
    for operand in ("x", "w", "dy"):
        assert recipe.quantizer(operand) == blocks.quantizer(operand)
    for gemm in GEMMS:
        assert recipe.for_gemm(gemm) == (
            blocks if recipe.quantizes(gemm) else HighPrecision(output_dtype=recipe.output_dtype)
        )
    assert recipe.replace(products="exact").computed_as.kind == "mxfp8"


def test_square_columns_change_the_columns_of_x_alone() -> None:
    """fprop, dgrad, w and dy are those of block scaling, and the shapes of x's rows, too."""
    square, block = BlockScaling(square_columns=True), BlockScaling()
    for operand in ("w", "dy"):
        assert square.quantizer(operand) == block.quantizer(operand)
    spec = square.quantizer("x")
    assert spec is not None
    assert (spec.square_in("rowwise"), spec.square_in("columnwise")) == (False, True)
    assert not spec.shares_codes
    tensor = octavo.GroupedTensorSpec(shape=(300, 200), groups=3, quantizer=spec)
    assert tensor.scale_shape("rowwise") == (300, 2)
    assert tensor.scale_shape("columnwise") == (5, 2)
    assert block.to_json() == BlockScaling(square_columns=False).to_json()
    assert "square_columns" not in block.to_json()


def test_square_columns_that_nothing_reads_are_refused() -> None:
    """wgrad alone reads the columns of x, and weights have square blocks in both directions."""
    with pytest.raises(RecipeError, match="which wgrad alone reads, and wgrad is 'high_precision'"):
        BlockScaling(square_columns=True, wgrad="high_precision")
    for wrong in ({"scaling": "mxfp8"}, {"role": "w"}, {"role": "dy"}, {"square": True}):
        with pytest.raises(octavo.OctavoError, match="square_columns=True is for x in blocks of 128"):
            octavo.QuantizerSpec(**{"format": "e4m3", "scaling": "block", "square_columns": True, **wrong})


@given(recipe=st.builds(MXFP4Weights, **rounded))
def test_mxfp4_weights_are_rounded_and_then_blocks(recipe: MXFP4Weights) -> None:
    """Backends are asked for BlockScaling with the same slots; the quantizer of w alone says what comes before."""
    blocks = recipe.computed_as
    assert isinstance(blocks, BlockScaling)
    assert blocks.power_of_two
    shared = set(MXFP4Weights.model_fields) & set(BlockScaling.model_fields) - {"kind"}
    assert {name: getattr(blocks, name) for name in shared} == {name: getattr(recipe, name) for name in shared}
    for operand in ("x", "dy"):
        assert recipe.quantizer(operand) == blocks.quantizer(operand)
    w = recipe.quantizer("w")
    assert w is not None
    assert w.mxfp4 == "rowwise"
    assert w.held_by == blocks.quantizer("w")
    assert w != w.held_by
    assert recipe.batch_invariant


def test_mxfp4_weights_say_what_they_cannot_be() -> None:
    """QAT without rounded weights in fprop is none, and E5M2 would hold them where nobody multiplies it."""
    with pytest.raises(RecipeError, match=r"MXFP4Weights.fprop: got 'high_precision'; needs 'quantized'"):
        MXFP4Weights(fprop="high_precision")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"MXFP4Weights.forward_format: got 'e5m2'; needs 'e4m3'"):
        MXFP4Weights(forward_format="e5m2")  # type: ignore[arg-type]
    assert octavo.recipe("mxfp4") == octavo.recipe("mxfp4_weights") == MXFP4Weights()
