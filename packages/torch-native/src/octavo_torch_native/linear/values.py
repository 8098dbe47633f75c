"""Which planes of a recorded layer hold the bf16 values that its GEMMs multiply, in the place of codes.

MXFP8 and NVFP4 are multiplied as exact bf16 copies. A plane that is read in the pass that writes it needs no codes: its
quantizer writes the values themselves, if its kernels do (`octavo_native.values`). The column planes of x and w wait
for backward as codes, in 8 or 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract import Plan, QuantizeRequest, gemm_form
from octavo_torch_native.gemm.spec import GemmSpec
from octavo_torch_native.quantizers.values import valued_directions

PlaneName = tuple[Operand, Direction]

READ_AT_ONCE: frozenset[PlaneName] = frozenset(
    {("x", "rowwise"), ("w", "rowwise"), ("dy", "rowwise"), ("dy", "columnwise")}
)
"""The planes that are read in the pass that writes them."""


def planes_of_values(quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]]) -> frozenset[PlaneName]:
    """The planes that hold values: none, unless the layer's products are emulated and its quantizers write values."""
    return READ_AT_ONCE & {
        (operand, direction)
        for operand, plan in quantizers.items()
        for direction in valued_directions(plan.request, of_array=True)
    }


def reading_values(gemm: Gemm, spec: GemmSpec, valued: frozenset[PlaneName]) -> GemmSpec:
    """The layer's GEMM of `spec`, which reads these planes as values."""
    if spec.scaling is None:
        return spec
    form = gemm_form(gemm, "nk")
    left, right = zip(form.operands, form.directions, strict=True)
    return replace(spec, left_values=left in valued, right_values=right in valued)
