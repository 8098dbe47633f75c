"""Which product a chip has for a recipe's operands, and whether its tiles fit."""

from __future__ import annotations

import pytest

import octavo
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_triton import support
from octavo_triton.layouts import (
    TURNED,
    layout_refusal,
    output_names,
    turned_layout,
    turned_shape,
    with_shared,
)
from octavo_triton.products.spec import Chip, GemmSpec, chip_of, layouts_of, quantized, spec_from, spec_text
from octavo_triton.products.tiles import described_tile, tile_of

CHIPS: tuple[Chip, ...] = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
"""Bytes of shared memory that a block may have: CUDA's programming guide, "Technical Specifications"."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "half": 1, "fp8": 1, "scaled": 1}
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")


def _spec(name: str, gemm: str, chip: Chip) -> GemmSpec:
    recipe = octavo.recipe(name)
    x, w = recipe.quantizer("x"), recipe.quantizer("w")
    return (
        GemmSpec(gemm, chip, "bfloat16") if x is None or w is None else quantized(gemm, chip, x, w, "bfloat16", False)
    )


def test_chips_are_found_by_capability() -> None:
    """A chip between two has the products of the older one."""
    known = {(8, 0): "sm_80", (8, 6): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90", (10, 3): "sm_100", (12, 1): "sm_120"}
    assert {arch: chip_of(arch) for arch in known} == known
    assert chip_of(None) == "interpreter"


def test_the_table_says_what_is_emulated() -> None:
    """A card that called a product of copies the chip's own would mislead whoever reads `octavo why`."""
    for first, last in support.CHIPS:
        assert chip_of(first) == chip_of(last)
        rows = [row for row in support.support_on(first, ()) if row.ops == support.GEMMS]
        emulated = {recipe: row.emulated for row in rows for recipe in row.recipes}
        assert set(emulated) == support.HIGH_PRECISION | support.CODED | support.BLOCKED
        for name in RECIPES:
            spec = _spec(name, "fprop", chip_of(first))
            own = emulated[octavo.recipe(name).kind] is None
            assert own is (spec.product in ("fp8", "scaled") or spec.scaling == "none"), (first, name)
        assert all(row.untried for row in rows), "nothing has run anywhere"
    assert not any(row.untried for row in support.support_on((9, 0), {(9, 0)}))


def test_each_dtype_is_held_to_the_bound_of_its_own_sums() -> None:
    """Operands in fp32, which no tensor core multiplies, were declared to be added as bf16 is: an honest sum of 16 rows
    was then outside its bound."""
    for first, _ in support.CHIPS:
        rows = [row for row in support.support_on(first, ()) if row.ops == support.GEMMS]
        values = {dtype: row.accumulation for row in rows if "high_precision" in row.recipes for dtype in row.in_dtypes}
        assert values == {"bfloat16": "hopper_bf16", "float16": "hopper_bf16", "float32": "fp32"}


@pytest.mark.parametrize("chip", CHIPS)
def test_stages_fit_into_shared_memory(chip: Chip) -> None:
    """What a pipeline holds of both operands, for every recipe and GEMM: a launch would fail on the chip alone."""
    for name in RECIPES:
        for gemm in ("fprop", "dgrad", "wgrad"):
            spec = _spec(name, gemm, chip)
            for tile in filter(None, (tile_of(spec), described_tile(spec))):
                held = tile.stages * tile.depth * (128 + tile.columns) * BYTES[spec.product]
                assert held <= SHARED[chip], (name, gemm, tile)


def test_codes_are_turned_where_both_operands_are_read_along_the_sum() -> None:
    """FP8 products of columns need them, products of copies do not, and fprop reads rows."""
    for chip in CHIPS:
        for scaling in ("delayed", "current", "row", "block", "mxfp8", "nvfp4", "high_precision"):
            wanted = chip != "sm_80" and scaling in ("delayed", "current", "row", "block")
            assert set(layouts_of("wgrad", chip, scaling)) == ({"x", "dy"} if wanted else set())
            assert set(layouts_of("dgrad", chip, scaling)) == ({"w"} if wanted else set())
            assert layouts_of("fprop", chip, scaling) == {}


def test_a_spec_survives_its_text() -> None:
    """Operators' schemas hold text."""
    spec = _spec("fp8-block", "dgrad", "sm_90")
    assert spec_from(spec_text(spec)) == spec


def test_shared_codes_are_made_once() -> None:
    """Square blocks and one scale per group: the row plane serves both directions, unless columns are turned."""
    spec = QuantizerSpec(scaling="block", format="e4m3", square=True)
    plain = GroupedTensorSpec(shape=(3, 200, 256), groups=3, quantizer=spec, ragged_axis=None)
    assert output_names(plain) == ["rowwise", "rowwise_scale"]
    whole = with_shared(spec, {"rowwise": 1, "rowwise_scale": 2})
    assert whole == {"rowwise": 1, "rowwise_scale": 2, "columnwise": 1, "columnwise_scale": 2}
    turned = turned_layout(plain, TURNED)
    assert turned.columnwise_layout == TURNED
    assert output_names(turned) == ["rowwise", "rowwise_scale", "columnwise"]
    assert turned_shape(turned) == (6, 256, 128)


def test_layouts_that_no_quantizer_makes_have_a_reason() -> None:
    """Both what was asked for and what there is; a direction that is not made may have any."""
    block, rows_alone = (
        QuantizerSpec(scaling="block", format="e4m3"),
        QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise"),
    )
    assert layout_refusal(block, ("plain", TURNED)) is None
    assert "rowwise planes is turned; it has plain" in (layout_refusal(block, (TURNED, "plain")) or "")
    assert "is panels; it has plain and turned" in (layout_refusal(block, ("plain", "panels")) or "")
    assert layout_refusal(rows_alone, ("plain", "panels")) is None
    mxfp8 = QuantizerSpec(scaling="mxfp8", format="e4m3")
    assert "in mxfp8 is turned; it has plain" in (layout_refusal(mxfp8, ("plain", TURNED)) or "")
