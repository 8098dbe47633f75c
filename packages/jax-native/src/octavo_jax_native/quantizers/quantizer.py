"""The functions of a "quantize" request, as octavo_registry.contract.quantize has them."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.plugin_api import GroupedTensor, check_input, check_out, check_sizes, one_group
from octavo_jax_native.arrays import options
from octavo_jax_native.arrays.planes import array, tensor_of
from octavo_jax_native.arrays.words import as_int64
from octavo_jax_native.ffi import targets
from octavo_jax_native.quantizers.kernel import QuantizeKernel
from octavo_registry.contract import BoundQuantize


def bind_quantize(spec: QuantizerSpec, layouts: tuple[str, str]) -> BoundQuantize[Array, GroupedTensor]:
    """What quantizes by `spec` into these (rowwise, columnwise) layouts."""
    kernel = QuantizeKernel(spec, layouts)
    tensor_spec = lru_cache(maxsize=512)(kernel.tensor_spec)

    def octavo_quantize(
        operands: dict[str, Array], group_sizes: Array | None, operand: Operand, extras: tuple[str, ...], each: int
    ) -> tuple[dict[str, Array], ...]:
        x = operands["x"]
        if group_sizes is None and 0 in x.shape[:2]:
            # Stacked matrices without rows: to the kernels a third axis of 0 would mean ragged rows.
            raise ValueError(f"x has shape {list(x.shape)}; stacked matrices have one or more of one or more rows")
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        more = {name: array((groups,), jnp.float32) for name in extras}
        if each:
            operands = {**operands, "order": as_int64(operands["order"])}
        return kernel.results(operands, group_sizes, operand, x.shape[-1], more, each)

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = targets.QUANTIZE[spec.scaling]
    compiled = jax.jit(octavo_quantize, static_argnames=("operand", "extras", "each"))

    def quantize(
        x: Array,
        group_sizes: Array | None,
        seed: int | Array | None,
        operand: Operand | None,
        group_offset: int | Array,
        scale: Array | None,
        extras: tuple[str, ...],
        order: Array | None = None,
        each: int = 0,
    ) -> tuple[GroupedTensor, dict[str, Array]]:
        check_input(x, "x", (2,) if group_sizes is not None else (2, 3))
        if group_sizes is None and x.ndim == 2:
            group_sizes = one_group(x.shape[0])
        if group_sizes is not None:
            check_sizes(group_sizes)
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        operands = {
            "x": x,
            **options.random_operands(spec, seed, group_offset),
            **options.scale_operand(spec, scale, groups),
        }
        shape = x.shape
        if order is not None:
            operands["order"], shape = order, (order.shape[0], x.shape[1])
        results = compiled(operands, group_sizes, operand=operand or spec.role, extras=extras, each=each)
        return tensor_of(tensor_spec(shape, groups), group_sizes, results), results[0]

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
        check_out(out)
        return quantize(x, group_sizes, seed, operand, group_offset, scale, ())[0]

    def with_amax(
        x: Array,
        group_sizes: Array | None = None,
        *,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
    ) -> tuple[GroupedTensor, Array]:
        tensor, results = quantize(x, group_sizes, seed, operand, group_offset, scale, ("amax",))
        return tensor, results["amax"]

    def of_tokens(
        x: Array,
        group_sizes: Array,
        order: Array,
        position: Array,
        routed: Array,
        *,
        amax: bool = False,
        seed: int | Array | None = None,
        operand: Operand | None = None,
        group_offset: int | Array = 0,
        scale: Array | None = None,
    ) -> tuple[GroupedTensor, Array | None]:
        extras = ("amax",) if amax else ()
        each = position.shape[1]
        tensor, results = quantize(x, group_sizes, seed, operand, group_offset, scale, extras, order, each)
        return tensor, results["amax"] if amax else None

    return BoundQuantize(run, with_amax=with_amax, of_tokens=of_tokens)
