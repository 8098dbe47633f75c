"""The operands of a GEMM, checked, and the static part of the call that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_jax.plugin_api import GroupedTensor, check_float, check_input, dtype_name
from octavo_jax_native.arrays.checked_plane import checked_plane, layout_of
from octavo_jax_native.ffi.gemm import Gathered, GemmCall, Side, sums_fast
from octavo_native import support
from octavo_native.gathering import tokens_refusal
from octavo_native.layouts import VALUES
from octavo_registry.contract import WEIGHT_SHAPES, GemmForm, GemmRequest, TokenRows, Weight, gemm_form

GemmOperand = GroupedTensor | Array
RowOperand = GroupedTensor | Array | TokenRows[Array]
"""x or dy: rows, quantized or not, or the tokens from which the kernel gathers them."""
NamedArrays = dict[str, Array]
"""Operands of a call by their names."""

_SHAPES: dict[Operand, str] = {"x": "[M, K]", "dy": "[M, N]"}


@dataclass(frozen=True)
class GemmSettings:
    """What is known of a GEMM when it is bound, before there are operands.

    ctas   how many multiprocessors it may use; 0: all of the device
    """

    gemm: Gemm
    recipe: Recipe
    out_dtype: DType
    cuda: bool
    weight: Weight
    ctas: int = 0

    @classmethod
    def of(cls, request: GemmRequest, ctas: int = 0) -> GemmSettings:
        """The settings that a request for one of the three GEMMs asks for."""
        return cls(request.op, request.recipe, request.out_dtype, request.device == "cuda", request.weight, ctas)

    @property
    def form(self) -> GemmForm:
        """How the kernels compute it."""
        return gemm_form(self.gemm, self.weight)

    def shape(self, operand: Operand) -> str:
        """The axes of an operand, in words."""
        return WEIGHT_SHAPES[self.weight] if operand == "w" else _SHAPES[operand]


def checked_planes(settings: GemmSettings, name: Operand, direction: Direction, operand: Any) -> NamedArrays:
    """The arrays of an operand's plane: codes, scales and second level, or the operand itself as "codes"."""
    recipe, quantized = settings.recipe, settings.recipe.quantizes(settings.gemm)
    if not isinstance(operand, GroupedTensor):
        if quantized:
            raise ValueError(
                f"{name} is a {type(operand).__name__} and {settings.gemm} of recipe {recipe.kind!r} multiplies "
                "quantized operands; give a GroupedTensor (octavo_jax.quantize makes one)"
            )
        check_input(operand, name, (3 if name == "w" else 2,))
        return {"codes": operand}
    spec = operand.spec.quantizer
    if not quantized or spec.scaling != recipe.kind:
        raise ValueError(
            f"{name} is quantized with scaling {spec.scaling!r} and this {settings.gemm} is of recipe {recipe.kind!r}; "
            f"{'quantize it with the recipe' if quantized else 'give the unquantized array'}"
        )
    if spec.square and name != "w":
        raise ValueError(f"{name} is quantized in square blocks, which the kernels read of w alone; set square=False")
    return checked_plane(operand, direction, f"{name}.")


def without_gathering(operand: RowOperand) -> GemmOperand:
    """The operand without its gathering: the tokens of TokenRows, or their codes, and anything else as it is."""
    return operand.tokens if isinstance(operand, TokenRows) else operand


def gathered_order(left: RowOperand, right: RowOperand) -> Array | None:
    """The choice of each row of the operand that is tokens; None where neither is."""
    return next((operand.order for operand in (left, right) if isinstance(operand, TokenRows)), None)


def gemm_call(
    settings: GemmSettings, left: RowOperand, right: RowOperand, groups: int, gathered: Gathered | None = None
) -> GemmCall:
    """The static part of the call; ValueError where shapes, dtypes or transforms of the operands do not fit."""
    names = settings.form.operands
    shapes = {name: _shape(operand) for name, operand in zip(names, (left, right), strict=True)}
    grouped = (operand for operand in (left, right) if isinstance(operand, GroupedTensor))
    rows, n, k = _gemm_sizes(settings, shapes, {groups, *(operand.spec.groups for operand in grouped)})
    left, right = without_gathering(left), without_gathering(right)
    quantizers: tuple[QuantizerSpec | None, QuantizerSpec | None] = (None, None)
    dtype: DType | None = None
    if isinstance(left, GroupedTensor) and isinstance(right, GroupedTensor):
        quantizers = (left.spec.quantizer, right.spec.quantizer)
        if settings.gemm == "wgrad" and left.spec.quantizer.hadamard != right.spec.quantizer.hadamard:
            raise ValueError("one operand of wgrad is in the Hadamard domain and the other is not; quantize both alike")
    elif not isinstance(left, GroupedTensor) and not isinstance(right, GroupedTensor):
        dtype = _common_dtype(settings, dict(zip(names, (left.dtype, right.dtype), strict=True)))
    dtypes = None if dtype is None else (dtype, None)
    if settings.cuda and (refusal := support.gemm_refusal(settings.gemm, cuda=True, k=k, n=n, dtypes=dtypes)):
        raise ValueError(f"{settings.gemm} has {_describe(shapes)} with {groups} groups; {refusal}")
    kernel_n, kernel_k = settings.form.sides(n, k)
    return GemmCall(
        settings.form.kernel,
        rows=rows,
        n=kernel_n,
        k=kernel_k,
        groups=groups,
        out_dtype=settings.out_dtype,
        dtype=dtype or "bfloat16",
        left=quantizers[0],
        right=quantizers[1],
        left_values=_has_values(left, settings.form.directions[0]),
        right_values=_has_values(right, settings.form.directions[1]),
        fast_accumulation=sums_fast(settings.recipe, settings.gemm),
        ctas=settings.ctas,
        gathered=gathered,
    )


def _has_values(operand: GemmOperand, direction: Direction) -> bool:
    return isinstance(operand, GroupedTensor) and layout_of(operand.spec, direction) == VALUES


def gathered_operand(settings: GemmSettings, left: RowOperand, right: RowOperand) -> Gathered | None:
    """The operand whose rows are gathered, None where there is none; ValueError where that cannot be."""
    sides: dict[Side, RowOperand] = {"left": left, "right": right}
    given = {side: operand for side, operand in sides.items() if isinstance(operand, TokenRows)}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"both operands of {settings.gemm} are TokenRows; permute the rows of one of them")
    ((side, rows),) = given.items()
    name = settings.form.operands[0 if side == "left" else 1]
    if name == "w":
        raise ValueError("w is TokenRows, which are rows of x or dy; give the weights [G, N, K]")
    if isinstance(rows.tokens, GroupedTensor):
        spec = rows.tokens.spec
        layout = layout_of(spec, "rowwise")
        if refusal := tokens_refusal(name, settings.gemm, spec.quantizer.scaling, layout, spec.shape):
            raise ValueError(refusal)
    return Gathered(side, _source_shape(rows.tokens)[-2], rows.position.shape[1])


def _shape(operand: RowOperand) -> tuple[int, ...]:
    """The shape of an operand; TokenRows have as many rows as there are choices in `order`."""
    if isinstance(operand, TokenRows):
        return operand.order.shape[0], _source_shape(operand.tokens)[-1]
    return _source_shape(operand)


def _source_shape(operand: GemmOperand) -> tuple[int, ...]:
    return operand.spec.shape if isinstance(operand, GroupedTensor) else tuple(operand.shape)


def _common_dtype(settings: GemmSettings, dtypes: dict[Operand, Any]) -> DType:
    """The dtype in which unquantized operands are multiplied: fp32, in which both are exact, where they differ."""
    first, second = dtypes.values()
    if first == second:
        return dtype_name(first, next(iter(dtypes)))
    if settings.cuda:
        have = " and ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{have}; the CUDA kernels multiply operands of one dtype, so cast one to the other's")
    return "float32"


def _gemm_sizes(
    settings: GemmSettings, shapes: dict[Operand, tuple[int, ...]], groups: set[int]
) -> tuple[int, int, int]:
    """(M, N, K) of the operands' shapes; ValueError where they, or the numbers of groups, are of no one product."""
    sizes: dict[str, set[int]] = {"M": set(), "N": set(), "K": set(), "G": set(groups)}
    fits = True
    for name, shape in shapes.items():
        axes = settings.shape(name).strip("[]").split(", ")
        fits = fits and len(axes) == len(shape)
        for axis, size in zip(axes, shape, strict=False):
            sizes[axis].add(size)
    if not fits or any(len(found) > 1 for found in sizes.values()) or 0 in sizes["N"] | sizes["K"]:
        want = " and ".join(f"{name} {settings.shape(name)}" for name in shapes)
        raise ValueError(
            f"{settings.gemm} has {_describe(shapes)} with {' and '.join(map(str, sorted(groups)))} groups; it takes "
            f"{want}, with group_sizes and tensors of G groups, N and K of 1 or more"
        )
    (rows,), (n,), (k,) = sizes["M"], sizes["N"], sizes["K"]
    return rows, n, k


def _describe(shapes: dict[Operand, tuple[int, ...]]) -> str:
    return " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def checked_bias(bias_operands: NamedArrays, call: GemmCall) -> NamedArrays:
    """bias [G, N] and bias_scales [M], these in fp32; ValueError for other shapes and dtypes."""
    check_float(bias_operands["bias"], "bias", call.bias_shape)
    if "bias_scales" not in bias_operands:
        return bias_operands
    check_float(bias_operands["bias_scales"], "bias_scales", (call.rows,))
    return {**bias_operands, "bias_scales": bias_operands["bias_scales"].astype(jnp.float32)}


def checked_out(out: Array, call: GemmCall) -> GemmCall:
    """The call that accumulates into `out` [w's shape] in its dtype; ValueError for another shape or dtype."""
    check_float(out, "out", call.out_shape)
    return replace(call, accumulate=True, out_dtype=dtype_name(out.dtype, "out"))
