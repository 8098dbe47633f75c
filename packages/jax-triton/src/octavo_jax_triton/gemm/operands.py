"""Operands of a GEMM at the Python edge: what is refused, and the spec that follows from the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo_jax.plugin_api import GroupedTensor, check_float, check_input, dtype_name
from octavo_jax_triton.arrays.planes import Plane, checked_plane
from octavo_jax_triton.launch.arguments import Target
from octavo_registry.contract import GemmForm, GemmRequest, gemm_form
from octavo_triton.layouts import TURNED
from octavo_triton.products.shapes import Shape
from octavo_triton.products.spec import Chip, GemmSpec, chip_of, quantized

GemmOperand = GroupedTensor | Array
Planes = tuple[Array, Array | None, Array | None]
"""Codes, scales and the second level, or values alone."""


class GemmSettings(NamedTuple):
    """What is known of a GEMM when it is bound, before there are operands."""

    request: GemmRequest
    form: GemmForm
    chip: Chip
    target: Target

    @classmethod
    def of(cls, request: GemmRequest, target: Target) -> GemmSettings:
        """Of a request of one of the three GEMMs."""
        return cls(request, gemm_form(request.op, request.weight), chip_of(target.arch), target)

    def spec(self, left: GemmOperand, right: GemmOperand, out_dtype: DType) -> GemmSpec:
        """Of operands that were checked one by one; ValueError where one is quantized as the other is not."""
        if isinstance(left, GroupedTensor) and isinstance(right, GroupedTensor):
            specs = left.spec.quantizer, right.spec.quantizer
            if self.form.kernel == "wgrad" and specs[0].hadamard != specs[1].hadamard:
                raise ValueError(
                    "one operand of wgrad is in the Hadamard domain and the other is not; quantize both alike"
                )
            spec = quantized(self.form.kernel, self.chip, *specs, out_dtype, accumulate=False)
            for each, direction in zip((left, right), self.form.directions, strict=True):
                _check_layout(self.request.op, each, direction, spec)
            return spec
        dtype = dtype_name(jnp.promote_types(left.dtype, right.dtype), self.form.operands[0])  # type: ignore[union-attr]
        return GemmSpec(self.form.kernel, self.chip, out_dtype, dtype=dtype)

    def plane(self, name: Operand, direction: Direction, operand: Any) -> Plane | tuple[Array, None, None]:
        """An operand's codes, scales and second level, or the operand itself; ValueError for the wrong kind."""
        recipe = self.request.recipe
        wants_codes = recipe.quantizes(self.request.op)
        if isinstance(operand, GroupedTensor) is not wants_codes:
            need = "a GroupedTensor (octavo_jax.quantize makes one)" if wants_codes else "the unquantized array"
            raise ValueError(
                f"{name} is a {type(operand).__name__} and this {self.request.op} of recipe {recipe.kind!r} multiplies "
                f"{'' if wants_codes else 'un'}quantized operands; give {need}"
            )
        if isinstance(operand, GroupedTensor):
            spec = operand.spec.quantizer
            if spec.scaling != recipe.kind:
                raise ValueError(
                    f"{name} is quantized with scaling {spec.scaling!r} and this {self.request.op} is of recipe "
                    f"{recipe.kind!r}; quantize it with the recipe"
                )
            if spec.square and name != "w":
                raise ValueError(
                    f"{name} is quantized in square blocks, which the kernels read of w alone; set square=False"
                )
            return checked_plane(operand, direction, f"{name}.")
        check_input(operand, name, (3 if name == "w" else 2,))
        return operand, None, None


def _check_layout(gemm: str, operand: GroupedTensor, direction: Direction, spec: GemmSpec) -> None:
    rowwise = direction == "rowwise"
    layout = operand.spec.rowwise_layout if rowwise else operand.spec.columnwise_layout
    wanted = TURNED if spec.turned and not rowwise else PLAIN
    if layout != wanted:
        raise ValueError(
            f"{direction} data of an operand of {gemm} are in layout {layout!r} and it reads {wanted!r}; a layer's "
            "plan asks its quantizers for that"
        )


def shape_of(operand: GemmOperand) -> Shape:
    """The operand's axes, however its codes lie."""
    return operand.spec.shape if isinstance(operand, GroupedTensor) else tuple(operand.shape)


def checked_bias(bias: Array | None, bias_scales: Array | None, groups: int, shape: Shape) -> Array | None:
    """`bias_scales` in fp32; ValueError unless bias is [G, N] and they are [M], both of dtypes that no codes have."""
    if bias is None:
        if bias_scales is not None:
            raise ValueError("bias_scales was given and bias is None; give the bias that it scales, or neither")
        return None
    check_float(bias, "bias", (groups, shape[1]))
    if bias_scales is None:
        return None
    check_float(bias_scales, "bias_scales", shape[:1])
    return bias_scales.astype(jnp.float32)
