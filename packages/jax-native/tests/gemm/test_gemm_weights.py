"""Kernels that lie as [G, K, N]: quantized and multiplied as they lie, with the bits of the transposed copy."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import octavo_jax
import octavo_numerics
import octavo_registry
from octavo import HighPrecision, Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_jax import GroupedTensor
from octavo_registry import Plan, Request, Weight
from octavo_registry.contract.weights import readers

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

BACKEND = "jax-native"
SHAPE = (300, 150, 70, 5)
SEED = 20_261_122
ORDER: dict[Gemm, tuple[Operand, Operand]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
TURNED = {"rowwise": "columnwise", "columnwise": "rowwise"}


def _plan(recipe: Recipe, gemm: Gemm, weight: Weight, out_dtype: Any = "bfloat16") -> Plan:
    request = Request(gemm, "jax", "cpu", "bfloat16", out_dtype, recipe=recipe.for_gemm(gemm), weight=weight)
    return octavo_registry.plan(request, backend=BACKEND)


def _kernel(w: np.ndarray) -> Array:
    return jnp.asarray(np.ascontiguousarray(np.swapaxes(w, 1, 2)))


def _operand(layer: Any, recipe: Recipe, gemm: Gemm, operand: Operand, plan: Plan, weight: Weight) -> Any:
    """An operand as this backend quantizes it, in the layout that the GEMM asks for."""
    array = _kernel(layer.w) if operand == "w" and weight == "kn" else jnp.asarray(getattr(layer, operand))
    spec = recipe.quantizer(operand)
    if not recipe.quantizes(gemm) or spec is None:
        return array
    rowwise = readers(operand, weight)[0] == gemm
    layout = plan.layouts[operand]
    request = Request(
        "quantize",
        "jax",
        "cpu",
        "bfloat16",
        "bfloat16",
        quantizer=spec,
        stacked=operand == "w",
        layouts=(layout, "plain") if rowwise else ("plain", layout),
    )
    return octavo_registry.plan(request, backend=BACKEND).run(
        array,
        None if operand == "w" else jnp.asarray(layer.sizes),
        operand=operand,
        seed=SEED if spec.stochastic else None,
        scale=jnp.asarray(layer.scales[operand]) if spec.scaling == "delayed" else None,
    )


def test_planes_are_those_of_the_transposed_copy(recipe: Recipe, rng: Any, layer_of: Any, same_bits: Any) -> None:
    """Every quantizer of w treats rows and columns alike: each plane has the codes and scales, moved, that the
    definition gives the other plane of [G, N, K]."""
    spec = recipe.quantizer("w")
    if spec is None:
        return
    layer = layer_of(rng, SHAPE)
    scale = layer.scales["w"] if spec.scaling == "delayed" else None
    mine = octavo_jax.quantize(_kernel(layer.w), spec, scale=scale, backend=BACKEND)
    expected = octavo_numerics.quantize(layer.w, spec, scale=scale)
    for direction, other in TURNED.items():
        codes, scales, second = (getattr(expected, f"{other}{part}") for part in ("", "_scale", "_global"))
        same_bits(np.swapaxes(np.asarray(getattr(mine, direction)), 1, 2), codes, f"{direction} codes")
        made = np.asarray(getattr(mine, f"{direction}_scale"))
        same_bits(np.swapaxes(made, 1, 2) if made.ndim == 3 else made, scales, f"{direction} scales")
        if second is not None:
            same_bits(getattr(mine, f"{direction}_global"), second, f"{direction} second level")


@pytest.mark.parametrize("gemm", GEMMS)
def test_products_have_the_bits_of_the_transposed_copy(
    gemm: Gemm, recipe: Recipe, rng: Any, layer_of: Any, assert_product: Any, same_bits: Any
) -> None:
    """y and dx of a kernel as it lies, and dw as it lies: sums in one order along the contracted axis."""
    layer = layer_of(rng, SHAPE)
    made = {}
    for weight in ("nk", "kn"):
        plan = _plan(recipe, gemm, weight)  # type: ignore[arg-type]
        operands = [_operand(layer, recipe, gemm, name, plan, weight) for name in ORDER[gemm]]  # type: ignore[arg-type]
        made[weight] = np.asarray(plan.run(*operands, jnp.asarray(layer.sizes)))
    turned = np.ascontiguousarray(np.swapaxes(made["kn"], 1, 2)) if gemm == "wgrad" else made["kn"]
    same_bits(turned, made["nk"], gemm)
    assert_product(layer, recipe, gemm, turned)


def test_bias_is_added_to_the_turned_product(recipe: Recipe, rng: Any, layer_of: Any, assert_product: Any) -> None:
    """In fp32 before the one rounding, although the kernels' dgrad makes y."""
    layer, plan = layer_of(rng, SHAPE), _plan(recipe, "fprop", "kn")
    operands = [_operand(layer, recipe, "fprop", name, plan, "kn") for name in ORDER["fprop"]]
    y = plan.run(*operands, jnp.asarray(layer.sizes), bias=jnp.asarray(layer.bias))
    assert_product(layer, recipe, "fprop", y, bias=layer.bias)


def test_wgrad_accumulates_as_it_lies(rng: Any, layer_of: Any, assert_product: Any) -> None:
    """Into [G, K, N], rounded once."""
    layer, recipe = layer_of(rng, SHAPE), HighPrecision()
    start = rng.standard_normal((SHAPE[3], SHAPE[1], SHAPE[2])).astype(np.float32)
    plan = _plan(recipe, "wgrad", "kn", "float32")
    arrays = [jnp.asarray(getattr(layer, name)) for name in ORDER["wgrad"]]
    dw = plan.run(*arrays, jnp.asarray(layer.sizes), out=jnp.asarray(start), accumulate=True)
    swapped = np.swapaxes(np.asarray(start, np.float64), 1, 2)
    turned = np.ascontiguousarray(np.swapaxes(np.asarray(dw), 1, 2))
    assert_product(layer, recipe, "wgrad", turned, start=swapped)


def test_operands_of_the_definition(rng: Any, layer_of: Any, assert_product: Any, same_bits: Any) -> None:
    """Planes in the plain layout, of a kernel that was quantized as it lies elsewhere, are made native first."""
    layer, recipe = layer_of(rng, SHAPE), octavo_registry.recipe("mxfp8")
    plan, spec = _plan(recipe, "fprop", "kn"), recipe.quantizer("w")
    assert spec is not None
    q = octavo_numerics.quantize(np.asarray(_kernel(layer.w)), spec)
    planes = {
        name: None if getattr(q, name) is None else jnp.asarray(getattr(q, name)) for name in octavo_numerics.PLANES
    }
    x = layer.operand(recipe, "fprop", "x")
    y = plan.run(x, GroupedTensor(q.spec, None, **planes), jnp.asarray(layer.sizes))
    assert_product(layer, recipe, "fprop", y)
    with pytest.raises(ValueError, match=r"it takes x \[M, K\] and w \[G, K, N\]"):
        plan.run(x, layer.operand(recipe, "fprop", "w"), jnp.asarray(layer.sizes))


def _transposed(text: str) -> list[str]:
    """Result types of a lowered program's transposes of more than one element."""
    return re.findall(r"stablehlo\.transpose.*-> tensor<([^>]*)>", text)


@pytest.mark.parametrize("dims", [((-1,), (1,)), ((-1,), (2,))], ids=["[G, K, N]", "[G, N, K]"])
def test_no_kernel_and_no_dw_is_transposed(dims: Any, recipe: Recipe) -> None:
    """A training step lowered for CUDA holds no transpose at all, whichever way the kernel lies."""
    m, k, n, g = 64, 96, 48, 4
    x, kernel = jnp.ones((m, k), jnp.bfloat16), jnp.ones((g, k, n) if dims[1] == (1,) else (g, n, k), jnp.bfloat16)
    state = octavo_jax.init_delayed(recipe, g) if recipe.stateful else None  # type: ignore[arg-type]

    def loss(x: Array, kernel: Array, bias: Array, sizes: Array) -> Array:
        y = octavo_jax.grouped_dense(
            x,
            kernel,
            sizes,
            recipe=recipe,
            contracting_dims=dims,
            bias=bias,
            state=state,
            seed=SEED if recipe.stochastic else None,
            backend=BACKEND,
        )
        return jnp.sum(jnp.tanh((y if state is None else y[0]).astype(jnp.float32)))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    traced = step.trace(x, kernel, jnp.ones((g, n)), jnp.zeros(g, jnp.int32))
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert text.count("custom_call @octavo_gemm(") == 3
    assert _transposed(text) == []
