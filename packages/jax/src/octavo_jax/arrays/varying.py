"""Arrays inside `jax.shard_map` with its default check_vma=True, whose types say over which mesh axes they differ.

JAX wants a scan's carry, a custom_vjp's gradients and a custom call's operands to have one such type, and a kernel that
all shards share has another one than their rows. Elsewhere, check_vma=False included, types say nothing of the kind and
every function here gives back what it was given.
"""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some array of `tree` differs, as far as types tell."""
    traced = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.core.Tracer))
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in traced))


def varying_over(tree: Any, axes: frozenset[str]) -> Any:
    """`tree` with the types of arrays that differ over `axes`, too.

    Its transpose sums cotangents over the axes that were missing: that is where a gradient of what shards share is
    reduced, once.
    """

    def cast(leaf: Any) -> Any:
        missing = axes - (jax.typeof(leaf).mat.varying if isinstance(leaf, jax.Array) else axes)
        return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def varying_alike(tree: Any) -> Any:
    """`tree` with every array of one type: what differs over an axis in one differs in all."""
    return varying_over(tree, varying_axes(tree))
