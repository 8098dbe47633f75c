"""Planes in two forms, codes and values (octavo_native.layouts), of which a call of the kernels makes what is read.

A program that reads values and no codes has the kernels write values. Where it reads both, because something keeps the
codes, they write codes, and values are made of these, as a GEMM does in its workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax.plugin_api import GroupedTensor
from octavo_jax_native.arrays.planes import PREFIX
from octavo_jax_native.ffi.convert import PlaneCall
from octavo_jax_native.ffi.custom_call import group_plan
from octavo_jax_native.ffi.quantize import QuantizeCall
from octavo_native.layouts import VALUES
from octavo_native.values import valued
from octavo_registry.contract import PlanesRequest, TwoForms

Directions = tuple[Direction, ...]


def directions_as_values(request: PlanesRequest, *, of_array: bool) -> Directions:
    """The planes of the request that GEMMs can read as values; `of_array` as in `octavo_native.values`."""
    directions = valued(request.quantizer, request.layouts, request.in_dtype, request.device, of_array=of_array)
    return cast("Directions", directions)


def run_forms(call: QuantizeCall, operands: tuple[Array, ...]) -> list[Array]:
    """The results of `call`, in order; those called row_values and col_values are the planes as values."""
    names = [name for name, _, _ in call.results]
    of_values: Directions = tuple(direction for direction, prefix in PREFIX.items() if f"{prefix}_values" in names)
    without_codes = [direction for direction in of_values if f"{PREFIX[direction]}_codes" not in names]
    # to the kernels values are codes in another layout
    written = {f"{PREFIX[direction]}_values": f"{PREFIX[direction]}_codes" for direction in without_codes}
    kernel = replace(
        call,
        results=tuple(
            (written.get(name, name), shape, dtype)
            for name, shape, dtype in call.results
            if name in written or not name.endswith("_values")
        ),
        layouts=(
            VALUES if "rowwise" in without_codes else call.layouts[0],
            VALUES if "columnwise" in without_codes else call.layouts[1],
        ),
    )
    made = dict(zip((name for name, _, _ in kernel.results), kernel.run(*operands), strict=True))
    plan = dict(zip(call.operands, operands, strict=True)).get("plan")
    for direction in of_values:
        prefix = PREFIX[direction]
        if direction in without_codes:
            made[f"{prefix}_values"] = made[f"{prefix}_codes"]
            continue
        shape = next(shape for name, shape, _ in call.results if name == f"{prefix}_values")
        extent = replace(call.extent, cols=shape[-1 if direction == "rowwise" else 1])
        plane = {part: made[f"{prefix}_{part}"] for part in ("codes", "scales")}
        plane |= {} if plan is None else {"plan": plan}
        made[f"{prefix}_values"] = PlaneCall(call.spec, extent, direction).values(plane)
    return [made[name] for name in names]


def two_forms(q: GroupedTensor, made: Mapping[str, Array], as_values: Directions) -> TwoForms[GroupedTensor]:
    """Both forms of what a call has made: its codes `q`, and among its results the planes that it made as values."""
    values = {direction: made[f"{PREFIX[direction]}_values"] for direction in as_values}
    return TwoForms(q, _with_values(q, values), Multiply(as_values))


@dataclass(frozen=True)
class Multiply:
    """Makes the second form of codes in the native layout: TwoForms.multiply."""

    as_values: Directions

    def __call__(self, q: GroupedTensor) -> GroupedTensor:
        spec, values = q.spec, {}
        for direction in self.as_values:
            if getattr(q, direction) is None:
                continue
            codes, scales, _ = q.plane(direction)
            operands = {"codes": codes, "scales": scales}
            if spec.ragged_axis == 0:
                assert q.group_sizes is not None  # of rows
                operands["plan"] = group_plan(q.group_sizes, spec.shape[0])
            values[direction] = PlaneCall.of(spec, direction).values(operands)
        return _with_values(q, values)


def _with_values(q: GroupedTensor, values: Mapping[Direction, Array]) -> GroupedTensor:
    planes: dict[str, Any] = {f"{direction}_scale": None for direction in values}
    planes.update(values)  # type: ignore[arg-type]  # a Direction is a text
    return replace(q, spec=_spec_of_values(q.spec, tuple(values)), **planes)


@lru_cache(maxsize=512)
def _spec_of_values(spec: GroupedTensorSpec, as_values: Directions) -> GroupedTensorSpec:
    return spec.model_copy(update={f"{direction}_layout": VALUES for direction in as_values})
