"""GEMMs: products of every chip in the interpreter, no rows, accumulation, what is refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_table import target_of

import octavo
import octavo_numerics
from octavo import HighPrecision, Recipe
from octavo_conformance.oracles.checks import blocks_of
from octavo_conformance.problems.operands import RUN_ORDER, by_definition, draw_problem
from octavo_jax.bridge import BRIDGE
from octavo_jax_triton.gemm import operands
from octavo_jax_triton.gemm.gemm import bind_dgrad, bind_fprop, bind_wgrad
from octavo_jax_triton.launch.arguments import Target
from octavo_jax_triton.quantizers.dequantizer import converted
from octavo_numerics import QuantizedArray
from octavo_registry.contract import GemmRequest
from octavo_triton.kernels.device import INTERPRETED
from octavo_triton.layouts import TURNED
from octavo_triton.products.spec import layouts_of

# the interpreter of Triton 3.6 makes integers of arrays [1] where a loop ends at a value
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

BINDS: dict[str, Any] = {"fprop": bind_fprop, "dgrad": bind_dgrad, "wgrad": bind_wgrad}
SHAPE = (200, 160, 48, 4)
SIZES = np.array([0, 129, 33, 17], np.int32)
PRODUCTS = {
    "fp16 products of codes": ("sm_80", ["fp8-block", "fp8-row", "fp8-current"], "fp32"),
    "fp8 by descriptors": ("sm_89", ["fp8-block", "fp8-row", "fp8-current"], "hopper_fp8_promoted"),
    "fp8 by pointers": ("sm_89", ["fp8-block", "fp8-row", "fp8-current"], "hopper_fp8_promoted"),
}


def _gemm(op: Any, recipe: Recipe, device: str, out_dtype: Any = "float32", **more: Any) -> Any:
    request = GemmRequest(op, "jax", device, "bfloat16", out_dtype, recipe=recipe, **more)
    return BINDS[op](request, target_of(device))


def _operand(q: QuantizedArray, columnwise: str, device: str) -> Any:
    arrays = {name: getattr(q, name) for name in octavo_numerics.PLANES}
    planes = {name: None if array is None else jnp.asarray(array) for name, array in arrays.items()}
    sizes = None if q.group_sizes is None else jnp.asarray(SIZES)
    return converted(BRIDGE.grouped_tensor(q.spec, sizes, planes), columnwise, target_of(device))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own products alone, which the conformance suite tries")
@pytest.mark.parametrize("gemm", list(BINDS))
@pytest.mark.parametrize("kind", list(PRODUCTS))
def test_products_of_other_chips(
    kind: str, gemm: Any, rng: np.random.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter runs what sm_80 and sm_89 would compile: the same tiles, turned panels, scales and masks.

    jax-triton passes no descriptor on sm_89, so kernels make theirs.
    """
    chip, recipes, accumulation = PRODUCTS[kind]
    if kind == "fp8 by pointers":
        monkeypatch.setattr(Target, "has_copy_engine", False)
    monkeypatch.setattr(operands, "chip_of", lambda _: chip)
    for text in recipes:
        recipe = octavo.recipe(text)
        problem = draw_problem(rng, "bfloat16", SHAPE, SIZES)
        problem.x[problem.total :] = np.nan
        problem.dy[problem.total :] = np.nan
        quantized: Any = {operand: by_definition(problem, recipe, operand) for operand in ("x", "w", "dy")}
        turned = layouts_of(gemm, chip, recipe.kind)  # type: ignore[arg-type]
        assert bool(turned) is (chip == "sm_89" and gemm != "fprop")
        given = [_operand(quantized[name], TURNED if name in turned else "plain", device) for name in RUN_ORDER[gemm]]
        actual = np.asarray(_gemm(gemm, recipe, device)(*given, jnp.asarray(SIZES)))
        for part in blocks_of(problem, recipe, gemm, quantized, actual):
            bound = octavo_numerics.error_bound(
                recipe,
                part.a.shape[-1],
                gemm=gemm,
                accumulation=accumulation,  # type: ignore[arg-type]
            )
            report = bound.check(part.actual, part.a, part.b, zero_mean=part.independent)
            assert report.passed, report.describe()


def test_an_accumulator_keeps_its_bits_where_a_group_has_no_rows(rng: np.random.Generator, device: str) -> None:
    """Adding the zeros of an empty group would turn -0 into +0; what a size past the rows lost counts as no rows."""
    x, dy = (jnp.asarray(rng.standard_normal((150, side)), jnp.bfloat16) for side in (32, 48))
    held = rng.standard_normal((4, 48, 32)).astype(np.float32)
    held[[0, 3], 0] = -0.0
    sizes = jnp.array([0, 100, 60, 40])  # of which 10 rows of the third group and the fourth are past the end
    run = _gemm("wgrad", HighPrecision(), device)
    made = np.asarray(run(x, dy, sizes, out=jnp.asarray(held), accumulate=True))
    for group in (0, 3):
        np.testing.assert_array_equal(made[group].view(np.uint32), held[group].view(np.uint32))
    for group, rows in ((1, slice(0, 100)), (2, slice(100, 150))):
        left, right = (np.asarray(side, np.float64)[rows] for side in (dy, x))
        exact, size = left.T @ right + held[group], rows.stop - rows.start
        magnitude = np.abs(left).T @ np.abs(right) + np.abs(held[group])
        bound = octavo_numerics.error_bound(HighPrecision(), size, gemm="wgrad", accumulation="hopper_bf16")
        assert (np.abs(made[group] - exact) <= 2.0**-24 * np.abs(exact) + bound.c * magnitude).all()


@pytest.mark.parametrize("text", ["bf16", "fp8-block"])
def test_no_rows_are_no_launch(text: str, device: str) -> None:
    """A rank that got no token: empty y and dx, and dw of zeros."""
    recipe, sizes = octavo.recipe(text), jnp.zeros(3, jnp.int32)
    problem = draw_problem(np.random.default_rng(0), "bfloat16", (0, 64, 32, 3), np.zeros(3, np.int32))
    given: dict[str, Any] = {"x": problem.x, "w": problem.w, "dy": problem.dy}
    for name in given:
        q = by_definition(problem, recipe, name)  # type: ignore[arg-type]
        given[name] = jnp.asarray(given[name]) if q is None else _operand(q, "plain", device)
    for gemm, shape in (("fprop", (0, 32)), ("dgrad", (0, 64)), ("wgrad", (3, 32, 64))):
        if text != "bf16" and not INTERPRETED and gemm != "fprop":
            continue  # there they read turned codes, which a layer asks for
        made = _gemm(gemm, recipe, device)(*(given[name] for name in RUN_ORDER[gemm]), sizes)  # type: ignore[index]
        assert made.shape == shape
        assert not np.asarray(made).any()


def test_operands_that_do_not_fit_are_named(device: str) -> None:
    """A message with both, before anything is launched."""
    x, w, sizes = jnp.zeros((8, 32)), jnp.zeros((2, 16, 48)), jnp.array([4, 4])
    fprop = _gemm("fprop", HighPrecision(), device)
    with pytest.raises(ValueError, match=r"x \[8, 32\] and w \[2, 16, 48\] in 2 groups"):
        fprop(x, w, sizes)
    with pytest.raises(ValueError, match=r"bias_scales was given and bias is None"):
        fprop(x, jnp.zeros((2, 16, 32)), sizes, bias_scales=jnp.ones(8))
    with pytest.raises(ValueError, match=r"bias has shape \[16\] and dtype \w+; it must have shape \[2, 16\]"):
        fprop(x, jnp.zeros((2, 16, 32)), sizes, bias=jnp.ones(16))
    with pytest.raises(ValueError, match="multiplies quantized operands; give a GroupedTensor"):
        _gemm("fprop", octavo.recipe("fp8-block"), device)(x, w, sizes)
    with pytest.raises(ValueError, match="accumulate=True and out is not given"):
        _gemm("wgrad", HighPrecision(), device)(x, x, sizes, accumulate=True)
