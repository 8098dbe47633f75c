"""Grouped layers for the GEMM tests: operands in every layout, and the verdict of float64 on a result."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import native_calls as native
import numpy as np
import torch
from torch import Tensor

import octavo_numerics
import octavo_registry
from octavo import Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.oracles.checks import Part, blocks_of, with_bias
from octavo_conformance.problems.operands import RUN_ORDER, Problem, by_definition, draw_problem
from octavo_numerics import PLANES, QuantizedArray
from octavo_registry.contract.request import Request
from octavo_torch import GroupedTensor
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.bridge import BRIDGE

SHAPE = (150, 144, 80, 5)
"""(M, K, N, G) of most tests: a tail, K and N past one block and no multiple of it."""

NATIVE = {"fprop": ("rows", "rows"), "dgrad": ("rows", "panels"), "wgrad": ("panels", "panels")}
"""Layouts of the operands that a GEMM reads without a conversion, in the order of its call."""

SEED = 3


def request(gemm: Gemm, recipe: Recipe, dtype: str = "bfloat16", **fields: Any) -> Request:
    base = {"framework": "torch", "device": "cpu", "in_dtype": dtype, "out_dtype": dtype}
    return Request(op=gemm, recipe=recipe.for_gemm(gemm), **(base | fields))


def bound(gemm: Gemm, recipe: Recipe, dtype: str = "bfloat16", **fields: Any) -> Any:
    """The bound function, through the registry."""
    return octavo_registry.plan(request(gemm, recipe, dtype, **fields), backend="torch-native").run


@dataclass
class Layer:
    """One layer's inputs, each operand as the definition quantizes it (None: unquantized), and as tensors."""

    recipe: Recipe
    problem: Problem
    device: str = "cpu"
    quantized: dict[Operand, QuantizedArray | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for operand in ("x", "w", "dy"):
            self.quantized[operand] = by_definition(self.problem, self.recipe, operand, seed=SEED)

    @cached_property
    def sizes(self) -> Tensor:
        """int32 [G] on the device; copied there once, because a copy from the host waits."""
        return torch.from_numpy(self.problem.sizes.astype(np.int32)).to(self.device)

    def array(self, operand: Operand) -> Tensor:
        """The unquantized operand."""
        made: Tensor = BRIDGE.from_numpy(self.problem.of(operand), self.device)
        return made

    def plain(self, operand: Operand) -> GroupedTensor:
        """The definition's own planes."""
        q = self.quantized[operand]
        assert q is not None
        arrays = {
            name: None if getattr(q, name) is None else BRIDGE.from_numpy(getattr(q, name), self.device)
            for name in PLANES
        }
        return BRIDGE.grouped_tensor(q.spec, None if q.group_sizes is None else self.sizes, arrays)

    def native(self, operand: Operand) -> GroupedTensor:
        """This package's codes in the layouts of its GEMMs."""
        spec = self.recipe.quantizer(operand)
        assert spec is not None
        scale = None
        if spec.scaling == "delayed":
            scale = torch.from_numpy(self.problem.scales[operand]).to(self.device)
        made = native.quantize(
            self.array(operand),
            spec,
            None if operand == "w" else self.sizes,
            layouts=("rows", "panels"),
            seed=SEED if spec.stochastic else None,
            scale=scale,
        )
        return made.codes

    def operands(self, gemm: Gemm, *, plain: bool = False) -> list[Any]:
        """What the GEMM's call takes."""
        if not self.recipe.quantizes(gemm):
            return [self.array(name) for name in RUN_ORDER[gemm]]
        return [self.plain(name) if plain else self.native(name) for name in RUN_ORDER[gemm]]

    def shape(self, gemm: Gemm) -> tuple[int, ...]:
        """Of the result."""
        groups, n, k = self.problem.w.shape
        rows = len(self.problem.x)
        return {"fprop": (rows, n), "dgrad": (rows, k), "wgrad": (groups, n, k)}[gemm]

    def parts(self, gemm: Gemm, actual: Tensor) -> list[Part]:
        """The result by groups beside the float64 operands."""
        used = self.quantized if self.recipe.quantizes(gemm) else dict.fromkeys(self.quantized)
        return blocks_of(self.problem, self.recipe, gemm, used, BRIDGE.to_numpy(actual.detach()))

    def check(
        self,
        gemm: Gemm,
        actual: Tensor,
        *,
        bias: bool = False,
        bias_scales: Any = None,
        accumulation: Any = "fp32",
    ) -> None:
        """Every group is within the bounds of docs/numerics, and what no row reaches is exactly zero."""
        assert tuple(actual.shape) == self.shape(gemm)
        parts = self.parts(gemm, actual)
        if bias:
            parts = with_bias(parts, self.problem, bias_scales)
        check_parts(self.recipe, gemm, parts, actual.dtype, accumulation)
        used = self.problem.total
        rest = actual[used:] if gemm != "wgrad" else actual[torch.from_numpy(self.problem.sizes == 0)]
        # +0, not -0: the bytes
        assert not rest.detach().contiguous().cpu().view(torch.uint8).any(), f"{gemm}: tail or empty group"


def check_parts(recipe: Recipe, gemm: Gemm, parts: list[Part], dtype: torch.dtype, accumulation: Any = "fp32") -> None:
    for part in parts:
        limit = octavo_numerics.error_bound(
            recipe.for_gemm(gemm),
            part.a.shape[-1],
            gemm=gemm,
            out_dtype=DTYPE_NAMES[dtype],
            accumulation=accumulation,
        )
        report = limit.check(part.actual, part.a, part.b, zero_mean=part.independent)
        assert report.passed, f"{gemm} of group {part.group}: {report.describe()}"


def draw_layer(
    rng: np.random.Generator,
    recipe: Recipe,
    dtype: str = "bfloat16",
    *,
    shape: tuple[int, int, int, int] = SHAPE,
    sizes: list[int] | None = None,
    device: str = "cpu",
) -> Layer:
    """A layer on drawn sizes, or on these, with NaN past their sum."""
    drawn = None if sizes is None else np.array(sizes, np.int32)
    problem = draw_problem(rng, dtype, shape, drawn)
    problem.x[problem.total :] = np.nan
    problem.dy[problem.total :] = np.nan
    return Layer(recipe, problem, device)


__all__ = ["GEMMS", "NATIVE", "SHAPE", "Layer", "bound", "check_parts", "draw_layer", "request"]
