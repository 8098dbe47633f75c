"""Moments in 8 bits, in the format of octavo_numerics' `encode_blocks` and `decode_blocks`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arrays.exportable import exportable
from octavo_jax.optimizers.places import place_of, run_placed, with_whole_last_axis

BLOCK = 128
"""Consecutive elements of the last axis that share a top."""

_NOT_FINITE = np.int32(-1)
_SHIFT = 20
_LARGEST_TOP = np.int32(0x7F7)
_SIGN = 0x80


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockState:
    """A moment in 8 bits: about a quarter of its fp32 form.

    codes   uint8, the parameter's shape
    tops    int32 [..., ceil(last axis / 128)]
    signed  static: bit 7 of a code is a sign
    """

    codes: Array
    tops: Array
    signed: bool = field(metadata={"static": True})


exportable(BlockState, lambda static: bytes([bool(*static)]), lambda written: (written != b"\0",))


def put_together(part: Any, signed: bool) -> Any:
    """`part`; a BlockState where it is one's arrays by name, as which `nnx.Optimizer` and files give it back."""
    if not isinstance(part, Mapping) or set(part) != {"codes", "tops"}:
        return part
    return BlockState(part["codes"], part["tops"], signed)


def as_nnx_keeps(moments: Any, params: Any) -> Any:
    """`moments`; where `params` are a state of nnx, each BlockState as its arrays by name, in such a state.

    `nnx.Optimizer` keeps them so after its first update, and a tree that changes then is compiled again and is no carry
    of a scan.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.State):
        return moments

    def by_name(part: Any) -> Any:
        return nnx.State({"codes": part.codes, "tops": part.tops}) if isinstance(part, BlockState) else part

    return jax.tree.map(by_name, moments, is_leaf=lambda part: isinstance(part, BlockState))


def as_given(moment: Any, given: Any) -> Any:
    """`moment`, as a tree of the kind that `given`, the one before, had: optax's conditions compare the two."""
    if not isinstance(moment, BlockState) or not isinstance(given, Mapping):
        return moment
    return jax.tree.unflatten(jax.tree.structure(given), (moment.codes, moment.tops))  # by their names, in order


def zero_blocks(like: Array, signed: bool) -> BlockState:
    """The state of zeros for a parameter with one axis or more."""
    shape = (*like.shape[:-1], -(-like.shape[-1] // BLOCK))
    tops = jnp.zeros(shape, jnp.int32, out_sharding=with_whole_last_axis(place_of(like)))
    return BlockState(jnp.zeros_like(like, jnp.uint8), tops, signed)


def encode(values: Array, signed: bool, random: Array) -> BlockState:
    """fp32 `values`, rounded by the 16 `random` bits of each."""
    place = place_of(values)
    out = None if place is None else BlockState(place, with_whole_last_axis(place), signed)  # type: ignore[arg-type]
    state: BlockState = run_placed(partial(_encode, signed), out, values, random)
    return state


def _encode(signed: bool, values: Array, random: Array) -> BlockState:
    bits = fp32.as_bits(values)
    blocks = _in_blocks(bits & fp32.MAGNITUDE)
    largest = fp32.largest(blocks, axis=-1)[..., None]
    finite = fp32.is_finite(largest)
    top = jnp.minimum(((largest + np.uint32((1 << _SHIFT) - 1)) >> _SHIFT).astype(jnp.int32), _LARGEST_TOP)
    carried = ((blocks + (_in_blocks(random) << (_SHIFT - 16))) >> _SHIFT).astype(jnp.int32)
    code = jnp.minimum(carried, top) - top + (127 if signed else 255)
    code = jnp.where(finite & (blocks > 0), jnp.maximum(code, 0 if signed else 1), 0)
    code = _out_of_blocks(code, values.shape)
    if signed:
        code |= jnp.where((code > 0) & (bits >> 31 == 1), _SIGN, 0)
    tops = jnp.where(finite, top, _NOT_FINITE)[..., 0]
    return BlockState(code.astype(jnp.uint8), tops, signed)


def decode(state: BlockState) -> Array:
    """The fp32 values of codes and tops."""
    values: Array = run_placed(_decode, place_of(state.codes), state)
    return values


def _decode(state: BlockState) -> Array:
    codes = _in_blocks(state.codes.astype(jnp.int32))
    top = state.tops[..., None]
    magnitude = codes & (_SIGN - 1) if state.signed else codes
    bits = jnp.where(magnitude > 0, (magnitude - (127 if state.signed else 255) + top) << _SHIFT, 0).astype(jnp.uint32)
    if state.signed:
        bits |= (codes & _SIGN).astype(jnp.uint32) << 24
    return fp32.as_float(_out_of_blocks(jnp.where(top == _NOT_FINITE, fp32.NAN, bits), state.codes.shape))


def _in_blocks(values: Array) -> Array:
    """[..., blocks, 128] with zeros past the last column. No axis is joined with another: XLA would gather one that a
    mesh cuts."""
    *rows, columns = values.shape
    blocks = -(-columns // BLOCK)
    padded = jnp.pad(values, [(0, 0)] * len(rows) + [(0, blocks * BLOCK - columns)])
    return padded.reshape(*rows, blocks, BLOCK)


def _out_of_blocks(blocks: Array, shape: tuple[int, ...]) -> Array:
    *rows, columns = shape
    return blocks.reshape(*rows, blocks.shape[-2] * BLOCK)[..., :columns]
