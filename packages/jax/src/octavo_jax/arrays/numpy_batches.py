"""Arrays of numpy that `jax.vmap` or `jax.grad` was given, and that JAX hands on inside its tracers as they are.

Where such a vmap is traced, custom_jvp and custom_vjp fail on them in an assertion of JAX's own ("non-canonical
constant", in 0.10), and a forward rule gets arrays without methods of JAX's; every other operation takes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def as_jax(tree: Any) -> Any:
    """`tree`, whose traced arrays of numpy are copied to JAX; everything else is left as it is."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if _holds_numpy(leaf) else leaf, tree)


def _holds_numpy(x: Any) -> bool:
    if not isinstance(x, jax.core.Tracer):
        return False
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "val", getattr(x, "primal", None))  # of a batch, or of an array that is differentiated
    return hasattr(x, "__array__") and not isinstance(x, jax.Array)
