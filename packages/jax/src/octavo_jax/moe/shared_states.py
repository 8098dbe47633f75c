"""Delayed scaling's states over a mesh whose devices share them, but along ep: a copy each, and maxima of what the
copies recorded.

Amaxes and scales are floats of one sign, so their bits order them, and no device flushes small ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from octavo_jax.arithmetic import bits as fp32
from octavo_jax.sharding.explicit_placement import placed


class _Copies(NamedTuple):
    """Copies of one leaf [..., G]: how many, and how they lie on the mesh.

    name   of the leaf in errors
    spec   of all copies, [copies, ..., G]
    """

    name: str
    copies: int
    mesh: Any
    spec: Any

    def of(self, leaf: Array) -> Array:
        """All of them."""
        return placed(self.mesh, self.name, jnp.broadcast_to(leaf, (self.copies, *leaf.shape)), self.spec)


def copied(states: Any, copies: int, mesh: Any, specs: Any) -> Any:
    """Every leaf [..., G] as [copies, ..., G], placed by `copy_specs`. The "gradient", which is the state after the
    call, comes back merged: the largest of each leaf."""

    def one(path: Any, leaf: Array, spec: Any) -> Any:
        name, leaf_spec = f"state{jax.tree_util.keystr(path)}", PartitionSpec(*spec[1:])  # type: ignore[no-untyped-call]
        return _copied(placed(mesh, name, leaf, leaf_spec), _Copies(name, copies, mesh, spec))

    return jax.tree.map_with_path(one, states, specs)


def largest_of_copies(states: Any, mesh: Any, specs: Any) -> Any:
    """Leaves [copies, ..., G] to their maxima [..., G]."""
    return jax.tree.map(
        lambda leaf, spec: _largest_of_copies(leaf, _Copies("state", len(leaf), mesh, spec)), states, specs
    )


def local_copy(states: Any) -> Any:
    """The one copy of a device, without its axis."""
    return jax.tree.map(lambda leaf: leaf[0], states)


def with_copy_axis(states: Any) -> Any:
    """The inverse of `local_copy`."""
    return jax.tree.map(lambda leaf: leaf[None], states)


def copy_specs(states: Any, sharing: tuple[str, ...], experts: tuple[str, ...]) -> Any:
    """PartitionSpecs of the result of `copied` for leaves [..., G]: copies along `sharing`, groups along `experts`."""
    spec: Any = PartitionSpec  # JAX leaves it untyped
    return jax.tree.map(lambda leaf: spec(sharing, *(None,) * (leaf.ndim - 1), experts), states)


def _largest(leaf: Array) -> Array:
    return fp32.as_float(jnp.max(fp32.as_bits(leaf), axis=0))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copied(leaf: Array, copies: _Copies) -> Array:
    return copies.of(leaf)


_copied.defvjp(lambda leaf, copies: (copies.of(leaf), None), lambda _copies, _saved, later: (_largest(later),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _largest_of_copies(leaf: Array, copies: _Copies) -> Array:
    return _largest(leaf)


_largest_of_copies.defvjp(
    lambda leaf, _copies: (_largest(leaf), None), lambda copies, _saved, later: (copies.of(later),)
)
