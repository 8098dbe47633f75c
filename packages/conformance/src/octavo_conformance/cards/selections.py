"""Which variants a test tries: each function takes whether the selection is the full one, and not the quick one."""

from __future__ import annotations

from octavo import NVFP4, Recipe
from octavo.quantizer import ROW_BY_ROW
from octavo.recipe_base import GEMMS
from octavo_conformance.cards.variants import (
    DTYPES,
    MORE_RECIPES,
    RAGGED,
    RECIPES,
    STACKED,
    QuantizerVariant,
    RecipeVariant,
)

_FULL_ONLY = ("current.e4m3.pow2", "block.e5m2.pow2", "block.e4m3.fp32.eps", "nvfp4.stochastic")
"""Ragged quantizers whose parts the quick selection has in others."""

_ONE_PER_SCALING = ("delayed.e4m3", "current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.hadamard")


def ragged(full: bool) -> list[QuantizerVariant]:
    """Quantizers of ragged rows in fp32; in the full selection in bf16 and fp16 too."""
    dtypes = DTYPES if full else DTYPES[:1]
    names = [name for name in RAGGED if full or name not in _FULL_ONLY]
    return [QuantizerVariant(name, RAGGED[name], dtype) for dtype in dtypes for name in names]


def narrow(full: bool) -> list[QuantizerVariant]:
    """bf16 inputs, one quantizer per scaling, and fp16 inputs; one quantizer of fp16 in the quick selection."""
    halves = _ONE_PER_SCALING if full else ("mxfp8.e4m3",)
    return [QuantizerVariant(name, RAGGED[name], "float16") for name in halves] + bf16_rows(full)


def few_quantizers(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling`, of which the quick selection takes two, because each test of them has shapes of its own."""
    return [v for v in one_per_scaling(full) if full or v.name in ("current.e4m3", "mxfp8.e4m3")]


def stacked(full: bool) -> list[QuantizerVariant]:
    """Every quantizer of stacked weights in bf16; in the full selection in fp32 and fp16 too."""
    dtypes = DTYPES if full else ("bfloat16",)
    return [QuantizerVariant(name, spec, dtype, stacked=True) for dtype in dtypes for name, spec in STACKED.items()]


def one_per_scaling(full: bool) -> list[QuantizerVariant]:
    """One quantizer per scaling, in fp32; every ragged one in the full selection."""
    if full:
        return [variant for variant in ragged(True) if variant.dtype == "float32"]
    return [QuantizerVariant(name, RAGGED[name]) for name in _ONE_PER_SCALING]


def delayed(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling` of the scaling that has a state."""
    return [variant for variant in one_per_scaling(full) if variant.spec.scaling == "delayed"]


def rows_and_weights(full: bool) -> list[QuantizerVariant]:
    """One quantizer per scaling on rows, and every one of stacked weights."""
    return [*one_per_scaling(full), *stacked(full)]


def bf16_rows(full: bool) -> list[QuantizerVariant]:
    """One quantizer per scaling on bf16 rows."""
    return [QuantizerVariant(name, RAGGED[name], "bfloat16") for name in _ONE_PER_SCALING]


def stochastic(full: bool) -> list[QuantizerVariant]:
    """Quantizers that take a seed."""
    return [variant for variant in ragged(full) if variant.spec.stochastic and variant.dtype == "float32"]


def recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers in bf16: each recipe, and its options in the full selection in fp32 and fp16 too."""
    if not full:
        return [RecipeVariant(name, recipe) for name, recipe in {**RECIPES, **_slots()}.items()]
    return [RecipeVariant(n, r, d) for d in DTYPES for n, r in {**RECIPES, **MORE_RECIPES}.items()]


def base_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers in bf16, one per kind."""
    chosen = {**RECIPES, **MORE_RECIPES} if full else RECIPES
    return [RecipeVariant(name, recipe) for name, recipe in chosen.items()]


def unquantized(full: bool) -> list[RecipeVariant]:
    """High precision in each dtype."""
    return [RecipeVariant("bf16", RECIPES["bf16"], dtype) for dtype in DTYPES]


def unquantized_gemms(full: bool) -> list[RecipeVariant]:
    """Each GEMM of high precision in each dtype."""
    return [RecipeVariant("bf16", RECIPES["bf16"], dtype, gemm) for dtype in DTYPES for gemm in GEMMS]


def unquantized_wgrads(full: bool) -> list[RecipeVariant]:
    """Weight gradients of `unquantized_gemms`."""
    return [variant for variant in unquantized_gemms(full) if variant.gemm == "wgrad"]


def gemms(full: bool) -> list[RecipeVariant]:
    """Each GEMM of each recipe on its own, in bf16; with the recipes' options and fp16, fp32 in the full selection."""
    chosen = {**RECIPES, **MORE_RECIPES} if full else RECIPES
    dtypes = DTYPES if full else ("bfloat16",)
    return [
        RecipeVariant(name, recipe, dtype, gemm)
        for dtype in dtypes
        for name, recipe in chosen.items()
        for gemm in GEMMS
        if name in RECIPES or recipe.quantizes(gemm)
    ]


def half_gemms(full: bool) -> list[RecipeVariant]:
    """Each GEMM in fp16, of high precision and of one recipe; in the full selection of all."""
    names = RECIPES if full else ("bf16", "row")
    return [RecipeVariant(name, RECIPES[name], "float16", gemm) for name in names for gemm in GEMMS]


def wgrads(full: bool) -> list[RecipeVariant]:
    """Weight gradients of `gemms`."""
    return [variant for variant in gemms(full) if variant.gemm == "wgrad"]


def weight_gemms(full: bool) -> list[RecipeVariant]:
    """GEMMs of `gemms` that read codes of w."""
    return [v for v in gemms(full) if v.gemm in ("fprop", "dgrad") and v.recipe.quantizes(v.gemm)]


def unrounded(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling` without stochastic rounding, whose bits depend on the group's number."""
    return [variant for variant in one_per_scaling(full) if not variant.spec.stochastic]


def positional(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling`, with stochastic rounding."""
    return list(dict.fromkeys([*one_per_scaling(full), *stochastic(full)]))


def self_scaled(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling` where the scale follows x: neither from history nor with a floor."""
    return [v for v in one_per_scaling(full) if v.spec.scaling != "delayed" and not v.spec.amax_epsilon]


def row_scaled(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling` where no scale of the row data spans rows."""
    return [v for v in one_per_scaling(full) if v.spec.scaling in ROW_BY_ROW and not v.spec.square]


def mx(full: bool) -> list[QuantizerVariant]:
    """`one_per_scaling` with E8M0 scales."""
    return [variant for variant in one_per_scaling(full) if variant.spec.scaling == "mxfp8"]


def unrounded_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers without stochastic rounding; in the full selection NVFP4 without its option too."""
    plain = [variant for variant in base_recipes(full) if not variant.recipe.stochastic]
    return [*plain, RecipeVariant("nvfp4.nearest", NVFP4(stochastic_gradients=False))] if full else plain


def row_scaled_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers where no scale that y or dx depends on spans rows."""
    return [v for v in base_recipes(full) if v.recipe.kind in ("high_precision", *ROW_BY_ROW)]


def batch_invariant_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers where no scale that y depends on is taken from other rows of the batch."""
    return [variant for variant in base_recipes(full) if variant.recipe.batch_invariant]


def fprops(full: bool) -> list[RecipeVariant]:
    """The forward GEMM of each recipe."""
    return [variant for variant in gemms(False) if variant.gemm == "fprop"]


def few_gemms(full: bool) -> list[RecipeVariant]:
    """GEMMs of one recipe without and one with block scales, and in the full selection of all."""
    return [variant for variant in gemms(False) if full or variant.name in ("row", "mxfp8")]


def mx_gemms(full: bool) -> list[RecipeVariant]:
    """GEMMs of one recipe, and in the full selection of all."""
    return [variant for variant in gemms(False) if full or variant.name == "mxfp8"]


def few_fprops(full: bool) -> list[RecipeVariant]:
    """Forward GEMMs of `few_gemms`."""
    return [variant for variant in few_gemms(full) if variant.gemm == "fprop"]


def mx_fprops(full: bool) -> list[RecipeVariant]:
    """Forward GEMMs of `mx_gemms`."""
    return [variant for variant in mx_gemms(full) if variant.gemm == "fprop"]


def mx_wgrads(full: bool) -> list[RecipeVariant]:
    """Weight-gradient GEMMs of `mx_gemms`."""
    return [variant for variant in mx_gemms(full) if variant.gemm == "wgrad"]


def row_recipe(full: bool) -> list[RecipeVariant]:
    """Whole layers of another recipe than `mx_recipe`; in the full selection of all."""
    return [variant for variant in base_recipes(full) if full or variant.name == "row"]


def mx_recipe(full: bool) -> list[RecipeVariant]:
    """Whole layers of one recipe, for tests whose shapes are their own; in the full selection of all."""
    return [variant for variant in base_recipes(full) if full or variant.name == "mxfp8"]


def few_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers of three recipes that share nothing, and in the full selection of all."""
    return [variant for variant in base_recipes(full) if full or variant.name in ("row", "mxfp8", "nvfp4")]


def compiled_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers that are compiled: one in the quick selection, because a compiler takes its time."""
    return [variant for variant in base_recipes(False) if full or variant.name == "mxfp8"]


def one_fprop(full: bool) -> list[RecipeVariant]:
    """The forward GEMM of one recipe."""
    return [variant for variant in fprops(False) if variant.name == "block"]


def stochastic_recipes(full: bool) -> list[RecipeVariant]:
    """Whole layers that take a seed."""
    return [variant for variant in base_recipes(full) if variant.recipe.stochastic]


def _slots() -> dict[str, Recipe]:
    names = ("mxfp8.forward_only", "mxfp8.folded", "mxfp4_weights", "row.wgrad_high_precision")
    return {name: MORE_RECIPES[name] for name in names}
