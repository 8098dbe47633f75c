"""A bound quantizer as calls of the kernels: the quantizer, the layouts of its planes, and what is computed before."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_jax_native.arrays.planes import PREFIX, Extent, calls_for, plane_results, values_plane
from octavo_jax_native.ffi.custom_call import group_plan
from octavo_jax_native.ffi.quantize import NO_PROLOGUE, Prologue, QuantizeCall
from octavo_jax_native.quantizers.forms import Directions
from octavo_jax_native.quantizers.primitive import quantize_call

_UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""The quantizer of a call without planes: any that needs neither a scale nor random bits."""


@dataclass(frozen=True)
class QuantizeKernel:
    """A quantizer as the kernels run it.

    layouts   of the rowwise and the columnwise plane; that of a plane which is not computed does not matter
    """

    spec: QuantizerSpec
    layouts: tuple[str, str]
    prologue: Prologue = NO_PROLOGUE

    def tensor_spec(self, shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
        """The spec of the result of this shape; a plane that is not computed is plain."""
        row, column = (
            layout if direction in self.spec.directions else PLAIN
            for direction, layout in zip(("rowwise", "columnwise"), self.layouts, strict=True)
        )
        return GroupedTensorSpec(
            shape=shape,
            groups=groups,
            quantizer=self.spec,
            ragged_axis=0 if len(shape) == 2 else None,
            rowwise_layout=row,
            columnwise_layout=column,
        )

    def results(
        self,
        operands: dict[str, Array],
        group_sizes: Array | None,
        operand: Operand,
        columns: int,
        extras: dict[str, jax.ShapeDtypeStruct],
        choices: int = 0,
        as_values: Directions = (),
    ) -> tuple[dict[str, Array], ...]:
        """The results of every call that the planes need, by name; the first call computes the `extras`, too.

        operands      x, and by name whatever else the quantizer and its prologue read
        group_sizes   of rows; None: stacked matrices
        columns       of what is quantized, which a prologue may change from x's
        choices       of a token, where x is tokens and the operand `order` the choice of each row; else 0
        as_values     planes that are results in a second form, too: row_values and col_values (forms.py)
        """
        x = operands["x"]
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        extent = Extent.of((operands["order"].shape[0] // 2, x.shape[1]) if choices else x.shape, groups)
        if group_sizes is not None:
            operands = {**operands, "plan": group_plan(group_sizes, extent.rows)}
        quantized = Extent(extent.rows, columns, groups, extent.matrix_rows)
        outputs = []
        for planes in calls_for(self.spec, self.layouts):
            results = dict(extras)
            extras = {}
            layouts = {"rowwise": PLAIN, "columnwise": PLAIN}
            for direction, layout in planes:
                layouts[direction] = layout
                results.update(plane_results(self.spec, direction, layout, quantized))
                if direction in as_values:
                    results[f"{PREFIX[direction]}_values"] = values_plane(direction, quantized)
            call = QuantizeCall(
                self.spec,
                operand,
                operands=tuple(operands),
                dtype=x.dtype,
                extent=extent,
                results=tuple((name, one.shape, one.dtype) for name, one in results.items()),
                layouts=(layouts["rowwise"], layouts["columnwise"]),
                prologue=self.prologue,
                tokens=x.shape[0] if choices else 0,
                choices=choices,
            )
            outputs.append(quantize_call(call, operands))
        return tuple(outputs)


def values_of(
    operands: dict[str, Array],
    group_sizes: Array,
    prologue: Prologue,
    results: dict[str, jax.ShapeDtypeStruct],
) -> dict[str, Array]:
    """The results of a prologue alone, by name, in a call without planes."""
    x = operands["x"]
    extent = Extent.of(x.shape, group_sizes.shape[0])
    operands = {**operands, "plan": group_plan(group_sizes, extent.rows)}
    call = QuantizeCall(
        _UNREAD,
        "x",
        operands=tuple(operands),
        dtype=x.dtype,
        extent=extent,
        results=tuple((name, one.shape, one.dtype) for name, one in results.items()),
        layouts=(PLAIN, PLAIN),
        prologue=prologue,
    )
    return quantize_call(call, operands)
