"""The functions of a "quantize" request, as octavo_registry.contract.quantize has them."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.plugin_api import (
    GroupedTensor,
    check_out,
    checked_groups,
    encode_scale,
    random_key,
)
from octavo_jax_triton.arrays.planes import tensor_of
from octavo_jax_triton.launch.arguments import Target
from octavo_jax_triton.quantizers.launches import OPERANDS, planes_of
from octavo_jax_triton.quantizers.rows import Rows
from octavo_registry.contract import Quantize
from octavo_triton.layouts import turned_layout


def bind_quantize(spec: QuantizerSpec, columnwise: str, target: Target) -> Quantize[Array, GroupedTensor]:
    """What quantizes by `spec`, row codes into the plain layout and column codes into `columnwise`."""

    @lru_cache(maxsize=512)
    def tensor_spec(shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
        ragged_axis: Literal[0] | None = 0 if len(shape) == 2 else None
        plain = GroupedTensorSpec(shape=shape, groups=groups, quantizer=spec, ragged_axis=ragged_axis)
        return turned_layout(plain, columnwise)

    def octavo_quantize(
        x: Array, group_sizes: Array | None, scale: Array | None, words: Array | None, operand: int
    ) -> dict[str, Array]:
        rows = Rows.of(x, group_sizes, target)
        return planes_of(tensor_spec(x.shape, rows.groups), rows, scale, words, operand)

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = f"octavo_quantize_{spec.scaling}"
    compiled = jax.jit(octavo_quantize, static_argnames="operand")

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
        group_sizes, groups = checked_groups(x, group_sizes)
        encode = encode_scale(spec, scale, groups)
        words = _random_words(spec, seed, group_offset)
        made = compiled(x, group_sizes, encode, words, operand=OPERANDS[operand or spec.role])
        return tensor_of(tensor_spec(x.shape, groups), group_sizes, made)

    return run


def _random_words(spec: QuantizerSpec, seed: int | Array | None, group_offset: int | Array) -> Array | None:
    """uint32 [3] where rounding is stochastic: the seed's words, low first, and the number of the first group."""
    key = random_key(spec, seed, group_offset)
    return None if key is None else jnp.append(*key)
