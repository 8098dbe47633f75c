"""Naming quantized arrays for `jax.checkpoint`, by their bits.

Each array has two names: its quantizer's ("quantization"), which MaxText's policies save, and one of its operand
and plane ("quantization.x.columnwise"), by which a policy may choose.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME, Direction, Operand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.functions.derivatives import refusing_derivatives
from octavo_jax.remat.always_recomputed import from_bits

_UNSIGNED: dict[int, DTypeLike] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

_codes = refusing_derivatives(
    "octavo_jax.name_bits was given floats of 8 bits and differentiated; it names their bits, which have no "
    "derivative: name what they are made of, or give it jax.lax.stop_gradient(x)"
)

NAMED_OPERANDS: dict[Operand, str] = {"x": "x", "w": "kernel"}
"""Operands as their names call them. dy has no name: nothing recomputes a backward pass."""

DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
FIELDS: dict[Direction, tuple[str, ...]] = {
    direction: (direction, f"{direction}_scale", f"{direction}_global") for direction in DIRECTIONS
}
"""The leaves of a GroupedTensor that make up one plane."""


def plane_name(operand: str, direction: Direction, name: str = DEFAULT_CHECKPOINT_NAME) -> str:
    """The name of one plane of "x" or "kernel", quantized by a quantizer that names its outputs `name`."""
    if operand not in NAMED_OPERANDS.values() or direction not in DIRECTIONS:
        raise ValueError(
            f"operand is {operand!r} and direction {direction!r}; planes of 'x' and 'kernel' have names, "
            "'rowwise' and 'columnwise' ones"
        )
    return f"{name}.{operand}.{direction}"


def name_array(x: Array, name: str) -> Array:
    """x, known to checkpoint policies as `name`; for high-precision arrays, which survive being saved as floats."""
    named: Array = checkpoint_name(x, name)  # type: ignore[no-untyped-call]
    return named


def name_bits(x: Array | np.ndarray, *names: str) -> Array:
    """x, known to checkpoint policies by each of `names`; a policy that saves several keeps one array.

    Differentiable, but for floats of 8 bits. Those are codes, whose bits are named, for `jax.checkpoint` would change
    some where it saves floats; TypeError where a derivative is taken through them.
    """
    x = jnp.asarray(x)
    if _is_float(x) and x.dtype.itemsize == 1:
        return _named_bits(_codes(x), *names)
    for name in names:
        x = name_array(x, name)
    return x


def _named_bits(x: Array, *names: str) -> Array:
    """`name_bits` of what has no derivative, of any dtype.

    `jax.checkpoint` puts saved floats through an IEEE `reduce_precision`, which turns e4m3fn values above 240 into
    NaN on XLA:CPU; so the names go to the bits, and policies that ask for no name get nothing but these bits either.
    """
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]) if _is_float(x) else x
    for name in names:
        bits = name_array(bits, name)
    return from_bits(bits, x.dtype) if _is_float(x) else bits


def _is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def name_planes(q: GroupedTensor, name: str | None) -> GroupedTensor:
    """q with every payload and scale of x or of a kernel named; None names nothing, and a quantized dy has no names.

    Each array is known as `name` and as `plane_name` says; one that both planes share carries both of those. Named or
    not, a policy that saves an array of x or of a kernel keeps its bits.
    The result must be what every later operation reads: a use of the unnamed arrays makes remat quantize again.
    """
    operand = NAMED_OPERANDS.get(q.spec.quantizer.role)
    if operand is None:
        return q
    leaves = {field: getattr(q, field) for fields in FIELDS.values() for field in fields}
    named: dict[int, Array] = {}
    for leaf in leaves.values():
        if leaf is not None and id(leaf) not in named:
            planes = _directions_of(leaf, leaves)
            named[id(leaf)] = _named_bits(leaf, *_names_of(operand, name, *planes))
    leaves_by_field = {field: None if leaf is None else named[id(leaf)] for field, leaf in leaves.items()}
    return GroupedTensor(q.spec, q.group_sizes, **leaves_by_field)


def names_of_plane(q: GroupedTensor, direction: Direction, name: str | None) -> tuple[str, ...]:
    """The names that `name_planes` gives to the codes of one plane, which has arrays of its own."""
    operand = NAMED_OPERANDS.get(q.spec.quantizer.role)
    return () if operand is None else _names_of(operand, name, direction)


def _names_of(operand: str, name: str | None, *planes: Direction) -> tuple[str, ...]:
    return () if name is None else (name, *(plane_name(operand, plane, name) for plane in planes))


def _directions_of(leaf: Array, leaves: dict[str, Array | None]) -> Iterable[Direction]:
    return [direction for direction, fields in FIELDS.items() if any(leaves[field] is leaf for field in fields)]
