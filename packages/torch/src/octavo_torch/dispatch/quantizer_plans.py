"""Plans of quantizers for fewer planes than a layer's own: codes that nobody reads are not computed."""

from __future__ import annotations

from dataclasses import replace

import octavo_registry as registry
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Orientation
from octavo_registry.contract.request import QuantizeRequest
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arrays.checks import BackendNames


def of_planes(plan: QuantizePlan | None, row: bool, column: bool, backend: BackendNames) -> QuantizePlan | None:
    """`plan` for its row data, its column data or both; None for neither, and for None."""
    if plan is None or not (row or column):
        return None
    orientation: Orientation = "both" if row and column else "rowwise" if row else "columnwise"
    if plan.request.quantizer.orientation == orientation:
        return plan
    return _oriented(plan.request, orientation, backend)


def of_one_matrix(plan: QuantizePlan, backend: BackendNames) -> QuantizePlan:
    """The quantizer of tokens as one matrix, rowwise and in the plain layout, in place of `plan`'s of their rows."""
    return _oriented(replace(plan.request, layouts=(PLAIN, PLAIN), stacked=True), "rowwise", backend)


def computed_layouts(plan: QuantizePlan | None) -> tuple[str | None, str | None] | None:
    """The layouts of the planes that a quantizer's plan computes, None for the others."""
    if plan is None:
        return None
    row, column = plan.request.layouts
    directions = plan.request.quantizer.directions
    return row if "rowwise" in directions else None, column if "columnwise" in directions else None


def _oriented(request: QuantizeRequest, orientation: Orientation, backend: BackendNames) -> QuantizePlan:
    """The plan of the request for these planes alone."""
    quantizer = request.quantizer.with_orientation(orientation)
    return registry.plan(replace(request, quantizer=quantizer), backend=backend)
