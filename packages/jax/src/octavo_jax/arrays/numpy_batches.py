"""Arrays of numpy, which JAX hands on as they are, or in a class of its own, where no operation made another of them.

Where a `jax.vmap` that was given one is traced, custom_jvp and custom_vjp fail on it in an assertion of JAX's own
("non-canonical constant", in 0.10), and without any tracing their functions and forward rules get arrays that are no
`jax.Array`; every other operation takes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_jax(tree: Any) -> Any:
    """`tree`, whose arrays of numpy, traced or not, are copied to JAX; everything else is left as it is."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if _holds_numpy(leaf) else leaf, tree)


def _holds_numpy(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return True
    if not isinstance(x, jax.core.Tracer):
        return False
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "val", getattr(x, "primal", None))  # of a batch, or of an array that is differentiated
    return hasattr(x, "__array__") and not isinstance(x, jax.Array)
