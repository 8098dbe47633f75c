"""Operands of a GEMM as the definition makes them, so that a GEMM is tested apart from the backend's quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import octavo_numerics
from octavo import QuantizerSpec, Recipe
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw, draw_sizes, offsets
from octavo_numerics import QuantizedArray
from octavo_registry.contract.frameworks import PLANES
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.weights import readers

READS: dict[Gemm, dict[Operand, Direction]] = {
    "fprop": {"x": "rowwise", "w": "rowwise"},
    "dgrad": {"dy": "rowwise", "w": "columnwise"},
    "wgrad": {"dy": "columnwise", "x": "columnwise"},
}
"""The plane of each operand that a GEMM multiplies."""

RUN_ORDER: dict[Gemm, tuple[Operand, Operand]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
"""Operands in the order in which a bound GEMM takes them."""

SEED = 20_260_101
"""Seed of stochastic rounding where a test does not vary it."""


@dataclass(frozen=True)
class Problem:
    """One grouped linear layer's inputs. x [M, K], w [G, N, K], dy [M, N], sizes [G], bias [G, N]; `scales`: delayed
    scaling's encode scales by operand, each [G]."""

    x: Array
    w: Array
    dy: Array
    sizes: Array
    bias: Array
    scales: dict[str, Array]

    def of(self, operand: Operand) -> Array:
        """The array of an operand."""
        array: Array = getattr(self, operand)
        return array

    @property
    def total(self) -> int:
        """Rows that belong to a group."""
        return int(self.sizes.sum())


MAIN = (400, 304, 272, 6)
"""(M, K, N, G) of most tests: two blocks of 128 and a tail along K and along N, so that a whole block has a neighbour,
and rows of y are long enough for T2. One shape, because a framework that compiles pays for each; the group sizes vary,
as values."""

_BLOCK = 128


def draw_problem(
    rng: Rng,
    dtype: Any,
    shape: tuple[int, int, int, int] = MAIN,
    sizes: Array | None = None,
    *,
    name: str = "gauss",
) -> Problem:
    """Gaussian weights, a third of whose blocks have variance 1/K, and activations of a class, on drawn sizes."""
    M, K, N, G = shape
    if sizes is None:
        sizes = draw_sizes(rng, G, M)
    x, dy = draw(rng, (M, K), dtype, name), draw(rng, (M, N), dtype)
    w = (draw(rng, (G, N, K), "float32") * _magnitudes(G, N, K) / np.float32(np.sqrt(K))).astype(DTYPES[dtype])
    bias = draw(rng, (G, N), dtype)
    scales = {operand: np.exp2(rng.uniform(4.0, 6.0, G)).astype(np.float32) for operand in ("x", "dy")} | {
        "w": np.exp2(rng.uniform(7.0, 9.0, G)).astype(np.float32)
    }
    return Problem(x, w, dy, sizes, bias, scales)


@lru_cache(maxsize=16)
def _magnitudes(groups: int, rows: int, columns: int) -> Array:
    """1, 1/2 and 1/4 for the blocks of a weight: another one than the next two blocks have along any axis, or than the
    block with row and column in each other's place, unless these differ by a multiple of 3. Scales that are powers of
    two are the same for almost all blocks of one variance, and a GEMM that reads another block's, or another expert's,
    has the same bits.
    """
    group, row, column = np.ix_(np.arange(groups), np.arange(rows) // _BLOCK, np.arange(columns) // _BLOCK)
    magnitudes: Array = np.exp2(-((group + row + 2 * column) % 3)).astype(np.float32)
    return magnitudes


def by_definition(
    problem: Problem, recipe: Recipe, operand: Operand, *, seed: int = SEED, group_offset: int = 0
) -> QuantizedArray | None:
    """The operand as the definition quantizes it in `recipe`; None where no GEMM reads it quantized."""
    spec = recipe.quantizer(operand)
    if spec is None:
        return None
    return octavo_numerics.quantize(
        problem.of(operand),
        spec,
        None if operand == "w" else problem.sizes,
        seed=seed if spec.stochastic else None,
        group_offset=group_offset,
        scale=problem.scales[operand] if spec.scaling == "delayed" else None,
    )


def values(problem: Problem, quantized: QuantizedArray | None, operand: Operand, direction: Direction) -> Array:
    """What a GEMM multiplies, in float64; the unquantized operand where `quantized` is None."""
    if quantized is None:
        return problem.of(operand).astype(np.float64)
    return octavo_numerics.dequantize(quantized, direction).astype(np.float64)


def to_framework(case: Case, quantized: QuantizedArray, sizes: Any) -> Any:
    """The definition's planes as a GroupedTensor of the framework."""
    arrays = {name: getattr(quantized, name) for name in PLANES}
    planes = {name: case.array(array) for name, array in arrays.items() if array is not None}
    return case.bridge.grouped_tensor(quantized.spec, None if quantized.group_sizes is None else sizes, planes)


def gemm_operand(case: Case, plan: Plan, problem: Problem, operand: Operand, quantized: QuantizedArray | None) -> Any:
    """The operand in the layout that `plan` wants: the definition's planes, swizzled by the backend where not plain."""
    if quantized is None:
        return case.array(problem.of(operand))
    if plan.layouts.get(operand, PLAIN) == PLAIN:
        return to_framework(case, quantized, case.sizes(problem.sizes))
    spec, x = quantized.spec.quantizer, case.array(problem.of(operand))
    sizes = None if operand == "w" else case.sizes(problem.sizes)
    quantizer = quantizer_for(case, plan, problem, operand, spec)
    return quantizer.run(x, sizes, **quantizer_arguments(case, problem, operand, spec))


def gemm_call(case: Case, problem: Problem, **fields: Any) -> tuple[Callable[..., Any], list[Any]]:
    """(the bound function of the case's GEMM, its operands): `run(*operands, sizes)` is one call."""
    _, N, K = problem.w.shape
    plan = case.plan(case.gemm, k=K, n=N, groups=len(problem.sizes), **fields)
    quantizes = case.recipe.quantizes(case.gemm)
    operands = []
    for name in RUN_ORDER[case.gemm]:
        tensor = by_definition(problem, case.recipe, name) if quantizes else None
        operands.append(gemm_operand(case, plan, problem, name, tensor))
    return plan.run, operands


def quantizer_for(case: Case, plan: Plan, problem: Problem, operand: Operand, spec: QuantizerSpec) -> Plan:
    """The plan of the backend's own quantizer, whose bits the quantize part checks, to the layout that `plan` wants:
    one of the backend's own can come from nowhere else."""
    layout, rowwise = plan.layouts.get(operand, PLAIN), readers(operand, plan.request.weight)[0] == case.gemm
    return quantizer_to(case, problem, operand, spec, (layout, PLAIN) if rowwise else (PLAIN, layout))


def quantizer_to(case: Case, problem: Problem, operand: Operand, spec: QuantizerSpec, layouts: tuple[str, str]) -> Plan:
    """The plan of the backend's own quantizer of an operand, to these layouts of its rowwise and columnwise planes."""
    return case.plan(
        "quantize",
        recipe=None,
        quantizer=spec,
        stacked=operand == "w",
        out_dtype=case.dtype,
        k=problem.of(operand).shape[-1],
        groups=len(problem.sizes),
        layouts=layouts,
    )


def quantizer_arguments(case: Case, problem: Problem, operand: Operand, spec: QuantizerSpec) -> dict[str, Any]:
    """What the function of a quantizer by `spec`, alone or fused, takes by name."""
    return {
        "seed": SEED if spec.stochastic else None,
        "operand": operand,
        "scale": case.array(problem.scales[operand]) if spec.scaling == "delayed" else None,
    }


def padded_offsets(sizes: Array, alignment: int) -> Array:
    """[G + 1] row at which each group of a padded payload begins."""
    return offsets(-(-sizes // alignment) * alignment)
