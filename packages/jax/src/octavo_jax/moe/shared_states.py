"""Delayed scaling's states over a mesh whose data axes share them: a copy each, and maxima of what the copies recorded.

Amaxes and scales are floats of one sign, so their bits order them, and no device flushes small ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from octavo_jax.arithmetic import bits as fp32


def lent(states: Any, copies: int) -> Any:
    """Every leaf [..., G] as [copies, ..., G]. The "gradient", which is the state after the call, comes back merged."""
    return jax.tree.map(partial(_lent, copies=copies), states)


def merged(states: Any) -> Any:
    """Leaves [copies, ..., G] to their maxima [..., G]."""
    return jax.tree.map(_merged, states)


def own(states: Any) -> Any:
    """The one copy of a device, without its axis."""
    return jax.tree.map(lambda leaf: leaf[0], states)


def as_copy(states: Any) -> Any:
    """The inverse of `own`."""
    return jax.tree.map(lambda leaf: leaf[None], states)


def copy_specs(states: Any, data: tuple[str, ...], experts: tuple[str, ...]) -> Any:
    """PartitionSpecs of the result of `lent` for leaves [..., G]: copies along `data`, groups along `experts`."""
    spec: Any = PartitionSpec  # JAX leaves it untyped
    return jax.tree.map(lambda leaf: spec(data, *(None,) * (leaf.ndim - 1), experts), states)


def _largest(leaf: Array) -> Array:
    return fp32.as_float(jnp.max(fp32.as_bits(leaf), axis=0))


def _copied(leaf: Array, copies: int) -> Array:
    return jnp.broadcast_to(leaf, (copies, *leaf.shape))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _lent(leaf: Array, copies: int) -> Array:
    return _copied(leaf, copies)


_lent.defvjp(lambda leaf, copies: (_copied(leaf, copies), None), lambda _copies, _saved, later: (_largest(later),))


@jax.custom_vjp
def _merged(leaf: Array) -> Array:
    return _largest(leaf)


_merged.defvjp(lambda leaf: (_largest(leaf), len(leaf)), lambda copies, later: (_copied(later, copies),))
