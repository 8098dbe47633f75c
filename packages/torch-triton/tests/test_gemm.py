"""GEMMs in each kind of product that a chip has, within the definition's bounds; strides; accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import octavo
import octavo_numerics
from octavo import Recipe
from octavo_conformance.oracles.checks import blocks_of
from octavo_conformance.problems.operands import RUN_ORDER, by_definition, draw_problem
from octavo_numerics import QuantizedArray
from octavo_torch.bridge import BRIDGE
from octavo_torch_triton.gemm.gemm import Dgrad, Fprop, Wgrad
from octavo_torch_triton.quantizers.quantizer import converted
from octavo_triton.kernels.device import INTERPRETED
from octavo_triton.layouts import TURNED
from octavo_triton.products.spec import layouts_of

# the interpreter of Triton 3.6 makes integers of arrays [1] where a loop ends at a value
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

CALLS: dict[str, Any] = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}
SHAPE = (200, 160, 48, 4)
SIZES = np.array([0, 129, 33, 17], np.int32)
PRODUCTS = {
    "fp16 products of codes": ("sm_80", ["fp8-block", "fp8-row", "fp8-current"], "fp32"),
    "fp8": ("sm_89", ["fp8-block", "fp8-row", "fp8-current"], "hopper_fp8_promoted"),
    # NVFP4's is compiled alone: the interpreter takes every block scale for an E8M0 one
    "block-scaled": ("sm_100", ["mxfp8"], "hopper_fp8_promoted"),
}


def _operand(q: QuantizedArray, device: str) -> Any:
    arrays = {
        name: None if getattr(q, name) is None else BRIDGE.from_numpy(getattr(q, name), device)
        for name in octavo_numerics.PLANES
    }
    sizes = None if q.group_sizes is None else torch.from_numpy(SIZES).to(device)
    return BRIDGE.grouped_tensor(q.spec, sizes, arrays)


def _check(recipe: Recipe, gemm: Any, parts: Any, accumulation: Any) -> None:
    for part in parts:
        bound = octavo_numerics.error_bound(recipe, part.a.shape[-1], gemm=gemm, accumulation=accumulation)
        report = bound.check(part.actual, part.a, part.b, zero_mean=part.independent)
        assert report.passed, report.describe()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has its own products alone, which the conformance suite tries")
@pytest.mark.parametrize("gemm", list(CALLS))
@pytest.mark.parametrize("kind", list(PRODUCTS))
def test_products_of_other_chips(kind: str, gemm: str, rng: np.random.Generator, device: str) -> None:
    """The interpreter runs what sm_80, sm_89 and sm_100 would compile: the same tiles, scales and masks."""
    chip, recipes, accumulation = PRODUCTS[kind]
    if kind == "block-scaled" and not _interprets_block_scales():
        pytest.skip("this Triton's interpreter has no tl.dot_scaled")
    for name in recipes:
        recipe = octavo.recipe(name)
        problem = draw_problem(rng, "bfloat16", SHAPE, SIZES)
        problem.x[problem.total :] = np.nan
        problem.dy[problem.total :] = np.nan
        quantized = {operand: by_definition(problem, recipe, operand) for operand in ("x", "w", "dy")}
        operands = [_operand(quantized[operand], device) for operand in RUN_ORDER[gemm]]  # type: ignore[index,arg-type]
        turned = layouts_of(gemm, chip, quantized["x"].spec.quantizer.scaling)  # type: ignore[arg-type]
        operands = [
            converted(operand, TURNED) if name in turned else operand
            for name, operand in zip(RUN_ORDER[gemm], operands, strict=True)  # type: ignore[index]
        ]
        actual = CALLS[gemm](chip, "bfloat16")(*operands, torch.from_numpy(SIZES))
        _check(recipe, gemm, blocks_of(problem, recipe, gemm, quantized, BRIDGE.to_numpy(actual)), accumulation)  # type: ignore[arg-type]


def _interprets_block_scales() -> bool:
    from triton.runtime.interpreter import InterpreterBuilder

    return "create_dot_scaled" in vars(InterpreterBuilder)


@pytest.mark.parametrize("chip", ["interpreter", "sm_90"] if INTERPRETED else ["sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulates_into_any_strides(dtype: str, chip: Any, rng: np.random.Generator, device: str) -> None:
    """main_grad of a weight that is stored as [G, K, N]: written in place, an empty group's part untouched.

    Operands are fp16 where tiles come by descriptors, of which the interpreter multiplies those of bf16 as integers.
    """
    given = torch.float16 if INTERPRETED and chip == "sm_90" else torch.bfloat16
    x, dy = (
        torch.from_numpy(rng.standard_normal((200, side)).astype(np.float32)).to(device).to(given) for side in (96, 40)
    )
    sizes = torch.from_numpy(SIZES)
    start = torch.from_numpy(rng.standard_normal((4, 96, 40)).astype(np.float32)).to(device).to(getattr(torch, dtype))
    out = start.clone().transpose(1, 2)
    wgrad = Wgrad(chip, dtype)  # type: ignore[arg-type]
    assert wgrad(x, dy, sizes, out=out, accumulate=True) is out
    assert torch.equal(out[0], start[0].T)
    first = 0
    for group, size in enumerate(SIZES.tolist()):
        rows = slice(first, first + size)
        exact = dy[rows].double().T @ x[rows].double() + start[group].double().T
        magnitude = dy[rows].double().abs().T @ x[rows].double().abs() + start[group].double().abs().T
        unit = 2.0**-24 if dtype == "float32" else 2.0**-8
        bound = octavo_numerics.error_bound(
            octavo.HighPrecision(), max(size, 1), gemm="wgrad", accumulation="hopper_bf16"
        )
        error = (out[group].double() - exact).abs()
        assert (error <= unit * exact.abs() + bound.c * magnitude).all()
        first += size


def test_operands_that_do_not_fit_are_named(device: str) -> None:
    """A message with both shapes, before anything is launched."""
    x, w = torch.zeros(8, 32, device=device), torch.zeros(2, 16, 48, device=device)
    fprop = Fprop("interpreter" if INTERPRETED else "sm_90", "float32")
    with pytest.raises(ValueError, match=r"x \[8, 32\] and w \[2, 16, 48\] in 2 groups"):
        fprop(x, w, torch.tensor([4, 4]))
