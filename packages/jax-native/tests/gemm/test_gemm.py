"""GEMMs on the definition's operands and on our own: within their bound of float64, in both layouts the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import octavo
import octavo_registry
from octavo import MXFP8, HighPrecision, Recipe
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo.recipe_base import READERS, Gemm
from octavo_jax_native import backend
from octavo_jax_native.gemm import gemm as gemms
from octavo_registry import Plan, Request

BACKEND = "jax-native"
SHAPE = (300, 150, 70, 5)  # a panel and a tail along K and N, and neither a multiple of 16
ORDER: dict[Gemm, tuple[Operand, Operand]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
"""Operands as a bound GEMM takes them."""

SEED = 20_261_122


@pytest.fixture(params=ORDER)
def gemm(request: pytest.FixtureRequest) -> Gemm:
    """Each of the three."""
    return request.param  # type: ignore[no-any-return]


def _plan(recipe: Recipe, gemm: Gemm, in_dtype: Any = "bfloat16", out_dtype: Any = "bfloat16") -> Plan:
    request = Request(gemm, "jax", "cpu", in_dtype, out_dtype, recipe=recipe.for_gemm(gemm))
    return octavo_registry.plan(request, backend=BACKEND)


def _native(layer: Any, recipe: Recipe, gemm: Gemm, operand: Operand, plan: Plan) -> Any:
    """The operand as this backend quantizes it, in the layout that the GEMM asks for."""
    spec = recipe.quantizer(operand)
    if not recipe.quantizes(gemm) or spec is None:
        return jnp.asarray(getattr(layer, operand))
    direction = "rowwise" if READERS[operand][0] == gemm else "columnwise"
    layouts = (plan.layouts[operand], PLAIN) if direction == "rowwise" else (PLAIN, plan.layouts[operand])
    request = Request(
        "quantize",
        "jax",
        "cpu",
        "bfloat16",
        "bfloat16",
        quantizer=spec,
        stacked=operand == "w",
        layouts=layouts,
    )
    return octavo_registry.plan(request, backend=BACKEND).run(
        jnp.asarray(getattr(layer, operand)),
        None if operand == "w" else jnp.asarray(layer.sizes),
        operand=operand,
        seed=SEED if spec.stochastic else None,
        scale=jnp.asarray(layer.scales[operand]) if spec.scaling == "delayed" else None,
    )


def _run(plan: Plan, layer: Any, recipe: Recipe, gemm: Gemm, **arguments: Any) -> Array:
    operands = [layer.operand(recipe, gemm, name) for name in ORDER[gemm]]
    result: Array = plan.run(*operands, jnp.asarray(layer.sizes), **arguments)
    return result


def test_products_are_within_their_bound(
    recipe: Recipe, gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any, same_bits: Any
) -> None:
    """Ragged, with empty groups and a NaN tail; operands of the definition in the plain layout, and the backend's own
    in the native one, give one result (faults.md 1, 2, 3, 8, 12, 13, 16, 24, 59)."""
    plan = _plan(recipe, gemm)
    for _ in range(2):
        layer = layer_of(rng, SHAPE)
        actual = _run(plan, layer, recipe, gemm)
        assert actual.dtype == jnp.bfloat16
        assert_product(layer, recipe, gemm, actual)
        operands = [_native(layer, recipe, gemm, name, plan) for name in ORDER[gemm]]
        same_bits(plan.run(*operands, jnp.asarray(layer.sizes)), actual, "operands in the native layout")


def test_layouts_that_the_quantizers_are_asked_for(recipe: Recipe, gemm: Gemm) -> None:
    """Row data in "rows", column data in "panels"; nothing is asked for where nothing is quantized."""
    layouts = {name: "rows" if READERS[name][0] == gemm else "panels" for name in ORDER[gemm]}
    assert dict(_plan(recipe, gemm).layouts) == (layouts if recipe.quantizes(gemm) else {})


def test_other_result_dtypes(recipe: Recipe, gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """The sum is rounded once, to what was asked for; each recipe's GEMM draws one of two."""
    layer, out_dtype = layer_of(rng, SHAPE), str(rng.choice(["float32", "float16"]))
    print(f"out_dtype {out_dtype}")  # shown by pytest where the test fails
    actual = _run(_plan(recipe, gemm, out_dtype=out_dtype), layer, recipe, gemm)
    assert actual.dtype == jnp.dtype(out_dtype)
    assert_product(layer, recipe, gemm, actual)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_unquantized_dtypes(dtype: str, gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """fp32 and fp16 operands."""
    layer, recipe = layer_of(rng, SHAPE, dtype), HighPrecision()
    assert_product(layer, recipe, gemm, _run(_plan(recipe, gemm, dtype, "float32"), layer, recipe, gemm))


def test_operands_of_two_dtypes(gemm: Gemm, rng: Any, layer_of: Any, same_bits: Any) -> None:
    """A bf16 operand with an fp32 one is its exact fp32 copy with it."""
    layer, wide = layer_of(rng, SHAPE), layer_of(rng, SHAPE, "float32")
    plan = _plan(HighPrecision(), gemm, out_dtype="float32")
    first, second = ORDER[gemm]
    narrow, other, sizes = jnp.asarray(getattr(layer, first)), jnp.asarray(getattr(wide, second)), layer.sizes
    expected = plan.run(narrow.astype(jnp.float32), other, jnp.asarray(sizes))
    same_bits(plan.run(narrow, other, jnp.asarray(sizes)), expected, "mixed dtypes")


@pytest.mark.parametrize("scaled", [False, True], ids=["bias", "scaled bias"])
def test_bias(scaled: bool, recipe: Recipe, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """Added in fp32 before the one rounding, of any dtype, which each draws; scales past the sum are not read."""
    layer, dtype = layer_of(rng, SHAPE), str(rng.choice(["bfloat16", "float32", "float16"]))
    print(f"a bias of {dtype}")  # shown by pytest where the test fails
    arguments = {"bias": jnp.asarray(layer.bias).astype(dtype)}
    bias = np.asarray(arguments["bias"], np.float64)
    if scaled:
        scales = np.full(SHAPE[0], 0.5, np.float32)
        scales[layer.total :] = np.nan
        arguments["bias_scales"], bias = jnp.asarray(scales), bias / 2
    actual = _run(_plan(recipe, "fprop"), layer, recipe, "fprop", **arguments)
    assert_product(layer, recipe, "fprop", actual, bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wgrad_accumulates(
    dtype: str, recipe: Recipe, rng: Any, layer_of: Any, assert_product: Any, same_bits: Any
) -> None:
    """dw is added in fp32 and rounded once to the accumulator's dtype; an empty group's part keeps its bits, -0 too;
    the array that was given is untouched."""
    layer = layer_of(rng, SHAPE, sizes=np.array([64, 0, 130, 3, 20], np.int32))
    start = rng.standard_normal((SHAPE[3], SHAPE[2], SHAPE[1])).astype(np.float32)
    start[1, 0, :5] = -0.0
    out = jnp.asarray(start).astype(dtype)
    start = np.asarray(out).copy()
    actual = _run(_plan(recipe, "wgrad"), layer, recipe, "wgrad", out=out, accumulate=True)
    assert actual.dtype == out.dtype
    assert_product(layer, recipe, "wgrad", actual, start=np.asarray(start, np.float64))
    same_bits(actual[1], start[1], "accumulator of an empty group")
    same_bits(out, start, "the array that was given")


def test_a_donated_accumulator_is_written_in_place(rng: Any, layer_of: Any) -> None:
    """Aliased with the result: no copy in the program, and no second array of that size."""
    layer, recipe = layer_of(rng, SHAPE), MXFP8()
    plan = _plan(recipe, "wgrad")
    operands = [layer.operand(recipe, "wgrad", name) for name in ORDER["wgrad"]]

    def step(out: Array) -> Array:
        result: Array = plan.run(*operands, jnp.asarray(layer.sizes), out=out, accumulate=True)
        return result

    out = jnp.zeros((SHAPE[3], SHAPE[2], SHAPE[1]), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(out).compile()
    assert "output_to_operand_aliasing" in compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes == out.nbytes
    address = out.unsafe_buffer_pointer()
    assert compiled(out).unsafe_buffer_pointer() == address


def test_groups_of_no_rows_and_no_rows_at_all(gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """All groups empty, all rows in one group, M = 0 (faults.md 3, 5, 6, 7, 19)."""
    recipe = MXFP8()
    plan = _plan(recipe, gemm)
    for rows, sizes in ((40, [0, 0, 0]), (40, [0, 40, 0]), (40, [0, 0, 1]), (0, [0, 0, 0])):
        layer = layer_of(rng, (rows, 40, 24, 3), sizes=np.array(sizes, np.int32))
        actual = _run(plan, layer, recipe, gemm)
        assert actual.shape == {"fprop": (rows, 24), "dgrad": (rows, 40), "wgrad": (3, 24, 40)}[gemm]
        assert_product(layer, recipe, gemm, actual)


def test_more_groups_than_rows(gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """Seventy groups of no row to four."""
    sizes = np.where(rng.random(70) < 0.6, 0, rng.integers(0, 5, 70)).astype(np.int32)
    layer, recipe = layer_of(rng, (int(sizes.sum()) + 5, 40, 24, 70), sizes=sizes), MXFP8()
    assert_product(layer, recipe, gemm, _run(_plan(recipe, gemm), layer, recipe, gemm))


def test_long_sums(gemm: Gemm, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """A thousand products, no multiple of a tile (faults.md 20, 24, 25)."""
    sizes = np.array([1030, 17], np.int32)
    shape = {"fprop": (60, 1057, 33, 2), "dgrad": (60, 33, 1057, 2), "wgrad": (1057, 40, 33, 2)}[gemm]
    for recipe in (HighPrecision(), MXFP8()):
        layer = layer_of(rng, shape, sizes=sizes if gemm == "wgrad" else np.array([41, 15], np.int32))
        assert_product(layer, recipe, gemm, _run(_plan(recipe, gemm), layer, recipe, gemm))


def test_what_no_layout_defines_is_not_read(
    recipe: Recipe, gemm: Gemm, rng: Any, layer_of: Any, same_bits: Any
) -> None:
    """Rows past the sum and panels that no group has: filled with 0xFF, which is NaN in every format, they change no
    bit (faults.md 9, 12)."""
    layer, plan = layer_of(rng, SHAPE, sizes=np.array([64, 0, 130, 3, 20], np.int32)), _plan(recipe, gemm)
    operands = [_native(layer, recipe, gemm, name, plan) for name in ORDER[gemm]]
    panels = int((-(-layer.sizes // 128)).sum())
    poisoned = []
    for operand, name in zip(operands, ORDER[gemm], strict=True):
        if name == "w" or not recipe.quantizes(gemm):
            poisoned.append(operand)
            continue
        direction = "rowwise" if READERS[name][0] == gemm else "columnwise"
        used = layer.total if direction == "rowwise" else panels
        codes, scales, _ = operand.plane(direction)
        planes = {direction: _filled(codes, 0, used)}
        if direction == "columnwise" and scales.shape[0] == codes.shape[0]:
            planes["columnwise_scale"] = _filled(scales, 0, used)
        elif direction == "rowwise" and SHAPE[0] in scales.shape:
            planes["rowwise_scale"] = _filled(scales, scales.shape.index(SHAPE[0]), used)
        poisoned.append(dataclasses.replace(operand, **planes))
    clean = plan.run(*operands, jnp.asarray(layer.sizes))
    same_bits(plan.run(*poisoned, jnp.asarray(layer.sizes)), clean, "with NaN in unspecified places")


def _filled(array: Array, axis: int, used: int) -> Array:
    host = np.array(array)
    there = np.moveaxis(host.view(np.uint8 if host.itemsize == 1 else np.uint32), axis, 0)
    there[used:] = np.iinfo(there.dtype).max
    return jnp.asarray(host)


@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("kind", ["bf16", "block", "nvfp4"])
def test_wrong_sizes_on_the_device(
    kind: str, native: bool, gemm: Gemm, rng: Any, layer_of: Any, same_bits: Any
) -> None:
    """Negative sizes and a sum past M are clamped, in the plan and in conversions; what comes before them is right
    (faults.md 12, 61)."""
    recipe = octavo.recipe(kind)
    layer = layer_of(rng, SHAPE, sizes=np.array([100, 0, 50, 7, 143], np.int32))
    plan = _plan(recipe, gemm)
    make = _native if native else lambda layer, recipe, gemm, name, plan: layer.operand(recipe, gemm, name)
    operands = [make(layer, recipe, gemm, name, plan) for name in ORDER[gemm]]
    right = np.asarray(plan.run(*operands, jnp.asarray(layer.sizes)))
    first = (lambda a: a[0]) if gemm == "wgrad" else (lambda a: a[:100])
    for sizes in (
        [100, 0, 300, 7, 0],
        [100, -5, 50, 0, 7],
        [100, 2**31 - 1, 2**31 - 1, 2, 0],
        [100, -(2**31), 0, 0, 0],
    ):
        actual = np.asarray(plan.run(*operands, jnp.asarray(sizes)))
        same_bits(first(actual), first(right), f"first group with sizes {sizes}")


def test_a_limit_is_offered_where_there_are_multiprocessors(
    gemm: Gemm, rng: Any, layer_of: Any, same_bits: Any
) -> None:
    """Of CUDA devices alone; the CPU's kernels, which are called with one here, take it and have the same bits."""
    recipe, layer = octavo.BlockScaling(), layer_of(rng, SHAPE)
    plan: Any = _plan(recipe, gemm)
    assert plan.bound.limited is None
    on_cuda = dataclasses.replace(plan.request, device="cuda", arch=(9, 0))
    assert backend._bind_gemm(on_cuda).limited is not None
    bind: Any = {"fprop": gemms.bind_fprop, "dgrad": gemms.bind_dgrad, "wgrad": gemms.bind_wgrad}[gemm]
    limited = dataclasses.replace(plan, bound=dataclasses.replace(plan.bound, run=bind(plan.request, 3)))
    same_bits(_run(limited, layer, recipe, gemm), _run(plan, layer, recipe, gemm), "a limit")
