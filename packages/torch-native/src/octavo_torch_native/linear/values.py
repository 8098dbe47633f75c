"""Which planes of a recorded layer hold the bf16 values that its GEMMs multiply, in the place of codes.

MXFP8 and NVFP4 are multiplied as exact bf16 copies. A plane that is read in the pass that writes it needs no codes: its
quantizer writes the values themselves. The column planes of x and w wait for backward as codes, in 8 or 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_native.support import EMULATED_RECIPES
from octavo_registry.contract import GemmRequest, Plan, QuantizeRequest, gemm_form
from octavo_torch_native.gemm.spec import GemmSpec

PlaneName = tuple[Operand, Direction]

READ_AT_ONCE: frozenset[PlaneName] = frozenset(
    {("x", "rowwise"), ("w", "rowwise"), ("dy", "rowwise"), ("dy", "columnwise")}
)
"""The planes that are read in the pass that writes them."""


def planes_of_values(
    gemms: Mapping[Gemm, Plan[GemmRequest, Any]], quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]]
) -> frozenset[PlaneName]:
    """The planes that hold values: none, unless the layer's products are emulated and its quantizers write values."""
    dtypes = {"x": "in_dtype", "w": "in_dtype", "dy": "out_dtype"}
    fprop = gemms["fprop"].request
    if not emulates(fprop):
        return frozenset()
    return frozenset(
        (operand, direction)
        for operand, direction in READ_AT_ONCE
        if operand in quantizers
        and _writes_values(quantizers[operand].request, getattr(fprop, dtypes[operand]))
        and direction in quantizers[operand].request.quantizer.directions
    )


def emulates(request: GemmRequest) -> bool:
    """Whether the layer's kernels multiply bf16 copies of MXFP8 and NVFP4: the CPU's multiply what codes stand for."""
    return request.device == "cuda"


def _writes_values(request: QuantizeRequest, dtype: str) -> bool:
    """Whether the kernels write values of what comes in `dtype`."""
    spec = request.quantizer
    if spec.scaling not in EMULATED_RECIPES or spec.mxfp4 is not None:
        return False
    # NVFP4's kernels that write values hold two bytes per element
    return spec.scaling == "mxfp8" or (dtype != "float32" and not (spec.square and spec.stochastic))


def reading_values(gemm: Gemm, spec: GemmSpec, valued: frozenset[PlaneName]) -> GemmSpec:
    """The layer's GEMM of `spec`, which reads these planes as values."""
    if spec.scaling is None:
        return spec
    form = gemm_form(gemm, "nk")
    left, right = zip(form.operands, form.directions, strict=True)
    return replace(spec, left_values=left in valued, right_values=right in valued)
