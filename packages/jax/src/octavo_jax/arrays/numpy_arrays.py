"""Arrays of numpy, which callers may give in place of JAX's, copied to JAX before custom derivatives see them.

JAX hands such an array on as it is until an operation computes another from it. custom_jvp and custom_vjp give it to
their functions and forward rules, which then get no `jax.Array`; and where `jax.vmap` traces one, they fail in an
assertion of JAX's own ("non-canonical constant", in 0.10). Every other operation takes it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_jax(tree: Any) -> Any:
    """`tree` with its arrays of numpy, traced or not, copied to JAX; everything else is left as it is."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if _holds_numpy(leaf) else leaf, tree)


def _holds_numpy(x: Any) -> bool:
    """Whether `x` is an array of numpy, or a tracer of one."""
    if isinstance(x, np.ndarray):
        return True
    if not isinstance(x, jax.core.Tracer):
        return False
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "val", getattr(x, "primal", None))  # what vmap has batched, or what is differentiated
    return hasattr(x, "__array__") and not isinstance(x, jax.Array)
