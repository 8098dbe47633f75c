"""The functions of a "quantize" request, as octavo_registry.contract.quantize has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_jax import GroupedTensor
from octavo_jax.arrays.sizes import one_group
from octavo_jax_native.arrays.planes import Extent, array, calls_for, plane_results, tensor_of
from octavo_jax_native.ffi import arguments, targets
from octavo_jax_native.ffi.calls import QuantizeCall, make_plan
from octavo_jax_native.quantizers.primitive import quantize_call
from octavo_registry.contract import Quantize, QuantizeWithAmax


def tensor_spec(
    spec: QuantizerSpec, layouts: tuple[str, str], shape: tuple[int, ...], groups: int
) -> GroupedTensorSpec:
    """The spec of the result; a plane that is not made has no layout but the plain one."""
    made = {
        direction: layout if direction in spec.directions else PLAIN
        for direction, layout in zip(("rowwise", "columnwise"), layouts, strict=True)
    }
    return GroupedTensorSpec(
        shape=shape,
        groups=groups,
        quantizer=spec,
        ragged_axis=0 if len(shape) == 2 else None,
        rowwise_layout=made["rowwise"],
        columnwise_layout=made["columnwise"],
    )


def planes_of(
    spec: QuantizerSpec,
    layouts: tuple[str, str],
    operands: dict[str, Array],
    group_sizes: Array | None,
    operand: Operand,
    columns: int,
    extras: dict[str, jax.ShapeDtypeStruct],
    **how: Any,
) -> tuple[dict[str, Array], ...]:
    """The results of every call that the planes need, by name; `extras` are made by the first.

    columns   of what is quantized, which a prologue may change from x's
    how       the prologue, as `QuantizeCall` has it
    """
    x = operands["x"]
    groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
    extent = Extent.of(x.shape, groups)
    if group_sizes is not None:
        operands = {**operands, "plan": make_plan(group_sizes, extent.rows)}
    quantized = Extent(extent.rows, columns, groups, extent.matrix_rows)
    made = []
    for planes in calls_for(spec, layouts):
        results = dict(extras)
        extras = {}
        both = {"rowwise": PLAIN, "columnwise": PLAIN}
        for direction, layout in planes:
            both[direction] = layout
            results.update(plane_results(spec, direction, layout, quantized))
        pair = (both["rowwise"], both["columnwise"])
        call = QuantizeCall(
            spec,
            operand,
            operands=tuple(operands),
            dtype=x.dtype,
            extent=extent,
            results=tuple((name, one.shape, one.dtype) for name, one in results.items()),
            layouts=pair,
            **how,
        )
        made.append(quantize_call(call, operands))
    return tuple(made)


def bind_quantize(
    spec: QuantizerSpec, layouts: tuple[str, str]
) -> tuple[Quantize[Array, GroupedTensor], QuantizeWithAmax[Array, GroupedTensor]]:
    """What quantizes by `spec` into these (rowwise, columnwise) layouts, and what returns the amax, too."""
    specs: dict[tuple[tuple[int, ...], int], GroupedTensorSpec] = {}

    def octavo_quantize(
        operands: dict[str, Array], group_sizes: Array | None, operand: Operand, extras: tuple[str, ...]
    ) -> tuple[dict[str, Array], ...]:
        x = operands["x"]
        if group_sizes is None and 0 in x.shape[:2]:
            # Stacked matrices without rows: to the kernels a third axis of 0 would mean ragged rows.
            raise ValueError(f"x has shape {list(x.shape)}; stacked matrices have one or more of one or more rows")
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        more = {name: array((groups,), jnp.float32) for name in extras}
        return planes_of(spec, layouts, operands, group_sizes, operand, x.shape[-1], more)

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = targets.QUANTIZE[spec.scaling]
    compiled = jax.jit(octavo_quantize, static_argnames=("operand", "extras"))

    def made(
        x: Array,
        group_sizes: Array | None,
        seed: int | Array | None,
        operand: Operand | None,
        group_offset: int | Array,
        scale: Array | None,
        extras: tuple[str, ...],
    ) -> tuple[GroupedTensor, dict[str, Array]]:
        arguments.check_input(x, "x", (2,) if group_sizes is not None else (2, 3))
        if group_sizes is None and x.ndim == 2:
            group_sizes = one_group(x.shape[0])
        if group_sizes is not None:
            arguments.check_sizes(group_sizes)
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        tensor = specs.get((x.shape, groups))
        if tensor is None:
            tensor = specs[x.shape, groups] = tensor_spec(spec, layouts, x.shape, groups)
        operands = {
            "x": x,
            **arguments.random_operands(spec, seed, group_offset),
            **arguments.scale_operand(spec, scale, groups),
        }
        results = compiled(operands, group_sizes, operand=operand or spec.role, extras=extras)
        return tensor_of(tensor, group_sizes, results), results[0]

    def run(
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
        out: None = None,
    ) -> GroupedTensor:
        arguments.check_out(out)
        return made(x, group_sizes, seed, operand, group_offset, scale, ())[0]

    def with_amax(
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
    ) -> tuple[GroupedTensor, Array]:
        tensor, results = made(x, group_sizes, seed, operand, group_offset, scale, ("amax",))
        return tensor, results["amax"]

    return run, with_amax
