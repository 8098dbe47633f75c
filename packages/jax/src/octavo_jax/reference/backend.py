"""The backend object: binds a request to jitted functions of this folder.

Every function is a `jax.jit` with a name that starts with `octavo_`, so that a jaxpr tells how often it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_jax.arithmetic import gemm
from octavo_jax.arithmetic.dequantize import dequantize, padded_sizes
from octavo_jax.arithmetic.quantizer import quantizer_of
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.gemm_operands import GemmOperand, RowOperand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.functions.composed import bind_fused
from octavo_jax.scaling.seeds import seed_words
from octavo_registry.contract.backend import AnyBound, Backend, Refused
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import BoundDgrad, BoundFprop, BoundWgrad, Dgrad, Fprop, Wgrad, token_operands
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.quantize import BoundDequantize, BoundQuantize, Dequantize, Quantize
from octavo_registry.contract.request import (
    AnyRequest,
    ChooseRequest,
    DequantizeRequest,
    GemmRequest,
    MoveRequest,
    OptimizerRequest,
    QuantizeRequest,
)


def _named(function: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return jax.jit(function, **options)


def _no_out(out: Any) -> None:
    if out is not None:
        raise ValueError("out was given; JAX arrays are immutable, so take the returned array instead")


@lru_cache(maxsize=512)
def bind_quantize(spec: QuantizerSpec) -> Quantize[Array, GroupedTensor]:
    """The function of a "quantize" request."""
    quantize = quantizer_of(spec)

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
        _no_out(out)
        words = seed_words(seed) if spec.stochastic and seed is not None else None
        return quantize(x, group_sizes, seed=words, operand=operand, group_offset=group_offset, scale=scale)

    return run


def _values(operand: RowOperand, direction: Direction) -> Array:
    """fp32 values of a GEMM operand."""
    if isinstance(operand, TokenRows):
        values = _values(operand.tokens, direction)
        tokens = values.reshape(-1, values.shape[-1])  # codes of tokens are of one matrix
        return tokens.at[operand.order // operand.position.shape[1]].get(mode="clip")
    if isinstance(operand, GroupedTensor):
        return dequantize(operand, direction)
    return operand


def _in_hadamard_domain(operand: RowOperand) -> bool:
    return isinstance(operand, GroupedTensor) and operand.spec.row_alignment > 1


def _bind_fprop(out_dtype: Any, weight: Weight) -> Fprop[Array, GemmOperand]:
    plane: Direction = "rowwise" if weight == "nk" else "columnwise"
    contract = 2 if weight == "nk" else 1

    def octavo_gemm_fprop(
        x: RowOperand, w: GemmOperand, group_sizes: Array, bias: Array | None, bias_scales: Array | None
    ) -> Array:
        y = gemm.rows_times_matrices(_values(x, "rowwise"), _values(w, plane), group_sizes, contract=contract)
        if bias is not None:
            y = gemm.add_bias(y, bias, group_sizes, bias_scales)
        return y.astype(out_dtype)

    compiled = _named(octavo_gemm_fprop, "octavo_gemm_fprop")

    def run(
        x: RowOperand,
        w: GemmOperand,
        group_sizes: Array,
        *,
        bias: Array | None = None,
        bias_scales: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        _no_out(out)
        y: Array = compiled(_gemm_plane(x, "rowwise"), _gemm_plane(w, plane), group_sizes, bias, bias_scales)
        return y

    return run


def _bind_dgrad(out_dtype: Any, weight: Weight) -> Dgrad[Array, GemmOperand]:
    plane: Direction = "columnwise" if weight == "nk" else "rowwise"
    contract = 1 if weight == "nk" else 2

    def octavo_gemm_dgrad(dy: RowOperand, w: GemmOperand, group_sizes: Array) -> Array:
        dx = gemm.rows_times_matrices(_values(dy, "rowwise"), _values(w, plane), group_sizes, contract=contract)
        return dx.astype(out_dtype)

    compiled = _named(octavo_gemm_dgrad, "octavo_gemm_dgrad")

    def run(dy: RowOperand, w: GemmOperand, group_sizes: Array, *, out: Array | None = None) -> Array:
        _no_out(out)
        dx: Array = compiled(_gemm_plane(dy, "rowwise"), _gemm_plane(w, plane), group_sizes)
        return dx

    return run


def _bind_wgrad(out_dtype: Any, weight: Weight) -> Wgrad[Array, GemmOperand]:
    def octavo_wgrad(x: RowOperand, dy: RowOperand, group_sizes: Array, accumulator: Array | None) -> Array:
        sizes = group_sizes
        if _in_hadamard_domain(x) != _in_hadamard_domain(dy):
            raise ValueError("one operand of wgrad is in the Hadamard domain and the other is not; quantize both alike")
        if isinstance(x, GroupedTensor) and _in_hadamard_domain(x):
            sizes = padded_sizes(group_sizes, x.spec.shape[0], x.spec.row_alignment)
        left, right = (dy, x) if weight == "nk" else (x, dy)
        dw = gemm.matrices_from_rows(_values(left, "columnwise"), _values(right, "columnwise"), sizes)
        if accumulator is None:
            return dw.astype(out_dtype)
        # Adding 0 would turn an accumulator's -0 into +0; a group without rows leaves it as it is.
        untouched = (group_sizes <= 0)[:, None, None]
        return jnp.where(untouched, accumulator, (in_fp32(accumulator) + dw).astype(accumulator.dtype))

    compiled = _named(octavo_wgrad, "octavo_wgrad")

    def run(
        x: RowOperand, dy: RowOperand, group_sizes: Array, *, out: Array | None = None, accumulate: bool = False
    ) -> Array:
        if accumulate != (out is not None):
            raise ValueError(
                f"accumulate={accumulate} and out is {'not ' if out is None else ''}given; "
                "give both (the sum is returned) or neither"
            )
        dw: Array = compiled(_gemm_plane(x, "columnwise"), _gemm_plane(dy, "columnwise"), group_sizes, out)
        return dw

    return run


def _gemm_plane(operand: RowOperand, direction: Direction) -> RowOperand:
    """The operand without the plane that this GEMM does not read."""
    if isinstance(operand, TokenRows):
        return operand._replace(tokens=_gemm_plane(operand.tokens, direction))
    if not isinstance(operand, GroupedTensor):
        return operand
    payload, scale, second = operand.plane(direction)
    if direction == "rowwise":
        return GroupedTensor(operand.spec, operand.group_sizes, payload, scale, second)
    return GroupedTensor(
        operand.spec,
        operand.group_sizes,
        columnwise=payload,
        columnwise_scale=scale,
        columnwise_global=second,
    )


def _bind_dequantize(out_dtype: Any) -> Dequantize[GroupedTensor, Array]:
    def octavo_dequantize(q: GroupedTensor, direction: Direction) -> Array:
        return dequantize(q, direction).astype(out_dtype)

    compiled = _named(octavo_dequantize, "octavo_dequantize", static_argnames="direction")

    def run(q: GroupedTensor, direction: Direction = "rowwise") -> Array:
        return compiled(q, direction=direction)  # type: ignore[no-any-return]

    return run


class ReferenceBackend(Backend):
    """Serves every recipe on every device of JAX; nothing is refused that the card admits."""

    def refuses(self, request: AnyRequest) -> str | None:
        """None: plain jnp needs nothing from the machine."""
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The jitted function for `request`, in the plain layout."""
        if isinstance(request, GemmRequest):
            return _bind_gemm(request)
        if isinstance(request, DequantizeRequest):
            return BoundDequantize(_bind_dequantize(jnp.dtype(request.out_dtype)))
        if isinstance(request, MoveRequest | ChooseRequest | OptimizerRequest):
            raise Refused(f"serves no {request.op}; its card does not name it")
        quantize = BoundQuantize(bind_quantize(request.quantizer))
        return quantize if isinstance(request, QuantizeRequest) else bind_fused(request, quantize)


def _bind_gemm(request: GemmRequest) -> AnyBound:
    dtype, note = jnp.dtype(request.out_dtype), "fp32 products of dequantized operands"
    if request.op == "fprop":
        return BoundFprop(_bind_fprop(dtype, request.weight), note=note, takes_tokens=token_operands(request, "x"))
    if request.op == "dgrad":
        return BoundDgrad(_bind_dgrad(dtype, request.weight), note=note, takes_tokens=token_operands(request, "dy"))
    return BoundWgrad(_bind_wgrad(dtype, request.weight), note=note, takes_tokens=token_operands(request, "x", "dy"))
