"""What a recipe asks of quantizers and GEMMs: planes, formats and blocks of operands, and what it is computed as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_draws import ALL, QUANTIZED, fp8, rounded

import octavo
from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    MXFP4Weights,
    Recipe,
    RecipeError,
)
from octavo.recipe_base import GEMMS


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


def test_scales_that_span_rows_are_known() -> None:
    """y of a row depends on its batch where x's scale does: in current scaling, and by NVFP4's second level."""
    depend = {name for name, recipe in octavo.PRESETS.items() if not recipe.batch_invariant}
    assert depend == {name for name in octavo.PRESETS if name.startswith(("fp8-current", "nvfp4"))}
    assert NVFP4(fprop="high_precision").batch_invariant
    assert DelayedScaling().batch_invariant  # the scales are those of earlier steps


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
