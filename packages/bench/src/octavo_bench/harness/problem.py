"""A layer made ready: operands drawn once, quantized as each kind's plan asks, and the calls of its GEMMs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import octavo_registry as registry
from octavo import Recipe
from octavo.formats import FORMAT_MAX
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.options import Names
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call, input_copies
from octavo_registry import LayerPlan, Plan, Weight

SIDES: dict[Gemm, tuple[tuple[Operand, Direction], tuple[Operand, Direction]]] = {
    "fprop": (("x", "rowwise"), ("w", "rowwise")),
    "dgrad": (("dy", "rowwise"), ("w", "columnwise")),
    "wgrad": (("dy", "columnwise"), ("x", "columnwise")),
}
"""The left and the right operand of each GEMM, and the plane that it reads."""

_ARGUMENTS: dict[Gemm, tuple[Operand, Operand]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}
_LARGEST = 16.0  # of the drawn values, nearly: known scales put it at the format's maximum


@dataclass(frozen=True)
class Data:
    """Operands of one shape in bf16: x [M, K], w [G, N, K], dy [M, N]; and the copies that are rotated."""

    shape: Shape
    sets: tuple[dict[Operand, Any], ...]


def draw(engine: Engine, shape: Shape, seed: int) -> Data:
    """Operands, as many sets as it takes to be out of the device's cache."""
    read = shape.rows * min(shape.k, shape.n) + shape.groups * shape.n * shape.k
    copies = input_copies(read, engine.cache_bytes)
    sides: dict[Operand, tuple[int, ...]] = {
        "x": (shape.rows, shape.k),
        "w": (shape.groups, shape.n, shape.k),
        "dy": (shape.rows, shape.n),
    }
    return Data(
        shape,
        tuple(
            {name: engine.normal(side, seed + 3 * copy + at) for at, (name, side) in enumerate(sides.items())}
            for copy in range(copies)
        ),
    )


def layer_plan(
    engine: Engine,
    shape: Shape,
    recipe: Recipe,
    backend: Names,
    *,
    accumulate: bool = False,
    weight: Weight = "nk",
) -> LayerPlan:
    """What the registry composes for a layer of this shape; NoBackendError where nothing serves it.

    weight   how w lies: "kn" is JAX's kernel
    """
    request = registry.GemmRequest(
        op="fprop",
        framework=engine.framework,
        device=engine.device,
        in_dtype="bfloat16",
        out_dtype="bfloat16",
        recipe=recipe,
        arch=engine.arch,
        k=shape.k,
        n=shape.n,
        groups=shape.groups,
        sizes=engine.where,
        weight=weight,
    )
    return registry.plan_layer(request, backend=backend, wgrad_dtype="float32" if accumulate else None)


class Prepared:
    """One recipe's operands of one shape and vector of sizes, quantized; makes calls of its GEMMs.

    quantize   calls that quantize x, w and dy, one per set of buffers; empty where nothing is quantized
    """

    def __init__(self, engine: Engine, data: Data, sizes: Sequence[int], plan: LayerPlan) -> None:
        self.engine, self.shape, self.plan = engine, data.shape, plan
        self._data = data
        self._sizes = engine.array(list(sizes), "int64")
        quantizers: dict[Operand, Plan | None] = {
            "x": plan.quantize_x,
            "w": plan.quantize_w,
            "dy": plan.quantize_dy,
        }
        self._run = {operand: _quantizer(engine, one) for operand, one in quantizers.items() if one is not None}
        self._rows = engine.sizes_for(plan.fprop.backend, self._sizes, data.shape.rows)
        self._scales = {operand: self._encode_scales(operand) for operand in self._run}
        self.operands = [self._quantized(index) for index in range(len(data.sets))]

    @property
    def quantize(self) -> list[Call]:
        """See the class."""
        if not self._run:
            return []
        return [lambda index=index: self._quantized(index) for index in range(len(self._data.sets))]  # type: ignore[misc]

    def call(self, case: GemmCase) -> list[Call]:
        """Calls of one GEMM, one per set of buffers."""
        gemm = case.gemm
        plan: Plan | None = getattr(self.plan, gemm)
        assert plan is not None  # a layer's three GEMMs are always served
        more: dict[str, Any] = {"accumulate": True} if case.accumulate else {}
        run = self.engine.compiled(lambda one, two, sizes, **arrays: plan.run(one, two, sizes, **arrays, **more))
        first, second = _ARGUMENTS[gemm]
        sizes = self._rows if plan.backend == self.plan.fprop.backend else self._sizes

        def call_at(at: int) -> Call:
            one, two, out = self.operands[at][first], self.operands[at][second], self._out(case)
            return lambda: run(one, two, sizes, **out)

        return [call_at(at) for at in range(len(self.operands))]

    def out_shape(self, gemm: Gemm) -> tuple[int, ...]:
        """Of the result."""
        shape = self.shape
        return {
            "fprop": (shape.rows, shape.n),
            "dgrad": (shape.rows, shape.k),
            "wgrad": (shape.groups, shape.n, shape.k),
        }[gemm]

    def values(self, gemm: Gemm, side: int) -> Any:
        """fp32 values of the left (0) or right (1) operand as the GEMM multiplies them."""
        operand, direction = SIDES[gemm][side]
        value = self.operands[0][operand]
        plan: Plan | None = getattr(self.plan, f"quantize_{operand}")
        if plan is None or not self.plan.recipe.quantizes(gemm):
            return value
        return dequantizer(self.engine, plan).run(value, direction)

    def _out(self, case: GemmCase) -> dict[str, Any]:
        """The buffer of the result, where the framework has such; an accumulator starts at zero."""
        if self.engine.framework != "torch" and not case.accumulate:
            return {}
        return {
            "out": self.engine.full(self.out_shape(case.gemm), case.out_dtype, 0.0 if case.accumulate else math.nan)
        }

    def _quantized(self, index: int) -> dict[Operand, Any]:
        operands = dict(self._data.sets[index])
        for operand, run in self._run.items():
            operands[operand] = run(operands[operand], None if operand == "w" else self._rows, self._scales[operand])
        return operands

    def _encode_scales(self, operand: Operand) -> Any:
        plan: Plan = getattr(self.plan, f"quantize_{operand}")
        spec = plan.request.quantizer
        if spec is None or spec.scaling != "delayed":
            return None
        largest = FORMAT_MAX[spec.format] / _LARGEST
        return self.engine.array([largest / 2 ** (group % 3) for group in range(self.shape.groups)], "float32")


def dequantizer(engine: Engine, quantize: Plan) -> Plan:
    """The plan of the same backend that gives a quantized operand's fp32 values."""
    spec = quantize.request.quantizer
    assert spec is not None
    request = registry.DequantizeRequest(
        op="dequantize",
        framework=engine.framework,
        device=engine.device,
        in_dtype="float32",
        out_dtype="float32",
        quantizer=spec,
        arch=engine.arch,
        sizes=engine.where,
        layouts=quantize.request.layouts,
    )
    return registry.plan(request, backend=quantize.backend)


def _quantizer(engine: Engine, plan: Plan) -> Any:
    """f(x, sizes, scale) of a quantizer's plan."""
    spec = plan.request.quantizer
    assert spec is not None
    more: dict[str, Any] = {"operand": spec.role}
    if spec.stochastic:
        more["seed"] = 1
    return engine.compiled(lambda x, sizes, scale: plan.run(x, sizes, scale=scale, **more))


def backends_of(*layers: LayerPlan) -> tuple[str, ...]:
    """Who serves the operations of these layers, each once."""
    return tuple(dict.fromkeys(plan.backend for layer in layers for plan in layer.plans))
